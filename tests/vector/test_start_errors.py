"""Workers that cannot start: one clear error, no process and no descriptor left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing as mp
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from memlane.core import MemlaneError, Peer, Segment, StartError
from memlane.core.process_limits import explained_start
from memlane.vector import AsyncVectorEnv, WorkerError
from tests.support.processes import METHODS, ask, wait_for
from tests.support.vector_envs import Counter, ours

pytestmark = pytest.mark.timeout(120, method="signal")

NOBODY = 65534
"""A user with few processes, to whom limits apply: they do not to root."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def start_failing(limit: Callable[[], object], count: int, context: str) -> tuple[str, int, list[Any]]:
    """In a process of its own: start workers after ``limit()``. The error, the descriptors left, and the children."""
    server: Any = forkserver._forkserver
    # The fork server of the tests belongs to another process.
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    with ours([Counter] * 2, num_workers=1, context=context):
        pass  # what stays open for good is open now
    before = descriptors()
    limit()
    try:
        with ours([Counter] * count, num_workers=count, context=context):
            return "it started", 0, []
    except StartError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        return str(error), descriptors() - before, mp.active_children()
    finally:
        server._stop()


@pytest.mark.parametrize("context", METHODS)
def test_more_workers_than_descriptors_are_refused_before_the_first(context: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 40, 4096))

    text, left, children = ask(start_failing, limit, 16, context)
    assert "16 workers need about 96 descriptors, but this process has " in text
    assert "lower num_workers=16, or raise the limit (ulimit -n)" in text
    assert (left, children) == (0, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_more_workers_than_processes_are_refused_before_the_first() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (8, 8))
        os.setresuid(NOBODY, NOBODY, NOBODY)

    text, left, children = ask(start_failing, limit, 16, "fork")
    assert f"16 workers need as many processes, but user {NOBODY} has " in text
    assert "may have 8; lower num_workers=16, or raise the limit (ulimit -u)" in text
    assert (left, children) == (0, [])


@pytest.mark.parametrize("allowed", range(0, 24, 2))
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_start_that_runs_out_of_descriptors_at_any_point_leaves_none(
    context: str, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check before the start would refuse it: another thread may open files after that.
    monkeypatch.setattr("memlane.vector.worker_pool.require_startable", lambda *_: None)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1 + allowed, 4096))

    text, left, children = ask(start_failing, limit, 4, context)
    assert "Too many open files" in text
    assert "raise the limit of descriptors (ulimit -n)" in text
    assert (left, children) == (0, [])


def test_a_fork_server_that_has_ended_is_named() -> None:
    expected = "cannot start workers: unexpected EOF; the limit of processes"
    with pytest.raises(StartError, match=expected), explained_start("workers"):
        raise EOFError("unexpected EOF")


PIDFD_OPEN = 434
MEMFD_CREATE, FALLOCATE = (279, 47) if platform.machine() == "aarch64" else (319, 285)


def forbid(number: int, error: int = errno.ENOSYS) -> None:
    """Let a system call fail in this process: with ENOSYS, as on an old kernel."""

    def instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    load, jump_if_equal, give = 0x20, 0x15, 0x06
    program = (
        instruction(load, 0, 0, 0)
        + instruction(jump_if_equal, 0, 1, number)
        + instruction(give, 0, 0, 0x00050000 | error)
        + instruction(give, 0, 0, 0x7FFF0000)
    )
    content = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(content)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(set_no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())


def test_a_kernel_without_pidfds_is_named() -> None:
    text, left, children = ask(start_failing, lambda: forbid(PIDFD_OPEN), 2, "fork")
    assert "cannot start workers: [Errno 38] Function not implemented; memlane needs Linux 5.4 or newer" in text
    assert (left, children) == (0, [])


def create_without(number: int, error: int, file: Path | None) -> str:
    forbid(number, error)
    try:
        Segment.create({"x": ("float32", 4)}, file=file).close()
        return "it was created"
    except MemlaneError as failure:
        return f"{type(failure).__name__}: {failure}"


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_a_sandbox_without_memfd_create_is_named(error: int) -> None:
    text = ask(create_without, MEMFD_CREATE, error, None)
    assert text.startswith(f"SegmentError: cannot create an anonymous segment: memfd_create: {os.strerror(error)}; ")
    assert "Linux 5.4 or newer, and a sandbox that allows memfd_create" in text
    assert "run `memlane doctor`" in text


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_sandbox_without_fallocate_is_not_taken_for_a_lack_of_memory(
    tmp_path: Path, error: int, in_file: bool
) -> None:
    text = ask(create_without, FALLOCATE, error, tmp_path / "file" if in_file else None)
    assert text.startswith("SegmentError: cannot reserve the ")
    assert f"fallocate: {os.strerror(error)}; memlane needs Linux 5.4 or newer, and a sandbox" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errno.ENOSPC, "free (No space left on device); make it smaller"),
        (errno.ENOMEM, "free (Cannot allocate memory); make it smaller"),
        (errno.EDQUOT, "the disk quota of its user is used up"),
        (errno.EFBIG, "a file may not be that large here"),
    ],
)
def test_a_lack_of_space_is_a_budget_error_that_names_the_limit(tmp_path: Path, error: int, expected: str) -> None:
    text = ask(create_without, FALLOCATE, error, tmp_path / "file")
    assert text.startswith("BudgetError: ")
    assert expected in text


def test_a_machine_without_proc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/stat")
    with pytest.raises(StartError, match="/proc is not mounted"), ours([Counter]):
        pass


def start_in_daemon(pipe: Any) -> None:
    try:
        with ours([Counter], num_workers=1):
            pipe.send("it started")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def test_a_daemonic_process_is_told_that_it_can_have_no_workers() -> None:
    answers, pipe = mp.Pipe(duplex=False)
    with contextlib.closing(answers), contextlib.closing(pipe):
        process = mp.get_context("fork").Process(target=start_in_daemon, args=(pipe,), daemon=True)
        process.start()
        assert answers.poll(60)
        text = answers.recv()
        process.join()
    assert text.startswith("StartError: cannot start workers: this process is daemonic")
    assert "daemon=False" in text


class Quitter(Counter):
    def __init__(self) -> None:
        sys.exit(3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exit_while_an_environment_is_built_is_an_error_here(num_workers: int) -> None:
    with pytest.raises(WorkerError, match=r"an environment called sys.exit\(3\)"):
        AsyncVectorEnv([Quitter], num_workers=num_workers)


def test_an_exit_is_the_same_error_if_the_worker_has_ended_before_it_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_the_dead(pid: int, name: str = "process") -> Peer:
        assert wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
        return peer_of(pid, name)

    peer_of = Peer.of
    monkeypatch.setattr(Peer, "of", of_the_dead)
    with pytest.raises(WorkerError, match=r"an environment called sys.exit\(3\)"):
        AsyncVectorEnv([Quitter], num_workers=1)


class HangsAtStart(Counter):
    def __init__(self) -> None:
        time.sleep(600)


@pytest.mark.parametrize("context", METHODS)
def test_an_environment_that_hangs_while_it_is_built_ends_after_the_start_timeout(context: str) -> None:
    began = time.monotonic()
    with pytest.raises(StartError, match=r"of 2 workers did not build .* within start_timeout=2 s") as caught:
        AsyncVectorEnv([Counter, Counter, HangsAtStart], num_workers=2, context=context, start_timeout=2)
    assert "environments 1 to 2" in str(caught.value)
    assert 2 <= time.monotonic() - began < 60
    assert mp.active_children() == []


@pytest.mark.parametrize("timeout", [0, -1, "soon"])
def test_a_start_timeout_must_be_a_positive_number_of_seconds(timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="start_timeout"):
        AsyncVectorEnv([Counter], start_timeout=timeout)
