"""Column: many values of one Gymnasium space, as arrays with one row per value.

``fields_of`` says which arrays a space needs, so that they can be placed in a ``Layout`` next to others. ``column_of``
binds a space to such arrays, wherever they lie. Both dispatch on the space's class; register your own there.

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
from memlane.spaces.capacity import Capacities
from memlane.spaces.paths import BARE


class Checked(NamedTuple):
    """A batch that was checked: how many values (None if nothing tells), and what ``store_batch`` takes."""

    size: int | None
    content: Any


Rows: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"
"""Numbers of rows."""


class Column(ABC):
    """Values of ``space`` in ``n`` rows.

    A write checks the whole value before it stores any of it. It is not atomic for a reader in another process: who
    may write when is the business of the lane that the column lies in.
    """

    space: Space[Any]
    n: int
    path: str
    """Where in the outermost space this one is; errors name it."""
    rows: NDArray[Any] | None = None
    """The ``(n, *shape)`` array itself, if the column is one plain array."""

    def __init__(self, space: Space[Any], n: int, path: str) -> None:
        self.space = space
        self.n = n
        self.path = path or BARE

    def write(self, index: int, value: Any) -> None:
        """Check ``value`` and store it in row ``index``."""
        if not 0 <= index < self.n:
            raise self._no_row(index)
        self.store(index, self.convert(value))

    def write_batch(self, values: Any, begin: int = 0) -> None:
        """Check and store many values from row ``begin`` on, in the form of ``batch_space(space, count)``."""
        count, content = self.convert_batch(values)
        if begin < 0 or begin + (count or 0) > self.n:
            raise IndexError(
                f"at {self.path!r}: {count} values from row {begin} on do not fit into the {self.n} rows that there are"
            )
        self.store_batch(begin, content)

    def read(self, begin: int = 0, end: int | None = None, copy: bool = True) -> Any:
        """The values of rows ``begin`` to ``end`` as one batch. With ``copy=False``, arrays are views of the rows."""
        if end is None:
            end = self.n
        if not 0 <= begin <= end <= self.n:
            raise IndexError(f"at {self.path!r}: there are {self.n} rows, no rows {begin} to {end}")
        return self.load_batch(begin, end, copy)

    def read_one(self, index: int, copy: bool = True) -> Any:
        """The value of row ``index``. With ``copy=False``, arrays are views of the row."""
        if not 0 <= index < self.n:
            raise self._no_row(index)
        return self.load(index, copy)

    def fill(self, values: Any) -> bool:  # noqa: ARG002
        """Store a value in every row, if ``values`` is plainly right: 0.2 us where ``write_batch`` takes 2. False:
        nothing was stored, and ``convert_batch`` says what is wrong, if anything is."""
        return False

    # What a kind of column is made of. Rows are not checked here: the outermost column has done so.

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """Check one value; what ``store`` takes. Stores nothing."""

    @abstractmethod
    def store(self, index: int, content: Any) -> None:
        """Store what ``convert`` has made."""

    @abstractmethod
    def load(self, index: int, copy: bool) -> Any:
        """One value."""

    @abstractmethod
    def convert_batch(self, values: Any) -> Checked:
        """Check a batch; what ``store_batch`` takes. Stores nothing."""

    @abstractmethod
    def store_batch(self, begin: int, content: Any) -> None:
        """Store the content of what ``convert_batch`` has made."""

    @abstractmethod
    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        """A batch."""

    @abstractmethod
    def store_rows(self, rows: Rows, content: Any) -> None:
        """``store_batch`` into rows that need not be next to each other."""

    @abstractmethod
    def load_rows(self, rows: Rows) -> Any:
        """A batch of such rows, as a copy."""

    def _no_row(self, index: int) -> IndexError:
        return IndexError(f"at {self.path!r}: there are {self.n} rows, no row {index}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}, {self.n} rows of {self.space}>"


class SinglesColumn(Column):
    """A column whose batches are tuples of single values."""

    def convert_batch(self, values: Any) -> Checked:
        if not isinstance(values, (tuple, list)):
            raise TypeError(f"at {self.path!r}: expected a tuple of values, one per row, found {type(values).__name__}")
        return Checked(len(values), [self.convert(value) for value in values])

    def store_batch(self, begin: int, content: Any) -> None:
        self.store_rows(range(begin, begin + len(content)), content)

    def load_batch(self, begin: int, end: int, copy: bool) -> tuple[Any, ...]:
        return tuple(self.load(index, copy) for index in range(begin, end))

    def store_rows(self, rows: Rows, content: Any) -> None:
        for index, one in zip(rows, content, strict=True):
            self.store(int(index), one)

    def load_rows(self, rows: Rows) -> tuple[Any, ...]:
        return tuple(self.load(int(index), copy=True) for index in rows)


@singledispatch
def fields_of(
    space: Space[Any],
    n: int,  # noqa: ARG001
    capacity: Capacities = None,  # noqa: ARG001
    prefix: str = "",  # noqa: ARG001
) -> dict[str, FieldSpec]:
    """The fields that ``n`` values of ``space`` take in a layout; the first dimension of each is ``n``.

    Names are paths in the space, all under ``prefix``. ``capacity`` declares the room for graphs and sequences.
    """
    raise unsupported(space, "fields_of")


@singledispatch
def column_of(
    space: Space[Any],
    arrays: Mapping[str, NDArray[Any]],  # noqa: ARG001
    prefix: str = "",  # noqa: ARG001
) -> Column:
    """Bind ``space`` to arrays that were made from ``fields_of(space, n, capacity, prefix)``. Others are ignored."""
    raise unsupported(space, "column_of")


def unsupported(space: object, function: str) -> Exception:
    """What Gymnasium says of a space that nobody registered, or of something that is no space."""
    if isinstance(space, Space):
        return CustomSpaceError(
            f"Space of type `{type(space)}` doesn't have an registered `{function}` function. "
            f"Register `{type(space)}` for `{function}` to support it."
        )
    return TypeError(
        f"The space provided to `{function}` is not a gymnasium Space instance, type: {type(space)}, {space}"
    )


def find(arrays: Mapping[str, NDArray[Any]], name: str, spec: FieldSpec) -> NDArray[Any]:
    """The array called ``name``, which must have that dtype and, after the first dimension, that shape."""
    dtype, shape = spec
    array = arrays.get(name)
    if array is None:
        raise KeyError(f"there is no array {name!r}; the arrays are {list(arrays)}")
    expected = tuple(shape) if not isinstance(shape, int) else (shape,)
    if array.dtype != dtype or array.ndim != len(expected) or array.shape[1:] != expected[1:]:
        raise ValueError(
            f"array {name!r} must have dtype {dtype} and shape (n, *{list(expected[1:])}), "
            f"found {array.dtype} and {list(array.shape)}"
        )
    return array
