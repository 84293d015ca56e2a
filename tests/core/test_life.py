"""Segment.life: which of the processes that hold something in a segment are alive."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import pytest

from memlane.core import Segment, SegmentClosed, SegmentError
from memlane.core.liveness import PID_BITS
from tests.support.processes import FIELDS, METHODS, ask, child, sleep_forever, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(FIELDS) as segment:
        yield segment


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def identity_of(segment: Segment) -> int:
    return segment.life.process()


def test_a_process_has_one_identity_in_a_segment_with_its_pid_in_the_lower_bits(segment: Segment) -> None:
    me = segment.life.process()
    assert me == segment.life.process() == segment.life.process_if_taken() > 0
    assert me & (1 << PID_BITS) - 1 == os.getpid()
    assert segment.life.alive(me)
    assert not any(segment.life.alive(other) for other in (0, 1, -1, me + 1, 2**63 - 1))


@pytest.mark.parametrize("method", METHODS)
def test_a_child_has_another_identity_and_is_dead_after_its_end(segment: Segment, method: str) -> None:
    me = segment.life.process()
    other = ask(identity_of, segment, method=method)
    assert other != me
    assert segment.life.alive(me)
    assert not segment.life.alive(other)


def hold_and_fork(segment: Segment, pipe: Connection) -> None:
    """Send the identity of this process, leave a child behind that uses the segment too, and die."""
    me = segment.life.process()
    if os.fork() == 0:
        pipe.send((os.getpid(), me, segment.life.process()))
        sleep_forever()
    signal.pause()


def test_a_killed_process_is_dead_although_its_forked_child_lives(segment: Segment) -> None:
    answers, pipe = Pipe(duplex=False)
    with child(hold_and_fork, segment, pipe) as process:
        grandchild, identity, its_own = answers.recv()
        try:
            assert segment.life.alive(identity)
            process.kill()
            process.join()
            assert not segment.life.alive(identity)
            assert segment.life.alive(its_own)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert wait_for(lambda: not segment.life.alive(its_own))


def test_each_object_on_a_segment_has_its_own_identity_and_closing_one_leaves_the_other_alive(segment: Segment) -> None:
    me = segment.life.process()
    with pickle.loads(pickle.dumps(segment)) as again:
        other = again.life.process()
        assert other != me
        assert segment.life.alive(other)
        assert again.life.alive(me)
    del again
    assert not segment.life.alive(other)
    assert segment.life.alive(me)


def test_only_a_process_that_holds_something_has_a_descriptor_for_it() -> None:
    before = descriptors()
    segment = Segment.create(FIELDS)
    assert not segment.life.alive(1)
    opened = descriptors()
    identity = segment.life.process()
    assert descriptors() == opened <= before + 2
    assert ask(descriptors_without_token, segment, identity)
    segment.close()
    del segment
    assert descriptors() == before


def descriptors_without_token(segment: Segment, parent: int) -> bool:
    before = descriptors()
    assert segment.life.process_if_taken() == 0
    assert segment.life.alive(parent)  # opens the file
    return descriptors() == before + 1


def test_a_closed_segment_has_no_life(segment: Segment) -> None:
    life = segment.life
    segment.close()
    for use in (life.process, life.process_if_taken, lambda: life.alive(1), life.check, lambda: segment.life):
        with pytest.raises(SegmentClosed):
            use()


@pytest.mark.usefixtures("shm_dir")
def test_a_process_that_may_only_read_can_ask_and_holds_nothing() -> None:
    with Segment.create(FIELDS, name="shared") as segment, Segment.attach("shared", writeable=False) as reader:
        assert reader.life.alive(segment.life.process())
        with pytest.raises(SegmentError, match="attached read-only; attach it with writeable=True"):
            reader.life.process()
