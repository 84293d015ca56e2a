"""Stats: counts, means and variances of a stream of vectors that several collectors see parts of.

Each collector counts in memory of its own, so none waits for another; ``merged`` is what one counter of all vectors
together would have found, whatever the order (Chan, Golub and LeVeque's parallel form of Welford's method).

    >>> import numpy as np
    >>> with Stats(shape=2) as stats:
    ...     collector = stats.collector()
    ...     collector.add([[1.0, 10.0], [3.0, 30.0]])
    ...     moments = stats.merged()
    ...     print(moments.count, moments.mean, moments.variance)
    2.0 [ 2. 20.] [  1. 100.]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane import _native
from memlane.core import Layout
from memlane.core.lowlevel import Roster
from memlane.lanes.lane import Lane
from memlane.lanes.tensors import TensorParts

_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Moments:
    """How many vectors, their mean, and the sum of squared distances from it. Two of them add up to those of both."""

    count: float
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, vectors: NDArray[np.float64]) -> Moments:
        """The moments of the rows of ``vectors``."""
        count = float(len(vectors))
        mean = vectors.mean(axis=0) if count else np.zeros(vectors.shape[1:])
        return cls(count, mean, ((vectors - mean) ** 2).sum(axis=0))

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @property
    def variance(self) -> NDArray[np.float64]:
        """Of the vectors themselves (divided by the count); zero before the first."""
        return self.squares / max(self.count, 1.0)

    @property
    def std(self) -> NDArray[np.float64]:
        return np.sqrt(self.variance)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        share, distance = other.count / count, other.mean - self.mean
        squares = self.squares + other.squares + distance**2 * (self.count * share)
        return Moments(count, self.mean + distance * share, squares)


def _record(shape: int | Iterable[int]) -> Layout:
    extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    return Layout({"count": ("float64", ()), "mean": ("float64", extents), "squares": ("float64", extents)})


class Stats(Lane):
    """Room for ``places`` collectors that count vectors of ``shape``."""

    def __init__(self, shape: int | Iterable[int], *, places: int = 64, name: str | None = None) -> None:
        record = _record(shape)
        self._create(record, self._expected_layout(record, [places]), name, [places])

    @classmethod
    def segment_layout(cls, shape: int | Iterable[int], places: int = 64) -> Layout:
        """What the statistics take from the machine, before they are made."""
        return cls._expected_layout(_record(shape), [places])

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        (places,) = settings
        if places < 1:
            raise ValueError(f"places must be 1 or more, found {places}")
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
        self._roster = Roster(self.segment.words("roster"))
        self._places = [
            _native.Weights(
                mapping,
                base + control.offset + place * control.dtype.itemsize,
                base + buffers.offset + place * _BUFFERS * buffers.dtype.itemsize,
                _BUFFERS,
                buffers.dtype.itemsize,
                f"place {place} of the stats of {self.segment.label}",
            )
            for place in range(settings[0])
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout["mean"].shape

    def collector(self) -> StatsCollector:
        """The role that counts. It takes a place; where a collector died, the next one goes on counting from there."""
        return StatsCollector(self, self._roster.join())

    def merged(self) -> Moments:
        """What all collectors have seen, the dead ones too."""
        return sum(map(self.at, range(len(self._places))), Moments.none(self.shape))

    def at(self, place: int) -> Moments:
        """What the collectors at one place have seen."""
        record = {field.name: np.zeros(field.shape, field.dtype) for field in self.layout}
        self._places[place].read(TensorParts(self.layout, record, "record", writeable=True))
        return Moments(float(record["count"]), record["mean"], record["squares"])

    def put(self, place: int, moments: Moments) -> None:
        record = {"count": np.array(moments.count), "mean": moments.mean, "squares": moments.squares}
        parts = TensorParts(self.layout, record, "record", writeable=False)
        parts.before_publish()  # moments of plain numbers are numpy scalars, which have no address of their own
        self._places[place].publish(parts)

    def leave(self, place: int) -> None:
        self._roster.leave(place)


class StatsCollector:
    """Counts what one collector sees."""

    def __init__(self, stats: Stats, place: int) -> None:
        self._stats = stats
        self.place = place
        self.moments = stats.at(place)

    def add(self, vectors: ArrayLike) -> None:
        """Count a batch: the shape of one vector after any number of leading dimensions."""
        batch = np.asarray(vectors, np.float64)
        shape = self._stats.shape
        if batch.ndim < len(shape) or batch.shape[batch.ndim - len(shape) :] != shape:
            raise ValueError(f"vectors must have shape [..., {str(list(shape))[1:]}, found {list(batch.shape)}")
        self.moments = self.moments + Moments.of(batch.reshape(-1, *shape))
        self._stats.put(self.place, self.moments)

    def close(self) -> None:
        """Give the place to the next collector. What was counted stays."""
        self._stats.leave(self.place)
