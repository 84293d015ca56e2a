"""Child processes and what they run, dead owners, and segments written by hand.

Light to import, because a spawned child imports it again.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from memlane.core import SIGNAL, Layout, Peer, Segment, Signal, die_with
from memlane.core.children import ensure_fork_server
from memlane.core.header import Header

METHODS = ["fork", "forkserver", "spawn"]
PATIENCE = 60.0
"""Seconds after which a test gives up on a child. Not a promise of memlane: the machine may be busy."""

PROMISE = 1.0
"""Seconds within which a death is noticed and survivors go on."""

FIELDS = {"obs": ("float32", (4, 3)), "count": ("int64", 8), "bell": (SIGNAL, 2)}
"""What most tests put into a segment."""


# ------------------------------------------------------------------------------------------------------------ processes


@contextmanager
def child(
    function: Callable[..., object], *args: object, method: str = "fork", may_die_of: int = signal.SIGKILL
) -> Iterator[BaseProcess]:
    """A process that runs ``function``. At the end of the block it must return, or die of SIGKILL or ``may_die_of``."""
    process = mp.get_context(method).Process(target=function, args=args)  # type: ignore[attr-defined]
    process.start()
    try:
        yield process
        process.join(PATIENCE)
        assert not process.is_alive(), f"{function.__name__} did not end"
    finally:
        process.kill()
        process.join()
    assert process.exitcode in (0, -may_die_of, -signal.SIGKILL), (
        f"{function.__name__} ended with exit code {process.exitcode}"
    )


def ask(function: Callable[..., Any], *args: object, method: str = "fork") -> Any:
    """Call ``function`` in a new process and return its result; what it raises there is raised here."""
    answers, pipe = mp.Pipe(duplex=False)
    with child(_answer, pipe, function, args, method=method):
        pipe.close()
        return receive(answers)


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    send_outcome(pipe, function, *args)


def send_outcome(pipe: Connection, function: Callable[..., Any], *args: object) -> None:
    try:
        outcome: tuple[bool, Any] = (True, function(*args))
    except Exception as error:
        outcome = (False, error)
    pipe.send(outcome)


def receive(pipe: Connection) -> Any:
    """The next outcome that a child sends."""
    assert pipe.poll(PATIENCE), "no answer from the child"
    worked, value = pipe.recv()
    pipe.close()
    if not worked:
        raise value
    return value


def script(code: str, *args: object, start_new_session: bool = False, **environment: str) -> subprocess.Popen[str]:
    """A new interpreter that runs ``code``. It can import this module."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
        env={**os.environ, **environment},
    )


def output_of(code: str, *args: object, **environment: str) -> str:
    """Run ``code`` in a new interpreter, which must exit with 0 and print nothing on stderr; return its stdout."""
    with script(code, *args, **environment) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, ""), f"exit code {process.returncode}\n{errors}"
    return output


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def within(seconds: float) -> float:
    """``seconds`` on an idle machine; longer, in proportion, while more threads want to run than there are cores.

    For what is promised within a time: on a busy machine every process gets only a share of a core.
    """
    load, _, _, threads, _ = Path("/proc/loadavg").read_text().split()
    runnable = max(float(load), int(threads.partition("/")[0]))
    return seconds * max(1.0, runnable / len(os.sched_getaffinity(0)))


def state_of(pid: int | None) -> str:
    """The kernel's letter for a process: R runs, S sleeps, T is stopped, Z has ended and is not reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def dead_peer(name: str = "process") -> Peer:
    """A process that has certainly ended."""
    with child(os.getpid) as process:
        return Peer.of(process.pid or 0, name)


def foreign_peer(peer: Peer) -> Peer:
    """The process with the pid and start time of ``peer`` in another pid namespace."""
    return Peer(peer.pid, peer.start, peer.name, peer.namespaces + 1)


# ------------------------------------------------------------------------------------------------------------- segments


def write_segment(
    path: Path,
    owner: Peer | None = None,
    layout: Layout | None = None,
) -> Path:
    """Write a segment file by hand, as ``owner`` would have left it."""
    layout = layout or Layout(FIELDS)
    header = Header(layout, owner or Peer.current(), time.time_ns())
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.truncate(fd, header.total_bytes)
        header.write(fd)
    finally:
        os.close(fd)
    return path


def create_and_die(name: str) -> None:
    segment = Segment.create(FIELDS, name=name)
    segment["obs"][:] = 7
    os.kill(os.getpid(), signal.SIGKILL)


def leave_behind(name: str) -> Peer:
    """Make a named segment whose owner is killed; return the owner."""
    process = mp.get_context("fork").Process(target=create_and_die, args=(name,))
    process.start()
    owner = Peer.of(process.pid or 0)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    return owner


# ----------------------------------------------------------------------------------------------------- what children do


def total(segment: Segment) -> float:
    return float(segment["obs"].sum())


def total_after(segment: Segment, start: Segment) -> float:
    """As ``total``, but only after the sender has stored 1 in the signal ``bell`` of ``start``."""
    start.signal("bell").wait(1, timeout=PATIENCE)
    return total(segment)


def total_in_grandchild(segment: Segment, method: str) -> float:
    answer: float = ask(total, segment, method=method)
    return answer


def write_row(segment: Segment, row: int, value: float) -> None:
    segment["obs"][row] = value


def inheritable_descriptors_of(segment: Segment) -> int:
    """How many descriptors of the segment a program started from here would inherit."""
    copies = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_same(fd, segment._fd)]
    return sum(os.get_inheritable(fd) for fd in copies)


def _is_same(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:  # the descriptor of the listing itself
        return False


def receive_and_total(source: Any) -> float:
    segment = source.recv() if hasattr(source, "recv") else source.get()
    with segment:
        return total(segment)


def attach_and_exit(name: str) -> float:
    return total(Segment.attach(name))


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def ring_when_tied(peer: Peer, grace: float, stubborn: bool, ready: Signal | Segment) -> None:
    """Let this process die with ``peer``, advance the signal ``bell``, and sleep."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with(peer, grace)
    assert isinstance(ready, Segment)
    ready["count"][0] = os.getpid()
    ready.signal("bell").add()
    sleep_forever()


def parent_of_tied_child(name: str, method: str, grace: float, stubborn: bool, thread: str = "") -> None:
    """Run a child that dies with this process, which the test kills. It is started by the main thread, by "a thread",
    or by "a thread that has ended"."""
    with Segment.attach(name) as board:
        context = mp.get_context(method)
        if method == "forkserver":
            ensure_fork_server([])
        process = context.Process(  # type: ignore[attr-defined]
            target=ring_when_tied, args=(Peer.current("parent"), grace, stubborn, board)
        )
        if not thread:
            process.start()
        else:
            starter = threading.Thread(target=start_and_stay, args=(process, thread == "a thread"), daemon=True)
            starter.start()
            if thread == "a thread that has ended":
                starter.join()
                board.signal("bell", 1).add()
        sleep_forever()


def start_and_stay(process: BaseProcess, stay: bool) -> None:
    process.start()
    if stay:
        sleep_forever()
