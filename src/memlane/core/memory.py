"""Memory: how much there is room for, before anything is allocated.

Memory that is promised now and missing later shows up as SIGBUS or as the out-of-memory killer, far from its cause. So
segments are reserved in full when they are made, and before that this module looks whether the machine, the control
group and the file system can give that much.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlane.core.errors import BudgetError, SegmentMissing


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free, and the limit that says so."""

    free: int
    limit: str


def machine_room(proc: Path = Path("/proc")) -> Room:
    """What the machine could give without swapping."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return Room(int(line.split()[1]) * 1024, "the machine's available memory")
    raise BudgetError(f"{proc}/meminfo has no line MemAvailable")


def group_room(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """What the tightest control group that holds this process could still give; None where none limits it."""
    rooms = list(_group_rooms(proc, groups))
    return min(rooms, key=lambda room: room.free, default=None)


def directory_room(directory: Path) -> Room:
    """What the file system behind a directory could still take."""
    try:
        system = os.statvfs(directory)
    except FileNotFoundError:
        raise SegmentMissing(f"the directory {directory} does not exist") from None
    return Room(system.f_bavail * system.f_frsize, f"the file system of {directory}")


def require(nbytes: int, what: str, rooms: Iterator[Room | None] | list[Room | None]) -> None:
    """``BudgetError`` if any of ``rooms`` is too small for ``nbytes``."""
    tightest = min((room for room in rooms if room is not None), key=lambda room: room.free)
    if nbytes > tightest.free:
        raise BudgetError(
            f"{what} needs {nbytes} bytes ({readable(nbytes)}), but {tightest.limit} has only {tightest.free} "
            f"({readable(tightest.free)}) free; lower its shape or free memory first"
        )


def readable(nbytes: int) -> str:
    """``1.5 GiB`` for people; exact numbers stand beside it where they matter."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / 1024**power:.1f} {' KMGTP'[power]}iB"


def _group_rooms(proc: Path, groups: Path) -> Iterator[Room]:
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


def _limits(root: Path, path: str, limit_file: str, used_file: str, cache_key: str) -> Iterator[Room]:
    """Each group on the way up to the root can set a limit of its own."""
    folder = root / path.lstrip("/")
    while True:
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            limit = "max"  # no such file here: the root has none, nor has a path from outside our namespace
            used, statistics = 0, {}
        if limit.isdigit() and int(limit) < 2**60:  # version 1 writes "no limit" as a huge number
            droppable = int(statistics.get(cache_key, 0))
            yield Room(max(0, int(limit) - used + droppable), f"the control group {folder}")
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent
