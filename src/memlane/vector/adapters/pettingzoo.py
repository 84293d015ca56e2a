"""PettingZoo: parallel environments as a vector environment with one row per agent, and a mask of the living agents.

Every environment must have the same possible agents. All agents must have the same spaces, or spaces that can be padded
to the same (``pad_spaces=True``). The rows of one environment are consecutive: row ``e * len(agents) + a`` is agent
``a`` of environment ``e``. A parallel environment is called a game here; an ``AsyncVectorEnv`` runs the games, and each
of its environments is one game with all its agents.
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
from memlane.spaces.padding import fit_action, own_mask, pad_observation, padded_space
from memlane.vector.async_vector_env import AsyncVectorEnv
from memlane.vector.messages import Ready
from memlane.vector.observations import read_only

_AGENTS = "memlane.agents"
"""The key of a game's metadata with its number of agents. Its spaces do not say it: a stacked Tuple of two parts may
belong to two agents, or to any number of agents with two parts each."""
_PER_AGENT = {"rewards": "float64", "terminated": "bool", "truncated": "bool", "alive": "bool"}


class Game(Env[Any, Any]):
    """A parallel environment as one Gymnasium environment whose observations and actions are stacked over the agents.

    An agent that has left the game observes zeros, and its actions are ignored. The game is over when no agent is
    left."""

    def __init__(self, parallel_env: Any, pad_spaces: bool = False) -> None:
        self.game = parallel_env
        self.agents = _possible_agents(parallel_env)
        self.metadata = {**getattr(parallel_env, "metadata", {}), _AGENTS: len(self.agents)}
        self.render_mode = getattr(parallel_env, "render_mode", None)
        observation_spaces = {agent: parallel_env.observation_space(agent) for agent in self.agents}
        action_spaces = {agent: parallel_env.action_space(agent) for agent in self.agents}
        common_space = padded_space if pad_spaces else _same_space
        self.single_observation_space = common_space(observation_spaces, "observation space")
        self.single_action_space = common_space(action_spaces, "action space")
        self.observation_mask = [
            own_mask(space, self.single_observation_space) for space in observation_spaces.values()
        ]
        self.action_mask = [own_mask(space, self.single_action_space) for space in action_spaces.values()]
        # Only the agents whose values have to be changed, so that a game without padding does nothing for it.
        self._padded_observations = _other_spaces(observation_spaces, self.single_observation_space)
        self._padded_actions = _other_spaces(action_spaces, self.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, len(self.agents))
        self.action_space = batch_space(self.single_action_space, len(self.agents))
        self._zeros = next(iter(iterate(
            batch_space(self.single_observation_space, 1),
            create_empty_array(self.single_observation_space, 1, fn=np.zeros),
        )))  # fmt: skip

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.game.reset(seed=seed, options=options)
        if unknown := [agent for agent in self.game.agents if agent not in self.agents]:
            raise ValueError(
                f"expected agents of `possible_agents`, which are {self.agents}, found {unknown} after a reset of "
                f"{self.game}; add them to `possible_agents`"
            )
        no_flags = dict.fromkeys(self.agents, False)
        return self._stack(observations), self._info({}, no_flags, no_flags, infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        living = set(self.game.agents)
        pairs = zip(self.agents, iterate(self.action_space, action), strict=True)
        actions = {agent: agent_action for agent, agent_action in pairs if agent in living}
        for agent in self._padded_actions.keys() & living:
            actions[agent] = fit_action(self._padded_actions[agent], actions[agent])
        observations, rewards, terminated, truncated, infos = self.game.step(actions)
        over = not self.game.agents
        ended = over and all(terminated.get(agent, True) for agent in living)
        info = self._info(rewards, terminated, truncated, infos)
        return self._stack(observations), float(sum(rewards.values())), ended, over and not ended, info

    def _stack(self, observations: dict[Any, Any]) -> Any:
        observations = dict(observations)  # the game may keep its own
        for agent in self._padded_observations.keys() & observations.keys():
            own_space = self._padded_observations[agent]
            observations[agent] = pad_observation(own_space, self.single_observation_space, observations[agent])
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


def _possible_agents(parallel_env: Any) -> list[Any]:
    if hasattr(parallel_env, "agent_iter"):
        raise TypeError(
            f"expected a PettingZoo parallel environment, in which all agents act at once, found {parallel_env}, whose "
            "agents act in turns (AECEnv); convert it with pettingzoo.utils.conversions.aec_to_parallel"
        )
    agents = list(getattr(parallel_env, "possible_agents", None) or ())
    if not agents:
        raise ValueError(
            "expected a PettingZoo parallel environment with `possible_agents`, a list of all agents that can ever be "
            f"in the game, because each of them has a row of the batch; found none in {parallel_env}; set the "
            "attribute in the constructor of the environment"
        )
    return agents


def _same_space(spaces: dict[Any, Space[Any]], what: str) -> Space[Any]:
    (first_agent, first), *others = spaces.items()
    for agent, space in others:
        if space != first:
            raise ValueError(
                f"all agents must have the same {what} to be rows of one batch; agent {first_agent!r} has {first}, "
                f"agent {agent!r} has {space}; pad_spaces=True pads them to the largest"
            )
    return first


def _other_spaces(spaces: dict[Any, Space[Any]], common: Space[Any]) -> dict[Any, Space[Any]]:
    return {agent: space for agent, space in spaces.items() if space != common}


class AgentsVectorEnv(VectorEnv[Any, Any, Any]):
    """PettingZoo parallel environments in worker processes, with one row per agent. ``infos["alive"]`` is the mask of
    the agents that are still in the game.

    With ``pad_spaces``, agents may differ in spaces, and all rows have the largest: observations are filled up with
    zeros, elements of an action that an agent does not have are left out, and a discrete action that it does not have
    becomes its first. ``observation_mask`` and ``action_mask`` say what each row has.

    A game ends when its last agent leaves. With ``SAME_STEP``, ``infos["final_obs"]`` has the last observations of the
    agents that ended in this step, by row. ``agent_infos``, ``final_info`` and ``restarted`` are by game instead."""

    observation_mask: Any
    """For each row, which elements of the observation its agent has; all, unless ``pad_spaces``."""
    action_mask: Any
    """For each row, which elements of a Box action or which values of a Discrete action its agent has."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], *, pad_spaces: bool = False, **kwargs: Any) -> None:
        """
        Args:
            env_fns: Functions that build the parallel environments.
            pad_spaces: Whether the spaces of agents that differ are padded to the largest (Box and Discrete, also
                inside of Dict and Tuple); otherwise they are an error.
            kwargs: Arguments of ``AsyncVectorEnv``.
        """
        self._games = _GamesVectorEnv([_GameFn(env_fn, pad_spaces) for env_fn in env_fns], **kwargs)
        self.num_games = self._games.num_envs
        self.agents: list[Any] = self._games.get_attr("agents")[0]
        self.num_envs = self.num_games * len(self.agents)
        self.metadata = self._games.metadata
        self.render_mode = self._games.render_mode
        self.single_observation_space = self._games.get_attr("single_observation_space")[0]
        self.single_action_space = self._games.get_attr("single_action_space")[0]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_mask = _repeat(self._games.get_attr("observation_mask")[0], self.num_games)
        self.action_mask = _repeat(self._games.get_attr("action_mask")[0], self.num_games)

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
    def __init__(self, env_fn: Callable[[], Any], pad_spaces: bool) -> None:
        self.env_fn = env_fn
        self.pad_spaces = pad_spaces

    def __call__(self) -> Game:
        return Game(self.env_fn(), self.pad_spaces)


def _repeat(masks: list[Any], count: int) -> Any:
    """The masks of the agents of one game as rows of ``count`` games."""
    if isinstance(masks[0], dict):
        return {key: _repeat([mask[key] for mask in masks], count) for key in masks[0]}
    if isinstance(masks[0], tuple):
        return tuple(_repeat(list(parts), count) for parts in zip(*masks, strict=True))
    return read_only(np.concatenate([np.stack(masks)] * count))


def _reshape(batch: Any, leading: tuple[int, ...], drop: int) -> Any:
    """Reshape the first ``drop`` dimensions of all arrays of a batch to ``leading``, without a copy where possible."""
    if isinstance(batch, dict):
        return {key: _reshape(value, leading, drop) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_reshape(value, leading, drop) for value in batch)
    array = np.asarray(batch)
    return array.reshape(*leading, *array.shape[drop:])
