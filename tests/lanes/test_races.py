"""Races between real processes over payloads that check themselves: nothing torn, nothing lost beyond what is counted.

Outcomes of a rollout that a writer handed over: read whole by exactly one reader, or counted as dropped: acceptable.
Read in part, read twice, read before an older one of the same writer, or neither read nor counted: forbidden.

Outcomes of a weight set: read whole, under its own version: acceptable. A mixture, or an older version after a newer
one: forbidden.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from memlane.core import Peer, Segment
from memlane.ipc import Ring, Weights
from memlane.lanes.ring import Overflow
from tests.support import lane_victims as lane_victims
from tests.support.lane_victims import Template
from tests.support.lanes import checked_layout, state_of

PATIENCE = 60.0

# Seconds that a writer and a reader rest after each slot.
SPEEDS = {"slower": (0.0, 0.0003), "equal": (0.0, 0.0), "faster": (0.0002, 0.0)}


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    process = Template(PATIENCE)
    yield process
    process.close()


@contextmanager
def racing(template: Template, race: Segment, *lives: tuple[object, ...]) -> Iterator[list[Peer]]:
    """Starts all of them together; at the end of the block they must have returned."""
    processes = [Peer.of(template.fork(str(life), race, *arguments), str(life)) for life, *arguments in lives]
    try:
        race.signal("ready").wait(len(lives), timeout=PATIENCE, peers=processes)
        race.signal("go").store(1)
        yield processes
        ends = [template.reap(process.pid) for process in processes]
        assert ends == [0] * len(lives), f"the racers were to return: {ends}"
    finally:
        for process in processes:
            process.close()
        template.ask("kill_all")


def got_by(race: Segment, reader: int) -> NDArray[np.int64]:
    found: NDArray[np.int64] = race["got"][reader, : race["count"][reader]]
    return found


# ----------------------------------------------------------------------------------------------------------------- ring


@pytest.mark.parametrize("by_copy", [False, True], ids=["in place", "by copy"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("overflow", ["drop_oldest", "block"])
def test_every_rollout_arrives_whole_once_and_in_order_or_is_counted_as_dropped(
    template: Template, dose: int, overflow: Overflow, speed: str, writers: int, readers: int, by_copy: bool
) -> None:
    each, body = 400 * dose, 1024
    write_pause, read_pause = SPEEDS[speed]
    with (
        Ring(checked_layout(body), num_slots=4, overflow=overflow) as ring,
        Segment.create(lane_victims.race_layout(readers, writers * each)) as race,
    ):
        lives: list[tuple[object, ...]] = [
            ("race_to_write", place, ring, each, body, write_pause, by_copy) for place in range(writers)
        ]
        lives += [("race_to_read", place, ring, writers, body, read_pause, by_copy) for place in range(readers)]
        with racing(template, race, *lives):
            pass
        counters = ring.counters()
        assert race["torn"].sum() == 0
        assert race["mismatched"].sum() == 0
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
        assert (np.diff(numbers) > 0).all(), f"of writer {writer}: {numbers[np.flatnonzero(np.diff(numbers) <= 0)]}"


def test_the_slow_reader_of_a_fast_writer_gets_the_newest_there_is(template: Template, dose: int) -> None:
    """A lapped reader goes on with the oldest complete rollout, which is at most num_slots behind."""
    each, num_slots = 2000 * dose, 4
    with (
        Ring(checked_layout(16), num_slots=num_slots) as ring,
        Segment.create(lane_victims.race_layout(1, each)) as race,
    ):
        with racing(
            template,
            race,
            ("race_to_write", 0, ring, each, 16, 0.0, True),
            ("race_to_read", 0, ring, 1, 16, 0.0005, False),
        ):
            pass
        got = got_by(race, 0) & 0xFFFFFFFF
        assert ring.counters()["dropped"] > 0
        assert got[-num_slots:].tolist() == list(range(each - num_slots + 1, each + 1))


def test_readers_that_empty_a_full_ring_together_never_get_the_same_slot(template: Template, dose: int) -> None:
    """Both look for the oldest all the time. The ring is long, so that a look takes its time and they meet."""
    rounds, num_slots, payload = 10 * dose, 1000, {"x": np.zeros(1, np.int64)}
    with (
        Ring({"x": ("int64", 1)}, num_slots=num_slots) as ring,
        Segment.create(lane_victims.race_layout(2, rounds * num_slots)) as race,
    ):
        writer, go, emptied = ring.writer(), race.signal("go"), race.signal("written")

        def refill() -> None:
            for _ in range(num_slots):
                writer.put(payload)

        refill()
        with racing(template, race, *[("race_to_empty", place, ring, rounds) for place in range(2)]) as readers:
            for number in range(1, rounds):
                emptied.wait(2 * number, timeout=PATIENCE, peers=readers)
                refill()
                go.store(number + 1)
        everything = np.sort(np.concatenate([got_by(race, reader) for reader in range(2)]))
        assert everything.tolist() == list(range(1, rounds * num_slots + 1))
        for reader in range(2):
            assert (np.diff(got_by(race, reader)) > 0).all()


def test_a_reader_stopped_in_the_middle_of_a_look_still_takes_the_oldest_first(template: Template, dose: int) -> None:
    """While it is stopped, slots are filled in an order of their own: some of the places that it has passed get older
    rollouts than some of those that it has not."""
    rounds, num_slots, burst = 60 * dose, 1000, 200
    chance, payload = random.Random(dose), {"x": np.zeros(1, np.int64)}
    with (
        Ring({"x": ("int64", 1)}, num_slots=num_slots) as ring,
        Segment.create(lane_victims.race_layout(1, rounds * burst)) as race,
        racing(template, race, ("look_again_and_again", ring)) as (reader,),
    ):
        writer = ring.writer()
        for _ in range(rounds):
            os.kill(reader.pid, signal.SIGSTOP)
            while state_of(reader.pid) != "T":
                time.sleep(0.0001)
            slots = [writer.claim(timeout=1) for _ in range(num_slots)]
            chance.shuffle(slots)
            for slot in slots[:burst]:
                slot.release()  # the only free one
                writer.put(payload)
            for slot in slots[burst:]:
                slot.release()
            os.kill(reader.pid, signal.SIGCONT)
            wait_for(lambda: ring.unread == 0)
            time.sleep(0.0005)  # it looks at an empty ring now
        wait_for(lambda: race["count"][0] == rounds * burst)
        race.signal("written").store(1)
        disorder = np.flatnonzero(np.diff(got_by(race, 0)) <= 0)
        assert disorder.size == 0, f"{disorder.size} times in {rounds}"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("waits", [False, True], ids=["looking", "waiting"])
@pytest.mark.parametrize("body", [64, 2**13, 2**17], ids=["512 bytes", "64 KB", "1 MB"])
def test_readers_get_whole_versions_while_a_writer_publishes_as_fast_as_it_can(
    template: Template, dose: int, body: int, waits: bool
) -> None:
    count = {64: 4000, 2**13: 4000, 2**17: 1200}[body] * dose
    with (
        Weights(checked_layout(body)) as weights,
        Segment.create(lane_victims.race_layout(3, count)) as race,
    ):
        readers = [("race_to_follow", place, weights, 1, body, waits) for place in range(3)]
        with racing(template, race, ("race_to_publish", 0, weights, count, body), *readers):
            pass
        assert race["torn"].sum() == 0
        assert weights.version == count
        for reader in range(3):
            versions = got_by(race, reader)
            assert (np.diff(versions) > 0).all()
            assert versions[-1] == count


def test_a_version_is_read_with_the_content_that_was_published_under_it(template: Template, dose: int) -> None:
    """The writer's numbers are 1 and 2 in turn, so a version's parity tells what it must contain."""
    count, body = 3000 * dose, 2**12
    with (
        Weights(checked_layout(body)) as weights,
        Segment.create(lane_victims.race_layout(1, count)) as race,
        racing(template, race, ("race_to_publish", 0, weights, count, body)),
    ):
        version, different = 0, 0
        while version < count:
            version, arrays = weights.read()
            different += version > 0 and int(arrays["number"]) != 2 - version % 2
        assert different == 0


def test_several_writers_of_weights_lose_no_version(template: Template, dose: int) -> None:
    count, body = 1500 * dose, 2**10
    with (
        Weights(checked_layout(body), buffers=5) as weights,
        Segment.create(lane_victims.race_layout(2, 3 * count)) as race,
    ):
        writers = [("race_to_publish", place, weights, count, body) for place in range(3)]
        readers = [("race_to_follow", place, weights, 3, body, False) for place in range(2)]
        with racing(template, race, *writers, *readers):
            pass
        assert weights.version == 3 * count
        assert race["torn"].sum() == 0
        for reader in range(2):
            assert (np.diff(got_by(race, reader)) > 0).all()
