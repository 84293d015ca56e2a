"""Limiter: samples per insert, which side is blocked, for how long, and the error messages."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlane.core import NothingToSample, PeerDied, WaitTimeout
from memlane.ipc import Limiter, Replay
from tests.support.lanes import timed_out
from tests.support.processes import dead_peer, wait_for

X = {"x": ("int64", ())}
NO_TIME = 1e-6


@pytest.fixture
def replay() -> Iterator[Replay]:
    """Two samples per insert after the tenth row, with an error buffer of twelve."""
    with Replay(X, capacity=1000, limiter=Limiter(2.0, 10, 12.0)) as replay:
        yield replay


def add(replay: Replay, rows: int, timeout: float = NO_TIME) -> bool:
    """Return whether the rows were added before the timeout."""
    return not timed_out(lambda: replay.add({"x": np.arange(rows)}, timeout=timeout))


def test_nothing_is_drawn_before_the_least_number_of_rows_is_stored(replay: Replay) -> None:
    sampler = replay.sampler(seed=0)
    assert add(replay, 9)
    assert timed_out(sampler.sample, 1, timeout=NO_TIME)
    assert add(replay, 1)
    sampler.sample(1, timeout=NO_TIME)


def test_rows_up_to_the_least_number_are_never_held_back() -> None:
    with Replay(X, capacity=100, limiter=Limiter(5.0, 50, 6.0)) as replay:
        assert all(add(replay, 2) for _ in range(25))


def test_samplers_may_be_ahead_by_the_error_buffer_and_no_more(replay: Replay) -> None:
    sampler = replay.sampler(seed=0)
    add(replay, 10)
    assert [timed_out(sampler.sample, 4, timeout=NO_TIME) for _ in range(4)] == [False, False, False, True]
    assert add(replay, 2)
    assert [timed_out(sampler.sample, 4, timeout=NO_TIME) for _ in range(2)] == [False, True]


def test_writers_may_be_ahead_by_the_error_buffer_and_no_more(replay: Replay) -> None:
    assert [add(replay, 2) for _ in range(9)] == [True] * 8 + [False]
    assert (replay.added, replay.counters()["held_writers"]) == (16, 1)
    replay.sampler(seed=0).sample(4, timeout=NO_TIME)
    assert [add(replay, 2) for _ in range(2)] == [True, False]


def test_the_ratio_is_held_in_the_long_run(replay: Replay) -> None:
    sampler = replay.sampler(seed=0)
    out = sampler.batch(8)
    for _ in range(300):  # each side as often as the limiter allows
        add(replay, 3)
        timed_out(sampler.sample, 8, out=out, timeout=NO_TIME)
        counters = replay.counters()
        due = 2.0 * (counters["added"] - 10) - counters["sampled"]
        assert counters["added"] < 10 or -12 <= due <= 12
    assert replay.samples_per_insert == pytest.approx(2.0, rel=0.05)


def test_those_who_are_held_back_are_counted_and_go_on_when_the_others_did(replay: Replay) -> None:
    sampler = replay.sampler(seed=0)
    waiting = threading.Thread(target=lambda: sampler.sample(4, timeout=20))
    waiting.start()
    assert wait_for(lambda: replay.counters()["held_samplers"] == 1)
    add(replay, 10)
    waiting.join(20)
    assert replay.counters()["sampled"] == 4


def test_a_writer_that_is_held_back_goes_on_when_something_is_sampled(replay: Replay) -> None:
    for _ in range(8):
        add(replay, 2)
    waiting = threading.Thread(target=lambda: add(replay, 2, timeout=20))
    waiting.start()
    assert wait_for(lambda: replay.counters()["held_writers"] == 1)
    replay.sampler(seed=0).sample(4)
    waiting.join(20)
    assert replay.added == 18


def test_a_sampler_that_waited_too_long_says_for_what(replay: Replay) -> None:
    add(replay, 3)
    with pytest.raises(
        WaitTimeout,
        match=r"waited 0\.01 s for the limiter of the replay of anonymous segment to admit 4 rows to sample; 3 were "
        r"added and 0 sampled, for a ratio of 2 samples per insert after the first 10",
    ):
        replay.sampler(seed=0).sample(4, timeout=0.01)


def test_a_writer_that_waited_too_long_says_for_what_and_wrote_nothing(replay: Replay) -> None:
    for _ in range(8):
        add(replay, 2)
    with pytest.raises(WaitTimeout, match=r"waited 0\.01 s for .* to admit 2 rows to add; 16 were added and 0 sampled"):
        replay.add({"x": np.arange(2)}, timeout=0.01)
    assert (replay.added, replay.size) == (16, 16)


def test_the_death_of_a_peer_ends_the_wait_of_either_side(replay: Replay) -> None:
    with pytest.raises(PeerDied, match=r"the collector .* to admit 1 rows to sample"):
        replay.sampler(seed=0).sample(1, timeout=20, peers=[dead_peer("the collector")])
    for _ in range(8):
        add(replay, 2)
    with pytest.raises(PeerDied, match=r"the learner .* to admit 2 rows to add"):
        replay.writer().add({"x": np.arange(2)}, timeout=20, peers=[dead_peer("the learner")])


def test_skipped_rows_are_not_on_the_account(replay: Replay) -> None:
    for _ in range(50):
        replay.writer().add({"x": np.arange(2)}, skip=[True, True], timeout=NO_TIME)
    assert [add(replay, 2) for _ in range(9)] == [True] * 8 + [False]


def test_rows_that_were_refused_are_not_on_the_account(replay: Replay) -> None:
    for _ in range(50):
        with pytest.raises(TypeError):
            replay.add({"x": [0.5]}, timeout=NO_TIME)
    assert [add(replay, 2) for _ in range(9)] == [True] * 8 + [False]


def test_a_sample_that_found_nothing_is_not_on_the_account() -> None:
    fields = {"reward": ("float32", ()), "terminated": (bool, ()), "truncated": (bool, ())}
    row = {"reward": 1.0, "terminated": False, "truncated": False}
    with Replay(fields, capacity=10, streams=1, limiter=Limiter(1.0, 1, 5.0)) as replay:
        writer, sampler = replay.writer(), replay.sampler(seed=0)
        writer.add(row)
        for _ in range(20):  # the row has none after it yet
            with pytest.raises(NothingToSample):
                sampler.sample(2, timeout=NO_TIME)
        writer.add(row)
        sampler.sample(2, timeout=NO_TIME)
        assert replay.counters()["sampled"] == 2


def test_an_error_buffer_too_small_for_these_batches_is_an_error_and_no_wait_for_ever(replay: Replay) -> None:
    add(replay, 4)
    with pytest.raises(ValueError, match=re.escape("need an error_buffer of at least 16, found 12")):
        replay.sampler(seed=0).sample(32)


def test_half_of_what_both_sides_move_at_once_is_buffer_enough() -> None:
    with Replay(X, capacity=1000, limiter=Limiter(2.0, 1, (3 * 2.0 + 8) / 2)) as replay:
        sampler = replay.sampler(seed=0)
        for _ in range(200):  # never are both sides blocked
            assert add(replay, 3) or not timed_out(sampler.sample, 8, timeout=NO_TIME)


# Once: 9 of 10 rows are there, 5 more would be 14, one above 10 + 3: the writer waits for samples, the sampler for the
# tenth row, and the buffer is as large as the documentation asks for.
def test_the_step_over_the_least_number_does_not_hold_back_both_sides() -> None:
    with Replay(X, capacity=100, limiter=Limiter(1.0, 10, (5 * 1.0 + 1) / 2)) as replay:
        sampler = replay.sampler(seed=0)
        add(replay, 5)
        add(replay, 4)
        assert add(replay, 5) or not timed_out(sampler.sample, 1, timeout=NO_TIME)


# Once: the first thousand rows, which no limiter holds back, count as the largest batch that it must let pass.
def test_a_large_first_filling_asks_for_no_larger_buffer() -> None:
    with Replay(X, capacity=2000, limiter=Limiter(1.0, 1000, 10.0)) as replay:
        replay.add({"x": np.arange(1000)})
        sampler = replay.sampler(seed=0)
        assert [timed_out(sampler.sample, 4, timeout=NO_TIME) for _ in range(4)] == [False, False, True, True]


# Once: one call that was refused for its size makes all later ones errors that would only have to wait.
def test_a_batch_that_was_refused_is_not_held_against_others(replay: Replay) -> None:
    sampler = replay.sampler(seed=0)
    with pytest.raises(ValueError, match="error_buffer"):
        sampler.sample(1000)
    assert timed_out(sampler.sample, 1, timeout=NO_TIME)


def test_samples_per_insert_counts_from_the_least_number_on(replay: Replay) -> None:
    for _ in range(7):
        add(replay, 2)
    replay.sampler(seed=0).sample(6)
    assert replay.samples_per_insert == 1.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), "ratio must be a number of samples per transition, above 0, found 0.0"),
        ((float("nan"),), "ratio"),
        ((float("inf"),), "ratio"),
        ((1.0, 0), "min_size must be 1 or more, found 0"),
        ((1.0, 1, 0.0), "error_buffer must be above 0, found 0.0"),
        ((1.0, 1, float("nan")), "error_buffer"),
    ],
)
def test_a_limiter_that_makes_no_sense_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Limiter(*arguments)


def test_the_default_buffer_leaves_room_beyond_the_least_number() -> None:
    assert (Limiter(2.0).slack, Limiter(2.0, 5000).slack, Limiter(2.0, 5, 3.0).slack) == (2000, 10_000, 3)
