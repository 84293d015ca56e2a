"""Stable-Baselines3: memlane's vector environments as a ``VecEnv``. Needs stable-baselines3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from memlane.vector.async_vector_env import AsyncVectorEnv
from memlane.vector.messages import pickle_for_worker


class SB3VecEnv(VecEnv):
    """A drop-in replacement for ``SubprocVecEnv``: ``SB3VecEnv(env_fns, num_workers=2)``.

    An environment that was restarted ends its episode as truncated; its info has ``restarted`` with the cause."""

    def __init__(self, env_fns: Sequence[Callable[[], Env[Any, Any]]], **kwargs: Any) -> None:
        """``kwargs`` are arguments of ``AsyncVectorEnv``, except ``autoreset_mode``: SB3 expects SAME_STEP."""
        self.envs = AsyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs)
        self.render_mode = self.envs.render_mode
        self.waiting = False
        super().__init__(len(env_fns), self.envs.single_observation_space, self.envs.single_action_space)

    def reset(self) -> Any:
        seeds = [None if seed is None else int(seed) for seed in self._seeds]
        observations: Any = None
        for options, envs in self._by_options():
            # A masked reset leaves the other observations as they are, so the last batch has the new ones of all.
            observations, infos = self.envs.reset(seed=seeds, options=self._masked(options, envs))
            env_infos = self._split_infos(infos)
            for env in envs:
                self.reset_infos[env] = env_infos[env]
        self._reset_seeds()
        self._reset_options()
        return observations

    def _by_options(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The distinct options, each with the environments to reset with them."""
        if len(self._options) != self.num_envs:
            raise ValueError(f"expected options for {self.num_envs} environments, found {len(self._options)}")
        # Compared by their pickles: == of arrays in them has no single truth value.
        envs_of: dict[bytes, list[int]] = {}
        for env, options in enumerate(self._options):
            envs_of.setdefault(pickle_for_worker(options or {}), []).append(env)
        for envs in envs_of.values():
            yield self._options[envs[0]] or {}, envs

    def _masked(self, options: dict[str, Any], envs: list[int]) -> dict[str, Any] | None:
        if len(envs) == self.num_envs:
            return options or None
        mask = np.zeros(self.num_envs, np.bool_)
        mask[envs] = True
        return {**options, "reset_mask": mask}

    def step_async(self, actions: NDArray[Any]) -> None:
        self.envs.step_async(actions)

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        observations, rewards, terminated, truncated, infos = self.envs.step_wait()
        dones = terminated | truncated
        env_infos = self._split_infos(infos)
        for env in np.flatnonzero(dones):
            final = dict(env_infos[env].pop("final_info", {}))
            self.reset_infos[env] = {key: value for key, value in env_infos[env].items() if key != "final_obs"}
            final["terminal_observation"] = env_infos[env].get("final_obs")
            final["TimeLimit.truncated"] = bool(truncated[env] and not terminated[env])
            if "restarted" in env_infos[env]:
                final["restarted"] = env_infos[env]["restarted"]
            env_infos[env] = final
        for env in np.flatnonzero(~dones):
            env_infos[env]["TimeLimit.truncated"] = False
        return observations, rewards.astype(np.float32), dones, env_infos

    def _split_infos(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        """Split the infos of a batch into one dict for each environment, as SB3 expects."""
        env_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for key, values in infos.items():
            mask = infos.get(f"_{key}")
            if mask is None:
                continue
            nested = self._split_infos(values) if isinstance(values, dict) else values
            for env in np.flatnonzero(mask):
                value = nested[env]
                env_infos[env][key] = value.item() if isinstance(value, np.generic) else value
        return env_infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        values = self.envs.get_attr(attr_name)
        return [values[env] for env in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self.envs.apply(partial(_set_attr, attr_name, value), list(self._get_indices(indices)))

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        call = partial(_call_method, method_name, args, kwargs)
        return list(self.envs.apply(call, list(self._get_indices(indices))))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return list(self.envs.apply(partial(_is_wrapped, wrapper_class), list(self._get_indices(indices))))

    def get_images(self) -> Sequence[Any]:
        return self.envs.render() or ()


# These functions run in the workers, where the environments are.


def _set_attr(name: str, value: Any, env: Env[Any, Any]) -> None:
    env.set_wrapper_attr(name, value)


def _call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: Env[Any, Any]) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)


def _is_wrapped(wrapper_class: type[Any], env: Any) -> bool:
    while env is not None:
        if isinstance(env, wrapper_class):
            return True
        env = getattr(env, "env", None)
    return False
