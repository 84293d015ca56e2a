"""Rollout slots: a step of a vector environment, written into a slot of a rollout ring.

A slot's arrays have the shape (environments, steps, ...): ``rewards``, ``dones`` and ``truncated``, and ``obs`` with
the observations before each step; ``last_obs`` has the observations after the last step. Nested observations are
``obs.<path>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def store_step(
    slot: Arrays, index: int, rewards: NDArray[Any], terminated: NDArray[Any], truncated: NDArray[Any], fields: Arrays
) -> None:
    """Store the results of step ``index``; ``fields`` of the vector environment include ``observation.<path>``."""
    slot["rewards"][:, index] = rewards
    slot["dones"][:, index] = terminated | truncated
    slot["truncated"][:, index] = truncated
    store_observations(slot, index + 1, fields)


def store_observations(slot: Arrays, index: int, fields: Arrays) -> None:
    """Store the observations before step ``index``, or as ``last_obs`` if the slot has no such step."""
    for name, rows in fields.items():
        part, _, path = name.partition(".")
        if part != "observation":
            continue
        suffix = "" if path == "value" else f".{path}"
        all_steps = slot[f"obs{suffix}"]
        if index < all_steps.shape[1]:
            all_steps[:, index] = rows
        else:
            slot[f"last_obs{suffix}"][...] = rows
