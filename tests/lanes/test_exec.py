"""A process that replaces its program (exec) while it holds something: its pid stays, its memory is gone."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from memlane.core import Segment
from memlane.core.lowlevel import Roster
from memlane.lanes import Ring
from tests.support.processes import PATIENCE, PROMISE, child, wait_for, within

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def hold_and_exec(hold: Callable[[], object]) -> None:
    held = hold()
    os.execv("/bin/sleep", ["sleep", "60"])
    del held


def become_another_program(hold: Callable[[], object], then: Callable[[], object]) -> None:
    """Call ``then`` when a child holds something and runs another program."""
    with child(hold_and_exec, hold) as process:
        try:
            assert wait_for(lambda: os.readlink(f"/proc/{process.pid}/exe").rpartition("/")[2] != python)
            then()
        finally:
            process.kill()


python = os.readlink("/proc/self/exe").rpartition("/")[2]


def test_the_claimed_slot_of_a_process_that_runs_another_program_comes_back() -> None:
    with Ring({"x": ("int64", ())}, num_slots=1, overflow="block") as ring:
        become_another_program(ring.writer().claim, lambda: ring.writer().claim(timeout=within(PROMISE)).release())


def test_the_taken_slot_of_a_process_that_runs_another_program_is_offered_again() -> None:
    with Ring({"x": ("int64", ())}, num_slots=1, overflow="block") as ring:
        ring.writer().put({"x": np.array(1)})
        become_another_program(
            lambda: ring.reader().take(timeout=PATIENCE), lambda: ring.reader().take(timeout=within(PROMISE)).release()
        )


def test_the_entry_of_a_process_that_runs_another_program_is_free() -> None:
    with Segment.create({"places": ("int64", 1)}) as segment:
        roster = Roster(segment, "places")

        def is_free() -> bool:  # exec closes descriptors a moment after the program has its new name
            return not segment.life.alive(int(segment["places"][0]))

        become_another_program(roster.join, lambda: wait_for(is_free, within(PROMISE)) and roster.join())
