"""Columns of spaces that users registered with the shared-memory functions.

A worker that unpickles such a space may never import the script that registered it, so the functions that write go with
the column; and those that read, as the last observation of an environment that failed is looked up in the worker.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from gymnasium.spaces import Space
from gymnasium.vector.utils import batch_space, iterate

from memlane.spaces.capacity import Capacities
from memlane.spaces.column import Rows, SinglesColumn
from memlane.spaces.shared_memory import (
    batch_of,
    by_row,
    create_with_capacity,
    read_from_shared_memory,
    value_at,
    write_to_shared_memory,
)

_TRAVELLING: dict[str, Any] = {
    "write": write_to_shared_memory,
    "read": read_from_shared_memory,
    "batch": batch_space,
    "iterate": iterate,
}
"""What a worker needs; the last two where a batch is neither an array nor a tuple."""

Registered = dict[str, dict[type, Callable[..., Any]]]


class RegisteredColumn(SinglesColumn):
    """Memory that ``create_shared_memory`` made for a space with custom ones in it. Its values are checked by whoever
    wrote the functions. Single values and batches of some rows are taken out of the batch that is read: see
    ``shared_memory`` for what a custom space has to register for that."""

    def __init__(self, space: Space[Any], memory: Any, n: int) -> None:
        super().__init__(space, n, "")
        self._memory = memory

    @classmethod
    def create(cls, space: Space[Any], n: int, capacity: Capacities = None) -> RegisteredColumn:
        """``CustomSpaceError`` if nobody registered the space."""
        return cls(space, create_with_capacity(space, n, mp, capacity), n)

    def convert(self, value: Any) -> Any:
        return value

    def store(self, index: int, content: Any) -> None:
        write_to_shared_memory(self.space, index, content, self._memory)

    def load(self, index: int, copy: bool) -> Any:
        value = value_at(self.space, by_row(self.space, self._all(), self.n), index)
        return deepcopy(value) if copy else value

    def load_each(self) -> list[Any]:
        """All values one by one, as copies. The batch is read once, where ``load`` reads it for each."""
        values = by_row(self.space, deepcopy(self._all()), self.n)
        return [value_at(self.space, values, index) for index in range(self.n)]

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        """Views only of all rows: a part is a copy whatever was asked for."""
        if (begin, end) != (0, self.n):
            return self.load_rows(range(begin, end))
        batch = self._all()
        return deepcopy(batch) if copy else batch

    def load_rows(self, rows: Rows) -> Any:
        return deepcopy(batch_of(self.space, self._all(), rows, self.n))

    def _all(self) -> Any:
        return read_from_shared_memory(self.space, self._memory, self.n)

    def __reduce__(self) -> tuple[object, ...]:
        registered = {name: _of_users(function) for name, function in _TRAVELLING.items()}
        return _rebuild, (registered, self.space, self._memory, self.n)


def _of_users(function: Any) -> dict[type, Callable[..., Any]]:
    """What users have registered: all but its own module's functions for the spaces of Gymnasium."""
    return {
        kind: registered
        for kind, registered in function.registry.items()
        if getattr(registered, "__module__", None) != function.__module__
        or kind.__module__.partition(".")[0] not in ("gymnasium", "builtins")
    }


def _rebuild(registered: Registered, space: Space[Any], memory: Any, n: int) -> RegisteredColumn:
    for name, functions in registered.items():
        here = _TRAVELLING[name]
        known = _of_users(here)
        for kind, function in functions.items():
            if kind not in known:
                here.register(kind, function)
    return RegisteredColumn(space, memory, n)
