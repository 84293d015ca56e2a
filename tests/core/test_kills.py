"""SIGKILL at random instants over create, attach, write, wait and close: the survivors go on, and nothing is left.

Each test kills many processes (victims.py) in one phase of their life, and after each kill looks at what is promised:
survivors got data or a named error within a second, nothing torn was accepted, no name, no memory and no process stays
behind. The last test counts: kills that the kernel confirmed, and the phases that they hit.

`make soak` runs the same tests with twelve times the kills. A run can be repeated with MEMLANE_KILL_SEED, as far as
timing can.
"""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import _native
from memlane.core import Peer, PeerDied, Segment, SegmentMissing, reclaim
from memlane.core.lowlevel import PeerState
from tests.support import core_victims as victims
from tests.support.core_victims import END, PAYLOAD, SURVIVORS, checksum

PROMISE_NS = 1_000_000_000  # a death is noticed within a second
PATIENCE = 10.0  # seconds after which a test gives up on something that is no promise of ours, such as a fork
LONGEST_DELAY = 0.015  # seconds; some hundred turns of the fast loops, a few of those that make large segments
SOAK = 12  # times the kills of `make test`: thousands

LEAST_AT_STAKE = 24 * 2**20  # bytes; what the kills of one test must have been able to leak for a look to mean much

TALLY: dict[int, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
"""Kills that the kernel confirmed: by dose, by test, by the phase that they hit."""


class Victim:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.peer = Peer.of(pid, "victim")
        self.killed_ns = 0
        self.phase = ""
        self.buried = False


class Template:
    """The process that forks victims and survivors on request."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", victims.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would forbid to fork
            )
        self._line = Connection(ours.detach())

    def ask(self, *request: Any) -> Any:
        self._line.send_bytes(pickle.dumps(request))
        if not self._line.poll(PATIENCE) and not self._line.poll(PATIENCE):  # twice: the machine may have been paused
            raise TimeoutError(f"no answer from the template to {request[0]}")
        return self._line.recv()

    def fork(self, life: str, *arguments: Any) -> int:
        pid: int = self.ask("fork", pickle.dumps((life, arguments)))
        return pid

    def close(self) -> None:
        self._line.close()
        assert self._process.wait(PATIENCE) == 0


class Hunt:
    """One test's kills: starts victims and survivors, kills, and keeps the books."""

    def __init__(self, template: Template, folder: Path, test: str, dose: int, seed: int) -> None:
        self.template = template
        self.folder = folder
        self.chance = random.Random(f"{seed} {test}")
        self.board = Segment.create(victims.BOARD)
        self._dose = dose
        self._books = TALLY[dose][test]
        self._shmem_before = 0
        self._at_stake: list[int] = []
        self._leaked: list[int] = []
        self._waited_ns: list[int] = []

    def rounds(self, count: int) -> Iterator[int]:
        for number in range(count * self._dose):
            self._shmem_before = shmem()
            self.wipe_board()
            yield number

    def wipe_board(self) -> None:
        """All but the signal `change`, which survivors of several rounds may be waiting for."""
        for name, view in self.board.views().items():
            if view.dtype != victims.SIGNAL:
                view[...] = 0
            elif name != "change":
                view["value"] = 0
        self.board["phase"][...] = b"unborn"

    def seed(self) -> int:
        return self.chance.randrange(2**32)

    def delay(self, longest: float = LONGEST_DELAY) -> float:
        return self.chance.uniform(0, longest)

    def start(self, life: str, *arguments: Any, hasty: float = 0.0) -> Victim:
        """Fork a process and wait until it has begun; with the chance ``hasty`` do not wait."""
        ready = self.board.signal("ready")
        awaited = ready.value + 1
        process = Victim(self.template.fork(life, self.board, *arguments))
        if self.chance.random() >= hasty:
            ready.wait(awaited, timeout=PATIENCE, peers=[process.peer])
        return process

    def kill(self, victim: Victim, *, look: bool = False, autopsy: Callable[[], str] | None = None) -> None:
        """SIGKILL. Half of the dead are collected at once, the others stay zombies until ``bury``.

        ``look`` adds to the phase whether the victim ran or slept; ``autopsy`` tells more than the victim could.
        """
        state = f" ({state_of(victim.pid)})" if look else ""
        victim.killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        collect = self.chance.random() < 0.5
        assert victim.peer.wait(PATIENCE)
        victim.phase = self.board["phase"].item().decode() + state
        if autopsy is not None:
            victim.phase += f", {autopsy()}"
        if collect:
            self.bury(victim)

    def bury(self, victim: Victim) -> None:
        """Collect the exit status, and count the kill if it was one."""
        if victim.buried:
            return
        status = self.template.ask("reap", victim.pid, PATIENCE)
        assert status == -signal.SIGKILL, f"the victim was to die of SIGKILL in {victim.phase!r}, found {status}"
        victim.buried = True
        victim.peer.close()
        self._books[victim.phase] += 1

    def died(self, victim: Victim) -> bool:
        """For a victim that kills itself at some system call: whether it got there."""
        status = self.template.ask("reap", victim.pid, PATIENCE)
        victim.peer.close()
        assert status in (0, -signal.SIGKILL)
        if status != 0:
            self._books[self.board["phase"].item().decode()] += 1
        return bool(status)

    def leave_corpses(self, names: list[str], unborn: int) -> None:
        """Named segments, and some that were only begun, of a dead owner. Its death is not random and not counted."""
        owner = self.start("leave_corpses", names, unborn)
        os.kill(owner.pid, signal.SIGKILL)
        assert self.template.ask("reap", owner.pid, PATIENCE) == -signal.SIGKILL
        owner.peer.close()

    def expect_state(self, victim: Victim, states: str) -> str:
        """Wait until the victim is in one of these states; see `state_of`."""
        deadline = time.monotonic() + PATIENCE
        while (state := state_of(victim.pid)) not in states:
            assert time.monotonic() < deadline, f"the victim does not come to {states}, it is in {state}"
            time.sleep(0.0005)
        return state

    def expect_end(self, survivor: Victim) -> None:
        status = self.template.ask("reap", survivor.pid, PATIENCE)
        survivor.peer.close()
        assert status == 0, f"a survivor was to return, found exit status {status}"

    def expect_reports(self, victim: Victim, count: int, *, outcome: str) -> None:
        """The survivors' waiting ended, as promised and in time."""
        self.board.signal("ended").wait(count, timeout=PATIENCE)
        assert self.board["outcome"][:count].tolist() == [outcome.encode()] * count
        self.promised(victim.killed_ns, int(self.board["ended_ns"][:count].max()))

    def promised(self, begin_ns: int, end_ns: int | None = None) -> None:
        """Note that something took from then until then, or until now, that is promised to take a second at most."""
        self._waited_ns.append((time.monotonic_ns() if end_ns is None else end_ns) - begin_ns)

    def expect_promise_kept(self) -> None:
        """One wait in a hundred may be longer: a busy machine sometimes gives a process no core for a second."""
        longest = sorted(self._waited_ns, reverse=True)
        late = [wait_ns for wait_ns in longest if wait_ns >= PROMISE_NS]
        assert len(late) <= 1 + len(longest) // 100, f"waits of {late} ns, {len(longest)} in all"

    def expect_no_names(self) -> None:
        left = [entry.name for entry in self.folder.iterdir()]
        assert not left, f"names left behind: {left}"

    def look_at_memory(self) -> None:
        """How much of what the victim held when it was killed has not come back.

        Shmem is the whole machine's, and others make segments too. So each kill is looked at alone, and counts at most
        for what it can have leaked: a stranger's step shows up once, a leak again and again.
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

    def expect_no_process_left(self) -> None:
        ends, gone_ns = self.template.ask("reap_all", 1.0)
        assert gone_ns is not None, "processes left running"
        assert ends == {}, f"processes that were not waited for: {ends}"


def shmem() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no line Shmem")


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, T is stopped, Z is dead and not collected."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory of our own for names, in the same file system as those of real runs: its memory counts as Shmem."""
    path = Path(tempfile.mkdtemp(prefix="test-kills-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLANE_SHM_DIR", str(path))
        yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def template(folder: Path) -> Iterator[Template]:  # noqa: ARG001 - the template inherits the directory
    process = Template()
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
    hunt = Hunt(template, folder, request.node.originalname, dose, seed)
    try:
        yield hunt
        hunt.board.close()
        if request.session.testsfailed == failures:  # a test that failed has left things behind and said so
            hunt.expect_no_process_left()
            hunt.expect_no_names()
            hunt.expect_promise_kept()
            assert len(os.listdir("/proc/self/fd")) <= descriptors, "the survivor lost descriptors"
    finally:
        # One failure is not to become that of every later test.
        template.ask("kill_all")
        for entry in folder.iterdir():
            entry.unlink()


# ------------------------------------------------------------------------------------------------- making and finding


KINDS = pytest.mark.parametrize(
    ("kind", "tmpfile"),
    [("anonymous", True), ("named", True), ("named", False), ("file", True), ("file", False)],
    ids=["anonymous", "named", "named without O_TMPFILE", "file", "file without O_TMPFILE"],
)


@KINDS
def test_a_process_killed_while_it_makes_segments_leaves_nothing(hunt: Hunt, kind: str, tmpfile: bool) -> None:
    for number in hunt.rounds(16):
        name = f"made-{number}"
        arguments = (kind, tmpfile, name, hunt.folder, hunt.seed())
        victim = hunt.start("create_and_close", *arguments, hasty=0.1)
        time.sleep(hunt.delay())
        hunt.kill(victim)
        if kind == "file":
            expect_file_whole_or_missing(hunt.folder / name, victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        else:
            Segment.create({"x": (np.uint8, 1)}, name=name).close()
        hunt.expect_no_names()
        hunt.look_at_memory()
        hunt.bury(victim)
    hunt.expect_memory_back()


@KINDS
def test_a_process_killed_at_any_system_call_of_making_a_segment_leaves_nothing(
    hunt: Hunt, kind: str, tmpfile: bool
) -> None:
    for call in itertools.count():
        hunt.wipe_board()
        victim = hunt.start("create_until", call, kind, tmpfile, "made", hunt.folder, hasty=1)
        if not hunt.died(victim):
            break
        if kind == "file":
            expect_file_whole_or_missing(hunt.folder / "made", victim)
        assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        hunt.expect_no_names()


def expect_file_whole_or_missing(path: Path, victim: Victim) -> None:
    """A file is meant to outlive all processes, but it must be complete. Removes it."""
    if path.exists():
        with Segment.attach(file=path) as found:
            assert found.owner == victim.peer
            found.unlink()


def test_a_process_killed_while_it_attaches_leaves_the_owners_segment_unharmed(hunt: Hunt) -> None:
    with Segment.create({"x": (np.int64, PAYLOAD)}, name="owned") as owned:
        assert owned.path is not None
        for number in hunt.rounds(24):
            owned["x"][:] = number
            inode = owned.path.stat().st_ino
            victim = hunt.start("attach_and_close", "owned", number, hasty=0.1)
            time.sleep(hunt.delay())
            hunt.kill(victim)
            assert reclaim() == []
            assert owned.path.stat().st_ino == inode
            with Segment.attach("owned", layout=owned.layout) as again:
                assert (again["x"] == number).all()
                assert not again.owner_closed
            assert hunt.board["torn"][SURVIVORS] == 0
            hunt.bury(victim)


def test_a_segment_from_a_killed_sender_arrives_whole_or_is_named_missing(hunt: Hunt) -> None:
    fetched = 0
    for _ in hunt.rounds(20):
        victim = hunt.start("hand_over", hasty=0.1)
        kill_at = time.monotonic() + hunt.delay()
        while time.monotonic() < kill_at:
            fetched += fetch(hunt.board)
        hunt.kill(victim)
        assert not fetch(hunt.board), "fetched from the dead"
        hunt.bury(victim)
    if not fetched:  # on a busy machine all of them may die before they have anything to hand over
        victim = hunt.start("hand_over", hasty=0.1)
        patience = time.monotonic() + 20
        while not fetched and time.monotonic() < patience:
            fetched += fetch(hunt.board)
        hunt.kill(victim)
        hunt.bury(victim)
    assert fetched > 0


def fetch(board: Segment) -> bool:
    """Take the segment whose pickle lies on the board, if it is still there."""
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
def test_a_process_killed_while_it_closes_takes_nothing_from_those_attached(hunt: Hunt, unlink: bool) -> None:
    names, nbytes = [f"closing-{number}" for number in range(1, 17)], 2**20
    for number in hunt.rounds(16):
        victim = hunt.start("make_and_close", names, nbytes, unlink)
        attached = {value: Segment.attach(name) for value, name in enumerate(names, 1) if value % 4 == 0}
        hunt.board.signal("go").store(1)
        time.sleep(hunt.delay(0.001))
        hunt.kill(victim)
        if number % 2:
            assert {leftover.owner for leftover in reclaim()} <= {victim.peer}
        else:
            Segment.create({"x": (np.uint8, 1)}, name=hunt.chance.choice(names)).close()
        hunt.expect_no_names()
        for value, segment in attached.items():
            assert (segment["x"] == value).all()
            assert segment.owner.state is not PeerState.ALIVE
        del attached, segment  # with the last holder the memory goes
        hunt.look_at_memory()
        hunt.bury(victim)
    hunt.expect_memory_back()


@pytest.mark.parametrize("unborn", [0, 12], ids=["finished segments", "unfinished segments too"])
def test_a_process_killed_while_it_reclaims_leaves_the_rest_to_the_next(hunt: Hunt, unborn: int) -> None:
    names = [f"corpse-{number}" for number in range(12)]
    for _ in hunt.rounds(12):
        hunt.leave_corpses(names, unborn)
        victim = hunt.start("reclaim_all")
        time.sleep(hunt.delay(0.003))
        hunt.kill(victim)
        reclaim()
        hunt.expect_no_names()
        hunt.bury(victim)


@pytest.mark.parametrize("unborn", [0, 1], ids=["a finished segment", "an unfinished one too"])
def test_a_process_killed_at_any_system_call_of_reclaim_leaves_the_rest_to_the_next(hunt: Hunt, unborn: int) -> None:
    for call in itertools.count():
        hunt.wipe_board()
        hunt.leave_corpses(["corpse"], unborn)
        killed = hunt.died(hunt.start("reclaim_until", call, signal.SIGKILL, hasty=1))
        reclaim()
        hunt.expect_no_names()
        if not killed:
            break


def test_a_process_stopped_at_any_system_call_of_reclaim_does_not_keep_others_from_creating_segments(
    hunt: Hunt,
) -> None:
    for call in itertools.count():
        hunt.wipe_board()
        hunt.leave_corpses(["corpse"], unborn=1)
        victim = hunt.start("reclaim_until", call, signal.SIGSTOP, hasty=1)
        stopped = hunt.expect_state(victim, "TZ") == "T"
        survivor = hunt.start("create_once", 0, "mine")
        begun_ns = time.monotonic_ns()
        hunt.board.signal("ended").wait(1, timeout=PATIENCE)
        hunt.promised(begun_ns)
        hunt.expect_end(survivor)
        if stopped:
            hunt.kill(victim)
            hunt.bury(victim)
        else:
            hunt.expect_end(victim)
        reclaim()
        hunt.expect_no_names()
        if not stopped:
            break


def test_a_name_whose_holder_is_killed_is_free_for_the_others(hunt: Hunt) -> None:
    change = hunt.board.signal("change")
    for _ in hunt.rounds(16):
        change.store(0)
        survivors = [hunt.start("contend", place, "contested") for place in range(2)]
        victim = hunt.start("contend", SURVIVORS, "contested", hasty=0.1)
        time.sleep(hunt.delay())
        hunt.kill(victim)
        before = hunt.board["accepted"][:2].copy()
        deadline = time.monotonic() + PATIENCE
        while (hunt.board["accepted"][:2] == before).any():
            assert time.monotonic() < deadline, f"no process gets the name that was held in {victim.phase!r}"
            time.sleep(0.001)
        hunt.promised(victim.killed_ns)
        change.store(END)
        for survivor in survivors:
            hunt.expect_end(survivor)
        hunt.expect_no_names()
        hunt.bury(victim)


# ------------------------------------------------------------------------------------------------ writing and waiting


def test_what_a_killed_writer_published_is_whole_and_its_readers_learn_of_its_death(hunt: Hunt) -> None:
    accepted = 0
    with Segment.create(victims.LANE) as lane:
        for _ in hunt.rounds(32):
            victim = hunt.start("publish", lane, hunt.seed(), hasty=0.1)
            readers = [hunt.start("follow", place, lane, victim.peer) for place in range(2)]
            time.sleep(hunt.delay())
            hunt.kill(victim, autopsy=lambda: left_by_writer(lane))
            hunt.expect_reports(victim, 2, outcome="PeerDied")
            for reader in readers:
                hunt.expect_end(reader)
            assert hunt.board["torn"].sum() == 0
            version = lane.signal("version").value
            if hunt.board["accepted"].all():
                assert (hunt.board["seen"][:2] >= version).all(), "the writer's last word was missed"
            if version:
                assert lane.words("claims").load(version % 2) == version
            for place, claim in enumerate(lane["claims"].tolist()):
                assert claim <= 0 or holds(lane, place, claim), f"torn: {lane['buffers'][place]} published as {claim}"
            accepted += int(hunt.board["accepted"].sum())
            hunt.bury(victim)
    assert accepted > 0


def holds(lane: Segment, place: int, number: int) -> bool:
    return bool((lane["buffers"][place] == number).all() and lane["sums"][place] == checksum(number))


def left_by_writer(lane: Segment) -> str:
    """Where the writer was killed, as what it left shows."""
    claims, version = lane["claims"], lane.signal("version").value
    if (claims < 0).any():
        place = int(np.argmin(claims))
        written = np.count_nonzero(lane["buffers"][place] == -claims[place]) / PAYLOAD
        return f"{np.ceil(written * 4) * 25:.0f} % written"
    return "published" if claims.max() > version else "signalled"


def test_a_waiter_that_is_killed_costs_the_other_waiters_no_change(hunt: Hunt) -> None:
    survivors = [hunt.start("echo", place, spin_ns) for place, spin_ns in enumerate([0, 50_000])]
    exchange = Exchange(hunt, places=2)
    for _ in hunt.rounds(32):
        victim = hunt.start("wait_for_changes", SURVIVORS - 1, hunt.seed(), hasty=0.1)
        kill_at = time.monotonic() + hunt.delay()
        while time.monotonic() < kill_at:
            exchange.change()
            time.sleep(hunt.delay(0.002))
        if hunt.chance.random() < 0.3:
            exchange.change(answered=False)  # the kill races with its waking up
        hunt.kill(victim, look=True)
        for _ in range(4):
            exchange.change()
            time.sleep(hunt.delay(0.001))
        hunt.bury(victim)
    exchange.end()
    for survivor in survivors:
        hunt.expect_end(survivor)
    exchange.expect_prompt()


def test_a_waiter_that_is_stopped_delays_no_other(hunt: Hunt) -> None:
    survivors = [hunt.start("echo", place, spin_ns) for place, spin_ns in enumerate([0, 50_000])]
    exchange = Exchange(hunt, places=2)
    for number in hunt.rounds(16):
        victim = hunt.start("wait_for_changes", SURVIVORS - 1, hunt.seed())
        stop_at = time.monotonic() + hunt.delay(0.005)
        while time.monotonic() < stop_at:
            exchange.change()
            time.sleep(hunt.delay(0.001))
        os.kill(victim.pid, signal.SIGSTOP)
        hunt.expect_state(victim, "T")
        for _ in range(4):
            exchange.change()
        if number % 2:
            os.kill(victim.pid, signal.SIGCONT)
            continued_ns = time.monotonic_ns()
            hunt.board.signal("echo", SURVIVORS - 1).wait(exchange.value, timeout=PATIENCE)
            hunt.promised(continued_ns)
            time.sleep(hunt.delay(0.002))
        hunt.kill(victim, look=True)
        exchange.change()
        hunt.bury(victim)
    exchange.end()
    for survivor in survivors:
        hunt.expect_end(survivor)
    exchange.expect_prompt()


class Exchange:
    """Changes a signal and sees to it that every survivor answers each change."""

    def __init__(self, hunt: Hunt, places: int) -> None:
        self._hunt = hunt
        self._change = hunt.board.signal("change")
        self._answers = [hunt.board.signal("echo", place) for place in range(places)]
        self._seconds: list[float] = []
        self.value = self._change.value

    def change(self, *, answered: bool = True) -> None:
        self.value += 1
        begin_ns = time.monotonic_ns()
        self._change.store(self.value)
        self._hunt.promised(begin_ns)  # the signaller is not blocked
        if not answered:
            return
        for answer in self._answers:
            answer.wait(self.value, timeout=PATIENCE)
        self._hunt.promised(begin_ns)
        self._seconds.append((time.monotonic_ns() - begin_ns) / 1e9)

    def end(self) -> None:
        self._change.store(END)

    def expect_prompt(self) -> None:
        """A lost wake-up does not hang: the sleeper looks around when its slice ends. So look at how long it took."""
        assert statistics.median(self._seconds) < _native.SLICE_SECONDS / 2, "the waiters slept their slices out"


def test_the_death_of_the_signaller_ends_every_wait_for_it(hunt: Hunt) -> None:
    change = hunt.board.signal("change")
    for _ in hunt.rounds(24):
        victim = hunt.start("signal_fast", hunt.seed(), hasty=0.1)
        survivors = [hunt.start("wait_for_death", place, victim.peer) for place in range(SURVIVORS)]
        time.sleep(hunt.delay())
        hunt.kill(victim, look=True)
        with pytest.raises(PeerDied, match=rf"victim \(pid {victim.pid}\)") as caught:
            change.wait(END, timeout=PATIENCE, peers=[victim.peer])
        hunt.promised(victim.killed_ns)
        assert caught.value.peer is victim.peer
        hunt.expect_reports(victim, SURVIVORS, outcome="PeerDied")
        for survivor in survivors:
            hunt.expect_end(survivor)
        assert hunt.board["seen"][0] in (0, change.value), "the signaller's last word was missed"
        hunt.bury(victim)


# ------------------------------------------------------------------------------------------------------------ parents


@pytest.mark.parametrize(
    ("stubborn", "kills"), [(False, 24), (True, 4)], ids=["children", "children that ignore SIGTERM"]
)
def test_the_death_of_a_parent_ends_all_its_children(hunt: Hunt, stubborn: bool, kills: int) -> None:
    for _ in hunt.rounds(kills):
        victim = hunt.start("have_children", 4, stubborn, hasty=0.1)
        time.sleep(hunt.delay(0.01))
        hunt.kill(victim)
        hunt.bury(victim)
        ends, gone_ns = hunt.template.ask("reap_all", PATIENCE / 2)
        assert gone_ns is not None, f"children left of a parent killed in {victim.phase!r}"
        hunt.promised(victim.killed_ns, gone_ns)
        assert set(ends.values()) <= {-signal.SIGKILL if stubborn else -signal.SIGTERM}


# ----------------------------------------------------------------------------------------------------------- the count


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
    at_random = sum(phases.total() for test, phases in books.items() if "at_any_system_call" not in test)
    assert at_random >= (200 if dose == 1 else 3000)
    # A test that failed early has said so itself.
    few = {test: list(phases) for test, phases in books.items() if phases.total() >= 10 and len(phases) < 3}
    assert not few, f"the kills of these tests all hit the same phases: {few}"
