"""Stray words: what a process that overwrites a lane's shared memory can do to the others. It is an error or a wrong
value, never a crash and never a call that does not end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from memlane.core import MemlaneError, Segment, SegmentError, WaitTimeout
from memlane.ipc import Ring, Weights
from tests.support.lanes import second_mapping
from tests.support.processes import PATIENCE, ask, child, within

LARGE = {"x": ("float32", 2**18)}
"""A slot or version of 1 MB: what lies beside its place is not in the mapping."""

WORDS = [-1, -3, 0, 1, 2, 255, 256 | 3, 256 | 255, 2**31, 2**62, 2**63 - 1, -(2**63)]


@contextmanager
def scribbler(scribble: Callable[..., None], *args: Any) -> Iterator[None]:
    with child(scribble, *args) as process:
        try:
            yield
        finally:
            process.kill()


def scribble_anywhere(segment: Segment, fields: list[str], words_of_a_row: int) -> None:
    """Overwrite the control words and the first words of each row with numbers that hurt, for ever."""
    draw = random.Random(7)
    tables = [second_mapping(segment, field) for field in fields]
    places = [(words, index) for words in tables[:1] for index in range(len(words))]
    for words in tables[1:]:
        places += [(words, at + word) for at in range(0, len(words), words_of_a_row) for word in range(2)]
    while True:
        words, index = draw.choice(places)
        words[index] = draw.choice([*WORDS, draw.getrandbits(64) - 2**63])


def worked_within_a_second(calls: Sequence[Callable[[], object]]) -> int:
    """Repeat these calls for a second; count those that worked. None may take long."""
    worked, slowest = 0, 0.0
    end = time.monotonic() + 1
    while time.monotonic() < end:
        for call in calls:
            begin = time.monotonic()
            try:
                call()
                worked += 1
            except MemlaneError:
                pass
            slowest = max(slowest, time.monotonic() - begin)
    assert slowest < within(1), f"a call took {slowest:.2f} s"
    return worked


# -------------------------------------------------------------------------------------------------------------- weights


def use_weights_after(word: int) -> dict[str, str]:
    """What each call does when the word `latest` was overwritten; "" if it worked."""
    outcomes = {}
    with Weights(LARGE) as weights:
        weights.publish({"x": np.ones(2**18, np.float32)})
        control = second_mapping(weights.segment, "control")
        calls: dict[str, Callable[[], object]] = {
            "read": weights.read,
            "publish": lambda: weights.publish({"x": np.ones(2**18, np.float32)}),
            "version": lambda: weights.version,
            "wait_for": lambda: weights.wait_for(0),
        }
        for name, call in calls.items():
            control[0] = word
            try:
                call()
                outcomes[name] = ""
            except SegmentError as error:
                outcomes[name] = str(error)
    return outcomes


@pytest.mark.parametrize("word", [word for word in WORDS if word not in (0, 2**31)])
def test_a_latest_version_that_no_writer_stores_is_a_segment_error_in_every_call(word: int) -> None:
    for name, error in ask(use_weights_after, word).items():
        assert "weights of anonymous segment is damaged: expected the latest version in one of 3 buffers" in error, name


def test_a_version_that_cannot_exist_is_waited_for_and_not_taken_for_an_old_one() -> None:
    with Weights(LARGE) as weights, pytest.raises(WaitTimeout):
        weights.wait_for(2**60, timeout=0.01)


def never_the_same_version(segment: Segment) -> None:
    """Change the latest version and leave no mark, faster than anybody can copy.

    Where this user may, at a real-time priority: on a busy machine this process would not run during every copy.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    control = second_mapping(segment, "control")
    version = 1
    while True:
        control[0] = version << 8 | version & 1
        control[8:16] = 0
        version += 1


def read_again_and_again(weights: Weights, out: dict[str, Any]) -> None:
    """While the other process has no core, a read succeeds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        weights.read(out)


def test_a_read_that_is_always_overtaken_ends_with_an_error_that_says_so() -> None:
    out = {"x": np.zeros(2**18, np.float32)}
    with (
        Weights(LARGE) as weights,
        scribbler(never_the_same_version, weights.segment),
        pytest.raises(MemlaneError, match="writers have overtaken each of 1000 copies of the weights"),
    ):
        read_again_and_again(weights, out)


def test_ctrl_c_ends_a_read_that_is_always_overtaken() -> None:
    layout = {"x": ("float32", 2**24)}  # a thousand copies of 64 MB take seconds
    out = {"x": np.zeros(2**24, np.float32)}
    with Weights(layout) as weights, scribbler(never_the_same_version, weights.segment):
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        begin = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                read_again_and_again(weights, out)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert time.monotonic() - begin < within(2)


def use_weights(weights: Weights) -> int:
    return worked_within_a_second([lambda: weights.publish({"x": np.ones(2**18, np.float32)}), weights.read])


def test_weights_that_a_process_scribbles_on_crash_nobody_and_every_call_ends() -> None:
    with (
        Weights(LARGE) as weights,
        scribbler(scribble_anywhere, weights.segment, ["control", "buffers"], 2**18 // 2),
    ):
        assert ask(use_weights, weights) >= 0


# ----------------------------------------------------------------------------------------------------------------- ring


def put_and_get(sequence: int) -> list[float]:
    with Ring(LARGE, num_slots=3, overflow="block") as ring:
        writer, reader = ring.writer(), ring.reader()
        second_mapping(ring.segment, "control")[16] = sequence
        found = []
        for value in range(6):
            writer.put({"x": np.full(2**18, value, np.float32)}, timeout=0)
            with reader.take(timeout=0) as slot:
                found.append(float(slot["x"].mean()))
        return found


@pytest.mark.parametrize("sequence", [-1, -2, -3, -(2**63), 2**63 - 1, 2**63 - 3])
def test_a_ring_with_any_last_sequence_number_uses_only_its_own_slots(sequence: int) -> None:
    assert ask(put_and_get, sequence) == [0, 1, 2, 3, 4, 5]


def use_ring(ring: Ring) -> int:
    writer, reader = ring.writer(), ring.reader()
    data, out = {"x": np.ones(2**18, np.float32)}, {"x": np.zeros(2**18, np.float32)}

    def lease_both() -> None:
        with writer.claim(timeout=0.01) as claimed:
            claimed["x"][0] = 1
            claimed.commit()
        with reader.take(timeout=0.01) as taken:
            assert taken["x"].shape == (2**18,)

    return worked_within_a_second(
        [
            lambda: writer.put(data, timeout=0.01),
            lambda: reader.get(out, timeout=0.01),
            lease_both,
            ring.counters,
            lambda: ring.unread,
        ]
    )


@pytest.mark.parametrize("overflow", ["drop_oldest", "block"])
def test_a_ring_that_a_process_scribbles_on_crashes_nobody_and_every_call_ends(overflow: Any) -> None:
    with (
        Ring(LARGE, num_slots=3, overflow=overflow) as ring,
        scribbler(scribble_anywhere, ring.segment, ["control", "slots"], (2**20 + 64) // 8),
    ):
        assert ask(use_ring, ring) >= 0


def test_the_words_of_this_file_are_where_the_native_code_has_them() -> None:
    with Ring(LARGE) as ring, Weights(LARGE) as weights:
        ring.writer().put({"x": np.zeros(2**18, np.float32)})
        weights.publish({"x": np.zeros(2**18, np.float32)})
        assert second_mapping(ring.segment, "control")[16] == 1
        assert second_mapping(weights.segment, "control")[0] == 1 << 8
