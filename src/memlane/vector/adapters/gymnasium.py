"""Gymnasium: lets ``gymnasium.make_vec(..., vectorization_mode="async")`` make memlane's vector environments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium

from memlane.vector.async_vector_env import AsyncVectorEnv


@contextmanager
def as_gymnasium_async() -> Iterator[None]:
    """Replace Gymnasium's ``AsyncVectorEnv`` by memlane's within a ``with`` block:

    >>> with as_gymnasium_async():
    ...     envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    >>> type(envs).__module__
    'memlane.vector.async_vector_env'
    >>> envs.close()
    """
    original = gymnasium.vector.AsyncVectorEnv
    gymnasium.vector.AsyncVectorEnv = AsyncVectorEnv  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        gymnasium.vector.AsyncVectorEnv = original  # type: ignore[misc]
