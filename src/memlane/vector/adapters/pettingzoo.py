"""Agents: PettingZoo's parallel environments as rows, one for each agent, with a mask that says who is alive.

Every environment must have the same possible agents, and all agents the same spaces. The rows of one environment lie
next to each other: row ``e * len(agents) + a`` is agent ``a`` of environment ``e``. All of it lies in the shared memory
of an ``AsyncVectorEnv`` whose environments each stand for all agents of one game.
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
"""Where a game's metadata says how many agents it has. Its spaces do not: stacked, a Tuple of two parts may be that of
two agents, or of any number of agents who have two parts each."""
_PER_AGENT = {"rewards": "float64", "terminated": "bool", "truncated": "bool", "alive": "bool"}


class Game(Env[Any, Any]):
    """A parallel environment as one environment: what its agents see and do is stacked. An agent that has left the game
    sees zeros, and what it does is ignored. The game is over when no agent is left."""

    def __init__(self, parallel_env: Any) -> None:
        self.game = parallel_env
        self.agents: list[Any] = list(parallel_env.possible_agents)
        self.metadata = {**getattr(parallel_env, "metadata", {}), _AGENTS: len(self.agents)}
        self.render_mode = getattr(parallel_env, "render_mode", None)
        self.single_observation_space: Space[Any] = self._common(parallel_env.observation_space, "observation")
        self.single_action_space: Space[Any] = self._common(parallel_env.action_space, "action")
        self.observation_space = batch_space(self.single_observation_space, len(self.agents))
        self.action_space = batch_space(self.single_action_space, len(self.agents))
        self._nothing = next(iter(iterate(
            batch_space(self.single_observation_space, 1),
            create_empty_array(self.single_observation_space, 1, fn=np.zeros),
        )))  # fmt: skip

    def _common(self, space_of: Callable[[Any], Space[Any]], what: str) -> Space[Any]:
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
        quiet = dict.fromkeys(self.agents, False)
        return self._stacked(observations), self._told({}, quiet, quiet, infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        living = set(self.game.agents)
        chosen = zip(self.agents, iterate(self.action_space, action), strict=True)
        actions = {agent: choice for agent, choice in chosen if agent in living}
        observations, rewards, terminated, truncated, infos = self.game.step(actions)
        over = not self.game.agents
        ended = over and all(terminated.get(agent, True) for agent in living)
        told = self._told(rewards, terminated, truncated, infos)
        return self._stacked(observations), float(sum(rewards.values())), ended, over and not ended, told

    def _stacked(self, observations: dict[Any, Any]) -> Any:
        rows = [observations.get(agent, self._nothing) for agent in self.agents]
        room: Any = create_empty_array(self.single_observation_space, len(rows))
        return concatenate(self.single_observation_space, rows, room)

    def _told(self, rewards: Any, terminated: Any, truncated: Any, infos: dict[Any, Any]) -> dict[str, Any]:
        living = set(self.game.agents)
        per_agent = {
            "rewards": [rewards.get(agent, 0.0) for agent in self.agents],
            "terminated": [terminated.get(agent, False) for agent in self.agents],
            "truncated": [truncated.get(agent, False) for agent in self.agents],
            "alive": [agent in living for agent in self.agents],
        }
        told: dict[str, Any] = {name: np.array(values, _PER_AGENT[name]) for name, values in per_agent.items()}
        if any(infos.values()):
            told["agent_infos"] = {str(agent): info for agent, info in infos.items() if info}
        return told

    def render(self) -> Any:
        return self.game.render()

    def close(self) -> None:
        self.game.close()


class AgentsVectorEnv(VectorEnv[Any, Any, Any]):
    """PettingZoo parallel environments, stepped in worker processes; one row per agent. ``infos["alive"]`` says which
    rows are agents that are still in the game.

    A game ends when its last agent leaves. With ``SAME_STEP``, ``infos["final_obs"]`` has the last observations of the
    agents whose end that was, a row for each. What is not told per agent (``agent_infos``, ``final_info``,
    ``restarted``) has a row for each game."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **kwargs: Any) -> None:
        """``kwargs`` are those of ``AsyncVectorEnv``."""
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
        observations, infos = self._games.reset(seed=seed, options=options)
        infos["alive"] = self._per_row(infos)["alive"]
        return self._rows(observations), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        stacked = _reshaped(actions, (self.num_games, len(self.agents)), 1)
        observations, *_, infos = self._games.step(stacked)
        told = self._per_row(infos)
        if "final_info" in infos:
            self._take_last(told, infos["final_info"])
        if "_restarted" in infos:
            told["truncated"] |= self._each_agent(infos["_restarted"])
        if "final_obs" in infos:
            ended = self._each_agent(infos["_final_obs"]) & (told["terminated"] | told["truncated"])
            infos["final_obs"], infos["_final_obs"] = self._final_rows(infos["final_obs"], ended), ended
        infos["alive"] = told["alive"]
        return self._rows(observations), told["rewards"], told["terminated"], told["truncated"], infos

    def _rows(self, observations: Any) -> Any:
        return _reshaped(observations, (self.num_envs,), 2)

    def _each_agent(self, of_games: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(of_games, len(self.agents))

    def _per_row(self, infos: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """What the games told per agent, taken out of their infos; zeros where they did not."""
        told = {}
        for name, dtype in _PER_AGENT.items():
            values = infos.pop(name, None)
            infos.pop(f"_{name}", None)
            told[name] = (
                np.zeros(self.num_envs, dtype) if values is None else values.reshape(self.num_envs).astype(dtype)
            )
        return told

    def _take_last(self, told: dict[str, NDArray[Any]], final_info: dict[str, Any]) -> None:
        """Games that ended and began again in the same step have told what their new episode begins with, and in
        ``final_info`` what came of the step. Only who is alive is a matter of the new one."""
        # A game that was restarted has ended too, but there is no last step to tell of.
        ended = self._each_agent(final_info.get("_rewards", np.zeros(self.num_games, np.bool_)))
        last = self._per_row(final_info)
        for name in ("rewards", "terminated", "truncated"):
            told[name][ended] = last[name][ended]

    def _final_rows(self, of_games: NDArray[Any], ended: NDArray[np.bool_]) -> NDArray[Any]:
        """The last observations of the agents that ``ended``, one by one."""
        final = np.full(self.num_envs, None, object)
        for game, stacked in enumerate(of_games):
            if stacked is None:  # it has not ended, or was restarted before anybody saw anything
                continue
            for row, seen in enumerate(iterate(self._games.single_observation_space, stacked), game * len(self.agents)):
                if ended[row]:
                    final[row] = seen
        return final

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Once for each game."""
        return self._games.call(name, *args, **kwargs)

    def render(self) -> tuple[Any, ...] | None:
        return self._games.render()

    def close_extras(self, **kwargs: Any) -> None:
        self._games.close(**kwargs)


class _GamesVectorEnv(AsyncVectorEnv):
    """What is told per agent is declared once the number of agents is known."""

    def _set_spaces(self, ready: list[Ready]) -> None:
        self._agents = ready[0].metadata.pop(_AGENTS)  # from there the batch has its metadata
        super()._set_spaces(ready)

    def _complete_info_spec(self, info_spec: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
        return {**info_spec, **{name: (dtype, (self._agents,)) for name, dtype in _PER_AGENT.items()}}


class _GameFn:
    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self.env_fn = env_fn

    def __call__(self) -> Game:
        return Game(self.env_fn())


def _reshaped(batch: Any, leading: tuple[int, ...], drop: int) -> Any:
    """The arrays of a batch with their first ``drop`` dimensions in another shape, without a copy where that can be."""
    if isinstance(batch, dict):
        return {key: _reshaped(value, leading, drop) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_reshaped(value, leading, drop) for value in batch)
    array = np.asarray(batch)
    return array.reshape(*leading, *array.shape[drop:])
