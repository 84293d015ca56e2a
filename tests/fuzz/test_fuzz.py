"""The fuzz targets in Python find nothing in a few inputs, and what one finds is reported with its input."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memlane.core import LayoutError
from tests.fuzz.__main__ import PYTHON, ROOT, run_python
from tests.fuzz.call import call
from tests.fuzz.mutations import mutate, mutate_text


def arguments(runs: int, first: int = 0) -> argparse.Namespace:
    return argparse.Namespace(runs=runs, seconds=None, seed=1, first=first)


@pytest.mark.parametrize("target", [name for name in PYTHON if name != "runs"])  # a run is trained first: seconds
def test_a_target_finds_nothing_in_a_few_inputs(target: str) -> None:
    outcome = run_python(target, arguments(runs=30))
    assert (outcome.failure, outcome.inputs) == ("", 30)


class Broken:
    """A target that fails at input 3."""

    def __init__(self, _: Path) -> None:
        self.inputs = 0
        faulthandler.disable()

    def try_one(self, _: random.Random) -> None:
        self.inputs += 1
        if self.inputs == 4:
            self.fail()

    def fail(self) -> None:
        raise KeyError("a raw error")


class Crashing(Broken):
    def fail(self) -> None:
        ctypes.string_at(8)


class Slow(Broken):
    def fail(self) -> None:
        end = time.thread_time() + 1.01

        def work() -> None:
            while time.thread_time() < end:
                pass

        call(work)


@pytest.mark.parametrize(
    ("target", "report"),
    [("Broken", "KeyError: 'a raw error'"), ("Crashing", "exit code -11"), ("Slow", "AssertionError: a call took 1.0")],
)
def test_a_finding_is_reported_with_the_number_of_its_input(target: str, report: str) -> None:
    outcome = run_python(f"{__name__}:{target}", arguments(runs=10))
    assert report in outcome.failure
    assert f"--seed 1 --only {__name__}:{target} --first 3 --runs 1" in outcome.failure
    assert outcome.inputs == 3


def test_the_command_fails_with_the_report_of_a_finding() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--runs", "5", "--only", f"{__name__}:Broken"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "KeyError: 'a raw error'" in done.stdout


def test_an_unknown_target_is_an_error() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--runs", "5", "--only", "rings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "there is no target rings; the targets are signal, ring," in done.stderr


def test_the_same_seed_makes_the_same_changes() -> None:
    data = bytes(range(256)) * 4
    for number in range(50):
        first, again = (mutate(data, random.Random(number), [range(64)]) for _ in range(2))
        assert first == again
        assert mutate_text(data, random.Random(number)) == mutate_text(data, random.Random(number))
    assert len({bytes(mutate(data, random.Random(number))) for number in range(50)}) > 45


def test_only_memlanes_own_errors_are_no_findings() -> None:
    def refuse(error: type[Exception]) -> None:
        raise error("expected one thing, found another")

    assert call(lambda: refuse(LayoutError)) is None
    with pytest.raises(ValueError, match="expected one thing"):
        call(lambda: refuse(ValueError))
    with pytest.raises(ValueError, match="expected one thing"):
        call(lambda: refuse(ValueError), "another refusal")
    assert call(lambda: refuse(ValueError), "found another") is None
