"""Gymnasium's three shared-memory functions for the observations of vector environments, without locks or names.

They have the signatures of ``gymnasium.vector.utils`` and dispatch on the class of the space: register a custom space
with ``create_shared_memory.register``, ``read_from_shared_memory.register`` and ``write_to_shared_memory.register``; it
then also works inside other spaces. Unlike in Gymnasium, values that do not fit are errors, texts are read exactly as
they were written, and graphs and sequences work if their capacity is declared.

For a custom space, ``read_from_shared_memory`` returns a batch. In a OneOf, for ``recv`` and for restarts of a vector
environment, single values or some rows are taken from it. Depending on the type of the batch, this requires that
functions of ``gymnasium.vector.utils`` are registered for the space:

    type of the batch                        required registrations
    an array with one row per value          none
    a tuple or a list of the values          none
    anything else, such as a dict of arrays  ``batch_space``, and ``iterate`` for the space that it returns, unless that
                                             is one of Gymnasium's; for some rows (``recv``) also ``create_empty_array``
                                             and ``concatenate``

    >>> from gymnasium.spaces import Box
    >>> space = Box(-1, 1, (2,))
    >>> memory = create_shared_memory(space, n=2)
    >>> write_to_shared_memory(space, 1, [0.5, 0.25], memory)
    >>> read_from_shared_memory(space, memory, n=2)
    array([[0.  , 0.  ],
           [0.5 , 0.25]], dtype=float32)
"""

from __future__ import annotations

import inspect
import multiprocessing as mp
import operator
from collections.abc import Callable, Mapping, Sized
from functools import singledispatch
from typing import Any

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from memlane.core.arguments import as_count
from memlane.core.segment import Segment
from memlane.spaces.capacity import Capacities, split_capacity
from memlane.spaces.column import Column, RowIndices, column_of, fields_of, unsupported_space_error
from memlane.spaces.nested import check_choice, check_keys, check_length, subspaces_of
from memlane.spaces.paths import ROOT_NAME, join_path

_LEAVES = (Box, Discrete, MultiDiscrete, MultiBinary, Text, Graph, Sequence)


class SharedRows:
    """``n`` values of one space in an anonymous segment. Pickles like a segment: the copy maps the same memory."""

    __slots__ = ("column", "path", "segment", "space", "verified_space")

    def __init__(self, space: Space[Any], segment: Segment, path: str = "") -> None:
        self.space = self.verified_space = space
        self.segment = segment
        self.path = path
        self.column = column_of(space, segment.views(), path)

    def verified_column(self, space: Space[Any]) -> Column:
        """The column, after a check that it was created for ``space``."""
        # Comparing two equal Boxes takes 40 us, and a worker passes the same object at every step.
        if space is not self.verified_space:
            if space != self.space:
                raise ValueError(
                    f"at {self.column.path!r}: the memory is for values of {self.space}, found {space}; pass the space "
                    "that the memory was created for"
                )
            self.verified_space = space
        return self.column

    def __reduce__(self) -> tuple[object, ...]:
        return SharedRows, (self.space, self.segment, self.path)

    def __repr__(self) -> str:
        return f"SharedRows({self.column!r})"


# -------------------------------------------------------------------------------------------------------------- create


@singledispatch
def create_shared_memory(
    space: Space[Any],
    n: int = 1,  # noqa: ARG001
    ctx: Any = mp,  # noqa: ARG001
    *,
    capacity: Capacities = None,  # noqa: ARG001
    path: str = "",  # noqa: ARG001
) -> Any:
    """Create zeroed memory for ``n`` values of ``space``. Pass it to other processes as an argument when they start.

    For a Dict or Tuple space the result is a dict or tuple of memory. ``capacity`` is the largest size of graphs and
    sequences. ``ctx`` exists for compatibility with Gymnasium and is ignored: the memory works with every start method.
    ``path`` is the position of the space in an outer one, for error messages.
    """
    raise unsupported_space_error(space, "create_shared_memory")


def _create_rows(
    space: Space[Any],
    n: int = 1,
    ctx: Any = mp,  # noqa: ARG001
    *,
    capacity: Capacities = None,
    path: str = "",
) -> SharedRows:
    return SharedRows(space, Segment.create(fields_of(space, as_count("n", n, 0), capacity, path)), path)


@create_shared_memory.register(Dict)
def _create_dict(
    space: Dict, n: int = 1, ctx: Any = mp, *, capacity: Capacities = None, path: str = ""
) -> dict[Any, Any]:
    return dict(zip(space.spaces, _create_parts(space, n, ctx, capacity, path), strict=True))


@create_shared_memory.register(Tuple)
def _create_tuple(
    space: Tuple[Any], n: int = 1, ctx: Any = mp, *, capacity: Capacities = None, path: str = ""
) -> tuple[Any, ...]:
    return tuple(_create_parts(space, n, ctx, capacity, path))


@create_shared_memory.register(OneOf)
def _create_one_of(
    space: OneOf[Any], n: int = 1, ctx: Any = mp, *, capacity: Capacities = None, path: str = ""
) -> tuple[Any, ...]:
    choices = _create_rows(Discrete(len(space.spaces)), n, ctx, path=join_path(path, "choice"))
    return (choices, *_create_parts(space, n, ctx, capacity, path))


def _create_parts(
    space: Dict | Tuple[Any] | OneOf[Any], n: int, ctx: Any, capacity: Capacities, path: str
) -> list[Any]:
    subspaces = subspaces_of(space)
    capacities = split_capacity(capacity, subspaces, path or ROOT_NAME)
    return [
        create_with_capacity(subspace, n, ctx, declared, join_path(path, name))
        for (name, subspace), declared in zip(subspaces.items(), capacities, strict=True)
    ]


def create_with_capacity(space: Space[Any], n: int, ctx: Any, capacity: Capacities, path: str = "") -> Any:
    """``create_shared_memory`` for a space that may be custom. The function of a custom space has Gymnasium's
    signature; it gets the capacity if it has a parameter of that name."""
    function = create_shared_memory.dispatch(type(space))
    if function in _BUILT_IN:
        return function(space, n=n, ctx=ctx, capacity=capacity, path=path)
    if "capacity" in inspect.signature(function).parameters:
        return function(space, n=n, ctx=ctx, capacity=capacity)
    # A single capacity applies to whichever spaces need it. One with a path is meant for this space, and would be lost.
    if isinstance(capacity, Mapping) and capacity:
        raise KeyError(
            f"at {path or ROOT_NAME!r}: a capacity is declared, but the function that was registered with "
            f"`create_shared_memory` for {type(space)} has no parameter `capacity`, found {dict(capacity)}; add the "
            "parameter, or do not declare the capacity"
        )
    return function(space, n=n, ctx=ctx)


_BUILT_IN: set[Callable[..., Any]] = {
    create_shared_memory.dispatch(object),
    _create_rows,
    _create_dict,
    _create_tuple,
    _create_one_of,
}


# ---------------------------------------------------------------------------------------------------------------- read


@singledispatch
def read_from_shared_memory(space: Space[Any], shared_memory: Any, n: int = 1) -> Any:  # noqa: ARG001
    """All ``n`` values as one batch. Its arrays are views of the memory: they change when a process writes to it."""
    raise unsupported_space_error(space, "read_from_shared_memory")


def _read_rows(space: Space[Any], shared_memory: SharedRows, n: int = 1) -> Any:
    column = _rows(space, shared_memory).verified_column(space)
    if n != column.n:
        raise ValueError(f"at {column.path!r}: the memory is for {column.n} values of {space}, found n={n}")
    return column.load_batch(0, n, copy=False)


@read_from_shared_memory.register(Dict)
def _read_dict(space: Dict, shared_memory: dict[Any, Any], n: int = 1) -> dict[Any, Any]:
    _require(dict, space, shared_memory)
    return {key: read_from_shared_memory(part, shared_memory[key], n=n) for key, part in space.spaces.items()}


@read_from_shared_memory.register(Tuple)
def _read_tuple(space: Tuple[Any], shared_memory: tuple[Any, ...], n: int = 1) -> tuple[Any, ...]:
    _require(tuple, space, shared_memory)
    return tuple(
        read_from_shared_memory(part, memory, n=n) for part, memory in zip(space.spaces, shared_memory, strict=True)
    )


@read_from_shared_memory.register(OneOf)
def _read_one_of(space: OneOf[Any], shared_memory: tuple[Any, ...], n: int = 1) -> tuple[Any, ...]:
    _require(tuple, space, shared_memory)
    choices, *memories = shared_memory
    values = [
        values_by_row(part, read_from_shared_memory(part, memory, n=n), n)
        for part, memory in zip(space.spaces, memories, strict=True)
    ]
    return tuple(
        (choice, take_value(space.spaces[choice], values[choice], index))
        for index, choice in enumerate(_read_rows(_rows(space, choices).space, choices, n))
    )


# ------------------------------------------------------------------------------------------------ values from a batch


def values_by_row(space: Space[Any], batch: Any, n: int) -> Any:
    """A batch of ``n`` values of ``space`` in a form that ``take_value`` can index by row. Arrays are not copied."""
    return _map_leaves(space, batch, lambda leaf, leaf_batch: _leaf_values(leaf, leaf_batch, n))


def take_value(space: Space[Any], values: Any, index: int) -> Any:
    """The value of row ``index`` in the result of ``values_by_row``."""
    return _map_leaves(space, values, lambda _, leaf_values: leaf_values[index])


def take_batch(space: Space[Any], batch: Any, rows: RowIndices, n: int) -> Any:
    """A batch of some of the ``n`` values, of the same type as the batch of all. Rows of arrays are copied, other
    values are not."""
    return _map_leaves(space, batch, lambda leaf, leaf_batch: _take_leaf(leaf, leaf_batch, rows, n))


def _map_leaves(space: Space[Any], batch: Any, function: Callable[[Space[Any], Any], Any]) -> Any:
    """Apply ``function`` to every subspace that is not a Dict or Tuple, together with its part of the batch."""
    if isinstance(space, Dict):
        return {key: _map_leaves(part, batch[key], function) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_map_leaves(part, item, function) for part, item in zip(space.spaces, batch, strict=True))
    return function(space, batch)


def _take_leaf(space: Space[Any], batch: Any, rows: RowIndices, n: int) -> Any:
    values = _leaf_values(space, batch, n)
    if isinstance(values, np.ndarray):
        return values[np.asarray(rows, np.intp)]
    selected = [values[row] for row in rows]
    if values is batch and isinstance(batch, tuple | list):
        return tuple(selected) if isinstance(batch, tuple) else selected
    out: Any = create_empty_array(space, n=len(selected))
    taken: Any = concatenate(space, selected, out)
    if not isinstance(taken, type(batch)):
        raise CustomSpaceError(
            f"a batch of all values of {type(space)} is a {type(batch).__name__}, but a batch of some of them would be "
            f"a {type(taken).__name__}; register `create_empty_array` and `concatenate` of `gymnasium.vector.utils` "
            "for the space"
        )
    return taken


def _leaf_values(space: Space[Any], batch: Any, n: int) -> Any:
    """The values of a batch in a form that can be indexed by row."""
    if isinstance(batch, np.ndarray):
        return batch
    if batch_space.dispatch(type(space)) is not _BATCH_AS_TUPLES:
        values: Any = list(iterate(batch_space(space, n), batch))
    else:  # batch_space is not registered for this space
        values = batch
    if isinstance(values, Mapping) or not isinstance(values, Sized) or len(values) != n:
        raise CustomSpaceError(
            f"expected a batch of {type(space)} to be an array, a tuple or a list of its {n} values, found "
            f"{type(batch).__name__}; register `batch_space` and `iterate` of `gymnasium.vector.utils` for the space"
        )
    return values


_BATCH_AS_TUPLES = batch_space.dispatch(Space)
"""Gymnasium's default for spaces that are not registered: a batch is a tuple of single values."""


# --------------------------------------------------------------------------------------------------------------- write


@singledispatch
def write_to_shared_memory(space: Space[Any], index: int, value: Any, shared_memory: Any) -> None:  # noqa: ARG001
    """Store one value in row ``index``. A value that does not fit the space is an error; see ``Column.write``.

    In a Dict or Tuple, each value is checked just before it is stored: the functions of a custom space check and store
    in one call. So an error may leave earlier values of the Dict or Tuple stored.
    """
    raise unsupported_space_error(space, "write_to_shared_memory")


def _write_rows(space: Space[Any], index: int, value: Any, shared_memory: SharedRows) -> None:
    _rows(space, shared_memory).verified_column(space).write(_row(index), value)


@write_to_shared_memory.register(Dict)
def _write_dict(space: Dict, index: int, value: Any, shared_memory: dict[Any, Any]) -> None:
    _require(dict, space, shared_memory)
    check_keys(value, space.spaces.keys(), _where(shared_memory))
    for key, part in space.spaces.items():
        write_to_shared_memory(part, index, value[key], shared_memory[key])


@write_to_shared_memory.register(Tuple)
def _write_tuple(space: Tuple[Any], index: int, value: Any, shared_memory: tuple[Any, ...]) -> None:
    _require(tuple, space, shared_memory)
    check_length(value, len(space.spaces), _where(shared_memory))
    for part, item, memory in zip(space.spaces, value, shared_memory, strict=True):
        write_to_shared_memory(part, index, item, memory)


@write_to_shared_memory.register(OneOf)
def _write_one_of(space: OneOf[Any], index: int, value: Any, shared_memory: tuple[Any, ...]) -> None:
    _require(tuple, space, shared_memory)
    choices = _rows(space, shared_memory[0])
    choice, item = check_choice(value, len(space.spaces), _where(shared_memory))
    # The choice is stored last: if the value is invalid, the row keeps its old content.
    write_to_shared_memory(space.spaces[choice], index, item, shared_memory[1 + choice])
    choices.column.write(_row(index), choice)


# -------------------------------------------------------------------------------------------------------------- checks


def _row(index: Any) -> int:
    """``index`` as an int. Numpy would take a bool or an array as a mask or a list of rows, and write several."""
    if type(index) is int:
        return index
    try:
        return int(index) if isinstance(index, bool | np.bool_) else operator.index(index)
    except TypeError:
        raise TypeError(f"index must be the number of a row, found {index!r}") from None


def _rows(space: Space[Any], memory: Any) -> SharedRows:
    if not isinstance(memory, SharedRows):
        raise _wrong_memory(space, memory)
    return memory


def _require(kind: type, space: Space[Any], memory: Any) -> None:
    if not isinstance(memory, kind):
        raise _wrong_memory(space, memory)


def _wrong_memory(space: Space[Any], memory: Any) -> TypeError:
    return TypeError(
        f"expected memory that memlane's create_shared_memory made for {space}, found {type(memory).__name__}; "
        "use Gymnasium's functions for memory that Gymnasium created"
    )


def _where(shared_memory: Any) -> str:
    """The path of a dict or tuple of memory, derived from the paths of its leaves."""
    return _path(shared_memory) or ROOT_NAME


def _path(memory: Any) -> str | None:
    if isinstance(memory, SharedRows):
        return memory.column.path
    if isinstance(memory, (dict, tuple)):
        for part in memory.values() if isinstance(memory, dict) else memory:
            if (below := _path(part)) is not None:
                return below.rpartition(".")[0]
    return None


for _leaf in _LEAVES:
    create_shared_memory.register(_leaf, _create_rows)
    read_from_shared_memory.register(_leaf, _read_rows)
    write_to_shared_memory.register(_leaf, _write_rows)
