"""ReplaySampler: sample transitions from a replay and assemble the fields that a learner needs."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memlane import _native
from memlane.core import MemlaneError, Peer, SegmentClosed
from memlane.core.arguments import as_count, as_names, is_finite_number
from memlane.core.fork_guard import ForkGuard
from memlane.core.lowlevel import Roster
from memlane.core.suggestions import did_you_mean
from memlane.lanes.batch import Batch, Memory, alignment_of, packed_fields
from memlane.lanes.replay import TRANSITION, Replay

EXTRAS = {"key": "int64", "version": "int64", "horizon": "int32"}
"""Fields that ``extras`` may name, with their dtypes."""
# In the order in which the native sampler expects their offsets.
_COMPUTED_FIELDS = (*TRANSITION, "discount", "horizon", "key", "version", "weight", "valid")


class ReplaySampler:
    """Samples batches from a replay; ``Replay.sampler()`` creates it.

    Each sampler is for one thread at a time; up to 16 samplers, in any processes, may sample from one replay at once.
    Equal seeds and equal contents give equal batches, whatever the number of ``threads``. Without a seed, a sampler of
    a loaded replay continues the random sequence of the sampler that was saved.

    A batch is a dict of arrays (``Batch``) with

    - every field of the row. ``stack={"obs": 4}`` makes ``obs`` the last 4 observations of its stream, oldest first;
      before the start of the episode the first observation is repeated;
    - in a replay with streams: ``next_<name>`` of each observation, ``discount`` (``gamma ** steps``, or 0 if the last
      step terminated: the target is ``reward + discount * value(next_obs)``), and as ``reward``, ``terminated`` and
      ``truncated`` the discounted sum over ``n_step`` steps and the flags of the last of them. Fewer steps are used
      where the episode or the stored data ends earlier;
    - with priorities: ``key`` for ``Replay.update_priorities`` and ``weight``, the importance weight to the power
      ``beta``;
    - with ``length`` above 1 (sequences): ``valid``, False in the rows of zeros after the end of an episode;
    - what ``extras`` names: ``key``, ``version`` (of the policy that acted), ``horizon`` (number of steps used).

        >>> import numpy as np
        >>> from memlane.lanes import Replay
        >>> with Replay({"x": ("int64", ())}, capacity=100) as replay:
        ...     _ = replay.add({"x": np.arange(10)})
        ...     sampler = replay.sampler(seed=0)
        ...     batch = sampler.sample(4)
        ...     sampler.close()
        >>> batch["x"].shape, bool((batch["x"] < 10).all())
        ((4,), True)

    A forked child has to create its own, because random sequences are in the replay's memory: ``sample`` raises
    ``UsedAfterFork`` there, and ``close`` does nothing.

    When a writer dies, sampling goes on with the rows that are stored. When a process with a sampler dies, another
    sampler can be created instead.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        seed: int | None,
        n_step: int,
        gamma: float,
        stack: Mapping[str, int],
        length: int,
        extras: Iterable[str],
        threads: int,
    ) -> None:
        extras = as_names("extras", extras)
        _check(replay, n_step, gamma, stack, length, extras, threads)
        self.guard = ForkGuard(
            f"a sampler of the {replay.native.label}", "call sampler() of the replay in this process"
        )
        self.replay = replay
        self.length = length
        self.threads = threads
        # New memory costs a page fault per 4 KB: sampling 4096 rows into it takes twice as long.
        self._pool = _native.BlockPool()
        self.dtype = _batch_dtype(replay, stack, length, extras)
        self.place = replay.roster.join()
        self._leave = weakref.finalize(self, _leave_roster, replay.roster, self.place)
        rng, has_state = replay.rng_at(self.place)
        if seed is None and not has_state:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        offsets = _offsets(self.dtype)
        linked = bool(replay.streams)
        self.native = _native.Sampler(
            replay.native,
            rng,
            None if seed is None else _as_seed(seed),
            _field_copies(replay, self.dtype, stack),
            self.dtype.itemsize,
            n_step if linked else 0,
            gamma,
            length,
            [offsets.get(name, -1) if linked or name not in TRANSITION else -1 for name in _COMPUTED_FIELDS],
        )

    def batch(self, batch_size: int, memory: Memory | None = None) -> Batch:
        """Return an uninitialised batch to reuse with ``sample(..., out=batch)``; with ``memory``, over those bytes."""
        as_count("batch_size", batch_size, 1)
        return Batch(self.dtype, (batch_size,) if self.length == 1 else (batch_size, self.length), memory)

    def sample(
        self,
        batch_size: int,
        *,
        out: Batch | None = None,
        beta: float = 1.0,
        timeout: float | None = None,
        peers: Iterable[Peer] = (),
    ) -> Batch:
        """Sample ``batch_size`` transitions, or as many sequences, into ``out`` or into a new batch.

        ``NothingToSample`` if no stored row can be sampled. Waits while the replay's limiter blocks samplers: at most
        ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).
        """
        self.require_open()
        if out is None:
            as_count("batch_size", batch_size, 1)
            out = self.batch(batch_size, _native.Block(self._pool, self.dtype.itemsize * batch_size * self.length))
        elif out.dtype is not self.dtype or out.shape[0] != batch_size:
            raise ValueError(
                f"out must be what this sampler's batch({batch_size}) returned, found a batch of {out.shape[0]} rows "
                f"with the fields {list(out)}"
            )
        self.native.sample(out.block, beta, self.threads, timeout, peers)
        return out

    def require_open(self) -> None:
        """Raise ``MemlaneError`` if the sampler was closed, ``UsedAfterFork`` in a forked child."""
        self.guard.require()
        if not self._leave.alive:
            raise MemlaneError(f"a sampler of the {self.replay.native.label} was used after close(); create another")

    def close(self) -> None:
        """Stop using the replay: another sampler can be created instead. Calling it again has no effect."""
        self._leave()


def _as_seed(seed: Any) -> int:
    try:
        return operator.index(seed) % 2**64
    except TypeError:
        raise TypeError(f"seed must be None or an integer, found {seed!r}") from None


def _leave_roster(roster: Roster, place: int) -> None:
    with contextlib.suppress(SegmentClosed):  # the roster is gone with its segment
        roster.leave(place)


def _check(
    replay: Replay,
    n_step: int,
    gamma: float,
    stack: Mapping[str, int],
    length: int,
    extras: list[str],
    threads: int,
) -> None:
    for name, value in (("n_step", n_step), ("length", length), ("threads", threads)):
        as_count(name, value, 1)
    if not (is_finite_number(gamma) and 0 <= gamma <= 1):
        raise ValueError(f"gamma must be between 0 and 1, found {gamma!r}")
    for name, count in stack.items():
        if name not in replay.layout or operator.index(count) < 1:
            hint = did_you_mean(name, replay.layout.fields) if name not in replay.layout else ""
            raise ValueError(
                f"stack must map names among {list(replay.layout.fields)} to numbers of steps, 1 or more, found "
                f"{name!r}: {count}{hint}"
            )
    if unknown := [name for name in extras if name not in EXTRAS]:
        raise ValueError(f"extras must be among {list(EXTRAS)}, found {unknown}{did_you_mean(unknown[0], EXTRAS)}")
    needs_links = n_step > 1 or length > 1 or any(count > 1 for count in stack.values())
    if not replay.streams and (needs_links or "horizon" in extras or "version" in extras):
        raise ValueError(
            "n_step, stack, length, horizon and version need linked rows: create the replay with streams=..., the "
            "number of environments"
        )


def _batch_dtype(replay: Replay, stack: Mapping[str, int], length: int, extras: list[str]) -> np.dtype[Any]:
    def shaped(name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        field, count = replay.layout[name], stack.get(name, 1)
        return field.dtype, (count, *field.shape) if count > 1 else field.shape

    fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    if replay.streams:
        fields |= {f"next_{name}": shaped(name) for name in replay.observations}
        fields["discount"] = (np.dtype(np.float32), ())
    if replay.alpha is not None:
        fields |= {"key": (np.dtype(np.int64), ()), "weight": (np.dtype(np.float32), ())}
    if length > 1:
        fields["valid"] = (np.dtype(np.bool_), ())
    fields |= {name: (np.dtype(EXTRAS[name]), ()) for name in extras}
    if clash := fields.keys() & replay.layout.fields.keys():
        raise ValueError(f"the sampler adds the fields {sorted(clash)} to a batch; rename those of the rows")
    if summed := [name for name in TRANSITION if stack.get(name, 1) > 1]:
        raise ValueError(f"{summed[0]!r} is computed over n_step steps and cannot be stacked; use length= instead")
    stacked = any(count > 1 for count in stack.values())
    row = replay.row_dtype if not stacked else packed_fields([(name, *shaped(name)) for name in replay.layout.fields])
    widest = max([8, *(alignment_of(field.dtype) for field in replay.layout)])
    computed = packed_fields([(name, *spec) for name, spec in fields.items()], row.itemsize, widest)
    assert row.fields is not None
    assert computed.fields is not None
    assert row.names is not None
    columns = {**row.fields, **computed.fields} if fields else dict(row.fields)
    return np.dtype(
        {
            "names": [*row.names, *fields],
            "formats": [columns[name][0] for name in (*row.names, *fields)],
            "offsets": [columns[name][1] for name in (*row.names, *fields)],
            "itemsize": computed.itemsize if fields else row.itemsize,
        }
    )


def _field_copies(
    replay: Replay, dtype: np.dtype[Any], stack: Mapping[str, int]
) -> list[tuple[int, int, int, int, bool]]:
    """Return the copies that assemble a row of a batch, as the native sampler expects them.

    Each is (offset in the stored row, bytes, offset in the batch's row, number of stacked steps, True for the next
    observation).
    """
    source, target = _offsets(replay.row_dtype), _offsets(dtype)
    copies = []
    if any(count > 1 for count in stack.values()):
        for field in replay.layout:
            copies.append((source[field.name], field.nbytes, target[field.name], stack.get(field.name, 1), False))
    else:  # the row as it is stored, in one copy
        copies.append((0, replay.row_dtype.itemsize, 0, 1, False))
    for name in replay.observations:
        copies.append((source[name], replay.layout[name].nbytes, target[f"next_{name}"], stack.get(name, 1), True))
    return copies


def _offsets(dtype: np.dtype[Any]) -> dict[str, int]:
    assert dtype.fields is not None
    return {name: field[1] for name, field in dtype.fields.items()}
