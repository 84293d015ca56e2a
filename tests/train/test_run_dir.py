"""Run directories: every run has its own, and one process at a time trains in it."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing as mp
import os
import re
from pathlib import Path
from typing import Any

import pytest

from memlane.train.run_dir import LOCK_FILE, RunDirError, RunLock, holder_of, make_run_dir, run_name
from tests.support.processes import PATIENCE, script, wait_for

HOLD = """
import sys
from pathlib import Path
from memlane.train.run_dir import RunLock
lock = RunLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def make_when_told(parent: Path, start: Any, results: Any) -> None:
    start.wait(PATIENCE)
    results.put([make_run_dir(parent, "same") for _ in range(20)])


def test_processes_that_want_the_same_name_at_once_get_directories_of_their_own(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=make_when_told, args=(tmp_path / "runs", start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    made = [path for _ in processes for path in results.get(timeout=PATIENCE)]
    for process in processes:
        process.join(PATIENCE)
    assert len(set(made)) == 80
    assert {path.name for path in made} == {"same", *(f"same-{number}" for number in range(2, 81))}


def test_a_name_has_its_parts_and_the_time() -> None:
    assert re.fullmatch(r"CartPole-v1-appo-s3-\d{8}-\d{6}", run_name("CartPole-v1", "appo", "s3"))


def test_a_second_process_is_refused_and_told_who_trains_there_and_a_kill_makes_it_free(tmp_path: Path) -> None:
    with script(HOLD, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunDirError) as caught:
            RunLock(tmp_path)
        assert re.fullmatch(
            rf"{tmp_path} is in use: pid {process.pid} \(.*\) trains in it; wait until it has ended, or choose another "
            "directory",
            str(caught.value),
        )
        process.kill()
        process.wait(PATIENCE)
    assert holder_of(tmp_path) is None
    RunLock(tmp_path).close()


def test_the_holder_of_another_machine_is_the_one_that_has_written_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunLock(tmp_path)
    monkeypatch.setattr("memlane.train.run_dir.holders", lambda _: "")  # what /proc/locks shows of other machines
    assert holder_of(tmp_path) == f"pid {os.getpid()} on {os.uname().nodename}"
    lock.close()
    assert holder_of(tmp_path) is None


def test_asking_who_trains_does_not_refuse_who_wants_to(tmp_path: Path) -> None:
    """The question takes the lock for a moment."""
    RunLock(tmp_path).close()
    code = """
    import sys
    from pathlib import Path
    from memlane.train.run_dir import holder_of
    print("asking", flush=True)
    while True:
        holder_of(Path(sys.argv[1]))
    """
    with script(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asking\n"
        try:
            for _ in range(200):
                RunLock(tmp_path).close()
        finally:
            process.kill()


def test_a_directory_without_a_run_belongs_to_nobody(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    assert holder_of(tmp_path / "none") is None


def test_a_file_system_without_locks_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, operation: int) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunLock(tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} cannot be locked (Function not implemented): make sure that no other process trains in it"
    ]
    assert holder_of(tmp_path) is None


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    pid = os.fork()
    if pid == 0:
        import time

        time.sleep(600)
        os._exit(0)
    try:
        lock.close()
        assert wait_for(lambda: holder_of(tmp_path) is None)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert (tmp_path / LOCK_FILE).exists()
