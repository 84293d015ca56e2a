"""Columns of Box, Discrete, MultiDiscrete and MultiBinary spaces: each is a single array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import NDArray

from memlane import _native
from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split_capacity
from memlane.spaces.casting import as_array, batch_shape, checked_cast, describe_shape
from memlane.spaces.column import CheckedBatch, Column, RowIndices, column_of, fields_of, find_array
from memlane.spaces.paths import ROOT_NAME

# A string, because these classes are not generic in every version of Gymnasium.
Plain: TypeAlias = "Box | Discrete[Any] | MultiDiscrete[Any] | MultiBinary"


class ArrayColumn(Column):
    """Box. As in Gymnasium, its bounds are not checked."""

    rows: NDArray[Any]

    def __init__(self, space: Plain, rows: NDArray[Any], path: str) -> None:
        super().__init__(space, len(rows), path)
        self.rows = rows
        self._dtype = rows.dtype
        self._shape = rows.shape[1:]
        self._writer: _native.ColumnWriter | None = None
        """Writes all rows at once."""

    def try_write_all(self, values: Any) -> bool:
        if self._writer is None:
            if not (self.rows.flags.c_contiguous and self.rows.flags.writeable):
                return False
            self._writer = _native.ColumnWriter(self._description(self.rows[np.newaxis]))
        return self._writer.store(values)

    def _description(self, rows: NDArray[Any]) -> tuple[Any, ...]:
        """The description of ``rows`` that the native ``ColumnWriter`` takes."""
        return ("array", rows)

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._row_error(index)
        # The same check as in convert, without the call.
        if type(value) is np.ndarray and value.dtype == self._dtype and value.shape == self._shape:
            self.rows[index] = value
        else:
            self.rows[index] = self.convert(value)

    def convert(self, value: Any) -> NDArray[Any]:
        # The common case: nothing to convert.
        if type(value) is np.ndarray and value.dtype == self._dtype and value.shape == self._shape:
            return value
        array = as_array(value, self.path, self._shape, self._dtype)
        if array.shape != self._shape:
            raise ValueError(f"at {self.path!r}: expected shape {self._shape}, found {describe_shape(array)}")
        return checked_cast(array, self._dtype, self.path)

    def store(self, index: int, content: Any) -> None:
        self.rows[index] = content

    def load(self, index: int, copy: bool) -> Any:
        row = self.rows[index, ...]  # an array even if the shape is ()
        return row.copy() if copy else row

    def read_each(self) -> list[Any]:
        return list(self.rows.copy())

    def convert_batch(self, values: Any) -> CheckedBatch:
        expected = batch_shape(self._shape)
        array = as_array(values, self.path, expected, self._dtype)
        if array.shape[1:] != self._shape or not array.ndim:
            if not array.size and array.ndim == 1:  # an empty list has no information about shape
                return CheckedBatch(0, self.rows[:0])
            raise ValueError(
                f"at {self.path!r}: expected shape {expected}, one row per value, found {describe_shape(array)}"
            )
        return CheckedBatch(len(array), checked_cast(array, self._dtype, self.path))

    def store_batch(self, begin: int, content: Any) -> None:
        self.rows[begin : begin + len(content)] = content

    def load_batch(self, begin: int, end: int, copy: bool) -> NDArray[Any]:
        view = self.rows[begin:end]
        return view.copy() if copy else view

    def store_rows(self, rows: RowIndices, content: Any) -> None:
        self.rows[rows] = content

    def load_rows(self, rows: RowIndices) -> NDArray[Any]:
        selected: NDArray[Any] = self.rows[rows]
        return selected


class RangeColumn(ArrayColumn):
    """MultiDiscrete and MultiBinary: integers between two inclusive bounds."""

    def __init__(self, space: Plain, rows: NDArray[Any], path: str, low: Any, high: Any) -> None:
        super().__init__(space, rows, path)
        self._low = low
        self._high = high
        self._same_bounds = type(low) is int and type(high) is int and rows.dtype == np.int64
        """Whether all elements have the same bounds and a dtype that native code can check."""

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._row_error(index)
        self.rows[index] = self.convert(value)

    def try_write_all(self, values: Any) -> bool:
        return self._same_bounds and super().try_write_all(values)

    def _description(self, rows: NDArray[Any]) -> tuple[Any, ...]:
        return ("integers", rows, self._low, self._high)

    def convert(self, value: Any) -> NDArray[Any]:
        return self._in_range(super().convert(value))

    def convert_batch(self, values: Any) -> CheckedBatch:
        count, array = super().convert_batch(values)
        return CheckedBatch(count, self._in_range(array))

    def _in_range(self, array: NDArray[Any]) -> NDArray[Any]:
        # 0.2 us instead of numpy's 3; a whole step of a few environments takes 10.
        if self._same_bounds and _native.all_within(array, self._low, self._high):
            return array
        # For arrays as small as an action, two counts take half the time of (... | ...).any().
        if np.count_nonzero(array < self._low) or np.count_nonzero(array > self._high):
            outside = (array < self._low) | (array > self._high)
            low, high = (np.broadcast_to(bound, array.shape)[outside].flat[0] for bound in (self._low, self._high))
            where = f" at index {np.argwhere(outside)[0].tolist()}" if array.ndim else ""
            raise ValueError(f"at {self.path!r}: expected {low} to {high}, found {array[outside].flat[0]}{where}")
        return array


class DiscreteColumn(RangeColumn):
    """Discrete: one integer per row."""

    def __init__(self, space: Discrete[Any], rows: NDArray[Any], path: str) -> None:
        low = int(space.start)
        super().__init__(space, rows, path, low, min(low + int(space.n) - 1, int(np.iinfo(rows.dtype).max)))
        self._scalar = rows.dtype.type

    def write(self, index: int, value: Any) -> None:
        if not 0 <= index < self.n:
            raise self._row_error(index)
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
            # Checked before numpy: an int that is too large would become an object array.
            if not self._low <= value <= self._high:
                raise ValueError(f"at {self.path!r}: expected {self._low} to {self._high}, found {value}")
            return value
        return super().convert(value)


@fields_of.register(Box)
@fields_of.register(Discrete)
@fields_of.register(MultiDiscrete)
@fields_of.register(MultiBinary)
def _array_fields(space: Plain, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    split_capacity(capacity, [], prefix or ROOT_NAME)
    return {prefix or ROOT_NAME: _spec(space, n)}


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
    low = np.zeros(rows.shape[1:], rows.dtype)  # arrays: comparing with them takes half the time of scalars
    return RangeColumn(space, rows, prefix, low, low + 1)


def _spec(space: Plain, n: int) -> FieldSpec:
    assert space.shape is not None
    return space.dtype, (n, *space.shape)


def _rows(space: Plain, arrays: Mapping[str, NDArray[Any]], prefix: str) -> NDArray[Any]:
    return find_array(arrays, prefix or ROOT_NAME, _spec(space, 0))
