"""SIGKILL at random instants during create, attach, write, wait and close: the survivors go on, and nothing is left.

Each test kills many processes (core_lives.py) in one phase of their life, and checks after each kill what is promised:
survivors got data or a named error within a second, nothing torn was accepted, no name, no memory and no process stays
behind. Every test accounts for its own kills: each must be confirmed by the kernel, and together they must hit several
phases (kills.py).

`make soak` runs the same tests with twelve times the kills. MEMLANE_KILL_SEED repeats a run, as far as timing can be
repeated.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import statistics
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memlane import _native
from memlane.core import PeerDied, Segment, SegmentMissing, reclaim
from memlane.core.lowlevel import PeerState
from tests.support import core_lives as lives
from tests.support.core_lives import END, PAYLOAD, checksum
from tests.support.kills import PATIENCE, VICTIM, Kills, Process, Template, accounted, scales

LEAST_KILLS = 4
LEAST_AT_STAKE = 24 * 2**20  # bytes that the kills of one test must have been able to leak for its check to mean much


class CoreKills(Kills):
    """The kills of one test, with an eye on names and memory."""

    least_phases = 3

    def __init__(self, template: Template, folder: Path, test: str, scale: int) -> None:
        super().__init__(template, lives.BOARD, test, scale)
        self.folder = folder
        self._shmem_before = 0
        self._at_stake: list[int] = []
        self._leaked: list[int] = []

    def wipe_board(self, keep: Collection[str] = ("change",)) -> None:
        """Survivors of several rounds may be waiting for the signal `change`."""
        super().wipe_board(keep)
        self._shmem_before = shmem()

    def leave_dead_segments(self, names: list[str], unfinished: int) -> None:
        """Leave named segments, and unfinished ones, of a dead owner. Its death is not random and not counted."""
        owner = self.start(lives.hold_segments, names, unfinished)
        os.kill(owner.pid, signal.SIGKILL)
        assert self.reap(owner) == -signal.SIGKILL

    def expect_reports(self, victim: Process, count: int, *, outcome: str) -> None:
        """The waits of the survivors 1 to ``count`` ended with this outcome, and in time."""
        self.board.signal("ended").wait(count, timeout=PATIENCE)
        assert self.board["outcome"][1 : count + 1].tolist() == [outcome.encode()] * count
        self.note_wait(victim.killed_ns, int(self.board["ended_ns"][1 : count + 1].max()))

    def expect_kills_confirmed(self) -> None:
        super().expect_kills_confirmed()
        # A victim that kills itself at a system call may come through without one: then its test has tested nothing.
        assert self.hits.total() >= LEAST_KILLS, "a test of kills must kill"

    def expect_no_names(self) -> None:
        left = [entry.name for entry in self.folder.iterdir()]
        assert not left, f"names left behind: {left}"

    def check_memory(self) -> None:
        """Note how much of what the victim held when it was killed has not come back.

        Shmem is the whole machine's, and other programs make segments too. So each kill is measured alone, and counts
        at most for what it can have leaked: another program's step shows once, a leak again and again.
        """
        at_stake = int(self.board["at_stake"])
        deadline = time.monotonic() + 1
        while (grown := shmem() - self._shmem_before) > at_stake / 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        self._at_stake.append(at_stake)
        self._leaked.append(max(0, min(grown, at_stake)))

    def expect_memory_back(self) -> None:
        print(f"{sum(self._at_stake)} bytes at stake, {sum(self._leaked)} of them not seen to come back")
        assert sum(self._at_stake) > LEAST_AT_STAKE, "the kills could not have leaked enough to be seen"
        assert sum(self._leaked) < sum(self._at_stake) / 4, f"bytes left behind, by kill: {self._leaked}"


def shmem() -> int:
    """Bytes of shared memory in use on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no line Shmem")


@pytest.fixture(scope="module", params=scales(soak=12))
def scale(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def kills(template: Template, kill_folder: Path, scale: int, request: pytest.FixtureRequest) -> Iterator[CoreKills]:
    make = partial(CoreKills, template, kill_folder, request.node.originalname, scale)
    with accounted(make, kill_folder, request) as kills:
        yield kills


# ------------------------------------------------------------------------------------------------- making and finding


KINDS = pytest.mark.parametrize(
    ("kind", "tmpfile"),
    [("anonymous", True), ("named", True), ("named", False), ("file", True), ("file", False)],
    ids=["anonymous", "named", "named without O_TMPFILE", "file", "file without O_TMPFILE"],
)


@KINDS
def test_a_process_killed_while_it_makes_segments_leaves_nothing(kills: CoreKills, kind: str, tmpfile: bool) -> None:
    for number in kills.rounds(16):
        name = f"made-{number}"
        arguments = (kind, tmpfile, name, kills.folder, kills.seed())
        victim = kills.start(lives.create_and_close, *arguments, early=0.1)
        kills.sleep()
        kills.kill(victim)
        if kind == "file":
            expect_file_whole_or_missing(kills.folder / name, victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        else:
            Segment.create({"x": (np.uint8, 1)}, name=name).close()
        kills.expect_no_names()
        kills.check_memory()
        kills.confirm(victim)
    kills.expect_memory_back()


@KINDS
def test_a_process_killed_at_any_system_call_of_making_a_segment_leaves_nothing(
    kills: CoreKills, kind: str, tmpfile: bool
) -> None:
    for call in itertools.count():
        kills.wipe_board()
        victim = kills.start(lives.create_until, call, kind, tmpfile, "made", kills.folder, early=1)
        if not kills.killed_itself(victim):
            break
        if kind == "file":
            expect_file_whole_or_missing(kills.folder / "made", victim)
        assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        kills.expect_no_names()


def expect_file_whole_or_missing(path: Path, victim: Process) -> None:
    """A file is meant to outlive its owner; it must not be incomplete. Removes it."""
    if path.exists():
        with Segment.attach(file=path) as segment:
            assert segment.owner == victim.peer
            segment.unlink()


def test_a_process_killed_while_it_attaches_leaves_the_owners_segment_unharmed(kills: CoreKills) -> None:
    with Segment.create({"x": (np.int64, PAYLOAD)}, name="owned") as owned:
        assert owned.path is not None
        for number in kills.rounds(24):
            owned["x"][:] = number
            inode = owned.path.stat().st_ino
            victim = kills.start(lives.attach_and_close, "owned", number, early=0.1)
            kills.sleep()
            kills.kill(victim)
            assert reclaim() == []
            assert owned.path.stat().st_ino == inode
            with Segment.attach("owned", layout=owned.layout) as again:
                assert (again["x"] == number).all()
                assert not again.owner_closed
            assert kills.board["torn"][VICTIM] == 0
            kills.confirm(victim)


def test_a_segment_from_a_killed_sender_arrives_whole_or_is_named_missing(kills: CoreKills) -> None:
    fetched = 0
    for _ in kills.rounds(20):
        victim = kills.start(lives.hand_over, early=0.1)
        kill_at = time.monotonic() + kills.delay()
        while time.monotonic() < kill_at:
            fetched += fetch(kills.board)
        kills.kill(victim)
        assert not fetch(kills.board), "fetched from a dead process"
        kills.confirm(victim)
    if not fetched:  # on a busy machine all of them may die before they have anything to hand over
        victim = kills.start(lives.hand_over, early=0.1)
        patience = time.monotonic() + 20
        while not fetched and time.monotonic() < patience:
            fetched += fetch(kills.board)
        kills.kill(victim)
        kills.confirm(victim)
    assert fetched > 0


def fetch(board: Segment) -> bool:
    """Open the segment whose pickle is on the board, if it still exists."""
    words = board.words("parcel_number")
    number = words.load(0)
    parcel = board["parcel"].tobytes()
    if number <= 0 or not words.unchanged(0, number):
        return False
    try:
        segment = pickle.loads(parcel)
    except SegmentMissing:
        return False
    with segment:
        assert (segment["x"] == number).all()
    return True


@pytest.mark.parametrize("unlink", [False, True], ids=["close", "unlink"])
def test_a_process_killed_while_it_closes_takes_nothing_from_those_attached(kills: CoreKills, unlink: bool) -> None:
    names, nbytes = [f"closing-{number}" for number in range(1, 17)], 2**20
    for number in kills.rounds(16):
        victim = kills.start(lives.make_and_close, names, nbytes, unlink)
        attached = {value: Segment.attach(name) for value, name in enumerate(names, 1) if value % 4 == 0}
        kills.board.signal("go").store(1)
        kills.sleep(0.001)
        kills.kill(victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        else:
            Segment.create({"x": (np.uint8, 1)}, name=kills.random.choice(names)).close()
        kills.expect_no_names()
        for value, segment in attached.items():
            assert (segment["x"] == value).all()
            assert segment.owner.state is not PeerState.ALIVE
        del attached, segment  # the last holders: the memory is freed
        kills.check_memory()
        kills.confirm(victim)
    kills.expect_memory_back()


@pytest.mark.parametrize("unfinished", [0, 12], ids=["finished segments", "unfinished segments too"])
def test_a_process_killed_while_it_reclaims_leaves_the_rest_to_the_next(kills: CoreKills, unfinished: int) -> None:
    names = [f"dead-{number}" for number in range(12)]
    for _ in kills.rounds(12):
        kills.leave_dead_segments(names, unfinished)
        victim = kills.start(lives.reclaim_all)
        kills.sleep(0.003)
        kills.kill(victim)
        reclaim()
        kills.expect_no_names()
        kills.confirm(victim)


@pytest.mark.parametrize("unfinished", [0, 1], ids=["a finished segment", "an unfinished one too"])
def test_a_process_killed_at_any_system_call_of_reclaim_leaves_the_rest_to_the_next(
    kills: CoreKills, unfinished: int
) -> None:
    for call in itertools.count():
        kills.wipe_board()
        kills.leave_dead_segments(["dead"], unfinished)
        killed = kills.killed_itself(kills.start(lives.reclaim_until, call, signal.SIGKILL, early=1))
        reclaim()
        kills.expect_no_names()
        if not killed:
            break


def test_a_process_stopped_at_any_system_call_of_reclaim_keeps_no_other_from_making_segments(kills: CoreKills) -> None:
    for call in itertools.count():
        kills.wipe_board()
        kills.leave_dead_segments(["dead"], unfinished=1)
        victim = kills.start(lives.reclaim_until, call, signal.SIGSTOP, early=1)
        stopped = kills.wait_for_state(victim, "TZ") == "T"
        survivor = kills.start(lives.create_once, 1, "mine")
        begun_ns = time.monotonic_ns()
        kills.board.signal("ended").wait(1, timeout=PATIENCE)
        kills.note_wait(begun_ns)
        kills.join(survivor)
        if stopped:
            kills.kill(victim)
            kills.confirm(victim)
        else:
            kills.join(victim)
        reclaim()
        kills.expect_no_names()
        if not stopped:
            break


def test_a_name_whose_holder_is_killed_is_free_for_the_others(kills: CoreKills) -> None:
    change = kills.board.signal("change")
    for _ in kills.rounds(16):
        change.store(0)
        survivors = [kills.start(lives.contend, place, "contested") for place in (1, 2)]
        victim = kills.start(lives.contend, VICTIM, "contested", early=0.1)
        kills.sleep()
        kills.kill(victim)
        before = kills.board["accepted"][1:3].copy()
        deadline = time.monotonic() + PATIENCE
        while (kills.board["accepted"][1:3] == before).any():
            assert time.monotonic() < deadline, f"no survivor gets the name that was held in {victim.phase!r}"
            time.sleep(0.001)
        kills.note_wait(victim.killed_ns)
        change.store(END)
        kills.join(*survivors)
        kills.expect_no_names()
        kills.confirm(victim)


# ------------------------------------------------------------------------------------------------ writing and waiting


def test_what_a_killed_writer_published_is_whole_and_its_readers_learn_of_its_death(kills: CoreKills) -> None:
    accepted = 0
    with Segment.create(lives.LANE) as lane:
        for _ in kills.rounds(32):
            victim = kills.start(lives.publish, lane, kills.seed(), early=0.1)
            readers = [kills.start(lives.follow, place, lane, victim.peer) for place in (1, 2)]
            kills.sleep()
            kills.kill(victim, detail=lambda _: f", {left_by_writer(lane)}")
            kills.expect_reports(victim, 2, outcome="PeerDied")
            kills.join(*readers)
            assert kills.board["torn"].sum() == 0
            version = lane.signal("version").value
            if kills.board["accepted"][1:3].all():
                assert (kills.board["seen"][1:3] >= version).all(), "the writer's last version was missed"
            if version:
                assert lane.words("claims").load(version % 2) == version
            for buffer, claim in enumerate(lane["claims"].tolist()):
                assert claim <= 0 or holds(lane, buffer, claim), f"torn: {lane['buffers'][buffer]} published as {claim}"
            accepted += int(kills.board["accepted"].sum())
            kills.confirm(victim)
    assert accepted > 0


def holds(lane: Segment, buffer: int, number: int) -> bool:
    return bool((lane["buffers"][buffer] == number).all() and lane["sums"][buffer] == checksum(number))


def left_by_writer(lane: Segment) -> str:
    """Where the writer was killed, as its memory shows."""
    claims, version = lane["claims"], lane.signal("version").value
    if (claims < 0).any():
        buffer = int(np.argmin(claims))
        written = np.count_nonzero(lane["buffers"][buffer] == -claims[buffer]) / PAYLOAD
        return f"{np.ceil(written * 4) * 25:.0f} % written"
    return "published" if claims.max() > version else "signalled"


def test_a_waiter_that_is_killed_costs_the_other_waiters_no_change(kills: CoreKills) -> None:
    survivors = [kills.start(lives.echo, place, spin_ns) for place, spin_ns in [(1, 0), (2, 50_000)]]
    exchange = Exchange(kills, places=(1, 2))
    for _ in kills.rounds(32):
        victim = kills.start(lives.wait_for_changes, kills.seed(), early=0.1)
        kill_at = time.monotonic() + kills.delay()
        while time.monotonic() < kill_at:
            exchange.change()
            kills.sleep(0.002)
        if kills.random.random() < 0.3:
            exchange.change(answered=False)  # the kill races with its waking up
        kills.kill(victim, look=True)
        for _ in range(4):
            exchange.change()
            kills.sleep(0.001)
        kills.confirm(victim)
    exchange.end()
    kills.join(*survivors)
    exchange.expect_prompt()


def test_a_waiter_that_is_stopped_delays_no_other(kills: CoreKills) -> None:
    survivors = [kills.start(lives.echo, place, spin_ns) for place, spin_ns in [(1, 0), (2, 50_000)]]
    exchange = Exchange(kills, places=(1, 2))
    for number in kills.rounds(16):
        victim = kills.start(lives.wait_for_changes, kills.seed())
        stop_at = time.monotonic() + kills.delay(0.005)
        while time.monotonic() < stop_at:
            exchange.change()
            kills.sleep(0.001)
        kills.stop(victim)
        for _ in range(4):
            exchange.change()
        if number % 2:
            kills.resume(victim)
            continued_ns = time.monotonic_ns()
            kills.board.signal("echo", VICTIM).wait(exchange.value, timeout=PATIENCE)
            kills.note_wait(continued_ns)
            kills.sleep(0.002)
        kills.kill(victim, look=True)
        exchange.change()
        kills.confirm(victim)
    exchange.end()
    kills.join(*survivors)
    exchange.expect_prompt()


class Exchange:
    """Changes a signal and waits until every survivor has answered the change."""

    def __init__(self, kills: CoreKills, places: tuple[int, ...]) -> None:
        self._kills = kills
        self._change = kills.board.signal("change")
        self._answers = [kills.board.signal("echo", place) for place in places]
        self._seconds: list[float] = []
        self.value = self._change.value

    def change(self, *, answered: bool = True) -> None:
        self.value += 1
        begin_ns = time.monotonic_ns()
        self._change.store(self.value)
        self._kills.note_wait(begin_ns)  # the signaller is not blocked
        if not answered:
            return
        for answer in self._answers:
            answer.wait(self.value, timeout=PATIENCE)
        self._kills.note_wait(begin_ns)
        self._seconds.append((time.monotonic_ns() - begin_ns) / 1e9)

    def end(self) -> None:
        self._change.store(END)

    def expect_prompt(self) -> None:
        """A lost wake-up does not hang, as a sleeper checks again when its slice ends. So check how long it took."""
        assert statistics.median(self._seconds) < _native.SLICE_SECONDS / 2, "the waiters slept their slices out"


def test_the_death_of_the_signaller_ends_every_wait_for_it(kills: CoreKills) -> None:
    change = kills.board.signal("change")
    for _ in kills.rounds(24):
        victim = kills.start(lives.signal_fast, kills.seed(), early=0.1)
        survivors = [kills.start(lives.wait_for_death, place, victim.peer) for place in (1, 2, 3)]
        kills.sleep()
        kills.kill(victim, look=True)
        with pytest.raises(PeerDied, match=rf"signal_fast \(pid {victim.pid}\)") as caught:
            change.wait(END, timeout=PATIENCE, peers=[victim.peer])
        kills.note_wait(victim.killed_ns)
        assert caught.value.peer is victim.peer
        kills.expect_reports(victim, 3, outcome="PeerDied")
        kills.join(*survivors)
        assert kills.board["seen"][1] in (0, change.value), "the signaller's last change was missed"
        kills.confirm(victim)


# ------------------------------------------------------------------------------------------------------------ parents


@pytest.mark.parametrize(
    ("stubborn", "rounds"), [(False, 24), (True, 4)], ids=["children", "children that ignore SIGTERM"]
)
def test_the_death_of_a_parent_ends_all_its_children(kills: CoreKills, stubborn: bool, rounds: int) -> None:
    for _ in kills.rounds(rounds):
        victim = kills.start(lives.have_children, 4, stubborn, early=0.1)
        kills.sleep(0.01)
        kills.kill(victim)
        kills.confirm(victim)
        exit_codes, ended_ns = kills.template.reap_all(PATIENCE / 2)
        assert ended_ns is not None, f"children left of a parent killed in {victim.phase!r}"
        kills.note_wait(victim.killed_ns, ended_ns)
        assert set(exit_codes.values()) <= {-signal.SIGKILL if stubborn else -signal.SIGTERM}
