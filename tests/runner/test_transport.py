"""The protocols between collectors and a learner: one suite for all implementations.

``process_collectors`` implements them over shared memory, ``thread_collectors`` on threads. A third one joins by an
entry in ``KINDS``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memlane.core import Layout, WaitTimeout
from memlane.lanes.weights import Weights
from memlane.runner.process_collectors import ProcessCollectors
from memlane.runner.thread_collectors import ThreadCollectors
from tests.support.payloads import whole
from tests.support.processes import within
from tests.support.transports import (
    SLOT,
    WEIGHTS,
    Count,
    MarkingEnv,
    Raise,
    RecordTheEnd,
    abandon_every_other,
    commit_twice,
    make_env,
    moment_of,
    return_early,
    sleep_through_it,
    weights_of,
)

KINDS: dict[str, Callable[..., Any]] = {"processes": ProcessCollectors, "threads": ThreadCollectors}
PATIENCE = 40.0
"""Seconds after which a test fails. The first collector waits for the start of the fork server."""
QUIET = 0.6
"""Seconds without a rollout after which none is expected to come."""
PROMISE = 2.0
"""Seconds within which an exception in a collector must reach the learner."""
STOP_LIMIT = 4.0
"""Seconds within which ``close`` must return."""
SLACK = 2.0


class Transport:
    """The collectors and weights of a learner."""

    def __init__(self, kind: str, count: int, collect: Any, in_flight: int, env: Any = make_env) -> None:
        self.weights = Weights(WEIGHTS)
        self.weights.publish(weights_of(1))
        self.source = KINDS[kind](count, env, collect, slot=Layout(SLOT), weights=self.weights, in_flight=in_flight)
        self.source.start()

    def publish(self) -> None:
        """Publish weights whose values are their version, and return the credits."""
        self.weights.publish(weights_of(self.weights.version + 1))
        self.source.return_credits()

    def take_all(self, at_once: int) -> list[tuple[int, int]]:
        """Return (writer, number) of all rollouts until none comes; the first ``at_once`` may take long."""
        found = []
        try:
            while True:
                with self.source.take(PATIENCE if len(found) < at_once else QUIET) as slot:
                    found.append((slot.writer, int(slot["number"])))
        except WaitTimeout:
            return found

    def lags(self, per_update: int, each: int, max_lag: int) -> list[int]:
        """Return the lag of every rollout when it is taken, until each collector has made ``each``."""
        found = []
        made: Counter[int] = Counter()
        while len(made) < self.source.count or min(made.values()) < each:
            taken = 0
            while taken < per_update or self.source.has_older_than(self.weights.version - max_lag):
                with self.source.take(PATIENCE) as slot:
                    found.append(self.weights.version - slot.policy_version)
                    made[slot.writer] += 1
                taken += 1
            self.publish()
        return found

    def close(self) -> None:
        self.source.close()
        self.weights.close()


Start = Callable[..., Transport]


@pytest.fixture(params=list(KINDS))
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    made: list[Transport] = []

    def begin(*args: Any, **kwargs: Any) -> Transport:
        made.append(Transport(request.param, *args, **kwargs))
        return made[-1]

    yield begin
    for transport in made:
        transport.close()


# ------------------------------------------------------------------------------------------------------------ rollouts


def test_rollouts_arrive_whole(start: Start) -> None:
    transport = start(2, Count(), 4)
    for _ in range(200):
        with transport.source.take(PATIENCE) as slot:
            assert whole(slot)
        transport.source.return_credits()


def test_every_rollout_of_a_collector_arrives_once_and_in_order(start: Start) -> None:
    transport = start(3, Count(), 7)
    numbers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while min(map(len, numbers.values())) < 30:
        with transport.source.take(PATIENCE) as slot:
            numbers[slot.writer].append(int(slot["number"]))
        transport.source.return_credits()
    for found in numbers.values():
        assert found == list(range(len(found)))


def test_a_rollout_says_who_made_it_with_which_version_and_how_many_rows_it_has(start: Start) -> None:
    transport = start(2, Count(), 2)
    for _ in range(40):
        with transport.source.take(PATIENCE) as slot:
            assert (slot.writer, slot.rows) == (int(slot["writer"]), int(slot["number"]))
            assert slot.policy_version == int(slot["low"])
        transport.publish()


def test_a_slot_has_all_fields_by_name(start: Start) -> None:
    with start(1, Count(), 1).source.take(PATIENCE) as slot:
        assert list(slot) == list(SLOT)
        assert len(slot) == len(SLOT)
        assert {name: (slot[name].dtype, slot[name].shape) for name in slot} == {
            field.name: (field.dtype, field.shape) for field in Layout(SLOT)
        }


def test_a_slot_that_is_left_without_a_commit_never_was(start: Start) -> None:
    transport = start(1, abandon_every_other, 8)
    for number in range(4):
        with transport.source.take(PATIENCE) as slot:
            assert int(slot["number"]) == number


def test_a_slot_that_is_left_without_a_commit_costs_no_credit(start: Start) -> None:
    transport = start(1, abandon_every_other, 1)
    for number in range(3):
        with transport.source.take(PATIENCE if number == 0 else 3 * QUIET) as slot:
            assert int(slot["number"]) == number
        transport.source.return_credits()


def test_a_slot_cannot_be_committed_twice(start: Start) -> None:
    transport = start(1, commit_twice, 3)
    with transport.source.take(PATIENCE):
        pass
    with transport.source.take(PATIENCE) as slot:
        assert int(slot["number"]) == 1, "the second commit was no error"


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(start: Start, timeout: float) -> None:
    transport = start(1, Count(), 1)
    with pytest.raises(ValueError, match=r"timeout must be None .* or a number of seconds, 0 or more"):
        transport.source.take(timeout)


def test_a_take_without_a_rollout_times_out(start: Start) -> None:
    transport = start(1, Count(), 1)
    transport.source.take(PATIENCE).release()
    with pytest.raises(WaitTimeout):
        transport.source.take(0.2)


# ------------------------------------------------------------------------------------------------------------- credits


@pytest.mark.parametrize(("count", "in_flight"), [(1, 1), (2, 5)])
def test_no_more_rollouts_start_than_may_be_in_flight(start: Start, count: int, in_flight: int) -> None:
    transport = start(count, Count(), in_flight)
    assert len(transport.take_all(in_flight)) == in_flight


def test_as_many_rollouts_start_as_credits_were_returned(start: Start) -> None:
    transport = start(2, Count(), 4)
    for _ in range(4):
        transport.source.take(PATIENCE).release()
    transport.source.return_credits()
    assert len(transport.take_all(4)) == 4


def test_every_collector_gets_its_share_of_the_credits(start: Start) -> None:
    transport = start(3, Count(), 7)
    assert sorted(Counter(writer for writer, _ in transport.take_all(7)).values()) == [2, 2, 3]


def test_credits_are_returned_once(start: Start) -> None:
    transport = start(1, Count(), 2)
    transport.source.take(PATIENCE).release()
    transport.source.return_credits()
    transport.source.return_credits()
    assert len(transport.take_all(2)) == 2


def test_each_collector_needs_a_credit_of_its_own(start: Start) -> None:
    with pytest.raises(ValueError, match="in_flight must be at least the number of collectors, 3, found 2"):
        start(3, Count(), 2)


def test_there_is_at_least_one_collector(start: Start) -> None:
    with pytest.raises(ValueError, match="at least 1 collector, found 0"):
        start(0, Count(), 2)


# ----------------------------------------------------------------------------------------------------------------- lag


def test_without_lag_every_rollout_is_of_the_latest_version(start: Start) -> None:
    transport = start(2, Count({0: 0.01}), 2)
    assert set(transport.lags(per_update=2, each=30, max_lag=0)) == {0}


@pytest.mark.parametrize("max_lag", [1, 3])
def test_one_collector_is_never_further_behind_than_max_lag(start: Start, max_lag: int) -> None:
    transport = start(1, Count(), 2 * (max_lag + 1))
    assert max(transport.lags(per_update=2, each=80, max_lag=max_lag)) <= max_lag


@pytest.mark.parametrize("max_lag", [1, 3])
def test_a_slow_collector_is_not_further_behind_than_max_lag(start: Start, max_lag: int) -> None:
    """The learner waits for it rather than publishing while its rollout would become too old."""
    transport = start(2, Count({0: 0.1, 1: 0.002}), 2 * (max_lag + 1))
    assert max(transport.lags(per_update=2, each=5, max_lag=max_lag)) <= max_lag


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_that_a_collector_reads_are_of_one_version(start: Start) -> None:
    transport = start(2, Count(), 4)
    for _ in range(150):
        with transport.source.take(PATIENCE) as slot:
            assert int(slot["low"]) == int(slot["high"]) == slot.policy_version
        transport.publish()


def test_a_rollout_that_begins_after_a_publication_is_made_with_it(start: Start) -> None:
    transport = start(1, Count(), 1)
    for version in range(1, 20):
        with transport.source.take(PATIENCE) as slot:
            assert slot.policy_version == version
        transport.publish()


# ------------------------------------------------------------------------------------------------------------- counters


def test_what_collectors_report_is_counted(start: Start) -> None:
    transport = start(2, Count(steps=5), 6)
    transport.take_all(6)
    counters = transport.source.counters()
    assert [counters[name] for name in ("rollouts", "steps", "env_ns", "policy_ns")] == [6, 30, 18, 12]
    assert [counters[name] for name in ("restarts", "collectors", "unread")] == [0, 2, 0]


def test_unread_rollouts_are_counted(start: Start) -> None:
    transport = start(1, Count(), 3)
    transport.source.take(PATIENCE).release()
    deadline = time.monotonic() + PATIENCE
    while transport.source.counters()["unread"] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert transport.source.counters()["unread"] == 2


# ---------------------------------------------------------------------------------------------------------- exceptions


def test_a_collector_that_raises_ends_the_wait_with_its_own_error(start: Start) -> None:
    transport = start(1, Raise(), 2)
    with pytest.raises(Exception, match="broken at") as caught:
        transport.source.take(PATIENCE)
    assert time.monotonic() - moment_of(caught.value) < within(PROMISE)


def test_the_error_of_a_collector_has_its_traceback(start: Start) -> None:
    transport = start(1, Raise(), 2)
    with pytest.raises(Exception, match="broken at") as caught:
        transport.source.take(PATIENCE)
    frames = [entry.name for entry in caught.traceback]
    assert "raise_by_name" in frames or "in raise_by_name" in str(caught.value)


def test_a_collector_that_raises_is_not_hidden_by_the_rollouts_of_another(start: Start) -> None:
    """A learner that is slower than its collectors always finds a rollout; the error must still reach it."""
    transport = start(2, Raise(worker=1), 4)

    def learn_slowly() -> None:
        for _ in range(100):
            with transport.source.take(PATIENCE):
                time.sleep(0.05)
            transport.source.return_credits()
        pytest.fail("a hundred rollouts were taken without the error of the collector that raised")

    with pytest.raises(Exception, match="broken at") as caught:
        learn_slowly()
    assert time.monotonic() - moment_of(caught.value) < within(PROMISE)


def test_a_collector_that_raises_is_found_without_waiting_for_a_rollout(start: Start) -> None:
    transport = start(1, Raise(), 1)
    deadline = time.monotonic() + PATIENCE

    def look() -> None:
        while time.monotonic() < deadline:
            transport.source.check()
            time.sleep(0.01)

    with pytest.raises(Exception, match="broken at"):
        look()


def test_a_collector_that_returns_early_does_not_leave_the_learner_waiting(start: Start) -> None:
    transport = start(1, return_early, 1)
    with pytest.raises(Exception, match=r"collect must not return before sink\.open\(\) raises Stopped") as caught:
        transport.source.take(10)
    assert not isinstance(caught.value, WaitTimeout)


# ---------------------------------------------------------------------------------------------------------------- stop


def test_a_collector_that_waits_for_a_credit_gets_stopped_when_the_run_ends(start: Start, tmp_path: Path) -> None:
    transport = start(2, RecordTheEnd(tmp_path), 2)
    transport.take_all(2)
    transport.source.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "ended-0": "Stopped",
        "ended-1": "Stopped",
    }


def test_environments_are_closed_at_the_end(start: Start, tmp_path: Path) -> None:
    transport = start(2, Count(), 2, MarkingEnv(tmp_path))
    transport.take_all(2)
    transport.source.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]


def test_collectors_that_wait_end_at_once(start: Start) -> None:
    transport = start(2, Count(), 2)
    transport.take_all(2)
    begin = time.monotonic()
    transport.source.close()
    assert time.monotonic() - begin < within(PROMISE)


def test_a_collector_that_does_not_listen_cannot_hold_up_the_end(start: Start) -> None:
    transport = start(1, sleep_through_it, 2)
    transport.source.take(PATIENCE).release()
    begin = time.monotonic()
    transport.source.close()
    assert time.monotonic() - begin < within(STOP_LIMIT + SLACK)


def test_to_close_twice_is_harmless(start: Start) -> None:
    transport = start(1, Count(), 1)
    transport.source.take(PATIENCE).release()
    transport.source.close()
    transport.source.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_was_never_started_can_be_closed(kind: str) -> None:
    with Weights(WEIGHTS) as weights:
        source = KINDS[kind](1, make_env, Count(), slot=Layout(SLOT), weights=weights, in_flight=1)
        source.close()
