"""Slots: a step of a vector environment, written into a slot of a rollout ring.

A slot's arrays have a row for each environment and then one for each step: ``rewards``, ``dones`` and ``truncated``,
and ``obs`` with what each step began with; what came of the last one is ``last_obs``. Nested observations are
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
    """What step ``index`` left; ``fields`` are those of the vector environment, ``observation.<path>`` among them."""
    slot["rewards"][:, index] = rewards
    slot["dones"][:, index] = terminated | truncated
    slot["truncated"][:, index] = truncated
    store_observations(slot, index + 1, fields)


def store_observations(slot: Arrays, index: int, fields: Arrays) -> None:
    """The observations that step ``index`` begins with; after the last step they are the last ones."""
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
