"""Trajectories: run environments with given actions, record a trace of their results, and compare traces.

A trace is a sequence of events per environment: a reset, then steps, after the end of an episode another reset. In this
form runs with different autoreset modes, numbers of threads and numbers of environments can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.native import Spec
from memlane.native.lowlevel import Field, space_bounds
from memlane.testing.harness import Harness, bits

NO_LIMIT = np.iinfo(np.int32).max
_MAX_ROW_BYTES = 1024  # of larger rows (images) a trace has only a hash
RESET, STEP = 1, 2

Actions = list[NDArray[Any]]
"""For each action field, the values of all steps and rows: an array of shape (steps, rows, ...)."""


def random_actions(spec: Spec, num_envs: int, steps: int, seed: int) -> Actions:
    rng = np.random.default_rng(seed)
    shape = (steps, num_envs * spec.num_agents)
    return [_random_values(field, shape, rng) for field in spec.actions]


def _random_values(field: Field, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    shape = *shape, *field.shape
    low, high = space_bounds(field.space)
    if field.dtype.kind != "f":
        return rng.integers(low, high, shape, field.dtype.type, endpoint=True)
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    drawn = rng.normal(size=shape)
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(all="ignore"):  # results with infinite bounds are not used
        drawn = np.where(bounded, low + (high.astype(np.float64) - low) * rng.random(shape), drawn)
        # Some actions are exactly a bound: bugs are often there.
        drawn = np.where(bounded & (rng.random(shape) < 0.1), np.where(rng.random(shape) < 0.5, low, high), drawn)
        clipped: NDArray[Any] = np.clip(drawn.astype(field.dtype), low, high)
    return clipped


def rng_states(num_envs: int, seed: int) -> NDArray[np.uint64]:
    return np.random.default_rng([seed, 1]).integers(0, 2**64 - 1, num_envs, np.uint64)


@dataclass(frozen=True)
class Difference:
    """The first event at which two traces differ."""

    event: int
    """Index of the event in the trace of the environment."""
    env: int
    kind: str
    """``reset`` or ``step``."""
    field: str
    here: str
    """The value in the trace that was asked for its difference."""
    there: str
    """The value in the other trace."""


class Trace:
    """The results of all environments of a harness, event by event."""

    def __init__(self, harness: Harness, max_events: int) -> None:
        self._harness = harness
        envs, agents = harness.num_envs, harness.num_agents
        self.count = np.zeros(envs, np.int64)
        shape = (max_events, envs)
        self.columns: dict[str, NDArray[Any]] = {
            "kind": np.zeros(shape, np.uint8),
            "terminated": np.zeros((*shape, agents), np.uint8),
            "truncated": np.zeros((*shape, agents), np.uint8),
            "rewards": np.zeros((*shape, agents)),
        }
        spec = harness.spec
        for part, fields in (("observations", spec.observations), ("infos", spec.infos)):
            for name, field in zip(harness.names(part), fields, strict=True):
                if _row_bytes(field) > _MAX_ROW_BYTES:
                    self.columns[name] = np.zeros((*shape, agents), np.int64)
                else:
                    self.columns[name] = np.zeros((*shape, agents, *field.shape), field.dtype)
        self.columns["random"] = np.zeros(shape, np.uint64)
        self.columns["alive"] = np.zeros((*shape, agents), np.uint8)

    def add_resets(self, envs: NDArray[np.intp]) -> None:
        harness = self._harness
        alive = harness.alive.reshape(harness.num_envs, -1) != 0
        self._put("random", envs, harness.random)
        self._put("alive", envs, alive)
        self._add(envs, RESET, harness.observations, harness.infos, alive)

    def add_steps(
        self, envs: NDArray[np.intp], alive: NDArray[np.bool_], was_reset: NDArray[np.bool_] | None = None
    ) -> None:
        """``alive``: agents in the game before the step. ``was_reset``: environments that the step also reset; their
        results are in the final observations and infos."""
        harness = self._harness
        for name in ("rewards", "terminated", "truncated"):
            array = harness.buffers[name].array.reshape(alive.shape)
            self._put(name, envs, np.where(alive, array if name == "rewards" else array != 0, 0))
        observations, infos = harness.observations, harness.infos
        if was_reset is not None:
            rows = np.repeat(was_reset, harness.num_agents)
            observations = [_pick(rows, *pair) for pair in zip(harness.final_observations, observations, strict=True)]
            infos = [_pick(rows, *pair) for pair in zip(harness.final_infos, infos, strict=True)]
        self._add(envs, STEP, observations, infos, alive)

    def _add(
        self,
        envs: NDArray[np.intp],
        kind: int,
        observations: list[NDArray[Any]],
        infos: list[NDArray[Any]],
        alive: NDArray[np.bool_],
    ) -> None:
        """Add an event; the rows of agents that are not in the game are recorded as zeros."""
        self._put("kind", envs, np.full(self._harness.num_envs, kind))
        for part, arrays in (("observations", observations), ("infos", infos)):
            for name, array in zip(self._harness.names(part), arrays, strict=True):
                column = self.columns[name]
                rows = array.reshape(*alive.shape, *array.shape[1:])
                if column.ndim == 3 and array.ndim > 1:
                    hashes = [hash(row.tobytes()) for row in array]
                    rows = np.array(hashes, np.int64).reshape(alive.shape)
                mask = alive.reshape(alive.shape + (1,) * (rows.ndim - 2))
                self._put(name, envs, np.where(mask, rows, np.zeros((), rows.dtype)))
        self.count[envs] += 1

    def _put(self, name: str, envs: NDArray[np.intp], values: NDArray[Any]) -> None:
        self.columns[name][self.count[envs], envs] = values[envs]

    def difference(
        self,
        other: Trace,
        pairs: Sequence[tuple[int, int]] | None = None,
        until: NDArray[np.int64] | None = None,
        columns: Callable[[str], bool] = lambda _: True,
    ) -> Difference | None:
        """The first difference, or None. ``pairs``: environments of this and the other trace to compare; ``until``:
        number of events of each pair to compare."""
        pairs = [(env, env) for env in range(len(self.count))] if pairs is None else pairs
        here, there = (np.array(side, np.intp) for side in zip(*pairs, strict=True))
        counts = np.minimum(self.count[here], other.count[there])
        if until is not None:
            counts = np.minimum(counts, until)
        events = int(counts.max(initial=0))
        compared = np.arange(events)[:, None] < counts
        first: tuple[int, int, str] | None = None
        for name in filter(columns, self.columns):
            mine, others = self.columns[name][:events, here], other.columns[name][:events, there]
            shape = mine.shape[:2]
            unequal = (bits(mine) != bits(others)).reshape(*shape, -1).any(2) & compared if events else np.zeros((0, 0))
            if unequal.any():
                event, at = (int(indices[0]) for indices in np.nonzero(unequal))
                if first is None or event < first[0]:
                    first = event, at, name
        if first is None:
            return None
        event, at, name = first
        kind = "reset" if self.columns["kind"][event, here[at]] == RESET else "step"
        ours, theirs = self.columns[name][event, here[at]], other.columns[name][event, there[at]]
        return Difference(event, int(here[at]), kind, name, _format(ours), _format(theirs))


def _row_bytes(field: Field) -> int:
    return int(np.prod(field.shape)) * field.dtype.itemsize


def _pick(rows: NDArray[np.bool_], final: NDArray[Any], current: NDArray[Any]) -> NDArray[Any]:
    picked = current.copy()
    picked[rows] = final[rows]
    return picked


def _format(value: NDArray[Any]) -> str:
    text = np.array2string(np.squeeze(value), threshold=8, floatmode="unique", separator=", ")
    return " ".join(text.split())[:120]


class ReferenceRun:
    """Calls the C functions as the host does, in the simplest way: all environments in one range, and environments that
    have ended are reset before the next step."""

    def __init__(self, harness: Harness, actions: Actions, limit: int | None = None) -> None:
        spec = harness.spec
        self.harness, self.actions = harness, actions
        self.limit = (spec.max_episode_steps or NO_LIMIT) if limit is None else limit
        self.steps = len(actions[0])
        self.trace = Trace(harness, 2 * self.steps + 2)
        self.before_reset: Callable[[], None] = lambda: None
        self.after_reset: Callable[[int, int], None] = lambda _, __: None
        self.after_step: Callable[[NDArray[np.bool_]], None] = lambda _: None

    def begin(self, random: NDArray[np.uint64]) -> None:
        harness = self.harness
        harness.step = -1
        harness.random[:] = random
        harness.rewards[:] = harness.terminated[:] = harness.truncated[:] = harness.ended[:] = 0
        self._begin_episodes(0, harness.num_envs)

    def reset_ended(self) -> None:
        for begin, end in ranges_where(self.harness.ended != 0):
            self._begin_episodes(begin, end)
        self.harness.ended[:] = 0

    def step(self, which: NDArray[np.bool_] | None = None) -> None:
        """Step all environments, or those where ``which`` is True, and add the results to ``trace``."""
        harness = self.harness
        harness.step += 1
        for array, actions in zip(harness.actions, self.actions, strict=True):
            array[:] = actions[harness.step]
        harness.rewards[:] = harness.terminated[:] = harness.truncated[:] = 0
        alive = harness.alive.reshape(harness.num_envs, -1) != 0
        for begin, end in ranges_where(np.ones(harness.num_envs, np.bool_) if which is None else which):
            harness.call("step", begin, end)
        self.after_step(alive)
        self._end_episodes(alive)
        envs = np.arange(harness.num_envs) if which is None else np.flatnonzero(which)
        self.trace.add_steps(envs, alive)

    def run(self, random: NDArray[np.uint64], between: Callable[[], None] = lambda: None) -> Trace:
        self.begin(random)
        for _ in range(self.steps):
            self.reset_ended()
            self.step()
            between()
        return self.trace

    def _begin_episodes(self, begin: int, end: int) -> None:
        harness = self.harness
        harness.steps[begin:end] = 0
        harness.alive[begin * harness.num_agents : end * harness.num_agents] = 1
        self.before_reset()
        harness.call("reset", begin, end)
        self.after_reset(begin, end)
        self.trace.add_resets(np.arange(begin, end))

    def _end_episodes(self, alive: NDArray[np.bool_]) -> None:
        """Count the step and end episodes, as the host does. The shape of ``alive`` is (environments, agents)."""
        harness = self.harness
        harness.steps += 1
        cut = (harness.steps >= self.limit)[:, None]
        terminated, truncated = (array.reshape(alive.shape) for array in (harness.terminated, harness.truncated))
        terminated[:] = (terminated != 0) & alive
        # With several agents the host truncates those that are still in the game and did not terminate.
        truncated[:] = ((truncated != 0) | (cut if harness.num_agents == 1 else cut & (terminated == 0))) & alive
        remaining = alive & (terminated == 0) & (truncated == 0)
        harness.ended[:] = ~remaining.any(1)
        if harness.num_agents > 1:
            harness.alive[:] = remaining.ravel()
            gone = ~alive.ravel()
            harness.rewards[gone] = 0
            for array in harness.observations:
                array[gone] = 0


def ranges_where(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges (begin, end) in which ``mask`` is True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def host_run(
    harness: Harness,
    actions: Actions,
    random: NDArray[np.uint64],
    mode: int,
    limit: int | None = None,
    num_threads: int = 1,
) -> Trace:
    """Run the environments with the host of memlane. An environment that is reset instead of stepped uses its action in
    the next step."""
    limit = harness.spec.max_episode_steps if limit is None else limit
    steps, envs = len(actions[0]), np.arange(harness.num_envs)
    trace = Trace(harness, 2 * steps + 2)
    host = harness.host(mode, 0 if limit == NO_LIMIT else limit, num_threads)
    harness.step = -1
    with harness.guarded("init"):
        message = host.init()
    assert message is None, message
    try:
        harness.random[:] = random
        with harness.guarded("reset"):
            host.reset()
        trace.add_resets(envs)
        steps_done = np.zeros(harness.num_envs, np.int64)
        for harness.step in range(steps):
            before = harness.ended != 0
            if mode == _native.AUTORESET_DISABLED and before.any():
                with harness.guarded("reset"):
                    host.reset(before)
                trace.add_resets(np.flatnonzero(before))
            for array, values in zip(harness.actions, actions, strict=True):
                rows = values.reshape(steps, harness.num_envs, harness.num_agents, *array.shape[1:])
                array[:] = rows[steps_done, envs].reshape(array.shape)
            alive = harness.alive.reshape(harness.num_envs, -1) != 0
            with harness.guarded(f"step, on {num_threads} thread(s)"):
                result = host.step_stored()
            assert result >= 0, f"the host returned {result}"
            stepped = ~before if mode == _native.AUTORESET_NEXT_STEP else np.ones(harness.num_envs, np.bool_)
            steps_done[stepped] += 1
            ended = harness.ended != 0
            trace.add_steps(np.flatnonzero(stepped), alive, ended if mode == _native.AUTORESET_SAME_STEP else None)
            if mode == _native.AUTORESET_SAME_STEP and ended.any():
                trace.add_resets(np.flatnonzero(ended))
            if mode == _native.AUTORESET_NEXT_STEP and before.any():
                trace.add_resets(np.flatnonzero(before))
    finally:
        with harness.guarded("close"):
            host.close()
    return trace
