"""Native environments: written in C, stepped in place, shown to Python without a copy."""

from __future__ import annotations

import os
from typing import Any

from memlane.native.env import NativeEnv
from memlane.native.library import built_in, built_in_names, open_library
from memlane.native.spec import Spec, SpecError
from memlane.native.vector_env import NativeVectorEnv

__all__ = [
    "NativeEnv",
    "NativeVectorEnv",
    "Spec",
    "SpecError",
    "built_in",
    "built_in_names",
    "load",
    "make",
    "open_library",
]


def make(name: str, num_envs: int = 1, **kwargs: Any) -> NativeVectorEnv:
    """Environments that come with memlane: ``make("CartPole-v1", num_envs=4096)``. ``kwargs`` are those of
    ``NativeVectorEnv`` and the environment's settings."""
    return NativeVectorEnv(built_in(name), num_envs, **kwargs)


def load(path: str | os.PathLike[str], num_envs: int = 1, **kwargs: Any) -> NativeVectorEnv:
    """Environments of your own: ``load("my_env.so", num_envs=4096)``, which ``memlane build my_env.c`` has made."""
    return NativeVectorEnv(open_library(path), num_envs, **kwargs)
