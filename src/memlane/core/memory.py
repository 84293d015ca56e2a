"""Memory: how much is free, checked before anything is allocated.

Memory that is promised but then missing shows up as SIGBUS or as a kill by the kernel, far from its cause. So a
segment reserves its memory in full when it is created, and before that this module checks whether the machine, the
control group and the file system have enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memlane.core.errors import BudgetError, SegmentMissing


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory or disk space under one limit."""

    free: int
    """Free bytes."""
    limit: str
    """The limit in words, for error messages: "the machine's available memory"."""


def machine_memory(proc: Path = Path("/proc")) -> FreeMemory:
    """The memory that the machine can provide without swapping."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return FreeMemory(int(line.split()[1]) * 1024, "the machine's available memory")
    raise BudgetError(f"expected a line MemAvailable in {proc}/meminfo, found none; memlane needs Linux 5.4 or newer")


def cgroup_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """The memory left in the tightest control group of this process; None if no control group limits it."""
    return min(_cgroup_limits(proc, groups), key=lambda memory: memory.free, default=None)


def memory_limits() -> list[FreeMemory | None]:
    """What limits the memory that this process can allocate."""
    return [machine_memory(), cgroup_memory()]


def directory_space(directory: Path) -> FreeMemory:
    """The space left in the file system of a directory."""
    try:
        system = os.statvfs(directory)
    except FileNotFoundError:
        raise SegmentMissing(f"the directory {directory} does not exist; create it first") from None
    return FreeMemory(system.f_bavail * system.f_frsize, f"the file system of {directory}")


def require(nbytes: int, what: str, limits: Iterable[FreeMemory | None]) -> None:
    """Raise ``BudgetError`` if any of ``limits`` has fewer than ``nbytes`` free."""
    tightest = min((memory for memory in limits if memory is not None), key=lambda memory: memory.free)
    if nbytes > tightest.free:
        raise BudgetError(
            f"{what} needs {nbytes} bytes ({format_bytes(nbytes)}), but {tightest.limit} has only {tightest.free} "
            f"({format_bytes(tightest.free)}) free; make it smaller, or free some space first"
        )


def format_bytes(nbytes: int) -> str:
    """A size for people, such as ``1.5 GiB``."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / 1024**power:.1f} {' KMGTP'[power]}iB"


def _cgroup_limits(proc: Path, groups: Path) -> Iterator[FreeMemory]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits(
                groups / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _limits(root: Path, path: str, limit_file: str, used_file: str, cache_key: str) -> Iterator[FreeMemory]:
    """The limit of the control group at ``path`` and of each of its ancestors."""
    folder = root / path.lstrip("/")
    while True:
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            limit = "max"  # the root group has no such files, and a path from outside our namespace does not exist
            used, statistics = 0, {}
        if limit.isdigit() and int(limit) < 2**60:  # cgroup version 1 writes "no limit" as a huge number
            droppable = int(statistics.get(cache_key, 0))
            yield FreeMemory(max(0, int(limit) - used + droppable), f"the control group {folder}")
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent
