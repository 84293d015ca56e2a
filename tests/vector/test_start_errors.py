"""Workers that cannot start: one clear error, no process and no descriptor left."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import resource
import struct
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import pytest

from memlane.core import StartError
from memlane.core.process_limits import explained_start
from memlane.vector import AsyncVectorEnv, WorkerError
from tests.support.processes import METHODS, ask
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


def forbid(number: int) -> None:
    """Let a system call fail with ENOSYS in this process, as on an old kernel."""

    def instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    load, jump_if_equal, give = 0x20, 0x15, 0x06
    program = (
        instruction(load, 0, 0, 0)
        + instruction(jump_if_equal, 0, 1, number)
        + instruction(give, 0, 0, 0x00050000 | 38)
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
