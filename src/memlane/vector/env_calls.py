"""What adapters call in the workers, where the environments are.

Apart from the adapters, because a worker imports the module of a function that it is sent: with that of SB3's adapter,
each would import torch.
"""

from __future__ import annotations

from typing import Any

from gymnasium import Env


def has_attr(name: str, env: Env[Any, Any]) -> bool:
    return env.has_wrapper_attr(name)


def get_attr(name: str, env: Env[Any, Any]) -> Any:
    return env.get_wrapper_attr(name)


def set_attr(name: str, value: Any, env: Env[Any, Any]) -> None:
    env.set_wrapper_attr(name, value)


def call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: Env[Any, Any]) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)


def is_wrapped(wrapper_class: type[Any], env: Any) -> bool:
    while env is not None:
        if isinstance(env, wrapper_class):
            return True
        env = getattr(env, "env", None)
    return False
