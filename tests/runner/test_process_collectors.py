"""What only collectors in processes have: a process can be gone before the learner looks at it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from memlane.core import Layout
from memlane.lanes.weights import Weights
from memlane.runner.collector_error import CollectorDied, CollectorError
from memlane.runner.process_collectors import ProcessCollectors, RestartPolicy
from memlane.runner.protocols import CollectorJoined, CollectorLost, Event
from tests.support.processes import wait_for
from tests.support.transports import SLOT, WEIGHTS, Raise, make_env, weights_of


def wait_until_it_is_gone(event: Event) -> None:
    """For ``on_event``: called after the start of a process and before the learner watches it."""
    if isinstance(event, CollectorJoined):
        assert wait_for(lambda: not os.path.exists(f"/proc/{event.pid}"))


def exit_at_once(*_: object) -> None:
    os._exit(3)


def collectors(collect: Any, **settings: Any) -> ProcessCollectors:
    weights = Weights(WEIGHTS)
    weights.publish(weights_of(1))
    return ProcessCollectors(1, make_env, collect, slot=Layout(SLOT), weights=weights, in_flight=2, **settings)


def test_a_collector_that_raised_before_it_was_watched_ends_take_and_not_start() -> None:
    source = collectors(Raise(), on_event=wait_until_it_is_gone)
    try:
        source.start()
        for ask in (source.check, source.take):  # the error stays, as that of a collector that raises later
            with pytest.raises(CollectorError, match="ZeroDivisionError: broken at"):
                ask()
    finally:
        source.close()
        source.weights.close()


def test_a_collector_that_died_before_it_was_watched_is_restarted_as_often_as_allowed() -> None:
    events: list[Event] = []

    def record(event: Event) -> None:
        wait_until_it_is_gone(event)
        events.append(event)

    source = collectors(exit_at_once, on_event=record, restarts=RestartPolicy(max_restarts=2))
    try:
        with pytest.raises(CollectorDied, match=r"exited with code 3.*max_restarts=2"):
            source.start()
    finally:
        source.close()
        source.weights.close()
    assert [type(event) for event in events] == [CollectorJoined, CollectorLost] * 3
