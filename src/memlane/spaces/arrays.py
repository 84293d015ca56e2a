"""Columns of Box, Discrete, MultiDiscrete and MultiBinary: one plain array each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import NDArray

from memlane import _native
from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split
from memlane.spaces.casting import as_array, cast
from memlane.spaces.column import Checked, Column, Rows, column_of, fields_of, find
from memlane.spaces.paths import BARE

# A string, because these classes are not generic in every version of Gymnasium.
Plain: TypeAlias = "Box | Discrete[Any] | MultiDiscrete[Any] | MultiBinary"


class ArrayColumn(Column):
    """Box. Its bounds are not checked, as Gymnasium does not."""

    rows: NDArray[Any]

    def __init__(self, space: Plain, rows: NDArray[Any], path: str) -> None:
        super().__init__(space, len(rows), path)
        self.rows = rows
        self._dtype = rows.dtype
        self._shape = rows.shape[1:]
        self._all: _native.ColumnWriter | None = None

    def fill(self, values: Any) -> bool:
        if self._all is None:
            if not (self.rows.flags.c_contiguous and self.rows.flags.writeable):
                return False
            self._all = _native.ColumnWriter(self._description(self.rows[np.newaxis]))
        return self._all.store(values)

    def _description(self, rows: NDArray[Any]) -> tuple[Any, ...]:
        """Of these rows, for the native side."""
        return ("array", rows)

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._no_row(index)
        # As in convert, without the call.
        if type(value) is np.ndarray and value.dtype == self._dtype and value.shape == self._shape:
            self.rows[index] = value
        else:
            self.rows[index] = self.convert(value)

    def convert(self, value: Any) -> NDArray[Any]:
        # Most values are what they should be.
        if type(value) is np.ndarray and value.dtype == self._dtype and value.shape == self._shape:
            return value
        array = as_array(value, self.path, self._shape, self._dtype)
        if array.shape != self._shape:
            raise ValueError(f"at {self.path!r}: expected shape {self._shape}, found {array.shape}")
        return cast(array, self._dtype, self.path)

    def store(self, index: int, content: Any) -> None:
        self.rows[index] = content

    def load(self, index: int, copy: bool) -> Any:
        row = self.rows[index, ...]  # an array also if the shape is ()
        return row.copy() if copy else row

    def convert_batch(self, values: Any) -> Checked:
        array = as_array(values, self.path, ("count", *self._shape), self._dtype)
        if array.shape[1:] != self._shape or not array.ndim:
            if not array.size and array.ndim == 1:  # an empty list cannot show the shape of what is not in it
                return Checked(0, self.rows[:0])
            raise ValueError(f"at {self.path!r}: expected shape (count, *{list(self._shape)}), found {array.shape}")
        return Checked(len(array), cast(array, self._dtype, self.path))

    def store_batch(self, begin: int, content: Any) -> None:
        self.rows[begin : begin + len(content)] = content

    def load_batch(self, begin: int, end: int, copy: bool) -> NDArray[Any]:
        view = self.rows[begin:end]
        return view.copy() if copy else view

    def store_rows(self, rows: Rows, content: Any) -> None:
        self.rows[rows] = content

    def load_rows(self, rows: Rows) -> NDArray[Any]:
        found: NDArray[Any] = self.rows[rows]
        return found


class RangeColumn(ArrayColumn):
    """MultiDiscrete and MultiBinary: whole numbers between two bounds, both included."""

    def __init__(self, space: Plain, rows: NDArray[Any], path: str, low: Any, high: Any) -> None:
        super().__init__(space, rows, path)
        self._low = low
        self._high = high
        self._one_range = type(low) is int and type(high) is int and rows.dtype == np.int64
        """Whether it is the same for all numbers, and the native side can look at it."""

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._no_row(index)
        self.rows[index] = self.convert(value)

    def fill(self, values: Any) -> bool:
        return self._one_range and super().fill(values)

    def _description(self, rows: NDArray[Any]) -> tuple[Any, ...]:
        return ("integers", rows, self._low, self._high)

    def convert(self, value: Any) -> NDArray[Any]:
        return self._in_range(super().convert(value))

    def convert_batch(self, values: Any) -> Checked:
        count, array = super().convert_batch(values)
        return Checked(count, self._in_range(array))

    def _in_range(self, array: NDArray[Any]) -> NDArray[Any]:
        # 0.2 us where numpy takes 3; a step of few environments takes 10.
        if self._one_range and _native.all_within(array, self._low, self._high):
            return array
        # Two counts cost half of what (... | ...).any() does on the few numbers that an action has.
        if np.count_nonzero(array < self._low) or np.count_nonzero(array > self._high):
            wrong = (array < self._low) | (array > self._high)
            low, high = (np.broadcast_to(bound, array.shape)[wrong].flat[0] for bound in (self._low, self._high))
            where = f" at index {np.argwhere(wrong)[0].tolist()}" if array.ndim else ""
            raise ValueError(f"at {self.path!r}: expected {low} to {high}, found {array[wrong].flat[0]}{where}")
        return array


class DiscreteColumn(RangeColumn):
    """Discrete: one whole number per row."""

    def __init__(self, space: Discrete[Any], rows: NDArray[Any], path: str) -> None:
        low = int(space.start)
        super().__init__(space, rows, path, low, min(low + int(space.n) - 1, int(np.iinfo(rows.dtype).max)))
        self._scalar = rows.dtype.type

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._no_row(index)
        kind = type(value)
        if (kind is int or kind is self._scalar) and self._low <= value <= self._high:
            self.rows[index] = value
        else:
            self.rows[index] = self.convert(value)

    def load(self, index: int, copy: bool) -> Any:  # noqa: ARG002  a number is always a copy
        return self.rows[index]

    def convert(self, value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is self._scalar:
            # Before numpy sees it: it makes an object of an int that is too large.
            if not self._low <= value <= self._high:
                raise ValueError(f"at {self.path!r}: expected {self._low} to {self._high}, found {value}")
            return value
        return super().convert(value)


@fields_of.register(Box)
@fields_of.register(Discrete)
@fields_of.register(MultiDiscrete)
@fields_of.register(MultiBinary)
def _array_fields(space: Plain, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    split(capacity, [], prefix or BARE)
    return {prefix or BARE: _spec(space, n)}


@column_of.register(Box)
def _box_column(space: Box, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    return ArrayColumn(space, _rows(space, arrays, prefix), prefix)


@column_of.register(Discrete)
def _discrete_column(space: Discrete[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    return DiscreteColumn(space, _rows(space, arrays, prefix), prefix)


@column_of.register(MultiDiscrete)
def _multi_discrete_column(space: MultiDiscrete[Any], arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    return RangeColumn(space, _rows(space, arrays, prefix), prefix, space.start, space.start + (space.nvec - 1))


@column_of.register(MultiBinary)
def _multi_binary_column(space: MultiBinary, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    rows = _rows(space, arrays, prefix)
    low = np.zeros(rows.shape[1:], rows.dtype)  # arrays, because they compare in half the time of numbers
    return RangeColumn(space, rows, prefix, low, low + 1)


def _spec(space: Plain, n: int) -> FieldSpec:
    assert space.shape is not None
    return space.dtype, (n, *space.shape)


def _rows(space: Plain, arrays: Mapping[str, NDArray[Any]], prefix: str) -> NDArray[Any]:
    return find(arrays, prefix or BARE, _spec(space, 0))
