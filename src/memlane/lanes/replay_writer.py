"""ReplayWriter: add transitions to a replay."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane.core import MemlaneError, Peer
from memlane.core.suggestions import did_you_mean
from memlane.core.tensor_memory import require_memory
from memlane.lanes.tensors import array_of

if TYPE_CHECKING:
    from memlane.lanes.replay import Replay

EPISODE_ENDS = ("terminated", "truncated")
"""Fields that mark the last transition of an episode."""


class ReplayWriter:
    """A writer's handle on a replay; ``Replay.writer()`` creates it.

    Any number of writers, in any process. Each stream has one writer at a time. Threads may share a writer of a replay
    without streams.
    """

    def __init__(self, replay: Replay, streams: Iterable[int] | None, *, resume: bool) -> None:
        self._replay = replay
        self._add = replay.native.add
        self._add_plain = replay.native.add_plain
        self.streams: NDArray[np.int64] | None = None
        if replay.streams:
            self.streams = np.array(
                range(replay.streams) if streams is None else [_stream(stream) for stream in streams], np.int64
            )
            outside = self.streams[(self.streams < 0) | (self.streams >= replay.streams)]
            if outside.size or len(set(self.streams.tolist())) != len(self.streams):
                raise ValueError(
                    f"streams must be different numbers from 0 to {replay.streams - 1}, found {self.streams.tolist()}"
                )
            if not resume:
                self.cut()
        elif streams is not None:
            raise ValueError(f"the {replay.native.label} has no streams; create it with streams={len(list(streams))}")

    def cut(self, rows: ArrayLike | None = None) -> None:
        """Make the next row of each stream start a new episode, as after an environment was restarted.

        ``rows`` are positions among this writer's streams (default: all). The row before the cut has no next
        observation and is not sampled.
        """
        if self.streams is None:
            raise MemlaneError(f"the {self._replay.native.label} has no streams, so there is nothing to cut")
        streams = self.streams if rows is None else self._streams_at(rows, "rows")
        for stream in streams.tolist():
            self._replay.stream_ends.store(stream, 0)

    def _streams_at(self, positions: ArrayLike, label: str) -> NDArray[np.int64]:
        assert self.streams is not None
        at = np.atleast_1d(np.asarray(positions))
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise TypeError(
                f"{label} must be integers, positions among the {len(self.streams)} streams of this writer, found "
                f"{at.dtype} {at.tolist()}"
            )
        if at.size and (at.min() < 0 or at.max() >= len(self.streams)):
            raise IndexError(
                f"{label} must be positions from 0 to {len(self.streams) - 1} among this writer's streams, found "
                f"{at.tolist()}"
            )
        return np.ascontiguousarray(self.streams[at.astype(np.int64)])

    def add(
        self,
        rows: Mapping[str, ArrayLike],
        *,
        final: Mapping[str, ArrayLike] | None = None,
        env_ids: ArrayLike | None = None,
        skip: ArrayLike | None = None,
        version: int = 0,
        timeout: float | None = None,
        peers: Iterable[Peer] = (),
    ) -> int:
        """Add one transition, or one per row of the arrays, and return the number of transitions added.

        ``rows`` has one array per field of the layout. In a replay with streams it has one row per stream of this
        writer, or one per position in ``env_ids``. ``final`` has the observation after the last transition of an
        episode, in arrays with as many rows; only rows that are terminated or truncated are read, and truncated rows
        must have one. ``skip`` marks rows that are not transitions (the step in which a vector environment resets).
        ``version`` is that of the policy that acted; it is stored only in a replay with streams.

        Everything is checked before anything is written. Waits while the replay's limiter blocks writers: at most
        ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).
        """
        streams = self.streams
        if streams is None:
            if final is not None or env_ids is not None:
                raise ValueError(
                    f"final and env_ids need streams, but the {self._replay.native.label} has none; create it with "
                    "streams=..., the number of environments"
                )
            if skip is None:
                added = self._add_plain(rows, timeout)
                if added >= 0:
                    return added
        elif env_ids is not None:
            streams = self._streams_at(env_ids, "env_ids")
        skipped = None if skip is None else _mask(skip, "skip")
        if not isinstance(rows, Mapping):
            raise TypeError(f"rows must be a dict with the fields {list(self._replay.layout.fields)}, found {rows!r}")
        ends: NDArray[np.bool_] | None = None
        if streams is not None:
            ends = self._ends(rows, final, skipped, len(streams))
        skip_bytes = None if skipped is None else skipped.view(np.uint8)
        end_bytes = ends.view(np.uint8) if ends is not None else None
        final = final or None
        added = self._add(rows, version, streams, skip_bytes, final, end_bytes, timeout, peers)
        if added < 0:  # the native code takes only arrays of the exact dtype and shape: convert, or say what is wrong
            converted = self._converted(
                rows,
                list(self._replay.layout.fields),
                "rows",
                None if streams is None else len(streams),
                None if skipped is None else ~skipped,
            )
            count = len(next(iter(converted.values())))
            used = np.zeros(count, bool) if ends is None else ends
            last = None if final is None else self._converted(final, self._replay.observations, "final", count, used)
            self._check_counts(count, skipped, ends)
            added = self._add(converted, version, streams, skip_bytes, last, end_bytes, timeout, peers)
            if added < 0:
                raise MemlaneError(
                    f"the {self._replay.native.label} refused these rows for an unknown reason; please report this"
                )
        return added

    def add_all(self, rows: Mapping[str, ArrayLike]) -> int:
        """Like ``add`` to a replay without streams, also of more rows than its capacity: the newest stay.

        All rows are added and counted, in batches of the capacity; the older ones are overwritten at once.
        """
        capacity = self._replay.capacity
        if len(np.atleast_1d(next(iter(rows.values()), ()))) <= capacity:
            return self.add(rows)
        # All rows are checked before the first is written.
        checked = self._converted(rows, list(self._replay.layout.fields), "rows", None, None)
        count = len(next(iter(checked.values())))
        batches = (slice(first, first + capacity) for first in range(0, count, capacity))
        return sum(self.add({name: array[batch] for name, array in checked.items()}) for batch in batches)

    def _ends(
        self,
        rows: Mapping[str, ArrayLike],
        final: Mapping[str, ArrayLike] | None,
        skipped: NDArray[np.bool_] | None,
        count: int,
    ) -> NDArray[np.bool_] | None:
        """Return which rows have a final observation; None if none has."""
        terminated, truncated = (_mask(rows.get(name, False), name) for name in EPISODE_ENDS)
        for name, mask in zip(EPISODE_ENDS, (terminated, truncated), strict=True):
            if len(mask) != count and name in rows:
                raise ValueError(f"{name!r} must have {count} rows, found {len(mask)}")
        ends = terminated | truncated
        if skipped is not None and skipped.shape == ends.shape:
            ends = ends & ~skipped
            truncated = truncated & ~skipped
        if not self._replay.observations and not final:
            return None
        if final is None:
            if truncated.any():
                raise ValueError(
                    f"row {int(truncated.argmax())} is truncated: its value is bootstrapped from the observation after "
                    f"it, so final={{{', '.join(map(repr, self._replay.observations))}: ...}} must be given"
                )
            return None
        if final.keys() != set(self._replay.observations):
            raise ValueError(_field_mismatch("final", self._replay.observations, final))
        if ends.shape != (count,):
            raise ValueError(f"terminated and truncated must have {count} rows, found shape {list(ends.shape)}")
        return np.ascontiguousarray(ends) if ends.any() else None

    def _converted(
        self,
        arrays: Mapping[str, ArrayLike],
        names: list[str],
        role: str,
        count: int | None,
        used: NDArray[np.bool_] | None,
    ) -> dict[str, NDArray[Any]]:
        """Return ``arrays`` with the dtypes and shapes of the layout, or raise an error that names the field.

        ``used`` marks the rows that will be stored: values of other rows may be out of range.
        """
        if arrays.keys() != set(names):
            raise ValueError(_field_mismatch(role, names, arrays))
        converted: dict[str, NDArray[Any]] = {}
        for name in names:
            field = self._replay.layout[name]
            require_memory(f"{role}[{name!r}]", arrays[name])
            array = array_of(arrays[name])
            if array.shape == field.shape and (count is None or count == 1):
                array = array[None]
            if array.shape[1:] != field.shape or array.ndim != len(field.shape) + 1:
                raise ValueError(
                    f"{role}[{name!r}] must have shape [{', '.join(['rows', *map(str, field.shape)])}] or "
                    f"{list(field.shape)}, found {list(array.shape)}"
                )
            if count is None:
                count = len(array)
            if len(array) != count:
                raise ValueError(f"{role}[{name!r}] must have {count} rows, found {len(array)}")
            cast = _cast(array, field.dtype, f"{role}[{name!r}]", used)
            converted[name] = cast if cast.dtype is self._replay.dtypes[name] else cast.view(self._replay.dtypes[name])
        return converted

    def _check_counts(self, count: int, skipped: NDArray[np.bool_] | None, ends: NDArray[np.bool_] | None) -> None:
        for mask, label in ((skipped, "skip"), (ends, "terminated and truncated")):
            if mask is not None and mask.shape != (count,):
                raise ValueError(f"{label} must have {count} rows, found shape {list(mask.shape)}")
        stored = count - int(skipped.sum() if skipped is not None else 0) + int(ends.sum() if ends is not None else 0)
        if stored > self._replay.capacity:
            raise ValueError(
                f"{stored} rows (final observations included) are more than the {self._replay.capacity} that the "
                f"{self._replay.native.label} holds; add fewer at a time, or make it larger"
            )


# ------------------------------------------------------------------------------------------------------------ checking


def _stream(stream: Any) -> int:
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(f"streams must be integers, found {stream!r}") from None


def _field_mismatch(role: str, expected: list[str], found: Mapping[str, ArrayLike]) -> str:
    unknown = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    hint = did_you_mean(unknown[0], missing) if unknown else ""
    problem = f"{_names(missing)} missing" if missing else f"{_names(unknown)} unknown"
    return f"{role} must have the fields {expected}, found {list(found)}{hint or f': {problem}'}"


def _names(names: list[str]) -> str:
    return f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"


def _mask(values: ArrayLike, label: str) -> NDArray[np.bool_]:
    array = np.atleast_1d(np.asarray(values))
    if array.dtype != np.bool_ or array.ndim != 1:
        raise TypeError(f"{label} must be one bool for each row, found {array.dtype} of shape {list(array.shape)}")
    return np.ascontiguousarray(array)


def _cast(array: NDArray[Any], dtype: np.dtype[Any], label: str, used: NDArray[np.bool_] | None) -> NDArray[Any]:
    """Return ``array`` as a contiguous array of ``dtype``; ``ValueError`` if a value in a ``used`` row does not fit."""
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"{label} must have dtype {dtype}, found {array.dtype}")
    try:
        with np.errstate(over="raise", invalid="ignore"):
            cast = array.astype(dtype)
    except FloatingPointError:
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(dtype)
        overflowed = np.isfinite(array) & ~np.isfinite(cast)
        if used is not None and len(used) == len(overflowed):
            overflowed[~used] = False
        if overflowed.any():
            raise ValueError(
                f"{label} must fit into {dtype}, found {array[overflowed][0]!s}; scale it or clip it"
            ) from None
    if integers and not np.array_equal(array, cast):
        raise ValueError(f"{label} must fit into {dtype}, found values from {array.min()} to {array.max()}")
    return np.ascontiguousarray(cast)
