"""Processes in other namespaces, as containers have them, and in a sandbox without file locks."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE

PID = ("--pid", "--mount-proc")
"""A pid namespace with a /proc of its own: as ``docker run --ipc=host``, it sees none of the processes outside."""
TIME = ("--time", "--boottime", "100000", "--monotonic", "100000")
"""A time namespace whose clocks are a day ahead."""


class Inside:
    """An interpreter in another namespace that runs ``code``, which can print lines and read them."""

    def __init__(self, namespace: tuple[str, ...], code: str, *args: object) -> None:
        self._unshare = subprocess.Popen(
            [*_unshare(namespace), sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """The next line that it prints."""
        assert self._unshare.stdout is not None
        return self._unshare.stdout.readline().strip()

    def tell(self, line: str = "go on") -> None:
        """Send it a line."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.write(line + "\n")
        self._unshare.stdin.flush()

    @property
    def pid(self) -> int:
        """Its pid outside."""
        unshare = self._unshare.pid
        (pid,) = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        return int(pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""
        self.signal(signal.SIGKILL)
        self._unshare.wait(PATIENCE)  # unshare ends when its child has ended

    def ends_well(self) -> None:
        """Wait for its end, which must be a success."""
        assert self._unshare.wait(PATIENCE) == 0

    def close(self) -> None:
        with self._unshare:
            self._unshare.kill()  # with --kill-child, its child too


@contextmanager
def inside(namespace: tuple[str, ...], code: str, *args: object) -> Iterator[Inside]:
    """Run ``code`` in another namespace; it is killed at the end of the block. Skips the test if that is impossible."""
    if refusal := _refusal(namespace):
        pytest.skip(f"unshare {' '.join(namespace)} is not possible here: {refusal}")
    process = Inside(namespace, code, *args)
    try:
        yield process
    finally:
        process.close()


def output_inside(namespace: tuple[str, ...], code: str, *args: object) -> str:
    """What ``code`` prints in another namespace, where it must end well."""
    with inside(namespace, code, *args) as process:
        lines = list(iter(process.says, ""))
        process.ends_well()
    return "\n".join(lines)


def _unshare(namespace: tuple[str, ...]) -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, *namespace, "--fork", "--kill-child"]


@functools.cache
def _refusal(namespace: tuple[str, ...]) -> str:
    """Why this namespace cannot be made here; empty if it can."""
    try:
        attempt = subprocess.run([*_unshare(namespace), "true"], capture_output=True, text=True, timeout=PATIENCE)
    except OSError as error:
        return str(error)
    return attempt.stderr.strip() if attempt.returncode else ""


# -------------------------------------------------------------------------------------------------------- without locks

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_RET_ERRNO, _RET_ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FCNTL = 72 if os.uname().machine == "x86_64" else 25


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def forbid_file_locks(error: int) -> None:
    """Let every later request of this process for an open-file-description lock fail with ``error``, as on a file
    system without locks."""
    program = (_Instruction * 6)(
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 3, _FCNTL),
        (_LOAD, 0, 0, 24),  # its second argument
        (_JUMP_IF_EQUAL, 0, 1, fcntl.F_OFD_SETLK),
        (_RETURN, 0, 0, _RET_ERRNO | error),
        (_RETURN, 0, 0, _RET_ALLOW),
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    filtered = _Program(len(program), program)
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filtered), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")
