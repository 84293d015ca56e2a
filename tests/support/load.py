"""Run a command beside a full load: one busy process per core, as ``python -m tests.support.load COMMAND ...``.

The busy processes end with the command, also on Ctrl-C, and with this program, also if it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def keep_busy(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while os.getppid() == parent:  # it may have ended before the call above
        for _ in range(10**6):
            pass


def start_busy_process() -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        keep_busy(parent)
    finally:
        os._exit(0)


def main(command: list[str]) -> int:
    busy: list[int] = []
    try:
        for _ in os.sched_getaffinity(0):
            busy.append(start_busy_process())
        process = subprocess.Popen(command)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the command has got it too, and ends in its own way
                continue
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
