"""Child processes: functions that the supervisors of vector workers and of collectors share.

They start children, limit how often children are restarted, and describe how a child ended.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

# --------------------------------------------------------------------------------------------------------------- start

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that limit the threads of numeric libraries. A library reads them when it is loaded."""


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Children that are started in this context do not import the main script.

    So a script needs no ``if __name__ == "__main__"``, and notebooks work, even with the start method spawn. The
    function that a child runs must be importable, or pickled by value.
    """
    main = sys.modules.get("__main__")
    if main is None:
        yield
        return
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """In children that are started in this context, numeric libraries use one thread.

    Without it, a dozen workers with a dozen threads each slow each other down. Variables that the user has set stay.
    """
    before = {name: os.environ.get(name) for name in THREAD_LIMITS}
    try:
        for name in THREAD_LIMITS:
            os.environ.setdefault(name, "1")
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def ensure_fork_server(preload: Sequence[str], *, quiet: bool = False) -> None:
    """Start the fork server of ``multiprocessing``, unless it is running.

    The server imports the modules in ``preload`` once, before it forks children. If the user has called
    ``set_forkserver_preload``, that list is used instead. It exits when this process dies, and then continues children
    that are stopped. A server that was started without this function does so only if nothing is stopped.

    The server ignores SIGTERM and SIGHUP, which ``timeout`` and batch systems send to all processes of a program: its
    children are the business of this process, which may need them to end in order. The children themselves start with
    the default action; see ``liveness.leave_signals_to``.

    With ``quiet``, the server and its children ignore Ctrl-C from their first instruction on, and this process waits
    for the server's end when it exits.
    """
    global _preloaded
    server: Any = forkserver._forkserver
    _forget_server_of_parent(server)
    if server._forkserver_pid is None:
        modules = [name for name in server._preload_modules if name != _LIFELINE]
        if modules in (["__main__"], _preloaded):
            # Not one module that imports the others: that deep in the stack, Python 3.11 mapped and unmapped a piece of
            # its stack 800 times during the same imports, which took 12 ms.
            modules = _preloaded = ["memlane._gc_pause", *preload, "memlane._gc_resume"]
        forkserver.set_forkserver_preload([_LIFELINE, *modules])
        ignored = [signal.SIGTERM, signal.SIGINT] if quiet else [signal.SIGTERM]
    else:
        ignored = []  # it is running: no signal to this process should be lost here
    with _ignored(*ignored), without_main_module():
        forkserver.ensure_running()
    if quiet:
        atexit.unregister(_stop_fork_server)
        atexit.register(_stop_fork_server, os.getpid())


@contextlib.contextmanager
def _ignored(*numbers: int) -> Iterator[None]:
    """Ignore signals: a program that is started in this context ignores them from its first instruction on. Signals
    belong to the main thread; in another one this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # getsignal() is None for a handler that was not installed from Python and could not be restored.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not None}
    try:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forget_server_of_parent(server: Any) -> None:
    """In a forked child, forget the server that it has inherited: ``multiprocessing`` would wait for it in vain."""
    if server._forkserver_pid is None:
        return
    try:
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        os.close(server._forkserver_alive_fd)
        modules = server._preload_modules
        server.__init__()
        server._preload_modules = modules


_LIFELINE = "memlane._exit_with_parent"
_preloaded: list[str] | None = None
"""The preload list that memlane has set; None if it has set none."""


def _stop_fork_server(pid: int) -> None:
    """Stop the server that process ``pid`` has started. Otherwise, with torch loaded, it would end noticeably later."""
    if os.getpid() == pid:  # a forked child inherits this exit handler, but not the server as its child
        server: Any = forkserver._forkserver
        server._stop()


def start_child(process: BaseProcess) -> None:
    """Start a child process. A forked child of this process does not end it.

    At the exit of a process that ``os.fork`` created, ``multiprocessing`` would terminate the daemonic children that
    its parent has started, and try to join the others.
    """
    _started.add(process)
    process.start()


_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
"""The child processes that memlane has started."""


def _disown_children() -> None:
    children: Any = vars(multiprocessing.process)["_children"]
    children.difference_update(_started)


os.register_at_fork(after_in_child=_disown_children)


# ------------------------------------------------------------------------------------------------------------ restarts


class RestartWindow:
    """Limits restarts to ``max_restarts`` within any period of ``seconds``.

    >>> window = RestartWindow(max_restarts=2, seconds=60)
    >>> window.record(), window.record(), window.record()
    (True, True, False)
    """

    def __init__(self, max_restarts: int, seconds: float) -> None:
        self.max_restarts = max_restarts
        self.seconds = seconds
        self._times: deque[float] = deque()

    def record(self) -> bool:
        """Count a restart. Return whether it is allowed; False if it exceeds the limit."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.seconds:
            self._times.popleft()
        return len(self._times) <= self.max_restarts

    @property
    def recent(self) -> int:
        """Restarts in the ``seconds`` before the last ``record``, refused ones included."""
        return len(self._times)


# --------------------------------------------------------------------------------------------------------------- exit


def exit_of(process: BaseProcess, timeout: float = 1.0) -> str | None:
    """Wait up to ``timeout`` seconds for a process to exit, and describe its exit; None if it is still running."""
    process.join(timeout)
    return None if process.exitcode is None else describe_exit(process.exitcode)


def describe_exit(code: int) -> str:
    """Describe an exit code of ``multiprocessing``, where a negative code is the number of a signal.

    >>> describe_exit(1), describe_exit(-15)
    ('exited with code 1', 'was killed by SIGTERM')
    """
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """The name of a signal, with its likely cause if it has one: ``SIGFPE (an integer division by zero ...)``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    cause = _LIKELY_CAUSES.get(number)
    return f"{name} ({cause})" if cause else name


_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "by hand, or the kernel was out of memory",
    signal.SIGSEGV: "an invalid memory access, most likely in native code",
    signal.SIGBUS: "a mapped file was truncated, or memory or disk space for it ran out",
    signal.SIGABRT: "native code aborted, often because of a failed assertion",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGILL: "native code was built for another processor",
}
