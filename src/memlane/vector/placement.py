"""Placement: how many workers there are, which core each runs on, and how they share the cores with the caller.

The default is one worker per core, each pinned to its own: without that, the kernel now and then runs two workers on
one core and none on the other. A waiting process spins for a moment before it sleeps, unless another thread wants its
core (``Spin`` in C++ notices that). Such threads are common: those of a torch policy's thread pool (see
``helper_threads``).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlane.core.arguments import as_count
from memlane.core.cores import core_count, scheduled_ns
from memlane.vector.helper_threads import HelperThreads

_CROWDED = 0.1
"""The share of their time that workers wait for a core, from which on helper threads are lowered or a warning is
given."""
_WORTH_SAYING = 1.2
"""How many times as fast steps have to become for a remark."""


@dataclass(frozen=True)
class Placement:
    """Where the workers of a vector environment run, and why."""

    num_workers: int
    """Worker processes; 0: the caller steps the environments."""
    cores: tuple[int, ...] | None
    """The core that each worker is pinned to; None: the kernel decides."""
    spin: bool
    """Whether a worker spins for a moment before it sleeps."""
    reason: str
    """Why, in a few words."""
    lowered_threads: int = 0
    """Helper threads of the caller that give way to workers; see ``helper_threads``."""

    def __str__(self) -> str:
        if self.num_workers == 0:
            return f"no workers ({self.reason})"
        pinned = "not pinned" if self.cores is None else f"pinned to cores {', '.join(map(str, self.cores))}"
        waiting = "spinning" if self.spin else "sleeping"
        lowered = self.lowered_threads
        helpers = f"; {_count(lowered, 'helper thread')} of the caller at a lower priority" if lowered else ""
        return f"{_count(self.num_workers, 'worker')}, {pinned}, {waiting} between steps ({self.reason}){helpers}"


def choose_placement(
    num_envs: int, num_workers: int | None = None, max_concurrency: int | None = None, pin: bool | None = None
) -> Placement:
    """Decide from the arguments of a vector environment and from the cores that this process may use."""
    cores, usable = core_count(), sorted(os.sched_getaffinity(0))
    if num_workers is None:
        workers, reason = cores, f"one worker for each of {_count(cores, 'core')}"
    else:
        workers = as_count("num_workers", num_workers, 0)
        reason = f"num_workers={num_workers} on {_count(cores, 'core')}"
    if max_concurrency is not None and max_concurrency < workers:
        workers, reason = max_concurrency, f"max_concurrency={max_concurrency}"
    if num_envs < workers:
        workers, reason = num_envs, "one worker for each environment"
    if workers == 0:
        return Placement(0, None, False, reason)
    # By default only when each core gets one worker: two programs with a few workers each would otherwise pin all of
    # them to the same few cores.
    if pin if pin is not None else workers == cores == len(usable):
        return Placement(workers, tuple(usable[i % len(usable)] for i in range(workers)), workers <= cores, reason)
    return Placement(workers, None, workers <= cores, reason)


class PlacementReview:
    """Reviews 64 steps at intervals: lowers the priority of busy helper threads if workers wait for cores, and
    otherwise warns once for each faster setting.

    It compares what the steps took with what the workers spent on them, which is what they would take in one process,
    and asks the kernel how long the workers had to wait for a core.
    """

    STEPS = 64
    """Steps that a review looks at."""

    def __init__(self, placement: Placement, num_envs: int) -> None:
        self.placement = placement
        """The chosen placement, including the changes that reviews made."""
        self._num_envs = num_envs
        self._helpers = HelperThreads()
        self._remaining = 0
        self.active = False
        """Whether steps are looked at: ``begin_step`` and ``end_step`` are to be called then."""
        self._given: set[str] = set()

    def start(self, pids: Sequence[int], busy_ns: int) -> None:
        """Look at the next steps. ``busy_ns`` is the time that the workers have spent on commands."""
        self._remaining = self.STEPS
        self.active = True
        self._busy_before = busy_ns
        self._scheduled_before = _scheduled(pids)
        self._helpers.watch()
        self._step_ns = self._began = 0

    def begin_step(self) -> None:
        self._began = time.monotonic_ns()

    def end_step(self, pids: Sequence[int], busy_ns: int) -> str | None:
        """Count a step; after the last one, returns advice that was not given before."""
        if not self._began:  # the step was begun before the review
            return None
        self._step_ns += time.monotonic_ns() - self._began
        self._began = 0
        self._remaining -= 1
        if self._remaining:
            return None
        self.active = False
        ran, waited = (now - then for now, then in zip(_scheduled(pids), self._scheduled_before, strict=True))
        delay = waited / (ran + waited) if ran > 0 else 0.0
        if delay >= _CROWDED and (lowered := self._helpers.lower_busy()):
            self.placement = replace(self.placement, lowered_threads=self.placement.lowered_threads + lowered)
            return None  # the next review shows whether that was enough
        kind, advice = ("crowded", self._crowded(delay)) if delay >= _CROWDED else ("local", self._local(busy_ns))
        if advice is None or kind in self._given:
            return None
        self._given.add(kind)
        return advice

    def _crowded(self, delay: float) -> str | None:
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch is not None else 1
        cores = core_count()
        if threads < 2 or threads + self.placement.num_workers <= cores:
            return None
        return (
            f"the workers waited for a core in {delay:.0%} of their time, because torch computes with {threads} "
            f"threads on {_count(cores, 'core')}; with a small policy, torch.set_num_threads(1) makes both faster"
        )

    def _local(self, busy_ns: int) -> str | None:
        busy_us = max(busy_ns - self._busy_before, 1) / self.STEPS / 1000
        step_us = self._step_ns / self.STEPS / 1000
        if step_us < _WORTH_SAYING * busy_us:
            return None
        envs, workers = _count(self._num_envs, "environment"), _count(self.placement.num_workers, "worker")
        return (
            f"a step of {envs} takes {step_us:.0f} us in {workers}, and the environments need {busy_us:.0f} us of "
            "that: num_workers=0, which steps them in this process, would make steps about "
            f"{step_us / busy_us:.1f} times as fast"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _scheduled(pids: Sequence[int]) -> tuple[int, int]:
    """Nanoseconds that processes ran, and nanoseconds that they could have run and waited for a core."""
    ran = waited = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not count
            each = scheduled_ns(f"/proc/{pid}")
            ran, waited = ran + each[0], waited + each[1]
    return ran, waited
