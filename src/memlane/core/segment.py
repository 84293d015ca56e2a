"""Segment: shared memory with a header that describes its content.

A segment is anonymous, named or file-backed:

- anonymous (default): a sealed memfd. It has no name to leak, is limited only by the machine's memory, and disappears
  with the last process that maps it. Other processes get it by pickling the object: as a ``Process`` argument under
  fork, forkserver and spawn, or through a pipe or a queue.
- named: unrelated processes find it with ``Segment.attach(name)``; see ``names`` for the lifetime of names.
- file-backed: an ordinary file that outlives all processes.

The memory is reserved in full at creation. Arrays keep it mapped, so ``close()`` cannot crash a reader: after it, this
object returns no new arrays, and the memory is unmapped when the last array is garbage-collected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import context as mp_context
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import memory, names
from memlane.core.errors import BudgetError, SegmentClosed, SegmentError, SegmentMissing
from memlane.core.header import Header, is_closed, mark_closed, write_owner_life
from memlane.core.layout import SIGNAL, Field, FieldSpec, Layout
from memlane.core.liveness import Peer, PeerState
from memlane.core.suggestions import did_you_mean

Window = tuple[_native.Mapping, int]
"""A mapping and an offset into it in bytes."""

Kind = Literal["anonymous", "named", "file"]
# How a pickled segment carries its descriptor: as one that a child inherits, or as the sender and its descriptor, with
# the device and inode of the file.
PickledFd = Any | tuple[Peer, int, int, int]

# No process can truncate the memory under a reader, or remove this seal.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_reclaimed_for_pid = 0


class Segment:
    """Shared memory with named, typed fields. ``create`` one, ``attach`` to one by name or file, or unpickle one.

    ``segment["obs"]`` is a numpy array over the shared memory: a write is visible to all processes that map it, at once
    and without a copy. Any process and thread may read and write; memlane does not synchronise plain fields. Order the
    accesses with a ``Signal`` in the same segment, or use a lane.

        >>> with Segment.create({"obs": ("float32", (8, 4)), "ready": (SIGNAL, ())}) as segment:
        ...     segment["obs"][0] = 1
        ...     _ = segment.signal("ready").add()
        ...     float(segment["obs"].sum()), segment.signal("ready").value
        (4.0, 1)

    The process that calls ``create`` is the owner. When a peer dies, the memory stays as that process left it, and
    remains mapped everywhere else. When the owner dies or is killed, an anonymous segment lives on until the last
    process unmaps it; the name of a named one is removed by the next ``Segment.create`` or ``reclaim()``; a file stays.
    """

    layout: Layout
    kind: Kind
    path: Path | None
    """The file of a named or file-backed segment."""
    writeable: bool
    """Whether this process may write to the segment."""

    def __init__(self, fd: int, header: Header, kind: Kind, path: Path | None, *, writeable: bool, owned: bool) -> None:
        """Take ownership of ``fd``. Use ``create`` or ``attach`` instead."""
        self._fd = fd
        self._header = header
        self.layout = header.layout
        self.kind = kind
        self.path = path
        self.writeable = writeable
        self._views: dict[str, NDArray[Any]] = {}
        try:
            self._mapping = _native.Mapping(fd, 0, header.total_bytes, writeable)
        except RuntimeError as error:
            os.close(fd)
            raise SegmentError(f"cannot map {header.total_bytes} bytes of {self.label}: {error}") from None
        self._identity = _identity(fd)
        name_to_remove = path if owned and kind == "named" else None
        self._finalizer = weakref.finalize(self, _close, fd, self._mapping, name_to_remove, owned, os.getpid())

    # ------------------------------------------------------------------------------------------ create and attach

    @classmethod
    def create(
        cls,
        layout: Layout | Mapping[str, FieldSpec],
        *,
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
        contents: Mapping[str, bytes] | None = None,
    ) -> Segment:
        """Create a zeroed segment: anonymous, or with a ``name``, or in a new ``file``.

        ``contents`` are the initial bytes of fields. They are written before other processes can find the segment.

        Raises ``BudgetError`` if there is not enough memory, and ``SegmentExists`` if the name or the file is taken.
        """
        if name is not None and file is not None:
            raise SegmentError(f"expected a name or a file, not both; found {name=} and {file=}")
        header = Header.new(layout if isinstance(layout, Layout) else Layout(layout))
        _reclaim_once_per_process()
        if name is not None:
            path = names.path_of(name)
            names.reclaim(path.parent)
            names.reclaim_name(path)
            limits = [memory.directory_space(path.parent), *memory.memory_limits()]
            segment = cls(
                _create_file(header, path, limits, contents), header, "named", path, writeable=True, owned=True
            )
            # For processes of other namespaces, which cannot see this one. On a file system without locks they have to
            # take it for alive.
            with contextlib.suppress(SegmentError):
                write_owner_life(segment._fd, segment.life.process())
            return segment
        if file is not None:
            path = Path(file).absolute()
            limits = [memory.directory_space(path.parent)]
            return cls(_create_file(header, path, limits, contents), header, "file", path, writeable=True, owned=True)
        return cls(_create_anonymous(header, contents), header, "anonymous", None, writeable=True, owned=True)

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        layout: Layout | Mapping[str, FieldSpec] | None = None,
        writeable: bool = True,
    ) -> Segment:
        """Map an existing segment by ``name`` or ``file``. With ``layout``, the segment must have exactly it.

        Raises ``SegmentMissing`` if there is no such segment, and ``SegmentError`` if it cannot be used: also if it
        belongs to another user than this one or root, or if another may write to it.
        """
        if (name is None) == (file is None):
            raise SegmentError(f"expected either a name or a file; found {name=} and {file=}")
        path = names.path_of(name) if name is not None else Path(os.fspath(file or "")).absolute()
        flags = (os.O_RDWR if writeable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            remedy = "check the path"
            if name is not None:
                remedy = f"its owner may have closed it{did_you_mean(name, names.existing())}"
            raise SegmentMissing(f"there is no segment at {path}; {remedy}") from None
        except OSError as error:
            cause = "expected a file, found a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise SegmentError(f"cannot open {path}: {cause}") from error
        try:
            _require_trusted(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return cls._from_fd(fd, "file" if name is None else "named", path, writeable, layout)

    @classmethod
    def _from_fd(
        cls,
        fd: int,
        kind: Kind,
        path: Path | None,
        writeable: bool,
        layout: Layout | Mapping[str, FieldSpec] | None = None,
    ) -> Segment:
        """Check the file of ``fd``, then map it."""
        where = str(path or "an anonymous segment")
        try:
            header = Header.read(fd, where)
            if layout is not None:
                expected = layout if isinstance(layout, Layout) else Layout(layout)
                if difference := expected.difference(header.layout):
                    raise SegmentError(f"{where} has another layout: {difference}")
            if writeable and path is not None:
                _fill_holes(fd, header, path)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, header, kind, path, writeable=writeable, owned=False)

    # ------------------------------------------------------------------------------------------------------ fields

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The field as an array over the shared memory: it changes when another process writes."""
        view = self._views.get(name)
        if view is None:
            field = self.layout[name]
            view = self._views[name] = field.view(self._open_mapping(), self._header.header_bytes)
        return view

    def views(self) -> dict[str, NDArray[Any]]:
        """All fields as arrays over the shared memory."""
        return {name: self[name] for name in self.layout.fields}

    def signal(self, name: str, index: int = 0) -> _native.Signal:
        """A handle on a field of dtype ``SIGNAL``; ``index`` selects one from an array of signals."""
        field = self._field_of(name, SIGNAL, "SIGNAL")
        count = field.nbytes // SIGNAL.itemsize
        if not 0 <= index < count:
            raise IndexError(f"signal {index} of field {name!r} does not exist; it has {count} signals")
        label = f"signal {name!r} of {self.label}" if not field.shape else f"signal {name!r}[{index}] of {self.label}"
        offset = self._header.header_bytes + field.offset + index * SIGNAL.itemsize
        return _native.Signal(self._open_mapping(), offset, label)

    def words(self, name: str) -> _native.Words:
        """A handle for atomic access to a field of dtype int64. An array of several dimensions is indexed flat."""
        field = self._field_of(name, np.dtype(np.int64), "int64")
        offset = self._header.header_bytes + field.offset
        return _native.Words(self._open_mapping(), offset, field.nbytes // 8, f"words {name!r} of {self.label}")

    @property
    def life(self) -> _native.Life:
        """A handle that tells which of the processes that hold something in this segment are alive: ``process()`` is
        this process, ``alive(process)`` asks. It is right for processes of other containers too. A process that holds
        nothing costs nothing; ``process()`` opens a descriptor, which ``close`` closes."""
        return _native.Life(self._open_mapping(), self.label)

    def window(self, offset: int, nbytes: int, *, writeable: bool) -> Window:
        """The mapping, and the offset in it of byte ``offset`` of the fields. Checks that ``nbytes`` follow it."""
        mapping = self._open_mapping()
        if not 0 <= offset <= offset + nbytes <= self.layout.nbytes:
            raise SegmentError(
                f"bytes {offset} to {offset + nbytes} are outside the {self.layout.nbytes} bytes of {self.label}"
            )
        if writeable and not self.writeable:
            raise SegmentError(f"{self.label} was attached read-only; attach it with writeable=True to write to it")
        if self.kind != "anonymous" and (size := os.fstat(self._fd).st_size) < self.nbytes:
            raise SegmentError(
                f"{self.label} was truncated: expected {self.nbytes} bytes, found {size}; what was in it is gone: "
                "close it in all processes and create another"
            )
        return mapping, self._header.header_bytes + offset

    def alias(self, offset: int, nbytes: int, *, writeable: bool) -> Window:
        """Like ``window``, but in a separate mapping, which can be retired alone (see ``Lease``)."""
        _, at = self.window(offset, nbytes, writeable=writeable)
        return _native.Mapping(self._fd, at, nbytes, writeable), 0

    def _field_of(self, name: str, dtype: np.dtype[Any], dtype_name: str) -> Field:
        field = self.layout[name]
        if field.dtype != dtype:
            raise SegmentError(f"field {name!r} of {self.label} must have dtype {dtype_name}, found {field.dtype}")
        return field

    def _open_mapping(self) -> _native.Mapping:
        if self.closed:
            raise SegmentClosed(f"{self.label} was used after close(); attach to it again, or close it later")
        return self._mapping

    # -------------------------------------------------------------------------------------------------- properties

    @property
    def name(self) -> str | None:
        """The name to ``attach`` to; None if the segment is not named."""
        return self.path.name.removeprefix(names.PREFIX) if self.kind == "named" and self.path else None

    @property
    def label(self) -> str:
        """The name of the segment in error messages."""
        return f"{self.kind} segment" + (f" {self.path}" if self.path else "")

    def is_same_memory(self, other: Segment) -> bool:
        """Whether both objects map the same memory."""
        return self._identity == other._identity

    @property
    def owner(self) -> Peer:
        """The process that created the segment."""
        return self._header.owner

    @property
    def nbytes(self) -> int:
        """Size in bytes, header included."""
        return self._header.total_bytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called on this object."""
        return not self._finalizer.alive

    @property
    def owner_closed(self) -> bool:
        """Whether the owner has closed the segment. The memory stays as long as a process maps it."""
        self._open_mapping()
        return is_closed(self._fd, self.label)

    # ------------------------------------------------------------------------------------------------------- close

    def close(self) -> None:
        """Stop using the segment; in its owner, also remove its name. Calling it again has no effect.

        Arrays that were taken before stay valid.
        """
        self._views.clear()
        self._finalizer()

    def unlink(self) -> None:
        """Remove the name or the file now. Processes that map the segment keep it. Calling it again has no effect."""
        if self.path is not None:
            _unlink_if_same(self.path, self._identity)

    def __enter__(self) -> Segment:
        self._open_mapping()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.label}, {self.nbytes} bytes, {'closed' if self.closed else self.layout}>"

    # ------------------------------------------------------------------------------------------------------ pickle

    def __reduce__(self) -> tuple[object, ...]:
        self._open_mapping()
        pickled_fd: object
        if mp_context.get_spawning_popen() is not None:
            # The child inherits the descriptor: it has the memory even if this process closes it right after start().
            pickled_fd = reduction.DupFd(self._fd)
        else:
            pickled_fd = (Peer.current("sender"), self._fd, *self._identity)
        return (_unpickle, (pickled_fd, self.kind, self.path, self.writeable))


def _unpickle(pickled_fd: PickledFd, kind: Kind, path: Path | None, writeable: bool) -> Segment:
    if not isinstance(pickled_fd, tuple):
        fd: int = pickled_fd.detach()
        os.set_inheritable(fd, False)
    else:
        fd = _open_from_sender(pickled_fd, writeable)
    return Segment._from_fd(fd, kind, path, writeable)


def _open_from_sender(pickled_fd: tuple[Peer, int, int, int], writeable: bool) -> int:
    """Open the sender's descriptor through /proc. This needs no thread and no socket in either process, and several
    processes can unpickle the same bytes; the sender must be running and have the segment open."""
    sender, sender_fd, device, inode = pickled_fd
    failure = f"cannot open the segment that pid {sender.pid} sent: "
    if sender.state is PeerState.UNKNOWN:
        raise SegmentError(
            f"{failure}expected a sender of this pid and time namespace, found one of another, such as another "
            "container; create the segment with a name, and attach to it here"
        )
    try:
        fd = os.open(f"/proc/{sender.pid}/fd/{sender_fd}", (os.O_RDWR if writeable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        cause = "the sender has closed it" if sender.alive else sender.describe_death()
        raise SegmentMissing(f"{failure}{cause}; keep it open in the sender until it was unpickled") from None
    except OSError as error:
        raise SegmentError(f"{failure}{error.strerror} (does the process belong to another user?)") from error
    if _identity(fd) != (device, inode):
        os.close(fd)
        raise SegmentMissing(
            f"{failure}the sender has closed it and reused its descriptor; keep it open until it was unpickled"
        )
    return fd


def _require_trusted(fd: int, path: Path) -> None:
    """Raise ``SegmentError`` unless the file belongs to this user or root and nobody else may write to it. Whoever may
    write to a file that is mapped can change and cut it at any time, and anybody can take a free name in /dev/shm."""
    status = os.fstat(fd)
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        raise SegmentError(
            f"{path} belongs to another user: expected uid {me} or root, found uid {status.st_uid}, who could change "
            "the memory under this process; use another name, or a copy of the file"
        )
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SegmentError(
            f"{path} can be written by other users: expected mode 600, found {stat.S_IMODE(status.st_mode):o}; "
            "chmod 600 it if only this user has used it so far"
        )


def _create_anonymous(header: Header, contents: Mapping[str, bytes] | None) -> int:
    memory.require(header.total_bytes, "an anonymous segment", memory.memory_limits())
    try:
        fd = os.memfd_create("memlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SegmentError(
            f"cannot create an anonymous segment: memfd_create: {error.strerror}; {_remedy(error.errno)}"
        ) from error
    try:
        os.fchmod(fd, 0o600)
        _reserve(fd, header, "an anonymous segment", memory.machine_memory)
        _write_contents(fd, header, contents)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_file(
    header: Header, path: Path, limits: list[memory.FreeMemory | None], contents: Mapping[str, bytes] | None
) -> int:
    """Create a file with header, contents and all memory reserved; link it to its name as the last step."""
    what = f"the segment {path}"
    fd, hidden = names.open_unnamed(path.parent)
    try:
        memory.require(header.total_bytes, what, limits)
        _reserve(fd, header, what, lambda: memory.directory_space(path.parent))
        _write_contents(fd, header, contents)
        names.link_name(fd, hidden, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if hidden is not None:
            os.unlink(hidden)
    return fd


def _write_contents(fd: int, header: Header, contents: Mapping[str, bytes] | None) -> None:
    for name, content in (contents or {}).items():
        field = header.layout[name]
        if len(content) != field.nbytes:
            raise SegmentError(f"contents[{name!r}] must have {field.nbytes} bytes, found {len(content)}")
        os.pwrite(fd, content, header.header_bytes + field.offset)


def _reserve(fd: int, header: Header, what: str, measure: Callable[[], memory.FreeMemory]) -> None:
    """Allocate all memory of the file and write the header. ``measure`` is called for the error message."""
    try:
        os.posix_fallocate(fd, 0, header.total_bytes)
    except OSError as error:
        if error.errno in _LIMITS:
            raise BudgetError(f"{what} needs {header.total_bytes} bytes, but {_LIMITS[error.errno]}") from error
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise SegmentError(
                f"cannot reserve the {header.total_bytes} bytes of {what}: fallocate: {error.strerror}; "
                f"{_remedy(error.errno)}"
            ) from error
        # memory.require found enough; another process has taken it since.
        left = measure()
        raise BudgetError(
            f"{what} needs {header.total_bytes} bytes, but {left.limit} has only {left.free} free ({error.strerror}); "
            "make it smaller, or free some space first"
        ) from error
    header.write(fd)


# What else than free memory or space limits the size of a file.
_LIMITS = {
    errno.EDQUOT: "the disk quota of its user is used up; make it smaller, or remove files of that user",
    errno.EFBIG: "a file may not be that large here; make it smaller, raise the limit (ulimit -f), or use another file "
    "system",
}


def _remedy(number: int | None) -> str:
    if number in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        return (
            "memlane needs Linux 5.4 or newer, and a sandbox that allows memfd_create and fallocate: run "
            "`memlane doctor`, which says what is missing"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit of descriptors (ulimit -n)"
    return "run `memlane doctor`, which says what is missing"


def _fill_holes(fd: int, header: Header, path: Path) -> None:
    """Allocate the holes of a sparse file, such as a copy that a tool made: a store into a hole is a SIGBUS when the
    file system is full. A file system that compresses seems to have holes too; one that cannot allocate is left alone.
    """
    missing = header.total_bytes - os.fstat(fd).st_blocks * 512
    if missing <= 0:
        return
    memory.require(missing, f"the rest of the sparse segment {path}", [memory.directory_space(path.parent)])
    error = _native.fill_holes(fd, header.total_bytes)
    if error == errno.ENOSPC:
        raise BudgetError(f"the segment {path} is a sparse file and needs {missing} more bytes; free some space first")
    if error not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
        raise SegmentError(f"cannot allocate the holes of the sparse segment {path}: {os.strerror(error)}")


def _close(fd: int, mapping: _native.Mapping, name: Path | None, owned: bool, pid: int) -> None:
    mapping.close()
    if owned and os.getpid() == pid:  # a forked child of the owner is not the owner
        with contextlib.suppress(OSError):
            mark_closed(fd)
            if name is not None:
                _unlink_if_same(name, _identity(fd))
    os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    """Device and inode, which identify a file independently of its names."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _unlink_if_same(path: Path, identity: tuple[int, int]) -> None:
    """Remove ``path`` if it still leads to the file with this identity."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path, follow_symlinks=False)
        if (status.st_dev, status.st_ino) == identity:
            os.unlink(path)


def _reclaim_once_per_process() -> None:
    global _reclaimed_for_pid
    if _reclaimed_for_pid != os.getpid():
        _reclaimed_for_pid = os.getpid()
        names.reclaim()
