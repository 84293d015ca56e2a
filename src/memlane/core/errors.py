"""What can go wrong. Every error is also the built-in that Python programmers would catch for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlane.core.liveness import Peer


class MemlaneError(Exception):
    """The root of all errors that memlane raises on purpose."""


class LayoutError(MemlaneError, ValueError):
    """A field cannot be placed in shared memory, or a description of fields makes no sense."""


class SegmentError(MemlaneError, ValueError):
    """A segment cannot be made or attached, or is not what it was expected to be."""


class SegmentClosed(SegmentError):
    """A segment, or something that lies in it, was used after ``close()``."""


class SegmentMissing(SegmentError, FileNotFoundError):
    """There is no segment by that name or at that path."""


class SegmentExists(SegmentError, FileExistsError):
    """There is a segment of a living owner by that name, or a file at that path."""


class BudgetError(MemlaneError, MemoryError):
    """The memory that was asked for is not there. Found before anything was allocated."""


class WaitTimeout(MemlaneError, TimeoutError):
    """What was waited for did not happen in time."""


class PeerDied(MemlaneError, ConnectionError):
    """A process that this one waited for is dead. ``peer`` is the one."""

    def __init__(self, message: str, *, peer: Peer | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class NothingToSample(MemlaneError, LookupError):
    """A replay holds no row that could be drawn."""


class StaleView(MemlaneError, ReferenceError):
    """A view of shared memory was used after its lease had ended."""


class StaleViewWarning(RuntimeWarning):
    """In debug mode: a lease ended while somebody still held arrays from it."""
