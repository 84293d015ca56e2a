"""Algorithms, by the names that options and commands know them by."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlane.train.algorithms.base import Algorithm

ALGORITHMS = {"appo": "APPO", "sac": "SAC", "dqn": "DQN"}
"""Class of each algorithm; its module has the name of the algorithm."""


def algorithm_for(algo: str) -> type[Algorithm]:
    """Import the class of an algorithm, and torch with it."""
    from memlane.train.options import check_algorithm

    check_algorithm(algo)
    algorithm: type[Algorithm] = getattr(import_module(f"memlane.train.algorithms.{algo}"), ALGORITHMS[algo])
    return algorithm
