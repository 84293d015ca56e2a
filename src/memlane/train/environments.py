"""Environments: the vector environments that collectors step, by name and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from memlane.core.memory import memory_limits, require
from memlane.core.suggestions import did_you_mean

Backend = Literal["native", "gymnasium", "mujoco"]
MakeEnvs = Callable[[int], VectorEnv[Any, Any, Any]]
"""Makes the environments of one collector, given the index of the collector."""


def make_envs(
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int,
    backend: str = "gymnasium",
    *,
    env_workers: int = 0,
    settings: dict[str, Any] | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment.

    ``env`` is a Gymnasium id, the name of a native environment, the path of a native library, or a function that makes
    one environment. ``env_workers`` processes step the environments; with 0 the calling process does. ``settings`` are
    keyword arguments of the environment.
    """
    settings = settings or {}
    if check_backend(backend) == "native":
        from memlane import native

        if not isinstance(env, str):
            raise TypeError(
                "the native backend needs the name of a native environment or the path of a native library, found "
                f"{env!r}; use the gymnasium backend"
            )
        if env.endswith(".so"):
            return native.load(env, num_envs, copy=True, **settings)
        return native.make(env.removeprefix("memlane/"), num_envs, copy=True, **settings)
    if callable(env) and settings:
        raise TypeError(f"env_settings are for environments by name; a function sets its own, found {settings}")
    if num_envs > _MANY_ENVS:
        require(num_envs * _ENV_BYTES, f"num_envs={num_envs} of {env}", memory_limits())
    make_env = env if callable(env) else lambda: gymnasium.make(env, **settings)
    if env_workers:
        from memlane.vector import AsyncVectorEnv

        return AsyncVectorEnv([make_env] * num_envs, num_workers=env_workers, autoreset_mode=AutoresetMode.NEXT_STEP)
    try:
        return SyncVectorEnv([make_env] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
    except gymnasium.error.UnregisteredEnv as error:
        if not isinstance(env, str):
            raise
        from memlane import native

        hint = did_you_mean(env, [*native.built_in_names(), *gymnasium.registry])
        lists = "`memlane envs` lists memlane's environments, `gymnasium.pprint_registry()` Gymnasium's"
        raise LookupError(f"unknown environment {env!r}{hint or f': {error} {lists}'}") from error


_MANY_ENVS = 10_000
_ENV_BYTES = 4096
"""Memory that the smallest Gymnasium environment takes, with its spaces and its random generator."""


def check_backend(backend: str) -> str:
    """Return ``backend``; ``ValueError`` if there is no backend of that name."""
    if backend not in get_args(Backend):
        names, hint = ", ".join(get_args(Backend)), did_you_mean(backend, get_args(Backend), {"gym": "gymnasium"})
        raise ValueError(f"backend must be one of {names}, found {backend!r}{hint}")
    return backend


def backend_for(env: str | Callable[[], Any]) -> Backend:
    """The fastest backend that has the environment."""
    from memlane import native

    if isinstance(env, str) and (env.endswith(".so") or env.removeprefix("memlane/") in native.built_in_names()):
        return "native"
    return "gymnasium"
