"""Protocols: what a collector and a learner know of each other. Neither knows locks, segments, processes or machines.

A collector is ``collect(env, weights, sink, context)``: it reads weights, steps environments and fills slots, until the
sink says ``Stopped``. A learner takes slots from a source, and publishes weights. ``collectors.py`` has these over
shared memory, ``in_process.py`` within one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from memlane.core import MemlaneError


class Stopped(MemlaneError):
    """The run ends: a collector that waits is to go home. Not an error of anybody's."""


class Slot(Protocol):
    """The arrays of a rollout by name: a ``Mapping``."""

    def __getitem__(self, name: str) -> NDArray[Any]: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class OpenSlot(Slot, Protocol):
    """A rollout that is being filled. Left without ``commit``, it never was."""

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None: ...


class TakenSlot(Slot, Protocol):
    """A rollout that is being read, with what its collector said of it."""

    @property
    def policy_version(self) -> int: ...
    @property
    def writer(self) -> int: ...
    @property
    def rows(self) -> int: ...
    def release(self) -> None: ...


class RolloutSink(Protocol):
    def open(self) -> OpenSlot:
        """A slot to fill. Waits while the learner wants no more; ``Stopped`` when it never will."""


class RolloutSource(Protocol):
    def take(self, timeout: float | None = None) -> TakenSlot:
        """The oldest rollout that nobody has taken; ``WaitTimeout`` if none comes in time."""


class Transport(RolloutSource, Protocol):
    """What a learner needs of its collectors: wherever they are."""

    def start(self) -> None: ...
    def owes(self, version: int) -> bool:
        """Whether a rollout that was begun with this version or an older one is still to come."""

    def pay_back(self) -> None:
        """What was learned from the rollouts taken so far is published: as many new ones may begin."""

    def check(self) -> None:
        """Replace the dead; raise what a collector raised."""

    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class WeightSubscriber(Protocol):
    def read(self, out: Mapping[str, Any]) -> int:
        """Copy the latest version into ``out``; its number. 0: there is none yet, and nothing was copied."""


class CollectorContext(Protocol):
    """Who a collector is, and how it tells what it does."""

    @property
    def worker(self) -> int: ...
    @property
    def incarnation(self) -> int:
        """0 for the first; a collector that took a dead one's place has the next number."""

    @property
    def rollout(self) -> int:
        """How many rollouts this worker has committed, those of earlier incarnations included."""

    def tell(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        """What was done since the last call."""


Collect = Callable[[Any, WeightSubscriber, RolloutSink, CollectorContext], None]


@dataclass(frozen=True)
class CollectorLost:
    """A collector's process is gone."""

    worker: int
    incarnation: int
    pid: int
    cause: str
    replaced: bool
    """Whether another one takes its place."""


@dataclass(frozen=True)
class CollectorJoined:
    """A collector's process has been started."""

    worker: int
    incarnation: int
    pid: int


Event = CollectorLost | CollectorJoined
