"""ReplaySampler: draws transitions of a replay and puts together what a learner wants of each.

A batch is a dict of arrays over one block (``Batch``):

- every field of the row; with ``stack``, a field is the last so many of its stream, the oldest first, and before an
  episode's begin its first one again;
- of a replay with streams: ``next_...`` of its observations, ``discount`` (gamma to the number of steps; 0 if the last
  one terminated, so a target is ``reward + discount * value(next_obs)``), and as ``reward``, ``terminated`` and
  ``truncated`` the sum over ``n_step`` steps and how the last of them ended. Where an episode or what is stored ends
  earlier, there are fewer steps, never others;
- of a replay with priorities: ``key`` for ``update_priorities`` and ``weight``, the importance to the power of
  ``beta``;
- of sequences (``length`` above 1): ``valid``, False where an episode ended early and zeros fill up;
- what ``extras`` asks for: ``key``, ``version`` (of the policy that acted), ``horizon`` (how many steps there were).
"""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import MemlaneError, Peer, SegmentClosed
from memlane.core.lowlevel import Roster
from memlane.lanes.batch import Batch, Spares, alignment_of, packed_fields
from memlane.lanes.replay import TRANSITION, Replay

EXTRAS = {"key": "int64", "version": "int64", "horizon": "int32"}
# In the order of the native sampler's places.
_PLACES = (*TRANSITION, "discount", "horizon", "key", "version", "weight", "valid")


class ReplaySampler:
    """Draws from a replay. One thread at a time; any number of samplers.

    Equal seeds and equal contents give equal batches, whatever the number of ``threads``. Without a seed, a sampler of
    a replay that was saved goes on as if it had never stopped.
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
        extras = list(extras)
        _check(replay, n_step, gamma, stack, length, extras, threads)
        self.replay = replay
        self.length = length
        self.threads = threads
        self._spares = Spares()
        self.dtype = _batch_dtype(replay, stack, length, extras)
        self.place = replay.roster.join()
        self._leave = weakref.finalize(self, _give_back, replay.roster, self.place)
        dice, known = replay.dice_at(self.place)
        if seed is None and not known:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        offsets = _offsets(self.dtype)
        stepped = bool(replay.streams)
        self.native = _native.Sampler(
            replay.native,
            dice,
            None if seed is None else operator.index(seed) % 2**64,
            _takes(replay, self.dtype, stack),
            self.dtype.itemsize,
            n_step if stepped else 0,
            gamma,
            length,
            [offsets.get(name, -1) if stepped or name not in TRANSITION else -1 for name in _PLACES],
        )

    def batch(self, batch_size: int, memory: NDArray[np.uint8] | None = None) -> Batch:
        """Memory for a batch, to be filled by ``sample(..., out=)`` again and again; with ``memory``, in those
        bytes."""
        _require_some(batch_size)
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
        """Draw ``batch_size`` transitions, or as many sequences; into ``out``, or into a new batch.

        ``NothingToSample`` if there is none. Where a limiter holds samplers back, this waits: until ``timeout``
        (``WaitTimeout``) or the death of one of ``peers`` (``PeerDied``).
        """
        self.require_open()
        if out is None:
            _require_some(batch_size)
            out = self.batch(batch_size, self._spares.of(self.dtype.itemsize * batch_size * self.length))
        elif out.dtype is not self.dtype or out.shape[0] != batch_size:
            raise ValueError(
                f"out must be what this sampler's batch({batch_size}) returned, found one of {out.shape[0]} rows of "
                f"{list(out)}"
            )
        self.native.sample(out.block, beta, self.threads, timeout, peers)
        return out

    def require_open(self) -> None:
        if not self._leave.alive:
            raise MemlaneError(f"a sampler of the {self.replay.native.label} was used after close(); make another")

    def close(self) -> None:
        """Give the place to the next sampler. Again is harmless."""
        self._leave()


def _require_some(batch_size: int) -> None:
    if operator.index(batch_size) < 1:
        raise ValueError(f"batch_size must be 1 or more, found {batch_size}")


def _give_back(roster: Roster, place: int) -> None:
    with contextlib.suppress(SegmentClosed):  # then nobody takes it any more
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
    if operator.index(n_step) < 1 or operator.index(length) < 1 or operator.index(threads) < 1:
        raise ValueError(f"n_step, length and threads must be 1 or more, found {n_step=}, {length=} and {threads=}")
    if not (math.isfinite(gamma) and 0 <= gamma <= 1):
        raise ValueError(f"gamma must be between 0 and 1, found {gamma!r}")
    for name, many in stack.items():
        if name not in replay.layout or operator.index(many) < 1:
            raise ValueError(
                f"stack must name fields among {list(replay.layout.fields)} with 1 or more, found {name!r}: {many}"
            )
    if unknown := [name for name in extras if name not in EXTRAS]:
        raise ValueError(f"extras must be among {list(EXTRAS)}, found {unknown}")
    follows = n_step > 1 or length > 1 or any(many > 1 for many in stack.values())
    if not replay.streams and (follows or "horizon" in extras or "version" in extras):
        raise ValueError(
            "n_step, stack, length, horizon and version are of the rows of an environment: make the replay with "
            "streams=..., one for each"
        )


def _batch_dtype(replay: Replay, stack: Mapping[str, int], length: int, extras: list[str]) -> np.dtype[Any]:
    def shaped(name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        field, many = replay.layout[name], stack.get(name, 1)
        return field.dtype, (many, *field.shape) if many > 1 else field.shape

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
        raise ValueError(f"a batch has fields {sorted(clash)} of its own; name those of the rows differently")
    if summed := [name for name in TRANSITION if stack.get(name, 1) > 1]:
        raise ValueError(f"{summed[0]!r} is summed over the steps and cannot be stacked; use length= for sequences")
    stacked = any(many > 1 for many in stack.values())
    row = replay.row_dtype if not stacked else packed_fields([(name, *shaped(name)) for name in replay.layout.fields])
    widest = max([8, *(alignment_of(field.dtype) for field in replay.layout)])
    rest = packed_fields([(name, *spec) for name, spec in fields.items()], row.itemsize, widest)
    assert row.fields is not None
    assert rest.fields is not None
    assert row.names is not None
    places = {**row.fields, **rest.fields} if fields else dict(row.fields)
    return np.dtype(
        {
            "names": [*row.names, *fields],
            "formats": [places[name][0] for name in (*row.names, *fields)],
            "offsets": [places[name][1] for name in (*row.names, *fields)],
            "itemsize": rest.itemsize if fields else row.itemsize,
        }
    )


def _takes(replay: Replay, dtype: np.dtype[Any], stack: Mapping[str, int]) -> list[tuple[int, int, int, int, bool]]:
    """From where in a row, how many bytes, to where in a batch's row, stacked how often, of the row or of what
    follows."""
    here, there = _offsets(replay.row_dtype), _offsets(dtype)
    takes = []
    if any(many > 1 for many in stack.values()):
        for field in replay.layout:
            takes.append((here[field.name], field.nbytes, there[field.name], stack.get(field.name, 1), False))
    else:  # all of the row as it lies there, in one piece
        takes.append((0, replay.row_dtype.itemsize, 0, 1, False))
    for name in replay.observations:
        takes.append((here[name], replay.layout[name].nbytes, there[f"next_{name}"], stack.get(name, 1), True))
    return takes


def _offsets(dtype: np.dtype[Any]) -> dict[str, int]:
    assert dtype.fields is not None
    return {name: field[1] for name, field in dtype.fields.items()}
