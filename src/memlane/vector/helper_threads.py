"""Helper threads of the caller: threads that Python did not start, in practice those of the thread pools of numeric
libraries.

The pool of a torch policy has a thread for each core. Between two operations these threads do not sleep but spin, for
milliseconds, on the cores that the workers need. The kernel divides such a core fairly, in time slices of 3 to 4 ms:
now and then a step of 0.2 ms waits for a whole slice. With a nice value raised by 5, the kernel prefers a worker to a
helper thread, and the helper thread still runs at once on a core that no worker needs. Measured on 2 cores of an AMD
EPYC with a policy on torch's default threads, in microseconds for a policy and a step, without and with: 64 CartPole-v1
500 and 280, 8 HalfCheetah-v5 (with infos in messages) 480 and 303.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from memlane.core.cores import scheduled_ns

_NICE = 5
"""By how much helper threads are lowered. 10 and 19 made no further difference; with the policy SCHED_IDLE, parallel
operations of the caller waited for milliseconds."""
_BUSY = 0.5
"""The share of the time that a helper thread runs or waits for a core, from which on it counts as busy."""
_POOLS = ("libgomp", "libiomp", "libomp", "openblas", "libmkl")
"""Libraries with thread pools, in the names of their files."""


class HelperThreads:
    """Finds the helper threads of this process that are busy, and lowers their priority."""

    def __init__(self) -> None:
        self._busy_before: dict[int, int] = {}
        self._began_ns = 0

    def watch(self) -> None:
        """Begin to watch how long each thread runs."""
        self._began_ns = time.monotonic_ns()
        self._busy_before = _busy_ns()

    def lower_busy(self) -> int:
        """Lower the priority of the threads that were busy since ``watch`` below that of the calling thread; returns
        how many were not that low before.

        Threads of Python are not touched, nor any thread if no library with a thread pool is loaded."""
        least_ns = _BUSY * (time.monotonic_ns() - self._began_ns)
        python = {thread.native_id for thread in threading.enumerate()}
        busy = {
            thread
            for thread, busy_ns in _busy_ns().items()
            if thread not in python and busy_ns - self._busy_before.get(thread, 0) > least_ns
        }
        if not busy or not _has_pool():
            return 0
        nice, lowered = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICE, 19), 0
        for thread in busy:
            with contextlib.suppress(OSError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    lowered += 1
        return lowered


def _busy_ns() -> dict[int, int]:
    """How long each thread of this process has run or waited for a core."""
    busy: dict[int, int] = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not count
            busy[int(thread)] = sum(scheduled_ns(f"/proc/self/task/{thread}"))
    return busy


def _has_pool() -> bool:
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        return any(pool in maps for pool in _POOLS)
    return False
