"""Segment: one mapping of shared memory that describes itself.

Three kinds, one class:

- anonymous (default): a sealed memfd. It has no name to leak, no size limit but the machine's, and is gone with the
  last process that maps it. Other processes get it by pickling the object: as a ``Process`` argument under fork,
  forkserver and spawn, or through a pipe or a queue.
- named: found by unrelated processes with ``Segment.attach(name)``; see ``names`` for what happens to names.
- file-backed: an ordinary file that outlives everybody.

The memory is reserved in full at creation. Views keep it mapped, so ``close()`` can never crash a reader: it ends what
can be *started* through this object, and the last holder's end unmaps it.

    >>> with Segment.create({"obs": ("float32", (8, 4))}) as segment:
    ...     segment["obs"][0] = 1
    ...     float(segment["obs"].sum())
    4.0
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Mapping
from multiprocessing import context as mp_context
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import memory, names
from memlane.core.errors import BudgetError, SegmentClosed, SegmentError, SegmentMissing
from memlane.core.header import CLOSED, Header, mark_closed
from memlane.core.layout import SIGNAL, Field, FieldSpec, Layout
from memlane.core.liveness import Peer

Window = tuple[_native.Mapping, int]
"""A mapping, and the byte in it at which something begins."""

Kind = Literal["anonymous", "named", "file"]
# How a descriptor travels: as one that a child inherits, or as the sender's pid, start time and descriptor and the
# device and inode behind it.
Handoff = Any | tuple[int, int, int, int, int]

# Nobody can cut the memory off under a reader, and nobody can lift that seal.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_reclaimed_for_pid = 0


class Segment:
    """Shared memory with a layout. Make one with ``create``, find one with ``attach``."""

    def __init__(self, fd: int, header: Header, kind: Kind, path: Path | None, *, writeable: bool, owned: bool) -> None:
        """Takes ``fd`` over. Use ``create`` or ``attach``."""
        self._fd = fd
        self._header = header
        self.layout: Layout = header.layout
        self.kind: Kind = kind
        self.path: Path | None = path
        self.writeable = writeable
        self._views: dict[str, NDArray[Any]] = {}
        try:
            self._mapping = _native.Mapping(fd, 0, header.total_bytes, writeable)
        except RuntimeError as error:
            os.close(fd)
            raise SegmentError(f"cannot map {header.total_bytes} bytes of {self.label}: {error}") from None
        self._identity = _identity(fd)
        name_to_remove = path if owned and kind == "named" else None
        self._let_go = weakref.finalize(self, _let_go, fd, self._mapping, name_to_remove, owned, os.getpid())

    # ------------------------------------------------------------------------------------------ making and finding

    @classmethod
    def create(
        cls,
        layout: Layout | Mapping[str, FieldSpec],
        *,
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
        contents: Mapping[str, bytes] | None = None,
    ) -> Segment:
        """Reserve memory for ``layout``, zeroed: anonymous, or under ``name``, or in a new ``file``. The ``contents``
        of some fields are there before the name is: nobody finds it without.

        ``BudgetError`` if it is not there, ``SegmentExists`` if the name or the file is taken.
        """
        if name is not None and file is not None:
            raise SegmentError(f"a segment is named or file-backed, not both; found {name=} and {file=}")
        header = Header.new(layout if isinstance(layout, Layout) else Layout(layout))
        _reclaim_once_per_process()
        if name is not None:
            path = names.path_of(name)
            names.reclaim(path.parent)
            names.free(path)
            rooms = [memory.directory_room(path.parent), memory.machine_room(), memory.group_room()]
            return cls(_make_file(header, path, rooms, contents), header, "named", path, writeable=True, owned=True)
        if file is not None:
            path = Path(file).absolute()
            rooms = [memory.directory_room(path.parent)]
            return cls(_make_file(header, path, rooms, contents), header, "file", path, writeable=True, owned=True)
        return cls(_make_anonymous(header, contents), header, "anonymous", None, writeable=True, owned=True)

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        layout: Layout | Mapping[str, FieldSpec] | None = None,
        writeable: bool = True,
    ) -> Segment:
        """Map a segment that somebody else made. With ``layout``, it must be exactly that one."""
        if (name is None) == (file is None):
            raise SegmentError(f"attach needs a name or a file, one of them; found {name=} and {file=}")
        path = names.path_of(name) if name is not None else Path(os.fspath(file or "")).absolute()
        flags = (os.O_RDWR if writeable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            raise SegmentMissing(f"there is no segment at {path}; its owner may have closed it") from None
        except OSError as error:
            cause = "expected a file, found a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise SegmentError(f"cannot open {path}: {cause}") from error
        return cls._adopt(fd, "file" if name is None else "named", path, writeable, layout)

    @classmethod
    def _adopt(
        cls,
        fd: int,
        kind: Kind,
        path: Path | None,
        writeable: bool,
        layout: Layout | Mapping[str, FieldSpec] | None = None,
    ) -> Segment:
        """Check what is behind ``fd``, then map it."""
        where = str(path or "an anonymous segment")
        try:
            header = Header.read(fd, where)
            if layout is not None:
                expected = layout if isinstance(layout, Layout) else Layout(layout)
                if difference := expected.difference(header.layout):
                    raise SegmentError(f"{where} has another layout: {difference}")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, header, kind, path, writeable=writeable, owned=False)

    # ------------------------------------------------------------------------------------------------------ inside

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The field as an array over the shared memory itself: what you see changes when somebody writes."""
        view = self._views.get(name)
        if view is None:
            field = self.layout[name]
            view = self._views[name] = field.view(self._open_mapping(), self._header.header_bytes)
        return view

    def views(self) -> dict[str, NDArray[Any]]:
        """All fields as arrays over the shared memory itself."""
        return {name: self[name] for name in self.layout.fields}

    def signal(self, name: str, index: int = 0) -> _native.Signal:
        """A handle on a field of dtype ``SIGNAL``, or on one of an array of them."""
        field = self._field_of(name, SIGNAL, "SIGNAL")
        count = field.nbytes // SIGNAL.itemsize
        if not 0 <= index < count:
            raise IndexError(f"field {name!r} has {count} signals, there is no signal {index}")
        label = f"signal {name!r} of {self.label}" if not field.shape else f"signal {name!r}[{index}] of {self.label}"
        offset = self._header.header_bytes + field.offset + index * SIGNAL.itemsize
        return _native.Signal(self._open_mapping(), offset, label)

    def words(self, name: str) -> _native.Words:
        """A handle on a field of dtype int64 whose entries are atomic; an array of more dimensions counts flat."""
        field = self._field_of(name, np.dtype(np.int64), "int64")
        offset = self._header.header_bytes + field.offset
        return _native.Words(self._open_mapping(), offset, field.nbytes // 8, f"words {name!r} of {self.label}")

    def window(self, offset: int, nbytes: int, *, writeable: bool) -> Window:
        """The mapping, and where in it byte ``offset`` of the fields is; ``nbytes`` from there are checked to exist."""
        mapping = self._open_mapping()
        if not 0 <= offset <= offset + nbytes <= self.layout.nbytes:
            raise SegmentError(
                f"bytes {offset} to {offset + nbytes} lie outside the {self.layout.nbytes} bytes of {self.label}"
            )
        if writeable and not self.writeable:
            raise SegmentError(f"{self.label} was attached read-only; attach it with writeable=True to change it")
        return mapping, self._header.header_bytes + offset

    def alias(self, offset: int, nbytes: int, *, writeable: bool) -> Window:
        """A window of a mapping of its own, which can be retired without the others (see ``Lease``)."""
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

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def name(self) -> str | None:
        """What ``attach`` takes; None unless the segment is named."""
        return self.path.name.removeprefix(names.PREFIX) if self.kind == "named" and self.path else None

    @property
    def label(self) -> str:
        """The segment as error messages call it."""
        return f"{self.kind} segment" + (f" {self.path}" if self.path else "")

    def is_same_memory(self, other: Segment) -> bool:
        """Whether both are views of one and the same memory."""
        return self._identity == other._identity

    @property
    def owner(self) -> Peer:
        """The process that made it."""
        return self._header.owner

    @property
    def nbytes(self) -> int:
        """Header and fields: what the segment takes from the machine."""
        return self._header.total_bytes

    @property
    def closed(self) -> bool:
        return not self._let_go.alive

    @property
    def owner_closed(self) -> bool:
        """Whether the owner has closed its side. The memory stays as long as somebody maps it."""
        self._open_mapping()
        return Header.read(self._fd, self.label).state == CLOSED

    # ------------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """End this object's use of the segment; the owner of a named one takes the name away. Again is harmless."""
        self._views.clear()
        self._let_go()

    def unlink(self) -> None:
        """Take the name or the file away now. Whoever maps the segment keeps it. Again is harmless."""
        if self.path is not None:
            _unlink_if_ours(self.path, self._identity)

    def __enter__(self) -> Segment:
        self._open_mapping()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.label}, {self.nbytes} bytes, {'closed' if self.closed else self.layout}>"

    # -------------------------------------------------------------------------------------------------- travelling

    def __reduce__(self) -> tuple[object, ...]:
        self._open_mapping()
        handoff: object
        if mp_context.get_spawning_popen() is not None:
            # The child inherits the descriptor at birth: it has the memory even if we close ours right after start().
            handoff = reduction.DupFd(self._fd)
        else:
            me = Peer.current("sender")
            handoff = (me.pid, me.start, self._fd, *self._identity)
        return (_rebuild, (handoff, self.kind, self.path, self.writeable))


def _rebuild(handoff: Handoff, kind: Kind, path: Path | None, writeable: bool) -> Segment:
    if not isinstance(handoff, tuple):
        fd: int = handoff.detach()
        os.set_inheritable(fd, False)
    else:
        fd = _fetch(handoff, writeable)
    return Segment._adopt(fd, kind, path, writeable)


def _fetch(parcel: tuple[int, int, int, int, int], writeable: bool) -> int:
    """Open the sender's descriptor through /proc. Needs no thread and no socket on either side, and the same message
    can be read by many; the sender must still be there and hold the segment."""
    pid, start, fd, device, inode = parcel
    sender = Peer(pid, start, "sender")
    lost = f"the segment sent by pid {pid} cannot be fetched: "
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", (os.O_RDWR if writeable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        cause = "it has closed the segment" if sender.alive else sender.obituary()
        raise SegmentMissing(f"{lost}{cause}; keep it open there until this side has it") from None
    except OSError as error:
        raise SegmentError(f"{lost}{error.strerror} (is it another user's process?)") from error
    if _identity(mine) != (device, inode):
        os.close(mine)
        raise SegmentMissing(f"{lost}it has closed the segment and opened something else since")
    return mine


def _make_anonymous(header: Header, contents: Mapping[str, bytes] | None) -> int:
    memory.require(header.total_bytes, "an anonymous segment", [memory.machine_room(), memory.group_room()])
    fd = os.memfd_create("memlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        _reserve(fd, header, "an anonymous segment", memory.machine_room)
        _fill(fd, header, contents)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_file(
    header: Header, path: Path, rooms: list[memory.Room | None], contents: Mapping[str, bytes] | None
) -> int:
    """A file with the header in it and all memory reserved; it gets its name when nothing is left to go wrong."""
    what = f"the segment {path}"
    fd, hidden = names.open_nameless(path.parent)
    try:
        memory.require(header.total_bytes, what, rooms)
        _reserve(fd, header, what, lambda: memory.directory_room(path.parent))
        _fill(fd, header, contents)
        names.give_name(fd, hidden, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if hidden is not None:
            os.unlink(hidden)
    return fd


def _fill(fd: int, header: Header, contents: Mapping[str, bytes] | None) -> None:
    for name, content in (contents or {}).items():
        field = header.layout[name]
        if len(content) != field.nbytes:
            raise SegmentError(f"field {name!r} has {field.nbytes} bytes, found contents of {len(content)}")
        os.pwrite(fd, content, header.header_bytes + field.offset)


def _reserve(fd: int, header: Header, what: str, room: Any) -> None:
    try:
        os.posix_fallocate(fd, 0, header.total_bytes)
    except OSError as error:
        # The look before said that there was room; somebody else took it since.
        left: memory.Room = room()
        raise BudgetError(
            f"{what} needs {header.total_bytes} bytes, but {left.limit} has only {left.free} free ({error.strerror})"
        ) from error
    header.write(fd)


def _let_go(fd: int, mapping: _native.Mapping, name: Path | None, owned: bool, pid: int) -> None:
    mapping.close()
    if owned and os.getpid() == pid:  # a forked copy of the owner is not the owner
        with contextlib.suppress(OSError):
            mark_closed(fd)
            if name is not None:
                _unlink_if_ours(name, _identity(fd))
    os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    """What tells one file from another, whatever its names."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _unlink_if_ours(path: Path, identity: tuple[int, int]) -> None:
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path, follow_symlinks=False)
        if (status.st_dev, status.st_ino) == identity:
            os.unlink(path)


def _reclaim_once_per_process() -> None:
    global _reclaimed_for_pid
    if _reclaimed_for_pid != os.getpid():
        _reclaimed_for_pid = os.getpid()
        names.reclaim()
