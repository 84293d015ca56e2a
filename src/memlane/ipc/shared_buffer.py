"""SharedBufferBase: what buffers of transitions have in common, whatever learner they feed.

Storage is shared memory on the CPU; batches go to ``device`` when they are drawn, as one copy of one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from memlane.lanes.replay import Replay


class Count:
    """A number that lives elsewhere, seen as an array of one: ``buffer.ptr[0]``."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> int:
        if index not in (0, -1):
            raise IndexError(f"there is one count, at [0]; found [{index}]")
        return self._read()

    def __len__(self) -> int:
        return 1

    def __int__(self) -> int:
        return self._read()

    def __repr__(self) -> str:
        return f"[{self._read()}]"


class SharedBufferBase(ABC):
    """A replay with a device that its batches go to. Pass it to other processes as it is."""

    replay: Replay
    device: str

    def __init__(self, replay: Replay, device: str) -> None:
        self.replay = replay
        self.device = str(device)

    @property
    def capacity(self) -> int:
        return self.replay.capacity

    @property
    def ptr(self) -> Count:
        """``ptr[0]``: rows added since the start."""
        return Count(lambda: self.replay.added)

    @property
    def size(self) -> Count:
        """``size[0]``: rows that are stored."""
        return Count(lambda: self.replay.size)

    @property
    def nbytes(self) -> int:
        """What the buffer takes from the machine."""
        return self.replay.nbytes

    def __len__(self) -> int:
        return self.replay.size

    @abstractmethod
    def sample(self, batch_size: int) -> dict[str, Any]:
        """A batch on ``device``."""

    def close(self) -> None:
        """Let the memory go; it is gone when the last process lets go. Again is harmless."""
        self.replay.close()

    cleanup = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
