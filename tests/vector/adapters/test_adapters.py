"""Adapters of vector environments: rollout slots, tensors, make_vec, Stable-Baselines3, PettingZoo."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from memlane.ipc import RolloutRingBuffer
from memlane.vector import (
    AgentsVectorEnv,
    AsyncVectorEnv,
    as_gymnasium_async,
    as_tensors,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

# Gymnasium's logger reports restarts as warnings.
restarting = pytest.mark.filterwarnings("ignore:.*WARN: ")


class Counter(gymnasium.Env[NDArray[np.float32], int]):
    """Counts its steps; an episode ends after ``length`` of them."""

    def __init__(self, length: int = 3) -> None:
        self.observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.length = length
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), float(action), False, self.steps >= self.length, {"steps": self.steps}

    def _seen(self) -> NDArray[np.float32]:
        return np.array([self.steps, self.length], np.float32)


@pytest.fixture
def envs() -> Iterator[AsyncVectorEnv]:
    made = AsyncVectorEnv([lambda n=n: Counter(n) for n in (2, 3, 4)], num_workers=2, copy=False)  # type: ignore[misc]
    yield made
    made.close()


# -------------------------------------------------------------------------------------------------------------- slots


def test_a_step_goes_straight_into_a_slot_of_a_rollout_ring(envs: AsyncVectorEnv) -> None:
    ring = RolloutRingBuffer(num_envs=3, num_steps=2, obs_dim=2, action_dim=1, num_slots=2)
    try:
        slot = ring.ring.writer().claim()
        envs.reset_into(slot)
        envs.step_into(np.array([0, 1, 2]), slot, 0)
        infos = envs.step_into(np.array([2, 1, 0]), slot, 1)
        slot.commit()
        with ring.ring.reader().take(timeout=1) as taken:
            assert taken["obs"][:, :, 0].tolist() == [[0, 1], [0, 1], [0, 1]]
            assert taken["last_obs"][:, 0].tolist() == [2, 2, 2]
            assert taken["rewards"].tolist() == [[0, 2], [1, 1], [2, 0]]
            assert taken["dones"].tolist() == taken["truncated"].tolist() == [[0, 1], [0, 0], [0, 0]]
        assert infos["steps"].tolist() == [2, 2, 2]
    finally:
        ring.cleanup()


# ------------------------------------------------------------------------------------------------------------ tensors


def test_a_batch_becomes_tensors_over_the_same_memory(envs: AsyncVectorEnv) -> None:
    torch = pytest.importorskip("torch")
    batch, _ = envs.reset()
    tensor = as_tensors(batch)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.data_ptr() == batch.__array_interface__["data"][0]


def test_nested_batches_become_nested_tensors() -> None:
    torch = pytest.importorskip("torch")
    batch = {"a": np.ones(2), "b": (np.zeros(3, np.int64), ("text", "stays"))}
    tensors = as_tensors(batch)
    assert torch.equal(tensors["a"], torch.ones(2, dtype=torch.float64))
    assert tensors["b"][1] == ("text", "stays")


# ----------------------------------------------------------------------------------------------------------- make_vec


def test_make_vec_makes_memlanes_class_within_the_context() -> None:
    with as_gymnasium_async():
        envs = gymnasium.make_vec(
            "CartPole-v1", num_envs=3, vectorization_mode="async", vector_kwargs={"num_workers": 2}
        )
    try:
        assert type(envs) is AsyncVectorEnv
        assert envs.num_workers == 2
        assert str(envs) == "AsyncVectorEnv(CartPole-v1, num_envs=3)"
        assert envs.reset(seed=1)[0].shape == (3, 4)
    finally:
        envs.close()
    assert gymnasium.vector.AsyncVectorEnv is not AsyncVectorEnv


def test_a_custom_worker_is_served_by_gymnasiums_own_class() -> None:
    from gymnasium.vector.async_vector_env import _async_worker

    envs = AsyncVectorEnv([Counter] * 2, worker=_async_worker, context="fork")
    try:
        assert type(envs) is gymnasium.vector.AsyncVectorEnv
        assert envs.reset()[0].shape == (2, 2)
    finally:
        envs.close()


def test_a_custom_worker_does_not_go_with_memlanes_own_arguments() -> None:
    with pytest.raises(TypeError, match="num_workers"):
        AsyncVectorEnv([Counter], worker=lambda *_: None, num_workers=1)


# ------------------------------------------------------------------------------------------------- Stable-Baselines3


@pytest.fixture
def sb3() -> Any:
    return pytest.importorskip("stable_baselines3")


def pair(sb3: Any) -> tuple[Any, Any]:
    from memlane.vector.adapters.sb3 import SB3VecEnv

    fns = [lambda n=n: Counter(n) for n in (2, 3, 4)]  # type: ignore[misc]
    return SB3VecEnv(fns, num_workers=2), sb3.common.vec_env.DummyVecEnv(fns)


def test_the_sb3_adapter_steps_as_sb3s_own_does(sb3: Any) -> None:
    ours, theirs = pair(sb3)
    try:
        ours.seed(5), theirs.seed(5)
        assert np.array_equal(ours.reset(), theirs.reset())
        rng = np.random.default_rng(0)
        for _ in range(20):
            actions = rng.integers(0, 3, 3)
            mine, other = ours.step(actions), theirs.step(actions)
            for a, b in zip(mine[:3], other[:3], strict=True):
                assert np.array_equal(a, b)
            for a, b in zip(mine[3], other[3], strict=True):
                assert np.array_equal(a.pop("terminal_observation", None), b.pop("terminal_observation", None))
                assert a == b
    finally:
        ours.close()


def test_the_sb3_adapter_reaches_into_the_environments(sb3: Any) -> None:
    ours, theirs = pair(sb3)
    try:
        assert ours.get_attr("length") == theirs.get_attr("length") == [2, 3, 4]
        ours.set_attr("length", 9, indices=[1])
        assert ours.get_attr("length") == [2, 9, 4]
        assert [len(seen) for seen in ours.env_method("_seen", indices=[0, 2])] == [2, 2]
        assert ours.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False] * 3
    finally:
        ours.close()


class Optional(Counter):
    """Its options say how long its episodes are; its infos say what it was reset with."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self.length = (options or {}).get("length", self.length)
        self.resets += 1
        return super().reset(seed=seed)[0], {"seed": seed, "options": repr(options or None), "resets": self.resets}


@contextlib.contextmanager
def optional_pair(sb3: Any, **arguments: Any) -> Iterator[tuple[Any, Any]]:
    from memlane.vector.adapters.sb3 import SB3VecEnv

    ours = SB3VecEnv([Optional] * 4, num_workers=2, **arguments)
    try:
        yield ours, sb3.common.vec_env.DummyVecEnv([Optional] * 4)
    finally:
        ours.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_each_environment_is_reset_with_its_own_options(sb3: Any, shared_memory: bool) -> None:
    wanted = [{"length": 5}, {}, {"length": 7, "map": np.ones(2)}, {"length": 5, "map": np.zeros(2)}]
    with optional_pair(sb3, shared_memory=shared_memory) as (ours, theirs):
        for envs in (ours, theirs):
            envs.seed(5)
            envs.set_options(wanted)
        assert np.array_equal(ours.reset(), theirs.reset())
        assert ours.get_attr("length") == [5, 3, 7, 5]
        assert ours.get_attr("resets") == [1] * 4
        assert [info["options"] for info in ours.reset_infos] == [repr(options or None) for options in wanted]
        assert ours.reset_infos == theirs.reset_infos
        assert np.array_equal(ours.reset(), theirs.reset())  # seeds and options are for one reset
        assert ours.reset_infos == theirs.reset_infos


def test_options_for_all_environments_are_given_to_all(sb3: Any) -> None:
    with optional_pair(sb3) as (ours, theirs):
        for envs in (ours, theirs):
            envs.set_options({"length": 9})
        assert np.array_equal(ours.reset(), theirs.reset())
        assert ours.get_attr("length") == [9] * 4
        assert ours.reset_infos == theirs.reset_infos


def test_options_for_too_few_environments_are_refused(sb3: Any) -> None:
    with optional_pair(sb3) as (ours, _):
        ours.set_options([{"length": 9}])
        with pytest.raises(ValueError, match="options for 4 environments, found 1"):
            ours.reset()


def test_reset_infos_are_those_of_each_environments_last_reset(sb3: Any) -> None:
    with optional_pair(sb3) as (ours, theirs):
        for envs in (ours, theirs):
            envs.set_options([{"length": length} for length in (1, 2, 3, 3)])
            envs.reset()
        for _ in range(7):
            ours.step(np.zeros(4, int)), theirs.step(np.zeros(4, int))
            assert ours.reset_infos == theirs.reset_infos
        assert [info["resets"] for info in ours.reset_infos] == [8, 4, 3, 3]


def test_the_sb3_adapter_knows_which_environments_are_wrapped(sb3: Any) -> None:
    del sb3
    from memlane.vector.adapters.sb3 import SB3VecEnv

    limit = gymnasium.wrappers.TimeLimit
    ours = SB3VecEnv(
        [Counter, lambda: limit(Counter(), 5), lambda: gymnasium.wrappers.OrderEnforcing(limit(Counter(), 5))]
    )
    try:
        assert ours.env_is_wrapped(limit) == [False, True, True]
        assert ours.env_is_wrapped(gymnasium.wrappers.OrderEnforcing) == [False, False, True]
        assert ours.env_is_wrapped(limit, indices=[2, 0]) == [True, False]
        assert ours.env_is_wrapped(limit, indices=1) == [True]
    finally:
        ours.close()


class Painted(Counter):
    """A picture as bright as the episode is old."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((4, 6, 3), 10 * self.steps + self.length, np.uint8)


def test_the_sb3_adapter_has_the_image_of_each_environment(sb3: Any) -> None:
    from memlane.vector.adapters.sb3 import SB3VecEnv

    fns = [lambda n=n: Painted(n) for n in (2, 3, 4)]
    ours, theirs = SB3VecEnv(fns, num_workers=2), sb3.common.vec_env.DummyVecEnv(fns)
    try:
        assert ours.render_mode == "rgb_array"
        for envs in (ours, theirs):
            envs.reset()
            envs.step(np.zeros(3, int))
        images = ours.get_images()
        assert [image.shape for image in images] == [(4, 6, 3)] * 3
        assert [image.max() for image in images] == [12, 13, 14]
        assert np.array_equal(images, theirs.get_images())
        assert np.array_equal(ours.render(), theirs.render())
    finally:
        ours.close()


class Mortal(Optional):
    """Dies of the action 2."""

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@restarting
def test_an_environment_that_was_restarted_ends_its_episode_in_the_sb3_adapter(sb3: Any) -> None:
    del sb3
    from memlane.vector.adapters.sb3 import SB3VecEnv

    envs = SB3VecEnv([lambda: Mortal(9)] * 3, num_workers=3, on_error="restart")
    try:
        envs.reset()
        envs.step(np.array([1, 1, 1]))
        observations, rewards, dones, infos = envs.step(np.array([1, 2, 1]))
        assert observations[:, 0].tolist() == [2, 0, 2]
        assert rewards.tolist() == [1, 0, 1]
        assert dones.tolist() == [False, True, False]
        assert [info["TimeLimit.truncated"] for info in infos] == [False, True, False]
        assert infos[1]["terminal_observation"].tolist() == [1, 9]
        assert "SIGKILL" in infos[1]["restarted"]
        assert [info.keys() & {"restarted", "terminal_observation"} for info in (infos[0], infos[2])] == [set()] * 2
        assert [info["resets"] for info in envs.reset_infos] == [1, 1, 1]
        assert "SIGKILL" in envs.reset_infos[1]["restarted"]
        observations, rewards, dones, infos = envs.step(np.array([1, 1, 1]))
        assert observations[:, 0].tolist() == [3, 1, 3]
        assert not dones.any()
        assert infos[1] == {"steps": 1, "TimeLimit.truncated": False}
    finally:
        envs.close()


def test_ppo_of_sb3_trains_on_it(sb3: Any) -> None:
    from memlane.vector.adapters.sb3 import SB3VecEnv

    envs = SB3VecEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2)
    try:
        model = sb3.PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=1, seed=1, device="cpu")
        model.learn(128)
        assert model.num_timesteps == 128
    finally:
        envs.close()


# --------------------------------------------------------------------------------------------------------- PettingZoo

pettingzoo = pytest.importorskip("pettingzoo")


class Race(pettingzoo.ParallelEnv):  # type: ignore[misc,name-defined]
    """Each agent leaves at its own time, or is cut off at the ``limit``; what it does is its reward."""

    metadata = {"name": "race_v0"}  # noqa: RUF012

    def __init__(self, lives: tuple[int, ...], limit: int = 100) -> None:
        self.lives = lives
        self.limit = limit
        self.possible_agents = [f"runner_{i}" for i in range(len(lives))]
        self.agents: list[str] = []
        self.time = 0

    def observation_space(self, agent: str) -> Any:
        del agent
        return gymnasium.spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        del agent
        return gymnasium.spaces.Discrete(5)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        del seed, options
        self.agents, self.time = list(self.possible_agents), 0
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert actions.keys() == set(self.agents)
        self.time += 1
        before = self.agents
        over = {agent: self.time >= life for agent, life in zip(self.possible_agents, self.lives, strict=True)}
        rewards = {agent: float(actions[agent]) for agent in before}
        self.agents = [agent for agent in before if not over[agent] and self.time < self.limit]
        done = {agent: over[agent] for agent in before}
        cut = {agent: not over[agent] and self.time >= self.limit for agent in before}
        return self._seen(before), rewards, done, cut, {agent: {"time": self.time} for agent in before}

    def _seen(self, agents: list[str]) -> dict[str, NDArray[np.float32]]:
        return {agent: np.array([self.time, int(agent[-1])], np.float32) for agent in agents}


@pytest.fixture
def races() -> Iterator[AgentsVectorEnv]:
    made = AgentsVectorEnv([lambda: Race((1, 3)), lambda: Race((2, 2))], num_workers=2)
    yield made
    made.close()


def test_each_agent_is_a_row(races: AgentsVectorEnv) -> None:
    assert (races.num_envs, races.single_action_space.n) == (4, 5)
    observations, infos = races.reset(seed=1)
    assert observations.tolist() == [[0, 0], [0, 1], [0, 0], [0, 1]]
    assert infos["alive"].tolist() == [True] * 4


def test_rewards_flags_and_the_mask_are_per_agent(races: AgentsVectorEnv) -> None:
    races.reset()
    _, rewards, terminated, truncated, infos = races.step(np.array([1, 2, 3, 4]))
    assert rewards.tolist() == [1, 2, 3, 4]
    assert terminated.tolist() == [True, False, False, False]
    assert not truncated.any()
    assert infos["alive"].tolist() == [False, True, True, True]


def test_an_agent_that_has_left_sees_zeros_and_earns_nothing(races: AgentsVectorEnv) -> None:
    races.reset()
    races.step(np.array([1, 1, 1, 1]))
    observations, rewards, terminated, _, infos = races.step(np.array([4, 4, 4, 4]))
    assert observations.tolist() == [[0, 0], [2, 1], [2, 0], [2, 1]]
    assert rewards.tolist() == [0, 4, 4, 4]
    assert terminated.tolist() == [False, False, True, True]
    assert infos["alive"].tolist() == [False, True, False, False]


def test_a_game_without_agents_begins_again(races: AgentsVectorEnv) -> None:
    races.reset()
    for _ in range(2):
        races.step(np.zeros(4, np.int64))
    observations, rewards, _, _, infos = races.step(np.full(4, 3))
    assert observations.tolist() == [[0, 0], [3, 1], [0, 0], [0, 1]]
    assert rewards.tolist() == [0, 3, 0, 0]
    assert infos["alive"].tolist() == [False, False, True, True]


def test_agents_of_different_spaces_are_refused() -> None:
    class Unequal(Race):
        def action_space(self, agent: str) -> Any:
            return gymnasium.spaces.Discrete(2 + int(agent[-1]))

    with pytest.raises(ValueError, match=r"same action space.*'runner_1' has Discrete\(3\); pad_spaces=True"):
        AgentsVectorEnv([lambda: Unequal((1, 1))])


class Relay(Race):
    """Agent ``i`` observes ``i + 1`` numbers and has ``i + 2`` actions; it checks that it gets no others."""

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(1, 100, (int(agent[-1]) + 1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(int(agent[-1]) + 2)

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items())
        return super().step(actions)

    def _seen(self, agents: list[str]) -> dict[str, NDArray[np.float32]]:
        return {agent: np.full(int(agent[-1]) + 1, self.time + 1, np.float32) for agent in agents}


def test_agents_of_different_spaces_are_padded_on_request() -> None:
    made = AgentsVectorEnv([lambda: Relay((1, 9, 9))] * 2, num_workers=2, pad_spaces=True)
    try:
        assert made.single_action_space == gymnasium.spaces.Discrete(4)
        assert made.single_observation_space == gymnasium.spaces.Box(np.float32([1, 0, 0]), np.float32([100] * 3))
        own = [[True, False, False], [True, True, False], [True, True, True]]
        assert made.observation_mask.tolist() == own * 2
        assert made.action_mask.tolist() == [[True, *row] for row in own] * 2
        observations, _ = made.reset()
        assert observations.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]] * 2
        # An action that an agent does not have is its first.
        observations, rewards, terminated, _, infos = made.step(np.array([1, 2, 3, 3, 3, 3]))
        assert observations.tolist() == [[2, 0, 0], [2, 2, 0], [2, 2, 2]] * 2
        assert rewards.tolist() == [1, 2, 3, 0, 0, 3]
        assert terminated.tolist() == [True, False, False] * 2
        # An agent that has left observes zeros only.
        observations, *_, infos = made.step(np.zeros(6, int))
        assert observations.tolist() == [[0, 0, 0], [3, 3, 0], [3, 3, 3]] * 2
        assert infos["alive"].tolist() == [False, True, True] * 2
    finally:
        made.close()


class Tug(Race):
    """Agent ``i`` pulls with ``i + 1`` numbers, whose sum is its reward; it sees them again as a part of a Dict."""

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-1, 1, (int(agent[-1]) + 1,), np.float64)

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Dict({"pull": self.action_space(agent), "time": gymnasium.spaces.Discrete(100)})

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.pulls = {agent: np.zeros(int(agent[-1]) + 1) for agent in self.possible_agents}
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items())
        self.pulls |= actions
        return super().step({agent: action.sum() for agent, action in actions.items()})

    def _seen(self, agents: list[str]) -> Any:
        return {agent: {"pull": self.pulls[agent], "time": self.time} for agent in agents}


def test_parts_of_nested_spaces_and_arrays_of_actions_are_padded() -> None:
    made = AgentsVectorEnv([lambda: Tug((9, 9))] * 2, num_workers=2, pad_spaces=True)
    try:
        assert made.action_mask.tolist() == made.observation_mask["pull"].tolist() == [[True, False], [True, True]] * 2
        assert made.observation_mask["time"].all()
        made.reset()
        observations, rewards, *_ = made.step(np.array([[0.5, 0.25], [0.5, 0.25]] * 2))
        assert observations["pull"].tolist() == [[0.5, 0], [0.5, 0.25]] * 2
        assert observations["time"].tolist() == [1] * 4
        assert rewards.tolist() == [0.5, 0.75] * 2
    finally:
        made.close()


def test_padding_changes_nothing_where_all_agents_are_alike() -> None:
    made = AgentsVectorEnv([lambda: Race((1, 3))], pad_spaces=True)
    try:
        assert made.single_observation_space == Race((1, 3)).observation_space("runner_0")
        assert made.observation_mask.all()
        assert made.action_mask.shape == (2, 5)
        assert made.action_mask.all()
    finally:
        made.close()


@pytest.mark.parametrize("pad_spaces", [False, True])
def test_spaces_that_cannot_be_padded_are_refused_with_the_agents_that_have_them(pad_spaces: bool) -> None:
    class Mixed(Race):
        def action_space(self, agent: str) -> Any:
            return [gymnasium.spaces.Discrete(2), gymnasium.spaces.MultiBinary(2)][int(agent[-1])]

    with pytest.raises(ValueError, match=r"Discrete\(2\).*'runner_1'"):
        AgentsVectorEnv([lambda: Mixed((1, 1))], pad_spaces=pad_spaces)


def test_a_game_without_possible_agents_is_refused_with_what_to_set() -> None:
    class Open(pettingzoo.ParallelEnv):  # type: ignore[misc,name-defined]
        metadata = {"name": "open_v0"}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"with `possible_agents`.*found none in .*set the attribute"):
        AgentsVectorEnv([Open])


def test_a_game_in_turns_is_refused_with_how_to_convert_it() -> None:
    class Turns(pettingzoo.AECEnv):  # type: ignore[misc,name-defined]
        metadata = {"name": "turns_v0"}  # noqa: RUF012
        possible_agents = ["a"]  # noqa: RUF012

    with pytest.raises(TypeError, match=r"act in turns \(AECEnv\).*aec_to_parallel"):
        AgentsVectorEnv([Turns])


@pytest.mark.filterwarnings("ignore:.*ERROR: ")
def test_an_agent_that_is_not_one_of_the_possible_ones_is_an_error() -> None:
    class Crowded(Race):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            result = super().reset(seed, options)
            self.agents.append("stranger")
            return result

    made = AgentsVectorEnv([lambda: Crowded((1, 1))])
    try:
        with pytest.raises(ValueError, match=r"expected agents of `possible_agents`.*found \['stranger'\]"):
            made.reset()
    finally:
        made.close()


def test_the_metadata_have_the_autoreset_mode_of_the_games() -> None:
    made = AgentsVectorEnv([lambda: Race((1, 1))], autoreset_mode=AutoresetMode.SAME_STEP)
    assert made.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    made.close()


RACES = [((1, 3), 100), ((2, 2), 100), ((9, 2), 4), ((1, 1), 100)]
"""Lives and limits: one agent outlives the other, both end at once, one is cut off, a game of one step."""


def test_same_step_has_the_same_ends_as_next_step() -> None:
    """Game by game, what the agents earned and how they ended; but for the steps that are resets in NEXT_STEP."""
    histories = {mode: stories(mode) for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)}
    for expected, found in zip(*histories.values(), strict=True):
        assert len(found) == 24
        assert found[: len(expected)] == expected
        assert sum(over for *_, over in expected) >= 2


def stories(mode: AutoresetMode) -> list[list[Any]]:
    made = AgentsVectorEnv(
        [lambda lives=lives, limit=limit: Race(lives, limit) for lives, limit in RACES],  # type: ignore[misc]
        num_workers=2,
        autoreset_mode=mode,
    )
    games: list[list[Any]] = [[] for _ in RACES]
    over = [False] * len(RACES)
    try:
        made.reset()
        for _ in range(24):
            actions = [(2 * len(game) + agent) % 5 for game in games for agent in range(2)]
            observations, rewards, terminated, truncated, infos = made.step(np.array(actions))
            ended = terminated | truncated
            last = infos.get("final_obs", [None] * 8)
            assert infos.get("_final_obs", np.zeros(8, bool)).tolist() == [one is not None for one in last]
            for game, story in enumerate(games):
                rows = range(2 * game, 2 * game + 2)
                if over[game] and mode is AutoresetMode.NEXT_STEP:
                    over[game] = False
                    continue
                if mode is AutoresetMode.SAME_STEP:
                    over[game] = any(last[row] is not None for row in rows)
                else:
                    over[game] = not infos["alive"][list(rows)].any()
                begun = over[game] and mode is AutoresetMode.SAME_STEP
                if begun:
                    assert [last[row] is not None for row in rows] == [ended[row] for row in rows]
                    assert observations[list(rows)].tolist() == [[0, 0], [0, 1]]
                    assert infos["alive"][list(rows)].all()
                    assert set(infos["final_info"]) == {"agent_infos", "_agent_infos"}
                seen = [(last[row] if begun else observations[row]).tolist() for row in rows if ended[row]]
                flags = [(rewards[row], terminated[row], truncated[row]) for row in rows]
                story.append((flags, seen, over[game]))
    finally:
        made.close()
    return games


class Talkative(Race):
    """An action has parts; the first of them is the reward."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__((1, 3))
        self.space = space

    def action_space(self, agent: str) -> Any:
        del agent
        return self.space

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self.space.contains(action) for action in actions.values())
        first = "go" if isinstance(self.space, gymnasium.spaces.Dict) else 0
        return super().step({agent: action[first] for agent, action in actions.items()})


GO, SAY, TURN = gymnasium.spaces.Discrete(5), gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.MultiBinary(2)


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(gymnasium.spaces.Dict({"go": GO, "say": SAY, "turn": TURN}), id="Dict of three"),
        pytest.param(gymnasium.spaces.Dict({"go": GO}), id="Dict of one"),
        pytest.param(gymnasium.spaces.Tuple((GO, SAY, TURN)), id="Tuple of three"),
        pytest.param(gymnasium.spaces.Tuple((GO,)), id="Tuple of one"),
    ],
)
def test_agents_are_counted_and_not_the_parts_of_their_actions(space: gymnasium.Space[Any]) -> None:
    made = AgentsVectorEnv([lambda: Talkative(space)] * 3, num_workers=2)
    try:
        assert made.num_envs == 6
        assert made.metadata == {"name": "race_v0", "autoreset_mode": AutoresetMode.NEXT_STEP}
        made.reset()
        made.action_space.seed(1)
        actions = made.action_space.sample()
        _, rewards, terminated, _, infos = made.step(actions)
        assert rewards.tolist() == actions["go" if isinstance(space, gymnasium.spaces.Dict) else 0].tolist()
        assert terminated.tolist() == [True, False] * 3
        assert infos["alive"].tolist() == [False, True] * 3
    finally:
        made.close()


class Deadly(Race):
    """Action 4 of any agent kills the process."""

    def step(self, actions: dict[str, int]) -> Any:
        if 4 in actions.values():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


@restarting
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_all_agents_of_a_game_that_was_restarted_are_truncated(mode: AutoresetMode) -> None:
    """While another game ends in the same step, and a third goes on."""
    made = AgentsVectorEnv(
        [lambda: Deadly((2, 2)), lambda: Deadly((1, 9)), lambda: Deadly((9, 9))],
        num_workers=3,
        on_error="restart",
        autoreset_mode=mode,
    )
    try:
        made.reset()
        made.step(np.array([1, 1, 1, 1, 1, 1]))
        observations, rewards, terminated, truncated, infos = made.step(np.array([1, 2, 1, 4, 1, 2]))
        assert rewards.tolist() == [1, 2, 0, 0, 1, 2]
        assert terminated.tolist() == [True, True, False, False, False, False]
        assert truncated.tolist() == [False, False, True, True, False, False]
        assert infos["_restarted"].tolist() == [False, True, False]
        assert "SIGKILL" in infos["restarted"][1]
        assert observations[2:].tolist() == [[0, 0], [0, 1], [2, 0], [2, 1]]
        if mode is AutoresetMode.SAME_STEP:
            assert infos["_final_obs"].tolist() == [True] * 4 + [False] * 2
            # Of the game that was restarted, what its agents saw last.
            assert [seen.tolist() for seen in infos["final_obs"][:4]] == [[2, 0], [2, 1], [1, 0], [1, 1]]
            assert infos["alive"].all()
        else:
            made.step(np.zeros(6, int))
        observations, rewards, _, truncated, infos = made.step(np.array([3, 3, 3, 3, 3, 3]))
        assert observations[:4].tolist() == [[1, 0], [1, 1]] * 2
        assert rewards.tolist() == [3] * 6
        assert not truncated.any()
        assert "restarted" not in infos
    finally:
        made.close()


def test_the_reference_for_these_counters_is_gymnasiums_own() -> None:
    """The fixture's environments behave in one process as they do here."""
    sync = SyncVectorEnv([lambda n=n: Counter(n) for n in (2, 3, 4)])  # type: ignore[misc]
    ours = AsyncVectorEnv([lambda n=n: Counter(n) for n in (2, 3, 4)], num_workers=2)  # type: ignore[misc]
    try:
        assert np.array_equal(sync.reset()[0], ours.reset()[0])
        for _ in range(6):
            for a, b in zip(sync.step(np.ones(3, int))[:4], ours.step(np.ones(3, int))[:4], strict=True):
                assert np.array_equal(a, b)
    finally:
        ours.close()


# ---------------------------------------------------------------------------------------------------- custom spaces


class Letters(gymnasium.Space[str]):
    """One letter; only this file registers it."""

    def __init__(self) -> None:
        super().__init__((), np.dtype("U1"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Letters)

    __hash__ = None  # type: ignore[assignment]


class Spelling(gymnasium.Env[Any, int]):
    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict({"letter": Letters(), "at": gymnasium.spaces.Discrete(26)})
        self.action_space = gymnasium.spaces.Discrete(26)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return {"letter": "a", "at": 0}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"letter": chr(97 + action), "at": action}, 0.0, False, False, {}


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_space_that_was_registered_with_the_shared_memory_functions_is_shared(context: str) -> None:
    if Letters not in create_shared_memory.registry:
        codes = gymnasium.spaces.Box(0, 255, (), np.uint8)

        @gymnasium.vector.utils.batch_space.register(Letters)
        def _batch(space: Letters, n: int = 1) -> Any:
            return gymnasium.spaces.Tuple([space] * n)

        @create_shared_memory.register(Letters)
        def _create(space: Letters, n: int = 1, ctx: Any = None) -> Any:
            del space, ctx
            return create_shared_memory(codes, n)

        @read_from_shared_memory.register(Letters)
        def _read(space: Letters, memory: Any, n: int = 1) -> Any:
            del space
            return tuple(chr(code) for code in read_from_shared_memory(codes, memory, n))

        @write_to_shared_memory.register(Letters)
        def _write(space: Letters, index: int, value: str, memory: Any) -> None:
            del space
            write_to_shared_memory(codes, index, np.uint8(ord(value)), memory)

    envs = AsyncVectorEnv([Spelling] * 3, num_workers=2, context=context)
    try:
        assert envs.reset()[0]["letter"] == ("a", "a", "a")
        observations = envs.step(np.array([7, 8, 25]))[0]
        assert observations["letter"] == ("h", "i", "z")
        assert observations["at"].tolist() == [7, 8, 25]
        with pytest.raises(NotImplementedError, match="need observations in arrays of shared memory"):
            envs.reset_into({})
    finally:
        envs.close()


def test_observations_that_are_not_in_the_steps_are_not_left_out_of_a_slot_in_silence() -> None:
    envs = AsyncVectorEnv([Counter] * 2, num_workers=1, shared_memory=False)
    try:
        with pytest.raises(NotImplementedError, match="need observations in arrays of shared memory"):
            envs.reset_into({})
    finally:
        envs.close()
