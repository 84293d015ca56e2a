"""Turns in new processes, so that no contender inherits the threads, caches or imports of another.

The parent calls ``turn_in_new_process``, which runs the benchmark again with ``--turn``; there ``main_or_turn`` takes
the turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BYTECODE = tempfile.TemporaryDirectory()
TURN_SECONDS = 180
"""Time limit of a turn."""


@dataclass
class Effort:
    blocks: int
    seconds: float
    warm_up: float


def in_new_process(
    command: Sequence[str], folder: str, seconds: float = TURN_SECONDS, numeric_threads: int | None = 1
) -> None:
    """Run a command to its end in a new session, so that all its workers can be ended with it.

    By default numeric libraries use one thread: several threads in each of many workers compete for cores. None leaves
    them their default.
    """
    # Modules are compiled once, as they are for users, so that no measured start-up compiles them.
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPYCACHEPREFIX": BYTECODE.name, "PYTHONPATH": search_path}
    environment.pop("OMP_NUM_THREADS", None)
    if numeric_threads is not None:
        environment["OMP_NUM_THREADS"] = str(numeric_threads)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with open(Path(folder, "output"), "w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not finished after {seconds} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            output.seek(0)
            lines = output.read().strip().splitlines() or [f"ended with code {code}"]
            raise RuntimeError(lines[-1].strip())


def turn_in_new_process(
    script: str, request: dict[str, Any], seconds: float = TURN_SECONDS, numeric_threads: int | None = 1
) -> list[float]:
    """Run the benchmark ``script`` with ``--turn request``; return nanoseconds, one value per block."""
    module = f"benchmarks.{Path(script).stem}"
    with tempfile.TemporaryDirectory() as folder:  # pufferlib leaves a link in the directory where it is imported
        in_new_process([sys.executable, "-m", module, "--turn", json.dumps(request)], folder, seconds, numeric_threads)
        values: list[float] = json.loads(Path(folder, "values.json").read_text())
    return values


def main_or_turn(main: Callable[[], None], take_turn: Callable[[dict[str, Any]], list[float]]) -> None:
    """Run a benchmark: its ``main``, or the turn that ``turn_in_new_process`` asks for."""
    if sys.argv[1:2] == ["--turn"]:
        Path("values.json").write_text(json.dumps(take_turn(json.loads(sys.argv[2]))))
    else:
        main()


def measured(advance: Callable[[], int], close: Callable[[], object], seconds: Sequence[float]) -> list[float]:
    """Nanoseconds per step for each block but the first, which is the warm-up. ``advance`` makes one call and returns
    the number of steps in it."""
    values = []
    for block_seconds in seconds:
        steps = 0
        begin = end = time.monotonic_ns()
        deadline = begin + int(block_seconds * 1e9)
        while end < deadline:
            steps += advance()
            end = time.monotonic_ns()
        values.append((end - begin) / steps)
    close()
    return values[1:]
