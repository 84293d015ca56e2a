"""Child processes: the kit that supervisors of vector workers and of collectors share.

How children are started, how often they may be restarted, and how their end is described.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

# --------------------------------------------------------------------------------------------------------------- start

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that numeric libraries read when they are loaded."""


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Around the start of processes that need nothing of the main script: children do not import it again.

    Scripts without ``if __name__ == "__main__"`` and notebooks work because of this, also with spawned children.
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
    """Around the start of processes: the numeric libraries that they load use one thread, unless the user says
    otherwise. A dozen workers with a dozen threads each slow each other down."""
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
    """Start the process that children are forked from, unless it runs already.

    ``preload`` are the modules that it imports once for all children; a list that the user has set stays. ``quiet``:
    the server and its children ignore Ctrl-C from their first instruction on, and the server is stopped with this
    process instead of a moment later.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._preload_modules in (["__main__"], _preloaded):
        _preloaded[:] = preload
        forkserver.set_forkserver_preload(list(preload))
    ignore = quiet and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignore else None
    try:
        with without_main_module():
            forkserver.ensure_running()
    finally:
        if ignore:
            signal.signal(signal.SIGINT, before)
    if quiet:
        atexit.unregister(_stop_fork_server)
        atexit.register(_stop_fork_server)


_preloaded: list[str] = []
"""The modules that memlane asked the fork server to import."""


def _stop_fork_server() -> None:
    """The server ends by itself after its parent; with torch loaded that takes long enough to be noticed."""
    server: Any = forkserver._forkserver
    server._stop()


# ------------------------------------------------------------------------------------------------------------ restarts


class RestartWindow:
    """How often children may be restarted: ``max_restarts`` times within ``seconds``."""

    def __init__(self, max_restarts: int, seconds: float) -> None:
        self.max_restarts = max_restarts
        self.seconds = seconds
        self._times: deque[float] = deque()

    def record(self) -> bool:
        """Count a restart that is needed now. False: it is one too many."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.seconds:
            self._times.popleft()
        return len(self._times) <= self.max_restarts

    @property
    def recent(self) -> int:
        """Restarts within the last ``seconds``, those one too many included."""
        return len(self._times)


# ------------------------------------------------------------------------------------------------------------- the end


def exit_of(process: BaseProcess, timeout: float = 1.0) -> str | None:
    """How a process that is ending ended, in words. None: it has not ended within ``timeout`` seconds."""
    process.join(timeout)
    return None if process.exitcode is None else describe_exit(process.exitcode)


def describe_exit(code: int) -> str:
    """An exit code in words. Below zero it is the number of a signal, as in ``multiprocessing``."""
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9, with the likely cause for signals that have one."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    cause = _LIKELY_CAUSES.get(number)
    return f"{name} ({cause})" if cause else name


_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "by hand, or the kernel was out of memory",
    signal.SIGSEGV: "an invalid memory access, most likely in native code",
    signal.SIGBUS: "a mapped file was cut off or the memory behind it ran out",
    signal.SIGABRT: "native code gave up, often a failed assertion",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGILL: "native code built for another processor",
}
