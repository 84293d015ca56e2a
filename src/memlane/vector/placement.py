"""Placement: how many workers there are, which core each runs on, and how they share the cores with the caller.

The default is one worker per core, each pinned to its own: without that, the kernel now and then runs two workers on
one core and none on the other. A waiting process spins for a moment before it sleeps, unless another thread wants its
core (``Spin`` in C++ notices that), and workers ask the kernel for short time slices, so that a worker whose actions
have come gets its core from a thread that only spins. Such threads are common: the thread pool of a torch policy spins
for milliseconds after each operation.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memlane.core.cores import core_count

SLICE_NS = 1_000_000
"""The time slice that workers ask for: shorter than the default of Linux, 2.8 ms on four cores and more; longer than
most steps, so that a worker keeps its core until it is done."""
_CROWDED = 0.1
"""The share of their time that workers wait for a core, from which on the user is told."""


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

    def __str__(self) -> str:
        if self.num_workers == 0:
            return f"no workers ({self.reason})"
        pinned = "not pinned" if self.cores is None else f"pinned to cores {', '.join(map(str, self.cores))}"
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"{workers}, {pinned}, {'spinning' if self.spin else 'sleeping'} between steps ({self.reason})"


def choose_placement(
    num_envs: int, num_workers: int | None = None, max_concurrency: int | None = None, pin: bool | None = None
) -> Placement:
    """Decide from the arguments of a vector environment and from the cores that this process may use."""
    cores, usable = core_count(), sorted(os.sched_getaffinity(0))
    if num_workers is None:
        workers, reason = cores, f"one worker for each of {cores} cores"
    elif num_workers < 0:
        raise ValueError(
            f"num_workers must be 0 (the caller steps the environments), 1 or more, or None, found {num_workers}"
        )
    else:
        workers, reason = num_workers, f"num_workers={num_workers} on {cores} cores"
    workers = min(workers, num_envs, max_concurrency or num_envs)
    if workers == 0:
        return Placement(0, None, False, reason)
    # By default only when each core gets one worker: two programs with a few workers each would otherwise pin all of
    # them to the same few cores.
    if pin if pin is not None else workers == cores == len(usable):
        return Placement(workers, tuple(usable[i % len(usable)] for i in range(workers)), workers <= cores, reason)
    return Placement(workers, None, workers <= cores, reason)


class RunDelay:
    """How long processes have waited for a core while they could run, as a share of the time that they used one."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._before = _scheduled(pids)

    def share(self, pids: Sequence[int]) -> float:
        """The share since the last call."""
        ran_before, waited_before = self._before
        ran, waited = self._before = _scheduled(pids)
        total = ran - ran_before + waited - waited_before
        return (waited - waited_before) / total if total > 0 and ran >= ran_before else 0.0


def _scheduled(pids: Sequence[int]) -> tuple[int, int]:
    """Nanoseconds that processes ran, and nanoseconds that they waited for a core."""
    ran = waited = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not count
            values = Path(f"/proc/{pid}/schedstat").read_text().split()
            ran, waited = ran + int(values[0]), waited + int(values[1])
    return ran, waited


def advice(share: float, cores: int) -> str | None:
    """One sentence for a user whose workers wait for cores; None if there is nothing to say."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 1
    if share < _CROWDED or threads < 2 or threads + cores <= (os.cpu_count() or 1):
        return None
    return (
        f"the workers waited for a core in {share:.0%} of their time, because torch computes with {threads} threads on "
        f"{cores} cores; torch.set_num_threads(1) makes small policies and the environments faster"
    )
