"""Settings: the algorithm's, as a command line writes them: ``learning_rate=1e-3``, ``network.hidden=(128,128)``."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memlane.train.algorithms import algorithm_for
from memlane.train.algorithms.base import RUNNER_SETTINGS
from memlane.train.networks import NetworkConfig
from memlane.train.trainer import OptionError

_FLAGS = ("collectors", "max_lag", "deterministic", "seed", "num_envs", "backend", "target", "max_steps", "max_seconds")


_RUNNER = {name: kind for name, kind in RUNNER_SETTINGS.items() if name not in _FLAGS}


def settings_of(texts: Iterable[str], algo: str = "appo") -> dict[str, Any]:
    """By name, each checked against what the algorithm expects."""
    config = algorithm_for(algo).Config
    known = {**get_type_hints(config), **_RUNNER}
    del known["network"]
    inside = get_type_hints(NetworkConfig)
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"a setting is written KEY=VALUE, found {text!r}")
        if name in _FLAGS:
            raise OptionError(f"{name} has an option of its own: --{name.replace('_', '-')}")
        part, dot, of_network = name.partition(".")
        if dot and part == "network" and of_network in inside:
            found.setdefault("network", {})[of_network] = _value(name, value, inside[of_network])
        elif name in known:
            found[name] = _value(name, value, known[name])
        else:
            names = [*(one.name for one in fields(config) if one.name != "network"), *_RUNNER]
            names += [f"network.{one}" for one in inside]
            raise OptionError(f"there is no setting {name!r}; there are {', '.join(sorted(names))}")
    return found


def _value(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise OptionError(f"{name} must be one of {', '.join(get_args(kind))}, found {text!r}")
        return text
    value = _read(text)
    if get_origin(kind) is tuple:
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(type(one) is int for one in values):
            raise OptionError(f"{name} must be integers such as (64,64), found {text!r}")
        return values
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)  # 1e5
    if type(value) is not kind:
        raise OptionError(f"{name} must be {_WORDS[kind]}, found {text!r}")
    return value


_WORDS = {int: "an integer", float: "a number", bool: "true or false"}


def _read(text: str) -> Any:
    """As JSON or as Python has it; else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text
