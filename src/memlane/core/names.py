"""Names: how unrelated processes find a segment, and how the names of the dead go away.

A named segment is a file ``memlane-NAME`` in /dev/shm (``MEMLANE_SHM_DIR`` names another directory). It is made without
a name and linked to it as the last step, header and all, so no instant exists at which a kill leaves half a segment
behind. Its header says who owns it. ``reclaim`` removes those whose owner is dead; it runs at the first segment that a
process makes and at every named one. Never a resource tracker: an attacher that exits leaves the owner's segment alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlane.core.errors import MemlaneError, SegmentError, SegmentExists, SegmentMissing
from memlane.core.header import Header, pid_space
from memlane.core.liveness import Life, Peer

PREFIX = "memlane-"
_UNBORN = ".memlane-unborn-"
_MODE = 0o600
_PATIENCE = 1.0
"""Seconds for the two system calls between a lock and the removal of a name."""
_serial = itertools.count()


def directory() -> Path:
    """Where named segments live."""
    return Path(os.environ.get("MEMLANE_SHM_DIR") or "/dev/shm")


def path_of(name: str) -> Path:
    """The file behind a name."""
    try:
        room = 255 - len(os.fsencode(PREFIX + name))
    except (TypeError, UnicodeEncodeError):
        room = -1
    if room < 0 or not name or "/" in name or "\0" in name:
        raise SegmentError(
            f"a segment's name must be a string of 1 to {255 - len(PREFIX)} bytes without '/' and NUL, found {name!r}"
        )
    return directory() / (PREFIX + name)


def fresh_name(label: str = "segment") -> str:
    """A name that nobody has: it carries this process's pid and start time."""
    me = Peer.current()
    return f"{label}-{me.pid}-{me.start}-{next(_serial)}-{secrets.token_hex(3)}"


def open_nameless(folder: Path) -> tuple[int, Path | None]:
    """A new file in ``folder`` that nobody can find. The path is where it hides on file systems without O_TMPFILE."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE), None
    except FileNotFoundError:
        raise SegmentMissing(f"the directory {folder} does not exist") from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise SegmentError(f"cannot make a file in {folder}: {error.strerror}") from error
    me = Peer.current()
    hidden = folder / f"{_UNBORN}{me.pid}-{me.start}-{pid_space()}-{secrets.token_hex(8)}"
    return os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _MODE), hidden


def give_name(fd: int, hidden: Path | None, path: Path) -> None:
    """Link a finished nameless file to its name. ``SegmentExists`` if the name is taken."""
    try:
        if hidden is not None:
            os.link(hidden, path)
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With a dir_fd Python calls linkat(AT_SYMLINK_FOLLOW); without one it would link the symlink itself.
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
    except FileExistsError:
        raise SegmentExists(f"{path} exists already{_whose(path)}; attach to it, or choose another name") from None
    except OSError as error:
        raise SegmentError(f"cannot give a segment the name {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Leftover:
    """A named segment whose owner is dead."""

    path: Path
    nbytes: int
    owner: Peer


def leftovers(folder: Path | None = None) -> Iterator[Leftover]:
    """Named segments of dead owners. Those of other users and of other pid namespaces are not ours to judge."""
    try:
        entries = list(os.scandir(folder or directory()))
    except OSError:
        return
    for entry in entries:
        owner = _owner_of_entry(Path(entry.path))
        if owner is not None:
            with contextlib.suppress(OSError):  # gone meanwhile
                yield Leftover(Path(entry.path), entry.stat(follow_symlinks=False).st_size, owner)


def reclaim(folder: Path | None = None) -> list[Leftover]:
    """Remove the named segments of dead owners and return what was removed. Whoever still maps one keeps its memory."""
    return [leftover for leftover in leftovers(folder) if _remove(leftover)]


def free(path: Path) -> None:
    """Reclaim one name. Whoever is at it already gets a moment to finish; if it was stopped, the name stays taken."""
    deadline = time.monotonic() + _PATIENCE
    while (owner := _owner_of_entry(path)) is not None and time.monotonic() < deadline:
        if not _remove(Leftover(path, 0, owner)):
            time.sleep(0.001)


def _remove(leftover: Leftover) -> bool:
    """Take the name away if it still belongs to the dead owner. Between the look and the removal somebody else may have
    reclaimed the name and given it to a living segment. So whoever removes locks the dead file first: a name leads to
    another file only after this one was removed, which nobody else can do now. Death opens the lock."""
    try:
        fd = os.open(leftover.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # somebody else was faster
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never waits: whoever has the lock may have been stopped
        if not os.path.samestat(os.fstat(fd), os.stat(leftover.path, follow_symlinks=False)):
            return False
        if _owner_of_entry(leftover.path) != leftover.owner:
            return False
        os.unlink(leftover.path)
        return True
    except OSError:
        return False
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a fork in another thread may have copied the descriptor
        os.close(fd)


def _owner_of_entry(path: Path) -> Peer | None:
    """The owner of what lies at ``path`` if it is a named segment, whole or unborn, and its owner is certainly dead."""
    if path.name.startswith(_UNBORN):
        return _unborn_owner(path.name)
    return _dead_owner(path) if path.name.startswith(PREFIX) else None


def _dead_owner(path: Path) -> Peer | None:
    """The owner of the segment at ``path`` if it is certainly dead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        header = Header.read(fd, str(path))
    except (MemlaneError, OSError):
        return None  # not a segment of ours, or of a version that we do not know
    finally:
        os.close(fd)
    return header.owner if header.owner_life() in (Life.DEAD, Life.ZOMBIE, Life.RECYCLED) else None


def _unborn_owner(name: str) -> Peer | None:
    match name.removeprefix(_UNBORN).split("-"):
        case [pid, start, space, _] if pid.isdecimal() and start.isdecimal() and space == str(pid_space()):
            owner = Peer(int(pid), int(start))
            return None if owner.alive else owner
        case _:
            return None


def _whose(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        header = Header.read(fd, str(path))
        life = header.owner_life()
        return f" and belongs to pid {header.owner.pid}" + (f", which is {life.value}" if life else " elsewhere")
    except (MemlaneError, OSError):
        return " and is not a segment"
    finally:
        os.close(fd)
