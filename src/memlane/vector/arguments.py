"""Arguments: what callers say to a vector environment, checked."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from numpy.typing import NDArray


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """A seed for each environment."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + env for env in range(num_envs)]
    if isinstance(seed, str | bytes) or not hasattr(seed, "__len__"):
        raise TypeError(f"seed must be None, a whole number, or a list of these, found {seed!r}")
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return [None if one is None else _whole(one) for one in seed]


def _whole(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed must be None or a whole number, found {seed!r}") from None


def reset_mask_of(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    """``options["reset_mask"]``: which environments are to be reset."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask


def env_ids_of(env_ids: Any, num_envs: int, busy: Collection[int]) -> NDArray[Any]:
    """Which environments are sent an action; those in ``busy`` have one already."""
    ids = np.arange(num_envs) if env_ids is None else np.asarray(env_ids)
    if ids.shape == (0,):
        return ids.astype(np.int64, copy=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"env_ids must be whole numbers in one dimension, found {ids.dtype}, shape {ids.shape}")
    numbers = set(ids.tolist())
    if len(numbers) != len(ids):
        raise ValueError(f"env_ids must name each environment once, found {ids.tolist()}")
    if ids.min() < 0 or ids.max() >= num_envs:
        raise IndexError(f"env_ids must lie in 0 to {num_envs - 1}, found {ids.min()} to {ids.max()}")
    if twice := numbers.intersection(busy):
        raise AlreadyPendingCallError(
            f"environments {sorted(twice)} have an action already; `recv` what they make of it first", "recv"
        )
    return ids.astype(np.int64, copy=False)
