"""The tour is what a newcomer sees first: it must run to its end and say what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import within

TOUR = Path(__file__).parents[2] / "examples" / "tour.py"


def test_the_tour_shows_the_named_error_and_that_nothing_is_left() -> None:
    run = subprocess.run([sys.executable, TOUR], capture_output=True, text=True, timeout=within(100))
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "PeerDied: worker 0 (pid " in run.stdout
    assert "was killed by SIGKILL" in run.stdout
    assert "sampled while they pushed: 0 torn" in run.stdout
    assert "names in /dev/shm: none; child processes: none" in run.stdout
