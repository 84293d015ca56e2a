"""Leases that are dropped or interrupted: their slots come back while the process lives, counted and with a warning."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlane import Ring

SLOTS = 3


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring({"x": ("int64", 4)}, num_slots=SLOTS, overflow="block") as ring:
        yield ring


def put(ring: Ring, number: int) -> None:
    ring.writer().put({"x": np.full(4, number)}, timeout=0)


def free_slots(ring: Ring) -> int:
    """The number of slots that can be claimed now."""
    slots = []
    try:
        while True:
            slots.append(ring.writer().claim(timeout=0))
    except TimeoutError:
        return len(slots)
    finally:
        for slot in slots:
            slot.release()


def test_a_taken_slot_that_is_dropped_is_offered_again(ring: Ring) -> None:
    put(ring, 7)
    reader = ring.reader()
    for _ in range(5 * SLOTS):
        with pytest.warns(ResourceWarning, match=r"slot \d of the ring .* taken and dropped without release"):
            assert reader.take(timeout=0)["x"].sum() == 28
    assert ring.counters()["returned"] == 5 * SLOTS
    assert ring.counters()["read"] == 0
    with reader.take(timeout=0) as slot:
        assert slot["x"].tolist() == [7] * 4
    assert free_slots(ring) == SLOTS


def test_a_claimed_slot_that_is_dropped_is_abandoned(ring: Ring) -> None:
    writer = ring.writer()
    for _ in range(5 * SLOTS):
        with pytest.warns(ResourceWarning, match=r"slot \d of the ring .* claimed and dropped without commit"):
            writer.claim(timeout=0)["x"] = 1
    assert ring.counters()["abandoned"] == 5 * SLOTS
    assert ring.unread == 0
    assert free_slots(ring) == SLOTS


def test_the_order_of_slots_survives_a_dropped_lease(ring: Ring) -> None:
    for number in range(SLOTS):
        put(ring, number)
    reader, out = ring.reader(), {"x": np.zeros(4, np.int64)}
    with pytest.warns(ResourceWarning):
        reader.take(timeout=0)
    assert [reader.get(out, timeout=0).sequence for _ in range(SLOTS)] == [1, 2, 3]


# Otherwise a writer could overwrite the array that a program still reads.
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["array", "slice of the array"])
def test_a_dropped_slot_comes_back_only_after_its_last_array(ring: Ring, part: slice) -> None:
    put(ring, 7)
    with pytest.warns(ResourceWarning):
        array = ring.reader().take(timeout=0)["x"][part]
    assert ring.unread == 0
    assert free_slots(ring) == SLOTS - 1
    assert set(array.tolist()) == {7}
    del array
    assert ring.unread == 1


def test_a_released_slot_does_not_warn(ring: Ring) -> None:
    put(ring, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slot = ring.reader().take(timeout=0)
        slot.release()
        del slot
    assert ring.counters()["returned"] == 0


def test_a_slot_of_a_closed_ring_comes_back_for_other_handles(ring: Ring) -> None:
    other: Ring = pickle.loads(pickle.dumps(ring))
    claimed = other.writer().claim(timeout=0)
    other.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # to close a ring is to be done with its slots
        del claimed
    assert free_slots(ring) == SLOTS


def test_a_forked_child_that_drops_a_lease_leaves_the_slot_to_its_parent(ring: Ring) -> None:
    slot: Any = ring.writer().claim(timeout=0)
    slot["x"] = 5
    pid = os.fork()
    if pid == 0:
        del slot
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    slot.commit()
    assert ring.reader().get({"x": np.zeros(4, np.int64)}, timeout=0).sequence == 1
    assert ring.counters()["abandoned"] == 0


class Interrupted(Exception):
    pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("role", ["writer", "reader", "put"])
def test_interrupts_at_any_point_lose_no_slot(ring: Ring, role: str) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    def use() -> None:
        if role == "put":
            if ring.unread == 0:  # otherwise the interrupt came between put and get
                put(ring, 1)
            ring.reader().get({"x": np.zeros(4, np.int64)}, timeout=0)
        elif role == "writer":
            with ring.writer().claim(timeout=0) as slot:
                slot["x"] = 1
        else:
            with ring.reader().take(timeout=0) as slot:
                assert slot["x"][0] == 1

    def use_until_interrupted() -> None:
        try:
            if role == "reader" and ring.unread == 0:
                put(ring, 1)
            signal.setitimer(signal.ITIMER_REAL, 20e-6 + 1e-7 * (interrupts % 500))
            while True:
                use()
                if role == "reader":
                    put(ring, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts, end = 0, time.monotonic() + 2
    while time.monotonic() < end:
        try:
            use_until_interrupted()
        except Interrupted:
            interrupts += 1
        except TimeoutError:
            break  # no slot is left
    signal.signal(signal.SIGALRM, before)
    assert interrupts > 100
    while ring.unread:
        ring.reader().take(timeout=0).release()
    assert free_slots(ring) == SLOTS
