"""Races between real processes over payloads that check themselves: nothing torn, nothing lost beyond what is counted.

Outcomes of a rollout that a writer committed. Acceptable: read whole by exactly one reader, or counted as dropped.
Forbidden: read in part, read twice, read before an older one of the same writer, or neither read nor counted.

Outcomes of a weight set. Acceptable: read whole, under its own version. Forbidden: a mixture, or an older version after
a newer one.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from memlane.ipc import Ring, Weights
from memlane.lanes.ring import Overflow
from tests.support import lane_lives as lives
from tests.support.kills import PATIENCE, Processes, Template
from tests.support.payloads import checked_layout
from tests.support.processes import wait_for

# Seconds that a writer and a reader pause after each slot.
SPEEDS = {"slower": (0.0, 0.0003), "equal": (0.0, 0.0), "faster": (0.0002, 0.0)}


def got_by(race: Processes, reader: int) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = race.board["got"][reader, : race.board["count"][reader]]
    return numbers


# ----------------------------------------------------------------------------------------------------------------- ring


@pytest.mark.parametrize("by_copy", [False, True], ids=["in place", "by copy"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("overflow", ["drop_oldest", "block"])
def test_every_rollout_arrives_whole_once_and_in_order_or_is_counted_as_dropped(
    template: Template, scale: int, overflow: Overflow, speed: str, writers: int, readers: int, by_copy: bool
) -> None:
    each, body = 400 * scale, 1024
    write_pause, read_pause = SPEEDS[speed]
    with (
        Ring(checked_layout(body), num_slots=4, overflow=overflow) as ring,
        Processes(template, lives.race_board(readers, writers * each)) as race,
    ):
        for place in range(writers):
            race.fork(lives.race_to_write, place, ring, each, body, write_pause, by_copy)
        for place in range(readers):
            race.fork(lives.race_to_read, place, ring, writers, body, read_pause, by_copy)
        race.go()
        race.join()
        counters = ring.counters()
        assert race.board["torn"].sum() == 0
        assert race.board["mismatched"].sum() == 0
        assert counters["written"] == writers * each
        assert ring.unread == 0
        everything = np.concatenate([got_by(race, reader) for reader in range(readers)])
        assert len(np.unique(everything)) == len(everything) == counters["read"]
        assert counters["written"] == counters["read"] + counters["dropped"]
        for reader in range(readers):
            expect_order(got_by(race, reader), writers)
        if overflow == "block":
            assert counters["dropped"] == 0


def expect_order(got: NDArray[np.int64], writers: int) -> None:
    for writer in range(writers):
        numbers = got[got >> 32 == writer] & 0xFFFFFFFF
        assert (np.diff(numbers) > 0).all(), f"writer {writer}: {numbers[np.flatnonzero(np.diff(numbers) <= 0)]}"


def test_the_slow_reader_of_a_fast_writer_gets_the_newest_rollouts(template: Template, scale: int) -> None:
    """A lapped reader goes on with the oldest complete rollout, which is at most num_slots behind."""
    each, num_slots = 2000 * scale, 4
    with (
        Ring(checked_layout(16), num_slots=num_slots) as ring,
        Processes(template, lives.race_board(1, each)) as race,
    ):
        race.fork(lives.race_to_write, 0, ring, each, 16, 0.0, True)
        race.fork(lives.race_to_read, 0, ring, 1, 16, 0.0005, False)
        race.go()
        race.join()
        got = got_by(race, 0) & 0xFFFFFFFF
        assert ring.counters()["dropped"] > 0
        assert got[-num_slots:].tolist() == list(range(each - num_slots + 1, each + 1))


def test_readers_that_empty_a_full_ring_together_never_get_the_same_slot(template: Template, scale: int) -> None:
    """Both scan for the oldest slot all the time. The ring is long, so that a scan takes long and they meet."""
    rounds, num_slots, payload = 10 * scale, 1000, {"x": np.zeros(1, np.int64)}
    with (
        Ring({"x": ("int64", 1)}, num_slots=num_slots) as ring,
        Processes(template, lives.race_board(2, rounds * num_slots)) as race,
    ):
        writer, go, emptied = ring.writer(), race.board.signal("go"), race.board.signal("written")

        def refill() -> None:
            for _ in range(num_slots):
                writer.put(payload)

        refill()
        readers = [race.fork(lives.race_to_empty, place, ring, rounds) for place in range(2)]
        race.go()
        for number in range(1, rounds):
            emptied.wait(2 * number, timeout=PATIENCE, peers=[reader.peer for reader in readers])
            refill()
            go.store(number + 1)
        race.join()
        everything = np.sort(np.concatenate([got_by(race, reader) for reader in range(2)]))
        assert everything.tolist() == list(range(1, rounds * num_slots + 1))
        for reader in range(2):
            assert (np.diff(got_by(race, reader)) > 0).all()


def test_a_reader_stopped_in_the_middle_of_a_scan_still_takes_the_oldest_first(template: Template, scale: int) -> None:
    """While it is stopped, slots are filled in random order: some of those that it has scanned get older rollouts than
    some of those that it has not."""
    rounds, num_slots, burst = 60 * scale, 1000, 200
    chance, payload = random.Random(scale), {"x": np.zeros(1, np.int64)}
    with (
        Ring({"x": ("int64", 1)}, num_slots=num_slots) as ring,
        Processes(template, lives.race_board(1, rounds * burst)) as race,
    ):
        writer, reader = ring.writer(), race.fork(lives.poll_ring, ring)
        race.go()
        for _ in range(rounds):
            race.stop(reader)
            slots = [writer.claim(timeout=1) for _ in range(num_slots)]
            chance.shuffle(slots)
            for slot in slots[:burst]:
                slot.release()  # the only free one
                writer.put(payload)
            for slot in slots[burst:]:
                slot.release()
            race.resume(reader)
            assert wait_for(lambda: ring.unread == 0)
            time.sleep(0.0005)  # it scans an empty ring now
        assert wait_for(lambda: race.board["count"][0] == rounds * burst)
        race.board.signal("written").store(1)
        race.join()
        disorder = np.flatnonzero(np.diff(got_by(race, 0)) <= 0)
        assert disorder.size == 0, f"{disorder.size} times in {rounds}"


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("waits", [False, True], ids=["polling", "waiting"])
@pytest.mark.parametrize("body", [64, 2**13, 2**17], ids=["512 bytes", "64 KB", "1 MB"])
def test_readers_get_whole_versions_while_a_writer_publishes_as_fast_as_it_can(
    template: Template, scale: int, body: int, waits: bool
) -> None:
    count = {64: 4000, 2**13: 4000, 2**17: 1200}[body] * scale
    with (
        Weights(checked_layout(body)) as weights,
        Processes(template, lives.race_board(3, count)) as race,
    ):
        race.fork(lives.race_to_publish, 0, weights, count, body)
        for place in range(3):
            race.fork(lives.race_to_follow, place, weights, 1, body, waits)
        race.go()
        race.join()
        assert race.board["torn"].sum() == 0
        assert weights.version == count
        for reader in range(3):
            versions = got_by(race, reader)
            assert (np.diff(versions) > 0).all()
            assert versions[-1] == count


def test_a_version_is_read_with_the_content_that_was_published_under_it(template: Template, scale: int) -> None:
    """The writer's numbers are 1 and 2 in turn, so the parity of a version determines its content."""
    count, body = 3000 * scale, 2**12
    with (
        Weights(checked_layout(body)) as weights,
        Processes(template, lives.race_board(1, count)) as race,
    ):
        race.fork(lives.race_to_publish, 0, weights, count, body)
        race.go()
        version, different = weights.wait_for(1), 0
        while version < count:
            version, arrays = weights.read()
            different += int(arrays["number"]) != 2 - version % 2
        race.join()
        assert different == 0


def test_several_writers_of_weights_lose_no_version(template: Template, scale: int) -> None:
    count, body = 1500 * scale, 2**10
    with (
        Weights(checked_layout(body), buffers=5) as weights,
        Processes(template, lives.race_board(2, 3 * count)) as race,
    ):
        for place in range(3):
            race.fork(lives.race_to_publish, place, weights, count, body)
        for place in range(2):
            race.fork(lives.race_to_follow, place, weights, 3, body, False)
        race.go()
        race.join()
        assert weights.version == 3 * count
        assert race.board["torn"].sum() == 0
        for reader in range(2):
            assert (np.diff(got_by(race, reader)) > 0).all()
