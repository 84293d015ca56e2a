"""Environments: the vector environments that collectors step, by name and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

Backend = Literal["native", "gymnasium", "mujoco"]
Make = Callable[[int], VectorEnv[Any, Any, Any]]
"""Makes the environments of one collector: it is given the collector's number."""


def make_envs(
    name: str | Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int,
    backend: str = "gymnasium",
    *,
    env_workers: int = 0,
    settings: dict[str, Any] | None = None,
) -> VectorEnv[Any, Any, Any]:
    """``name``: an id of Gymnasium, one of memlane's native environments, a path to a native library, or a function
    that makes one environment. ``env_workers``: so many processes step the environments; 0: this one does."""
    settings = settings or {}
    if backend == "native":
        from memlane import native

        if not isinstance(name, str):
            raise TypeError("native environments are made by name or from a library, not by a function")
        if name.endswith(".so"):
            return native.load(name, num_envs, copy=True, **settings)
        return native.make(name.removeprefix("memlane/"), num_envs, copy=True, **settings)
    if backend not in ("gymnasium", "mujoco"):
        raise ValueError(f"sim_backend must be 'native', 'gymnasium' or 'mujoco', found {backend!r}")
    if callable(name) and settings:
        raise TypeError(f"settings are for environments by name; a function makes its own, found {settings}")
    make_one = name if callable(name) else lambda: gymnasium.make(name, **settings)
    if env_workers:
        from memlane.vector import AsyncVectorEnv

        return AsyncVectorEnv([make_one] * num_envs, num_workers=env_workers, autoreset_mode=AutoresetMode.NEXT_STEP)
    return SyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def backend_for(name: str | Callable[[], Any]) -> Backend:
    """The fastest that has it."""
    from memlane import native

    if isinstance(name, str) and (name.endswith(".so") or name.removeprefix("memlane/") in native.built_in_names()):
        return "native"
    return "gymnasium"
