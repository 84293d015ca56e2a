"""Gymnasium's three functions for the observations of vector environments, over memory that needs no lock and no name.

They have the signatures of ``gymnasium.vector.utils`` and dispatch on the space's class: a custom space is registered
with ``create_shared_memory.register`` and its two sisters just as there, and then also works inside other spaces. What
is different: values that do not fit are errors, texts come back as they were, and graphs and sequences work when their
capacity is declared.

What ``read_from_shared_memory`` returns for a custom space is a batch. Where single values or a batch of some rows are
taken out of it (in a OneOf; for ``recv`` and restarts of a vector environment), that takes, of
``gymnasium.vector.utils``:

    a batch that is                          registered for the space
    an array with a row for each value       nothing
    a tuple or a list of the values          nothing
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

from memlane.core.segment import Segment
from memlane.spaces.capacity import Capacities, split
from memlane.spaces.column import Column, Rows, column_of, fields_of, unsupported
from memlane.spaces.nested import check_choice, check_keys, check_length, parts_of
from memlane.spaces.paths import BARE, join

_LEAVES = (Box, Discrete, MultiDiscrete, MultiBinary, Text, Graph, Sequence)


class SharedRows:
    """``n`` values of one space in an anonymous segment. Pickles as a segment does: the copy has the same memory."""

    __slots__ = ("agreed", "column", "path", "segment", "space")

    def __init__(self, space: Space[Any], segment: Segment, path: str = "") -> None:
        self.space = self.agreed = space
        self.segment = segment
        self.path = path
        self.column = column_of(space, segment.views(), path)

    def column_for(self, space: Space[Any]) -> Column:
        """The column, for those who mean the same space."""
        # Two equal Boxes take 40 us to compare, and a worker comes with the same copy at every step.
        if space is not self.agreed:
            if space != self.space:
                raise ValueError(
                    f"at {self.column.path!r}: the memory is for values of {self.space}, found {space}; pass the space "
                    "that it was created for"
                )
            self.agreed = space
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
    """Memory for ``n`` values of ``space``, zeroed, which other processes get as an argument when they are started.

    Dicts and tuples of memory have the form of the space. ``ctx`` is accepted for Gymnasium's sake: the memory goes to
    children of every start method. ``path`` is where in an outer space this one is, for error messages.
    """
    raise unsupported(space, "create_shared_memory")


def _create_rows(
    space: Space[Any],
    n: int = 1,
    ctx: Any = mp,  # noqa: ARG001
    *,
    capacity: Capacities = None,
    path: str = "",
) -> SharedRows:
    return SharedRows(space, Segment.create(fields_of(space, n, capacity, path)), path)


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
    choices = _create_rows(Discrete(len(space.spaces)), n, ctx, path=join(path, "choice"))
    return (choices, *_create_parts(space, n, ctx, capacity, path))


def _create_parts(
    space: Dict | Tuple[Any] | OneOf[Any], n: int, ctx: Any, capacity: Capacities, path: str
) -> list[Any]:
    parts = parts_of(space)
    return [
        create_with_capacity(part, n, ctx, declared, join(path, name))
        for (name, part), declared in zip(parts.items(), split(capacity, parts, path or BARE), strict=True)
    ]


def create_with_capacity(space: Space[Any], n: int, ctx: Any, capacity: Capacities, path: str = "") -> Any:
    """``create_shared_memory`` of a space that may be a custom one, whose function has Gymnasium's signature. It gets
    the capacity if it has a parameter of that name."""
    function = create_shared_memory.dispatch(type(space))
    if function in _OURS:
        return function(space, n=n, ctx=ctx, capacity=capacity, path=path)
    if "capacity" in inspect.signature(function).parameters:
        return function(space, n=n, ctx=ctx, capacity=capacity)
    # One for all is for those whom it concerns; one by path is for this space, and would be lost here.
    if isinstance(capacity, Mapping) and capacity:
        raise KeyError(
            f"at {path or BARE!r}: a capacity is declared, but the function that was registered with "
            f"`create_shared_memory` for {type(space)} has no parameter `capacity`; declared is {dict(capacity)}"
        )
    return function(space, n=n, ctx=ctx)


_OURS: set[Callable[..., Any]] = {
    create_shared_memory.dispatch(object),
    _create_rows,
    _create_dict,
    _create_tuple,
    _create_one_of,
}


# ---------------------------------------------------------------------------------------------------------------- read


@singledispatch
def read_from_shared_memory(space: Space[Any], shared_memory: Any, n: int = 1) -> Any:  # noqa: ARG001
    """All ``n`` values as one batch. Arrays share the memory: they change when somebody writes."""
    raise unsupported(space, "read_from_shared_memory")


def _read_rows(space: Space[Any], shared_memory: SharedRows, n: int = 1) -> Any:
    column = _rows(space, shared_memory).column_for(space)
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
        by_row(part, read_from_shared_memory(part, memory, n=n), n)
        for part, memory in zip(space.spaces, memories, strict=True)
    ]
    return tuple(
        (choice, value_at(space.spaces[choice], values[choice], index))
        for index, choice in enumerate(_read_rows(_rows(space, choices).space, choices, n))
    )


# ----------------------------------------------------------------------------------------------- a batch and its values


def by_row(space: Space[Any], batch: Any, n: int) -> Any:
    """A batch of ``n`` values of ``space``, made ready for ``value_at``. Arrays are those of the batch."""
    return _leaf_by_leaf(space, batch, lambda leaf, one: _singles(leaf, one, n))


def value_at(space: Space[Any], values: Any, index: int) -> Any:
    """One value, of what ``by_row`` has made."""
    return _leaf_by_leaf(space, values, lambda _, singles: singles[index])


def batch_of(space: Space[Any], batch: Any, rows: Rows, n: int) -> Any:
    """A batch of some of the ``n`` values, in the form that the batch of all has. Its values are no copies, unless they
    are rows of arrays."""
    return _leaf_by_leaf(space, batch, lambda leaf, one: _some(leaf, one, rows, n))


def _leaf_by_leaf(space: Space[Any], batch: Any, do: Callable[[Space[Any], Any], Any]) -> Any:
    """``do`` with every space that is no Dict or Tuple, and what the batch has for it."""
    if isinstance(space, Dict):
        return {key: _leaf_by_leaf(part, batch[key], do) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_leaf_by_leaf(part, one, do) for part, one in zip(space.spaces, batch, strict=True))
    return do(space, batch)


def _some(space: Space[Any], batch: Any, rows: Rows, n: int) -> Any:
    singles = _singles(space, batch, n)
    if isinstance(singles, np.ndarray):
        return singles[np.asarray(rows, np.intp)]
    chosen = [singles[row] for row in rows]
    if singles is batch and isinstance(batch, tuple | list):
        return tuple(chosen) if isinstance(batch, tuple) else chosen
    room: Any = create_empty_array(space, n=len(chosen))
    some: Any = concatenate(space, chosen, room)
    if not isinstance(some, type(batch)):
        raise CustomSpaceError(
            f"a batch of all values of {type(space)} is a {type(batch).__name__}, and one of some of them would be a "
            f"{type(some).__name__}; register `create_empty_array` and `concatenate` of `gymnasium.vector.utils` for it"
        )
    return some


def _singles(space: Space[Any], batch: Any, n: int) -> Any:
    """The values of a batch, to be found by their row."""
    if isinstance(batch, np.ndarray):
        return batch
    if batch_space.dispatch(type(space)) is not _AS_TUPLES:
        singles: Any = list(iterate(batch_space(space, n), batch))
    else:  # nobody has registered how it is batched
        singles = batch
    if isinstance(singles, Mapping) or not isinstance(singles, Sized) or len(singles) != n:
        raise CustomSpaceError(
            f"expected a batch of {type(space)} to have its {n} values one after the other, found "
            f"{type(batch).__name__}; register `batch_space` and `iterate` of `gymnasium.vector.utils` for it"
        )
    return singles


_AS_TUPLES = batch_space.dispatch(Space)
"""How Gymnasium batches what it does not know: as tuples of single values."""


# --------------------------------------------------------------------------------------------------------------- write


@singledispatch
def write_to_shared_memory(space: Space[Any], index: int, value: Any, shared_memory: Any) -> None:  # noqa: ARG001
    """Store one value at ``index``. What does not belong to the space is an error; see ``Column.write``.

    Each part of a Dict or a Tuple is checked just before it is stored, as custom spaces know no other way.
    """
    raise unsupported(space, "write_to_shared_memory")


def _write_rows(space: Space[Any], index: int, value: Any, shared_memory: SharedRows) -> None:
    _rows(space, shared_memory).column_for(space).write(_row(index), value)


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
    for part, one, memory in zip(space.spaces, value, shared_memory, strict=True):
        write_to_shared_memory(part, index, one, memory)


@write_to_shared_memory.register(OneOf)
def _write_one_of(space: OneOf[Any], index: int, value: Any, shared_memory: tuple[Any, ...]) -> None:
    _require(tuple, space, shared_memory)
    choices = _rows(space, shared_memory[0])
    choice, one = check_choice(value, len(space.spaces), _where(shared_memory))
    # The choice comes last: if the value is refused, the row still holds what it held.
    write_to_shared_memory(space.spaces[choice], index, one, shared_memory[1 + choice])
    choices.column.write(_row(index), choice)


# -------------------------------------------------------------------------------------------------------------- checks


def _row(index: Any) -> int:
    """A plain number: a bool or an array would be numpy's mask or list of rows, and write all, none or several."""
    if type(index) is int:
        return index
    try:
        return int(index) if isinstance(index, bool | np.bool_) else operator.index(index)
    except TypeError:
        raise TypeError(f"index must be the number of a row, found {index!r}") from None


def _rows(space: Space[Any], memory: Any) -> SharedRows:
    if not isinstance(memory, SharedRows):
        raise _foreign(space, memory)
    return memory


def _require(kind: type, space: Space[Any], memory: Any) -> None:
    if not isinstance(memory, kind):
        raise _foreign(space, memory)


def _foreign(space: Space[Any], memory: Any) -> TypeError:
    return TypeError(
        f"expected memory that memlane's create_shared_memory made for {space}, found {type(memory).__name__}; "
        "Gymnasium's goes with Gymnasium's functions"
    )


def _where(shared_memory: Any) -> str:
    """The path of a dict or a tuple of memories. It has none of its own, but its leaves know theirs."""
    return _path(shared_memory) or BARE


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
