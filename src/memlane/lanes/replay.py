"""Replay: transitions of any layout that several processes add and several others draw, at the same time.

A row packs all fields of a transition side by side; new rows overwrite the oldest. No row is ever seen half written,
and no writer waits for another, whoever is killed; ``native/src/replay.hpp`` says how.

Rows of one environment can be linked as a *stream*. Then every observation is stored once: the next observation, n-step
returns, stacked frames and sequences are put together when a row is drawn, and never across an episode's end.

    >>> import numpy as np
    >>> row = {"obs": ("float32", 3), "action": ("int64", ()), "reward": ("float32", ()),
    ...        "terminated": (bool, ()), "truncated": (bool, ())}
    >>> replay = Replay(row, capacity=100, streams=1, observations=["obs"])
    >>> writer = replay.writer()
    >>> for step in range(5):
    ...     last = step == 4
    ...     _ = writer.add({"obs": np.full(3, step, "f4"), "action": step, "reward": 1.0, "terminated": False,
    ...                     "truncated": last}, final={"obs": np.full(3, 5, "f4")} if last else None)
    >>> batch = replay.sampler(seed=0, n_step=3, gamma=0.5).sample(64)
    >>> bool((batch["next_obs"][:, 0] == np.minimum(batch["obs"][:, 0] + 3, 5)).all())
    True
    >>> sorted(set(batch["reward"].tolist()))
    [1.0, 1.5, 1.75]
    >>> replay.close()
"""

from __future__ import annotations

import math
import operator
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane import _native
from memlane.core import Layout, LayoutError, MemlaneError, Peer, Segment, SegmentError
from memlane.core.layout import FieldSpec
from memlane.core.lowlevel import Roster
from memlane.lanes.batch import packed
from memlane.lanes.lane import Lane, as_layout

if TYPE_CHECKING:
    from memlane.lanes.sampler import ReplaySampler

TRANSITION = ("reward", "terminated", "truncated")
"""The fields that rows of a stream must have: what n-step returns and the ends of episodes are read from."""

MOST_SAMPLERS = 16
# A row that begins on a cache line touches fewer of them, if that does not cost more memory than this share.
_WASTE = 1 / 8


@dataclass(frozen=True)
class Limiter:
    """Holds back whoever is ahead, so that there are ``ratio`` samples for each transition added.

    Nothing is drawn before ``min_size`` transitions are stored; from there on neither side may be more than
    ``error_buffer`` samples ahead of the other. Large enough for both is half of (rows of an ``add`` x ratio + rows of
    a batch); the default leaves some room beyond ``min_size``.
    """

    ratio: float
    min_size: int = 1
    error_buffer: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"ratio must be a number of samples per transition, above 0, found {self.ratio!r}")
        if operator.index(self.min_size) < 1:
            raise ValueError(f"min_size must be 1 or more, found {self.min_size!r}")
        if self.error_buffer is not None and not (math.isfinite(self.error_buffer) and self.error_buffer > 0):
            raise ValueError(f"error_buffer must be above 0, found {self.error_buffer!r}")

    @property
    def slack(self) -> float:
        return float(self.error_buffer if self.error_buffer is not None else self.ratio * max(self.min_size, 1000))


class Replay(Lane):
    """A replay in a segment of its own: anonymous, under ``name`` for unrelated processes, or in a ``file`` that
    outlives them all.

    ``streams`` is how many environments add to it, all writers together; their rows need the fields ``reward``,
    ``terminated`` and ``truncated``, and ``observations`` names the fields that a batch also has as ``next_...``.
    Without streams, rows stand for themselves. With ``alpha`` rows are drawn by priority to that power.
    """

    def __init__(
        self,
        row: Layout | Mapping[str, FieldSpec],
        capacity: int,
        *,
        streams: int = 0,
        observations: Sequence[str] = (),
        alpha: float | None = None,
        limiter: Limiter | None = None,
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        layout = as_layout(row)
        settings = _Settings(capacity, streams, list(observations), alpha, limiter).numbers(layout)
        self._create(layout, self._expected_layout(layout, settings), name, settings, file)

    @classmethod
    def segment_layout(
        cls, row: Layout | Mapping[str, FieldSpec], capacity: int, *, streams: int = 0, alpha: float | None = None
    ) -> Layout:
        """What a replay takes from the machine, before it is made."""
        layout = as_layout(row)
        return cls._expected_layout(layout, _Settings(capacity, streams, [], alpha, None).numbers(layout))

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        given = _Settings.of(layout, settings)
        return Layout(
            {
                **cls._describe(layout, len(settings)),
                "control": (f"V{_native.REPLAY_CONTROL_BYTES}", ()),
                "streams": ("int64", given.streams),
                "samplers": ("int64", MOST_SAMPLERS),
                "dice": ("uint64", (MOST_SAMPLERS, 8)),
                "tree": ("uint8", _native.sum_tree_bytes(given.capacity) if given.alpha is not None else 0),
                "rows": ("uint8", (given.capacity, _stride(layout, bool(given.streams)))),
            }
        )

    def _bind(self, settings: list[int]) -> None:
        given = _Settings.of(self.layout, settings)
        self.capacity, self.streams, self.observations = given.capacity, given.streams, given.observations
        self.alpha, self.limiter = given.alpha, given.limiter
        self.row_dtype = packed(self.layout)
        # numpy has one object for each of its own dtypes; the native side compares no more than that.
        self.dtypes = {
            field.name: np.dtype(field.dtype.str) if field.dtype.isbuiltin else field.dtype for field in self.layout
        }
        names = list(self.layout.fields)
        segment = self.segment.layout
        mapping, base = self.segment.window(0, segment.nbytes, writeable=True)
        reward, *ends = [names.index(name) if name in names else 0 for name in TRANSITION]
        self.native = _native.Replay(
            mapping,
            base + segment["control"].offset,
            base + segment["rows"].offset,
            base + segment["tree"].offset if self.alpha is not None else None,
            base + segment["streams"].offset,
            self.streams,
            self.capacity,
            segment["rows"].shape[1],
            [self._column(name) for name in names],
            (reward, ends[0], ends[1], self.layout[names[reward]].dtype == np.float64),
            (self.limiter.ratio, self.limiter.min_size, self.limiter.slack) if self.limiter else (0.0, 1, 0.0),
            self.alpha or 1.0,
            f"replay of {self.segment.label}",
        )
        if self.alpha is not None and not self.native.added():
            self.native.begin_priorities()
        self.roster = Roster(self.segment.words("samplers"))
        self._dice = base + segment["dice"].offset

    def _column(self, name: str) -> tuple[str, int, int, np.dtype[Any], list[int]]:
        field = self.layout[name]
        assert self.row_dtype.fields is not None
        return name, self.row_dtype.fields[name][1], field.nbytes, self.dtypes[name], list(field.shape)

    # ------------------------------------------------------------------------------------------------------- roles

    def writer(self, streams: Iterable[int] | None = None, *, resume: bool = False) -> ReplayWriter:
        """The role that adds. Of a replay with streams, it fills these (default: all); nobody else may meanwhile. What
        the streams held before is cut off: the first row that comes begins an episode, unless ``resume`` says that the
        environments go on where the last writer left them."""
        return ReplayWriter(self, streams, resume=resume)

    def sampler(
        self,
        *,
        seed: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        stack: Mapping[str, int] | None = None,
        length: int = 1,
        extras: Iterable[str] = (),
        threads: int = 1,
    ) -> ReplaySampler:
        """The role that draws; see ``ReplaySampler``."""
        from memlane.lanes.sampler import ReplaySampler

        return ReplaySampler(
            self,
            seed=seed,
            n_step=n_step,
            gamma=gamma,
            stack=stack or {},
            length=length,
            extras=extras,
            threads=threads,
        )

    def add(self, rows: Mapping[str, ArrayLike], *, version: int = 0, timeout: float | None = None) -> int:
        """Add rows to a replay without streams, without making a writer first."""
        return self._own_writer.add(rows, version=version, timeout=timeout)

    @cached_property
    def _own_writer(self) -> ReplayWriter:
        return ReplayWriter(self, None, resume=True)

    def dice_at(self, place: int) -> tuple[int, bool]:
        """Where the random state of a sampler lies, and whether there is one from before."""
        return self._dice + place * 64, bool(self.segment["dice"][place, :4].any())

    # -------------------------------------------------------------------------------------------------- priorities

    def update_priorities(self, keys: ArrayLike, errors: ArrayLike) -> int:
        """New priorities, from the ``key`` of a batch and the size of each row's error. A key says which row in which
        slot: one that was overwritten since is left alone and counted. Of sequences, the first row's counts. Returns
        how many were still there."""
        if self.alpha is None:
            raise MemlaneError(f"the {self.native.label} has no priorities; make it with alpha=0.6")
        key_array = np.asarray(keys)
        if key_array.ndim == 2:  # of sequences: a sequence has the priority of its first row
            key_array = key_array[:, 0]
        key_array = np.ascontiguousarray(key_array)
        error_array = np.ascontiguousarray(errors, np.float64)
        if key_array.dtype != np.int64 or key_array.ndim != 1:
            raise TypeError(
                f"keys must be int64 in one dimension, found {key_array.dtype} of shape {list(key_array.shape)}"
            )
        if error_array.shape != key_array.shape:
            raise ValueError(f"expected {len(key_array)} errors, found shape {list(error_array.shape)}")
        return self.native.set_priorities(key_array, error_array)

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def added(self) -> int:
        """Transitions since the start."""
        return self.native.added()

    @property
    def size(self) -> int:
        """Transitions that are stored."""
        return self.native.size()

    def __len__(self) -> int:
        return self.size

    def counters(self) -> dict[str, int]:
        """Since the replay was made: transitions ``admitted`` by the limiter (0 without one), ``added``, ``sampled``
        and ``evicted`` by newer ones; rows ``abandoned`` (their writer died), slots ``avoided`` (another writer held
        them), ``stale_priorities``, rows ``redrawn`` because they changed or lacked a neighbour; times that the limiter
        ``held_writers`` and ``held_samplers``."""
        return self.native.counters()

    @property
    def samples_per_insert(self) -> float:
        """The ratio that was achieved, counted as the limiter counts: from the ``min_size``-th transition on."""
        counters = self.counters()
        counted = counters["added"] - (self.limiter.min_size if self.limiter else 0)
        return counters["sampled"] / counted if counted > 0 else 0.0

    @property
    def bytes_per_transition(self) -> int:
        """What one row takes, priorities and links included."""
        return round((self.segment.layout["rows"].nbytes + self.segment.layout["tree"].nbytes) / self.capacity)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(self, file: str | os.PathLike[str]) -> int:
        """Bring ``file`` up to date: rows, counters, priorities and the random state of the samplers. What did not
        change since the last ``save`` is not written again. Whoever is killed in here leaves a file that can be loaded.
        Returns how many rows were written."""
        path = Path(file)
        settings = [int(setting) for setting in self.segment["settings"]]
        if path.exists():
            copy = type(self).open(path)
            if [int(setting) for setting in copy.segment["settings"]] != settings or copy.layout != self.layout:
                found = str(copy.layout)
                copy.close()
                raise SegmentError(f"{path} holds another replay ({found}); save to another file, or remove it")
        else:
            copy = type(self).__new__(type(self))
            copy._create(self.layout, self.segment.layout, None, settings, path)
        with copy:
            # A replay in a file that is saved there is there already.
            changed = 0 if copy.segment.is_same_memory(self.segment) else self._copy_into(copy)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return changed

    @classmethod
    def open(cls, file: str | os.PathLike[str]) -> Self:
        """The replay in a file, as it is: what is added from here on is in the file at once."""
        replay = cls.from_segment(Segment.attach(file=file))
        replay._require_plausible()
        return replay

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """A replay in memory with all that a file holds."""
        with cls.open(file) as saved:
            replay = cls.__new__(cls)
            settings = [int(setting) for setting in saved.segment["settings"]]
            replay._create(saved.layout, saved.segment.layout, None, settings)
            saved._copy_into(replay)
        return replay

    def _copy_into(self, copy: Replay) -> int:
        # Read before the rows: a stream that goes on meanwhile must not end at a row that is not in the copy.
        ends = self.segment["streams"].copy()
        changed = self.native.save_into(copy.native)
        copy.segment["streams"][:] = ends
        copy.segment["dice"][:] = self.segment["dice"]
        return changed

    def _require_plausible(self) -> None:
        complaint = ""
        if not self.native.counters_plausible():
            complaint = f"no writer leaves such counters: {self.counters()}"
        elif (slot := self.native.first_implausible()) >= 0:
            complaint = f"row {slot} holds numbers that no writer leaves"
        elif ((ends := self.segment["streams"]) < 0).any() or (ends > self.native.last_number()).any():
            complaint = "a stream ends at a row that was never added"
        if complaint:
            label = self.segment.label
            self.close()
            raise SegmentError(f"{label} is damaged: {complaint}; restore it from a copy")


class ReplayWriter:
    """Adds transitions, one or many at a time."""

    def __init__(self, replay: Replay, streams: Iterable[int] | None, *, resume: bool) -> None:
        self._replay = replay
        self._add = replay.native.add
        self._add_plain = replay.native.add_plain
        self.streams: NDArray[np.int64] | None = None
        if replay.streams:
            self.streams = np.array(
                range(replay.streams) if streams is None else [operator.index(stream) for stream in streams], np.int64
            )
            outside = self.streams[(self.streams < 0) | (self.streams >= replay.streams)]
            if outside.size or len(set(self.streams.tolist())) != len(self.streams):
                raise ValueError(
                    f"streams must be different numbers below {replay.streams}, found {self.streams.tolist()}"
                )
            if not resume:
                self.cut()
        elif streams is not None:
            raise ValueError(f"the {replay.native.label} has no streams; make it with streams={len(list(streams))}")

    def cut(self, rows: ArrayLike | None = None) -> None:
        """The next rows of these streams (positions among this writer's; default: all) begin a new episode, whatever
        came before: an environment that was restarted. The row before the cut has no next observation and is not
        drawn."""
        if self.streams is None:
            raise MemlaneError(f"the {self._replay.native.label} has no streams, so there is nothing to cut")
        chosen = self.streams if rows is None else self._streams_at(rows, "rows")
        self._replay.segment["streams"][chosen] = 0

    def _streams_at(self, positions: ArrayLike, label: str) -> NDArray[np.int64]:
        assert self.streams is not None
        at = np.atleast_1d(np.asarray(positions))
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise TypeError(
                f"{label} must be positions among {len(self.streams)} streams, found {at.dtype} {at.tolist()}"
            )
        if at.size and (at.min() < 0 or at.max() >= len(self.streams)):
            raise IndexError(
                f"{label} must be below {len(self.streams)}, the streams of this writer, found {at.tolist()}"
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
        """Add one row, or as many as the arrays have; for a replay with streams, one for each of this writer's streams,
        or for those at the positions ``env_ids``. Returns how many transitions were added.

        ``final`` has the observations after the last transition of an episode, in rows like the others; only those of
        rows that are terminated or truncated are read. A truncated row must have one. ``skip`` marks rows that are not
        transitions (the step in which a vector environment resets). Everything is checked before anything is written.
        Where a limiter holds writers back, this waits: until ``timeout`` (``WaitTimeout``) or the death of one of
        ``peers``.
        """
        streams = self.streams
        if streams is None:
            if skip is None:
                added = self._add_plain(rows)
                if added >= 0:
                    return added
            if final is not None or env_ids is not None:
                raise ValueError(f"final and env_ids need streams, which the {self._replay.native.label} has not")
        elif env_ids is not None:
            streams = self._streams_at(env_ids, "env_ids")
        skipped = None if skip is None else _mask(skip, "skip")
        ends: NDArray[np.bool_] | None = None
        if streams is not None:
            ends = self._ends(rows, final, skipped, len(streams))
        bare = None if skipped is None else skipped.view(np.uint8)
        finals = ends.view(np.uint8) if ends is not None else None
        final = final or None
        added = self._add(rows, version, streams, bare, final, finals, timeout, peers)
        if added < 0:
            plain = self._plain(
                rows,
                list(self._replay.layout.fields),
                "rows",
                None if streams is None else len(streams),
                None if skipped is None else ~skipped,
            )
            count = len(next(iter(plain.values())))
            read = np.zeros(count, bool) if ends is None else ends
            last = None if final is None else self._plain(final, self._replay.observations, "final", count, read)
            self._require(count, skipped, ends)
            added = self._add(plain, version, streams, bare, last, finals, timeout, peers)
            if added < 0:
                raise MemlaneError(f"the {self._replay.native.label} does not take these rows, for a reason not known")
        return added

    def _ends(
        self,
        rows: Mapping[str, ArrayLike],
        final: Mapping[str, ArrayLike] | None,
        skipped: NDArray[np.bool_] | None,
        count: int,
    ) -> NDArray[np.bool_] | None:
        """Which rows have a final observation."""
        terminated, truncated = (_mask(rows.get(name, False), name) for name in TRANSITION[1:])
        for name, mask in zip(TRANSITION[1:], (terminated, truncated), strict=True):
            if len(mask) != count and name in rows:
                raise ValueError(f"{name!r} must have {count} rows, found {len(mask)}")
        ends = terminated | truncated
        if skipped is not None and skipped.shape == ends.shape:
            ends = ends & ~skipped
            truncated = truncated & ~skipped
        if not self._replay.observations and not final:
            return None  # nothing goes on anywhere
        if final is None:
            if truncated.any():
                raise ValueError(
                    f"row {int(truncated.argmax())} is truncated: its value goes on in the observation after it, so "
                    f"final={{{', '.join(map(repr, self._replay.observations))}: ...}} must be given"
                )
            return None
        if final.keys() != set(self._replay.observations):
            raise ValueError(f"final must have the fields {self._replay.observations}, found {list(final)}")
        if ends.shape != (count,):
            raise ValueError(f"terminated and truncated must have {count} rows, found shape {list(ends.shape)}")
        return np.ascontiguousarray(ends) if ends.any() else None

    def _plain(
        self,
        given: Mapping[str, ArrayLike],
        names: list[str],
        role: str,
        count: int | None,
        read: NDArray[np.bool_] | None,
    ) -> dict[str, NDArray[Any]]:
        """Arrays exactly as the layout has them, or an error that says which one is not. What rows hold that are not to
        be ``read`` does not matter."""
        if given.keys() != set(names):
            raise ValueError(f"{role} must have the fields {names}, found {list(given)}")
        plain: dict[str, NDArray[Any]] = {}
        for name in names:
            field = self._replay.layout[name]
            array = np.asarray(given[name])
            if array.shape == field.shape and (count is None or count == 1):
                array = array[None]
            if array.shape[1:] != field.shape or array.ndim != len(field.shape) + 1:
                raise ValueError(
                    f"{role}[{name!r}] must have shape [rows, {str(list(field.shape))[1:]} or {list(field.shape)}, "
                    f"found {list(array.shape)}"
                )
            if count is None:
                count = len(array)
            if len(array) != count:
                raise ValueError(f"{role}[{name!r}] must have {count} rows, found {len(array)}")
            cast = _cast(array, field.dtype, f"{role}[{name!r}]", read)
            plain[name] = cast if cast.dtype is self._replay.dtypes[name] else cast.view(self._replay.dtypes[name])
        return plain

    def _require(self, count: int, skipped: NDArray[np.bool_] | None, ends: NDArray[np.bool_] | None) -> None:
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


def _mask(given: ArrayLike, label: str) -> NDArray[np.bool_]:
    array = np.atleast_1d(np.asarray(given))
    if array.dtype != np.bool_ or array.ndim != 1:
        raise TypeError(f"{label} must be true or false for each row, found {array.dtype} of shape {list(array.shape)}")
    return np.ascontiguousarray(array)


def _cast(array: NDArray[Any], dtype: np.dtype[Any], label: str, read: NDArray[np.bool_] | None) -> NDArray[Any]:
    if array.dtype != dtype:
        whole = array.dtype.kind in "iu" and dtype.kind in "iu"
        if not whole and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"{label} must have dtype {dtype}, found {array.dtype}")
        found = array
        try:
            with np.errstate(over="raise", invalid="ignore"):
                array = found.astype(dtype)
        except FloatingPointError:
            with np.errstate(over="ignore", invalid="ignore"):
                array = found.astype(dtype)
            lost = np.isfinite(found) & ~np.isfinite(array)
            if read is not None and len(read) == len(lost):
                lost[~read] = False
            if lost.any():
                raise ValueError(
                    f"{label} must fit into {dtype}, found {found[lost][0]!s}; scale it or clip it"
                ) from None
        if whole and not np.array_equal(found, array):
            raise ValueError(f"{label} must fit into {dtype}, found values from {found.min()} to {found.max()}")
    return np.ascontiguousarray(array)


def _stride(layout: Layout, linked: bool) -> int:
    plain = _native.row_head_bytes(linked) + packed(layout).itemsize
    lines = -(-plain // 64) * 64
    return lines if lines - plain <= plain * _WASTE else plain


@dataclass(frozen=True)
class _Settings:
    """What a replay was made with, and the same as the whole numbers that its segment keeps. Checked either way: those
    of a file may be anything."""

    capacity: int
    streams: int
    observations: list[str]
    alpha: float | None
    limiter: Limiter | None

    def __post_init__(self) -> None:
        if operator.index(self.capacity) < 1:
            raise ValueError(f"capacity must be 1 or more, found {self.capacity}")
        if operator.index(self.streams) < 0 or (self.streams and self.capacity < 2):
            raise ValueError(
                f"streams must be 0 or more, with a capacity of at least 2, found streams={self.streams} and "
                f"capacity={self.capacity}"
            )
        if self.observations and not self.streams:
            raise ValueError(
                f"observations={self.observations} need streams, one for each environment; found streams=0"
            )
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be above 0, or None to draw all rows alike, found {self.alpha!r}")
        if self.limiter is not None and self.limiter.min_size > self.capacity:
            raise ValueError(
                f"the limiter's min_size must be at most the capacity of {self.capacity}, found {self.limiter.min_size}"
            )

    def _check(self, layout: Layout) -> None:
        if not len(layout):
            raise LayoutError("a row needs at least one field")
        for name in self.observations:
            if name not in layout:
                raise ValueError(f"observations must be among the fields {list(layout.fields)}, found {name!r}")
        if self.streams:
            _require_transition(layout)

    def numbers(self, layout: Layout) -> list[int]:
        self._check(layout)
        limiter = self.limiter
        return [
            operator.index(self.capacity),
            operator.index(self.streams),
            int(self.alpha is not None),
            _bits(self.alpha or 0.0),
            int(limiter is not None),
            _bits(limiter.ratio if limiter else 0.0),
            limiter.min_size if limiter else 0,
            _bits(limiter.slack if limiter else 0.0),
            *(int(name in self.observations) for name in layout.fields),
        ]

    @classmethod
    def of(cls, layout: Layout, numbers: list[int]) -> _Settings:
        capacity, streams, prioritised, alpha, limited, ratio, least, slack, *chosen = numbers
        observations = [name for name, flag in zip(layout.fields, chosen, strict=True) if flag]
        limiter = Limiter(_float(ratio), least, _float(slack)) if limited else None
        settings = cls(capacity, streams, observations, _float(alpha) if prioritised else None, limiter)
        settings._check(layout)
        return settings


def _require_transition(layout: Layout) -> None:
    for name in TRANSITION:
        allowed = ("float32", "float64") if name == "reward" else ("bool",)
        field = layout.fields.get(name)
        if field is None or field.shape != () or field.dtype.name not in allowed:
            found = "nothing" if field is None else str(field)
            raise LayoutError(
                f"rows of streams need a field {name!r} of dtype {' or '.join(allowed)} and shape [], found {found}"
            )


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
