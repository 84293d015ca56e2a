"""Outcomes: a worker's pen for what its environments return, in its rows of the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from memlane import _native
from memlane.vector.steps import STEPS, THROUGH, Steps, address


class Outcomes:
    """``put(k, observation, reward, terminated, truncated)`` for the k-th environment of a worker. One native call when
    everything is plainly what the space says; otherwise a closer look, and an error that says what is wrong."""

    def __init__(self, steps: Steps, worker: int) -> None:
        self._steps = steps
        self._first = steps.plan.ranges[worker].start
        mine = slice(self._first, steps.plan.ranges[worker].stop)
        self._rewards = steps.rewards[mine]
        self._terminated = steps.terminated[mine]
        self._truncated = steps.truncated[mine]
        self._progress = steps.progress[worker]
        self._column = steps.observations
        space, rows, low, high = steps.plan.observation_space, None, None, None
        if isinstance(space, Box | Discrete) and self._column is not None and self._column.rows is not None:
            rows = self._column.rows[mine]
        if isinstance(space, Discrete):
            low, high = int(space.start), int(space.start) + int(space.n)
            if space.dtype != np.int64:
                rows = None
        self._kept = rows  # the native side has its address only
        self._native = _native.Outcomes(
            rows,
            address(self._rewards),
            address(self._terminated),
            address(self._truncated),
            address(self._progress),
            len(self._rewards),
            np.ndarray,
            low,
            high,
        )
        self.fast_put = self._native.put

    def put(self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        if self.fast_put(index, observation, reward, terminated, truncated):
            return
        self.put_observation(index, observation)
        self._rewards[index] = reward
        self._terminated[index] = bool(terminated)
        self._truncated[index] = bool(truncated)
        self._progress[THROUGH] = index + 1
        self._progress[STEPS] += 1

    def put_observation(self, index: int, observation: Any) -> None:
        if self._column is not None and not self._native.put_observation(index, observation):
            self._column.write(self._first + index, observation)
