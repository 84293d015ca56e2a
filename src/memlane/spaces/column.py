"""Column: values of one Gymnasium space, stored in arrays with one row per value.

``fields_of`` returns the fields that a space needs, for a ``Layout``. ``column_of`` binds a space to arrays with these
fields. Both dispatch on the class of the space; register a custom space with both.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> from memlane.core import Segment
    >>> space = Dict({"pos": Box(-1, 1, (2,)), "lives": Discrete(4)})
    >>> fields_of(space, n=3)
    {'lives': (dtype('int64'), (3,)), 'pos': (dtype('float32'), (3, 2))}
    >>> column = column_of(space, Segment.create(fields_of(space, n=3)).views())
    >>> column.write(1, {"pos": np.float32([0.5, 1]), "lives": 3})
    >>> column.read(1, 2)
    {'lives': array([3]), 'pos': array([[0.5, 1. ]], dtype=float32)}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Space
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.core.suggestions import did_you_mean
from memlane.spaces.capacity import Capacities
from memlane.spaces.casting import batch_shape
from memlane.spaces.paths import ROOT_NAME


class CheckedBatch(NamedTuple):
    """A batch that ``convert_batch`` has checked."""

    size: int | None
    """Number of values; None for a space without content, such as an empty Dict."""
    content: Any
    """The argument for ``store_batch``."""


RowIndices: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"
"""Row numbers."""


class Column(ABC):
    """``n`` values of a Gymnasium space, one per row, in arrays that may be shared memory.

    A write checks the whole value before it stores any part. It is not atomic for readers in other processes: the lane
    that contains the column decides which process writes when.
    """

    space: Space[Any]
    n: int
    """Number of rows."""
    path: str
    """The position of the space in the outermost space, for error messages."""
    rows: NDArray[Any] | None = None
    """The ``(n, *shape)`` array, if the column is a single array; otherwise None."""

    def __init__(self, space: Space[Any], n: int, path: str) -> None:
        self.space = space
        self.n = n
        self.path = path or ROOT_NAME

    def write(self, index: int, value: Any) -> None:
        """Check ``value`` and store it in row ``index``."""
        if not 0 <= index < self.n:
            raise self._row_error(index)
        self.store(index, self.convert(value))

    def write_batch(self, values: Any, begin: int = 0) -> None:
        """Check a batch, in the form of ``batch_space(space, count)``, and store it in the rows from ``begin`` on."""
        count, content = self.convert_batch(values)
        if begin < 0 or begin + (count or 0) > self.n:
            raise IndexError(f"at {self.path!r}: {count} values from row {begin} on do not fit into {self.n} rows")
        self.store_batch(begin, content)

    def read(self, begin: int = 0, end: int | None = None, copy: bool = True) -> Any:
        """The values of rows ``begin`` to ``end`` as one batch. With ``copy=False``, arrays are views of the rows."""
        if end is None:
            end = self.n
        if not 0 <= begin <= end <= self.n:
            raise IndexError(f"at {self.path!r}: there are {self.n} rows, no rows {begin} to {end}")
        return self.load_batch(begin, end, copy)

    def read_row(self, index: int, copy: bool = True) -> Any:
        """The value of row ``index``. With ``copy=False``, arrays are views of the row."""
        if not 0 <= index < self.n:
            raise self._row_error(index)
        return self.load(index, copy)

    def read_each(self) -> list[Any]:
        """The values of all rows, one by one, copied."""
        return [self.load(index, copy=True) for index in range(self.n)]

    def try_write_all(self, values: Any) -> bool:  # noqa: ARG002
        """Fast path of ``write_batch`` for all rows: 0.2 us instead of 2. Return False, with nothing stored, if
        ``values`` is not an array of the right dtype and shape, or is invalid; then use ``write_batch``."""
        return False

    # To be implemented by each kind of column. Row numbers were checked by the outermost column.

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """Check one value and return the argument for ``store``. Stores nothing."""

    @abstractmethod
    def store(self, index: int, content: Any) -> None:
        """Store the result of ``convert`` in row ``index``."""

    @abstractmethod
    def load(self, index: int, copy: bool) -> Any:
        """The value of row ``index``."""

    @abstractmethod
    def convert_batch(self, values: Any) -> CheckedBatch:
        """Check a batch. Stores nothing."""

    @abstractmethod
    def store_batch(self, begin: int, content: Any) -> None:
        """Store the ``content`` of a checked batch in the rows from ``begin`` on."""

    @abstractmethod
    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        """The values of rows ``begin`` to ``end`` as one batch."""

    @abstractmethod
    def store_rows(self, rows: RowIndices, content: Any) -> None:
        """Store the ``content`` of a checked batch in any rows."""

    @abstractmethod
    def load_rows(self, rows: RowIndices) -> Any:
        """The values of any rows as one batch, copied."""

    def _row_error(self, index: int) -> IndexError:
        return IndexError(f"at {self.path!r}: there are {self.n} rows, no row {index}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}, {self.n} rows of {self.space}>"


class PerRowColumn(Column):
    """A column that converts, stores and loads row by row. Its batches are tuples of single values."""

    def convert_batch(self, values: Any) -> CheckedBatch:
        if not isinstance(values, (tuple, list)):
            raise TypeError(f"at {self.path!r}: expected a tuple of values, one per row, found {type(values).__name__}")
        return CheckedBatch(len(values), [self.convert(value) for value in values])

    def store_batch(self, begin: int, content: Any) -> None:
        self.store_rows(range(begin, begin + len(content)), content)

    def load_batch(self, begin: int, end: int, copy: bool) -> tuple[Any, ...]:
        return tuple(self.load(index, copy) for index in range(begin, end))

    def store_rows(self, rows: RowIndices, content: Any) -> None:
        for index, value in zip(rows, content, strict=True):
            self.store(int(index), value)

    def load_rows(self, rows: RowIndices) -> tuple[Any, ...]:
        return tuple(self.load(int(index), copy=True) for index in rows)


@singledispatch
def fields_of(
    space: Space[Any],
    n: int,  # noqa: ARG001
    capacity: Capacities = None,  # noqa: ARG001
    prefix: str = "",  # noqa: ARG001
) -> dict[str, FieldSpec]:
    """The fields of a layout that hold ``n`` values of ``space``. The first dimension of each is ``n``.

    Field names are paths in the space, under ``prefix``. ``capacity`` is the largest size of graphs and sequences.
    """
    raise unsupported_space_error(space, "fields_of", _SUPPORTED)


@singledispatch
def column_of(
    space: Space[Any],
    arrays: Mapping[str, NDArray[Any]],  # noqa: ARG001
    prefix: str = "",  # noqa: ARG001
) -> Column:
    """Bind ``space`` to arrays with the fields of ``fields_of(space, n, capacity, prefix)``. Others are ignored."""
    raise unsupported_space_error(space, "column_of", _SUPPORTED)


_SUPPORTED = (
    " Supported are Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict, Tuple, OneOf and, with a declared capacity, "
    "Graph and Sequence."
)


def unsupported_space_error(space: object, function: str, hint: str = "") -> Exception:
    """Gymnasium's error for a space that is not registered, or for an object that is not a space."""
    if isinstance(space, Space):
        return CustomSpaceError(
            f"Space of type `{type(space)}` doesn't have an registered `{function}` function. "
            f"Register `{type(space)}` for `{function}` to support it.{hint}"
        )
    return TypeError(
        f"The space provided to `{function}` is not a gymnasium Space instance, type: {type(space)}, {space}"
    )


def find_array(arrays: Mapping[str, NDArray[Any]], name: str, spec: FieldSpec) -> NDArray[Any]:
    """The array ``name``. Its dtype, and its shape after the first dimension, must be those of ``spec``."""
    dtype, shape = spec
    array = arrays.get(name)
    if array is None:
        raise KeyError(f"there is no array {name!r}; the arrays are {list(arrays)}{did_you_mean(name, arrays)}")
    expected = tuple(shape) if not isinstance(shape, int) else (shape,)
    if array.dtype != dtype or array.ndim != len(expected) or array.shape[1:] != expected[1:]:
        raise ValueError(
            f"array {name!r} must have dtype {dtype} and shape {batch_shape(expected[1:])}, "
            f"found {array.dtype} and {array.shape}"
        )
    return array
