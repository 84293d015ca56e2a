"""Replay: transitions of any layout that several processes add and several others sample, at the same time.

``cpp/src/lanes/replay.hpp`` has the protocol between writers and samplers.
"""

from __future__ import annotations

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
from memlane.core import Layout, LayoutError, MemlaneError, Segment, SegmentError, SegmentMissing
from memlane.core.arguments import as_count, as_names, is_finite_number
from memlane.core.file_lock import FileInUse, FileLock
from memlane.core.layout import FieldSpec
from memlane.core.lowlevel import Roster
from memlane.core.suggestions import did_you_mean
from memlane.lanes.batch import packed
from memlane.lanes.lane import Lane, as_layout, require_settings
from memlane.lanes.limiter import Limiter
from memlane.lanes.replay_writer import EPISODE_ENDS, ReplayWriter

if TYPE_CHECKING:
    from memlane.lanes.sampler import ReplaySampler

TRANSITION = ("reward", *EPISODE_ENDS)
"""Fields that the rows of a replay with streams must have, for n-step returns and episode ends."""

MAX_SAMPLERS = 16
"""Samplers of one replay at a time, in all processes."""
# A row is padded to whole cache lines, so that a gather touches fewer of them, if that adds at most this share.
_MAX_PADDING = 1 / 8


class Replay(Lane):
    """A replay buffer in shared memory: several processes add transitions while several others sample them.

    ``row`` is what one transition contains: a ``Layout``, or ``{name: (dtype, shape)}``. The newest ``capacity`` rows
    are kept. There is no lock: a sampler never sees a half-written row, and no writer waits for another writer.

    ``streams`` is the number of environments that add to the replay, over all writers. Rows of a stream are linked in
    the order of their steps, so each observation is stored once: next observations, n-step returns, stacked frames and
    sequences are assembled when a row is sampled, and never across the end of an episode. Such rows need the fields
    ``reward``, ``terminated`` and ``truncated``; ``observations`` names the fields that a batch also contains as
    ``next_<name>``. With ``streams=0``, rows are independent.

    ``alpha`` turns on prioritised sampling: a row is sampled in proportion to its error to that power (see
    ``update_priorities``), and a new row with the highest priority so far. ``limiter`` keeps the ratio of samples to
    inserts near a target.

    Any process or thread that has the replay may call ``writer()`` and ``sampler()``: pass the replay as a ``Process``
    argument, create it with ``name`` and call ``Replay.attach(name)``, or create it in a ``file`` that outlives all
    processes.

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

    When a writer dies, its unfinished rows are never sampled and are counted as ``abandoned``; its streams are free for
    another writer. When a sampler dies, nothing changes for the others. A process that is killed during ``save`` leaves
    a file that can be loaded.
    """

    _file_lock: FileLock | None = None

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
        settings = _Settings(capacity, streams, as_names("observations", observations), alpha, limiter).to_integers(
            layout
        )
        self._create(layout, self._expected_layout(layout, settings), name, settings, file)
        if file is not None:
            self._file_lock = _lock_file(self.segment, shared=True)

    @classmethod
    def segment_layout(
        cls, row: Layout | Mapping[str, FieldSpec], capacity: int, *, streams: int = 0, alpha: float | None = None
    ) -> Layout:
        """Return the layout of the replay's segment without creating it, for a ``MemoryBudget``."""
        layout = as_layout(row)
        return cls._expected_layout(layout, _Settings(capacity, streams, [], alpha, None).to_integers(layout))

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        parsed = _Settings.from_integers(layout, settings)
        return Layout(
            {
                **cls._describe(layout, len(settings)),
                "control": (f"V{_native.REPLAY_CONTROL_BYTES}", ()),
                "stored": ("uint64", -(-parsed.capacity // 64)),
                "streams": ("int64", parsed.streams),
                "samplers": ("int64", MAX_SAMPLERS),
                "rng": ("uint64", (MAX_SAMPLERS, 8)),
                "tree": ("uint8", _native.sum_tree_bytes(parsed.capacity) if parsed.alpha is not None else 0),
                "rows": ("uint8", (parsed.capacity, _row_stride(layout, linked=bool(parsed.streams)))),
            }
        )

    def _bind(self, settings: list[int]) -> None:
        parsed = _Settings.from_integers(self.layout, settings)
        self._integers = settings
        self.capacity, self.streams, self.observations = parsed.capacity, parsed.streams, parsed.observations
        self.alpha, self.limiter = parsed.alpha, parsed.limiter
        self.row_dtype = packed(self.layout)
        # numpy has one object per built-in dtype; the native code compares dtypes by identity.
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
            base + segment["stored"].offset,
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
            self.native.init_priorities()
        self.roster = Roster(
            self.segment,
            "samplers",
            "close samplers that are no longer used",
            f"the samplers of the {self.native.label}",
        )
        self._rng = base + segment["rng"].offset
        # Not arrays: an access to an array of a truncated file ends the process.
        self.stream_ends = _native.Words(
            mapping, base + segment["streams"].offset, self.streams, f"streams of the {self.native.label}"
        )
        self._rng_states = _native.Words(
            mapping, self._rng, MAX_SAMPLERS * 8, f"random states of the {self.native.label}"
        )

    def _column(self, name: str) -> tuple[str, int, int, np.dtype[Any], list[int]]:
        field = self.layout[name]
        assert self.row_dtype.fields is not None
        return name, self.row_dtype.fields[name][1], field.nbytes, self.dtypes[name], list(field.shape)

    # ------------------------------------------------------------------------------------------------------- roles

    def writer(self, streams: Iterable[int] | None = None, *, resume: bool = False) -> ReplayWriter:
        """Return a handle that adds transitions.

        In a replay with streams, it adds to ``streams`` (default: all), which no other writer may use at the same time.
        The first row of each stream starts a new episode; with ``resume=True`` it continues the stream, for
        environments that are in the state in which the last writer left them.
        """
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
        """Return a handle that samples batches; ``ReplaySampler`` explains the arguments."""
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
        """Add rows to a replay without streams and return how many were added; with streams, use ``writer``."""
        return self._own_writer.add(rows, version=version, timeout=timeout)

    @cached_property
    def _own_writer(self) -> ReplayWriter:
        return ReplayWriter(self, None, resume=True)

    def rng_at(self, place: int) -> tuple[int, bool]:
        """Return the offset of the random state of a sampler by its entry, and whether an earlier one left a state."""
        return self._rng + place * 64, any(self._rng_states.load(place * 8 + word) for word in range(4))

    # -------------------------------------------------------------------------------------------------- priorities

    def update_priorities(self, keys: ArrayLike, errors: ArrayLike) -> int:
        """Set the priorities of sampled rows and return how many of the rows are still stored.

        ``keys`` is ``batch["key"]``, ``errors`` the TD error of each row, whose absolute value counts. A row is sampled
        in proportion to ``(abs(error) + 1e-6) ** alpha`` (Schaul et al., 2016), so a row with error 0 is still sampled,
        if rarely. Rows that were overwritten since are skipped and counted as ``stale_priorities``. A sequence has the
        priority of its first row.
        """
        if self.alpha is None:
            raise MemlaneError(f"the {self.native.label} has no priorities; create it with alpha=0.6")
        key_array = np.asarray(keys)
        if key_array.ndim == 2:  # sequences
            key_array = key_array[:, 0]
        key_array = np.ascontiguousarray(key_array)
        error_array = np.ascontiguousarray(errors, np.float64)
        if key_array.dtype != np.int64 or key_array.ndim != 1:
            raise TypeError(
                f"keys must be batch['key'], int64 in one dimension, found {key_array.dtype} of shape "
                f"{list(key_array.shape)}"
            )
        if error_array.shape != key_array.shape:
            raise ValueError(
                f"errors must have shape [{len(key_array)}], one number for each key, found {list(error_array.shape)}"
            )
        return self.native.set_priorities(key_array, error_array)

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def added(self) -> int:
        """Number of transitions added since the replay was created."""
        return self.native.added()

    @property
    def size(self) -> int:
        """Number of transitions stored now."""
        return self.native.size()

    def __len__(self) -> int:
        return self.size

    def counters(self) -> dict[str, int]:
        """Return counts since the replay was created.

        Transitions: ``added``, ``sampled``, ``evicted`` (overwritten by newer ones), ``admitted`` (let in by the
        limiter; 0 without one). Rows: ``abandoned`` (their writer died), ``redrawn`` (they changed while they were
        copied, or a neighbour that the sampler needs is not stored). Slots ``avoided`` because another writer was
        writing to them. ``stale_priorities``: updates for overwritten rows. ``held_writers``, ``held_samplers``: times
        that the limiter blocked a writer or a sampler. Any process may call it at any time.
        """
        return self.native.counters()

    @property
    def samples_per_insert(self) -> float:
        """Samples per insert so far, counted as the limiter does: from the ``min_size``-th transition on."""
        counters = self.counters()
        counted = counters["added"] - (self.limiter.min_size if self.limiter else 0)
        return counters["sampled"] / counted if counted > 0 else 0.0

    @property
    def bytes_per_transition(self) -> int:
        """Bytes per row, priorities and links included."""
        return round((self.segment.layout["rows"].nbytes + self.segment.layout["tree"].nbytes) / self.capacity)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(self, file: str | os.PathLike[str]) -> int:
        """Write rows, counters, priorities and the samplers' random state to ``file``; return the rows written.

        If ``file`` has an earlier save of this replay, only rows that changed since are written. A process that is
        killed while saving leaves a file that can be loaded. A file that another process saves to, or has opened, is a
        ``SegmentError`` that names that process.
        """
        path = Path(file)
        if path.exists():
            segment = Segment.attach(file=path)
            # A file-backed replay that is saved to its own file is up to date already.
            if segment.is_same_memory(self.segment):
                with segment:
                    _sync(path)
                return 0
            copy = self._locked(segment, _lock_file(segment, shared=False))
            try:
                copy._require_plausible()
                if copy._integers != self._integers or copy.layout != self.layout:
                    raise SegmentError(
                        f"{path} holds another replay ({copy.layout}); save to another file, or remove it"
                    )
            except BaseException:
                copy.close()
                raise
        else:
            copy = type(self).__new__(type(self))
            copy._create(self.layout, self.segment.layout, None, self._integers, path)
            copy._file_lock = _lock_file(copy.segment, shared=False)
        with copy:
            changed = self._copy_into(copy)
            _sync(path)
        return changed

    @classmethod
    def from_segment(cls, segment: Segment) -> Self:
        """Return the replay in an attached or unpickled segment, after checking that it contains one.

        No process can ``save`` to the file of a segment that is open, and none can open it during a save.
        """
        return cls._locked(segment, _lock_file(segment, shared=True) if segment.kind == "file" else None)

    @classmethod
    def _locked(cls, segment: Segment, lock: FileLock | None) -> Self:
        try:
            replay = super().from_segment(segment)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        replay._file_lock = lock
        return replay

    def close(self) -> None:
        """Release this process's mapping; in the process that created the replay, also remove its name.

        The memory is freed when the last process has closed the replay. Calling it again has no effect.
        """
        super().close()
        if self._file_lock is not None:
            self._file_lock.close()

    @classmethod
    def open(cls, file: str | os.PathLike[str]) -> Self:
        """Open the replay in ``file`` in place: rows that are added later are stored in the file directly.

        Several processes may open one file. A file that a process saves to is a ``SegmentError`` that names it.
        """
        if not Path(file).exists():
            raise SegmentMissing(f"there is no file {os.fspath(file)!r}; Replay.save writes one")
        replay = cls.from_segment(Segment.attach(file=file))
        try:
            replay._require_plausible()
            replay.native.refresh_priorities()
        except BaseException:
            replay.close()
            raise
        return replay

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Copy the replay in ``file`` into memory. The file does not change afterwards."""
        with cls.open(file) as saved:
            replay = cls.__new__(cls)
            replay._create(saved.layout, saved.segment.layout, None, saved._integers)
            saved._copy_into(replay)
        return replay

    def _copy_into(self, copy: Replay) -> int:
        # Read before the rows: a stream that grows during the copy must not end at a row that is not in the copy.
        ends = _loaded(self.stream_ends, self.streams)
        changed = self.native.save_into(copy.native)
        # A file in which a stream ends at a row that was never added would be refused.
        ends[(ends < 0) | (ends > copy.native.last_sequence())] = 0
        _store(copy.stream_ends, ends)
        _store(copy._rng_states, _loaded(self._rng_states, MAX_SAMPLERS * 8))
        return changed

    def _require_plausible(self) -> None:
        damage = ""
        if not self.native.counters_plausible():
            damage = f"its counters are inconsistent: {self.counters()}"
        elif (slot := self.native.first_implausible()) >= 0:
            damage = f"the header of row {slot} is invalid"
        elif ((ends := _loaded(self.stream_ends, self.streams)) < 0).any() or (
            ends > self.native.last_sequence()
        ).any():
            damage = "a stream ends at a row that was never added"
        if damage:
            raise SegmentError(f"{self.segment.label} is damaged: {damage}; restore it from a copy")


def _lock_file(segment: Segment, *, shared: bool) -> FileLock:
    """Lock the file of a segment, together with other processes that have it open (``shared``), or alone to save to it.

    If that is not possible, the segment is closed, and ``SegmentError`` says why.
    """
    try:
        # Through a descriptor of its own: that of the segment stays open as long as an array keeps the memory mapped.
        return FileLock(f"/proc/self/fd/{segment._fd}", shared=shared)
    except FileInUse as error:
        doing = "saves to it" if shared else "saves to it or has it open"
        cause = f"is in use: {error.holders} {doing}; wait until it has finished, or use another file"
    except OSError as error:
        cause = f"cannot be locked: {error.strerror}; use a file system that has locks"
    segment.close()
    raise SegmentError(f"{segment.label} {cause}")


def _loaded(words: _native.Words, count: int) -> NDArray[np.int64]:
    out = np.empty(count, np.int64)
    words.load_into(np.arange(count), out)
    return out


def _store(words: _native.Words, values: NDArray[np.int64]) -> None:
    for index, value in enumerate(values.tolist()):
        words.store(index, value)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _row_stride(layout: Layout, *, linked: bool) -> int:
    """Return the bytes from one row to the next."""
    unpadded = _native.row_head_bytes(linked) + packed(layout).itemsize
    padded = -(-unpadded // 64) * 64
    return padded if padded - unpadded <= unpadded * _MAX_PADDING else unpadded


@dataclass(frozen=True)
class _Settings:
    """The settings of a replay, and their encoding as the integers in its segment.

    Both directions are checked: a file may contain any integers.
    """

    capacity: int
    streams: int
    observations: list[str]
    alpha: float | None
    limiter: Limiter | None

    def __post_init__(self) -> None:
        as_count("capacity", self.capacity, 1)
        if as_count("streams", self.streams, 0) and self.capacity < 2:
            raise ValueError(f"capacity must be 2 or more in a replay with streams, found {self.capacity}")
        if self.observations and not self.streams:
            raise ValueError(
                f"observations={self.observations} need streams, one for each environment; found streams=0"
            )
        if self.alpha is not None and not (is_finite_number(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be above 0, or None to sample uniformly, found {self.alpha!r}")
        if self.limiter is not None and not isinstance(self.limiter, Limiter):
            raise TypeError(f"limiter must be a Limiter or None, found {self.limiter!r}")
        if self.limiter is not None and self.limiter.min_size > self.capacity:
            raise ValueError(
                f"the limiter's min_size must be at most the capacity of {self.capacity}, found {self.limiter.min_size}"
            )

    def _check(self, layout: Layout) -> None:
        if not len(layout):
            raise LayoutError("a row needs at least one field, found none")
        for name in self.observations:
            if name not in layout:
                raise ValueError(
                    f"observations must be among the fields {list(layout.fields)}, found {name!r}"
                    f"{did_you_mean(name, layout.fields)}"
                )
        if self.streams:
            _require_transition(layout)

    def to_integers(self, layout: Layout) -> list[int]:
        """Return the settings as the segment stores them."""
        self._check(layout)
        limiter = self.limiter
        return [
            operator.index(self.capacity),
            operator.index(self.streams),
            int(self.alpha is not None),
            _float_to_bits(self.alpha or 0.0),
            int(limiter is not None),
            _float_to_bits(limiter.ratio if limiter else 0.0),
            limiter.min_size if limiter else 0,
            _float_to_bits(limiter.slack if limiter else 0.0),
            *(int(name in self.observations) for name in layout.fields),
        ]

    @classmethod
    def from_integers(cls, layout: Layout, integers: list[int]) -> _Settings:
        """Return the settings that a segment stores."""
        require_settings(integers, 8 + len(layout))
        capacity, streams, prioritised, alpha, limited, ratio, min_size, slack, *is_observation = integers
        observations = [name for name, flag in zip(layout.fields, is_observation, strict=True) if flag]
        limiter = Limiter(_bits_to_float(ratio), min_size, _bits_to_float(slack)) if limited else None
        settings = cls(capacity, streams, observations, _bits_to_float(alpha) if prioritised else None, limiter)
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


def _float_to_bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _bits_to_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
