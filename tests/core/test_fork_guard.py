"""Objects that belong to one process refuse to be used in forked children of it."""

from __future__ import annotations

import os

import pytest

from memlane.core import UsedAfterFork
from memlane.core.fork_guard import ForkGuard
from tests.support.processes import ask

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_a_forked_child_is_told_whose_an_object_is_and_what_to_do() -> None:
    guard = ForkGuard("the thing", "make another in this process")
    guard.require()
    with pytest.raises(
        UsedAfterFork,
        match=rf"^the thing belongs to the process that created it \(pid {os.getpid()}\), from which this one \(pid "
        r"\d+\) was forked; make another in this process$",
    ):
        ask(guard.require)
    guard.require()


def test_what_a_forked_child_creates_is_its_own_and_not_its_childrens() -> None:
    assert ask(owned_in_two_generations) == (True, False)


def owned_in_two_generations() -> tuple[bool, bool]:
    guard = ForkGuard("the thing", "make another")
    return guard.owned, ask(lambda: guard.owned)
