"""PettingZoo: parallel environments as a vector environment with one row per agent, and a mask of the living agents.

Every environment must have the same possible agents, and all agents the same spaces. The rows of one environment are
consecutive: row ``e * len(agents) + a`` is agent ``a`` of environment ``e``. A parallel environment is called a game
here; an ``AsyncVectorEnv`` runs the games, and each of its environments is one game with all its agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.vector.async_vector_env import AsyncVectorEnv
from memlane.vector.messages import Ready

_AGENTS = "memlane.agents"
"""The key of a game's metadata with its number of agents. Its spaces do not say it: a stacked Tuple of two parts may
belong to two agents, or to any number of agents with two parts each."""
_PER_AGENT = {"rewards": "float64", "terminated": "bool", "truncated": "bool", "alive": "bool"}


class Game(Env[Any, Any]):
    """A parallel environment as one Gymnasium environment whose observations and actions are stacked over the agents.

    An agent that has left the game observes zeros, and its actions are ignored. The game is over when no agent is
    left."""

    def __init__(self, parallel_env: Any) -> None:
        self.game = parallel_env
        self.agents: list[Any] = list(parallel_env.possible_agents)
        self.metadata = {**getattr(parallel_env, "metadata", {}), _AGENTS: len(self.agents)}
        self.render_mode = getattr(parallel_env, "render_mode", None)
        self.single_observation_space: Space[Any] = self._common_space(parallel_env.observation_space, "observation")
        self.single_action_space: Space[Any] = self._common_space(parallel_env.action_space, "action")
        self.observation_space = batch_space(self.single_observation_space, len(self.agents))
        self.action_space = batch_space(self.single_action_space, len(self.agents))
        self._zeros = next(iter(iterate(
            batch_space(self.single_observation_space, 1),
            create_empty_array(self.single_observation_space, 1, fn=np.zeros),
        )))  # fmt: skip

    def _common_space(self, space_of: Callable[[Any], Space[Any]], what: str) -> Space[Any]:
        spaces = [space_of(agent) for agent in self.agents]
        for agent, space in zip(self.agents, spaces, strict=True):
            if space != spaces[0]:
                raise ValueError(
                    f"all agents must have the same {what} space to be rows of one batch; agent {self.agents[0]!r} has "
                    f"{spaces[0]}, agent {agent!r} has {space}"
                )
        return spaces[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.game.reset(seed=seed, options=options)
        no_flags = dict.fromkeys(self.agents, False)
        return self._stack(observations), self._info({}, no_flags, no_flags, infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        living = set(self.game.agents)
        pairs = zip(self.agents, iterate(self.action_space, action), strict=True)
        actions = {agent: agent_action for agent, agent_action in pairs if agent in living}
        observations, rewards, terminated, truncated, infos = self.game.step(actions)
        over = not self.game.agents
        ended = over and all(terminated.get(agent, True) for agent in living)
        info = self._info(rewards, terminated, truncated, infos)
        return self._stack(observations), float(sum(rewards.values())), ended, over and not ended, info

    def _stack(self, observations: dict[Any, Any]) -> Any:
        rows = [observations.get(agent, self._zeros) for agent in self.agents]
        batch: Any = create_empty_array(self.single_observation_space, len(rows))
        return concatenate(self.single_observation_space, rows, batch)

    def _info(self, rewards: Any, terminated: Any, truncated: Any, infos: dict[Any, Any]) -> dict[str, Any]:
        living = set(self.game.agents)
        per_agent = {
            "rewards": [rewards.get(agent, 0.0) for agent in self.agents],
            "terminated": [terminated.get(agent, False) for agent in self.agents],
            "truncated": [truncated.get(agent, False) for agent in self.agents],
            "alive": [agent in living for agent in self.agents],
        }
        game_info: dict[str, Any] = {name: np.array(values, _PER_AGENT[name]) for name, values in per_agent.items()}
        if any(infos.values()):
            game_info["agent_infos"] = {str(agent): info for agent, info in infos.items() if info}
        return game_info

    def render(self) -> Any:
        return self.game.render()

    def close(self) -> None:
        self.game.close()


class AgentsVectorEnv(VectorEnv[Any, Any, Any]):
    """PettingZoo parallel environments in worker processes, with one row per agent. ``infos["alive"]`` is the mask of
    the agents that are still in the game.

    A game ends when its last agent leaves. With ``SAME_STEP``, ``infos["final_obs"]`` has the last observations of the
    agents that ended in this step, by row. ``agent_infos``, ``final_info`` and ``restarted`` are by game instead."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **kwargs: Any) -> None:
        """``kwargs`` are arguments of ``AsyncVectorEnv``."""
        self._games = _GamesVectorEnv([_GameFn(env_fn) for env_fn in env_fns], **kwargs)
        self.num_games = self._games.num_envs
        self.agents: list[Any] = self._games.get_attr("agents")[0]
        self.num_envs = self.num_games * len(self.agents)
        self.metadata = self._games.metadata
        self.render_mode = self._games.render_mode
        self.single_observation_space = self._games.get_attr("single_observation_space")[0]
        self.single_action_space = self._games.get_attr("single_action_space")[0]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all games. ``seed`` and ``options["reset_mask"]`` are by game, as of ``AsyncVectorEnv.reset``."""
        observations, infos = self._games.reset(seed=seed, options=options)
        infos["alive"] = self._per_row(infos)["alive"]
        return self._rows(observations), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all games; ``actions[i]`` is for row i. Actions of agents that have left the game are ignored."""
        stacked = _reshape(actions, (self.num_games, len(self.agents)), 1)
        observations, *_, infos = self._games.step(stacked)
        rows = self._per_row(infos)
        if "final_info" in infos:
            self._use_final_info(rows, infos["final_info"])
        if "_restarted" in infos:
            rows["truncated"] |= self._repeat_per_agent(infos["_restarted"])
        if "final_obs" in infos:
            ended = self._repeat_per_agent(infos["_final_obs"]) & (rows["terminated"] | rows["truncated"])
            infos["final_obs"], infos["_final_obs"] = self._final_rows(infos["final_obs"], ended), ended
        infos["alive"] = rows["alive"]
        return self._rows(observations), rows["rewards"], rows["terminated"], rows["truncated"], infos

    def _rows(self, observations: Any) -> Any:
        return _reshape(observations, (self.num_envs,), 2)

    def _repeat_per_agent(self, per_game: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(per_game, len(self.agents))

    def _per_row(self, infos: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Take the values per agent out of the infos of the games, as one row per agent; zeros if there are none."""
        rows = {}
        for name, dtype in _PER_AGENT.items():
            values = infos.pop(name, None)
            infos.pop(f"_{name}", None)
            rows[name] = (
                np.zeros(self.num_envs, dtype) if values is None else values.reshape(self.num_envs).astype(dtype)
            )
        return rows

    def _use_final_info(self, rows: dict[str, NDArray[Any]], final_info: dict[str, Any]) -> None:
        """For games that ended and were reset in the same step, take rewards and flags from ``final_info``: their infos
        belong to the reset. Only ``alive`` is that of the new episode."""
        # A game that was restarted has ended too, but has no results of a last step.
        ended = self._repeat_per_agent(final_info.get("_rewards", np.zeros(self.num_games, np.bool_)))
        last = self._per_row(final_info)
        for name in ("rewards", "terminated", "truncated"):
            rows[name][ended] = last[name][ended]

    def _final_rows(self, per_game: NDArray[Any], ended: NDArray[np.bool_]) -> NDArray[Any]:
        """The last observations of the agents that ``ended``, as one object for each row."""
        final = np.full(self.num_envs, None, object)
        for game, stacked in enumerate(per_game):
            if stacked is None:  # it has not ended, or was restarted before its first observation was returned
                continue
            observations = iterate(self._games.single_observation_space, stacked)
            for row, observation in enumerate(observations, game * len(self.agents)):
                if ended[row]:
                    final[row] = observation
        return final

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each game, or read an attribute; returns one result for each game."""
        return self._games.call(name, *args, **kwargs)

    def render(self) -> tuple[Any, ...] | None:
        return self._games.render()

    def close_extras(self, **kwargs: Any) -> None:
        self._games.close(**kwargs)


class _GamesVectorEnv(AsyncVectorEnv):
    """Declares the infos per agent, once the number of agents is known."""

    def _set_spaces(self, ready: list[Ready]) -> None:
        self._agents = ready[0].metadata.pop(_AGENTS)  # the batch copies the other metadata
        super()._set_spaces(ready)

    def _complete_info_spec(self, info_spec: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
        return {**info_spec, **{name: (dtype, (self._agents,)) for name, dtype in _PER_AGENT.items()}}


class _GameFn:
    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self.env_fn = env_fn

    def __call__(self) -> Game:
        return Game(self.env_fn())


def _reshape(batch: Any, leading: tuple[int, ...], drop: int) -> Any:
    """Reshape the first ``drop`` dimensions of all arrays of a batch to ``leading``, without a copy where possible."""
    if isinstance(batch, dict):
        return {key: _reshape(value, leading, drop) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_reshape(value, leading, drop) for value in batch)
    array = np.asarray(batch)
    return array.reshape(*leading, *array.shape[drop:])
