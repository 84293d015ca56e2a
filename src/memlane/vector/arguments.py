"""Arguments: checks of what callers pass to a vector environment."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from numpy.typing import NDArray

from memlane.core.suggestions import did_you_mean, excerpt
from memlane.core.tensor_memory import require_memory


def require_choice(name: str, value: object, choices: Sequence[str], default: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``; ``default`` precedes them in the text: "None, "."""
    if value not in choices:
        raise ValueError(f"{name} must be {default}{_one_of(choices)}, found {value!r}{_hint(value, choices)}")


def _one_of(choices: Sequence[str]) -> str:
    *others, last = [repr(choice) for choice in choices]
    return f"{', '.join(others)} or {last}" if others else last


def _hint(value: object, choices: Sequence[str]) -> str:
    return did_you_mean(value, choices) if isinstance(value, str) else ""


def check_seconds(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is a number above 0, or None if it is ``optional``."""
    if (value is None and optional) or (isinstance(value, int | float | np.integer | np.floating) and value > 0):
        return
    raise ValueError(f"{name} must be {'None or ' if optional else ''}a number of seconds above 0, found {value!r}")


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """One seed for each environment; an integer ``seed`` gives environment ``i`` the seed ``seed + i``."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + env for env in range(num_envs)]
    if isinstance(seed, str | bytes) or not hasattr(seed, "__len__"):
        raise TypeError(f"seed must be None, an integer, or a list of these, found {seed!r}")
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return [None if env_seed is None else _as_integer(env_seed) for env_seed in seed]


def _as_integer(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"each seed must be None or an integer, found {seed!r}") from None


def reset_mask_of(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    """``options["reset_mask"]``, checked: True for the environments to reset."""
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


def require_batch(actions: Any, num_envs: int) -> None:
    """Raise ``TypeError`` unless ``actions`` is a batch: something with several items, which exist."""
    require_memory("actions", actions)
    try:
        iter(actions)
    except TypeError:
        raise TypeError(
            f"expected actions for {num_envs} environments, found {excerpt(actions)}; pass a batch with one for each"
        ) from None


def require_one_each(actions: int | None, num_envs: int) -> None:
    """Raise ``ValueError`` unless there are as many ``actions`` as environments."""
    if actions != num_envs:
        raise ValueError(f"expected actions for {num_envs} environments, found {actions}")


def env_ids_of(env_ids: Any, num_envs: int, busy: Collection[int]) -> NDArray[Any]:
    """``env_ids``, checked: the environments to send an action to, by default all. They must not be in ``busy``."""
    ids = np.arange(num_envs) if env_ids is None else np.asarray(env_ids)
    if ids.shape == (0,):
        return ids.astype(np.int64, copy=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"env_ids must be integers in one dimension, found dtype {ids.dtype}, shape {ids.shape}")
    numbers = set(ids.tolist())
    if len(numbers) != len(ids):
        raise ValueError(f"env_ids must name each environment once, found {ids.tolist()}")
    if unknown := [env for env in ids.tolist() if not 0 <= env < num_envs]:
        raise IndexError(f"env_ids must be from 0 to {num_envs - 1}, found {unknown[0]}")
    if twice := numbers.intersection(busy):
        raise AlreadyPendingCallError(
            f"environments {sorted(twice)} have a pending action; call `recv` for their results first", "recv"
        )
    return ids.astype(np.int64, copy=False)
