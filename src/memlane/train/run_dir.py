"""Run directory: its name, and the one process that it belongs to. Needs no torch."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from pathlib import Path

from memlane.core import MemlaneError
from memlane.core.file_lock import FileInUse, FileLock, holders, is_locked

LOCK_FILE = "run.lock"
_PATIENCE = 1.0
"""Seconds that a lock may be taken before it counts as in use: ``holder_of`` takes it for a moment too."""


class RunDirError(MemlaneError, ValueError):
    """A run directory that cannot be used: another process trains in it, or it has a run already."""


def run_name(*parts: str) -> str:
    """The name of a new run or sweep: ``parts`` and the time."""
    return "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")])


def make_run_dir(parent: Path, name: str) -> Path:
    """Make a directory that no other process has made; a number follows the name if it is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError  # count() does not end


def has_run(run_dir: Path) -> bool:
    """Whether a training has left something in the directory."""
    return any(os.path.lexists(run_dir / name) for name in ("metrics.csv", "checkpoint.pt"))


class RunLock:
    """Makes a run directory this process's own until ``close`` or the end of the process, however it ends.

    ``RunDirError`` names the process that has it. Where the file system has no locks, there is none, and a line in the
    log.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / LOCK_FILE
        if path.is_symlink():  # replaced and not followed, as all files of a run directory
            path.unlink()
        # The file stays when the lock is given up: if it were removed, two processes could lock two files of one name.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        self._lock: FileLock | None = None
        try:
            self._lock = FileLock(path, shared=False, patience=_PATIENCE)
        except FileInUse:
            holder = holder_of(run_dir) or "another process"
            raise RunDirError(
                f"{run_dir} is in use: {holder} trains in it; wait until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            logging.getLogger("memlane").warning(
                "%s cannot be locked (%s): make sure that no other process trains in it", run_dir, error.strerror
            )
        path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")

    def close(self) -> None:
        """Give the directory up. Calling it again has no effect."""
        if self._lock is not None:
            self._lock.close()


def holder_of(run_dir: Path) -> str | None:
    """The process that trains in a directory, as text; None if none does."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not is_locked(fd):
            return None
        # The kernel knows the processes of this machine; those elsewhere have written who they are.
        return holders(fd) or os.read(fd, 200).decode(errors="replace").strip() or "another process"
    except OSError:
        return None  # the file system has no locks
    finally:
        os.close(fd)
