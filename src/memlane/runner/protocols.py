"""Protocols: the interfaces between a collector and a learner.

A collector is a callable ``collect(env, weights, sink, context)``: it reads weights, steps environments and fills
slots with rollouts, until ``sink.open()`` raises ``Stopped``. A learner takes slots from a source and publishes
weights. Neither knows about locks, segments or processes. ``process_collectors`` implements the protocols over shared
memory, ``thread_collectors`` on threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from memlane.core import MemlaneError


class Stopped(MemlaneError):
    """The run has ended: raised by ``sink.open()`` in a collector, which should return or let it propagate."""


class Slot(Protocol):
    """The arrays of a rollout by name: a ``Mapping`` and a context manager."""

    def __getitem__(self, name: str) -> NDArray[Any]: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class OpenSlot(Slot, Protocol):
    """A rollout that a collector is filling. Leaving the ``with`` block without ``commit`` discards it."""

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        """Hand the rollout to the learner. ``policy_version`` is that of the weights used, ``rows`` its step count."""


class TakenSlot(Slot, Protocol):
    """A rollout that the learner is reading."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that collected the rollout."""

    @property
    def writer(self) -> int:
        """Number of the collector."""

    @property
    def rows(self) -> int:
        """The ``rows`` that the collector passed to ``commit``."""

    def release(self) -> None:
        """Return the slot. Its arrays must not be used afterwards."""


class RolloutSink(Protocol):
    """Where a collector puts its rollouts."""

    def open(self) -> OpenSlot:
        """Return a slot to fill. Waits for a credit from the learner; ``Stopped`` when the run has ended."""


class RolloutSource(Protocol):
    """Where a learner gets rollouts."""

    def take(self, timeout: float | None = None) -> TakenSlot:
        """Take the oldest rollout; ``WaitTimeout`` after ``timeout`` seconds."""


class Transport(RolloutSource, Protocol):
    """The collectors as the learner sees them, as processes or as threads."""

    def start(self) -> None:
        """Start the collectors."""

    def has_older_than(self, version: int) -> bool:
        """Return whether a rollout that was started with ``version`` or an older one has not been taken yet."""

    def return_credits(self) -> None:
        """Let collectors start one new rollout for each one taken since the last call."""

    def check(self) -> None:
        """Restart dead collectors, and raise the error of a collector that raised. Does not wait for a rollout."""

    def counters(self) -> dict[str, int]:
        """Return counts since the start, summed over all collectors."""

    def close(self) -> None:
        """Stop the collectors."""


class WeightSubscriber(Protocol):
    """The learner's weights as a collector reads them."""

    def read(self, out: Mapping[str, Any]) -> int:
        """Copy the latest weights into the tensors of ``out`` and return their version."""


class CollectorContext(Protocol):
    """The identity of a collector, and where it reports its progress."""

    @property
    def worker(self) -> int:
        """Number of the collector, from 0."""

    @property
    def incarnation(self) -> int:
        """Number of restarts of this worker: 0 for its first process."""

    @property
    def rollout(self) -> int:
        """Rollouts that this worker has committed, those of earlier incarnations included."""

    def report(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        """Add to the runner's counters: environment steps, and nanoseconds spent in environments and policy."""


class Collect(Protocol):
    """A collector: steps ``env`` and fills slots from ``sink`` until ``sink.open()`` raises ``Stopped``.

    ``env`` is what ``make_env(worker)`` returned. The callable is pickled with cloudpickle, so closures, lambdas and
    classes of the main script work.
    """

    def __call__(
        self, env: Any, weights: WeightSubscriber, sink: RolloutSink, context: CollectorContext, /
    ) -> None: ...


@dataclass(frozen=True)
class CollectorLost:
    """Event: the process of a collector has died."""

    worker: int
    """Number of the collector."""
    incarnation: int
    """Number of restarts of the worker before this death."""
    pid: int
    """Process id."""
    cause: str
    """How the process ended, in words."""
    replaced: bool
    """Whether a new process takes its place."""


@dataclass(frozen=True)
class CollectorJoined:
    """Event: the process of a collector has been started."""

    worker: int
    """Number of the collector."""
    incarnation: int
    """Number of restarts of the worker: 0 for its first process."""
    pid: int
    """Process id."""


Event = CollectorLost | CollectorJoined


def check_counts(collectors: int, in_flight: int) -> None:
    """Raise ``ValueError`` unless there is a collector, and a credit for each one."""
    if collectors < 1:
        raise ValueError(f"there must be at least 1 collector, found {collectors}")
    if in_flight < collectors:
        raise ValueError(f"in_flight must be at least the number of collectors, {collectors}, found {in_flight}")
