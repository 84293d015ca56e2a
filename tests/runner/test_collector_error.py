"""CollectorErrors: an exception or a death in a collector, told to the learner in full and at once."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from memlane.core import MemlaneError, Peer, PeerDied, SegmentClosed, WaitTimeout
from memlane.core.lowlevel import PeerState
from memlane.ipc import CollectorError, CollectorErrors, Ring
from tests.support import lanes as lane_support
from tests.support.lanes import raise_quietly
from tests.support.payloads import CHECKED, Payload
from tests.support.processes import METHODS, PATIENCE, PROMISE, child, wait_for, within

WORKER = 1


@pytest.fixture
def errors() -> Iterator[CollectorErrors]:
    with CollectorErrors(3) as errors:
        yield errors


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring(CHECKED, num_slots=4) as ring:
        yield ring


@contextmanager
def collector(errors: CollectorErrors, kind: str, ring: Ring | None = None, **options: Any) -> Iterator[BaseProcess]:
    with child(raise_quietly, errors, WORKER, kind, ring, **options) as process:
        yield process


def error_of(errors: CollectorErrors, ring: Ring, kind: str, **options: Any) -> CollectorError:
    """What the learner's wait for data ends with."""
    with collector(errors, kind, **options) as process:
        peer = errors.watch(WORKER, process.pid or 0)
        with pytest.raises(CollectorError) as caught:
            ring.reader().take(timeout=PATIENCE, peers=[peer])
        assert caught.value.pid == process.pid
    return caught.value


# ----------------------------------------------------------------------------------------------------------- exceptions


def test_an_exception_ends_the_learners_wait_with_its_type_worker_and_last_step(
    errors: CollectorErrors, ring: Ring
) -> None:
    error = error_of(errors, ring, "key")
    assert (error.type_name, error.worker, error.step) == ("KeyError", WORKER, 42)
    assert str(error).startswith(
        f"collector 1 (pid {error.pid}) raised KeyError: 'missing key', after step 42, while this process waited for a "
        "slot to read in the ring of anonymous segment"
    )


def test_the_full_remote_traceback_comes_along(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "key")
    assert error.remote_traceback.startswith("Traceback (most recent call last):")
    assert '{}["missing key"]' in error.remote_traceback
    assert "in raise_in_collector" in error.remote_traceback
    assert error.remote_traceback.rstrip().endswith("KeyError: 'missing key'")
    assert error.remote_traceback in str(error)


def test_the_cause_of_an_exception_is_in_the_traceback(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "chained")
    assert (error.type_name, "outer trouble" in str(error)) == ("RuntimeError", True)
    assert "invalid literal for int()" in error.remote_traceback
    assert "The above exception was the direct cause" in error.remote_traceback


def test_an_exception_that_cannot_be_pickled_arrives_all_the_same(errors: CollectorErrors, ring: Ring) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.loads(pickle.dumps(lane_support.Stubborn("a", "b")))
    error = error_of(errors, ring, "stubborn")
    assert error.type_name == "tests.support.lanes.Stubborn"
    assert "raised tests.support.lanes.Stubborn: it failed because it must" in str(error)


def test_an_exception_whose_text_cannot_be_made_arrives_all_the_same(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "speechless")
    assert error.type_name == "tests.support.lanes.Speechless"
    assert "(no message: its __str__ raised ValueError)" in str(error)
    assert "raise Speechless" in error.remote_traceback


def test_an_exception_without_a_message_says_so(errors: CollectorErrors, ring: Ring) -> None:
    assert "raised RuntimeError: (no message), after step 42" in str(error_of(errors, ring, "empty"))


def test_an_endless_message_loses_its_middle(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "long")
    assert error.type_name == "ValueError"
    assert "characters ..." in str(error)
    assert error.remote_traceback.startswith("Traceback")


@pytest.mark.parametrize("method", METHODS)
def test_the_report_comes_from_a_child_however_it_was_started(errors: CollectorErrors, ring: Ring, method: str) -> None:
    assert error_of(errors, ring, "key", method=method).type_name == "KeyError"


def test_the_exception_goes_on_its_way_in_the_collector(errors: CollectorErrors) -> None:
    with pytest.raises(KeyError, match="missing key"):
        lane_support.raise_in_collector(errors, 0, "key")


def test_a_collector_that_ends_well_reports_nothing(errors: CollectorErrors) -> None:
    with errors.reporting(0) as reporter:
        reporter.step(3)
    errors.check()
    assert errors.step_of(0) == 3


# --------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize(
    ("kind", "signal_", "name", "cause"),
    [
        ("kill", signal.SIGKILL, "SIGKILL", "by hand, or the kernel was out of memory"),
        ("segv", signal.SIGSEGV, "SIGSEGV", "an invalid memory access, most likely in native code"),
    ],
)
def test_a_death_by_a_signal_has_its_name_and_likely_cause(
    errors: CollectorErrors, ring: Ring, kind: str, signal_: int, name: str, cause: str
) -> None:
    error = error_of(errors, ring, kind, may_die_of=signal_)
    assert str(error).startswith(f"collector 1 (pid {error.pid}) was killed by {name} ({cause}), after step 42, while")
    assert (error.worker, error.step, error.remote_traceback) == (WORKER, 42, "")
    assert name in error.type_name


def test_an_exit_without_an_exception_has_its_code(errors: CollectorErrors, ring: Ring) -> None:
    process = mp.get_context("fork").Process(target=raise_quietly, args=(errors, WORKER, "exit"))
    process.start()
    peer = errors.watch(WORKER, process.pid or 0)
    with pytest.raises(CollectorError, match=r"collector 1 \(pid \d+\) exited with code 3, after step 42"):
        ring.reader().take(timeout=PATIENCE, peers=[peer])
    process.join()


@pytest.mark.parametrize("kind", ["key", "kill"])
def test_the_learner_knows_within_a_second(errors: CollectorErrors, ring: Ring, kind: str) -> None:
    """Measured from the moment that the collector is seen dead, because its start and its end take their time here."""
    with collector(errors, kind) as process:
        peer = errors.watch(WORKER, process.pid or 0)
        process.join(PATIENCE)
        begin = time.monotonic()
        with pytest.raises(CollectorError):
            ring.reader().take(timeout=PATIENCE, peers=[peer])
        assert time.monotonic() - begin < within(PROMISE)


def test_a_wait_that_has_begun_ends_within_a_second_of_the_death(errors: CollectorErrors, ring: Ring) -> None:
    with collector(errors, "wait") as process:
        peer = errors.watch(WORKER, process.pid or 0)
        assert wait_for(lambda: errors.step_of(WORKER) == 42)
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            process.kill()

        timer = threading.Timer(0.2, kill)
        timer.start()
        with pytest.raises(CollectorError, match="SIGKILL"):
            ring.reader().take(timeout=PATIENCE, peers=[peer])
        assert time.monotonic() - killed_at[0] < within(PROMISE)
        timer.join()


def test_an_exception_in_a_collector_that_is_slow_to_end_is_told_within_a_second(
    errors: CollectorErrors, ring: Ring
) -> None:
    with child(lane_support.report_and_linger, errors, WORKER, 60.0) as process:
        try:
            peer = errors.watch(WORKER, process.pid or 0)
            assert wait_for(lambda: peer.failed)
            with pytest.raises(CollectorError, match="KeyError"):
                ring.reader().take(timeout=within(PROMISE), peers=[peer])
        finally:
            process.kill()


def test_what_the_collector_wrote_before_it_failed_is_read_first(errors: CollectorErrors, ring: Ring) -> None:
    with collector(errors, "key", ring) as process:
        peer = errors.watch(WORKER, process.pid or 0)
        process.join(PATIENCE)
        reader = ring.reader()
        numbers = [int(reader.get(Payload().arrays, timeout=PATIENCE, peers=[peer]).rows) for _ in range(2)]
        assert numbers == [1, 2]
        with pytest.raises(CollectorError, match="KeyError"):
            reader.take(timeout=PATIENCE, peers=[peer])


def test_the_death_of_one_of_several_is_told_as_its_own(errors: CollectorErrors, ring: Ring) -> None:
    with (
        child(lane_support.raise_quietly, errors, 0, "wait") as living,
        child(lane_support.raise_quietly, errors, 2, "key") as failing,
    ):
        peers = [errors.watch(0, living.pid or 0), errors.watch(2, failing.pid or 0)]
        with pytest.raises(CollectorError, match="collector 2 ") as caught:
            ring.reader().take(timeout=PATIENCE, peers=peers)
        assert (caught.value.worker, caught.value.pid) == (2, failing.pid)
        living.kill()


def test_a_collector_error_can_be_pickled(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "key")
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other), vars(other)) == (CollectorError, str(error), vars(error))


def test_a_collector_error_is_what_programs_already_catch(errors: CollectorErrors, ring: Ring) -> None:
    error = error_of(errors, ring, "empty")
    assert isinstance(error, RuntimeError)
    assert isinstance(error, MemlaneError)


# ---------------------------------------------------------------------------------------------------------------- check


def test_check_says_nothing_while_all_is_well(errors: CollectorErrors) -> None:
    with collector(errors, "wait") as process:
        peer = errors.watch(WORKER, process.pid or 0)
        errors.check()
        errors.check([peer])
        process.kill()


def test_check_raises_what_any_collector_reported(errors: CollectorErrors) -> None:
    with collector(errors, "key") as process:
        process.join(PATIENCE)
        with pytest.raises(CollectorError, match=r"collector 1 .* raised KeyError: 'missing key', after step 42\n"):
            errors.check()


def test_check_raises_for_a_collector_that_died_without_a_word(errors: CollectorErrors) -> None:
    with collector(errors, "kill") as process:
        peer = errors.watch(WORKER, process.pid or 0)
        assert peer.wait(PATIENCE)
        errors.check()
        with pytest.raises(CollectorError, match="SIGKILL"):
            errors.check([peer])


def test_the_step_can_be_looked_at_while_the_collector_works(errors: CollectorErrors) -> None:
    with collector(errors, "wait") as process:
        assert wait_for(lambda: errors.step_of(WORKER) == 42)
        process.kill()


# ------------------------------------------------------------------------------------------------ watching and starting


def test_a_report_that_was_faster_than_the_watching_is_not_forgotten(errors: CollectorErrors, ring: Ring) -> None:
    with collector(errors, "key") as process:
        peer = Peer.of(process.pid or 0)
        assert peer.wait(PATIENCE)  # dead and reported before anybody watches
        assert peer.state is PeerState.ZOMBIE
        with pytest.raises(CollectorError, match="KeyError"):
            ring.reader().take(timeout=PATIENCE, peers=[errors.watch(WORKER, process.pid or 0)])


def test_watching_a_collector_that_is_gone_already_tells_its_report(errors: CollectorErrors) -> None:
    with collector(errors, "key") as process:
        process.join(PATIENCE)
        with pytest.raises(CollectorError, match="KeyError"):
            errors.watch(WORKER, process.pid or 0)


def test_watching_a_process_that_never_was_is_an_error(errors: CollectorErrors) -> None:
    with pytest.raises(PeerDied, match="there is no process with pid"):
        errors.watch(WORKER, 2**22 - 1)


def test_a_collector_that_is_started_again_begins_with_a_clean_report(errors: CollectorErrors, ring: Ring) -> None:
    error_of(errors, ring, "key")
    with collector(errors, "wait") as process:
        peer = errors.watch(WORKER, process.pid or 0)
        errors.check([peer])
        with pytest.raises(WaitTimeout):
            ring.reader().take(timeout=0.01, peers=[peer])
        process.kill()


def test_a_collector_that_is_started_again_is_not_blamed_for_the_error_of_the_first(
    errors: CollectorErrors, ring: Ring
) -> None:
    error_of(errors, ring, "key")
    with child(lane_support.die) as process:  # dies before it can report
        peer = errors.watch(WORKER, process.pid or 0)
        with pytest.raises(CollectorError, match=r"SIGKILL.*, after step 0, while") as caught:
            ring.reader().take(timeout=PATIENCE, peers=[peer])
        assert (caught.value.step, caught.value.remote_traceback) == (0, "")


@pytest.mark.parametrize("worker", [-1, 3])
def test_a_worker_that_there_is_no_room_for_is_refused(errors: CollectorErrors, worker: int) -> None:
    uses: list[Callable[[], object]] = [
        lambda: errors.step_of(worker),
        lambda: errors.watch(worker, os.getpid()),
        lambda: errors.reporting(worker).__enter__(),
    ]
    for use in uses:
        with pytest.raises(IndexError, match=f"there is no collector {worker}, only 0 to 2"):
            use()


def test_there_is_room_for_at_least_one() -> None:
    with pytest.raises(ValueError, match="collectors must be 1 or more, found 0"):
        CollectorErrors(0)


def test_use_after_close_is_an_error() -> None:
    errors = CollectorErrors(1)
    errors.close()
    errors.close()
    for use in (errors.check, lambda: errors.step_of(0), lambda: errors.watch(0, os.getpid())):
        with pytest.raises(SegmentClosed):
            use()


def test_a_watched_collector_can_be_handed_to_another_process(errors: CollectorErrors) -> None:
    with collector(errors, "key") as process:
        peer = errors.watch(WORKER, process.pid or 0)
        other = pickle.loads(pickle.dumps(peer))
        assert (other, other.worker) == (peer, WORKER)
        assert other.wait(PATIENCE)
        assert other.error("").type_name == "KeyError"
        other._errors.close()


# --------------------------------------------------------------------------------------------------------- stray stores


def report_division_by_zero(errors: CollectorErrors) -> None:
    with suppress(ZeroDivisionError), errors.reporting(WORKER) as reporter:
        reporter.step(42)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\0", b"[" * 2000, b'{"pid": 1}', b'{"pid": "1", "step": [], "message": 5}'],
    ids=repr,
)
def test_a_report_that_was_overwritten_is_still_an_error_of_its_collector(errors: CollectorErrors, text: bytes) -> None:
    report_division_by_zero(errors)
    errors.segment["report"][WORKER, : len(text)] = list(text)
    errors.segment["length"][WORKER] = len(text)
    with pytest.raises(
        CollectorError, match=r"collector 1 .* raised an exception: its report cannot be read"
    ) as caught:
        errors.check()
    assert (caught.value.pid, caught.value.step) == (os.getpid(), 42)


@pytest.mark.parametrize("length", [-1, -(2**63), 2**63 - 1, 1 << 20])
def test_a_length_of_a_report_that_was_overwritten_leads_to_no_other_memory(
    errors: CollectorErrors, length: int
) -> None:
    report_division_by_zero(errors)
    errors.segment["length"][WORKER] = length
    with pytest.raises(CollectorError, match="its report cannot be read"):
        errors.check()
