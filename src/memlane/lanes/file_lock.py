"""FileLock: keeps two processes from saving to the file of a segment at once.

``flock`` belongs to an open file: the kernel releases it when the last descriptor is closed, so also when its process
dies, however it dies. A forked child has the lock together with its parent. It works between containers that share the
file.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from memlane.core import Segment, SegmentError


class FileLock:
    """A lock on the file of ``segment``, held with others (``shared``) or alone until ``close``.

    If another process has it, ``segment`` is closed, and ``SegmentError`` says which process.
    """

    def __init__(self, segment: Segment, *, shared: bool) -> None:
        # A descriptor of its own: that of the segment stays open as long as an array keeps the memory mapped.
        fd = os.open(f"/proc/self/fd/{segment._fd}", os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            label, cause = segment.label, f"cannot be locked: {error.strerror}; use a file system that has locks"
            if isinstance(error, BlockingIOError):
                doing = "saves to it" if shared else "saves to it or has it open"
                holders = _holders(fd) or "another process"
                cause = f"is in use: {holders} {doing}; wait until it has finished, or use another file"
            self.close()
            segment.close()
            raise SegmentError(f"{label} {cause}") from None

    def close(self) -> None:
        """Give the lock up. Calling it again has no effect."""
        self._close()


def _holders(fd: int) -> str:
    """Return the processes that have locked the file, as far as the kernel tells."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = []
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:123456 0 EOF; "->" marks one that waits
            if words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                pids.append(int(words[4]))
    except (OSError, IndexError, ValueError):
        return ""  # /proc is restricted: the error remains, without names
    return ", ".join(f"pid {pid}{_command(pid)}" for pid in sorted(set(pids)))


def _command(pid: int) -> str:
    if pid == os.getpid():
        return " (this process)"
    try:
        command = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has just ended, or its children hold the lock
    return f" ({command})"
