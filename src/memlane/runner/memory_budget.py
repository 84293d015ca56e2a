"""Memory budget: what the lanes will take, compared with what there is, before any of it is allocated.

>>> from memlane.core import Layout
>>> budget = MemoryBudget()
>>> budget.add("rollouts", Layout({"obs": ("float32", (4096, 24, 48))}), lower="num_envs=4096 or num_slots=4")
>>> budget.add("weights", 12_000_000)
>>> print(budget)
memory needed: 29.4 MiB
  rollouts  18.0 MiB
  weights   11.4 MiB
>>> budget.check()
"""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import dataclass

from memlane.core import BudgetError, Layout, names
from memlane.core.header import Header
from memlane.core.memory import FreeMemory, cgroup_memory, directory_space, format_bytes, machine_memory


class BudgetWarning(RuntimeWarning):
    """The lanes fit, but not by much. (No ``ResourceWarning``: Python does not show those unless asked.)"""


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    nbytes: int
    lower: str
    named: bool


class MemoryBudget:
    """Add every lane, then ``check``: a warning above the share ``warn_at`` of what is free, ``BudgetError`` above
    ``refuse_at``."""

    def __init__(self, *, warn_at: float = 0.6, refuse_at: float = 0.9) -> None:
        if not 0 < warn_at <= refuse_at <= 1:
            raise ValueError(f"expected 0 < warn_at <= refuse_at <= 1, found {warn_at=} and {refuse_at=}")
        self.warn_at = warn_at
        self.refuse_at = refuse_at
        self.items: list[Item] = []

    def add(self, name: str, size: Layout | int, *, lower: str = "", named: bool = False) -> None:
        """A lane: the layout of its segment (``Ring.segment_layout(...)``), or a number of bytes. ``lower`` names the
        setting that decides its size, with its value. A ``named`` lane, as ``RolloutRingBuffer`` and
        ``SharedWeightSync`` are, must fit into the file system of the names, /dev/shm, too."""
        nbytes = Header.new(size).total_bytes if isinstance(size, Layout) else operator.index(size)
        if nbytes < 0:
            raise ValueError(f"{name} cannot take {nbytes} bytes")
        self.items.append(Item(name, nbytes, lower, named))

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def check(self, *rooms: FreeMemory) -> None:
        """Compare with ``rooms``; without any, with what the machine and the control group have free, and the named
        lanes with what the file system of their names has."""
        if not self.items:
            return
        room, items = max([(room, self.items) for room in rooms] or self._found(), key=lambda pair: _share(*pair))
        if _share(room, items) > self.refuse_at:
            raise BudgetError(_complaint(room, items, self.refuse_at))
        if _share(room, items) > self.warn_at:
            warnings.warn(_complaint(room, items, self.warn_at), BudgetWarning, stacklevel=2)

    def _found(self) -> list[tuple[FreeMemory, list[Item]]]:
        """What there is, each with the lanes that take from it."""
        found = [(room, self.items) for room in (machine_memory(), cgroup_memory()) if room is not None]
        if named := [item for item in self.items if item.named]:
            found.append((directory_space(names.directory()), named))
        return found

    def __str__(self) -> str:
        width = max((len(item.name) for item in self.items), default=0)
        lines = [f"  {item.name:<{width}}  {format_bytes(item.nbytes)}" for item in self.items]
        return "\n".join([f"memory needed: {format_bytes(self.nbytes)}", *lines])


def _largest(items: list[Item]) -> Item:
    return max(items, key=lambda item: item.nbytes)


def _share(room: FreeMemory, items: list[Item]) -> float:
    nbytes = sum(item.nbytes for item in items)
    return nbytes / room.free if room.free else math.inf


def _complaint(room: FreeMemory, items: list[Item], share: float) -> str:
    nbytes, largest = sum(item.nbytes for item in items), _largest(items)
    advice = f"lower {largest.lower}" if largest.lower else f"make {largest.name} smaller"
    return (
        f"the lanes need {format_bytes(nbytes)} ({nbytes} bytes), more than {share:.0%} of the "
        f"{format_bytes(room.free)} that {room.limit} has free; "
        f"the largest is {largest.name} with {format_bytes(largest.nbytes)}: {advice}"
    )
