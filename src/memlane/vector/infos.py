"""Infos: the dicts that environments return beside their observations, as one dict of arrays with masks.

A worker packs what its environments said into columns, so that one pickle carries a few arrays and not a hundred dicts;
the parent merges the columns of all workers. The result is Gymnasium's, with one exception: the dtype of a column is
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
class Column:
    """One key: which environments have it, and what they say."""

    envs: Envs
    kind: Kind
    values: Any
    """An array with a row for each, or nested columns, or a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own pickle of an array of 32 numbers takes five times as long as its bytes.
        if self.kind == "numbers" and self.values.dtype.isbuiltin == 1:
            return _unpickled, (self.envs, self.values.dtype.str, self.values.tobytes())
        return Column, (self.envs, self.kind, self.values)


def _unpickled(envs: Envs, dtype: str, values: bytes) -> Column:
    return Column(envs, "numbers", np.frombuffer(values, dtype))


Envs = list[int] | range
"""A range where they follow each other, as those of a worker mostly do: rows of such are set as a slice."""
Columns = dict[str, Column]


def pack(infos: Iterable[tuple[int, Mapping[str, Any]]]) -> Columns:
    """The infos of some environments, each with its number, as columns."""
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
            column = gathered.get(key)
            if column is None:
                column = gathered[key] = [], []
            column[0].append(env)
            column[1].append(value)
    return {key: _packed(key, in_order(envs), values) for key, (envs, values) in gathered.items()}


def pack_floats(infos: list[tuple[int, dict[str, Any]]]) -> tuple[Any, ...] | None:
    """The plain case in one piece, for ``of_floats``: every info has the same keys and only floats. Otherwise None."""
    packed = _native.pack_floats(infos)
    return None if packed is None or "final_obs" in packed[0] else packed


def of_floats(keys: tuple[str, ...], dtypes: str, first: int, floats: bytes) -> Columns:
    """What ``pack`` would have made of them."""
    numbers = np.frombuffer(floats).reshape(len(keys), -1)
    envs = range(first, first + numbers.shape[1])
    return {
        key: Column(envs, "numbers", values.astype(dtype, copy=False))
        for key, dtype, values in zip(keys, dtypes, numbers, strict=True)
    }


def in_order(envs: list[int]) -> Envs:
    """As a range, if they are one."""
    span = range(envs[0], envs[0] + len(envs))
    return span if envs == list(span) else envs


def merge(num_envs: int, packed: Sequence[Columns]) -> dict[str, Any]:
    """The columns of all workers as one dict: for each key an array over all environments, and a mask ``_key``."""
    infos: dict[str, Any] = {}
    keys = dict.fromkeys(key for columns in packed for key in columns)
    for key in keys:
        columns = [some[key] for some in packed if key in some]
        infos[key] = _merged(num_envs, columns)
        mask = infos[f"_{key}"] = np.zeros(num_envs, np.bool_)
        for column in columns:
            mask[_rows(column.envs)] = True
    return infos


def _rows(envs: Envs) -> slice | list[int]:
    return slice(envs.start, envs.stop) if isinstance(envs, range) else envs


def unpack(packed: Columns) -> dict[int, dict[str, Any]]:
    """The infos that were packed, by environment."""
    infos: dict[int, dict[str, Any]] = {}
    for key, column in packed.items():
        nested = unpack(column.values) if column.kind == "dicts" else {}
        values = [nested.get(env, {}) for env in column.envs] if column.kind == "dicts" else column.values
        for env, value in zip(column.envs, values, strict=True):
            infos.setdefault(env, {})[key] = value
    return infos


def _packed(key: str, envs: Envs, values: list[Any]) -> Column:
    types = set(map(type, values))
    if key == "final_obs":  # observations may be of any kind; Gymnasium hands them out one by one
        return Column(envs, "objects", values)
    if all(map(_is_number, types)):
        with contextlib.suppress(OverflowError):  # a whole number of more than 64 bits
            if (dtype := _common(types)) is not None:
                return Column(envs, "numbers", np.array(values, dtype))
        return Column(envs, "objects", values)
    if all(issubclass(kind, dict) for kind in types):
        return Column(envs, "dicts", pack(zip(envs, values, strict=True)))
    if types == {np.ndarray} and len({value.shape for value in values}) == 1 and not values[0].dtype.hasobject:
        return Column(envs, "arrays", np.stack(values))
    return Column(envs, "objects", values)


def _common(kinds: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype that holds them all; None if whole numbers would become floats, which lose digits."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in kinds}
    if len(dtypes) == 1:
        return dtypes.pop().newbyteorder("=")
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and all(dtype.kind in "iub" for dtype in dtypes) else common


def _is_number(kind: type) -> bool:
    return kind in (int, float, bool) or issubclass(kind, np.number)


def _merged(num_envs: int, columns: list[Column]) -> Any:
    kinds = {column.kind for column in columns}
    if kinds == {"dicts"}:
        return merge(num_envs, [column.values for column in columns])
    if kinds in ({"numbers"}, {"arrays"}) and len({column.values.shape[1:] for column in columns}) == 1:
        dtype = _common({column.values.dtype for column in columns})
        if dtype is not None:
            array = np.zeros((num_envs, *columns[0].values.shape[1:]), dtype)
            for column in columns:
                array[_rows(column.envs)] = column.values
            return array
    objects: NDArray[Any] = np.full(num_envs, None, object)
    for column in columns:
        for env, info in unpack({"it": column}).items():
            objects[env] = info["it"]
    return objects
