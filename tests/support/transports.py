"""Collectors for the tests of the protocols and of the runner, in a process or on a thread.

Light to import, because every collector process imports it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memlane.runner.collector_process import CountedSlot
from memlane.runner.protocols import Stopped
from tests.support.payloads import checked_layout, fill

BODY = 256
SLOT: dict[str, Any] = {**checked_layout(BODY), "low": ("int64", ()), "high": ("int64", ()), "pid": ("int64", ())}
"""A payload with a checksum, the smallest and the largest of the weights that were read, and the writer's pid."""
WEIGHTS: dict[str, Any] = {"w": ("int64", (20_000,)), "b": ("int64", (3,))}


def weights_of(number: int) -> dict[str, Any]:
    return {name: np.full(shape, number, dtype) for name, (dtype, shape) in WEIGHTS.items()}


class Env:
    """The part of an environment that a runner uses. ``close`` creates the file ``mark``, if given."""

    def __init__(self, mark: Path | None = None) -> None:
        self._mark = mark

    def close(self) -> None:
        if self._mark is not None:
            self._mark.touch()


def make_env(worker: int) -> Env:  # noqa: ARG001
    return Env()


@dataclass(frozen=True)
class MarkingEnv:
    folder: Path

    def __call__(self, worker: int) -> Env:
        return Env(self.folder / f"closed-{worker}")


@dataclass(frozen=True)
class Count:
    """Fills rollouts with increasing numbers until the run ends."""

    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds per rollout, by worker."""
    steps: int = 0
    """Steps reported with each rollout."""

    def __call__(self, env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG002
        out = weights_of(-1)
        while True:
            with sink.open() as slot:
                version = weights.read(out)
                time.sleep(self.pauses.get(context.worker, 0.0))
                put(slot, context, out)
                slot.commit(policy_version=version, rows=context.rollout)
            context.report(steps=self.steps, env_ns=3, policy_ns=2)


def put(slot: Any, context: Any, out: Any) -> None:
    fill(slot, context.rollout, context.worker)
    slot["low"][...] = min(int(array.min()) for array in out.values())
    slot["high"][...] = max(int(array.max()) for array in out.values())
    slot["pid"][...] = os.getpid()


@dataclass(frozen=True)
class RecordTheEnd:
    """Counts, and writes the exception that ended it to a file."""

    folder: Path

    def __call__(self, env: Any, weights: Any, sink: Any, context: Any) -> None:
        try:
            Count()(env, weights, sink, context)
        except Stopped as end:
            (self.folder / f"ended-{context.worker}").write_text(type(end).__name__)
            raise


@dataclass(frozen=True)
class Raise:
    """One worker raises; the others count."""

    worker: int = 0

    def __call__(self, env: Any, weights: Any, sink: Any, context: Any) -> None:
        if context.worker == self.worker:
            raise_by_name()
        Count({context.worker: 0.001})(env, weights, sink, context)


def raise_by_name() -> None:
    raise ZeroDivisionError(f"broken at {time.monotonic_ns()} ns")


def moment_of(error: BaseException) -> float:
    """Return when ``raise_by_name`` raised, in seconds of the monotonic clock, which all processes share."""
    return int(str(error).split("broken at ")[1].split(" ns")[0]) / 1e9


def one_rollout(sink: Any, context: Any) -> None:
    with sink.open() as slot:
        put(slot, context, weights_of(0))
        slot.commit(rows=context.rollout)


def abandon_every_other(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    """Leave every other slot without a commit."""
    while True:
        one_rollout(sink, context)
        with sink.open() as slot:
            fill(slot, -1)


def commit_twice(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    """Commit the first slot twice. The number of the second rollout is 1 if that raised, else 0."""
    with sink.open() as slot:
        fill(slot, 0)
        slot.commit()
        try:
            slot.commit()
            outcome = 0
        except Exception:
            outcome = 1
    while True:
        with sink.open() as slot:
            fill(slot, outcome)
            slot.commit()


def sleep_through_it(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    """Commit one rollout, then sleep without looking at the stop signal."""
    one_rollout(sink, context)
    time.sleep(60)


def return_early(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------- deaths


@dataclass(frozen=True)
class Die:
    """Kills the processes of some workers in their rollout number ``at``, counted per incarnation."""

    workers: tuple[int, ...] = (0,)
    at: int = 1
    incarnations: int = 1_000_000
    """Later incarnations are not killed."""

    def __call__(self, env: Any, weights: Any, sink: Any, context: Any) -> None:
        if context.worker in self.workers and context.incarnation < self.incarnations:
            for _ in range(self.at):
                with sink.open() as slot:
                    out = weights_of(-1)
                    version = weights.read(out)
                    put(slot, context, out)
                    slot.commit(policy_version=version, rows=context.rollout)
            sink.open()
            os.kill(os.getpid(), signal.SIGKILL)
        Count({context.worker: 0.001})(env, weights, sink, context)


class _Trap:
    """Replaces the counters of a slot: the process is killed when it is about to count."""

    def __getitem__(self, _: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def __setitem__(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def die_between_commit_and_count(env: Any, weights: Any, sink: Any, context: Any) -> None:
    """Kill the first incarnation after its rollout is in the ring and before it is counted."""
    if context.incarnation == 0:
        out = weights_of(-1)
        slot = sink.open()
        assert isinstance(slot, CountedSlot)
        version = weights.read(out)
        put(slot, context, out)
        slot._counters = _Trap()  # type: ignore[assignment]
        slot.commit(policy_version=version, rows=context.rollout)
    Count()(env, weights, sink, context)
