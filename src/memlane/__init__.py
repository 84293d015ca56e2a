"""memlane moves reinforcement-learning data between processes through shared memory.

Vector environments are ``AsyncVectorEnv`` (any Gymnasium environment, in worker processes) and ``make`` or ``load``
(environments written in C). ``Ring``, ``Replay`` and ``Weights`` carry rollouts, transitions and parameters between
processes; ``Segment`` is the shared memory that they are made of. ``memlane.train`` and the command ``memlane`` train
policies; ``memlane.runner`` is the base of asynchronous algorithms. ``shared_memory_rl_pipeline``,
``SharedCircularBuffer`` and ``zero_copy_env_simulation`` are exercises on the core.

Names are imported on first use, so that ``import memlane`` is quick and needs neither gymnasium nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memlane._lazy import import_lock as _import_lock
from memlane._registration import register_envs

if TYPE_CHECKING:
    from memlane import core, ipc, lanes, lessons, native, runner, spaces, testing, train, vector
    from memlane.core.segment import Segment
    from memlane.lanes.replay import Replay
    from memlane.lanes.ring import Ring
    from memlane.lanes.weights import Weights
    from memlane.lessons import SharedCircularBuffer, shared_memory_rl_pipeline, zero_copy_env_simulation
    from memlane.native import load, make
    from memlane.vector.async_vector_env import AsyncVectorEnv

    __version__: str

__all__ = [
    "AsyncVectorEnv",
    "Replay",
    "Ring",
    "Segment",
    "SharedCircularBuffer",
    "Weights",
    "__version__",
    "core",
    "ipc",
    "lanes",
    "lessons",
    "load",
    "make",
    "native",
    "runner",
    "shared_memory_rl_pipeline",
    "spaces",
    "testing",
    "train",
    "vector",
    "zero_copy_env_simulation",
]

_HOMES = {
    "AsyncVectorEnv": "vector.async_vector_env",
    "Replay": "lanes.replay",
    "Ring": "lanes.ring",
    "Segment": "core.segment",
    "SharedCircularBuffer": "lessons",
    "Weights": "lanes.weights",
    "load": "native",
    "make": "native",
    "shared_memory_rl_pipeline": "lessons",
    "zero_copy_env_simulation": "lessons",
}
"""The module that defines each name; the other names of ``__all__`` are public modules and subpackages."""


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("memlane")
    elif name in _HOMES:
        with _import_lock:
            value = getattr(importlib.import_module(f"memlane.{_HOMES[name]}"), name)
    elif name in __all__:
        with _import_lock:
            value = importlib.import_module(f"memlane.{name}")
    else:
        message = f"module 'memlane' has no attribute {name!r}"
        if not name.startswith("_"):  # import machinery, copy and inspect probe for those: nothing to suggest
            from memlane.core.suggestions import did_you_mean

            message += did_you_mean(name, __all__)
        raise AttributeError(message, name=name)  # with its name, Python adds no suggestion of its own
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return __all__


register_envs()
