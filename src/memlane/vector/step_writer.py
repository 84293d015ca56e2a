"""StepWriter: a worker's pen for what its environments return, in its rows of the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete

from memlane import _native
from memlane.core.rows import address
from memlane.spaces.column import Column
from memlane.spaces.nested import CompositeColumn
from memlane.vector.step_segment import STEPS, THROUGH, Steps


class StepWriter:
    """``put(k, observation, reward, terminated, truncated)`` for the k-th environment of a worker. One native call when
    everything is plainly what the space says; otherwise a closer look, and an error that says what is wrong."""

    def __init__(self, steps: Steps, worker: int) -> None:
        self._first = steps.plan.ranges[worker].start
        mine = slice(self._first, steps.plan.ranges[worker].stop)
        self._rewards = steps.rewards[mine]
        self._terminated = steps.terminated[mine]
        self._truncated = steps.truncated[mine]
        self._progress = steps.progress[worker]
        self._column = steps.observations
        # The native side has addresses only: what lies there is kept alive here.
        self._place = None if self._column is None else _place(self._column, mine)
        self._declared = {
            key: (("number" if column.rows.ndim == 1 else "array", column.rows[mine]), told[mine])
            for key, (column, told) in steps.infos.items()
        }
        self.native = _native.StepWriter(
            self._place,
            address(self._rewards),
            address(self._terminated),
            address(self._truncated),
            address(self._progress),
            len(self._rewards),
            [(key, place, address(told)) for key, (place, told) in self._declared.items()],
        )

    def put(self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        if self.native.put(index, observation, reward, terminated, truncated):
            return
        self.put_observation(index, observation)
        if reward is None:  # numpy makes NaN of it
            raise TypeError("a reward must be a number, found None")
        self._rewards[index] = reward
        self._terminated[index] = bool(terminated)
        self._truncated[index] = bool(truncated)
        self._progress[THROUGH] = index + 1
        self._progress[STEPS] += 1

    def put_observation(self, index: int, observation: Any) -> None:
        if self._column is not None and not self.native.put_observation(index, observation):
            self._column.write(self._first + index, observation)


def _place(column: Column, mine: slice) -> tuple[Any, ...] | None:
    """What the native side is told of a column; None if it has something in it that is left to Python."""
    space: Space[Any] = column.space
    if isinstance(column, CompositeColumn):
        parts = [_place(part, mine) for part in column.parts]
        if not parts or any(part is None for part in parts):
            return None
        return ("dict", list(zip(space.spaces, parts, strict=True))) if isinstance(space, Dict) else ("tuple", parts)
    if column.rows is None:
        return None
    if type(space) is Box:
        return ("array", column.rows[mine])
    if type(space) is Discrete and space.dtype == np.int64:
        return ("whole", column.rows[mine], int(space.start), int(space.start) + int(space.n) - 1)
    return None
