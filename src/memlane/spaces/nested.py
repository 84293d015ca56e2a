"""Columns of Dict, Tuple and OneOf: a column for each of their parts."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, OneOf, Space, Tuple
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split
from memlane.spaces.column import Checked, Column, Rows, SinglesColumn, column_of, fields_of, find
from memlane.spaces.paths import BARE, join, step

# A space with no parts still has rows: a byte for each, so that a column knows how many.
_NOTHING = "~nothing"
_CHOICE = "choice"


class PartsColumn(Column):
    """Dict and Tuple. Subclasses say how a value is taken apart and put together."""

    def __init__(self, space: Space[Any], parts: Collection[Column], n: int, path: str) -> None:
        super().__init__(space, n, path)
        self.parts = tuple(parts)

    @abstractmethod
    def take_apart(self, value: Any) -> Collection[Any]:
        """The values of the parts, in their order."""

    @abstractmethod
    def put_together(self, values: Collection[Any]) -> Any:
        """The value that has these parts."""

    def convert(self, value: Any) -> list[Any]:
        return [part.convert(one) for part, one in zip(self.parts, self.take_apart(value), strict=True)]

    def store(self, index: int, content: Any) -> None:
        for part, one in zip(self.parts, content, strict=True):
            part.store(index, one)

    def load(self, index: int, copy: bool) -> Any:
        return self.put_together([part.load(index, copy) for part in self.parts])

    def convert_batch(self, values: Any) -> Checked:
        batches = [part.convert_batch(one) for part, one in zip(self.parts, self.take_apart(values), strict=True)]
        sizes = {part.path: batch.size for part, batch in zip(self.parts, batches, strict=True)}
        known = {size for size in sizes.values() if size is not None}
        if len(known) > 1:
            raise ValueError(f"at {self.path!r}: expected as many values in every part, found {sizes}")
        return Checked(known.pop() if known else None, [batch.content for batch in batches])

    def store_batch(self, begin: int, content: Any) -> None:
        for part, one in zip(self.parts, content, strict=True):
            part.store_batch(begin, one)

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        return self.put_together([part.load_batch(begin, end, copy) for part in self.parts])

    def store_rows(self, rows: Rows, content: Any) -> None:
        for part, one in zip(self.parts, content, strict=True):
            part.store_rows(rows, one)

    def load_rows(self, rows: Rows) -> Any:
        return self.put_together([part.load_rows(rows) for part in self.parts])


class DictColumn(PartsColumn):
    def __init__(self, space: Dict, parts: Collection[Column], n: int, path: str) -> None:
        super().__init__(space, parts, n, path)
        self._keys = space.spaces.keys()

    def take_apart(self, value: Any) -> Collection[Any]:
        if type(value) is not dict or value.keys() != self._keys:
            check_keys(value, self._keys, self.path)
        return [value[key] for key in self._keys]

    def put_together(self, values: Collection[Any]) -> dict[Any, Any]:
        return dict(zip(self._keys, values, strict=True))


class TupleColumn(PartsColumn):
    def take_apart(self, value: Any) -> Collection[Any]:
        check_length(value, len(self.parts), self.path)
        return value  # type: ignore[no-any-return]

    def put_together(self, values: Collection[Any]) -> tuple[Any, ...]:
        return tuple(values)


class OneOfColumn(SinglesColumn):
    """Each row has room for every alternative, and says which one it holds."""

    def __init__(self, space: OneOf[Any], choices: NDArray[Any], parts: Collection[Column], path: str) -> None:
        super().__init__(space, len(choices), path)
        self._choices = choices
        self._parts = tuple(parts)

    def convert(self, value: Any) -> tuple[int, Any]:
        choice, one = check_choice(value, len(self._parts), self.path)
        return choice, self._parts[choice].convert(one)

    def store(self, index: int, content: Any) -> None:
        choice, one = content
        self._parts[choice].store(index, one)
        self._choices[index] = choice

    def load(self, index: int, copy: bool) -> tuple[np.int64, Any]:
        choice = self._choices[index]
        return choice, self._parts[choice].load(index, copy)


def check_keys(value: Any, keys: Collection[Any], path: str) -> None:
    """``value`` must have these keys and no others."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise TypeError(f"at {path!r}: expected a dict with the keys {list(keys)}, found {type(value).__name__}")
    if value.keys() != keys:
        missing = [key for key in keys if key not in value]
        unknown = [key for key in value if key not in keys]
        raise KeyError(f"at {path!r}: expected the keys {list(keys)}; {missing=}, {unknown=}")


def check_length(value: Any, length: int, path: str) -> None:
    """``value`` must be a tuple, or something like it, of that length."""
    if not isinstance(value, (tuple, list, np.ndarray)):
        raise TypeError(f"at {path!r}: expected a tuple of {length} values, found {type(value).__name__}")
    if len(value) != length:
        raise ValueError(f"at {path!r}: expected a tuple of {length} values, found {len(value)}")


def check_choice(value: Any, alternatives: int, path: str) -> tuple[int, Any]:
    """``value`` must be a pair: which alternative, and a value of it."""
    check_length(value, 2, path)
    try:
        choice = operator.index(value[0])
    except TypeError:
        raise TypeError(
            f"at {path!r}: expected (choice, value) with a whole number first, found {type(value[0]).__name__}"
        ) from None
    if not 0 <= choice < alternatives:
        raise ValueError(f"at {path!r}: expected a choice from 0 to {alternatives - 1}, found {choice}")
    return choice, value[1]


def parts_of(space: Dict | Tuple[Any] | OneOf[Any]) -> dict[str, Space[Any]]:
    """The parts of a nested space by their step in a path."""
    if isinstance(space, Dict):
        return {step(key): part for key, part in space.spaces.items()}
    return {str(index): part for index, part in enumerate(space.spaces)}


@fields_of.register(Dict)
@fields_of.register(Tuple)
@fields_of.register(OneOf)
def _nested_fields(
    space: Dict | Tuple[Any] | OneOf[Any], n: int, capacity: Capacities = None, prefix: str = ""
) -> dict[str, FieldSpec]:
    parts = parts_of(space)
    fields: dict[str, FieldSpec] = {}
    if isinstance(space, OneOf):
        fields[join(prefix, _CHOICE)] = (np.dtype(np.int64), (n,))
    elif not parts:
        fields[join(prefix, _NOTHING)] = (np.dtype(np.uint8), (n,))
    for (name, part), declared in zip(parts.items(), split(capacity, parts, prefix or BARE), strict=True):
        fields |= fields_of(part, n, declared, join(prefix, name))
    return fields


@column_of.register(Dict)
@column_of.register(Tuple)
def _parts_column(space: Dict | Tuple[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    parts = _columns(space, arrays, prefix)
    n = parts[0].n if parts else len(find(arrays, join(prefix, _NOTHING), (np.uint8, (0,))))
    return DictColumn(space, parts, n, prefix) if isinstance(space, Dict) else TupleColumn(space, parts, n, prefix)


@column_of.register(OneOf)
def _one_of_column(space: OneOf[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    choices = find(arrays, join(prefix, _CHOICE), (np.int64, (0,)))
    return OneOfColumn(space, choices, _columns(space, arrays, prefix), prefix)


def _columns(space: Dict | Tuple[Any] | OneOf[Any], arrays: Mapping[str, NDArray[Any]], prefix: str) -> list[Column]:
    return [column_of(part, arrays, join(prefix, name)) for name, part in parts_of(space).items()]
