"""The same runs through Gymnasium's SyncVectorEnv and through ours: every number, dtype, info and mask is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, OneOf, Space, Text, Tuple
from gymnasium.spaces import Sequence as SequenceSpace
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings

from memlane.vector import Capacity
from tests.support.vector_envs import (
    ACTIONS,
    EVERYTHING,
    SPACES,
    Mission,
    actions_for,
    assert_same_run,
    chances,
    random_spaces,
    reference,
    trajectory,
)

MODES = list(AutoresetMode)
OBSERVATIONS: dict[str, Space[Any]] = {
    **SPACES,
    # What the native side writes by itself: boxes and integers, however nested. Of each form there are two, which would
    # be seen if they changed places.
    "native Dict": Dict({"pos": Box(-1, 1, (2,)), "lives": Discrete(4, start=-1), "speed": Box(-1, 1, (2,))}),
    "native Tuple": Tuple((Discrete(3), Box(-1, 1, (2,), np.float64), Box(-1, 1, (2,), np.float64), Discrete(3))),
    "native Dict of Tuples": Dict({key: Tuple((Discrete(3), Box(0, 255, (2, 3), np.uint8))) for key in ("a", "b")}),
    "native Tuple of Dicts": Tuple([Dict({"x": Box(-9, 9, (1,), np.int16), "y": Discrete(2)}) for _ in range(2)]),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_a_run_is_the_same_whatever_the_number_of_workers(workers: int, mode: AutoresetMode) -> None:
    assert_same_run(chances(EVERYTHING, ACTIONS, 5), 25, mode, num_workers=workers)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "messages"])
def test_a_run_in_the_caller_is_the_same_with_and_without_shared_memory(
    shared_memory: bool, mode: AutoresetMode
) -> None:
    assert_same_run(chances(EVERYTHING, ACTIONS, 4), 20, mode, num_workers=0, shared_memory=shared_memory)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_run_is_the_same_in_every_context(context: str, mode: AutoresetMode) -> None:
    assert_same_run(chances(EVERYTHING, ACTIONS, 4), 20, mode, context=context)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "borrow"])
def test_a_run_is_the_same_with_and_without_copies_and_shared_memory(
    copy: bool, shared_memory: bool, mode: AutoresetMode
) -> None:
    assert_same_run(chances(EVERYTHING, ACTIONS, 4), 20, mode, copy=copy, shared_memory=shared_memory)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_long_run_is_the_same_to_its_end(mode: AutoresetMode) -> None:
    assert_same_run(chances(SPACES["Box float32"], Discrete(4), 4), 300, mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_runs_that_are_compared_have_ends_of_both_kinds(mode: AutoresetMode) -> None:
    with reference(chances(Discrete(2), Discrete(2), 4), autoreset_mode=mode) as envs:
        steps = [result for result in trajectory(envs, actions_for(envs, 40), mode) if len(result) == 5]
    ends = [(int(terminated.sum()), int(truncated.sum())) for _, _, terminated, truncated, _ in steps]
    assert min(map(sum, zip(*ends, strict=True))) > 5


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("infos", [True, False], ids=["infos", "no infos"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space_are_the_same(name: str, infos: bool, mode: AutoresetMode) -> None:
    assert_same_run(chances(OBSERVATIONS[name], Discrete(2), 4, infos=infos), 40, mode, context="fork")


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_every_space_reach_the_environments_as_they_are(name: str) -> None:
    assert_same_run(chances(Discrete(2), SPACES[name], 4), 30)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_infos_of_environments_that_share_a_worker_are_the_same(mode: AutoresetMode) -> None:
    assert_same_run(chances(Discrete(2), Discrete(2), 6), 120, mode, num_workers=2)


GROWING: dict[str, Space[Any]] = {
    "Sequence": SequenceSpace(Box(-1, 1, (2,))),
    "stacked Sequence": SequenceSpace(Box(-1, 1, (2,)), stack=True),
    "Graph": Graph(Box(-1, 1, (3,)), Discrete(4)),
}


@pytest.mark.parametrize("name", GROWING)
def test_graphs_and_sequences_are_the_same_as_messages(name: str) -> None:
    assert_same_run(chances(GROWING[name], Discrete(2), 4, infos=False), 30, shared_memory=False)


@pytest.mark.parametrize("name", GROWING)
def test_graphs_and_sequences_are_the_same_in_shared_memory_of_a_capacity(name: str) -> None:
    capacity = Capacity(items=128, nodes=16, edges=128)
    assert_same_run(chances(GROWING[name], Discrete(2), 4, infos=False), 30, capacity=capacity)


@pytest.mark.parametrize("name", GROWING)
def test_graphs_and_sequences_are_welcome_as_actions(name: str) -> None:
    assert_same_run(chances(Discrete(2), GROWING[name], 4), 30)


CUSTOM: dict[str, Space[Any]] = {
    "in a Dict": Dict({"image": Box(0, 255, (2, 2), np.uint8), "direction": Discrete(4), "mission": Mission()}),
    "in a Tuple": Tuple((Mission(), Box(-1, 1, (2,)), Discrete(3))),
    "beside others in Python": Dict({"bits": MultiBinary(3), "mission": Mission(), "text": Text(4, min_length=0)}),
    "nested": Dict({"a": Tuple((Dict({"m.n": Mission(), "x": Box(-1, 1, (2,))}), Mission())), "b": Discrete(3)}),
    "alone": Dict({"one": Mission(), "two": Tuple((Mission(),))}),
    "in a OneOf": Dict({"at": Discrete(5), "either": OneOf((Mission(), Discrete(2)))}),
    "in a Sequence": Tuple((Discrete(5), SequenceSpace(Mission()))),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("infos", [True, False], ids=["infos", "no infos"])
@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_space_among_others_is_the_same(name: str, infos: bool, mode: AutoresetMode) -> None:
    capacity = Capacity(items=1)  # what a sequence needs, also if its items then travel in messages
    assert_same_run(chances(CUSTOM[name], Discrete(2), 4, infos=infos), 40, mode, context="fork", capacity=capacity)


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_custom_space_among_others_is_the_same_however_workers_start(context: str, copy: bool) -> None:
    assert_same_run(chances(CUSTOM["nested"], Discrete(2), 4), 20, context=context, copy=copy)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(observation_space=random_spaces, action_space=random_spaces)
def test_a_run_is_the_same_for_random_spaces(observation_space: Space[Any], action_space: Space[Any]) -> None:
    assert_same_run(chances(observation_space, action_space, 3), 12, AutoresetMode.SAME_STEP)
