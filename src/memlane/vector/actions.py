"""Actions: a batch of actions in shared memory, in the form in which the caller gave it.

Gymnasium's vector environments pass each environment its part of the batch as it is: a row of float64 where the batch
is float64 and the space float32, a Python int where the batch is a list. So do these. A batch of the space's dtype and
shape is written to the rows of the action's column, as one native copy; the forms of ``_formats`` are written beside
them, and a word for each environment says which form its action has. Batches of any other form travel in messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from memlane import _native
from memlane.core.layout import FieldSpec
from memlane.spaces import Column
from memlane.spaces.column import RowIndices
from memlane.spaces.nested import CompositeColumn, subspaces_of
from memlane.spaces.paths import ROOT_NAME, join_path

_FORMAT, _OTHER = "action_format", "action_other"
_LARGEST_ITEM = 8
"""Bytes of the largest item of a form: those of a float64."""


class Format(NamedTuple):
    """The form of an environment's action."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    as_python: bool = False
    """Whether it is an int, float or bool of Python."""


_PYTHON = {kind: Format(np.dtype(kind), (), True) for kind in (bool, int, float)}
_DTYPES = [np.dtype(char) for char in "?bhilBHILefd"]


def _formats(dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Format]:
    """The forms of an action that shared memory has room for. The first is the space's own."""
    # A number for an array of one, and the reverse: environments decide what they make of it.
    shapes = dict.fromkeys((shape, (), (1,)))
    arrays = [Format(other_dtype, other_shape) for other_shape in shapes for other_dtype in _DTYPES]
    return list(dict.fromkeys([Format(dtype, shape), *arrays, *_PYTHON.values()]))


def has_forms(space: Space[Any]) -> bool:
    """Whether actions of this space can be in shared memory in other forms than the space's own: it consists of
    arrays and numbers alone."""
    if type(space) in (Dict, Tuple):
        parts = subspaces_of(space).values()  # type: ignore[arg-type]
        return bool(parts) and all(map(has_forms, parts))
    return type(space) in (Box, Discrete, MultiDiscrete, MultiBinary)


def form_fields(space: Space[Any], n: int) -> dict[str, FieldSpec]:
    """The fields for other forms than the space's own, for ``n`` environments."""
    fields: dict[str, FieldSpec] = {}
    for path, leaf in _leaves(space):
        assert leaf.shape is not None
        fields[f"{_FORMAT}.{path}"] = (np.dtype(np.int64), (n,))
        fields[f"{_OTHER}.{path}"] = (np.dtype(np.uint8), (n, _LARGEST_ITEM * max(1, math.prod(leaf.shape))))
    return fields


def _leaves(space: Space[Any], path: str = "") -> Iterator[tuple[str, Space[Any]]]:
    if isinstance(space, (Dict, Tuple)):
        for name, part in subspaces_of(space).items():
            yield from _leaves(part, join_path(path, name))
    else:
        yield path or ROOT_NAME, space


class _Leaf:
    """The actions of one Box, Discrete, MultiDiscrete or MultiBinary space."""

    def __init__(self, rows: NDArray[Any], formats: NDArray[np.int64], other: NDArray[np.uint8]) -> None:
        self._writer = _native.ColumnWriter(("array", rows[np.newaxis]))
        self._formats = formats
        self._other = other
        self._known = _formats(rows.dtype, rows.shape[1:])
        self._numbers = {known: number for number, known in enumerate(self._known)}
        self._views = {0: rows}
        """The rows in each form that was used."""
        self._all_own = False
        """Whether all words say that the form is the space's own. Only the writer knows."""

    def try_write_all(self, values: Any) -> bool:
        """Write a batch of the space's dtype and shape; False if it is none."""
        if not self._writer.store(values):
            return False
        if not self._all_own:
            self._formats[...] = 0
            self._all_own = True
        return True

    def encode(self, values: Any) -> tuple[int, NDArray[Any]] | None:
        """The number of the batch's form, and the batch as an array; None if it has none of the forms."""
        if isinstance(values, (list, tuple)):
            return self._encode_items(values)
        if type(values) is not np.ndarray:
            # A torch tensor arrives as an array: a worker would have to import torch to unpickle its rows.
            if isinstance(values, np.ndarray | np.generic) or not hasattr(values, "__array__"):
                return None
            values = np.asarray(values)
        return self._encode_rows(values)

    def _encode_items(self, values: Sequence[Any]) -> tuple[int, NDArray[Any]] | None:
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind in _PYTHON:
            known = _PYTHON[kind]
            try:
                return self._numbers[known], np.array(values, known.dtype)
            except OverflowError:  # an integer of more than 64 bits
                return None
        if kind is np.ndarray:
            # An item without dimensions is an array, but a row without dimensions is a number.
            if not values[0].ndim or len({(value.shape, value.dtype) for value in values}) != 1:
                return None
            return self._encode_rows(np.stack(values))
        if kind is not None and issubclass(kind, np.number | np.bool_):
            return self._encode_rows(np.array(values, kind))
        return None

    def _encode_rows(self, array: NDArray[Any]) -> tuple[int, NDArray[Any]] | None:
        if not array.ndim:
            return None
        number = self._numbers.get(Format(array.dtype, array.shape[1:]))
        return None if number is None else (number, array)

    def store(self, rows: RowIndices | None, encoded: tuple[int, NDArray[Any]]) -> None:
        """Write an encoded batch into ``rows``, or into all."""
        number, array = encoded
        self._view(number)[slice(None) if rows is None else rows] = array
        self.mark(rows, number)

    def mark(self, rows: RowIndices | None, number: int) -> None:
        """Note the form of the actions in ``rows``."""
        if number or not self._all_own:
            self._formats[slice(None) if rows is None else rows] = number
            self._all_own = rows is None and number == 0

    def read(self, begin: int, end: int) -> Any:
        """The actions of rows ``begin`` to ``end``, which have the same form, as a batch; copied."""
        number = int(self._formats[begin])
        rows = self._view(number)[begin:end]
        return rows.tolist() if self._known[number].as_python else rows.copy()

    def _view(self, number: int) -> NDArray[Any]:
        view = self._views.get(number)
        if view is None:
            dtype, shape, _ = self._known[number]
            n, row_bytes = self._other.shape
            strides = (row_bytes, *np.ndarray(shape, dtype).strides)
            view = np.ndarray((n, *shape), dtype, self._other, strides=strides)
            self._views[number] = view
        return view


class SharedActions:
    """The actions of all environments, each in the form in which the caller gave it. The parent writes, workers read.

    Encoding and writing are two steps, so that a batch is written as a whole or not at all."""

    def __init__(self, column: Column, fields: Mapping[str, NDArray[Any]]) -> None:
        self._space = column.space
        self._leaves = [
            _Leaf(leaf.rows, fields[f"{_FORMAT}.{path}"], fields[f"{_OTHER}.{path}"])
            for leaf, (path, _) in zip(_leaf_columns(column), _leaves(column.space), strict=True)
            if leaf.rows is not None
        ]
        nested = isinstance(column, CompositeColumn)
        self.format_field = None if nested else f"{_FORMAT}.{ROOT_NAME}"
        """The field with the words that say which form each action has; None if the space has several."""

    @property
    def try_write_all(self) -> Callable[[Any], bool]:
        """A function that writes the actions of all environments if they have the dtypes and shapes of the space;
        otherwise it returns False, and some may be written. For a space that is not nested it is that of the only leaf,
        without a call in between: every step begins with it."""
        return self._try_write_parts if self.format_field is None else self._leaves[0].try_write_all

    def _try_write_parts(self, actions: Any) -> bool:
        parts = _split(self._space, actions)
        return parts is not None and all(
            leaf.try_write_all(part) for leaf, part in zip(self._leaves, parts, strict=True)
        )

    def encode(self, actions: Any) -> tuple[int, Any] | None:
        """The number of actions in a batch, and the argument for ``store``; None if the batch must travel in
        messages."""
        parts = _split(self._space, actions)
        if parts is None:
            return None
        encoded = [leaf.encode(part) for leaf, part in zip(self._leaves, parts, strict=True)]
        counts = {len(batch[1]) for batch in encoded if batch is not None}
        return None if None in encoded or len(counts) != 1 else (counts.pop(), encoded)

    def store(self, rows: RowIndices | None, encoded: Any) -> None:
        """Write an encoded batch into ``rows``, or into all."""
        for leaf, part in zip(self._leaves, encoded, strict=True):
            leaf.store(rows, part)

    def mark_own_form(self, rows: RowIndices) -> None:
        """The actions in ``rows`` have just been written to the column, in the form of the space."""
        for leaf in self._leaves:
            leaf.mark(rows, 0)

    def read(self, begin: int, end: int) -> Any:
        """The actions of rows ``begin`` to ``end``, which have the same form, as a batch; copied."""
        return _join(self._space, iter([leaf.read(begin, end) for leaf in self._leaves]))


def _leaf_columns(column: Column) -> Iterator[Column]:
    if isinstance(column, CompositeColumn):
        for part in column.parts:
            yield from _leaf_columns(part)
    else:
        yield column


def _split(space: Space[Any], actions: Any) -> list[Any] | None:
    """The batches of the leaves of a space, taken from a batch as ``iterate`` does; None if it is not nested as the
    space is, which ``iterate`` refuses."""
    if isinstance(space, Dict):
        if not isinstance(actions, Mapping) or not all(key in actions for key in space.spaces):
            return None
        parts = [_split(part, actions[key]) for key, part in space.spaces.items()]
    elif isinstance(space, Tuple):
        if not isinstance(actions, (tuple, list)) or len(actions) < len(space.spaces):
            return None
        parts = [_split(part, actions[index]) for index, part in enumerate(space.spaces)]
    else:
        return [actions]
    return None if None in parts else [leaf for part in parts if part is not None for leaf in part]


def _join(space: Space[Any], leaves: Iterator[Any]) -> Any:
    """The reverse of ``_split``."""
    if isinstance(space, Dict):
        return {key: _join(part, leaves) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_join(part, leaves) for part in space.spaces)
    return next(leaves)
