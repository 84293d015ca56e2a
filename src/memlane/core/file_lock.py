"""FileLock: a lock of the kernel on a file, which ends with its process.

``flock`` belongs to an open file: the kernel releases it when the last descriptor is closed, so also when its process
dies, however it dies. It works between containers that share the file.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from memlane.core.errors import MemlaneError

_RETRY_SECONDS = 0.01


class FileInUse(MemlaneError):
    """Another process has locked the file."""

    def __init__(self, file: str | Path, holders: str) -> None:
        super().__init__(f"{file} is in use by {holders}")
        self.holders = holders
        """The processes that have locked it, as far as the kernel tells."""


class FileLock:
    """A lock on ``file``, held with others (``shared``) or alone until ``close``.

    ``FileInUse`` if another process has it for longer than ``patience`` seconds, ``OSError`` if the file cannot be
    opened for writing or is on a file system without locks.

    A forked child has a shared lock together with its parent. A lock that is held alone stays with the process that has
    taken it: the child gives its copy up, so that the lock ends with the parent.
    """

    def __init__(self, file: str | Path, *, shared: bool, patience: float = 0.0) -> None:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        deadline = time.monotonic() + patience
        try:
            while not _try_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    raise FileInUse(file, holders(fd) or "another process")
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            self.close()
            raise
        if not shared:
            _held_alone.add(self)

    def close(self) -> None:
        """Give the lock up. Calling it again has no effect."""
        self._close()


_held_alone: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _give_up_copies() -> None:
    for lock in list(_held_alone):
        lock.close()


os.register_at_fork(after_in_child=_give_up_copies)


def _try_lock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int) -> bool:
    """Whether a process holds the file of ``fd`` alone. Asking takes a shared lock for a moment; processes that want
    the file alone at that moment need some patience."""
    if not _try_lock(fd, fcntl.LOCK_SH):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def holders(fd: int) -> str:
    """Return the processes that have locked the file of ``fd``, as far as the kernel tells: none of other machines, and
    none that a container hides."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = []
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:123456 0 EOF; "->" marks one that waits
            if words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                pids.append(int(words[4]))
    except (OSError, IndexError, ValueError):
        return ""  # /proc is restricted
    return ", ".join(f"pid {pid}{_command(pid)}" for pid in sorted(set(pids)))


def _command(pid: int) -> str:
    if pid == os.getpid():
        return " (this process)"
    try:
        command = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has just ended, or its children hold the lock
    return f" ({command})"
