"""What a process holds in a lane: it is told from what others hold, and lanes without life tokens are refused."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import MemlaneError, SegmentError, WaitTimeout
from memlane.lanes import Replay, Ring, Stats, Weights
from tests.support.namespaces import forbid_file_locks
from tests.support.processes import PATIENCE, ask

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

# ------------------------------------------------------------------------------------------ two handles in one process


@pytest.fixture
def two() -> Iterator[tuple[Ring, Ring]]:
    """Two objects of this process on one ring of two slots."""
    with Ring({"x": ("int64", ())}, num_slots=2, overflow="block") as ring, pickle.loads(pickle.dumps(ring)) as again:
        yield ring, again


def test_slots_that_were_claimed_and_taken_through_either_of_two_objects_are_given_back(two: tuple[Ring, Ring]) -> None:
    for claiming, taking in (two, two[::-1]):
        with claiming.writer().claim(timeout=0) as slot, taking.writer().claim(timeout=0) as other:
            slot["x"][...], other["x"][...] = 1, 2
            slot.commit()
            other.commit()
        with taking.reader().take(timeout=0) as slot, claiming.reader().take(timeout=0) as other:
            assert (int(slot["x"]), int(other["x"])) == (1, 2)
    assert (two[0].counters()["read"], two[1].counters()["abandoned"]) == (4, 0)


def test_closing_one_of_two_objects_leaves_the_slots_of_the_other_held(two: tuple[Ring, Ring]) -> None:
    ring, again = two
    with again.writer().claim():  # it has a token of its own
        pass
    with ring.writer().claim() as slot, ring.writer().claim():
        again.close()
        with pytest.raises(WaitTimeout):
            ask(ring.writer().claim, 0.25)
        slot["x"][...] = 3
        slot.commit()
    assert ring.unread == 1


def test_a_slot_stays_held_while_its_lease_is_in_use_after_the_ring_was_closed(two: tuple[Ring, Ring]) -> None:
    ring, again = two
    slot = again.writer().claim()
    view = slot["x"]
    with ring.writer().claim():
        again.close()
        with pytest.raises(WaitTimeout):
            ring.writer().claim(timeout=0.25)
        del slot
        with pytest.raises(WaitTimeout):
            ring.writer().claim(timeout=0.25)
        del view
        ring.writer().claim(timeout=0).release()


def test_a_slot_cannot_be_released_through_another_object(two: tuple[Ring, Ring]) -> None:
    ring, again = two
    slot = ring.writer().claim()
    with pytest.raises(MemlaneError, match="this process does not hold it"):
        again.native.commit(slot.index, 0, 0, 0)
    slot.release()


# --------------------------------------------------------------------------------------------------------- descriptors


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_that_only_reads_weights_has_no_descriptor_more_and_one_that_publishes_has_one() -> None:
    with Weights({"x": ("int64", ())}) as weights:
        opened = descriptors()
        weights.read({"x": np.array(0)})
        assert descriptors() == opened
        for _ in range(3):
            weights.publish({"x": np.array(1)})
        assert descriptors() == opened + 1


def test_a_lane_that_was_closed_and_dropped_leaves_no_descriptor() -> None:
    before = descriptors()
    ring = Ring({"x": ("int64", ())})
    ring.writer().put({"x": np.array(1)})
    assert descriptors() == before + 2
    ring.close()
    del ring
    assert descriptors() == before


# ------------------------------------------------------------------------------------------------ files without locks

LANES: dict[str, Callable[..., Any]] = {
    "ring": lambda **place: Ring({"x": ("int64", ())}, **place),
    "weights": lambda **place: Weights({"x": ("int64", ())}, **place),
    "stats": lambda **place: Stats(1, **place),
    "replay": lambda **place: Replay({"x": ("int64", ())}, 4, **place),
}


def refusal_without_locks(error: int, attempt: Callable[..., object], *args: object) -> str:
    try:
        forbid_file_locks(error)
    except OSError as cause:
        return f"no sandbox: {cause}"
    with pytest.raises(SegmentError) as refused:
        attempt(*args)
    return str(refused.value)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
@pytest.mark.parametrize("lane", LANES)
def test_a_lane_on_a_file_system_without_locks_is_refused_when_it_is_created(lane: str, error: int) -> None:
    refusal = ask(refusal_without_locks, error, LANES[lane])
    if refusal.startswith("no sandbox"):
        pytest.skip(refusal)
    assert refusal == (
        "anonymous segment cannot be used: this process needs a lock on its file, which shows the other processes "
        f"that it is alive, but cannot lock a byte of the file: {os.strerror(error)}; use a file system with "
        "open-file-description locks, such as /dev/shm or a local disk"
    )


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_on_a_file_system_without_locks_is_refused_when_it_is_attached(shm_dir: Path, lane: str) -> None:
    with LANES[lane](name="shared") as existing:
        refusal = ask(refusal_without_locks, errno.ENOLCK, type(existing).attach, "shared")
    if refusal.startswith("no sandbox"):
        pytest.skip(refusal)
    assert refusal.startswith(f"named segment {shm_dir}/memlane-shared cannot be used: this process needs a lock")


def claim_without_descriptors(ring: Ring) -> str:
    open_now = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now, open_now))
    filler = []
    with suppress(OSError):
        while True:
            filler.append(os.dup(0))
    with pytest.raises(SegmentError) as refused:
        ring.writer().claim(timeout=PATIENCE)
    for descriptor in filler:
        os.close(descriptor)
    ring.writer().claim(timeout=PATIENCE).release()
    return str(refused.value)


def test_a_claim_without_a_free_descriptor_is_an_error_that_names_the_limit_and_the_next_one_works() -> None:
    with Ring({"x": ("int64", ())}) as ring:
        refusal = ask(claim_without_descriptors, ring)
    assert refusal.startswith("ring of anonymous segment cannot be used: ")
    assert refusal.endswith("Too many open files; raise the limit of open files (ulimit -n)")
