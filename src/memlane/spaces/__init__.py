"""Gymnasium spaces in shared memory.

``create_shared_memory``, ``read_from_shared_memory`` and ``write_to_shared_memory`` have the interface of
``gymnasium.vector.utils``. ``fields_of`` and ``column_of`` are the layer below: the fields of a layout that hold values
of a space, and a ``Column`` that writes and reads the values. ``Capacity`` declares the largest graph or sequence.
"""

from memlane.spaces import arrays as arrays
from memlane.spaces import dynamic as dynamic
from memlane.spaces import nested as nested
from memlane.spaces import text as text
from memlane.spaces.capacity import Capacity
from memlane.spaces.column import Column, column_of, fields_of
from memlane.spaces.shared_memory import create_shared_memory, read_from_shared_memory, write_to_shared_memory

__all__ = [
    "Capacity",
    "Column",
    "column_of",
    "create_shared_memory",
    "fields_of",
    "read_from_shared_memory",
    "write_to_shared_memory",
]


def __dir__() -> list[str]:
    return sorted(__all__)
