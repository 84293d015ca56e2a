"""FileLock: who has a file, and when the lock ends."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from memlane.core.file_lock import FileInUse, FileLock, is_locked
from tests.support.processes import PATIENCE, child, script, sleep_forever, wait_for


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


def locked(file: Path) -> bool:
    fd = os.open(file, os.O_RDONLY)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


HOLD = """
import sys
from memlane.core.file_lock import FileLock
lock = FileLock(sys.argv[1], shared=False)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_has_the_file(file: Path) -> None:
    with script(HOLD, file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        for shared in (True, False):
            with pytest.raises(FileInUse, match=rf"in use by pid {process.pid} \(python") as caught:
                FileLock(file, shared=shared)
            assert re.fullmatch(rf"pid {process.pid} \(.*\)", caught.value.holders)
        process.kill()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(file: Path, end: signal.Signals) -> None:
    with script(HOLD, file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert locked(file)
        process.send_signal(end)
        process.wait(PATIENCE)
        assert not locked(file)
        FileLock(file, shared=False).close()


def test_a_lock_that_is_shared_keeps_out_who_wants_the_file_alone(file: Path) -> None:
    one, two = FileLock(file, shared=True), FileLock(file, shared=True)
    assert not locked(file)
    one.close()
    with pytest.raises(FileInUse, match="this process"):
        FileLock(file, shared=False)
    two.close()
    FileLock(file, shared=False).close()


def test_a_forked_child_does_not_keep_what_its_parent_has_alone(file: Path) -> None:
    lock = FileLock(file, shared=False)
    with child(sleep_forever) as process:
        assert locked(file)
        lock.close()
        assert wait_for(lambda: not locked(file)), "the child holds it"
        process.kill()


def test_patience_is_enough_for_a_lock_that_is_given_up(file: Path) -> None:
    first = FileLock(file, shared=True)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    FileLock(file, shared=False, patience=PATIENCE).close()
    timer.join()


def test_a_file_that_is_not_there_is_an_os_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "none", shared=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_lock_leaves_no_descriptor(file: Path) -> None:
    lock = FileLock(file, shared=False)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileInUse):
        FileLock(file, shared=False)
    assert len(os.listdir("/proc/self/fd")) == before
    lock.close()
