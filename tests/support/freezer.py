"""The freezer of control groups, as ``docker pause`` uses it. Unlike SIGSTOP, no process sees that one is frozen."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PATIENCE = 1.0


class Freezer:
    """Freezes one process at a time. Without rights to make control groups, ``freeze`` does nothing."""

    def __init__(self) -> None:
        self.pid = 0
        """The frozen process; 0: none."""
        self.count = 0
        self._group: Path | None = None
        for version, parent in ((2, ROOT), (2, ROOT / "unified"), (1, ROOT / "freezer")):
            group = parent / f"memlane-test-{os.getpid()}-{id(self):x}"
            with suppress(OSError):
                group.mkdir()
                if (group / ("cgroup.freeze" if version == 2 else "freezer.state")).exists():
                    self._group, self._version = group, version
                    return
                group.rmdir()

    def close(self) -> None:
        """Let the frozen process go on, and remove the control group."""
        self.thaw()
        if self._group is not None:
            deadline = time.monotonic() + PATIENCE  # a process that has just died leaves it a moment later
            while self._group.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    self._group.rmdir()

    def freeze(self, pid: int) -> bool:
        """Freeze a process; return whether it is frozen, or will be in a moment."""
        if self._group is None or self.pid:
            return False
        with suppress(OSError):  # it has just ended
            (self._group / "cgroup.procs").write_text(str(pid))
            self._set(frozen=True)
            self.pid = pid
            self.count += 1
        return self.pid != 0

    def thaw(self) -> None:
        """Let the frozen process go on, if there is one."""
        if self._group is not None and self.pid:
            self._set(frozen=False)
            with suppress(OSError):
                (self._group.parent / "cgroup.procs").write_text(str(self.pid))
            self.pid = 0

    def _set(self, *, frozen: bool) -> None:
        assert self._group is not None
        if self._version == 2:
            (self._group / "cgroup.freeze").write_text(str(int(frozen)))
        else:
            (self._group / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
