"""Base class for device-adaptive shared memory buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from memlane.lanes.replay import Replay


class Count:
    """A count that is read on access, as an array of length 1: ``buffer.ptr[0]``."""

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
    """A ``Replay`` in shared memory on the CPU whose batches are copied to ``device``, each in one copy.

    Pass it to other processes as a ``Process`` argument.
    """

    replay: Replay
    device: str

    def __init__(self, replay: Replay, device: str) -> None:
        self.replay = replay
        self.device = str(device)

    @property
    def capacity(self) -> int:
        """Largest number of rows stored."""
        return self.replay.capacity

    @property
    def ptr(self) -> Count:
        """``ptr[0]`` is the number of rows added since the buffer was created."""
        return Count(lambda: self.replay.added)

    @property
    def size(self) -> Count:
        """``size[0]`` is the number of rows stored now."""
        return Count(lambda: self.replay.size)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the buffer uses."""
        return self.replay.nbytes

    def __len__(self) -> int:
        return self.replay.size

    @abstractmethod
    def sample(self, batch_size: int) -> dict[str, Any]:
        """Return a batch on ``device``."""

    def close(self) -> None:
        """Release this process's mapping. The memory is freed when the last process has closed the buffer.

        Calling it again has no effect.
        """
        self.replay.close()

    cleanup = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
