"""A blocking ring is fair: writers that wait get slots in the order of their arrival, and none of them can hold up the
others, wherever it is stopped or killed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from memlane.core import SIGNAL, Segment, WaitTimeout
from memlane.ipc import Ring
from tests.support.lanes import second_mapping
from tests.support.processes import PATIENCE, PROMISE, child, state_of, wait_for, within

SMALL = {"x": ("int64", 1)}
WRITERS = 8
LAST_TICKET = (320 + 64) // 8
"""The word of the control block that counts the waits of writers: see ring.hpp and wait_queue.hpp."""


@pytest.fixture
def board() -> Iterator[Segment]:
    fields = {"end": (SIGNAL, ()), "longest": ("float64", 2 * WRITERS), "timeouts": ("int64", 2 * WRITERS)}
    with Segment.create(fields) as board:
        yield board


def put_until_the_end(ring: Ring, writer: int, board: Segment, timeout: float) -> None:
    """Put as fast as possible. Note the longest that a put took, and how many timed out."""
    put, end, payload = ring.writer(writer).put, board.signal("end"), {"x": np.zeros(1, np.int64)}
    while not end.value:
        begin = time.monotonic()
        try:
            put(payload, timeout=timeout)
        except WaitTimeout:
            board["timeouts"][writer] += 1
        board["longest"][writer] = max(board["longest"][writer], time.monotonic() - begin)


def put_once(ring: Ring, writer: int) -> None:
    ring.writer(writer).put({"x": np.zeros(1, np.int64)}, timeout=PATIENCE)


@contextmanager
def writers(ring: Ring, count: int, board: Segment, timeout: float = PATIENCE) -> Iterator[list[BaseProcess]]:
    """Processes that put slots as fast as they can until the end of the block."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(child(put_until_the_end, ring, writer, board, timeout)) for writer in range(count)
        ]
        yield processes
        board.signal("end").store(1)
        out, get = {"x": np.zeros(1, np.int64)}, ring.reader().get
        while any(process.is_alive() for process in processes):  # each may have one more put to finish
            with suppress(WaitTimeout):
                get(out, timeout=0.01)


@contextmanager
def waiting_writers(ring: Ring, count: int) -> Iterator[list[BaseProcess]]:
    """Processes that have one slot to put each, and wait for it in the order of their numbers."""
    with ExitStack() as stack:
        processes = []
        for writer in range(count):
            before = ring.counters()["blocked"]
            processes.append(process := stack.enter_context(child(put_once, ring, writer)))
            assert wait_for(lambda: ring.counters()["blocked"] > before and state_of(process.pid) == "S")  # noqa: B023
        yield processes


def take_writer(ring: Ring, timeout: float = PATIENCE) -> int:
    with ring.reader().take(timeout=timeout) as slot:
        return slot.writer


def fill(ring: Ring) -> None:
    for _ in range(ring.num_slots):
        ring.writer(99).put({"x": np.zeros(1, np.int64)}, timeout=0)


def test_eight_writers_get_shares_that_differ_by_less_than_a_factor_of_two(board: Segment) -> None:
    """The reader is slow, so that all writers wait most of the time: the queue divides the slots, not the scheduler,
    which on a busy machine gives some processes less time than others."""
    shares: Counter[int] = Counter()
    with Ring(SMALL, num_slots=4, overflow="block") as ring, writers(ring, WRITERS, board):
        seen: set[int] = set()
        while len(seen) < WRITERS:  # until all have started
            seen.add(take_writer(ring))
        for _ in range(4000):
            shares[take_writer(ring)] += 1
            time.sleep(0.0001)
    assert len(shares) == WRITERS
    assert max(shares.values()) < 2 * min(shares.values()), f"slots by writer: {shares}"


def test_no_put_of_sixteen_writers_times_out_while_slots_pass(board: Segment) -> None:
    """Each has to wait for fifteen others: eight milliseconds at this pace."""
    with Ring(SMALL, num_slots=2, overflow="block") as ring, writers(ring, 2 * WRITERS, board, timeout=1.0):
        for _ in range(2000):
            take_writer(ring)
            time.sleep(0.0002)
    assert board["timeouts"].sum() == 0
    assert board["longest"].max() < within(PROMISE)


def test_writers_that_wait_get_their_slots_in_the_order_of_their_arrival() -> None:
    for _ in range(20):
        with Ring(SMALL, num_slots=1, overflow="block") as ring:
            fill(ring)
            with waiting_writers(ring, 5):
                order = [take_writer(ring) for _ in range(6)]
            if second_mapping(ring.segment, "control")[LAST_TICKET] == 5:
                break  # otherwise one of them got no core for a slice, and its place was given away
    assert order == [99, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_writers_at_the_head_of_the_queue_that_are_stopped_or_dead_delay_the_others_by_less_than_a_second(
    number: signal.Signals,
) -> None:
    with Ring(SMALL, num_slots=1, overflow="block") as ring:
        fill(ring)
        with waiting_writers(ring, 7) as processes:
            gone, last = processes[:6], processes[6]
            for process in gone:
                assert process.pid is not None
                os.kill(process.pid, number)
                assert wait_for(lambda: process.exitcode is not None or state_of(process.pid) == "T")  # noqa: B023
            assert take_writer(ring) == 99
            begin = time.monotonic()
            assert take_writer(ring) == 6
            assert time.monotonic() - begin < within(PROMISE)
            last.join(PATIENCE)
            for process in gone:
                if number == signal.SIGSTOP and process.pid is not None:
                    os.kill(process.pid, signal.SIGCONT)
            expected = 6 if number == signal.SIGSTOP else 0  # those that continue are served after all
            assert sorted(take_writer(ring) for _ in range(expected)) == list(range(expected))


def test_a_put_behind_a_stopped_writer_ends_at_its_timeout() -> None:
    with Ring(SMALL, num_slots=1, overflow="block") as ring:
        fill(ring)
        with waiting_writers(ring, 1) as (first,):
            assert first.pid is not None
            os.kill(first.pid, signal.SIGSTOP)
            for timeout in (0.0, 0.01, 0.25):
                begin = time.monotonic()
                with pytest.raises(WaitTimeout, match="a slot to write"):
                    ring.writer().put({"x": np.zeros(1, np.int64)}, timeout=timeout)
                assert timeout <= time.monotonic() - begin < timeout + within(PROMISE)
            os.kill(first.pid, signal.SIGCONT)
            assert [take_writer(ring), take_writer(ring)] == [99, 0]


def test_a_writer_that_only_tries_gets_a_slot_that_stopped_writers_were_called_for() -> None:
    """It does not wait, so it may overtake the others a few times. Then the slot is kept for them, but not for ever."""
    payload = {"x": np.zeros(1, np.int64)}
    with Ring(SMALL, num_slots=1, overflow="block") as ring:
        fill(ring)
        with waiting_writers(ring, 2) as processes:
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
            take_writer(ring)
            begin = last = time.monotonic()
            longest, puts = 0.0, 0
            while puts < 100:
                with suppress(WaitTimeout):
                    ring.writer(7).put(payload, timeout=0)
                    assert take_writer(ring) == 7
                    longest, last, puts = max(longest, time.monotonic() - last), time.monotonic(), puts + 1
                assert time.monotonic() - begin < PATIENCE
            assert longest < within(PROMISE)
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            assert sorted([take_writer(ring), take_writer(ring)]) == [0, 1]
