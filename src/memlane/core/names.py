"""Names: how unrelated processes find a segment, and how the segments of dead owners are removed.

A named segment is a file ``memlane-NAME`` in /dev/shm (or in ``MEMLANE_SHM_DIR``). The file is created without a name
and linked to its name as the last step, complete with its header: a kill at any instant leaves no incomplete segment
behind. The header names the owner, for processes of its pid namespace by its pid, and for others by its life token
(``Segment.life``). ``reclaim`` removes segments whose owner is dead. It runs when a process creates its
first segment and whenever a named one is created. Python's resource tracker is not used: when a process that attached
to a segment exits, the tracker would remove the segment although its owner still uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlane import _native
from memlane.core.errors import MemlaneError, SegmentError, SegmentExists, SegmentMissing
from memlane.core.header import read_owner
from memlane.core.liveness import Peer, PeerState

PREFIX = "memlane-"
_UNFINISHED = ".memlane-unfinished-"
_MODE = 0o600
_RECLAIM_TIMEOUT = 1.0
"""Seconds to wait for another process that is between locking a file and removing its name: two system calls."""
_serial = itertools.count()


def directory() -> Path:
    """The directory of named segments."""
    return Path(os.environ.get("MEMLANE_SHM_DIR") or "/dev/shm")


def path_of(name: str) -> Path:
    """The file of the segment with this name."""
    try:
        nbytes = len(os.fsencode(PREFIX + name))
    except (TypeError, UnicodeEncodeError):
        nbytes = 0
    if not len(PREFIX) < nbytes <= 255 or "/" in name or "\0" in name:
        raise SegmentError(
            f"a segment's name must be a string of 1 to {255 - len(PREFIX)} bytes without '/' and NUL, found {name!r}"
        )
    return directory() / (PREFIX + name)


def fresh_name(label: str = "segment") -> str:
    """A unique name for a segment: ``label``, pid and start time of this process, a counter and a random suffix."""
    me = Peer.current()
    return f"{label}-{me.pid}-{me.start}-{next(_serial)}-{secrets.token_hex(3)}"


def open_unnamed(folder: Path) -> tuple[int, Path | None]:
    """Create a file without a name in ``folder``. Return its descriptor, and on file systems without O_TMPFILE the
    path of the hidden file that is used instead."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE), None
    except FileNotFoundError:
        raise SegmentMissing(f"the directory {folder} does not exist; create it first") from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise SegmentError(f"cannot create a file in {folder}: {error.strerror}") from error
    me = Peer.current()
    hidden = folder / f"{_UNFINISHED}{me.pid}-{me.start}-{me.namespaces}-{secrets.token_hex(8)}"
    return os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _MODE), hidden


def link_name(fd: int, hidden: Path | None, path: Path) -> None:
    """Link a file from ``open_unnamed`` to its name. Raises ``SegmentExists`` if the name is taken."""
    try:
        if hidden is not None:
            os.link(hidden, path)
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With dst_dir_fd, Python calls linkat(AT_SYMLINK_FOLLOW). Without it, it would link the symlink itself.
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
    except FileExistsError:
        raise SegmentExists(f"{path} already exists{_describe_existing(path)}") from None
    except OSError as error:
        raise SegmentError(f"cannot link a segment to the name {path}: {error.strerror}") from error


def existing() -> list[str]:
    """The names of all segments in the directory, dead owners included."""
    try:
        files = os.listdir(directory())
    except OSError:
        return []
    return [file.removeprefix(PREFIX) for file in files if file.startswith(PREFIX)]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A named segment whose owner is dead."""

    path: Path
    nbytes: int
    """Size of the file in bytes."""
    owner: Peer
    """The dead process that created it."""


def leftovers(folder: Path | None = None) -> Iterator[Leftover]:
    """The named segments of dead owners in ``folder``, by default where ``Segment.create`` puts them. Segments of other
    users are skipped, and those of other pid or time namespaces whose owner has no life token."""
    try:
        entries = list(os.scandir(folder or directory()))
    except OSError:
        return
    for entry in entries:
        owner = _dead_owner(Path(entry.path))
        if owner is not None:
            with contextlib.suppress(OSError):  # removed in the meantime
                yield Leftover(Path(entry.path), entry.stat(follow_symlinks=False).st_size, owner)


def reclaim(folder: Path | None = None) -> list[Leftover]:
    """Remove the named segments of dead owners in ``folder``, as ``leftovers`` finds them, and return them. Processes
    that map one keep its memory."""
    return [leftover for leftover in leftovers(folder) if _remove(leftover)]


def reclaim_name(path: Path) -> None:
    """Remove the segment at ``path`` if its owner is dead. If another process is removing it, wait for that; if that
    process was stopped meanwhile, the name stays taken."""
    deadline = time.monotonic() + _RECLAIM_TIMEOUT
    while (owner := _dead_owner(path)) is not None and time.monotonic() < deadline:
        if not _remove(Leftover(path, 0, owner)):
            time.sleep(0.001)


def _remove(leftover: Leftover) -> bool:
    """Unlink the name if it still belongs to the dead owner; return whether it was unlinked.

    Between the check of the owner and the removal, another process may reclaim the name and link it to a new segment.
    So the dead file is locked first, and checked again: the name can only lead to another file after this one was
    unlinked, and only the holder of the lock unlinks it. The kernel releases the lock of a process that dies.
    """
    try:
        fd = os.open(leftover.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # another process removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no wait: the holder may be stopped
        if not os.path.samestat(os.fstat(fd), os.stat(leftover.path, follow_symlinks=False)):
            return False
        if _dead_owner(leftover.path) != leftover.owner:
            return False
        os.unlink(leftover.path)
        return True
    except OSError:
        return False
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # close is not enough: a fork in another thread may have copied the descriptor
        os.close(fd)


def _dead_owner(path: Path) -> Peer | None:
    """The owner of the named segment at ``path``, finished or not, if that owner is certainly dead; otherwise None."""
    if not path.name.startswith((PREFIX, _UNFINISHED)) or not _is_own(path):
        return None
    if path.name.startswith(_UNFINISHED):
        return _dead_owner_of_unfinished(path.name)
    return _dead_owner_of_segment(path)


def _is_own(path: Path) -> bool:
    """Whether ``path`` is a file of this user. What another user put there is not even opened."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _dead_owner_of_segment(path: Path) -> Peer | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        owner, life = read_owner(fd, str(path))
        if owner.state is PeerState.UNKNOWN:
            # Its pid means nothing here, but its life token does. Without one, it may be alive.
            return owner if life and not _native.uses_file(fd, life) else None
        return None if owner.alive else owner
    except (MemlaneError, OSError):
        return None  # not a segment, or one of another format version
    finally:
        os.close(fd)


def _dead_owner_of_unfinished(name: str) -> Peer | None:
    match name.removeprefix(_UNFINISHED).split("-"):
        case [*numbers, _] if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
            pid, start, namespaces = map(int, numbers)
            owner = Peer(pid, start, namespaces=namespaces)
            return None if owner.alive else owner
        case _:
            return None


def _describe_existing(path: Path) -> str:
    """The owner of the file at ``path`` and what to do, as the end of an error message."""
    remedy = "; attach to it, or choose another name"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return remedy
    try:
        uid = os.fstat(fd).st_uid
        if uid not in (os.geteuid(), 0):
            return f" and belongs to another user, uid {uid}; choose another name"
        owner, life = read_owner(fd, str(path))
        if owner.state is not PeerState.UNKNOWN:
            return f" and belongs to pid {owner.pid}, which is {owner.state.value}{remedy}"
        unsure = "" if life else f"; if that container is gone, remove {path}"
        return f" and belongs to pid {owner.pid} of another pid or time namespace{remedy}{unsure}"
    except (MemlaneError, OSError):
        return " and is not a segment; choose another name"
    finally:
        os.close(fd)
