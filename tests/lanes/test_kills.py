"""SIGKILL and SIGSTOP at random instants for every role of every lane: the others go on, and nothing is torn or lost.

A victim (lane_lives.py) plays its role as fast as possible until it is killed; survivors play theirs beside it. After
each kill the survivors must make progress within a second, what they saw must be complete, and what was committed must
have arrived or be counted as dropped. Every test accounts for its own kills (kills.py) and names the phases that they
must hit.

`make soak` runs the same tests with forty times the kills. MEMLANE_KILL_SEED repeats a run, as far as timing can be
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memlane.core import MemlaneError, Peer, Segment, reclaim
from memlane.core.liveness import PID_BITS
from memlane.ipc import Ring, RolloutRingBuffer, SharedWeightSync, Stats, Weights
from tests.support import lane_lives as lives
from tests.support.kills import PATIENCE, PLACES, Kills, Template, accounted, scales
from tests.support.lane_lives import BODY
from tests.support.lanes import timed_out
from tests.support.payloads import CHECKED, Payload, checked_layout, whole


@pytest.fixture(scope="module", params=scales(soak=40))
def scale(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def kills(template: Template, kill_folder: Path, scale: int, request: pytest.FixtureRequest) -> Iterator[Kills]:
    make = partial(Kills, template, lives.BOARD, request.node.originalname, scale)
    with accounted(make, kill_folder, request) as kills:
        yield kills


def expect_nothing_torn(kills: Kills) -> None:
    assert kills.board["torn"].sum() == 0
    assert kills.board["disorder"].sum() == 0


def is_of(process: Peer, identity: int) -> bool:
    """Whether an identity of ``Segment.life`` can be that of ``process``: it has the pid in its lower bits."""
    return identity & (1 << PID_BITS) - 1 == process.pid


# ----------------------------------------------------------------------------------------------------------------- ring


def held_in(ring: Ring) -> Callable[[Peer], str]:
    """What a victim held when it was killed, from the state words of the slots: identity << 2 | state."""

    def detail(victim: Peer) -> str:
        words = [int(np.frombuffer(slot.tobytes(), np.int64, 1)[0]) for slot in ring.segment["slots"]]
        states = [word & 3 for word in words if word & 1 and is_of(victim, word >> 2)]
        return "".join({1: ", a slot half written", 3: ", a slot half read"}[state] for state in states)

    return detail


def drain(kills: Kills, ring: Ring, place: int = PLACES - 1) -> None:
    """Read what is left, as a reader at ``place``."""
    while not timed_out(lambda: drain_one(kills.board, ring, place)):
        pass


def drain_one(board: Segment, ring: Ring, place: int) -> None:
    with ring.reader().take(timeout=0.001) as slot:
        board["torn"][place] += not whole(slot)
        lives.note(board, place, slot)


def expect_all_arrived(kills: Kills, *writers: int) -> None:
    """Every number that a writer knows to be committed was seen by a reader."""
    for writer in writers:
        seen = kills.board["seen"][:, writer].any(axis=0)
        committed, begun = int(kills.board["committed"][writer]), int(kills.board["begun"][writer])
        missing = np.flatnonzero(~seen[1 : committed + 1]) + 1
        assert missing.size == 0, f"lost of writer {writer}: {missing}"
        assert not seen[begun + 1 :].any(), "a reader saw a number that was never written"


def expect_all_slots_usable(kills: Kills, ring: Ring) -> None:
    """Every slot can be claimed: a dead process keeps none."""
    physical = ring.segment.layout["slots"].shape[0]
    with kills.promptly():
        slots = [ring.writer().claim(timeout=PATIENCE) for _ in range(physical)]
    assert timed_out(ring.writer().claim, timeout=0)
    for slot in slots:
        slot.release()


def count_lost(ring: Ring) -> int:
    """How many slots the counters do not account for, while no process holds one."""
    counters = ring.counters()
    return abs(counters["written"] - counters["read"] - counters["dropped"] - ring.unread)


def test_a_writer_killed_in_mid_write_costs_only_its_own_unfinished_slot(kills: Kills) -> None:
    for _ in kills.rounds(14, must_hit=["a slot half written"]):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivors = [kills.start(lives.survive_writing, 1, ring), kills.start(lives.survive_reading, 2, ring)]
            victim = kills.start(lives.write_slots, 0, ring, kills.seed())
            kills.sleep()
            kills.kill(victim, detail=held_in(ring))
            kills.expect_progress(1, 2)
            kills.join(*survivors)
            drain(kills, ring)
            expect_nothing_torn(kills)
            expect_all_arrived(kills, 0, 1)
            assert ring.counters()["abandoned"] <= 1
            expect_all_slots_usable(kills, ring)
            kills.confirm(victim)


def test_a_writer_killed_in_mid_write_costs_only_that_when_old_slots_are_dropped_too(kills: Kills) -> None:
    wrong = 0
    for _ in kills.rounds(8, must_hit=["a slot half written"]):
        with Ring(CHECKED, num_slots=3, overflow="drop_oldest") as ring:
            survivors = [
                kills.start(lives.survive_writing, 1, ring),
                kills.start(lives.survive_reading, 2, ring, 0.0005),
            ]
            victim = kills.start(lives.write_slots, 0, ring, kills.seed())
            kills.sleep()
            kills.kill(victim, detail=held_in(ring))
            kills.expect_progress(1, 2)
            kills.join(*survivors)
            drain(kills, ring)
            expect_nothing_torn(kills)
            wrong += count_lost(ring)
            assert ring.counters()["blocked"] == 0
            expect_all_slots_usable(kills, ring)
            kills.confirm(victim)
    # A kill between committing a slot and counting it, two instructions apart, leaves the count one short.
    assert wrong <= max(1, kills.kills // 100), f"{wrong} slots not counted after {kills.kills} kills"


def test_the_slot_of_a_reader_killed_in_mid_read_is_offered_again(kills: Kills) -> None:
    for _ in kills.rounds(14, must_hit=["a slot half read"]):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivors = [kills.start(lives.survive_writing, 1, ring), kills.start(lives.survive_reading, 2, ring)]
            victim = kills.start(lives.read_slots, 0, ring)
            kills.sleep()
            kills.kill(victim, detail=held_in(ring))
            kills.expect_progress(1, 2)
            kills.join(*survivors)
            drain(kills, ring)
            expect_nothing_torn(kills)
            expect_all_arrived(kills, 1)
            assert ring.counters()["returned"] <= 1
            expect_all_slots_usable(kills, ring)
            kills.confirm(victim)


def test_the_only_reader_killed_in_mid_read_leaves_its_slot_to_the_next(kills: Kills) -> None:
    for _ in kills.rounds(8, must_hit=["a slot half read"]):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivor = kills.start(lives.survive_writing, 1, ring)
            victim = kills.start(lives.read_slots, 0, ring)
            kills.sleep()
            kills.kill(victim, detail=held_in(ring))
            successor = kills.start(lives.survive_reading, 2, ring)
            kills.expect_progress(1, 2)
            kills.join(survivor, successor)
            drain(kills, ring)
            expect_nothing_torn(kills)
            expect_all_arrived(kills, 1)
            kills.confirm(victim)


def test_a_blocked_writer_that_is_killed_leaves_the_others_their_turn(kills: Kills) -> None:
    for _ in kills.rounds(8, must_hit=["blocked"]):
        with Ring(CHECKED, num_slots=2, overflow="block") as ring:
            for number in (1, 2):
                ring.writer(3).put(Payload().fill(number, 3))
            victim = kills.start(lives.write_slots, 0, ring, kills.seed())
            survivor = kills.start(lives.survive_writing, 1, ring)
            kills.sleep()
            kills.kill(victim, detail=lambda _: ", blocked")
            progress = kills.board.signal("progress", 1)
            assert progress.value == 0
            drain_one(kills.board, ring, 2)
            with kills.promptly():
                progress.wait(1, timeout=PATIENCE)
            kills.join(survivor)
            drain(kills, ring)
            expect_nothing_torn(kills)
            expect_all_arrived(kills, 1)
            expect_all_slots_usable(kills, ring)
            kills.confirm(victim)


def test_blocked_writers_that_are_stopped_and_killed_hold_up_the_others_no_longer_than_promised(kills: Kills) -> None:
    """Four of the six slots may be held by processes that are stopped."""
    for _ in kills.rounds(6, must_hit=["puts"]):
        with Ring(CHECKED, num_slots=6, overflow="block") as ring:
            survivors = [
                kills.start(lives.survive_writing, 1, ring),
                kills.start(lives.survive_writing, 2, ring),
                kills.start(lives.survive_reading, 3, ring, 0.0002),
            ]
            victims = [kills.start(lives.write_slots, place, ring, kills.seed()) for place in (0, 4, 5, 6)]
            for stopped in victims:
                kills.sleep()
                kills.stop(stopped)
            kills.expect_progress(1, 2, 3)
            for stopped in victims[1:]:
                kills.resume(stopped)
            kills.expect_progress(1, 2, 3)
            for victim in victims:
                kills.kill(victim)
            kills.expect_progress(1, 2, 3)
            kills.join(*survivors)
            drain(kills, ring)
            expect_nothing_torn(kills)
            expect_all_arrived(kills, 1, 2)
            expect_all_slots_usable(kills, ring)
            kills.note_wait(0, int(kills.board["slowest_ns"][1]))
            for victim in victims:
                kills.confirm(victim)


def test_a_waiting_reader_that_is_killed_costs_the_others_no_slot(kills: Kills) -> None:
    for _ in kills.rounds(8):
        with Ring(CHECKED, num_slots=2, overflow="block") as ring:
            victim = kills.start(lives.read_slots, 0, ring)
            survivor = kills.start(lives.survive_reading, 1, ring)
            kills.sleep()
            kills.kill(victim, detail=held_in(ring))
            progress, writer = kills.board.signal("progress", 1), ring.writer(3)
            for number in range(1, 6):
                with kills.promptly():
                    writer.put(Payload().fill(number, 3), timeout=PATIENCE)
                    progress.wait(number, timeout=PATIENCE)
                kills.sleep(0.001)
            kills.join(survivor)
            expect_nothing_torn(kills)
            assert ring.counters()["read"] == 5
            kills.confirm(victim)


def test_a_stopped_reader_delays_no_other_process_when_old_slots_are_dropped(kills: Kills) -> None:
    for _ in kills.rounds(8):
        with Ring(CHECKED, num_slots=3, overflow="drop_oldest") as ring:
            survivors = [kills.start(lives.survive_writing, 1, ring), kills.start(lives.survive_reading, 2, ring)]
            victim = kills.start(lives.read_slots, 0, ring)
            kills.sleep()
            kills.stop(victim)
            kills.expect_progress(1, 2)
            kills.resume(victim)
            kills.expect_progress(1, 2)
            kills.kill(victim, detail=held_in(ring))
            kills.join(*survivors)
            drain(kills, ring)
            expect_nothing_torn(kills)
            assert ring.counters()["blocked"] == 0
            kills.note_wait(0, int(kills.board["slowest_ns"][1]))
            kills.confirm(victim)


# -------------------------------------------------------------------------------------------------------------- weights


def left_in(weights: Weights) -> Callable[[Peer], str]:
    """Where a writer was killed, from the state words of the buffers in the control block."""

    def detail(victim: Peer) -> str:
        words = np.frombuffer(weights.segment["control"].tobytes(), np.int64)
        buffers = words[8:16]
        if words[0]:  # the latest may still have the victim's word: it marks it just after
            buffers = np.delete(buffers, words[0] & 0xFF)
        return ", a buffer half filled" if any(is_of(victim, word) for word in buffers if word > 0) else ""

    return detail


def test_a_weights_writer_killed_in_mid_publish_leaves_the_latest_version_whole(kills: Kills) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in kills.rounds(16, must_hit=["a buffer half filled"]):
            before = weights.version
            victim = kills.start(lives.publish_weights, 0, weights)
            readers = [
                kills.start(lives.read_weights, 1, weights, False),
                kills.start(lives.read_weights, 2, weights, True),
            ]
            kills.sleep()
            kills.kill(victim, detail=left_in(weights))
            published = weights.version - before
            assert int(kills.board["committed"][0]) <= published <= int(kills.board["begun"][0])
            successor = kills.start(lives.survive_publishing, 3, weights)
            kills.expect_progress(1, 2, 3)
            kills.join(successor, *readers)
            expect_nothing_torn(kills)
            assert weights.version - before - published == kills.board["committed"][3]
            kills.confirm(victim)


def test_a_weights_writer_killed_in_mid_publish_does_not_hinder_another_writer(kills: Kills) -> None:
    with Weights(checked_layout(BODY), buffers=4) as weights:
        for _ in kills.rounds(8, must_hit=["a buffer half filled"]):
            survivors = [
                kills.start(lives.survive_publishing, 1, weights),
                kills.start(lives.read_weights, 2, weights, False),
            ]
            victim = kills.start(lives.publish_weights, 0, weights)
            kills.sleep()
            kills.kill(victim, detail=left_in(weights))
            kills.expect_progress(1, 2)
            kills.join(*survivors)
            expect_nothing_torn(kills)
            kills.confirm(victim)


def test_a_weights_writer_stopped_in_mid_publish_does_not_disturb_the_readers(kills: Kills) -> None:
    """With two buffers there is none left for another writer: it gets an error, and the latest version stays whole."""
    stopped = 0
    for _ in kills.rounds(12):
        with Weights(checked_layout(BODY), buffers=2) as weights:
            victim = kills.start(lives.publish_weights, 0, weights)
            weights.wait_for(1, PATIENCE)
            kills.sleep()
            kills.stop(victim)
            if left_in(weights)(victim.peer):
                stopped += 1
                with pytest.raises(MemlaneError, match=r"each of the 2 buffers of the .* create it with more buffers"):
                    weights.publish(Payload(BODY).fill(1, 1))
            version, arrays = weights.read()
            assert version == weights.version
            assert whole(arrays)
            kills.kill(victim, detail=left_in(weights))
            assert weights.publish(Payload(BODY).fill(2, 1)) == version + 1
            assert whole(weights.read()[1])
            kills.confirm(victim)
    assert stopped > 0, "no writer was stopped where it should have been"


@pytest.mark.parametrize("waits", [False, True], ids=["reading", "waiting"])
def test_a_weights_reader_that_is_killed_disturbs_no_other_process(kills: Kills, waits: bool) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in kills.rounds(6, must_hit=["waits"] if waits else []):
            survivors = [
                kills.start(lives.survive_publishing, 1, weights),
                kills.start(lives.read_weights, 2, weights, waits),
            ]
            victim = kills.start(lives.read_weights, 0, weights, waits)
            kills.sleep()
            kills.kill(victim)
            kills.expect_progress(1, 2)
            kills.join(*survivors)
            expect_nothing_torn(kills)
            kills.confirm(victim)


@pytest.mark.parametrize("waits", [False, True], ids=["reading", "waiting"])
def test_a_stopped_weights_reader_never_delays_a_publication(kills: Kills, waits: bool) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in kills.rounds(6):
            survivors = [
                kills.start(lives.survive_publishing, 1, weights),
                kills.start(lives.read_weights, 2, weights, waits),
            ]
            victim = kills.start(lives.read_weights, 0, weights, waits)
            kills.sleep()
            kills.stop(victim)
            kills.expect_progress(1, 2)
            kills.resume(victim)
            kills.expect_progress(0, 1, 2)
            kills.kill(victim)
            kills.join(*survivors)
            expect_nothing_torn(kills)
            kills.note_wait(0, int(kills.board["slowest_ns"][1]))
            kills.confirm(victim)


# ---------------------------------------------------------------------------------------------------- statistics, names


def test_a_collector_of_statistics_that_is_killed_leaves_what_it_counted_to_the_next(kills: Kills) -> None:
    with Stats(2, places=1) as stats:
        for _ in kills.rounds(8):
            victim = kills.start(lives.count_up, 0, stats)
            kills.sleep()
            kills.kill(victim)
            moments = stats.merged()
            count = int(moments.count)
            assert kills.board["committed"][0] <= count <= kills.board["begun"][0] or kills.board["begun"][0] == 0
            if count:  # a collector that is killed before its first number leaves nothing
                # Each collector goes on with the next number, so together they counted 1, 2, ... count.
                assert np.allclose(moments.mean, (count + 1) / 2)
                assert np.allclose(moments.variance, (count**2 - 1) / 12)
            kills.confirm(victim)


def test_the_names_of_a_killed_owner_are_free_and_its_memory_is_gone(kills: Kills, kill_folder: Path) -> None:
    names = ["rollouts-of-a-dead-owner", "weights-of-a-dead-owner"]
    for number in kills.rounds(12, must_hit=["lanes"]):
        victim = kills.start(lives.own_lanes, names)
        kills.sleep()
        kills.kill(victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        else:
            with (
                RolloutRingBuffer(4, 8, 3, 2, shm_name_prefix=names[0]) as buffer,
                SharedWeightSync({"w": (1000,)}, shm_name=names[1]) as sync,
            ):
                assert (buffer.available(), sync.version) == (0, 0)
        assert list(kill_folder.iterdir()) == []
        kills.confirm(victim)
