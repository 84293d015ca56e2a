"""Environments of other projects: 1,000 steps through our vector environments return what plain ones return, bit for
bit. ``make third-party`` installs the projects and runs these tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from numpy.typing import NDArray

from memlane.vector import AgentsVectorEnv
from tests.support.vector_envs import assert_same_run, ours

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.filterwarnings("ignore"),  # what other projects warn about is theirs
    pytest.mark.timeout(600, method="signal"),
]

STEPS = 1000
ENVS = 4
each_mode = pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda m: m.name)


def require(module: str) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed; `make third-party` installs it")


def make(module: str, env_id: str, **arguments: Any) -> gymnasium.Env[Any, Any]:
    gymnasium.register_envs(importlib.import_module(module))
    return gymnasium.make(env_id, **arguments)


def env_fns(make_env: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Callable[[], Any]]:
    return [partial(make_env, *arguments, **settings)] * ENVS


# ------------------------------------------------------------------------------------------------------------- MiniGrid


@each_mode
@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0", "MiniGrid-LavaGapS5-v0"])
def test_minigrid_is_the_same_and_only_its_mission_is_not_shared(env_id: str, mode: AutoresetMode) -> None:
    require("minigrid")
    fns = env_fns(make, "minigrid", env_id, max_steps=60)
    assert_same_run(fns, STEPS, mode)
    with ours(fns) as envs:
        assert list(envs._steps.objects) == ["observation.mission"]
        assert {"observation.image", "observation.direction"} < envs._steps.segment.views().keys()


# ---------------------------------------------------------------------------------------------------------------- Atari


def make_preprocessed(env_id: str) -> gymnasium.Env[Any, Any]:
    """The way from the game to the network that most training scripts take."""
    return FrameStackObservation(AtariPreprocessing(make("ale_py", env_id, frameskip=1)), 4)


@each_mode
@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "ALE/Pong-v5"])
def test_atari_is_the_same(env_id: str, mode: AutoresetMode) -> None:
    require("ale_py")
    assert_same_run(env_fns(make, "ale_py", env_id), STEPS, mode)


@each_mode
def test_preprocessed_atari_is_the_same(mode: AutoresetMode) -> None:
    require("ale_py")
    require("cv2")
    assert_same_run(env_fns(make_preprocessed, "ALE/Breakout-v5"), STEPS, mode)


# --------------------------------------------------------------------------------------------------- gymnasium-robotics


# Not Fetch and the Shadow hand: gymnasium-robotics 1.4.2 cannot build them with MuJoCo 4.
@each_mode
@pytest.mark.parametrize("env_id", ["AntMaze_UMaze-v5", "PointMaze_UMaze-v3", "AdroitHandDoor-v1"])
def test_robotics_is_the_same(env_id: str, mode: AutoresetMode) -> None:
    require("gymnasium_robotics")
    assert_same_run(env_fns(make, "gymnasium_robotics", env_id, max_episode_steps=50), STEPS, mode)


# ------------------------------------------------------------------------------------------------------- PettingZoo MPE

MPE = [
    "simple_v3",
    "simple_adversary_v3",
    "simple_crypto_v3",
    "simple_push_v3",
    "simple_reference_v3",
    "simple_speaker_listener_v4",
    "simple_spread_v3",
    "simple_tag_v3",
    "simple_world_comm_v3",
]
GAMES = 3


def make_game(name: str, continuous: bool) -> Any:
    return importlib.import_module(f"mpe2.{name}").parallel_env(continuous_actions=continuous)


class PlainGames:
    """Games that are stepped one after the other: what their rows have to be, without any of our code."""

    def __init__(self, name: str, continuous: bool) -> None:
        self.games = [make_game(name, continuous) for _ in range(GAMES)]
        self.agents = self.games[0].possible_agents
        self.observation_shapes = [self.games[0].observation_space(agent).shape for agent in self.agents]
        self.action_spaces = [self.games[0].action_space(agent) for agent in self.agents]
        self.width = max(shape[0] for shape in self.observation_shapes)

    def reset(self, seed: int) -> NDArray[Any]:
        return np.concatenate([self._rows(game.reset(seed=seed + i)[0]) for i, game in enumerate(self.games)])

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], list[float], list[bool], list[bool]]:
        observations, rewards, terminated, truncated = [], [], [], []
        for game, game_actions in zip(self.games, np.split(actions, GAMES), strict=True):
            over = not game.agents
            results = (*game.reset()[:1], {}, {}, {}) if over else game.step(self._own(game_actions))
            observations.append(self._rows(results[0]))
            for per_row, per_agent in zip((rewards, terminated, truncated), results[1:4], strict=True):
                per_row.extend(per_agent.get(agent, 0) for agent in self.agents)
        return np.concatenate(observations), rewards, terminated, truncated

    def _own(self, actions: NDArray[Any]) -> dict[str, Any]:
        own = {}
        for agent, action, space in zip(self.agents, actions, self.action_spaces, strict=True):
            own[agent] = action[: space.shape[0]] if space.shape else action if action < space.n else 0
        return own

    def _rows(self, observations: dict[str, NDArray[Any]]) -> NDArray[Any]:
        rows = [observations[agent] for agent in self.agents]
        return np.stack([np.pad(row, (0, self.width - len(row))) for row in rows]).astype(np.float32)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", MPE)
def test_every_game_of_mpe_is_the_same(name: str, continuous: bool) -> None:
    require("mpe2")
    plain = PlainGames(name, continuous)
    agents = AgentsVectorEnv([partial(make_game, name, continuous)] * GAMES, num_workers=2, pad_spaces=True)
    try:
        widths = agents.observation_mask.sum(axis=1).tolist()
        assert widths == [shape[0] for shape in plain.observation_shapes] * GAMES
        assert np.array_equal(agents.reset(seed=5)[0], plain.reset(5))
        agents.action_space.seed(5)
        for number in range(STEPS):
            actions = agents.action_space.sample()
            expected = plain.step(deepcopy(actions))
            for theirs, mine in zip(expected, agents.step(actions)[:4], strict=True):
                assert np.array_equal(theirs, mine), f"step {number}: {theirs} is not {mine}"
    finally:
        agents.close()
        for game in plain.games:
            game.close()
