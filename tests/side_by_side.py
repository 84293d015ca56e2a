"""All tests but the soak, in four runs of pytest side by side: most of its time a test waits for a process.
With more of them on two cores, those that have to be quicker than somebody else are not.

Each run has a directory of its own for named segments, because every test looks whether it has left one behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
GROUPS = [
    ["train"],
    ["native", "benchmarks", "spaces", "examples", "vector/test_registered.py"],
    ["ipc", "test_cli.py", "test_lessons.py", "vector/test_faces.py", "vector/test_declared_infos.py"],
]
"""The last run has all others. Each takes about as long."""


def main() -> int:
    # Whoever started us in the background has Ctrl-C ignored; tests that send it would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    groups = [[HERE / name for name in group] for group in GROUPS]
    taken = {path for group in groups for path in group}
    groups.append([path for path in sorted(HERE.rglob("test_*.py")) if not taken.intersection([path, *path.parents])])
    begin, before = time.monotonic(), set(SHM.iterdir())
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(tempfile.TemporaryDirectory(dir=SHM, prefix="tests-")) for _ in groups]
        runs = [start(group, shm) for group, shm in zip(groups, own, strict=True)]
        voices = [threading.Thread(target=speak, args=(number, run.stdout)) for number, run in enumerate(runs, 1)]
        for voice in voices:
            voice.start()
        codes = [run.wait() for run in runs]
        for voice in voices:
            voice.join()
    if left := [path.name for path in set(SHM.iterdir()) - before if "memlane" in path.name]:
        print(f"left in {SHM}: {left}")
        codes.append(1)
    print(f"{time.monotonic() - begin:.0f} s; " + ("all passed" if not any(codes) else f"exit codes {codes}"))
    return max(codes)


def start(group: list[Path], shm: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MEMLANE_SHM_DIR": shm}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not soak", *map(str, group)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def speak(number: int, lines: IO[str] | None) -> None:
    assert lines is not None
    for line in lines:
        print(f"[{number}] {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
