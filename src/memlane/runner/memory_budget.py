"""Memory budget: compare the memory that lanes need with the memory that is free, before allocating any.

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
import warnings
from dataclasses import dataclass

from memlane.core import BudgetError, Layout, names
from memlane.core.arguments import as_count
from memlane.core.header import Header
from memlane.core.memory import FreeMemory, cgroup_memory, directory_space, format_bytes, machine_memory


class BudgetWarning(RuntimeWarning):
    """The lanes use most of the free memory. Not a ``ResourceWarning``, which Python hides by default."""


@dataclass(frozen=True, slots=True)
class Item:
    """One lane of a budget."""

    name: str
    """Name of the lane in messages."""
    nbytes: int
    """Bytes of its segment."""
    lower: str
    """The setting to lower, with its value."""
    named: bool
    """Whether it is a named segment, which takes memory in /dev/shm."""


class MemoryBudget:
    """The memory that a set of lanes needs. Call ``add`` for every lane, then ``check``.

    ``check`` warns (``BudgetWarning``) above the share ``warn_at`` of the free memory and raises ``BudgetError`` above
    the share ``refuse_at``.
    """

    def __init__(self, *, warn_at: float = 0.6, refuse_at: float = 0.9) -> None:
        if not 0 < warn_at <= refuse_at <= 1:
            raise ValueError(f"expected 0 < warn_at <= refuse_at <= 1, found {warn_at=} and {refuse_at=}")
        self.warn_at = warn_at
        self.refuse_at = refuse_at
        self.items: list[Item] = []

    def add(self, name: str, size: Layout | int, *, lower: str = "", named: bool = False) -> None:
        """Add a lane: the layout of its segment (``Ring.segment_layout(...)``), or a number of bytes.

        ``lower`` is the setting that determines its size, with its value, for the error message. A ``named`` lane, as
        ``RolloutRingBuffer`` and ``SharedWeightSync`` are, must also fit into the file system at /dev/shm.
        """
        layout_bytes = Header.new(size).total_bytes if isinstance(size, Layout) else None
        nbytes = as_count(f"the number of bytes of {name}", size, 0) if layout_bytes is None else layout_bytes
        self.items.append(Item(name, nbytes, lower, named))

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes."""
        return sum(item.nbytes for item in self.items)

    def check(self, *limits: FreeMemory) -> None:
        """Compare with ``limits``; by default with the free memory of the machine and of the control group, and for
        named lanes with the free space in /dev/shm."""
        if not self.items:
            return
        memory, items = max([(limit, self.items) for limit in limits] or self._limits(), key=lambda pair: _share(*pair))
        if _share(memory, items) > self.refuse_at:
            raise BudgetError(_describe_excess(memory, items, self.refuse_at))
        if _share(memory, items) > self.warn_at:
            warnings.warn(_describe_excess(memory, items, self.warn_at), BudgetWarning, stacklevel=2)

    def _limits(self) -> list[tuple[FreeMemory, list[Item]]]:
        """Return the memory limits of this process, each with the lanes that count against it."""
        limits = [(memory, self.items) for memory in (machine_memory(), cgroup_memory()) if memory is not None]
        if named := [item for item in self.items if item.named]:
            limits.append((directory_space(names.directory()), named))
        return limits

    def __str__(self) -> str:
        width = max((len(item.name) for item in self.items), default=0)
        lines = [f"  {item.name:<{width}}  {format_bytes(item.nbytes)}" for item in self.items]
        return "\n".join([f"memory needed: {format_bytes(self.nbytes)}", *lines])


def _largest(items: list[Item]) -> Item:
    return max(items, key=lambda item: item.nbytes)


def _share(memory: FreeMemory, items: list[Item]) -> float:
    nbytes = sum(item.nbytes for item in items)
    return nbytes / memory.free if memory.free else math.inf


def _describe_excess(memory: FreeMemory, items: list[Item], share: float) -> str:
    nbytes, largest = sum(item.nbytes for item in items), _largest(items)
    advice = f"lower {largest.lower}" if largest.lower else f"make {largest.name} smaller"
    return (
        f"the lanes need {format_bytes(nbytes)} ({nbytes} bytes), more than {share:.0%} of the "
        f"{format_bytes(memory.free)} that {memory.limit} has free; "
        f"the largest is {largest.name} with {format_bytes(largest.nbytes)}: {advice}"
    )
