"""Process limits: whether child processes can be started, checked before the first one is, and why a start failed.

A start that fails halfway leaves a mess: the fork server ends when it cannot fork, and ``multiprocessing`` loses
descriptors when it cannot open all that it needs.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing as mp
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from memlane.core.errors import StartError

_DESCRIPTORS_EACH = 5
"""Descriptors of this process for each child: its pipe, its pidfd, and what ``multiprocessing`` watches it with."""
_DESCRIPTORS_SPARE = 16
"""Descriptors for the fork server, the segments, and the start of one child."""


def require_startable(count: int, noun: str, setting: str) -> None:
    """Raise ``StartError`` if ``count`` children cannot be started. ``noun`` is what they are, ``setting`` what gives
    their number: ``"workers", "num_workers"``."""
    if mp.current_process().daemon:
        raise StartError(
            f"cannot start {noun}: this process is daemonic, as workers of multiprocessing.Pool and of a vector "
            "environment are, and multiprocessing allows it no children; start it with daemon=False"
        )
    if not os.path.exists("/proc/self/stat"):
        raise StartError(f"cannot start {noun}: /proc is not mounted, and memlane reads there whether a process lives")
    remedy = f"lower {setting}={count}, or raise the limit"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = count * _DESCRIPTORS_EACH + _DESCRIPTORS_SPARE
    if limit != resource.RLIM_INFINITY and needed > limit - (found := len(os.listdir("/proc/self/fd"))):
        raise StartError(
            f"{count} {noun} need about {needed} descriptors, but this process has {found} open and may have {limit}; "
            f"{remedy} (ulimit -n)"
        )
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0 and count > limit - (found := _own_threads(limit - count)):
        raise StartError(
            f"{count} {noun} need as many processes, but user {os.geteuid()} has {found} processes and threads and may "
            f"have {limit}; {remedy} (ulimit -u)"
        )


@contextlib.contextmanager
def explained_start(noun: str) -> Iterator[None]:
    """Turn the errors of a start in this context into ``StartError``."""
    try:
        yield
    except (OSError, EOFError) as error:
        if isinstance(error, StartError):
            raise
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EAGAIN
        raise StartError(f"cannot start {noun}: {error or 'the fork server has ended'}; {_remedy(number)}") from error


def require_descriptors(count: int = 12) -> None:
    """Raise ``OSError`` unless this process can open ``count`` more descriptors: enough for the start of one child.

    ``multiprocessing`` does not close those that it has opened when it cannot open the next.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open("/", os.O_PATH | os.O_CLOEXEC))


def _remedy(number: int) -> str:
    if number in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit of descriptors (ulimit -n)"
    if number in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        return "memlane needs Linux 5.4 or newer and a sandbox that allows it: `memlane doctor` says what is missing"
    if number == errno.ENOMEM:
        return "free some memory"
    return "the limit of processes (ulimit -u, or pids.max of the control group) or the memory may be used up"


def _own_threads(enough: int) -> int:
    """How many threads this user has, or the number of all threads if that is at most ``enough``."""
    total = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    if total <= enough:
        return total
    found = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                found += len(os.listdir(process / "task")) if process.stat().st_uid == os.geteuid() else 0
    return found
