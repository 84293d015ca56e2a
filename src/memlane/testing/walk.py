"""Walk: environments driven by a tape of actions, and a trace of what each of them showed.

A trace has events, for each environment in its own order: a reset, then steps, after an end a reset again. In this form
the three autoreset modes, any number of threads and any number of environments can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from memlane.native import Spec
from memlane.native.spec import FieldOf
from memlane.testing.bench import DISABLED, NEXT_STEP, SAME_STEP, Bench, bits

NO_LIMIT = np.iinfo(np.int32).max
_LARGEST_KEPT = 1024  # bytes of a row; of larger ones (pictures) only a hash
RESET, STEP = 1, 2

Tape = list[NDArray[Any]]
"""For each action field, what every environment does in its first, second, ... step."""


def make_tape(spec: Spec, num_envs: int, steps: int, seed: int) -> Tape:
    rng = np.random.default_rng(seed)
    shape = (steps, num_envs * spec.num_agents)
    return [_actions(one, shape, rng) for one in spec.actions]


def _actions(field: FieldOf, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    space, shape = field.space, (*shape, *field.shape)
    if isinstance(space, Discrete):
        return rng.integers(int(space.start), int(space.start + space.n), shape, np.int64)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.start, space.start + space.nvec, shape, np.int64)
    assert isinstance(space, Box)
    if field.dtype.kind != "f":
        return rng.integers(space.low, space.high, shape, field.dtype.type, endpoint=True)
    low, high = np.broadcast_to(space.low, shape), np.broadcast_to(space.high, shape)
    drawn = rng.normal(size=shape)
    closed = np.isfinite(low) & np.isfinite(high)
    with np.errstate(all="ignore"):  # where there is no bound, what comes of it is not used
        drawn = np.where(closed, low + (high.astype(np.float64) - low) * rng.random(shape), drawn)
        # The bounds themselves are actions too, and where slips hide.
        drawn = np.where(closed & (rng.random(shape) < 0.1), np.where(rng.random(shape) < 0.5, low, high), drawn)
        clipped: NDArray[Any] = np.clip(drawn.astype(field.dtype), low, high)
    return clipped


def words(num_envs: int, seed: int) -> NDArray[np.uint64]:
    return np.random.default_rng([seed, 1]).integers(0, 2**64 - 1, num_envs, np.uint64)


@dataclass(frozen=True)
class Difference:
    event: int
    env: int
    kind: str
    field: str
    here: str
    there: str


class Trace:
    def __init__(self, bench: Bench, most: int) -> None:
        self._bench = bench
        envs, agents = bench.num_envs, bench.num_agents
        self.count = np.zeros(envs, np.int64)
        shape = (most, envs)
        self.columns: dict[str, NDArray[Any]] = {
            "kind": np.zeros(shape, np.uint8),
            "terminated": np.zeros((*shape, agents), np.uint8),
            "truncated": np.zeros((*shape, agents), np.uint8),
            "rewards": np.zeros((*shape, agents)),
        }
        spec = bench.spec
        for part, fields in (("observations", spec.observations), ("infos", spec.infos)):
            for name, one in zip(bench.names(part), fields, strict=True):
                if _row_bytes(one) > _LARGEST_KEPT:
                    self.columns[name] = np.zeros((*shape, agents), np.int64)
                else:
                    self.columns[name] = np.zeros((*shape, agents, *one.shape), one.dtype)
        self.columns["random"] = np.zeros(shape, np.uint64)
        self.columns["alive"] = np.zeros((*shape, agents), np.uint8)

    def add_resets(self, envs: NDArray[np.intp]) -> None:
        bench = self._bench
        alive = bench.alive.reshape(bench.num_envs, -1) != 0
        self._put("random", envs, bench.random)
        self._put("alive", envs, alive)
        self._add(envs, RESET, bench.observations, bench.infos, alive)

    def add_steps(
        self, envs: NDArray[np.intp], alive: NDArray[np.bool_], last: NDArray[np.bool_] | None = None
    ) -> None:
        """``alive``: who was in the game before. ``last``: environments that were reset already; see what was kept."""
        bench = self._bench
        for name in ("rewards", "terminated", "truncated"):
            array = bench.buffers[name].array.reshape(alive.shape)
            self._put(name, envs, np.where(alive, array if name == "rewards" else array != 0, 0))
        observations, infos = bench.observations, bench.infos
        if last is not None:
            rows = np.repeat(last, bench.num_agents)
            observations = [_pick(rows, *pair) for pair in zip(bench.final_observations, observations, strict=True)]
            infos = [_pick(rows, *pair) for pair in zip(bench.final_infos, infos, strict=True)]
        self._add(envs, STEP, observations, infos, alive)

    def _add(
        self,
        envs: NDArray[np.intp],
        kind: int,
        observations: list[NDArray[Any]],
        infos: list[NDArray[Any]],
        alive: NDArray[np.bool_],
    ) -> None:
        """Of agents that are not in the game nothing counts."""
        self._put("kind", envs, np.full(self._bench.num_envs, kind))
        for part, arrays in (("observations", observations), ("infos", infos)):
            for name, array in zip(self._bench.names(part), arrays, strict=True):
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
        """The first, if any. ``pairs``: which environments here and there are the same; ``until``: how many events of
        each count."""
        pairs = [(env, env) for env in range(len(self.count))] if pairs is None else pairs
        here, there = (np.array(side, np.intp) for side in zip(*pairs, strict=True))
        both = np.minimum(self.count[here], other.count[there])
        if until is not None:
            both = np.minimum(both, until)
        events = int(both.max(initial=0))
        counts = np.arange(events)[:, None] < both
        first: tuple[int, int, str] | None = None
        for name in filter(columns, self.columns):
            mine, others = self.columns[name][:events, here], other.columns[name][:events, there]
            shape = mine.shape[:2]
            unequal = (bits(mine) != bits(others)).reshape(*shape, -1).any(2) & counts if events else np.zeros((0, 0))
            if unequal.any():
                event, at = (int(found[0]) for found in np.nonzero(unequal))
                if first is None or event < first[0]:
                    first = event, at, name
        if first is None:
            return None
        event, at, name = first
        kind = "reset" if self.columns["kind"][event, here[at]] == RESET else "step"
        ours, theirs = self.columns[name][event, here[at]], other.columns[name][event, there[at]]
        return Difference(event, int(here[at]), kind, name, in_short(ours), in_short(theirs))


def _row_bytes(field: FieldOf) -> int:
    return int(np.prod(field.shape)) * field.dtype.itemsize


def _pick(rows: NDArray[np.bool_], last: NDArray[Any], now: NDArray[Any]) -> NDArray[Any]:
    picked = now.copy()
    picked[rows] = last[rows]
    return picked


def in_short(value: NDArray[Any]) -> str:
    text = np.array2string(np.squeeze(value), threshold=8, floatmode="unique", separator=", ")
    return " ".join(text.split())[:120]


class Walk:
    """Calls the C functions as the host would, in the plainest way: all in one range, and who has ended is reset before
    the next step."""

    def __init__(self, bench: Bench, tape: Tape, limit: int | None = None) -> None:
        spec = bench.spec
        self.bench, self.tape = bench, tape
        self.limit = (spec.max_episode_steps or NO_LIMIT) if limit is None else limit
        self.steps = len(tape[0])
        self.trace = Trace(bench, 2 * self.steps + 2)
        self.before_reset: Callable[[], None] = lambda: None
        self.after_reset: Callable[[int, int], None] = lambda _, __: None
        self.after_step: Callable[[NDArray[np.bool_]], None] = lambda _: None

    def begin(self, random: NDArray[np.uint64]) -> None:
        bench = self.bench
        bench.step = -1
        bench.random[:] = random
        bench.rewards[:] = bench.terminated[:] = bench.truncated[:] = bench.ended[:] = 0
        self._begin_episodes(0, bench.num_envs)

    def reset_ended(self) -> None:
        for begin, end in ranges_where(self.bench.ended != 0):
            self._begin_episodes(begin, end)
        self.bench.ended[:] = 0

    def step(self, which: NDArray[np.bool_] | None = None) -> None:
        """Of all, or of some; see ``trace``."""
        bench = self.bench
        bench.step += 1
        for array, actions in zip(bench.actions, self.tape, strict=True):
            array[:] = actions[bench.step]
        bench.rewards[:] = bench.terminated[:] = bench.truncated[:] = 0
        alive = bench.alive.reshape(bench.num_envs, -1) != 0
        for begin, end in ranges_where(np.ones(bench.num_envs, np.bool_) if which is None else which):
            bench.call("step", begin, end)
        self.after_step(alive)
        self._end_episodes(alive)
        envs = np.arange(bench.num_envs) if which is None else np.flatnonzero(which)
        self.trace.add_steps(envs, alive)

    def run(self, random: NDArray[np.uint64], between: Callable[[], None] = lambda: None) -> Trace:
        self.begin(random)
        for _ in range(self.steps):
            self.reset_ended()
            self.step()
            between()
        return self.trace

    def _begin_episodes(self, begin: int, end: int) -> None:
        bench = self.bench
        bench.steps[begin:end] = 0
        bench.alive[begin * bench.num_agents : end * bench.num_agents] = 1
        self.before_reset()
        bench.call("reset", begin, end)
        self.after_reset(begin, end)
        self.trace.add_resets(np.arange(begin, end))

    def _end_episodes(self, alive: NDArray[np.bool_]) -> None:
        """What the host makes of it; the shape of ``alive`` is (environments, agents)."""
        bench = self.bench
        bench.steps += 1
        cut = (bench.steps >= self.limit)[:, None]
        terminated, truncated = (array.reshape(alive.shape) for array in (bench.terminated, bench.truncated))
        terminated[:] = (terminated != 0) & alive
        # With several agents the host cuts off those who are still in the game and did not end by themselves.
        truncated[:] = ((truncated != 0) | (cut if bench.num_agents == 1 else cut & (terminated == 0))) & alive
        left = alive & (terminated == 0) & (truncated == 0)
        bench.ended[:] = ~left.any(1)
        if bench.num_agents > 1:
            bench.alive[:] = left.ravel()
            gone = ~alive.ravel()
            bench.rewards[gone] = 0
            for array in bench.observations:
                array[gone] = 0


def ranges_where(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def host_walk(
    bench: Bench, tape: Tape, random: NDArray[np.uint64], mode: int, limit: int | None = None, num_threads: int = 1
) -> Trace:
    """The same through the real host. Who is reset in the place of a step keeps its action for the next one."""
    limit = bench.spec.max_episode_steps if limit is None else limit
    steps, envs = len(tape[0]), np.arange(bench.num_envs)
    trace = Trace(bench, 2 * steps + 2)
    host = bench.host(mode, 0 if limit == NO_LIMIT else limit, num_threads)
    bench.step = -1
    with bench.guarded("init"):
        said = host.init()
    assert said is None, said
    try:
        bench.random[:] = random
        with bench.guarded("reset"):
            host.reset()
        trace.add_resets(envs)
        made = np.zeros(bench.num_envs, np.int64)
        for bench.step in range(steps):
            before = bench.ended != 0
            if mode == DISABLED and before.any():
                with bench.guarded("reset"):
                    host.reset(before)
                trace.add_resets(np.flatnonzero(before))
            for array, actions in zip(bench.actions, tape, strict=True):
                rows = actions.reshape(steps, bench.num_envs, bench.num_agents, *array.shape[1:])
                array[:] = rows[made, envs].reshape(array.shape)
            alive = bench.alive.reshape(bench.num_envs, -1) != 0
            with bench.guarded(f"step, on {num_threads} thread(s)"):
                result = host.step_stored()
            assert result >= 0, f"the host answered {result}"
            stepped = ~before if mode == NEXT_STEP else np.ones(bench.num_envs, np.bool_)
            made[stepped] += 1
            ended = bench.ended != 0
            trace.add_steps(np.flatnonzero(stepped), alive, ended if mode == SAME_STEP else None)
            if mode == SAME_STEP and ended.any():
                trace.add_resets(np.flatnonzero(ended))
            if mode == NEXT_STEP and before.any():
                trace.add_resets(np.flatnonzero(before))
    finally:
        with bench.guarded("close"):
            host.close()
    return trace
