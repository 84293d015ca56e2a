"""Actions: each environment gets its action as Gymnasium's vector environments pass it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from numpy.typing import NDArray

from memlane.vector import AsyncVectorEnv
from tests.support.vector_envs import Counter, Recorder, described, difference, ours, reference


def recorders(space: Space[Any], count: int = 3) -> list[Callable[[], Recorder]]:
    return [partial(Recorder, space)] * count


FLOATS = np.array([[0.1, 2 / 3], [1e30, -0.0], [np.nan, np.inf]])
NUMBERS = np.array([[1, 2], [0, 1], [3, 250]])


def numbers_for(array: NDArray[Any]) -> list[Any]:
    """Batches of three actions of the same numbers, in every form that a caller might have."""
    with np.errstate(all="ignore"):  # NaN is no integer
        dtypes = [array.astype(dtype) for dtype in "?bhilBHILefdFD"]
        int32 = array[2].astype("i4")
    return [
        *dtypes,
        array.astype(">f8"),
        array.astype(object),
        array.repeat(2, axis=0)[::2],
        np.asfortranarray(array),
        list(array.astype("f8")),
        tuple(array.astype("f4")),
        [array[0].astype("f4"), array[1].astype("f8"), int32],
        array.tolist(),
        array[..., None],
        list(array[..., None].astype("f4")),
        [array[0], array[1].tolist(), array[2]],
    ]


COLUMN = NUMBERS[:, 0]
FLAT: list[Any] = [
    *numbers_for(COLUMN),
    [True, False, True],
    [0.5, 1.5, 2.5],
    [0, True, 2.5],
    [2**70, -(2**63), 1],
    [None, 1, "two"],
    [np.int64(1), np.int64(0), np.int64(9)],
    [np.float32(0.1), np.float32(0.2), np.float32(0.3)],
    [np.bool_(True), np.bool_(False), np.bool_(True)],
    [np.array(1), np.array(2), np.array(3)],
    [np.int64(1), 0, 2],
    range(3),
    "abc",
]
BATCHES: dict[str, tuple[Space[Any], list[Any]]] = {
    "Discrete": (Discrete(3), [*FLAT, np.array([7, -1, 3])]),
    "Discrete int8": (Discrete(3, dtype=np.int8), FLAT),
    "Box float32": (Box(-1, 1, (2,)), [*numbers_for(FLOATS), *numbers_for(NUMBERS), *FLAT, np.ones((3, 3))]),
    "Box float64": (Box(-1, 1, (2,), np.float64), [*numbers_for(FLOATS), *numbers_for(NUMBERS), *FLAT]),
    "Box of one": (Box(-1, 1, (1,)), [*numbers_for(FLOATS[:, :1]), *FLAT]),
    "Box of no dimensions": (Box(-1, 1, ()), FLAT),
    "Box uint8": (Box(0, 255, (2,), np.uint8), [*numbers_for(NUMBERS), *FLAT]),
    "MultiDiscrete": (MultiDiscrete([2, 3]), [*numbers_for(NUMBERS), *FLAT]),
    "MultiBinary": (MultiBinary(2), [*numbers_for(NUMBERS), *FLAT]),
    "Dict": (
        Dict({"push": Box(-1, 1, (2,)), "gear": Discrete(3)}),
        [
            {"push": FLOATS.astype("f4"), "gear": COLUMN},
            {"push": FLOATS, "gear": COLUMN},
            {"push": FLOATS.astype("f4"), "gear": [0, 1, 2]},
            {"push": FLOATS.tolist(), "gear": [9, -9, 2]},
            {"push": FLOATS, "gear": (True, False, True), "unknown": 1},
            {"gear": COLUMN.astype("f4"), "push": NUMBERS},
        ],
    ),
    "Tuple": (
        Tuple((Discrete(3), Tuple((Box(-1, 1, (2,)), MultiBinary(2))))),
        [
            (COLUMN, (FLOATS.astype("f4"), NUMBERS.astype("i1"))),
            (COLUMN, (FLOATS, NUMBERS)),
            [[0, 1, 2], [FLOATS, NUMBERS.tolist()]],
            ([0, 1, 2], (list(FLOATS), np.ones((3, 5)))),
        ],
    ),
    "Text": (Text(3), [("a", "b", "c"), ["ab", "too long", ""], [1, None, "a"]]),
    "OneOf": (OneOf((Discrete(3), Box(-1, 1, (2,)))), [((0, 1), (1, FLOATS[0]), (7, "what"))]),
    "Sequence": (Sequence(Box(-1, 1, (1,))), [((FLOATS[0],), (), "abc")]),
    "Graph": (Graph(Box(-1, 1, (1,)), None), [(1, 2, 3)]),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_an_action_arrives_as_with_gymnasium_whatever_its_form(name: str, workers: int) -> None:
    space, batches = BATCHES[name]
    with reference(recorders(space)) as expected, ours(recorders(space), num_workers=workers) as envs:
        expected.reset()
        envs.reset()
        # Each form after the space's own and after another one.
        for batch in [*batches, batches[0], *batches[::-1]]:
            theirs, mine = (vector.step(_copy(batch))[4]["seen"].tolist() for vector in (expected, envs))
            assert difference(theirs, mine) is None, f"{batch!r}: {difference(theirs, mine)}"


def _copy(batch: Any) -> Any:
    """A copy that the environments of Gymnasium may write to, with the same strides."""
    if isinstance(batch, np.ndarray):
        return batch.copy(order="K")
    if isinstance(batch, dict):
        return {key: _copy(part) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_copy(part) for part in batch)
    return batch


def test_the_callers_batch_is_not_changed_by_an_environment() -> None:
    with ours(recorders(Box(-1, 1, (2,)))) as envs:
        envs.reset()
        for dtype in ("f4", "f8"):
            batch = np.ones((3, 2), dtype)
            envs.step(batch)
            assert batch.all()


@pytest.mark.parametrize("name", ["Discrete", "Box float32", "Box of one", "MultiBinary", "Dict", "Tuple"])
def test_sent_actions_arrive_as_those_of_a_step(name: str) -> None:
    space, batches = BATCHES[name]
    with ours(recorders(space)) as stepped, ours(recorders(space)) as sent:
        stepped.reset()
        sent.reset()
        compared = 0
        for batch in [*batches, *batches[::-1]]:
            if stepped._steps.shared_actions.encode(batch) is None:  # type: ignore[union-attr]
                continue
            sent.send(batch)
            ours_ = sent.recv(3)[4]["seen"].tolist()
            assert difference(stepped.step(batch)[4]["seen"].tolist(), ours_) is None
            compared += 1
        assert compared >= 4


def test_actions_of_different_forms_can_be_pending_at_the_same_time() -> None:
    with ours(recorders(Box(-1, 1, (1,)), 4)) as envs:
        envs.reset()
        batches: list[Any] = [np.array([[0.1]]), [0.5], np.array([[0.25]], "f4"), np.array([7], "i2")]
        for env, batch in enumerate(batches):
            envs.send(batch, [env])
        seen = envs.recv(4)[4]["seen"].tolist()
        assert seen == [(described(batch[0]),) for batch in batches]
        usual = np.zeros((4, 1), "f4")
        assert envs.step(usual)[4]["seen"].tolist() == [(described(usual[0]),)] * 4


@pytest.mark.parametrize(
    "batch",
    [FLOATS, FLOATS.astype("f4"), NUMBERS.astype("f2"), NUMBERS, NUMBERS.astype("u1"), list(FLOATS), [0.5, 0.5, 0.5]],
    ids=lambda batch: f"{type(batch).__name__} {getattr(batch, 'dtype', '')}",
)
def test_arrays_of_any_precision_travel_in_shared_memory(batch: Any) -> None:
    with ours(recorders(Box(-1, 1, (2,)))) as envs:
        envs.reset()
        assert envs._supervisor._last_messages
        envs.step(batch)
        assert not envs._supervisor._last_messages


def test_a_tensor_arrives_as_an_array_of_its_dtype() -> None:
    torch = pytest.importorskip("torch")
    with ours(recorders(Box(-1, 1, (2,)))) as envs:
        envs.reset()
        seen = envs.step(torch.from_numpy(FLOATS.copy()))[4]["seen"].tolist()
        assert seen == [(described(row),) for row in FLOATS]


@pytest.mark.parametrize("wrong", [0, 1.5, None, np.int64(1), np.array(1), Ellipsis], ids=repr)
@pytest.mark.parametrize("check", ["env", "strict"])
@pytest.mark.parametrize("way", ["step", "send"])
def test_one_number_for_all_environments_is_a_type_error(wrong: Any, check: Any, way: str) -> None:
    with reference(recorders(Discrete(3))) as expected, ours(recorders(Discrete(3)), check_actions=check) as envs:
        expected.reset()
        envs.reset()
        with pytest.raises(TypeError):
            expected.step(wrong)
        with pytest.raises(TypeError, match=r"expected actions for 3 environments, found .*batch"):
            envs.step(wrong) if way == "step" else envs.send(wrong)
        assert envs.step([0, 1, 2])[4]["_seen"].all()


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (Discrete(3), [0, 1]),
        (Discrete(3), np.array([0, 1])),
        (Discrete(3), np.zeros(2)),
        (Discrete(3), [0, 1, 2, 0]),
        (Discrete(3), []),
        (Discrete(3), ["a"]),
        (Dict({"a": Discrete(2)}), {"b": [0, 1, 0]}),
        (Dict({"a": Discrete(2)}), [0, 1, 0]),
        (Dict({"a": Discrete(2), "b": Discrete(2)}), {"a": [0, 1, 0], "b": [0]}),
        (Tuple((Discrete(2), Discrete(3))), ([0, 1, 0],)),
        (Tuple((Discrete(2), Discrete(3))), ([0, 1, 0], [0, 1])),
    ],
    ids=str,
)
def test_a_batch_that_does_not_have_an_action_for_each_environment_is_gymnasiums_kind_of_error(
    space: Space[Any], wrong: Any
) -> None:
    with reference(recorders(space)) as expected, ours(recorders(space)) as envs:
        expected.reset()
        envs.reset()
        with pytest.raises(Exception) as theirs:
            expected.step(wrong)
        with pytest.raises(theirs.type, match="expected actions"):
            envs.step(wrong)
        assert envs.step(envs.action_space.sample())[4]["_seen"].all()


class Halver(gymnasium.Env[Any, Any]):
    """Adds up halves of its actions: the sum shows the last bit of each."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.sum = 0.0
        return np.array([self.sum]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.sum += float(action[0]) / 2
        return np.array([self.sum]), self.sum, False, False, {}


def _halver() -> gymnasium.Env[Any, Any]:
    return Halver()


def _pendulum() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1")


def _cheetah() -> gymnasium.Env[Any, Any]:
    pytest.importorskip("mujoco")
    return gymnasium.make("HalfCheetah-v5")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("make", [_halver, _pendulum, _cheetah])
def test_returns_after_200_steps_are_those_of_gymnasium_bit_for_bit(make: Any, dtype: str) -> None:
    make().close()
    with reference([make] * 3) as expected, ours([make] * 3) as envs:
        expected.reset(seed=3)
        envs.reset(seed=3)
        rng = np.random.default_rng(3)
        totals = np.zeros((2, 3))
        for _ in range(200):
            actions = rng.uniform(-1, 1, expected.action_space.shape).astype(dtype)
            theirs, mine = expected.step(actions), envs.step(actions)
            assert theirs[0].tobytes() == mine[0].tobytes()
            totals += np.stack((theirs[1], mine[1]))
        assert totals[0].tobytes() == totals[1].tobytes()


@pytest.mark.filterwarnings("ignore:.*ERROR")  # how Gymnasium logs the error of a worker
def test_what_an_environment_makes_of_an_action_out_of_its_space_is_its_own_affair() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make("CartPole-v1")

    for wrong in (np.array([7]), np.array([[1]]), np.array([0.5]), [0.5], [None]):
        with reference([make]) as expected, ours([make]) as envs:
            expected.reset(seed=1)
            envs.reset(seed=1)
            with pytest.raises(Exception) as theirs:
                expected.step(wrong)
            with pytest.raises(theirs.type) as mine:
                envs.step(wrong)
            assert str(theirs.value) in str(mine.value)


class Mortal(Recorder):
    """Dies of an action above 1."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if np.max(action) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*WARN")  # how Gymnasium logs a restart
@pytest.mark.parametrize("deadly", [np.array([[0.5], [0.5], [9.5]]), [[0.5], [0.5], [9.5]]], ids=["array", "message"])
def test_a_worker_that_was_killed_by_an_action_gets_the_next_ones_in_their_form(deadly: Any) -> None:
    with ours([partial(Mortal, Box(-1, 1, (1,)))] * 3, num_workers=3, on_error="restart") as envs:
        envs.reset()
        assert envs.step(deadly)[3].tolist() == [False, False, True]
        harmless = FLOATS[:1, :1].repeat(3, axis=0)
        envs.step(harmless)  # the restarted environment is reset
        assert envs.step(harmless)[4]["seen"].tolist() == [(described(harmless[0]),)] * 3


# --------------------------------------------------------------------------------------------------------------- strict


@pytest.mark.parametrize("way", ["step", "send"])
def test_strict_actions_are_cast_to_the_dtype_of_the_space(way: str) -> None:
    with ours(recorders(Box(-1, 1, (2,))), check_actions="strict") as envs:
        envs.reset()
        for batch in (NUMBERS, NUMBERS.tolist(), NUMBERS.astype("f8")):
            if way == "step":
                seen = envs.step(batch)[4]["seen"].tolist()
            else:
                envs.send(batch)
                seen = envs.recv(3)[4]["seen"].tolist()
            assert seen == [(described(row),) for row in NUMBERS.astype("f4")]


@pytest.mark.parametrize(
    ("space", "wrong", "message"),
    [
        (Discrete(3), [0, 1, 3], "'action': expected 0 to 2, found 3"),
        (Discrete(3), np.array([[0], [1], [2]]), r"'action': expected shape .*found \(3, 1\)"),
        (Box(-1, 1, (1,)), np.zeros(3), r"'action': expected shape .*found \(3,\)"),
        (Box(-1, 1, (1,)), [["a"]] * 3, "'action': expected dtype float32"),
        (Dict({"gear": Discrete(3)}), {"gear": [0, 1, 5]}, "'action.gear': expected 0 to 2, found 5"),
        (Text(2), ["a", "b", "long"], "'action': expected 1 to 2 characters"),
    ],
    ids=str,
)
def test_strict_actions_that_do_not_fit_are_an_error_that_names_them(
    space: Space[Any], wrong: Any, message: str
) -> None:
    with ours(recorders(space), check_actions="strict") as envs:
        envs.reset()
        for call in (envs.step, envs.send):
            with pytest.raises((ValueError, TypeError), match=message):
                call(wrong)
        assert envs.step(envs.action_space.sample())[4]["_seen"].all()


def test_an_unknown_check_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="check_actions must be 'env' or 'strict', found 'stric'; did you mean"):
        AsyncVectorEnv(recorders(Discrete(3)), check_actions="stric")  # type: ignore[arg-type]


def test_a_capacity_that_the_actions_do_not_need_is_an_error_about_actions() -> None:
    with pytest.raises(KeyError, match="at 'action': a capacity is declared"):
        AsyncVectorEnv([Counter], action_capacity={"a": 3}, num_workers=0)
