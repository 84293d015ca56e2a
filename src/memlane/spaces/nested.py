"""Columns of Dict, Tuple and OneOf spaces: one column for each subspace."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, OneOf, Space, Tuple
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.core.suggestions import did_you_mean
from memlane.spaces.capacity import Capacities, split_capacity
from memlane.spaces.column import CheckedBatch, Column, PerRowColumn, RowIndices, column_of, fields_of, find_array
from memlane.spaces.paths import ROOT_NAME, escape_key, join_path

# A space without subspaces still has rows: one byte for each, from which a column knows their number.
_EMPTY = "~empty"
_CHOICE = "choice"


class CompositeColumn(Column):
    """Dict and Tuple. Subclasses split a value into the values of the subspaces, and join them."""

    parts: tuple[Column, ...]
    """The columns of the subspaces, in order."""

    def __init__(self, space: Space[Any], parts: Collection[Column], n: int, path: str) -> None:
        super().__init__(space, n, path)
        self.parts = tuple(parts)

    @abstractmethod
    def split_value(self, value: Any) -> Collection[Any]:
        """Check ``value`` and return the values of the subspaces, in order. Accepts a batch as well."""

    @abstractmethod
    def join_values(self, values: Collection[Any]) -> Any:
        """The value, or batch, with these values of the subspaces."""

    def convert(self, value: Any) -> list[Any]:
        return [part.convert(item) for part, item in zip(self.parts, self.split_value(value), strict=True)]

    def store(self, index: int, content: Any) -> None:
        for part, item in zip(self.parts, content, strict=True):
            part.store(index, item)

    def load(self, index: int, copy: bool) -> Any:
        return self.join_values([part.load(index, copy) for part in self.parts])

    def convert_batch(self, values: Any) -> CheckedBatch:
        batches = [part.convert_batch(item) for part, item in zip(self.parts, self.split_value(values), strict=True)]
        sizes = {part.path: batch.size for part, batch in zip(self.parts, batches, strict=True)}
        known = {size for size in sizes.values() if size is not None}
        if len(known) > 1:
            raise ValueError(f"at {self.path!r}: expected the same number of values in every subspace, found {sizes}")
        return CheckedBatch(known.pop() if known else None, [batch.content for batch in batches])

    def store_batch(self, begin: int, content: Any) -> None:
        for part, item in zip(self.parts, content, strict=True):
            part.store_batch(begin, item)

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        return self.join_values([part.load_batch(begin, end, copy) for part in self.parts])

    def store_rows(self, rows: RowIndices, content: Any) -> None:
        for part, item in zip(self.parts, content, strict=True):
            part.store_rows(rows, item)

    def load_rows(self, rows: RowIndices) -> Any:
        return self.join_values([part.load_rows(rows) for part in self.parts])


class DictColumn(CompositeColumn):
    def __init__(self, space: Dict, parts: Collection[Column], n: int, path: str) -> None:
        super().__init__(space, parts, n, path)
        self._keys = space.spaces.keys()

    def split_value(self, value: Any) -> Collection[Any]:
        if type(value) is not dict or value.keys() != self._keys:
            check_keys(value, self._keys, self.path)
        return [value[key] for key in self._keys]

    def join_values(self, values: Collection[Any]) -> dict[Any, Any]:
        return dict(zip(self._keys, values, strict=True))


class TupleColumn(CompositeColumn):
    def split_value(self, value: Any) -> Collection[Any]:
        check_length(value, len(self.parts), self.path)
        return value  # type: ignore[no-any-return]

    def join_values(self, values: Collection[Any]) -> tuple[Any, ...]:
        return tuple(values)


class OneOfColumn(PerRowColumn):
    """OneOf: each row has space for a value of every alternative, and the number of the one that it holds."""

    def __init__(self, space: OneOf[Any], choices: NDArray[Any], parts: Collection[Column], path: str) -> None:
        super().__init__(space, len(choices), path)
        self._choices = choices
        self._parts = tuple(parts)

    def convert(self, value: Any) -> tuple[int, Any]:
        choice, item = check_choice(value, len(self._parts), self.path)
        return choice, self._parts[choice].convert(item)

    def store(self, index: int, content: Any) -> None:
        choice, item = content
        self._parts[choice].store(index, item)
        self._choices[index] = choice

    def load(self, index: int, copy: bool) -> tuple[np.int64, Any]:
        choice = self._choices[index]
        return choice, self._parts[choice].load(index, copy)


def check_keys(value: Any, keys: Collection[Any], path: str) -> None:
    """Raise unless ``value`` is a mapping with exactly these keys."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise TypeError(f"at {path!r}: expected a dict with the keys {list(keys)}, found {type(value).__name__}")
    if value.keys() != keys:
        missing = [key for key in keys if key not in value]
        unknown = [key for key in value if key not in keys]
        hint = did_you_mean(str(unknown[0]), map(str, missing)) if unknown and missing else ""
        raise KeyError(f"at {path!r}: expected the keys {list(keys)}; {missing=}, {unknown=}{hint}")


def check_length(value: Any, length: int, path: str) -> None:
    """Raise unless ``value`` is a tuple, list or array of this length."""
    if not isinstance(value, (tuple, list, np.ndarray)):
        raise TypeError(f"at {path!r}: expected a tuple of {length} values, found {type(value).__name__}")
    if len(value) != length:
        raise ValueError(f"at {path!r}: expected a tuple of {length} values, found {len(value)}")


def check_choice(value: Any, alternatives: int, path: str) -> tuple[int, Any]:
    """Check that ``value`` is a pair of the number of an alternative and a value of it; return the pair."""
    check_length(value, 2, path)
    try:
        choice = operator.index(value[0])
    except TypeError:
        raise TypeError(
            f"at {path!r}: expected (choice, value) with an integer choice, found {type(value[0]).__name__}"
        ) from None
    if not 0 <= choice < alternatives:
        raise ValueError(f"at {path!r}: expected a choice from 0 to {alternatives - 1}, found {choice}")
    return choice, value[1]


def subspaces_of(space: Dict | Tuple[Any] | OneOf[Any]) -> dict[str, Space[Any]]:
    """The subspaces of a nested space by their name in a path."""
    if isinstance(space, Dict):
        return {escape_key(key): subspace for key, subspace in space.spaces.items()}
    return {str(index): subspace for index, subspace in enumerate(space.spaces)}


@fields_of.register(Dict)
@fields_of.register(Tuple)
@fields_of.register(OneOf)
def _nested_fields(
    space: Dict | Tuple[Any] | OneOf[Any], n: int, capacity: Capacities = None, prefix: str = ""
) -> dict[str, FieldSpec]:
    subspaces = subspaces_of(space)
    fields: dict[str, FieldSpec] = {}
    if isinstance(space, OneOf):
        fields[join_path(prefix, _CHOICE)] = (np.dtype(np.int64), (n,))
    elif not subspaces:
        fields[join_path(prefix, _EMPTY)] = (np.dtype(np.uint8), (n,))
    capacities = split_capacity(capacity, subspaces, prefix or ROOT_NAME)
    for (name, subspace), declared in zip(subspaces.items(), capacities, strict=True):
        fields |= fields_of(subspace, n, declared, join_path(prefix, name))
    return fields


@column_of.register(Dict)
@column_of.register(Tuple)
def _parts_column(space: Dict | Tuple[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    parts = _columns(space, arrays, prefix)
    n = parts[0].n if parts else len(find_array(arrays, join_path(prefix, _EMPTY), (np.uint8, (0,))))
    return DictColumn(space, parts, n, prefix) if isinstance(space, Dict) else TupleColumn(space, parts, n, prefix)


@column_of.register(OneOf)
def _one_of_column(space: OneOf[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    choices = find_array(arrays, join_path(prefix, _CHOICE), (np.int64, (0,)))
    return OneOfColumn(space, choices, _columns(space, arrays, prefix), prefix)


def _columns(space: Dict | Tuple[Any] | OneOf[Any], arrays: Mapping[str, NDArray[Any]], prefix: str) -> list[Column]:
    return [column_of(subspace, arrays, join_path(prefix, name)) for name, subspace in subspaces_of(space).items()]
