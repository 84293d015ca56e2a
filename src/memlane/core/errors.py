"""The errors that memlane raises. Each one is also the built-in error that Python code would catch in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlane.core.liveness import Peer


class MemlaneError(Exception):
    """The base class of memlane's errors. Catch it to handle all of them."""


class LayoutError(MemlaneError, ValueError):
    """Raised when a ``Layout`` is built from a field that shared memory cannot hold, or from invalid bytes.

    Typical causes are an object dtype, a string dtype without a length and a negative shape. The message names the
    field; change its dtype or shape.
    """


class SegmentError(MemlaneError, ValueError):
    """Raised when a segment cannot be created, mapped or attached, or is not what the caller expected.

    The message says what was expected and what was found. Its subclasses are the cases that a program can handle.
    """


class SegmentClosed(SegmentError):
    """Raised when a segment, or a lane, lease or signal in it, is used after ``close()``.

    Close it later, or attach to it again.
    """


class SegmentMissing(SegmentError, FileNotFoundError):
    """Raised by ``Segment.attach`` and on unpickling when the segment, its file or its directory does not exist.

    Check the name, and that the owner is still running and has not closed the segment.
    """


class SegmentExists(SegmentError, FileExistsError):
    """Raised by ``Segment.create`` when the name belongs to a running process, or the file exists.

    Attach to the existing segment, or choose another name.
    """


class BudgetError(MemlaneError, MemoryError):
    """Raised before allocation when there is not enough free memory or disk space.

    The message names the limit (machine, control group or file system) and the bytes that are free. Reduce the size,
    or free memory.
    """


class StartError(MemlaneError, RuntimeError):
    """Raised when a child process cannot be started, for example because a limit of the system is reached.

    The message names the limit and what to lower or raise. Nothing was started, or what was started has ended.
    """


class WaitTimeout(MemlaneError, TimeoutError):
    """Raised when a wait with a ``timeout`` ends before its condition is met.

    No state was changed. Wait again, or pass a longer timeout.
    """


class PeerDied(MemlaneError, ConnectionError):
    """Raised when a wait depends on a process that is dead, and by ``Peer.of`` for a pid that does not exist.

    The message says how the process ended, as far as this process can know. Restart the peer or stop.
    """

    peer: Peer | None
    """The dead process; None if it was never identified."""

    def __init__(self, message: str, *, peer: Peer | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class UsedAfterFork(MemlaneError, RuntimeError):
    """Raised in a forked child when it uses an object that belongs to the process that it was forked from.

    Such an object has child processes, threads, or a place in shared memory that only its creator may use. Create
    another in the child, or use the start method "forkserver" or "spawn". ``close`` does nothing there.
    """


class NothingToSample(MemlaneError, LookupError):
    """Raised when a replay has no row that can be sampled, for example because none was added yet.

    Add rows first, or wait for ``Replay.size`` to grow.
    """


class StaleView(MemlaneError, ReferenceError):
    """Raised when an array from a lease is requested, or in debug mode used, after the lease ended.

    Copy the data while the lease is active.
    """


class StaleViewWarning(RuntimeWarning):
    """Issued in debug mode when a lease ends while arrays from it are still referenced.

    The message names each array and the line that took it. Copy what must outlive the lease.
    """
