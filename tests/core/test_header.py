"""Header: the content of the first page of a segment, and that every number in it is checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.core import Layout, Peer, Segment, SegmentError
from memlane.core import header as header_module
from memlane.core.header import (
    CLOSED,
    DTYPE,
    LAYOUT_OFFSET,
    MAGIC,
    PAGE,
    READY,
    VERSION,
    Header,
    mark_closed,
    read_owner,
)
from memlane.core.liveness import own_namespaces
from memlane.core.lowlevel import PeerState
from tests.support import strategies as strategies
from tests.support.processes import FIELDS, dead_peer, foreign_peer, write_segment

LAYOUT = Layout(FIELDS)
PLACES = {name: (DTYPE.fields[name][1], DTYPE.fields[name][0]) for name in DTYPE.names or ()}  # type: ignore[index]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_segment(tmp_path / "segment", layout=LAYOUT)


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def change(fd: int, field: str, value: object) -> None:
    offset, dtype = PLACES[field]
    os.pwrite(fd, np.array(value, dtype).tobytes(), offset)


def test_the_table_in_the_text_is_the_dtype() -> None:
    rows = re.findall(r"^ +(\d+) +(\d+) +(\w+) ", header_module.__doc__ or "", re.MULTILINE)
    assert {name: (int(offset), int(size)) for offset, size, name in rows} == {
        name: (offset, dtype.itemsize) for name, (offset, dtype) in PLACES.items()
    }


def test_the_numbers_are_part_of_format_version_1(fd: int) -> None:
    header = Header.read(fd, "here")
    page = os.pread(fd, LAYOUT_OFFSET, 0)
    numbers = [int.from_bytes(page[at : at + 8], "little") for at in range(16, 80, 8)]
    assert page[:16] == b"MEMLANE\0" + b"\1\0\0\0" + b"\1\0\0\0"
    assert numbers == [
        4096,
        4096 + LAYOUT.nbytes,
        LAYOUT.hash,
        len(LAYOUT.to_bytes()),
        os.getpid(),
        Peer.current().start,
        own_namespaces(),
        header.created_ns,
    ]
    assert page[80:] == bytes(LAYOUT_OFFSET - 80)


@settings(deadline=None, max_examples=50)
@given(strategies.layouts)
def test_what_is_written_is_what_is_read(layout: Layout) -> None:
    header = Header.new(layout)
    fd = os.memfd_create("header")
    try:
        os.truncate(fd, header.total_bytes)
        header.write(fd)
        assert Header.read(fd, "here") == header
    finally:
        os.close(fd)


@pytest.mark.parametrize("count", [1, 100, 1000])
def test_the_fields_begin_on_the_page_behind_a_description_of_any_length(count: int) -> None:
    header = Header.new(Layout({f"field {i}": ("f4", 3) for i in range(count)}))
    assert header.header_bytes % PAGE == 0
    assert 0 <= header.header_bytes - (LAYOUT_OFFSET + len(header.layout.to_bytes())) < PAGE


def test_a_description_that_fills_its_page_to_the_last_byte_needs_no_second_page() -> None:
    room = PAGE - LAYOUT_OFFSET - len(Layout({"x": ("f4", 3)}).to_bytes()) + 1
    assert Header.new(Layout({"x" * room: ("f4", 3)})).header_bytes == PAGE
    assert Header.new(Layout({"x" * (room + 1): ("f4", 3)})).header_bytes == 2 * PAGE


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("magic", b"MEMLANF", ["the magic bytes b'MEMLANE'", "b'MEMLANF'"]),
        ("magic", b"MEMLANE2", ["the magic bytes b'MEMLANE'", "b'MEMLANE2'"]),
        ("magic", b"", ["the magic bytes b'MEMLANE'", "b''"]),
        ("version", VERSION + 1, [f"format version {VERSION}", f"found {VERSION + 1}"]),
        ("version", 0, [f"format version {VERSION}", "found 0"]),
        ("state", 0, [f"state {READY} or {CLOSED}", "found 0"]),
        ("state", 3, [f"state {READY} or {CLOSED}", "found 3"]),
        ("header_bytes", 0, ["a header with a layout of ", "a header of 0 bytes"]),
        ("header_bytes", 2 * PAGE, ["a header with a layout of ", f"a header of {2 * PAGE} bytes"]),
        ("header_bytes", 2**64 - 1, ["a header with a layout of ", f"a header of {2**64 - 1} bytes"]),
        (
            "total_bytes",
            PAGE + LAYOUT.nbytes - 64,
            [f"{PAGE + LAYOUT.nbytes} in total", f"{PAGE + LAYOUT.nbytes - 64}"],
        ),
        ("total_bytes", PAGE + LAYOUT.nbytes + 1, [f"{PAGE + LAYOUT.nbytes + 1} bytes", f"of {PAGE + LAYOUT.nbytes}"]),
        ("total_bytes", 2**64 - 1, [f"{2**64 - 1} bytes", f"a file of {PAGE + LAYOUT.nbytes}"]),
        ("total_bytes", 0, ["that fits into 0 bytes", f"a header of {PAGE} bytes"]),
        ("layout_hash", LAYOUT.hash ^ 1, [hex(LAYOUT.hash), hex(LAYOUT.hash ^ 1)]),
        ("layout_bytes", 0, ["layout cannot be read", "b''"]),
        ("layout_bytes", len(LAYOUT.to_bytes()) - 1, ["layout cannot be read", "JSON"]),
        ("layout_bytes", len(LAYOUT.to_bytes()) + 1, ["layout cannot be read", "JSON"]),
        ("layout_bytes", PAGE, [f"a layout of {PAGE} bytes", f"a header of {PAGE} bytes"]),
        ("layout_bytes", 2**64 - 1, [f"a layout of {2**64 - 1} bytes"]),
        ("owner_pid", 0, ["a pid from 1 to", "found 0"]),
        ("owner_pid", 2**64 - 1, ["a pid from 1 to", f"found {2**64 - 1}"]),
    ],
)
def test_a_wrong_number_is_an_error_that_says_expected_and_found(
    fd: int, field: str, value: object, words: list[str]
) -> None:
    change(fd, field, value)
    with pytest.raises(SegmentError) as caught:
        Header.read(fd, "the file")
    assert [word for word in ["the file is not a usable segment", *words] if word not in str(caught.value)] == []


def test_a_description_longer_than_any_layout_is_not_even_read(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MAX_DESCRIPTION_BYTES", 10)
    with pytest.raises(SegmentError, match=f"at most 10 bytes, found {len(LAYOUT.to_bytes())}"):
        Header.read(fd, "here")


def test_another_layout_under_the_old_hash_is_an_error(fd: int) -> None:
    description = LAYOUT.to_bytes()
    os.pwrite(fd, description.replace(b"<f4", b"<i4"), LAYOUT_OFFSET)
    with pytest.raises(SegmentError, match="layout hash"):
        Header.read(fd, "here")


def test_a_layout_that_needs_more_memory_than_the_file_has_is_an_error(fd: int) -> None:
    larger = Layout({**FIELDS, "count": ("int64", 9999)})
    os.pwrite(fd, larger.to_bytes(), LAYOUT_OFFSET)
    change(fd, "layout_bytes", len(larger.to_bytes()))
    change(fd, "layout_hash", larger.hash)
    with pytest.raises(SegmentError, match=f"{PAGE + larger.nbytes} in total for its layout"):
        Header.read(fd, "here")


SIZES = sorted(
    {
        size + step
        for size in (1, LAYOUT_OFFSET, LAYOUT_OFFSET + len(LAYOUT.to_bytes()), PAGE, PAGE + LAYOUT.nbytes)
        for step in (-1, 0, 1)
        if size + step < PAGE + LAYOUT.nbytes
    }
)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_cut_off_at_any_boundary_is_an_error_that_names_its_size(path: Path, size: int) -> None:
    os.truncate(path, size)
    with pytest.raises(SegmentError, match=f"found a file of {size}; it is damaged"):
        Segment.attach(file=path)


def test_a_file_that_is_longer_than_its_segment_is_accepted(path: Path) -> None:
    os.truncate(path, PAGE + LAYOUT.nbytes + 1)
    with Segment.attach(file=path) as segment:
        assert segment.nbytes == PAGE + LAYOUT.nbytes


def test_a_file_that_shrinks_while_it_is_read_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(SegmentError, match="here is truncated: expected 128 bytes at offset 0, found 0"):
        Header.read(fd, "here")


def test_the_last_word_of_the_owner_can_be_read(fd: int) -> None:
    assert Header.read(fd, "here").state == READY
    mark_closed(fd)
    assert Header.read(fd, "here").state == CLOSED


@pytest.mark.parametrize(
    ("owner", "state"),
    [
        (Peer.current, PeerState.ALIVE),
        (dead_peer, PeerState.DEAD),
        (lambda: foreign_peer(Peer.current()), PeerState.UNKNOWN),
        (lambda: foreign_peer(dead_peer()), PeerState.UNKNOWN),
    ],
    ids=["alive", "dead", "of another namespace", "dead, of another namespace"],
)
def test_the_owner_that_is_read_is_the_one_that_was_written(
    fd: int, owner: Callable[[], Peer], state: PeerState
) -> None:
    written = owner()
    Header(LAYOUT, written, 0).write(fd)
    found = Header.read(fd, "here").owner
    assert (found, found.state, read_owner(fd, "here")) == (written, state, (written, 0))


WORDS = st.sampled_from([0, 1, 127, 128, 4095, 4096, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1])


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_header_with_changed_bytes_is_the_same_layout_or_a_segment_error(data: st.DataObject) -> None:
    page = bytearray(PAGE)
    fd = os.memfd_create("header")
    try:
        header = Header.new(LAYOUT)
        os.truncate(fd, header.total_bytes)
        header.write(fd)
        page[:] = os.pread(fd, PAGE, 0)
        for _ in range(data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                offset, dtype = PLACES[data.draw(st.sampled_from([name for name in PLACES if name != "magic"]))]
                value = data.draw(WORDS) % 2 ** (8 * dtype.itemsize)
                page[offset : offset + dtype.itemsize] = value.to_bytes(dtype.itemsize, "little")
            else:
                at = data.draw(st.integers(0, LAYOUT_OFFSET + len(LAYOUT.to_bytes()) - 1))
                page[at] = data.draw(st.integers(0, 255))
        os.pwrite(fd, page, 0)
        with suppress(SegmentError), Segment._from_fd(os.dup(fd), "file", Path("fuzzed"), writeable=True) as segment:
            assert segment.layout == LAYOUT
            assert sum(view.nbytes for view in segment.views().values()) == sum(field.nbytes for field in LAYOUT)
            assert isinstance(segment.owner.state, PeerState)
            assert segment.owner.state is PeerState.UNKNOWN or segment.owner.fileno() >= 0
    finally:
        os.close(fd)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=LAYOUT_OFFSET, max_size=3 * LAYOUT_OFFSET))
def test_a_file_of_random_bytes_behind_the_magic_is_a_segment_error(noise: bytes) -> None:
    fd = os.memfd_create("noise")
    try:
        os.pwrite(fd, MAGIC + noise, 0)
        with pytest.raises(SegmentError, match="noise is not a usable segment"):
            Header.read(fd, "noise")
    finally:
        os.close(fd)
