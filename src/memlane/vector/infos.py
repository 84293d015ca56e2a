"""Infos: the dicts that environments return beside their observations, as one dict of arrays with masks.

A worker packs the infos of its environments into columns, so that one pickle carries a few arrays instead of a
hundred dicts; the parent merges the columns of all workers. The result is Gymnasium's, with one exception: the dtype of
a column holds all its values, where Gymnasium takes the dtype of the first value and turns 1.75 into 1.
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
class InfoColumn:
    """The values of one key."""

    envs: Envs
    """The environments that have the key."""
    kind: Kind
    values: Any
    """An array with a row for each of ``envs``, nested columns, or a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own pickle of an array of 32 numbers takes five times as long as its bytes.
        if self.kind == "numbers" and self.values.dtype.isbuiltin == 1:
            return _from_bytes, (self.envs, self.values.dtype.str, self.values.tobytes())
        return InfoColumn, (self.envs, self.kind, self.values)


def _from_bytes(envs: Envs, dtype: str, values: bytes) -> InfoColumn:
    return InfoColumn(envs, "numbers", np.frombuffer(values, dtype))


Envs = list[int] | range
"""Indices of environments; a range where they are consecutive, because rows of a range are set as a slice."""
PackedInfos = dict[str, InfoColumn]
"""Columns by key."""


def pack(infos: Iterable[tuple[int, Mapping[str, Any]]]) -> PackedInfos:
    """Pack infos, each with the index of its environment, into columns."""
    infos = list(infos)
    if not infos:
        return {}
    first = infos[0][1]
    if all(info.keys() == first.keys() for _, info in infos):
        envs = as_range([env for env, _ in infos])
        return {key: _pack_column(key, envs, [info[key] for _, info in infos]) for key in first}
    gathered: dict[str, tuple[list[int], list[Any]]] = {}
    for env, info in infos:
        for key, value in info.items():
            column = gathered.get(key)
            if column is None:
                column = gathered[key] = [], []
            column[0].append(env)
            column[1].append(value)
    return {key: _pack_column(key, as_range(envs), values) for key, (envs, values) in gathered.items()}


def pack_floats(infos: list[tuple[int, dict[str, Any]]]) -> tuple[Any, ...] | None:
    """Pack infos that all have the same keys and only floats into one block, for ``unpack_floats``; otherwise None."""
    packed = _native.pack_floats(infos)
    return None if packed is None or "final_obs" in packed[0] else packed


def unpack_floats(keys: tuple[str, ...], dtypes: str, first_env: int, floats: bytes) -> PackedInfos:
    """The columns that ``pack`` makes of the same infos."""
    numbers = np.frombuffer(floats).reshape(len(keys), -1)
    envs = range(first_env, first_env + numbers.shape[1])
    return {
        key: InfoColumn(envs, "numbers", values.astype(dtype, copy=False))
        for key, dtype, values in zip(keys, dtypes, numbers, strict=True)
    }


def as_range(envs: list[int]) -> Envs:
    """The same indices as a range if they are consecutive, otherwise as they are."""
    span = range(envs[0], envs[0] + len(envs))
    return span if envs == list(span) else envs


def merge(num_envs: int, packed: Sequence[PackedInfos]) -> dict[str, Any]:
    """Merge the columns of all workers: for each key an array over all environments, and a mask ``_key``."""
    infos: dict[str, Any] = {}
    keys = dict.fromkeys(key for columns in packed for key in columns)
    for key in keys:
        columns = [part[key] for part in packed if key in part]
        infos[key] = _merge_columns(num_envs, columns)
        mask = infos[f"_{key}"] = np.zeros(num_envs, np.bool_)
        for column in columns:
            mask[_row_index(column.envs)] = True
    return infos


def _row_index(envs: Envs) -> slice | list[int]:
    return slice(envs.start, envs.stop) if isinstance(envs, range) else envs


def unpack(packed: PackedInfos) -> dict[int, dict[str, Any]]:
    """The infos that were packed, by environment."""
    infos: dict[int, dict[str, Any]] = {}
    for key, column in packed.items():
        nested = unpack(column.values) if column.kind == "dicts" else {}
        values = [nested.get(env, {}) for env in column.envs] if column.kind == "dicts" else column.values
        for env, value in zip(column.envs, values, strict=True):
            infos.setdefault(env, {})[key] = value
    return infos


def _pack_column(key: str, envs: Envs, values: list[Any]) -> InfoColumn:
    types = set(map(type, values))
    if key == "final_obs":  # observations may be of any type; Gymnasium returns them as objects
        return InfoColumn(envs, "objects", values)
    if all(map(_is_number, types)):
        with contextlib.suppress(OverflowError):  # an integer of more than 64 bits
            if (dtype := _common_dtype(types)) is not None:
                return InfoColumn(envs, "numbers", np.array(values, dtype))
        return InfoColumn(envs, "objects", values)
    if all(issubclass(kind, dict) for kind in types):
        return InfoColumn(envs, "dicts", pack(zip(envs, values, strict=True)))
    if types == {np.ndarray} and len({value.shape for value in values}) == 1 and not values[0].dtype.hasobject:
        return InfoColumn(envs, "arrays", np.stack(values))
    return InfoColumn(envs, "objects", values)


def _common_dtype(kinds: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype that holds them all; None if integers would become floats, which lose digits."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in kinds}
    if len(dtypes) == 1:
        return dtypes.pop().newbyteorder("=")
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and all(dtype.kind in "iub" for dtype in dtypes) else common


def _is_number(kind: type) -> bool:
    return kind in (int, float, bool) or issubclass(kind, np.number)


def _merge_columns(num_envs: int, columns: list[InfoColumn]) -> Any:
    kinds = {column.kind for column in columns}
    if kinds == {"dicts"}:
        return merge(num_envs, [column.values for column in columns])
    if kinds in ({"numbers"}, {"arrays"}) and len({column.values.shape[1:] for column in columns}) == 1:
        dtype = _common_dtype({column.values.dtype for column in columns})
        if dtype is not None:
            array = np.zeros((num_envs, *columns[0].values.shape[1:]), dtype)
            for column in columns:
                array[_row_index(column.envs)] = column.values
            return array
    objects: NDArray[Any] = np.full(num_envs, None, object)
    for column in columns:
        for env, info in unpack({"value": column}).items():
            objects[env] = info["value"]
    return objects
