"""Stats: the running count, mean and variance of vectors that several collectors observe.

Moments are merged with the parallel form of Welford's method (Chan, Golub and LeVeque): the order does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane import _native
from memlane.core import BudgetError, Layout
from memlane.core.arguments import as_count
from memlane.core.fork_guard import ForkGuard
from memlane.core.lowlevel import Roster
from memlane.core.tensor_memory import require_memory
from memlane.lanes.lane import Lane, require_settings
from memlane.lanes.tensors import TensorParts

_BUFFERS = 3
MAX_PLACES = 1 << 16
"""The largest number of collectors: more than a machine runs, and each place costs every process a handle."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of vectors. ``a + b`` are the moments of both sets."""

    count: float
    """Number of vectors."""
    mean: NDArray[np.float64]
    """Mean of the vectors."""
    squares: NDArray[np.float64]
    """Sum of squared deviations from the mean."""

    @classmethod
    def of(cls, vectors: NDArray[np.float64]) -> Moments:
        """Return the moments of the rows of ``vectors``."""
        count = float(len(vectors))
        mean = vectors.mean(axis=0) if count else np.zeros(vectors.shape[1:])
        return cls(count, mean, ((vectors - mean) ** 2).sum(axis=0))

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """Return the moments of no vectors."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @property
    def variance(self) -> NDArray[np.float64]:
        """Population variance (divided by the count); zero before the first vector."""
        return self.squares / max(self.count, 1.0)

    @property
    def std(self) -> NDArray[np.float64]:
        """Square root of ``variance``."""
        return np.sqrt(self.variance)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        share, distance = other.count / count, other.mean - self.mean
        squares = self.squares + other.squares + distance**2 * (self.count * share)
        return Moments(count, self.mean + distance * share, squares)


def _record(shape: int | Iterable[int]) -> Layout:
    extents = tuple(
        as_count("each extent of shape", extent, 0) for extent in (shape if isinstance(shape, Iterable) else (shape,))
    )
    return Layout({"count": ("float64", ()), "mean": ("float64", extents), "squares": ("float64", extents)})


class Stats(Lane):
    """Running count, mean and variance of vectors of ``shape``, merged over up to ``places`` collectors.

    Each collector writes to its own entry, so collectors never wait for each other; ``places`` is the number of
    entries. Any process that has the object may call ``collector`` and ``merged`` at any time. Pass the object as a
    ``Process`` argument, or create it with ``name`` and call ``Stats.attach(name)``.

        >>> with Stats(shape=2) as stats:
        ...     collector = stats.collector()
        ...     collector.add([[1.0, 10.0], [3.0, 30.0]])
        ...     moments = stats.merged()
        ...     print(moments.count, moments.mean, moments.variance)
        2.0 [ 2. 20.] [  1. 100.]

    When a collector dies, its counts stay in ``merged``, and a later collector takes over its entry and adds to them.
    When a process that reads dies, nothing changes for the others.
    """

    def __init__(self, shape: int | Iterable[int], *, places: int = 64, name: str | None = None) -> None:
        record = _record(shape)
        self._create(record, self._expected_layout(record, [places]), name, [places])

    @classmethod
    def segment_layout(cls, shape: int | Iterable[int], places: int = 64) -> Layout:
        """Return the layout of the statistics' segment without creating it, for a ``MemoryBudget``."""
        return cls._expected_layout(_record(shape), [places])

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        require_settings(settings, 1)
        if difference := _record(layout["mean"].shape).difference(layout):
            raise ValueError(difference)
        places = as_count("places", settings[0], 1)
        if places > MAX_PLACES:
            raise BudgetError(
                f"places must be at most {MAX_PLACES}, found {places}; it is the number of collectors at the same time"
            )
        return Layout(
            {
                **cls._describe(layout, 1),
                "roster": ("int64", places),
                "control": (f"V{_native.WEIGHTS_CONTROL_BYTES}", places),
                "buffers": (f"V{layout.nbytes}", (places, _BUFFERS)),
            }
        )

    def _bind(self, settings: list[int]) -> None:
        control, buffers = self.segment.layout["control"], self.segment.layout["buffers"]
        mapping, base = self.segment.window(0, self.segment.layout.nbytes, writeable=True)
        self._roster = Roster(
            self.segment, "roster", "create the stats with a larger places=", f"the stats of {self.segment.label}"
        )
        self._places = [
            _native.Weights(
                mapping,
                base + control.offset + place * control.dtype.itemsize,
                base + buffers.offset + place * _BUFFERS * buffers.dtype.itemsize,
                _BUFFERS,
                buffers.dtype.itemsize,
                f"entry {place} of the stats of {self.segment.label}",
                if_full="let only the collector of this entry write to it; if no other does, a process has overwritten "
                "its memory: close it in all processes and create another",
                if_overtaken="count more vectors in each call of add",
            )
            for place in range(settings[0])
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one vector."""
        return self.layout["mean"].shape

    def collector(self) -> StatsCollector:
        """Return a handle that counts vectors, with a free entry or that of a dead collector, whose counts it keeps."""
        return StatsCollector(self, self._roster.join())

    def merged(self) -> Moments:
        """Return the moments of all vectors that any collector has counted, dead collectors included."""
        return sum(map(self.at, range(len(self._places))), Moments.none(self.shape))

    def at(self, place: int) -> Moments:
        """Return the moments of the vectors counted in entry ``place``."""
        if not 0 <= place < len(self._places):
            raise IndexError(f"place must be from 0 to {len(self._places) - 1}, found {place}")
        record = {field.name: np.zeros(field.shape, field.dtype) for field in self.layout}
        self._places[place].read(TensorParts(self.layout, record, "record", writeable=True))
        return Moments(float(record["count"]), record["mean"], record["squares"])

    def put(self, place: int, moments: Moments) -> None:
        """Set the moments of entry ``place``. Only the collector that holds the entry may call it."""
        record = {"count": np.array(moments.count), "mean": moments.mean, "squares": moments.squares}
        parts = TensorParts(self.layout, record, "record", writeable=False)
        parts.before_publish()  # moments of scalars are numpy scalars, which need a staging copy
        self._places[place].publish(parts)

    def leave(self, place: int) -> None:
        """Free entry ``place``, which this process must hold."""
        self._roster.leave(place)


class StatsCollector:
    """A collector's handle on ``Stats``; ``Stats.collector()`` creates it.

    Threads may share it: each vector is counted once.

    In a forked child of its process, ``add`` raises ``UsedAfterFork`` and ``close`` does nothing.
    """

    def __init__(self, stats: Stats, place: int) -> None:
        self._guard = ForkGuard(
            f"a collector of the stats of {stats.segment.label}", "call collector() of the stats in this process"
        )
        self._stats = stats
        self.place = place
        # From the moments before to those after: otherwise one of two threads would publish without the vectors of the
        # other.
        # RLock, because a signal handler may count too. A forked child may get it locked for ever, but never takes it:
        # the guard comes first.
        self._lock = threading.RLock()
        self.moments = stats.at(place)

    def add(self, vectors: ArrayLike) -> None:
        """Count a batch of vectors: any number of leading dimensions before the shape of one vector."""
        self._guard.require()
        if type(vectors) is not np.ndarray:
            require_memory("vectors", vectors)
        batch = np.asarray(vectors, np.float64)
        shape = self._stats.shape
        if batch.ndim < len(shape) or batch.shape[batch.ndim - len(shape) :] != shape:
            raise ValueError(
                f"vectors must have shape [{', '.join(['...', *map(str, shape)])}], found {list(batch.shape)}"
            )
        counted = Moments.of(batch.reshape(-1, *shape))
        with self._lock:
            moments = self.moments + counted
            self._stats.put(self.place, moments)
            self.moments = moments

    def close(self) -> None:
        """Free the entry for another collector. The counts stay in ``merged``."""
        self._stats.leave(self.place)
