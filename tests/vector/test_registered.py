"""Observations whose space a user registered with the shared-memory functions; and batches that are only lent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, OneOf, Sequence, Space, Text, Tuple
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from memlane.spaces import Capacity, create_shared_memory, read_from_shared_memory, write_to_shared_memory
from memlane.spaces.registered import RegisteredColumn
from tests.support.processes import within
from tests.support.vector_envs import Shower, difference, ours

# Gymnasium's logger speaks through warnings.
pytestmark = [pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): "), pytest.mark.timeout(120, method="signal")]

N = 3
PLAIN, RAISE, KILL = range(3)
PAIR = Box(-1e9, 1e9, (2,), np.float64)
CODE = Box(0, 255, (), np.uint8)
TRAIL = Sequence(Discrete(100))


# --------------------------------------------------------------------------------------------------------------- spaces


class Custom(Space[Any]):
    """Two of a kind are equal."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]


class Point(Custom):
    """Two numbers. A batch is an array, and Gymnasium knows nothing of it."""


class Letter(Custom):
    """A string of one letter. A batch is a tuple."""


class Pose(Custom):
    """Two dicts of numbers. A batch is a dict of arrays, and batch_space is registered."""


class Riddle(Custom):
    """A batch is a dict of arrays, and batch_space is not registered."""


class Trail(Custom):
    """A tuple of numbers, of any length: its memory needs a capacity."""


class Half(Custom):
    """It can be created, and never be read."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """Here and not where a worker would come by when it imports this file."""
    _register(Point, lambda _: PAIR, np.asarray, lambda batch: batch)
    _register(Letter, lambda _: CODE, lambda one: np.uint8(ord(one)), lambda codes: tuple(map(chr, codes)))
    for kind in (Pose, Riddle):
        _register(
            kind, lambda _: PAIR, lambda one: [one["x"], one["y"]], lambda pairs: {"x": pairs.T[0], "y": pairs.T[1]}
        )
    create_shared_memory.register(
        Trail, lambda _, n=1, ctx=None, *, capacity=None: create_shared_memory(TRAIL, n, ctx, capacity=capacity)
    )
    read_from_shared_memory.register(Trail, lambda _, memory, n=1: read_from_shared_memory(TRAIL, memory, n))
    write_to_shared_memory.register(
        Trail, lambda _, index, one, memory: write_to_shared_memory(TRAIL, index, one, memory)
    )
    create_shared_memory.register(Half, lambda _, n=1, ctx=None: create_shared_memory(CODE, n, ctx))
    write_to_shared_memory.register(
        Half, lambda _, index, one, memory: write_to_shared_memory(CODE, index, one, memory)
    )

    number = Box(-1e9, 1e9, (), np.float64)
    batch_space.register(Pose, lambda _, n=1: batch_space(Dict({"x": number, "y": number}), n))
    create_empty_array.register(Pose, lambda _, n=1, fn=np.zeros: {"x": fn(n), "y": fn(n)})

    @concatenate.register(Pose)
    def _together(_: Pose, poses: Any, out: Any) -> Any:
        for row, pose in enumerate(poses):
            out["x"][row], out["y"][row] = pose["x"], pose["y"]
        return out


def _register(
    kind: type, over: Callable[[Any], Space[Any]], pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
) -> None:
    """Values of ``kind`` as rows of another space."""
    create_shared_memory.register(kind, lambda space, n=1, ctx=None: create_shared_memory(over(space), n, ctx))
    read_from_shared_memory.register(
        kind, lambda space, memory, n=1: unpack(read_from_shared_memory(over(space), memory, n))
    )
    write_to_shared_memory.register(
        kind, lambda space, index, one, memory: write_to_shared_memory(over(space), index, pack(one), memory)
    )


SPACES: dict[str, Space[Any]] = {
    "array": Point(),
    "tuple": Letter(),
    "dict": Pose(),
    "Dict": Dict({"at": Discrete(100), "letter": Letter(), "more": Dict({}), "point": Point(), "pose": Pose()}),
    "Tuple": Tuple((Point(), Tuple((Letter(), Text(3))))),
    "OneOf": OneOf((Point(), Pose(), Letter())),
}


def value(space: Space[Any], env: int, step: int) -> Any:
    """What environment ``env`` shows after so many steps."""
    match space:
        case Point():
            return np.float64([env, step])
        case Pose() | Riddle():
            return {"x": np.float64(env), "y": np.float64(step)}
        case Letter():
            return chr(97 + 10 * env + step)
        case Trail() | Sequence():
            return tuple(np.arange(step))
        case Text():
            return str(step)
        case Dict():
            return {key: value(part, env, step) for key, part in space.spaces.items()}
        case Tuple():
            return tuple(value(part, env, step) for part in space.spaces)
        case OneOf():
            choice = (env + step) % len(space.spaces)
            return np.int64(choice), value(space.spaces[choice], env, step)
    return np.int64(10 * env + step)


def together(space: Space[Any], values: list[Any]) -> Any:
    """A batch of these."""
    match space:
        case Point():
            return np.stack(values)
        case Pose():
            return {key: np.array([one[key] for one in values]) for key in ("x", "y")}
        case Dict():
            return {key: together(part, [one[key] for one in values]) for key, part in space.spaces.items()}
        case Tuple():
            return tuple(together(part, [one[at] for one in values]) for at, part in enumerate(space.spaces))
        case Discrete():
            return np.array(values)
    return tuple(values)


class Walker(gymnasium.Env[Any, Any]):
    """Shows ``value``; its actions are faults."""

    action_space: Space[Any] = Discrete(3)

    def __init__(self, space: Space[Any], env: int) -> None:
        self.observation_space = space
        self.env = env
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return value(self.observation_space, self.env, 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise ValueError("bad luck")
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return value(self.observation_space, self.env, self.steps), 1.0, False, False, {}


def walkers(space: Space[Any]) -> list[Callable[[], Walker]]:
    return [partial(Walker, space, env) for env in range(N)]


def shown(space: Space[Any], steps: dict[int, int]) -> Any:
    """A batch of environments after so many steps each."""
    return together(space, [value(space, env, step) for env, step in steps.items()])


def assert_same(found: Any, expected: Any) -> None:
    assert difference(found, expected) is None, difference(found, expected)


each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("name", "context"),
    [*((name, "forkserver") for name in SPACES), ("Dict", "fork"), ("Dict", "spawn")],
)
def test_registered_spaces_are_stepped_sent_and_received_in_the_form_that_they_are_read_in(
    name: str, context: str
) -> None:
    space = SPACES[name]
    with ours(walkers(space), context=context) as envs:
        assert_same(envs.reset()[0], shown(space, {0: 0, 1: 0, 2: 0}))
        envs.send([0, 0], [2, 1])
        observations, *_, ids = envs.recv(2)
        assert ids.tolist() == [1, 2]
        assert_same(observations, shown(space, {1: 1, 2: 1}))
        assert_same(envs.step([0] * N)[0], shown(space, {0: 1, 1: 2, 2: 2}))


@each_space
def test_what_was_received_does_not_change_with_the_next_step(space: Space[Any]) -> None:
    with ours(walkers(space)) as envs:
        batch = envs.reset()[0]
        envs.send([0] * N)
        received = envs.recv(N)[0]
        envs.step([0] * N)
        assert_same(batch, shown(space, dict.fromkeys(range(N), 0)))
        assert_same(received, shown(space, dict.fromkeys(range(N), 1)))


def test_a_batch_that_gymnasium_cannot_take_apart_is_an_error_that_says_what_to_register() -> None:
    with ours(walkers(Riddle())) as envs:
        envs.reset()
        envs.send([0] * N)
        with pytest.raises(CustomSpaceError, match=r"Riddle.*3 values.*found dict.*`batch_space` and `iterate`"):
            envs.recv(N)


def test_a_column_of_a_registered_space_reads_some_rows_and_single_ones() -> None:
    space = SPACES["Dict"]
    column = RegisteredColumn.create(space, N)
    for env in range(N):
        column.write(env, value(space, env, 5))
    assert_same(column.read(1, 3), shown(space, {1: 5, 2: 5}))
    assert_same(column.read(2, 2)["point"], np.empty((0, 2)))
    assert_same(column.read_row(2), value(space, 2, 5))
    before = column.read_row(0)
    column.write(0, value(space, 0, 6))
    assert_same(before, value(space, 0, 5))


SCRIPT = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from memlane.spaces import create_shared_memory, read_from_shared_memory, write_to_shared_memory


class Point(Space):
    def __eq__(self, other):
        return type(other) is type(self)


PAIR = Box(-9, 9, (2,), np.float64)
create_shared_memory.register(Point, lambda space, n=1, ctx=None: create_shared_memory(PAIR, n, ctx))
read_from_shared_memory.register(Point, lambda space, memory, n=1: read_from_shared_memory(PAIR, memory, n))
write_to_shared_memory.register(Point, lambda space, i, one, memory: write_to_shared_memory(PAIR, i, one, memory))

import memlane.vector  # after they were registered


class Env(gymnasium.Env):
    observation_space, action_space = Point(), Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.float64([0, 0]), {}

    def step(self, action):
        if action == 2:
            raise ValueError("on purpose")
        return np.float64([1, action]), 1.0, False, False, {}


envs = memlane.vector.AsyncVectorEnv([Env] * 2, num_workers=2, on_error="restart", autoreset_mode="SameStep")
envs.reset()
envs.step([0, 1])
observations, *_, infos = envs.step([1, 2])
print(observations.tolist(), infos["final_obs"][1].tolist())
envs.close()
"""


def test_a_script_may_register_its_space_before_it_imports_the_vector_environments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=within(100), check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[[1.0, 1.0], [0.0, 0.0]] [1.0, 1.0]"), done.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------------- restarts


restarting = partial(ours, num_workers=2, context="forkserver", on_error="restart")
"""With three environments, the first has a worker of its own: it can die alone."""


@each_space
@pytest.mark.parametrize("fault", [RAISE, KILL], ids=["exception", "kill"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=["next step", "same step"])
def test_environments_with_a_registered_space_are_restarted(space: Space[Any], fault: int, mode: AutoresetMode) -> None:
    same_step = mode is AutoresetMode.SAME_STEP
    with restarting(walkers(space), autoreset_mode=mode) as envs:
        envs.reset()
        envs.step([0] * N)
        observations, rewards, _, truncated, infos = envs.step([fault, 0, 0])
        assert_same(observations, shown(space, {0: 0, 1: 2, 2: 2}))
        assert truncated.tolist() == [True, False, False]
        assert rewards.tolist() == [0.0, 1.0, 1.0]
        assert infos["restarted"][0]
        assert ("final_obs" in infos) == same_step
        if same_step:
            assert_same(_final(infos, 0), value(space, 0, 1))
        after = {0: 1 if same_step else 0, 1: 3, 2: 3}
        assert_same(envs.step([0] * N)[0], shown(space, after))
        assert envs.restarts == 1


@each_space
@pytest.mark.parametrize("fault", [RAISE, KILL], ids=["exception", "kill"])
def test_after_a_restart_between_send_and_recv_the_final_observation_is_the_last_received(
    space: Space[Any], fault: int
) -> None:
    with restarting(walkers(space), autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        envs.reset()
        envs.send([0] * N)
        envs.recv(N)
        envs.send([0, fault], [2, 0])
        observations, _, _, truncated, infos, ids = envs.recv(2)
        assert ids.tolist() == [0, 2]
        assert truncated.tolist() == [True, False]
        assert_same(observations, shown(space, {0: 0, 2: 2}))
        assert_same(_final(infos, 0), value(space, 0, 1))


def _final(infos: dict[str, Any], row: int) -> Any:
    """Gymnasium keeps dicts apart by their keys, and all else in a list of objects."""

    def at(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: at(part) for key, part in found.items() if not key.startswith("_")}
        return found[row]

    return at(infos["final_obs"])


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED], ids=["next step", "disabled"])
def test_the_last_observation_is_not_read_in_modes_that_do_not_return_it(mode: AutoresetMode) -> None:
    """Its space cannot even be read, and the restart goes well."""
    with ours([partial(Walker, Half(), 0)], num_workers=1, on_error="restart", autoreset_mode=mode) as envs:
        envs.reset_async()
        envs._finish("reset_wait", None)
        envs.step_async([RAISE])
        infos, _ = envs._finish("step_wait", None)
        assert infos["restarted"].tolist() == ["ValueError: bad luck"]


# ------------------------------------------------------------------------------------------------------------- capacity


MIXED = Dict({"letter": Letter(), "path": Sequence(Discrete(100))})
"""A custom space next to one that needs a capacity."""


@pytest.mark.parametrize("capacity", [Capacity(items=3), {"path": Capacity(items=3)}], ids=["for all", "by path"])
def test_a_capacity_reaches_the_sequences_next_to_a_registered_space(capacity: Any) -> None:
    column = RegisteredColumn.create(MIXED, N, capacity)
    column.write(1, {"letter": "x", "path": (7, 8, 9)})
    assert column.read_row(1) == {"letter": "x", "path": (7, 8, 9)}
    with pytest.raises(ValueError, match="4 items needed, but the capacity declared is 3"):
        column.write(1, {"letter": "x", "path": (7, 8, 9, 10)})


@pytest.mark.parametrize("space", [Trail(), Dict({"trail": Trail()})], ids=["alone", "Dict"])
def test_a_capacity_reaches_a_registered_function_that_asks_for_it(space: Space[Any]) -> None:
    column = RegisteredColumn.create(space, N, Capacity(items=3))
    column.write(2, value(space, 2, 3))
    assert_same(column.read_row(2), value(space, 2, 3))


def test_a_capacity_for_a_registered_space_that_takes_none_is_refused() -> None:
    capacity = {"letter": Capacity(items=3), "path": Capacity(items=3)}
    with pytest.raises(KeyError, match=r"at 'letter': a capacity is declared.*Letter"):
        create_shared_memory(MIXED, N, capacity=capacity)


def test_the_capacity_of_a_vector_environment_reaches_the_sequences_next_to_a_registered_space() -> None:
    with ours(walkers(MIXED), capacity=Capacity(items=3)) as envs:
        envs.reset()
        assert_same(envs.step([0] * N)[0], shown(MIXED, dict.fromkeys(range(N), 1)))


def test_one_capacity_for_all_is_no_business_of_a_registered_space_that_takes_none() -> None:
    assert RegisteredColumn.create(Letter(), N, Capacity(items=3)).n == N


# ----------------------------------------------------------------------------------------------------------------- lent


def _arrays(batch: Any) -> list[Any]:
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else []
    return [batch] if isinstance(batch, np.ndarray) else [array for part in parts for array in _arrays(part)]


def assert_lent(batch: Any, arrays: int) -> None:
    found = _arrays(batch)
    assert len(found) == arrays
    for array in found:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


LENT = {"array": 1, "tuple": 0, "dict": 2, "Dict": 4, "Tuple": 1}


@pytest.mark.parametrize(("name", "arrays"), LENT.items(), ids=LENT)
def test_a_borrowed_batch_of_a_registered_space_cannot_be_written(name: str, arrays: int) -> None:
    space = SPACES[name]
    with ours(walkers(space), copy=False) as envs:
        assert_lent(envs.reset()[0], arrays)
        batch = envs.step([0] * N)[0]
        assert_lent(batch, arrays)
        assert_same(batch, shown(space, dict.fromkeys(range(N), 1)))


def test_a_borrowed_batch_of_a_registered_space_is_the_shared_memory_itself() -> None:
    with ours(walkers(Point()), copy=False) as envs:
        batch = envs.reset()[0]
        envs.step([0] * N)
        assert batch[:, 1].tolist() == [1] * N


BY_MESSAGE: dict[str, tuple[Space[Any], list[Any], int]] = {
    "Box": (Box(0, 9, (2,)), [np.float32([0, 0]), np.float32([1, 1])], 1),
    "Dict": (
        Dict({"a": Box(0, 9, (2,)), "b": Tuple((Discrete(3), Text(5)))}),
        [{"a": np.float32([0, 0]), "b": (1, "one")}, {"a": np.float32([1, 1]), "b": (2, "two")}],
        2,
    ),
    "Graph": (
        Graph(Discrete(9), Discrete(9)),
        [GraphInstance(np.array([step, 2]), np.array([3]), np.array([[0, 1]])) for step in (0, 1)],
        6,
    ),
    "Sequence": (Sequence(Box(0, 9, (2,))), [(np.float32([step, 0]),) for step in (0, 1)], 2),
    "OneOf": (OneOf((Box(0, 9, (2,)), Discrete(3))), [(0, np.float32([step, 0])) for step in (0, 1)], 2),
}


@pytest.mark.parametrize(("space", "values", "arrays"), BY_MESSAGE.values(), ids=BY_MESSAGE)
def test_a_borrowed_batch_that_travelled_in_messages_cannot_be_written(
    space: Space[Any], values: list[Any], arrays: int
) -> None:
    with (
        ours([partial(Shower, space, values)] * 2, copy=False, shared_memory=False) as envs,
        ours([partial(Shower, space, values)] * 2, copy=True, shared_memory=False) as copies,
    ):
        batch = envs.reset()[0]
        assert_lent(batch, arrays)
        assert_same(batch, copies.reset()[0])
        batch = envs.step([0, 0])[0]
        assert_lent(batch, arrays)
        assert_same(batch, copies.step([0, 0])[0])


def test_a_borrowed_batch_that_travelled_in_messages_is_no_copy() -> None:
    values = [np.float32([0, 0]), np.float32([1, 1])]
    with ours([partial(Shower, Box(0, 9, (2,)), values)] * 2, copy=False, shared_memory=False) as envs:
        first = envs.reset()[0]
        envs.step([0, 0])
        assert first.tolist() == [[1, 1], [1, 1]]


def test_what_was_received_in_messages_may_be_written_without_any_effect() -> None:
    space, values, _ = BY_MESSAGE["Graph"]
    with ours([partial(Shower, space, values)] * 2, shared_memory=False) as envs:
        envs.reset()
        envs.send([0, 0])
        for graph in envs.recv(2)[0]:
            graph.nodes[...] = 7
        batch = envs.reset(options={"reset_mask": np.array([True, False])})[0]
        assert batch[1].nodes.tolist() == [1, 2]
