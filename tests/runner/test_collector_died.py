"""CollectorDied: the error of a collector whose process is gone, apart from that of one that raised."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from memlane.core import PeerDied
from memlane.runner import CollectorDied, CollectorError, CollectorErrors
from tests.support.lanes import raise_quietly
from tests.support.processes import PATIENCE, child
from tests.support.tiny_runner import Tiny
from tests.support.transports import Die, Raise

WORKER = 1


@pytest.fixture
def errors() -> Iterator[CollectorErrors]:
    with CollectorErrors(2) as errors:
        yield errors


def error_of(errors: CollectorErrors, kind: str) -> CollectorError:
    with child(raise_quietly, errors, WORKER, kind) as process:
        peer = errors.watch(WORKER, process.pid or 0)
        assert peer.wait(PATIENCE)
        with pytest.raises(CollectorError) as caught:
            peer.check()
    return caught.value


def test_a_collector_that_was_killed_has_died(errors: CollectorErrors) -> None:
    error = error_of(errors, "kill")
    assert type(error) is CollectorDied
    assert (error.worker, error.step, error.remote_traceback) == (WORKER, 42, "")


def test_a_collector_that_raised_has_not_died(errors: CollectorErrors) -> None:
    error = error_of(errors, "key")
    assert type(error) is CollectorError
    assert not isinstance(error, PeerDied)


def test_a_death_is_caught_as_the_death_of_a_peer_and_names_it(errors: CollectorErrors) -> None:
    error = error_of(errors, "kill")
    assert isinstance(error, PeerDied)
    assert isinstance(error, ConnectionError)
    assert error.peer is not None
    assert error.peer.pid == error.pid


def test_a_death_can_be_pickled(errors: CollectorErrors) -> None:
    error = error_of(errors, "kill")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (CollectorDied, str(error), vars(error))


def test_too_many_deaths_end_a_run_as_a_death() -> None:
    with Tiny(Die(at=0), max_restarts=0) as runner, pytest.raises(CollectorDied, match="exceed max_restarts=0"):
        runner.learn(2)


def test_an_exception_ends_a_run_as_itself() -> None:
    with Tiny(Raise()) as runner, pytest.raises(CollectorError, match="ZeroDivisionError") as caught:
        runner.learn(2)
    assert type(caught.value) is CollectorError
    assert "in raise_by_name" in caught.value.remote_traceback
