"""Strangers: segments of other users in a directory that everybody may write to. They are refused by their owner and
mode, before anything in them is read. These tests need root, to become other users."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memlane.core import Layout, Peer, Segment, SegmentError, SegmentExists, leftovers, names, reclaim
from tests.support.processes import FIELDS, ask, dead_peer, total, write_segment

SQUATTER, VICTIM = 2002, 2001

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory like /dev/shm: everybody may create files in it and remove only their own."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tests-strangers-"))
    path.chmod(0o1777)
    monkeypatch.setenv("MEMLANE_SHM_DIR", str(path))
    yield path
    shutil.rmtree(path)


def as_user(uid: int, function: Callable[..., Any], *args: object) -> Any:
    """Call ``function`` in a process of another user."""
    return ask(_become_and_call, uid, function, args)


def _become_and_call(uid: int, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    return function(*args)


def squat(path: Path, mode: int) -> None:
    write_segment(path).chmod(mode)


def attach(name: str) -> float:
    with Segment.attach(name) as segment:
        return total(segment)


def attach_read_only(name: str) -> float:
    with Segment.attach(name, writeable=False) as segment:
        return total(segment)


@needs_root
@pytest.mark.parametrize(("look", "mode"), [(attach, 0o666), (attach_read_only, 0o666), (attach_read_only, 0o644)])
def test_a_segment_of_another_user_is_not_attached_to(folder: Path, look: Callable[[str], float], mode: int) -> None:
    as_user(SQUATTER, squat, folder / "memlane-ring", mode)
    with pytest.raises(SegmentError, match=f"another user: expected uid {VICTIM} or root, found uid {SQUATTER}"):
        as_user(VICTIM, look, "ring")


@needs_root
def test_root_does_not_attach_to_the_segment_of_a_user(folder: Path) -> None:
    as_user(SQUATTER, squat, folder / "memlane-ring", 0o600)
    with pytest.raises(SegmentError, match=f"another user: expected uid 0 or root, found uid {SQUATTER}"):
        Segment.attach("ring")


@needs_root
def test_a_user_may_read_what_root_lets_everybody_read(folder: Path) -> None:
    squat(folder / "memlane-ring", 0o644)
    assert as_user(VICTIM, attach_read_only, "ring") == 0


@needs_root
def test_a_user_attaches_to_its_own_segment(folder: Path) -> None:
    as_user(VICTIM, squat, folder / "memlane-ring", 0o600)
    assert as_user(VICTIM, attach, "ring") == 0


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o622])
def test_a_segment_that_others_may_write_to_is_refused_by_name_and_by_file(folder: Path, mode: int) -> None:
    squat(folder / "memlane-ring", mode)
    for where in ({"name": "ring"}, {"file": folder / "memlane-ring"}):
        with pytest.raises(SegmentError, match=f"can be written by other users: expected mode 600, found {mode:o}"):
            Segment.attach(**where)  # type: ignore[arg-type]


@needs_root
def test_a_name_that_another_user_has_taken_is_an_error_that_says_whose_it_is(folder: Path) -> None:
    as_user(SQUATTER, squat, folder / "memlane-ring", 0o666)
    with pytest.raises(SegmentExists, match=f"belongs to another user, uid {SQUATTER}; choose another name"):
        as_user(VICTIM, create, "ring")


def create(name: str) -> None:
    Segment.create(FIELDS, name=name).close()


def leave_behind_as_if_dead(folder: Path, owner: Peer) -> None:
    write_segment(folder / "memlane-theirs", owner)
    hidden = f"{names._UNFINISHED}{owner.pid}-{owner.start}-{owner.namespaces}-00"
    write_segment(folder / hidden, owner)


def reclaim_and_list_opened() -> tuple[list[str], list[str]]:
    """What reclaim and leftovers find, and the names of the files that were opened for it."""
    opened = []
    real_open = os.open

    def recording_open(path: Any, *args: Any, **options: Any) -> int:
        opened.append(Path(path).name)
        return real_open(path, *args, **options)

    os.open = recording_open  # type: ignore[assignment]
    try:
        found = [leftover.path.name for leftover in [*leftovers(), *reclaim()]]
    finally:
        os.open = real_open
    return found, [name for name in opened if "memlane-" in name]


@needs_root
@pytest.mark.parametrize("user", [VICTIM, 0], ids=["user", "root"])
def test_reclaim_neither_opens_nor_removes_what_belongs_to_another_user(folder: Path, user: int) -> None:
    as_user(SQUATTER, leave_behind_as_if_dead, folder, dead_peer())
    assert as_user(user, reclaim_and_list_opened) == ([], [])
    assert len(list(folder.iterdir())) == 2


@needs_root
def test_reclaim_removes_what_belongs_to_the_same_user(folder: Path) -> None:
    as_user(VICTIM, leave_behind_as_if_dead, folder, dead_peer())
    found, _ = as_user(VICTIM, reclaim_and_list_opened)
    assert len(found) == 4
    assert list(folder.iterdir()) == []


def test_reclaim_reads_who_owns_a_segment_and_not_its_layout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of a file can have 64 MB, which takes seconds to read; a directory can have many such files."""
    write_segment(folder / "memlane-large", dead_peer(), layout=Layout({f"field {i}": ("f4", 1) for i in range(5000)}))
    read = 0
    pread = os.pread

    def counting_pread(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal read
        read += nbytes
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", counting_pread)
    assert [leftover.path.name for leftover in reclaim()] == ["memlane-large"]
    assert read <= 3 * 128  # listed, and checked again under the lock
