"""SIGKILL and SIGSTOP at random instants for every role of every lane: the others go on, and nothing is torn or lost.

A victim (lane_victims.py) plays its role as fast as it can until it is killed; survivors play theirs beside it. After
each kill the survivors must get on within a second, what they saw must be whole, and what was handed over must have
arrived, or be counted as dropped. The last test counts the kills and the phases that they hit.

`make soak` runs the same tests with forty times the kills. A run can be repeated with MEMLANE_KILL_SEED, as far as
timing can.
"""

from __future__ import annotations

import inspect
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import MemlaneError, Peer, Segment, reclaim
from memlane.ipc import Ring, RolloutRingBuffer, SharedWeightSync, Stats, Weights
from tests.support import lane_victims as lane_victims
from tests.support.lane_victims import BODY, PLACES, Template
from tests.support.lanes import CHECKED, PROMISE, Payload, checked_layout, state_of, timed_out, whole

PATIENCE = 20.0  # seconds after which a test gives up on something that is no promise of ours, such as a fork
LONGEST_DELAY = 0.012  # seconds; some hundred turns of the fast loops
SOAK = 40  # times the kills of `make test`

TALLY: dict[int, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
"""Kills that the kernel confirmed: by dose, by test, by the phase that they hit."""


class Hunt:
    """One test's kills: starts victims and survivors, kills, and keeps the books."""

    def __init__(self, template: Template, test: str, dose: int, seed: int) -> None:
        self.template = template
        self.chance = random.Random(f"{seed} {test}")
        self.board = Segment.create(lane_victims.BOARD)
        self.dose = dose
        self._books = TALLY[dose][test]
        self.kills = 0

    def rounds(self, count: int) -> Iterator[int]:
        for number in range(count * self.dose):
            for view in self.board.views().values():
                view[...] = np.zeros((), view.dtype)
            yield number

    def seed(self) -> int:
        return self.chance.randrange(2**32)

    def delay(self, longest: float = LONGEST_DELAY) -> None:
        time.sleep(self.chance.uniform(0, longest))

    def start(self, life: str, *arguments: Any) -> Peer:
        """Fork a process and wait until it has begun."""
        ready = self.board.signal("ready")
        awaited = ready.value + 1
        process = Peer.of(self.template.fork(life, self.board, *arguments), life)
        ready.wait(awaited, timeout=PATIENCE, peers=[process])
        return process

    def kill(self, victim: Peer, autopsy: Callable[[Peer], str] = lambda _: "") -> None:
        """SIGKILL. Half of the dead are collected at once, the others are zombies while the survivors go on."""
        os.kill(victim.pid, signal.SIGKILL)
        assert victim.wait(PATIENCE)
        self._books[self.board["phase"][0].decode() + autopsy(victim)] += 1
        self.kills += 1
        if self.chance.random() < 0.5:
            self.bury(victim)

    def bury(self, victim: Peer) -> None:
        if victim.life.value == "zombie":
            assert self.template.reap(victim.pid) == -signal.SIGKILL
        victim.close()

    def expect_progress(self, *places: int) -> None:
        """Each of the survivors does something more within a second."""
        progress = [self.board.signal("progress", place) for place in places]
        for signal_, value in [(signal_, signal_.value) for signal_ in progress]:
            signal_.wait(value + 2, timeout=PROMISE)  # the second one was begun after the kill

    def send_home(self, *survivors: Peer) -> None:
        self.board.signal("end").store(1)
        for survivor in survivors:
            assert self.template.reap(survivor.pid) == 0, f"{survivor.name} was to return"
            survivor.close()

    def stop(self, victim: Peer) -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while state_of(victim.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def expect_nothing_torn(self) -> None:
        assert self.board["torn"].sum() == 0
        assert self.board["disorder"].sum() == 0

    def expect_nobody_left(self) -> None:
        ends, gone_ns = self.template.ask("reap_all", 1.0)
        assert gone_ns is not None, "processes left running"
        assert ends == {}, f"processes that nobody waited for: {ends}"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory of our own for names."""
    path = Path(tempfile.mkdtemp(prefix="memlane-kills-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLANE_SHM_DIR", str(path))
        yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def template(folder: Path) -> Iterator[Template]:  # noqa: ARG001 - the template inherits the directory
    process = Template(PATIENCE)
    Peer(1, 0).fileno()  # opens the one descriptor that stands for all the dead, so that counts of descriptors hold
    yield process
    process.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="short"),
        pytest.param(SOAK, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def dose(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def hunt(template: Template, folder: Path, dose: int, request: pytest.FixtureRequest) -> Iterator[Hunt]:
    seed = int(os.environ.get("MEMLANE_KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"MEMLANE_KILL_SEED={seed}")
    descriptors = len(os.listdir("/proc/self/fd"))
    failures = request.session.testsfailed
    hunt = Hunt(template, request.node.originalname, dose, seed)
    try:
        yield hunt
        hunt.board.close()
        # A test that failed has left things behind and said so.
        if request.session.testsfailed == failures:
            hunt.expect_nobody_left()
            assert not list(folder.iterdir()), "names left behind"
            assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors left behind"
    finally:
        hunt.board.close()
        template.ask("kill_all")
        for entry in folder.iterdir():
            entry.unlink()


# ----------------------------------------------------------------------------------------------------------------- ring


def held_in(ring: Ring) -> Callable[[Peer], str]:
    """What a victim held when it died, told by the state words of the slots: process << 2 | state."""

    def autopsy(victim: Peer) -> str:
        words = [int(np.frombuffer(slot.tobytes(), np.int64, 1)[0]) for slot in ring.segment["slots"]]
        states = [word & 3 for word in words if word >> 2 == victim.word]
        return "".join({1: ", a slot half written", 3: ", a slot half read"}[state] for state in states)

    return autopsy


def drain(hunt: Hunt, ring: Ring, place: int = PLACES - 1) -> None:
    """Read what is left, as one of the readers."""
    while not timed_out(lambda: drain_one(hunt.board, ring, place)):
        pass


def drain_one(board: Segment, ring: Ring, place: int) -> None:
    with ring.reader().take(timeout=0.001) as slot:
        board["torn"][place] += not whole(slot)
        lane_victims.note(board, place, slot)


def expect_all_arrived(hunt: Hunt, *writers: int) -> None:
    """What a writer knows to be handed over was seen by somebody."""
    for writer in writers:
        seen = hunt.board["seen"][:, writer].any(axis=0)
        committed, begun = int(hunt.board["committed"][writer]), int(hunt.board["begun"][writer])
        missing = np.flatnonzero(~seen[1 : committed + 1]) + 1
        assert missing.size == 0, f"lost of writer {writer}: {missing}"
        assert not seen[begun + 1 :].any(), "somebody saw what nobody wrote"


def expect_all_slots_usable(ring: Ring) -> None:
    """Every slot can be claimed: none is kept by the dead."""
    physical = ring.segment.layout["slots"].shape[0]
    slots = [ring.writer().claim(timeout=PROMISE) for _ in range(physical)]
    assert timed_out(ring.writer().claim, timeout=0)
    for slot in slots:
        slot.release()


def lost(ring: Ring) -> int:
    """How far the counters are from telling where every slot went, when nobody holds one."""
    counters = ring.counters()
    return abs(counters["written"] - counters["read"] - counters["dropped"] - ring.unread)


def test_a_writer_killed_in_mid_write_costs_only_its_own_unfinished_slot(hunt: Hunt) -> None:
    for _ in hunt.rounds(14):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivors = [hunt.start("survive_writing", 1, ring), hunt.start("survive_reading", 2, ring)]
            victim = hunt.start("write_slots", 0, ring, hunt.seed())
            hunt.delay()
            hunt.kill(victim, held_in(ring))
            hunt.expect_progress(1, 2)
            hunt.send_home(*survivors)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            expect_all_arrived(hunt, 0, 1)
            assert ring.counters()["abandoned"] <= 1
            expect_all_slots_usable(ring)
            hunt.bury(victim)


def test_a_writer_killed_in_mid_write_costs_only_that_when_old_slots_are_dropped_too(hunt: Hunt) -> None:
    wrong = 0
    for _ in hunt.rounds(8):
        with Ring(CHECKED, num_slots=3, overflow="drop_oldest") as ring:
            survivors = [hunt.start("survive_writing", 1, ring), hunt.start("survive_reading", 2, ring, 0.0005)]
            victim = hunt.start("write_slots", 0, ring, hunt.seed())
            hunt.delay()
            hunt.kill(victim, held_in(ring))
            hunt.expect_progress(1, 2)
            hunt.send_home(*survivors)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            wrong += lost(ring)
            assert ring.counters()["blocked"] == 0
            expect_all_slots_usable(ring)
            hunt.bury(victim)
    # A kill between handing a slot over and counting it, two instructions apart, leaves the count one short.
    assert wrong <= max(1, hunt.kills // 100), f"{wrong} slots that no counter knows after {hunt.kills} kills"


def test_the_slot_of_a_reader_killed_in_mid_read_is_offered_again(hunt: Hunt) -> None:
    for _ in hunt.rounds(14):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivors = [hunt.start("survive_writing", 1, ring), hunt.start("survive_reading", 2, ring)]
            victim = hunt.start("read_slots", 0, ring)
            hunt.delay()
            hunt.kill(victim, held_in(ring))
            hunt.expect_progress(1, 2)
            hunt.send_home(*survivors)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            expect_all_arrived(hunt, 1)
            assert ring.counters()["returned"] <= 1
            expect_all_slots_usable(ring)
            hunt.bury(victim)


def test_the_only_reader_killed_in_mid_read_leaves_its_slot_to_the_next(hunt: Hunt) -> None:
    for _ in hunt.rounds(8):
        with Ring(CHECKED, num_slots=3, overflow="block") as ring:
            survivor = hunt.start("survive_writing", 1, ring)
            victim = hunt.start("read_slots", 0, ring)
            hunt.delay()
            hunt.kill(victim, held_in(ring))
            successor = hunt.start("survive_reading", 2, ring)
            hunt.expect_progress(1, 2)
            hunt.send_home(survivor, successor)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            expect_all_arrived(hunt, 1)
            hunt.bury(victim)


def test_a_blocked_writer_that_is_killed_leaves_the_others_their_turn(hunt: Hunt) -> None:
    for _ in hunt.rounds(8):
        with Ring(CHECKED, num_slots=2, overflow="block") as ring:
            for number in (1, 2):
                ring.writer(3).put(Payload().fill(number, 3))
            victim = hunt.start("write_slots", 0, ring, hunt.seed())
            survivor = hunt.start("survive_writing", 1, ring)
            hunt.delay()
            hunt.kill(victim, lambda _: ", blocked")
            progress = hunt.board.signal("progress", 1)
            assert progress.value == 0
            drain_one(hunt.board, ring, 2)
            progress.wait(1, timeout=PROMISE)
            hunt.send_home(survivor)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            expect_all_arrived(hunt, 1)
            expect_all_slots_usable(ring)
            hunt.bury(victim)


def test_a_waiting_reader_that_is_killed_costs_the_others_no_slot(hunt: Hunt) -> None:
    for _ in hunt.rounds(8):
        with Ring(CHECKED, num_slots=2, overflow="block") as ring:
            victim = hunt.start("read_slots", 0, ring)
            survivor = hunt.start("survive_reading", 1, ring)
            hunt.delay()
            hunt.kill(victim, held_in(ring))
            progress, writer = hunt.board.signal("progress", 1), ring.writer(3)
            for number in range(1, 6):
                writer.put(Payload().fill(number, 3), timeout=PROMISE)
                progress.wait(number, timeout=PROMISE)
                hunt.delay(0.001)
            hunt.send_home(survivor)
            hunt.expect_nothing_torn()
            assert ring.counters()["read"] == 5
            hunt.bury(victim)


def test_a_stopped_reader_delays_nobody_when_old_slots_are_dropped(hunt: Hunt) -> None:
    for _ in hunt.rounds(8):
        with Ring(CHECKED, num_slots=3, overflow="drop_oldest") as ring:
            survivors = [hunt.start("survive_writing", 1, ring), hunt.start("survive_reading", 2, ring)]
            victim = hunt.start("read_slots", 0, ring)
            hunt.delay()
            hunt.stop(victim)
            hunt.expect_progress(1, 2)
            os.kill(victim.pid, signal.SIGCONT)
            hunt.expect_progress(1, 2)
            hunt.kill(victim, held_in(ring))
            hunt.send_home(*survivors)
            drain(hunt, ring)
            hunt.expect_nothing_torn()
            assert ring.counters()["blocked"] == 0
            assert hunt.board["slowest_ns"][1] < PROMISE * 1e9
            hunt.bury(victim)


# -------------------------------------------------------------------------------------------------------------- weights


def left_in(weights: Weights) -> Callable[[Peer], str]:
    """Where a writer was killed, told by what it left in the control block: the state words of the buffers."""

    def autopsy(victim: Peer) -> str:
        words = np.frombuffer(weights.segment["control"].tobytes(), np.int64)
        buffers = words[8:16]
        if words[0]:  # the latest may still have the victim's word: it marks it just after
            buffers = np.delete(buffers, words[0] & 0xFF)
        return ", a buffer half filled" if victim.word in buffers else ""

    return autopsy


def test_a_weights_writer_killed_in_mid_publish_leaves_the_latest_version_whole(hunt: Hunt) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in hunt.rounds(16):
            before = weights.version
            victim = hunt.start("publish_weights", 0, weights)
            readers = [hunt.start("read_weights", 1, weights, False), hunt.start("read_weights", 2, weights, True)]
            hunt.delay()
            hunt.kill(victim, left_in(weights))
            published = weights.version - before
            assert int(hunt.board["committed"][0]) <= published <= int(hunt.board["begun"][0])
            successor = hunt.start("survive_publishing", 3, weights)
            hunt.expect_progress(1, 2, 3)
            hunt.send_home(successor, *readers)
            hunt.expect_nothing_torn()
            assert weights.version - before - published == hunt.board["committed"][3]
            hunt.bury(victim)


def test_a_weights_writer_killed_in_mid_publish_does_not_hinder_another_writer(hunt: Hunt) -> None:
    with Weights(checked_layout(BODY), buffers=4) as weights:
        for _ in hunt.rounds(8):
            survivors = [hunt.start("survive_publishing", 1, weights), hunt.start("read_weights", 2, weights, False)]
            victim = hunt.start("publish_weights", 0, weights)
            hunt.delay()
            hunt.kill(victim, left_in(weights))
            hunt.expect_progress(1, 2)
            hunt.send_home(*survivors)
            hunt.expect_nothing_torn()
            hunt.bury(victim)


def test_a_weights_writer_stopped_in_mid_publish_costs_the_readers_nothing(hunt: Hunt) -> None:
    """With two buffers there is none left for another writer: it is told so, and the latest version stays whole."""
    stopped = 0
    for _ in hunt.rounds(12):
        with Weights(checked_layout(BODY), buffers=2) as weights:
            victim = hunt.start("publish_weights", 0, weights)
            weights.wait_for(1, PATIENCE)
            hunt.delay()
            hunt.stop(victim)
            if left_in(weights)(victim):
                stopped += 1
                with pytest.raises(MemlaneError, match=r"each of the 2 buffers of the .* create it with more buffers"):
                    weights.publish(Payload(BODY).fill(1, 1))
            version, arrays = weights.read()
            assert version == weights.version
            assert whole(arrays)
            hunt.kill(victim, left_in(weights))
            assert weights.publish(Payload(BODY).fill(2, 1)) == version + 1
            assert whole(weights.read()[1])
            hunt.bury(victim)
    assert stopped > 0, "no writer was stopped where it should have been"


@pytest.mark.parametrize("waits", [False, True], ids=["reading", "waiting"])
def test_a_weights_reader_that_is_killed_is_not_missed(hunt: Hunt, waits: bool) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in hunt.rounds(6):
            survivors = [hunt.start("survive_publishing", 1, weights), hunt.start("read_weights", 2, weights, waits)]
            victim = hunt.start("read_weights", 0, weights, waits)
            hunt.delay()
            hunt.kill(victim)
            hunt.expect_progress(1, 2)
            hunt.send_home(*survivors)
            hunt.expect_nothing_torn()
            hunt.bury(victim)


@pytest.mark.parametrize("waits", [False, True], ids=["reading", "waiting"])
def test_a_stopped_weights_reader_never_delays_a_publication(hunt: Hunt, waits: bool) -> None:
    with Weights(checked_layout(BODY)) as weights:
        for _ in hunt.rounds(6):
            survivors = [hunt.start("survive_publishing", 1, weights), hunt.start("read_weights", 2, weights, waits)]
            victim = hunt.start("read_weights", 0, weights, waits)
            hunt.delay()
            hunt.stop(victim)
            hunt.expect_progress(1, 2)
            os.kill(victim.pid, signal.SIGCONT)
            hunt.expect_progress(0, 1, 2)
            hunt.kill(victim)
            hunt.send_home(*survivors)
            hunt.expect_nothing_torn()
            assert hunt.board["slowest_ns"][1] < PROMISE * 1e9
            hunt.bury(victim)


# ---------------------------------------------------------------------------------------------------- statistics, names


def test_a_collector_of_statistics_that_is_killed_leaves_what_it_counted_to_the_next(hunt: Hunt) -> None:
    with Stats(2, places=1) as stats:
        for _ in hunt.rounds(8):
            victim = hunt.start("count_up", 0, stats)
            hunt.delay()
            hunt.kill(victim)
            moments = stats.merged()
            count = int(moments.count)
            assert hunt.board["committed"][0] <= count <= hunt.board["begun"][0] or hunt.board["begun"][0] == 0
            if count:  # one that is killed before its first number leaves nothing
                # Whoever comes next goes on with the next number, so all of them together are 1, 2, ... count.
                assert np.allclose(moments.mean, (count + 1) / 2)
                assert np.allclose(moments.variance, (count**2 - 1) / 12)
            hunt.bury(victim)


def test_the_names_of_a_killed_owner_are_free_and_its_memory_is_gone(hunt: Hunt, folder: Path) -> None:
    names = ["rollouts-of-the-dead", "weights-of-the-dead"]
    for number in hunt.rounds(12):
        victim = hunt.start("own_lanes", names)
        hunt.delay()
        hunt.kill(victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim}
        else:
            with (
                RolloutRingBuffer(4, 8, 3, 2, shm_name_prefix=names[0]) as buffer,
                SharedWeightSync({"w": (1000,)}, shm_name=names[1]) as sync,
            ):
                assert (buffer.available(), sync.version) == (0, 0)
        assert list(folder.iterdir()) == []
        hunt.bury(victim)


# ------------------------------------------------------------------------------------------------------------ the count


def test_the_kills_were_many_and_hit_many_phases(dose: int) -> None:
    books = TALLY[dose]
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    hunts = {name for name, test in tests.items() if "hunt" in inspect.signature(test).parameters}
    if books.keys() != hunts:
        pytest.skip("counts only when all tests of this file were run")
    for test, phases in books.items():
        print(f"{phases.total()} kills, {test}")
        for phase, count in phases.most_common():
            print(f"    {count:5} {phase}")
    assert sum(phases.total() for phases in books.values()) >= (100 if dose == 1 else 4000)
    hit = sum(books.values(), Counter())
    for deed in ("a slot half written", "a slot half read", "a buffer half filled", "blocked", "waits", "lanes"):
        assert any(deed in phase for phase in hit), f"no kill hit {deed!r}"
