"""Algorithms by the names that commands know them by."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlane.train.algorithms.base import Algorithm

ALGORITHMS = {"appo": "APPO", "sac": "SAC", "dqn": "DQN"}
"""The module of each, and the class in it."""


def algorithm_for(name: str) -> type[Algorithm]:
    found: type[Algorithm] = getattr(import_module(f"memlane.train.algorithms.{name}"), ALGORITHMS[name])
    return found
