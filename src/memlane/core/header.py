"""Header: the beginning of a segment, which describes its format, its layout and its owner.

    offset  size  field         written by, when
    0       8     magic         creator, before the segment can be found
    8       4     version       creator, before the segment can be found
    12      4     state         creator: READY before the segment can be found, CLOSED when the owner closes it
    16      8     header_bytes  creator; a multiple of the page size, and the offset of the first field
    24      8     total_bytes   creator; header and fields
    32      8     layout_hash   creator
    40      8     layout_bytes  creator; the length of the layout's description, which begins at byte 128
    48      8     owner_pid     creator
    56      8     owner_start   creator; clock ticks since boot
    64      8     owner_ns      creator; the pid and time namespaces in which owner_pid and owner_start have a meaning
    72      8     created_ns    creator; wall clock
    80      8     owner_life    creator of a named segment, right after it can be found; its identity in
                                ``Segment.life``, 0 if it has none

``Segment.attach`` reads the header from the file, checks its numbers against each other and against the file's size,
and only then maps the memory. The header has no field offsets: they follow from the layout.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from memlane.core.errors import LayoutError, SegmentError
from memlane.core.layout import MAX_DESCRIPTION_BYTES, Layout
from memlane.core.liveness import PID_BITS, Peer

MAGIC = b"MEMLANE"
VERSION = 1
PAGE = 4096
LAYOUT_OFFSET = 128
READY, CLOSED = 1, 2

DTYPE = np.dtype(
    {
        "names": [
            "magic", "version", "state", "header_bytes", "total_bytes", "layout_hash", "layout_bytes",
            "owner_pid", "owner_start", "owner_ns", "created_ns", "owner_life",
        ],
        "formats": ["S8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80],
        "itemsize": LAYOUT_OFFSET,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment: read from a file and checked, or about to be written."""

    layout: Layout
    owner: Peer
    """The process that created the segment."""
    created_ns: int
    """Wall-clock time of creation in nanoseconds."""
    state: int = READY

    @classmethod
    def new(cls, layout: Layout) -> Header:
        """The header of a segment that this process creates now."""
        return cls(layout, Peer.current("owner"), time.time_ns())

    @property
    def header_bytes(self) -> int:
        """Size of the header, a multiple of the page size."""
        return -(-(LAYOUT_OFFSET + len(self.layout.to_bytes())) // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        """Size of header and fields."""
        return self.header_bytes + self.layout.nbytes

    def write(self, fd: int) -> None:
        """Write the header to the start of a file."""
        description = self.layout.to_bytes()
        record = np.zeros((), DTYPE)
        record["magic"], record["version"], record["state"] = MAGIC, VERSION, self.state
        record["header_bytes"], record["total_bytes"] = self.header_bytes, self.total_bytes
        record["layout_hash"], record["layout_bytes"] = self.layout.hash, len(description)
        record["owner_pid"], record["owner_start"] = self.owner.pid, self.owner.start
        record["owner_ns"], record["created_ns"] = self.owner.namespaces, self.created_ns
        _write_all(fd, record.tobytes() + description)

    @classmethod
    def read(cls, fd: int, where: str) -> Header:
        """Read and check the header of a file. ``SegmentError`` names ``where``, the expected and the found value."""
        number = _read_numbers(fd, where)
        try:
            layout = Layout.from_bytes(_read_all(fd, number["layout_bytes"], LAYOUT_OFFSET, where))
        except LayoutError as error:
            raise SegmentError(f"{where} is not a usable segment: its layout cannot be read: {error}") from None
        _expect(
            where, layout.hash == number["layout_hash"], f"layout hash {layout.hash:#x}", hex(number["layout_hash"])
        )
        header = cls(layout, _owner(number, where), number["created_ns"], number["state"])
        _expect(
            where,
            (header.header_bytes, header.total_bytes) == (number["header_bytes"], number["total_bytes"]),
            f"{header.header_bytes} header bytes and {header.total_bytes} in total for its layout",
            f"{number['header_bytes']} and {number['total_bytes']}",
        )
        return header


def read_owner(fd: int, where: str) -> tuple[Peer, int]:
    """The owner in the header of a file, and its identity in the life of the segment. Reads 128 bytes and not the
    layout, which can describe half a million fields. Raises ``SegmentError`` as ``Header.read`` does."""
    number = _read_numbers(fd, where)
    return _owner(number, where), min(number["owner_life"], 2**63 - 1)


def write_owner_life(fd: int, process: int) -> None:
    """Record the identity of the owner in the life of its segment."""
    os.pwrite(fd, process.to_bytes(8, "little"), DTYPE.fields["owner_life"][1])  # type: ignore[index]


def mark_closed(fd: int) -> None:
    """Set the state to CLOSED. Only the owner calls it; processes that still map the segment can read the state."""
    os.pwrite(fd, CLOSED.to_bytes(4, "little"), 12)


def is_closed(fd: int, where: str) -> bool:
    """Whether the owner has called ``mark_closed``."""
    return _read_numbers(fd, where)["state"] == CLOSED


def _owner(number: dict[str, int], where: str) -> Peer:
    return Peer(number["owner_pid"], number["owner_start"], f"owner of {where}", number["owner_ns"])


def _expect(where: str, condition: bool, expected: object, found: object) -> None:
    if not condition:
        raise SegmentError(
            f"{where} is not a usable segment: expected {expected}, found {found}; it is damaged, or another "
            "program or version of memlane created it"
        )


def _read_numbers(fd: int, where: str) -> dict[str, int]:
    """Read the numbers in front of the layout's description, and check all that can be checked without the layout."""
    expect = partial(_expect, where)
    status = os.fstat(fd)
    expect(stat.S_ISREG(status.st_mode), "a regular file", f"mode {stat.filemode(status.st_mode)}")
    size = status.st_size
    expect(size >= LAYOUT_OFFSET, f"a header of {LAYOUT_OFFSET} bytes", f"a file of {size}")
    record = np.frombuffer(_read_all(fd, LAYOUT_OFFSET, 0, where), DTYPE)[0]
    number = {name: int(record[name]) for name in DTYPE.names or () if name != "magic"}
    expect(record["magic"] == MAGIC, f"the magic bytes {MAGIC!r}", repr(record["magic"].item()))
    expect(number["version"] == VERSION, f"format version {VERSION}", number["version"])
    expect(number["state"] in (READY, CLOSED), f"state {READY} or {CLOSED}", number["state"])
    expect(
        number["total_bytes"] <= size,
        f"{number['total_bytes']} bytes, as its header says",
        f"a file of {size}",
    )
    expect(
        LAYOUT_OFFSET + number["layout_bytes"] <= number["header_bytes"] <= number["total_bytes"],
        f"a header with a layout of {number['layout_bytes']} bytes that fits into {number['total_bytes']} bytes",
        f"a header of {number['header_bytes']} bytes",
    )
    expect(
        number["layout_bytes"] <= MAX_DESCRIPTION_BYTES,
        f"a layout of at most {MAX_DESCRIPTION_BYTES} bytes",
        number["layout_bytes"],
    )
    pid = number["owner_pid"]
    expect(0 < pid < 2**PID_BITS, f"an owner with a pid from 1 to {2**PID_BITS - 1}", pid)
    return number


def _write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def _read_all(fd: int, nbytes: int, offset: int, where: str) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = os.pread(fd, nbytes - len(data), offset + len(data))
        if not part:
            raise SegmentError(f"{where} is truncated: expected {nbytes} bytes at offset {offset}, found {len(data)}")
        data += part
    return data
