"""StepWriter: a worker writes what its environments return into its rows of the step segment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete

from memlane import _native
from memlane._native import PROGRESS_CURRENT_ENV, PROGRESS_STEPS
from memlane.core.rows import address
from memlane.spaces.column import Column
from memlane.spaces.nested import CompositeColumn
from memlane.spaces.objects import ObjectColumn
from memlane.vector.step_segment import StepSegment


class StepWriter:
    """Writes the rows of one worker's environments, which are counted from 0 here.

    A step is one native call when every value has exactly the type that its space says. Otherwise the value is
    converted here, or refused with an error that says what is wrong with it."""

    def __init__(self, steps: StepSegment, worker: int) -> None:
        self._first_env = steps.spec.ranges[worker].start
        rows = slice(self._first_env, steps.spec.ranges[worker].stop)
        self._rewards = steps.rewards[rows]
        self._terminated = steps.terminated[rows]
        self._truncated = steps.truncated[rows]
        self._progress = steps.progress[worker]
        self._observations = steps.observations
        # The native writer has only addresses, so the arrays behind them are kept alive here.
        self._description = _describe(self._observations, rows)
        self._infos = {
            key: (("number" if column.rows.ndim == 1 else "array", column.rows[rows]), present[rows])
            for key, (column, present) in steps.infos.items()
        }
        self.native = _native.StepWriter(
            self._description,
            address(self._rewards),
            address(self._terminated),
            address(self._truncated),
            address(self._progress),
            len(self._rewards),
            [(key, description, address(present)) for key, (description, present) in self._infos.items()],
        )

    def write_step(self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        """Write what a step of environment ``index`` returned."""
        if self.native.write_step(index, observation, reward, terminated, truncated):
            return
        self.write_observation(index, observation)
        try:
            if reward is None:  # numpy would store NaN
                raise TypeError
            if isinstance(reward, str | bytes):  # numpy would read it
                raise ValueError
            self._rewards[index] = reward
        except (TypeError, ValueError) as error:
            raise type(error)(f"a reward must be a number, found {reward!r}") from None
        self._terminated[index] = bool(terminated)
        self._truncated[index] = bool(truncated)
        self._progress[PROGRESS_CURRENT_ENV] = index + 1
        self._progress[PROGRESS_STEPS] += 1

    def write_observation(self, index: int, observation: Any) -> None:
        """Write what a reset of environment ``index`` returned."""
        if not self.native.write_observation(index, observation):
            self._observations.write(self._first_env + index, observation)


def _describe(column: Column, rows: slice) -> tuple[Any, ...] | None:
    """Describe a column for ``_native.ColumnWriter``; None if only Python can write a part of it."""
    space: Space[Any] = column.space
    if isinstance(column, ObjectColumn):
        return ("object", column.written, rows.start)
    if isinstance(column, CompositeColumn):
        parts = [_describe(part, rows) for part in column.parts]
        if not parts or any(part is None for part in parts):
            return None
        return ("dict", list(zip(space.spaces, parts, strict=True))) if isinstance(space, Dict) else ("tuple", parts)
    if column.rows is None:
        return None
    if type(space) is Box:
        return ("array", column.rows[rows])
    if type(space) is Discrete and space.dtype == np.int64:
        return ("integer", column.rows[rows], int(space.start), int(space.start) + int(space.n) - 1)
    return None
