"""Stable-Baselines3: memlane's vector environments as a ``VecEnv``. Needs stable-baselines3."""

from __future__ import annotations

import multiprocessing as mp
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from memlane.vector import env_calls
from memlane.vector.async_vector_env import AsyncVectorEnv
from memlane.vector.infos import PackedInfos, unpack
from memlane.vector.messages import pickle_for_worker


class SB3VecEnv(VecEnv):
    """A drop-in replacement for ``SubprocVecEnv``: ``SB3VecEnv(env_fns, num_workers=2)``.

    Actions, rewards and infos are those of ``SubprocVecEnv``: actions of Dict and Tuple spaces are a list with one for
    each environment, rewards are not cut to float32 (as ``DummyVecEnv`` does), and the values of infos have the types
    that the environments gave them. ``set_attr`` differs: it sets the attribute where ``get_attr`` finds it, not on the
    outermost wrapper. An environment that was restarted ends its episode as truncated; its info has ``restarted`` with
    the cause."""

    def __init__(
        self, env_fns: Sequence[Callable[[], Env[Any, Any]]], start_method: str | None = None, **kwargs: Any
    ) -> None:
        """``start_method`` is "forkserver" (default), "fork" or "spawn". ``kwargs`` are arguments of
        ``AsyncVectorEnv``, except ``autoreset_mode``: SB3 expects SAME_STEP."""
        if start_method is not None:
            if "context" in kwargs:
                raise TypeError(
                    f"start_method and context are the same argument, found {start_method!r} and "
                    f"{kwargs['context']!r}; pass one of them"
                )
            try:
                mp.get_context(start_method)
            except ValueError as error:
                methods = ", ".join(map(repr, mp.get_all_start_methods()))
                raise ValueError(f"{error}; start_method must be None or one of {methods}") from None
            kwargs["context"] = start_method
        self.envs = _SB3Envs(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs)
        self.render_mode = self.envs.render_mode
        self.waiting = False
        super().__init__(len(env_fns), self.envs.single_observation_space, self.envs.single_action_space)

    @property
    def closed(self) -> bool:
        return self.envs.closed

    def reset(self) -> Any:
        seeds = [None if seed is None else int(seed) for seed in self._seeds]
        observations: Any = None
        infos: Any
        for options, envs in self._by_options():
            # A masked reset leaves the other observations as they are, so the last batch has the new ones of all.
            observations, infos = self.envs.reset(seed=seeds, options=self._masked(options, envs))
            for env in envs:
                self.reset_infos[env] = infos[env] if infos else {}
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

    def step_async(self, actions: Any) -> None:
        if isinstance(self.action_space, Dict | Tuple) and not isinstance(actions, Mapping):
            self.envs.step_each_async(actions)
        else:
            self.envs.step_async(actions)
        self.waiting = True

    def step_wait(self) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], list[dict[str, Any]]]:
        infos: Any
        observations, rewards, terminated, truncated, infos = self.envs.step_wait()
        self.waiting = False
        dones = terminated | truncated
        env_infos: list[dict[str, Any]] = infos or [{} for _ in range(self.num_envs)]
        for env, done in enumerate(dones.tolist()):
            info = env_infos[env]
            if not done:
                info["TimeLimit.truncated"] = False
                continue
            final = dict(info.pop("final_info", {}))
            self.reset_infos[env] = {key: value for key, value in info.items() if key != "final_obs"}
            final["terminal_observation"] = info.get("final_obs")
            final["TimeLimit.truncated"] = bool(truncated[env] and not terminated[env])
            if "restarted" in info:
                final["restarted"] = info["restarted"]
            env_infos[env] = final
        return observations, rewards, dones, env_infos

    def close(self) -> None:
        self.waiting = False
        self.envs.close()

    def has_attr(self, attr_name: str) -> bool:
        return all(self._apply(partial(env_calls.has_attr, attr_name)))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return self._apply(partial(env_calls.get_attr, attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self._apply(partial(env_calls.set_attr, attr_name, value), indices)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return self._apply(partial(env_calls.call_method, method_name, args, kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return self._apply(partial(env_calls.is_wrapped, wrapper_class), indices)

    def _apply(self, function: Callable[[Any], Any], indices: Any = None) -> list[Any]:
        """Call ``function`` with each of these environments. Negative indices count from the end, as in a list."""
        env_ids = [env + self.num_envs if -self.num_envs <= env < 0 else env for env in self._get_indices(indices)]
        return list(self.envs.apply(function, env_ids))

    def get_images(self) -> Sequence[Any]:
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"get_images needs environments with render_mode='rgb_array', found {self.render_mode!r}; it returns "
                "None for each",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.envs.render() or ()


class _SB3Envs(AsyncVectorEnv):
    """Returns infos as SB3 has them: a list with one dict for each environment, or an empty dict if there are none."""

    def _merge_infos(self, packed: list[PackedInfos]) -> list[dict[str, Any]]:
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for columns in packed:
            for env, info in unpack(columns).items():
                infos[env].update(info)
        return infos
