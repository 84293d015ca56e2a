"""NativeEnv: one native environment as a ``gymnasium.Env``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode

from memlane.native.library import built_in
from memlane.native.spec import Spec
from memlane.native.vector_env import NativeVectorEnv, check_render_mode, closed_error


class NativeEnv(Env[Any, Any]):
    """One native environment, for code that expects a ``gymnasium.Env``.

    ``name`` is the name of a built-in environment, or the ``Spec`` of another one. ``settings`` are values for the
    settings that the spec declares. ``gymnasium.make("memlane/CartPole-v1")`` creates the same with a time limit; this
    class has none. To step many environments, ``memlane.native.make`` is far faster.

    One thread at a time may call its methods.

    >>> from memlane.native import NativeEnv
    >>> env = NativeEnv("CartPole-v1")
    >>> observation, info = env.reset(seed=1)
    >>> next_observation, reward, terminated, truncated, info = env.step(0)
    >>> reward, terminated, truncated
    (1.0, False, False)
    >>> next_observation is observation
    False
    >>> env.close()

    Observations are always copies: there is no ``copy`` argument, and an observation stays valid after the next step.

    Errors: an unknown name raises ``LookupError``, an unknown setting ``TypeError``, invalid actions ``ValueError`` or
    ``TypeError``. A crash in the C code ends this process; as an environment of ``memlane.vector.AsyncVectorEnv`` it
    ends only its worker.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 50}  # type: ignore[misc]

    def __init__(self, name: str | Spec, render_mode: str | None = None, **settings: Any) -> None:
        spec = built_in(name) if isinstance(name, str) else name
        if spec.num_agents > 1:
            raise ValueError(
                f"{spec.name} has {spec.num_agents} agents, NativeEnv supports one; use memlane.native.make, which has "
                "a row per agent"
            )
        spec.resolve_settings(settings, arguments=("render_mode",))  # so that the error names no argument of the host
        # No step limit here: gymnasium.make wraps the environment in its own TimeLimit.
        self._envs = NativeVectorEnv(
            spec, 1, num_threads=1, copy=True, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=0, **settings
        )
        check_render_mode(spec, render_mode)
        if spec.render_size is None:
            self.metadata = {**self.metadata, "render_modes": []}  # type: ignore[misc]
        self.render_mode = render_mode
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._require_open()
        super().reset(seed=seed)
        if options:
            raise ValueError(f"{self._envs.native_spec.name} has no reset options, found {options}")
        if seed is None and not self._envs._was_reset:
            seed = int(self.np_random.integers(2**63))
        observations, infos = self._envs.reset(seed=seed)
        return _first_row(observations), _first_infos(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._require_open()
        if self._envs._ended[0]:
            raise AssertionError("the episode has ended: call reset() before the next step")
        try:
            batch = (
                {name: np.asarray(value)[None] for name, value in action.items()}
                if isinstance(self.action_space, Dict)
                else np.asarray(action)[None]
            )
            observations, rewards, terminated, truncated, infos = self._envs.step(batch)
        except (AttributeError, TypeError, ValueError):
            self._envs._check_action(action)  # its error is about one action, that of `step` about a batch
            raise
        ended = bool(terminated[0]), bool(truncated[0])
        return _first_row(observations), float(rewards[0]), *ended, _first_infos(infos)

    def render(self) -> Any:
        self._require_open()
        return self._envs.render()

    def close(self) -> None:
        self._envs.close()

    def _require_open(self) -> None:
        if self._envs.closed:
            raise closed_error(self)


def _first_row(batch: Any) -> Any:
    return {name: rows[0] for name, rows in batch.items()} if isinstance(batch, dict) else batch[0]


def _first_infos(infos: dict[str, Any]) -> dict[str, Any]:
    return {name: rows[0] for name, rows in infos.items() if not name.startswith("_")}
