"""Padding: one space for values of spaces that differ in size, and masks of what belongs to each.

It does what SuperSuit's ``pad_observations_v0`` and ``pad_action_space_v0`` do. A padded Box has the largest extent of
each dimension: observations are filled up with zeros, and of an action the elements beyond the own shape are left out.
A padded Discrete has the largest number of values: an action beyond the own ones becomes the first. A Dict or Tuple is
padded part by part.

    >>> from gymnasium.spaces import Box, Discrete
    >>> padded_space({"speaker": Discrete(3), "listener": Discrete(5)})
    Discrete(5)
    >>> own_mask(Discrete(3), Discrete(5)).tolist()
    [True, True, True, False, False]
    >>> int(fit_action(Discrete(3), 4))
    0
    >>> small, large = Box(-1, 1, (2,)), Box(-1, 1, (3,))
    >>> pad_observation(small, large, small.high).tolist()
    [1.0, 1.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple
from numpy.typing import NDArray

from memlane.spaces.paths import escape_key, join_path


def padded_space(spaces: Mapping[Any, Space[Any]], path: str = "") -> Any:
    """The smallest space that has room for the values of all ``spaces``; their keys name their owners in errors. The
    bounds of a Box are the widest, and include 0 where an owner has no element."""
    values: list[Any] = list(spaces.values())
    first = values[0]
    if all(space == first for space in values):
        return first
    if all(_kind(space) == _kind(first) for space in values):
        match first:
            case Box():
                shape = tuple(np.max([box.shape for box in values], axis=0).tolist())
                low = np.min([_padded(box.low, shape) for box in values], axis=0)
                high = np.max([_padded(box.high, shape) for box in values], axis=0)
                return Box(low, high, shape, first.dtype.type)
            case Discrete():
                return max(values, key=lambda space: int(space.n))
            case Dict():
                return Dict({key: _padded_part(spaces, key, join_path(path, escape_key(key))) for key in first.spaces})
            case Tuple():
                return Tuple([_padded_part(spaces, key, join_path(path, str(key))) for key in range(len(first.spaces))])
    owner, other = next((owner, space) for owner, space in spaces.items() if space != first)
    raise ValueError(
        "expected spaces that can be padded: Box of the same dtype and number of dimensions, Discrete of the same "
        f"dtype and start, Dict of the same keys, Tuple of the same length; found {first} of {next(iter(spaces))!r} "
        f"and {other} of {owner!r}{f' at {path!r}' if path else ''}; make them alike with a wrapper"
    )


def _kind(space: Any) -> tuple[Any, ...]:
    """What two spaces must have in common to be padded to one."""
    match space:
        case Box():
            return Box, space.dtype, len(space.shape)
        case Discrete():
            return Discrete, space.dtype, space.start
        case Dict():
            return Dict, space.spaces.keys()
        case Tuple():
            return Tuple, len(space.spaces)
    return (space,)


def _padded_part(spaces: Mapping[Any, Any], key: Any, path: str) -> Any:
    return padded_space({owner: space.spaces[key] for owner, space in spaces.items()}, path)


def pad_observation(own: Space[Any], padded: Any, value: Any) -> Any:
    """A value of the space ``own`` as a value of ``padded``."""
    if isinstance(own, Box):
        array = np.asarray(value)
        if array.shape != own.shape:  # padding would hide it
            raise ValueError(f"expected an observation of shape {own.shape}, found {array.shape}; its space is {own}")
        return _padded(array, padded.shape)
    if isinstance(own, Dict):
        return {key: pad_observation(part, padded.spaces[key], value[key]) for key, part in own.spaces.items()}
    if isinstance(own, Tuple):
        return tuple(map(pad_observation, own.spaces, padded.spaces, value))
    return value


def fit_action(own: Space[Any], value: Any) -> Any:
    """The part of a value of a padded space that belongs to the space ``own``."""
    if isinstance(own, Box):
        return value[_region(own.shape)]
    if isinstance(own, Discrete):
        return value if value < own.start + own.n else own.start
    if isinstance(own, Dict):
        return {key: fit_action(part, value[key]) for key, part in own.spaces.items()}
    if isinstance(own, Tuple):
        return tuple(map(fit_action, own.spaces, value))
    return value


def own_mask(own: Any, padded: Space[Any]) -> Any:
    """True for what belongs to the space ``own``: the elements of an array, or the values of a Discrete. Nested as the
    space is."""
    if isinstance(padded, Discrete):
        return np.arange(padded.n) < own.n
    if isinstance(padded, Dict):
        return {key: own_mask(own.spaces[key], part) for key, part in padded.spaces.items()}
    if isinstance(padded, Tuple):
        return tuple(map(own_mask, own.spaces, padded.spaces))
    return _padded(np.ones(own.shape or (), np.bool_), padded.shape or ())


def _padded(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    padded = np.zeros(shape, array.dtype)
    padded[_region(array.shape)] = array
    return padded


def _region(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(extent) for extent in shape)
