"""Infos: the dicts that environments return beside their observations, as one dict of arrays with masks.

A worker packs the infos of its environments into columns, so that one pickle carries a few arrays instead of a
hundred dicts; the parent merges the columns of all workers. A column keeps the types of its values, so that the result
does not depend on how the environments are distributed. It is Gymnasium's, with one exception: the dtype of an array
holds all its values, where Gymnasium takes the dtype of the first value and turns 1.75 into 1; and where no dtype does,
which is an error in Gymnasium, the array has the values as objects.
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
    python: bool = False
    """Whether the numbers are Python's, and not numpy's."""

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own pickle of an array of 32 numbers takes five times as long as its bytes.
        if self.kind == "numbers" and self.values.dtype.isbuiltin == 1:
            return _from_bytes, (self.envs, self.values.dtype.char, self.values.tobytes(), self.python)
        return InfoColumn, (self.envs, self.kind, self.values)


def _from_bytes(envs: Envs, dtype: str, values: bytes, python: bool) -> InfoColumn:
    return InfoColumn(envs, "numbers", np.frombuffer(values, dtype), python)


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


def unpack_floats(keys: tuple[str, ...], types: str, first_env: int, floats: bytes) -> PackedInfos:
    """The columns that ``pack`` makes of the same infos."""
    numbers = np.frombuffer(floats).reshape(len(keys), -1)
    envs = range(first_env, first_env + numbers.shape[1])
    return {
        key: InfoColumn(envs, "numbers", values.astype("f4") if kind == "f" else values, kind == "p")
        for key, kind, values in zip(keys, types, numbers, strict=True)
    }


def as_range(envs: list[int]) -> Envs:
    """The same indices as a range if they are consecutive, otherwise as they are."""
    span = range(envs[0], envs[0] + len(envs))
    return span if envs == list(span) else envs


def merge(num_envs: int, packed: Sequence[PackedInfos]) -> dict[str, Any]:
    """Merge the columns of all workers: for each key an array over all environments, and a mask ``_key``."""
    infos: dict[str, Any] = {}
    if len(packed) == 1 and all(_is_whole(column, num_envs) for column in packed[0].values()):
        for key, column in packed[0].items():
            infos[key] = column.values.copy()
            infos[f"_{key}"] = np.ones(num_envs, np.bool_)
        return infos
    keys = dict.fromkeys(key for columns in packed for key in columns)
    for key in keys:
        columns = [part[key] for part in packed if key in part]
        infos[key] = _merge_columns(key, num_envs, columns)
        mask = infos[f"_{key}"] = np.zeros(num_envs, np.bool_)
        for column in columns:
            mask[_row_index(column.envs)] = True
    return infos


def _is_whole(column: InfoColumn, num_envs: int) -> bool:
    """Whether a column is the array that ``merge`` makes of it, because all environments have the key."""
    return column.kind == "numbers" and len(column.envs) == num_envs and column.values.dtype.isnative


def _row_index(envs: Envs) -> slice | list[int]:
    return slice(envs.start, envs.stop) if isinstance(envs, range) else envs


def unpack(packed: PackedInfos) -> dict[int, dict[str, Any]]:
    """The infos that were packed, by environment."""
    infos: dict[int, dict[str, Any]] = {}
    for key, column in packed.items():
        for env, value in zip(column.envs, _single_values(column), strict=True):
            infos.setdefault(env, {})[key] = value
    return infos


def _single_values(column: InfoColumn) -> Any:
    """The values that were packed, one for each environment."""
    if column.kind == "dicts":
        nested = unpack(column.values)
        return [nested.get(env, {}) for env in column.envs]
    return column.values.tolist() if column.python else column.values


def _pack_column(key: str, envs: Envs, values: list[Any]) -> InfoColumn:
    kinds = set(map(type, values))
    if key == "final_obs":  # observations may be of any type; Gymnasium returns them as objects
        return InfoColumn(envs, "objects", values)
    if len(kinds) == 1:
        (kind,) = kinds
        if _is_number(kind):
            with contextlib.suppress(OverflowError):  # an integer of more than 64 bits
                return InfoColumn(envs, "numbers", np.array(values, kind), kind in (int, float, bool))
        if kind is np.ndarray and len({(value.shape, value.dtype) for value in values}) == 1:
            array = np.stack(values)
            return InfoColumn(envs, "objects", values) if array.dtype.hasobject else InfoColumn(envs, "arrays", array)
    if all(issubclass(kind, dict) for kind in kinds):
        return InfoColumn(envs, "dicts", pack(zip(envs, values, strict=True)))
    return InfoColumn(envs, "objects", values)


def _common_dtype(kinds: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype that holds them all. None if there is none, or if integers would become floats, which lose digits."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in kinds}
    if len(dtypes) == 1:
        return dtypes.pop().newbyteorder("=")
    if any(dtype.kind not in "biufc" for dtype in dtypes):
        return None
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and all(dtype.kind in "iub" for dtype in dtypes) else common


def _is_number(kind: type) -> bool:
    return kind in (int, float, bool) or issubclass(kind, np.number)


def _merge_columns(key: str, num_envs: int, columns: list[InfoColumn]) -> Any:
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
    values = {env: value for column in columns for env, value in zip(column.envs, _single_values(column), strict=True)}
    mixed = _merge_mixed(num_envs, dict(sorted(values.items()))) if key != "final_obs" else None
    if mixed is not None:
        return mixed
    objects: NDArray[Any] = np.full(num_envs, None, object)
    for env, value in values.items():
        objects[env] = value
    return objects


def _merge_mixed(num_envs: int, values: dict[int, Any]) -> Any:
    """Merge values of several types, by environment in ascending order. None if they have to be objects."""
    kinds = set(map(type, values.values()))
    if all(issubclass(kind, dict) for kind in kinds):
        return merge(num_envs, [pack(values.items())])
    if type(None) in kinds:
        # As in Gymnasium, None is NaN if the first environment has made it an array of floats.
        first = next(iter(values.values()))
        floats = first.dtype.kind in "fc" if isinstance(first, np.ndarray | np.number) else type(first) is float
        if not floats:
            return None
        kinds.remove(type(None))
    shapes, dtypes = {()}, kinds
    if kinds == {np.ndarray}:
        arrays = [value for value in values.values() if value is not None]
        shapes, dtypes = {array.shape for array in arrays}, {array.dtype for array in arrays}
    elif not all(map(_is_number, kinds)):
        return None
    if len(shapes) != 1 or (dtype := _common_dtype(dtypes)) is None:
        return None
    array = np.zeros((num_envs, *shapes.pop()), dtype)
    for env, value in values.items():
        try:
            array[env] = value
        except OverflowError:  # an integer of more than 64 bits
            return None
    return array
