"""Native environments: written in C, stepped in place, returned to Python without a copy.

``make`` and ``load`` create vector environments. Further modules: ``memlane.native.build`` compiles C files,
``memlane.native.new`` writes a template, ``memlane.native.numba_env`` compiles environments written in Python, and
``memlane.native.lowlevel`` reads and checks the specs of libraries.
"""

from __future__ import annotations

import os
from typing import Any

from memlane.native.env import NativeEnv
from memlane.native.library import built_in as _built_in
from memlane.native.library import built_in_names
from memlane.native.library import open_library as _open_library
from memlane.native.spec import Spec, SpecError
from memlane.native.vector_env import NativeVectorEnv

__all__ = ["NativeEnv", "NativeVectorEnv", "Spec", "SpecError", "built_in_names", "load", "make"]


def make(name: str, num_envs: int = 1, **kwargs: Any) -> NativeVectorEnv:
    """Create ``num_envs`` built-in environments: ``make("CartPole-v1", num_envs=4096)``.

    ``kwargs``: arguments of ``NativeVectorEnv`` and settings of the environment. ``built_in_names()`` lists the names.
    """
    return NativeVectorEnv(_built_in(name), num_envs, **kwargs)


def load(path: str | os.PathLike[str], num_envs: int = 1, **kwargs: Any) -> NativeVectorEnv:
    """Create ``num_envs`` environments of a compiled library: ``load("my_env.so", num_envs=4096)``.

    ``memlane build my_env.c`` compiles one. ``kwargs``: arguments of ``NativeVectorEnv`` and settings of the
    environment.
    """
    return NativeVectorEnv(_open_library(path), num_envs, **kwargs)


def __dir__() -> list[str]:
    return sorted(__all__)
