"""Infos: the dicts that environments return beside their observations, as one dict of arrays with masks.

A worker packs what its environments said into entries, so that one pickle carries a few arrays and not a hundred dicts;
the parent merges the entries of all workers. The result is Gymnasium's, with one exception: the dtype of an entry is
the one that holds all its values, where Gymnasium takes that of the first and turns 1.75 into 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memlane import _native

Kind = Literal["numbers", "arrays", "dicts", "objects"]


@dataclass(slots=True)
class Entry:
    """One key: which environments have it, and what they say."""

    envs: Envs
    kind: Kind
    values: Any
    """An array with a row for each, or nested entries, or a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own pickle of an array of 32 numbers takes five times as long as its bytes.
        if self.kind == "numbers" and self.values.dtype.isbuiltin == 1:
            return _unpickled, (self.envs, self.values.dtype.str, self.values.tobytes())
        return Entry, (self.envs, self.kind, self.values)


def _unpickled(envs: Envs, dtype: str, values: bytes) -> Entry:
    return Entry(envs, "numbers", np.frombuffer(values, dtype))


Envs = list[int] | range
"""A range where they follow each other, as those of a worker mostly do: rows of such are set as a slice."""
Entries = dict[str, Entry]


def pack(infos: Iterable[tuple[int, Mapping[str, Any]]]) -> Entries:
    """The infos of some environments, each with its number, as entries."""
    infos = list(infos)
    if not infos:
        return {}
    first = infos[0][1]
    if all(info.keys() == first.keys() for _, info in infos):
        envs = in_order([env for env, _ in infos])
        return {key: _packed(key, envs, [info[key] for _, info in infos]) for key in first}
    gathered: dict[str, tuple[list[int], list[Any]]] = {}
    for env, info in infos:
        for key, value in info.items():
            entry = gathered.get(key)
            if entry is None:
                entry = gathered[key] = [], []
            entry[0].append(env)
            entry[1].append(value)
    return {key: _packed(key, in_order(envs), values) for key, (envs, values) in gathered.items()}


def pack_floats(infos: list[tuple[int, dict[str, Any]]]) -> tuple[Any, ...] | None:
    """The plain case in one piece, for ``of_floats``: every info has the same keys and only floats. Otherwise None."""
    packed = _native.pack_floats(infos)
    return None if packed is None or "final_obs" in packed[0] else packed


def of_floats(keys: tuple[str, ...], dtypes: str, first: int, floats: bytes) -> Entries:
    """What ``pack`` would have made of them."""
    numbers = np.frombuffer(floats).reshape(len(keys), -1)
    envs = range(first, first + numbers.shape[1])
    return {
        key: Entry(envs, "numbers", values.astype(dtype, copy=False))
        for key, dtype, values in zip(keys, dtypes, numbers, strict=True)
    }


def in_order(envs: list[int]) -> Envs:
    """As a range, if they are one."""
    span = range(envs[0], envs[0] + len(envs))
    return span if envs == list(span) else envs


def merge(num_envs: int, packed: Sequence[Entries]) -> dict[str, Any]:
    """The entries of all workers as one dict: for each key an array over all environments, and a mask ``_key``."""
    infos: dict[str, Any] = {}
    keys = dict.fromkeys(key for entries in packed for key in entries)
    for key in keys:
        entries = [some[key] for some in packed if key in some]
        infos[key] = _merged(num_envs, entries)
        mask = infos[f"_{key}"] = np.zeros(num_envs, np.bool_)
        for entry in entries:
            mask[_rows(entry.envs)] = True
    return infos


def _rows(envs: Envs) -> slice | list[int]:
    return slice(envs.start, envs.stop) if isinstance(envs, range) else envs


def unpack(packed: Entries) -> dict[int, dict[str, Any]]:
    """The infos that were packed, by environment."""
    infos: dict[int, dict[str, Any]] = {}
    for key, entry in packed.items():
        nested = unpack(entry.values) if entry.kind == "dicts" else {}
        values = [nested.get(env, {}) for env in entry.envs] if entry.kind == "dicts" else entry.values
        for env, value in zip(entry.envs, values, strict=True):
            infos.setdefault(env, {})[key] = value
    return infos


def _packed(key: str, envs: Envs, values: list[Any]) -> Entry:
    types = set(map(type, values))
    if key == "final_obs":  # observations may be of any kind; Gymnasium hands them out one by one
        return Entry(envs, "objects", values)
    if all(map(_is_number, types)):
        with contextlib.suppress(OverflowError):  # a whole number of more than 64 bits
            if (dtype := _common(types)) is not None:
                return Entry(envs, "numbers", np.array(values, dtype))
        return Entry(envs, "objects", values)
    if all(issubclass(kind, dict) for kind in types):
        return Entry(envs, "dicts", pack(zip(envs, values, strict=True)))
    if types == {np.ndarray} and len({value.shape for value in values}) == 1 and not values[0].dtype.hasobject:
        return Entry(envs, "arrays", np.stack(values))
    return Entry(envs, "objects", values)


def _common(kinds: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype that holds them all; None if whole numbers would become floats, which lose digits."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in kinds}
    if len(dtypes) == 1:
        return dtypes.pop().newbyteorder("=")
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and all(dtype.kind in "iub" for dtype in dtypes) else common


def _is_number(kind: type) -> bool:
    return kind in (int, float, bool) or issubclass(kind, np.number)


def _merged(num_envs: int, entries: list[Entry]) -> Any:
    kinds = {entry.kind for entry in entries}
    if kinds == {"dicts"}:
        return merge(num_envs, [entry.values for entry in entries])
    if kinds in ({"numbers"}, {"arrays"}) and len({entry.values.shape[1:] for entry in entries}) == 1:
        dtype = _common({entry.values.dtype for entry in entries})
        if dtype is not None:
            array = np.zeros((num_envs, *entries[0].values.shape[1:]), dtype)
            for entry in entries:
                array[_rows(entry.envs)] = entry.values
            return array
    objects: NDArray[Any] = np.full(num_envs, None, object)
    for entry in entries:
        for env, info in unpack({"it": entry}).items():
            objects[env] = info["it"]
    return objects
