"""Columns of custom spaces that users have registered with the shared-memory functions.

A worker that unpickles such a space may not import the script that registered it. So a pickled column contains the
registered functions: those that write, and those that read, because a worker reads the last observation of an
environment that failed.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from gymnasium.spaces import Space
from gymnasium.vector.utils import batch_space, iterate

from memlane.spaces.capacity import Capacities
from memlane.spaces.column import PerRowColumn, RowIndices
from memlane.spaces.shared_memory import (
    create_with_capacity,
    read_from_shared_memory,
    take_batch,
    take_value,
    values_by_row,
    write_to_shared_memory,
)

_PICKLED_REGISTRIES: dict[str, Any] = {
    "write": write_to_shared_memory,
    "read": read_from_shared_memory,
    "batch": batch_space,
    "iterate": iterate,
}
"""The functions whose registrations a worker needs; the last two if a batch is neither an array nor a tuple."""

Registrations = dict[str, dict[type, Callable[..., Any]]]


class RegisteredColumn(PerRowColumn):
    """A column over the memory of ``create_shared_memory``, for a space that is or contains a custom one.

    The registered functions check the values. Single values and batches of some rows are taken from the batch of all
    rows; see ``shared_memory`` for what a custom space must register for that.
    """

    def __init__(self, space: Space[Any], memory: Any, n: int) -> None:
        super().__init__(space, n, "")
        self._memory = memory

    @classmethod
    def create(cls, space: Space[Any], n: int, capacity: Capacities = None) -> RegisteredColumn:
        """Create the memory and its column. Raises ``CustomSpaceError`` if a space is not registered."""
        return cls(space, create_with_capacity(space, n, mp, capacity), n)

    def convert(self, value: Any) -> Any:
        return value

    def store(self, index: int, content: Any) -> None:
        write_to_shared_memory(self.space, index, content, self._memory)

    def load(self, index: int, copy: bool) -> Any:
        value = take_value(self.space, values_by_row(self.space, self._read_all(), self.n), index)
        return deepcopy(value) if copy else value

    def read_each(self) -> list[Any]:
        # The batch is read once, while ``load`` reads it on each call.
        values = values_by_row(self.space, deepcopy(self._read_all()), self.n)
        return [take_value(self.space, values, index) for index in range(self.n)]

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        """With ``copy=False``, a batch of all rows is a view; a batch of some rows is always a copy."""
        if (begin, end) != (0, self.n):
            return self.load_rows(range(begin, end))
        batch = self._read_all()
        return deepcopy(batch) if copy else batch

    def load_rows(self, rows: RowIndices) -> Any:
        return deepcopy(take_batch(self.space, self._read_all(), rows, self.n))

    def _read_all(self) -> Any:
        return read_from_shared_memory(self.space, self._memory, self.n)

    def __reduce__(self) -> tuple[object, ...]:
        registrations = {name: _user_registrations(function) for name, function in _PICKLED_REGISTRIES.items()}
        return _unpickle, (registrations, self.space, self._memory, self.n)


def _user_registrations(function: Any) -> dict[type, Callable[..., Any]]:
    """The registrations of users: all except those of the defining module for Gymnasium's own spaces."""
    return {
        space_class: registered
        for space_class, registered in function.registry.items()
        if getattr(registered, "__module__", None) != function.__module__
        or space_class.__module__.partition(".")[0] not in ("gymnasium", "builtins")
    }


def _unpickle(registrations: Registrations, space: Space[Any], memory: Any, n: int) -> RegisteredColumn:
    for name, functions in registrations.items():
        registry = _PICKLED_REGISTRIES[name]
        known = _user_registrations(registry)
        for space_class, function in functions.items():
            if space_class not in known:
                registry.register(space_class, function)
    return RegisteredColumn(space, memory, n)
