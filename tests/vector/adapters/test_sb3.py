"""SB3VecEnv against SubprocVecEnv: the same actions, rewards, infos and indices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple

from tests.support.vector_envs import Recorder, Typed, described, difference

pytest.importorskip("stable_baselines3")

from stable_baselines3.common.vec_env import SubprocVecEnv

from memlane.vector.adapters.sb3 import SB3VecEnv


@contextlib.contextmanager
def pair(fns: list[Callable[[], Any]], **arguments: Any) -> Iterator[tuple[SB3VecEnv, SubprocVecEnv]]:
    # Forked: otherwise each process of SubprocVecEnv would import torch.
    with contextlib.ExitStack() as closing:
        mine = SB3VecEnv(fns, num_workers=2, **arguments)
        closing.callback(mine.close)
        theirs = SubprocVecEnv(fns, start_method="fork")
        closing.callback(theirs.close)
        yield mine, theirs


def typed(count: int = 3) -> list[Callable[[], Any]]:
    return [partial(Typed, number) for number in range(count)]


def test_rewards_dones_and_infos_have_the_types_and_values_of_subproc_vec_env() -> None:
    with pair(typed()) as (mine, theirs):
        for envs in (mine, theirs):
            envs.seed(3)
        assert difference(theirs.reset(), mine.reset()) is None
        assert difference(list(theirs.reset_infos), mine.reset_infos) is None
        for step in range(7):
            actions = np.array([step % 3, 1, 2])
            expected, found = theirs.step(actions), mine.step(actions)
            assert difference(list(expected[:3]), list(found[:3])) is None
            assert difference(list(expected[3]), found[3]) is None
            assert difference(list(theirs.reset_infos), mine.reset_infos) is None
        assert found[1].dtype == np.float64
        assert found[1].tolist() == [1 / 3] * 3


ACTIONS: dict[str, tuple[Space[Any], list[Any]]] = {
    "Dict": (
        Dict({"push": Box(-1, 1, (2,)), "gear": Discrete(3)}),
        [
            [{"push": np.ones(2), "gear": gear} for gear in range(3)],
            [{"push": np.ones(2, "f4"), "gear": np.int64(gear)} for gear in range(3)],
            ({"gear": 7}, {"unknown": 1}, {}),
        ],
    ),
    "Tuple": (
        Tuple((Discrete(3), Box(-1, 1, (2,)))),
        [[(gear, np.ones(2)) for gear in range(3)], ((0, 1), (2,), "what")],
    ),
    "Box": (Box(-1, 1, (2,)), [np.ones((3, 2)), np.ones((3, 2), "f4"), [np.ones(2)] * 3, np.ones(3)]),
    "Discrete": (Discrete(3), [np.array([0, 1, 2]), [0, 1, 2], np.array([[0], [1], [2]]), np.array([7, -1, 0.5])]),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_arrive_as_with_subproc_vec_env(name: str) -> None:
    space, batches = ACTIONS[name]
    with pair([partial(Recorder, space)] * 3) as (mine, theirs):
        mine.reset(), theirs.reset()
        for batch in batches:
            expected, found = (envs.step(batch)[3] for envs in (theirs, mine))  # type: ignore[arg-type]
            assert difference([info["seen"] for info in expected], [info["seen"] for info in found]) is None


def test_a_dict_of_arrays_is_a_batch_as_with_memlanes_own_vector_environments() -> None:
    envs = SB3VecEnv([partial(Recorder, ACTIONS["Dict"][0])] * 2, num_workers=1)
    try:
        envs.reset()
        infos = envs.step({"push": np.ones((2, 2)), "gear": np.array([0, 1])})[3]  # type: ignore[arg-type]
        assert [info["seen"][0]["gear"] for info in infos] == [described(np.int64(gear)) for gear in (0, 1)]
    finally:
        envs.close()


def test_strict_actions_of_a_dict_space_are_checked() -> None:
    envs = SB3VecEnv([partial(Recorder, ACTIONS["Dict"][0])] * 2, num_workers=1, check_actions="strict")
    right = [{"push": np.ones(2), "gear": 1}] * 2
    try:
        envs.reset()
        with pytest.raises(ValueError, match=r"action\.gear"):
            envs.step([{"push": np.ones(2), "gear": 7}] * 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected actions for 2 environments, found 1"):
            envs.step(right[:1])  # type: ignore[arg-type]
        seen = envs.step(right)[3][1]["seen"][0]  # type: ignore[arg-type]
        assert seen["push"] == described(np.ones(2, "f4"))
    finally:
        envs.close()


@pytest.mark.parametrize("indices", [None, 0, -1, [0, 2], [-1, 0], [2, -3], []], ids=str)
def test_indices_may_be_negative(indices: Any) -> None:
    limit = partial(gymnasium.wrappers.TimeLimit, max_episode_steps=9)
    fns = [*typed(2), lambda: limit(Typed(2))]
    with pair(fns) as (mine, theirs):
        for envs in (mine, theirs):
            envs.set_attr("colour", "red")
            envs.set_attr("colour", "blue", indices)
        assert mine.get_attr("colour") == theirs.get_attr("colour")
        assert mine.get_attr("number", indices) == theirs.get_attr("number", indices)
        assert mine.env_method("twice", 4, indices=indices) == theirs.env_method("twice", 4, indices=indices)
        wrapped = [envs.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices) for envs in (mine, theirs)]
        assert wrapped[0] == wrapped[1]


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_of_no_environment_is_an_index_error(index: int) -> None:
    with pair(typed()) as (mine, theirs):
        for envs in (theirs, mine):
            with pytest.raises(IndexError):
                envs.get_attr("number", index)
        assert mine.get_attr("number", -3) == [0]


def test_a_method_is_an_attribute_and_is_not_called() -> None:
    envs = SB3VecEnv(typed(), num_workers=2)
    try:
        assert [method(1) for method in envs.get_attr("twice")] == [2, 3, 4]
    finally:
        envs.close()


def test_has_attr_says_whether_all_environments_have_an_attribute() -> None:
    with pair(typed()) as (mine, theirs):
        for envs in (mine, theirs):
            envs.set_attr("colour", "red", [1])
            assert envs.has_attr("number")
            assert not envs.has_attr("colour")
            assert not envs.has_attr("size")


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_method_is_that_of_the_workers(method: str) -> None:
    envs = SB3VecEnv(typed(2), method, num_workers=1)
    try:
        assert envs.envs.context == method
        assert envs.reset().shape == (2, 2)
    finally:
        envs.close()


def test_an_unknown_start_method_is_subproc_vec_envs_error_with_the_known_ones() -> None:
    for make, text in ((SubprocVecEnv, "cannot find context for 'thread'"), (SB3VecEnv, "for 'thread'.*'spawn'")):
        with pytest.raises(ValueError, match=text):
            make(typed(2), start_method="thread")


def test_start_method_and_context_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="start_method and context are the same argument, found 'fork' and 'spawn'"):
        SB3VecEnv(typed(2), start_method="fork", context="spawn")


def test_workers_do_not_import_torch() -> None:
    # Spawned: the fork server may have imported torch for another test.
    envs = SB3VecEnv(typed(2), "spawn", num_workers=1)
    try:
        envs.set_attr("colour", "red")
        assert envs.has_attr("colour")
        # By value: a function of this module would be imported with it.
        assert envs.envs.apply(lambda env: "torch" in __import__("sys").modules) == (False, False)  # noqa: ARG005
    finally:
        envs.close()


def test_images_of_environments_that_do_not_render_are_none_with_a_warning() -> None:
    with pair(typed()) as (mine, theirs):
        for envs in (mine, theirs):
            with pytest.warns(UserWarning, match="rgb_array"):
                assert envs.get_images() == [None] * 3


def test_close_may_be_called_twice_and_while_a_step_is_pending() -> None:
    envs = SB3VecEnv(typed(), num_workers=2)
    envs.reset()
    envs.step_async(np.array([0, 1, 2]))
    assert envs.waiting
    with pytest.warns(UserWarning, match="pending"):
        envs.close()
    envs.close()
    assert envs.closed
    assert not envs.waiting
