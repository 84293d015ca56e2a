"""The endurance run finds what grows, and only that."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing.connection import Connection

import pytest

from tests.endurance import Usage
from tests.support.processes import child

MEASUREMENTS = 10


def keep_one_more(pipe: Connection, what: str) -> None:
    """Keep a megabyte, a descriptor or nothing more at each message."""
    kept: list[object] = []
    while pipe.recv():
        if what == "memory":
            kept.append(bytearray(os.urandom(2**20)))
        elif what == "descriptors":
            kept.append(os.open("/", os.O_RDONLY))
        pipe.send(None)


@pytest.mark.parametrize("what", ["memory", "descriptors", ""])
def test_what_a_process_keeps_more_and_more_of_is_found(what: str) -> None:
    ours, theirs = mp.Pipe()
    usage = Usage()
    with child(keep_one_more, theirs, what, method="spawn") as process:
        for second in range(MEASUREMENTS):
            ours.send(True)
            ours.recv()
            usage.measure(process.pid or 0, second)
        ours.send(False)
    assert [growth.split()[0] for growth in usage.growth()] == ([what] if what else [])
