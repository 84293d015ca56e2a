"""Cores: how many of them this process may use, by its affinity and by the limits of its control groups, and how long
processes and threads run on them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def core_count() -> int:
    """How many threads of this process can run at the same time: at least 1.

    A container that is limited to 2 cores sees all cores of its machine; more busy threads than its limit are stopped
    for the rest of each period.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_limit() or float("inf"))))


def cpu_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float | None:
    """The lowest CPU limit of the control groups around this process, in cores; None without a limit."""
    limits = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = cgroups / "cpu" if controllers else cgroups
            innermost = root / path.lstrip("/")
            for group in [innermost, *innermost.parents]:
                if group != root and root not in group.parents:
                    break
                limits += _cpu_quota(group)
    return min(limits, default=None)


def _cpu_quota(group: Path) -> list[float]:
    """The CPU limit of one control group, version 2 or 1; empty without a limit."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return [] if quota == "max" else [int(quota) / int(period)]
        quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    return []


def scheduled_ns(task: str) -> tuple[int, int]:
    """How long a process or thread has run, and how long it could have run and waited for a core. ``task`` is its
    directory in /proc. OSError if it has ended."""
    ran, waited, _ = Path(f"{task}/schedstat").read_text().split()
    return int(ran), int(waited)
