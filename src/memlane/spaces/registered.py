"""Columns of spaces that users registered with the shared-memory functions.

A worker that unpickles such a space may never import the script that registered it, so the function that writes goes
with the column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.spaces import Space

from memlane.spaces.column import SinglesColumn
from memlane.spaces.shared_memory import create_shared_memory, read_from_shared_memory, write_to_shared_memory

_OURS = dict(write_to_shared_memory.registry)


class RegisteredColumn(SinglesColumn):
    """Memory that ``create_shared_memory`` made for a space with custom ones in it. Its values are checked by whoever
    wrote the functions."""

    def __init__(self, space: Space[Any], memory: Any, n: int) -> None:
        super().__init__(space, n, "")
        self._memory = memory

    @classmethod
    def create(cls, space: Space[Any], n: int) -> RegisteredColumn:
        """``CustomSpaceError`` if nobody registered the space."""
        return cls(space, create_shared_memory(space, n), n)

    def convert(self, value: Any) -> Any:
        return value

    def store(self, index: int, content: Any) -> None:
        write_to_shared_memory(self.space, index, content, self._memory)

    def load(self, index: int, copy: bool) -> Any:
        del copy
        return read_from_shared_memory(self.space, self._memory, self.n)[index]

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        batch = read_from_shared_memory(self.space, self._memory, self.n)
        whole = begin == 0 and end == self.n
        return _copied(batch if whole else batch[begin:end], copy)

    def __reduce__(self) -> tuple[object, ...]:
        writers = {
            kind: write for kind, write in write_to_shared_memory.registry.items() if _OURS.get(kind) is not write
        }
        return _rebuild, (writers, self.space, self._memory, self.n)


def _copied(batch: Any, copy: bool) -> Any:
    if isinstance(batch, dict):
        return {key: _copied(value, copy) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_copied(value, copy) for value in batch)
    return batch.copy() if copy and hasattr(batch, "copy") else batch


def _rebuild(writers: dict[type, Callable[..., Any]], space: Space[Any], memory: Any, n: int) -> RegisteredColumn:
    for kind, write in writers.items():
        if write_to_shared_memory.registry.get(kind) is None:
            write_to_shared_memory.register(kind)(write)
    return RegisteredColumn(space, memory, n)
