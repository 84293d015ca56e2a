"""NativeEnv: one native environment as a ``gymnasium.Env``, for everything that wants exactly one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode

from memlane.native.library import built_in
from memlane.native.spec import Spec
from memlane.native.vector_env import NativeVectorEnv, check_render_mode


class NativeEnv(Env[Any, Any]):
    """Observations are copies: who steps one environment at a time keeps them."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 50}  # type: ignore[misc]

    def __init__(self, name: str | Spec, render_mode: str | None = None, **settings: Any) -> None:
        """``name`` is that of an environment that comes with memlane; or the spec of another."""
        spec = built_in(name) if isinstance(name, str) else name
        if spec.num_agents > 1:
            raise ValueError(f"{spec.name} has {spec.num_agents} agents; memlane.native.make shows each as a row")
        # No limit here: gymnasium.make puts its own TimeLimit around an environment.
        self._one = NativeVectorEnv(
            spec, 1, num_threads=1, copy=True, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=0, **settings
        )
        check_render_mode(spec, render_mode)
        if spec.render_size is None:
            self.metadata = {**self.metadata, "render_modes": []}  # type: ignore[misc]
        self.render_mode = render_mode
        self.observation_space = self._one.single_observation_space
        self.action_space = self._one.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if options:
            raise ValueError(f"{self._one.spec_of_env.name} has no options, found {options}")
        if seed is None and not self._one._has_begun:
            seed = int(self.np_random.integers(2**63))
        observations, infos = self._one.reset(seed=seed)
        return _first(observations), _first_of_infos(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        batch = (
            {name: np.asarray(one)[None] for name, one in action.items()}
            if isinstance(self.action_space, Dict)
            else np.asarray(action)[None]
        )
        observations, rewards, terminated, truncated, infos = self._one.step(batch)
        ended = bool(terminated[0]), bool(truncated[0])
        return _first(observations), float(rewards[0]), *ended, _first_of_infos(infos)

    def render(self) -> Any:
        return self._one.render()

    def close(self) -> None:
        self._one.close()


def _first(batch: Any) -> Any:
    return {name: one[0] for name, one in batch.items()} if isinstance(batch, dict) else batch[0]


def _first_of_infos(infos: dict[str, Any]) -> dict[str, Any]:
    return {name: one[0] for name, one in infos.items() if not name.startswith("_")}
