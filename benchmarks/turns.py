"""Turns in new processes: nobody inherits another's threads, caches or imports.

A script that runs itself with ``--turn`` answers with ``answer_turn``; its parent asks with ``turn_in_new_process``.
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

BYTECODE = tempfile.TemporaryDirectory()
TURN_SECONDS = 180
"""When a turn has not finished by then, it never will."""


@dataclass
class Effort:
    blocks: int
    seconds: float
    warm_up: float


def in_new_process(command: Sequence[str], folder: str, seconds: float = TURN_SECONDS) -> None:
    """Run it to its end, in a session of its own, so that all its workers can be ended with it."""
    # Several threads in each of many workers only get in each other's way. Modules are compiled once, as they are for
    # users: nobody sees a start-up that compiles twice.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": BYTECODE.name}
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


def turn_in_new_process(script: str, request: dict[str, Any], seconds: float = TURN_SECONDS) -> list[float]:
    """What ``script`` answers to ``--turn request``: nanoseconds, one value for each block."""
    with tempfile.TemporaryDirectory() as folder:  # also because pufferlib leaves a link where it is imported
        in_new_process([sys.executable, str(Path(script).resolve()), "--turn", json.dumps(request)], folder, seconds)
        values: list[float] = json.loads(Path(folder, "values.json").read_text())
    return values


def answer_turn(take_turn: Callable[[dict[str, Any]], list[float]]) -> None:
    """In the new process."""
    Path("values.json").write_text(json.dumps(take_turn(json.loads(sys.argv[2]))))


def measured(advance: Callable[[], int], close: Callable[[], object], seconds: Sequence[float]) -> list[float]:
    """Nanoseconds per step for each block but the first, which is to warm up. ``advance`` makes one call and returns
    how many steps that were."""
    values = []
    for one in seconds:
        steps = 0
        begin = end = time.monotonic_ns()
        deadline = begin + int(one * 1e9)
        while end < deadline:
            steps += advance()
            end = time.monotonic_ns()
        values.append((end - begin) / steps)
    close()
    return values[1:]
