"""Liveness: dead processes are detected, described, and end the processes that are tied to them."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlane.core import Peer, PeerDied, Segment, SegmentError, die_with
from memlane.core.children import signal_name
from memlane.core.liveness import PID_BITS, leave_signals_to
from memlane.core.lowlevel import PeerState, Roster
from tests.support.processes import (
    FIELDS,
    METHODS,
    PATIENCE,
    ask,
    child,
    dead_peer,
    output_of,
    ring_when_tied,
    script,
    sleep_forever,
    state_of,
    wait_for,
    within,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def victim() -> Iterator[Peer]:
    """A child that sleeps until it is killed."""
    with child(sleep_forever) as process:
        peer = Peer.of(process.pid or 0, "victim")
        yield peer
        process.kill()


# ----------------------------------------------------------------------------------------------------------------- life


def test_this_process_is_alive() -> None:
    assert Peer.current().state is PeerState.ALIVE


def test_a_sleeping_child_is_alive(victim: Peer) -> None:
    assert (victim.state, victim.alive) == (PeerState.ALIVE, True)


def test_a_stopped_child_is_alive(victim: Peer) -> None:
    os.kill(victim.pid, signal.SIGSTOP)
    assert victim.alive
    assert not victim.wait(0.05)


def test_a_killed_child_that_was_not_collected_is_a_zombie_and_not_alive(victim: Peer) -> None:
    os.kill(victim.pid, signal.SIGKILL)
    assert wait_for(lambda: victim.state is PeerState.ZOMBIE)
    assert not victim.alive
    os.kill(victim.pid, 0)  # what others use as a test of life finds nothing wrong


def test_a_child_that_was_collected_is_dead() -> None:
    assert dead_peer().state is PeerState.DEAD


def test_a_pid_with_another_start_time_is_recycled() -> None:
    me = Peer.current()
    other = Peer(me.pid, me.start - 1)
    assert (other.state, other.alive) == (PeerState.RECYCLED, False)


def test_a_process_with_an_odd_name_is_read_right() -> None:
    """Its name stands in the middle of its stat file and may look like the rest of it."""
    code = "import time; open('/proc/self/comm', 'w').write(') Z 1 (x'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peer = Peer.of(process.pid)
        try:
            assert Path(f"/proc/{process.pid}/comm").read_text() == ") Z 1 (x\n"
            assert (peer.state, peer.start) == (PeerState.ALIVE, Peer.of(process.pid).start)
            assert peer.start >= Peer.current().start
        finally:
            process.kill()


# Regression: pidfd_open says ENOENT or EINVAL there, which fileno() did not expect.
def test_the_number_of_a_thread_is_no_process() -> None:
    numbers, end = [], threading.Event()

    def stay() -> None:
        numbers.append(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert wait_for(lambda: numbers)
        peer = Peer(numbers[0], 12345)
        assert not peer.alive
        assert peer.wait(0)
    finally:
        end.set()
        thread.join()


def test_a_process_whose_first_thread_has_ended_is_alive_until_its_last_one_has(board: Segment) -> None:
    """The kernel shows it as a zombie. The native code, which takes slots back, and Python must not disagree."""
    with child(outlive_first_thread, board) as process:
        peer = Peer.of(process.pid or 0)
        assert wait_for(lambda: state_of(peer.pid) == "Z")
        assert (peer.state, peer.alive, peer.wait(0.05)) == (PeerState.ALIVE, True, False)
        assert Roster(board, "places").join() == 1
        board.signal("bell").add()
        assert peer.wait(PATIENCE)
        assert (peer.state, peer.alive) == (PeerState.ZOMBIE, False)


def outlive_first_thread(board: Segment) -> None:
    def end_later() -> None:
        board.signal("bell").wait(1, timeout=PATIENCE)
        os._exit(0)

    assert Roster(board, "places").join() == 0
    threading.Thread(target=end_later).start()
    ctypes.CDLL(None).syscall(SYS_EXIT, 0)  # ends this thread alone


SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93


def test_there_is_no_peer_without_a_process() -> None:
    pid = dead_peer().pid
    with pytest.raises(PeerDied, match=f"no process with pid {pid}"):
        Peer.of(pid)


@pytest.mark.parametrize("pid", [0, -1, 2**22, 2**40, 2**64])
def test_a_number_that_no_process_can_have_is_dead_in_every_way(pid: int) -> None:
    peer = Peer(pid, 1)
    assert peer.state is PeerState.DEAD
    assert peer.wait(0)


def test_a_forked_child_knows_itself_and_not_its_parent() -> None:
    here, there = mp.Pipe(duplex=False)
    me = Peer.current()
    with child(send_self, there) as process:
        other = here.recv()
    assert (other.pid, other == me) == (process.pid, False)


def send_self(pipe: object) -> None:
    pipe.send(Peer.current())  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- the word


@given(st.integers(1, 2**22 - 1), st.integers(0, 2**41 - 1))
def test_a_peer_fits_into_an_atomic_word(pid: int, start: int) -> None:
    peer = Peer(pid, start)
    assert 0 < peer.word < 2**63
    assert Peer.from_word(peer.word) == peer


@given(
    st.tuples(st.integers(1, 2**22 - 1), st.integers(0, 2**41 - 1)),
    st.tuples(st.integers(1, 2**22 - 1), st.integers(0, 2**41 - 1)),
)
def test_two_peers_have_the_same_word_only_if_they_are_the_same(one: tuple[int, int], two: tuple[int, int]) -> None:
    assert (Peer(*one).word == Peer(*two).word) == (one == two) == (Peer(*one) == Peer(*two))


def test_equal_peers_have_equal_hashes() -> None:
    assert len({Peer(5, 6, "a"), Peer(5, 6, "b"), Peer(5, 7)}) == 2


def test_a_peer_pickles_without_its_descriptor() -> None:
    me = Peer.current("learner")
    me.fileno()
    again = pickle.loads(pickle.dumps(me))
    assert (again, again.name, again._pidfd) == (me, "learner", None)


# ------------------------------------------------------------------------------------------------------------- watching


def test_its_descriptor_becomes_readable_at_its_death(victim: Peer) -> None:
    poll = select.poll()
    poll.register(victim, select.POLLIN)
    assert poll.poll(0) == []
    os.kill(victim.pid, signal.SIGKILL)
    assert poll.poll(PATIENCE * 1000) != []


def test_waiting_for_a_death_says_whether_it_came(victim: Peer) -> None:
    assert not victim.wait(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait(PATIENCE)


def test_waiting_for_a_death_without_a_limit_ends_with_it(victim: Peer) -> None:
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait()


def test_the_long_dead_need_not_be_waited_for() -> None:
    assert dead_peer().wait(0)


def test_the_namesake_of_a_dead_process_is_not_watched_in_its_place() -> None:
    me = Peer.current()
    assert Peer(me.pid, me.start - 1).wait(0)


def test_closing_gives_the_descriptor_back(victim: Peer) -> None:
    descriptor = victim.fileno()
    victim.close()
    victim.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_forgotten_peer_gives_its_descriptor_back(victim: Peer) -> None:
    other = Peer.of(victim.pid)
    descriptor = other.fileno()
    del other
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# ----------------------------------------------------------------------------------------------------------- obituaries


def exit_with(code: int) -> None:
    os._exit(code)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "SIGKILL (by hand, or the kernel was out of memory)"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGSEGV, "SIGSEGV (an invalid memory access, most likely in native code)"),
    ],
)
def test_the_death_of_a_child_is_described_by_the_signal_and_its_likely_reason(
    number: signal.Signals, words: str
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        victim = Peer.of(process.pid, "victim")
        process.send_signal(number)
        victim.wait(PATIENCE)
        assert victim.describe_death() == f"victim (pid {victim.pid}) was killed by {words}"


def test_the_exit_of_a_child_is_described_by_its_code() -> None:
    process = mp.get_context("fork").Process(target=exit_with, args=(3,))
    process.start()
    peer = Peer.of(process.pid or 0, "worker 3")
    peer.wait(PATIENCE)
    assert peer.describe_death() == f"worker 3 (pid {process.pid}) exited with code 3"
    process.join()


def test_describing_a_death_leaves_the_exit_status_to_be_collected(victim: Peer) -> None:
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(PATIENCE)
    victim.describe_death()
    assert os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL  # type: ignore[union-attr]


def test_the_death_of_a_process_that_is_no_child_is_described_without_a_cause() -> None:
    peer = dead_peer("stranger")
    assert peer.describe_death() == f"stranger (pid {peer.pid}) died"


def test_a_process_that_lives_is_described_as_alive() -> None:
    assert Peer.current("me").describe_death() == f"me (pid {os.getpid()}) is alive"


def test_a_signal_without_a_name_has_its_number() -> None:
    assert signal_name(250) == "signal 250"


# ---------------------------------------------------------------------------------------------------------------- dying


PARENT = """
    import sys
    from tests.support.processes import parent_of_tied_child
    name, method, grace, stubborn, *thread = sys.argv[1:]
    parent_of_tied_child(name, method, float(grace), stubborn == "True", *thread)
"""


@pytest.mark.parametrize("stubborn", [False, True], ids=["SIGTERM is enough", "SIGTERM is ignored"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("shm_dir")
def test_the_death_of_the_parent_ends_the_child_within_a_second(method: str, stubborn: bool) -> None:
    with Segment.create(FIELDS, name="board") as board, script(PARENT, "board", method, 0.2, stubborn) as parent:
        try:
            board.signal("bell").wait(1, timeout=PATIENCE, peers=[Peer.of(parent.pid, "parent")])
        finally:
            parent.kill()
            killed = time.monotonic()
        tied = Peer.of(int(board["count"][0]), "child")
        gone = tied.wait(PATIENCE)
        seconds = time.monotonic() - killed
        if not gone:
            os.kill(tied.pid, signal.SIGKILL)
    assert gone
    assert seconds < 1


@pytest.mark.parametrize("thread", ["", "a thread", "a thread that has ended"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("shm_dir")
def test_the_death_of_the_parent_ends_a_stopped_child_too(method: str, thread: str) -> None:
    assert seconds_to_die(method, thread, stop_child) < within(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("shm_dir")
def test_the_death_of_the_parent_ends_children_that_were_stopped_together_with_it(method: str) -> None:
    """As Ctrl-Z does it: the fork server is stopped too."""
    assert seconds_to_die(method, "", stop_group_of_parent) < within(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("shm_dir")
def test_a_stopped_child_that_ignores_sigterm_gets_its_grace_and_sigkill(method: str) -> None:
    seconds = seconds_to_die(method, "", stop_child, grace=0.3, stubborn=True)
    assert 0.3 < seconds < 0.3 + within(1)


def stop_child(parent: int, tied: int) -> None:  # noqa: ARG001
    os.kill(tied, signal.SIGSTOP)


def stop_group_of_parent(parent: int, tied: int) -> None:  # noqa: ARG001
    os.killpg(parent, signal.SIGSTOP)


def seconds_to_die(
    method: str, thread: str, stop: Callable[[int, int], object], grace: float = 0.2, stubborn: bool = False
) -> float:
    """How long a child that ``stop`` has stopped lives after the death of its parent, one of whose threads has
    started it."""
    with (
        Segment.create(FIELDS, name="board") as board,
        script(PARENT, "board", method, grace, stubborn, thread, start_new_session=True) as parent,
    ):
        try:
            board.signal("bell").wait(1, timeout=PATIENCE, peers=[Peer.of(parent.pid, "parent")])
            tied = Peer.of(int(board["count"][0]), "child")
            if thread == "a thread that has ended":
                board.signal("bell", 1).wait(1, timeout=PATIENCE)
                assert not tied.wait(0.3), "the end of the thread that started it must not end the child"
            stop(parent.pid, tied.pid)
            assert wait_for(lambda: state_of(tied.pid) == "T")
            assert not tied.wait(0.3)
        finally:
            parent.kill()
            killed = time.monotonic()
        gone = tied.wait(PATIENCE / 4)
        seconds = time.monotonic() - killed
        with suppress(ProcessLookupError):  # Python's resource tracker, which is not memlane's, may still be stopped
            os.killpg(parent.pid, signal.SIGKILL)
        if not gone:
            os.kill(tied.pid, signal.SIGKILL)
    return seconds


def test_sigterm_comes_first_and_leaves_time_to_clean_up() -> None:
    """The child catches SIGTERM and rings; SIGKILL would not have let it."""
    with Segment.create(FIELDS) as board:
        with child(sleep_forever) as master, child(tied_and_tidy, Peer.of(master.pid or 0), board) as tidy:
            board.signal("bell", 0).wait(1, timeout=PATIENCE)
            master.kill()
            board.signal("bell", 1).wait(1, timeout=PATIENCE)
            assert Peer.of(tidy.pid or 0).wait(PATIENCE)
        assert tidy.exitcode == 0


def tied_and_tidy(master: Peer, board: Segment) -> None:
    def clean_up(*_: object) -> None:
        board.signal("bell", 1).add()
        sys.exit(0)

    signal.signal(signal.SIGTERM, clean_up)
    die_with(master, grace=PATIENCE)
    board.signal("bell", 0).add()
    sleep_forever()


def test_tying_to_the_dead_ends_at_once() -> None:
    with Segment.create(FIELDS) as board, child(ring_when_tied, dead_peer(), 0.0, True, board) as process:
        assert Peer.of(process.pid or 0).wait(PATIENCE)
    assert process.exitcode == -signal.SIGKILL


def test_the_tied_live_as_long_as_their_master(victim: Peer, board: Segment) -> None:
    with child(ring_when_tied, victim, 0.0, False, board, may_die_of=signal.SIGTERM) as process:
        board.signal("bell").wait(1, timeout=PATIENCE)
        assert not Peer.of(process.pid or 0).wait(0.3)
        os.kill(victim.pid, signal.SIGKILL)
        assert Peer.of(process.pid or 0).wait(1)


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), "1"])
def test_a_grace_must_be_a_number_of_seconds(grace: float) -> None:
    with pytest.raises(ValueError, match=f"grace must be a finite number of seconds, 0 or more, found {grace!r}"):
        die_with(Peer.current(), grace)


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_the_timeout_of_a_wait_for_a_process_must_be_a_number_of_seconds(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"timeout must be None .* or a number of seconds, 0 or more, found {timeout!r}"):
        dead_peer().wait(timeout)


def test_a_wait_for_a_process_may_be_longer_than_the_kernel_can_count() -> None:
    assert dead_peer().wait(1e300)
    assert dead_peer().wait(float("inf"))


# --------------------------------------------------------------------------------------------------------------- roster


@pytest.fixture
def board() -> Iterator[Segment]:
    with Segment.create({**FIELDS, "places": ("int64", 6)}) as segment:
        yield segment


def test_a_process_that_joins_has_an_entry_with_its_identity(board: Segment) -> None:
    place = Roster(board, "places").join()
    assert board["places"].tolist() == [board.life.process() if i == place else 0 for i in range(6)]


def test_a_process_that_leaves_has_no_entry(board: Segment) -> None:
    roster = Roster(board, "places")
    roster.leave(roster.join())
    assert not board["places"].any()


def test_leaving_again_is_harmless_to_a_successor(board: Segment) -> None:
    roster = Roster(board, "places")
    place = roster.join()
    roster.leave(place)
    with child(join_and_stay, board) as successor:
        board.signal("bell", 0).store(1)
        board.signal("bell", 1).wait(1, timeout=PATIENCE)
        entry = int(board["places"][place])
        roster.leave(place)
        assert board["places"][place] == entry > 0
        successor.kill()


def test_a_forked_child_cannot_give_up_the_entry_of_its_parent(board: Segment) -> None:
    roster = Roster(board, "places")
    place = roster.join()
    ask(roster.leave, place)
    assert board["places"][place] == board.life.process()


def test_the_entry_of_a_dead_process_is_free_for_the_next(board: Segment) -> None:
    assert ask(Roster(board, "places").join) == 0
    assert board["places"][0] != 0
    assert Roster(board, "places").join() == 0
    assert board["places"][0] == board.life.process()


def test_a_table_full_of_living_processes_is_an_error_that_says_how_many(board: Segment) -> None:
    roster = Roster(board, "places")
    for _ in range(6):
        roster.join()
    with pytest.raises(
        SegmentError, match=r"all 6 entries of words 'places' of anonymous segment belong to running processes"
    ):
        roster.join()


def test_a_full_table_has_the_name_and_the_remedy_that_it_was_given(board: Segment) -> None:
    roster = Roster(board, "places", "close some", "the samplers")
    for _ in range(6):
        roster.join()
    with pytest.raises(SegmentError, match=r"^all 6 entries of the samplers belong to running processes; close some$"):
        roster.join()


def join_and_stay(board: Segment) -> None:
    board.signal("bell", 0).wait(1, timeout=PATIENCE)
    place = Roster(board, "places").join()
    board.words("count").add(place, 1)
    board.signal("bell", 1).add()
    sleep_forever()


@pytest.mark.parametrize("corpses", [0, 6], ids=["empty", "full of the dead"])
def test_of_many_that_join_at_once_each_gets_its_own_entry(board: Segment, corpses: int) -> None:
    if corpses:
        board["places"][:corpses] = ask(board.life.process)
    processes = [mp.get_context("fork").Process(target=join_and_stay, args=(board,)) for _ in range(6)]
    for process in processes:
        process.start()
    try:
        board.signal("bell", 0).store(1)
        board.signal("bell", 1).wait(6, timeout=PATIENCE, peers=[Peer.of(process.pid or 0) for process in processes])
        assert board["count"][:6].tolist() == [1] * 6
        pids = board["places"] & (1 << PID_BITS) - 1
        assert set(pids.tolist()) == {process.pid for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.join()


# -------------------------------------------------------------------------------------------------------------- signals


def leave_and_wait(peer: Peer, board: Segment) -> None:
    leave_signals_to(peer)
    board["count"][0] = 1
    board.signal("bell").add()
    sleep_forever()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_left_to_a_peer_that_lives(number: signal.Signals) -> None:
    with Segment.create(FIELDS) as board, child(leave_and_wait, Peer.current(), board) as process:
        board.signal("bell").wait(1, timeout=PATIENCE)
        for _ in range(3):
            os.kill(process.pid or 0, number)
        time.sleep(0.05)
        assert process.is_alive()
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_process_whose_peer_is_dead(number: signal.Signals) -> None:
    with (
        Segment.create(FIELDS) as board,
        child(leave_and_wait, dead_peer(), board, may_die_of=number) as process,
    ):
        board.signal("bell").wait(1, timeout=PATIENCE)
        os.kill(process.pid or 0, number)
        process.join(PATIENCE)
        assert process.exitcode == -number


def test_a_program_that_is_started_from_there_can_be_terminated() -> None:
    code = """
    import subprocess
    from memlane.core import Peer
    from memlane.core.liveness import leave_signals_to
    leave_signals_to(Peer.current())
    process = subprocess.Popen(["sleep", "600"])
    process.terminate()
    print(process.wait())
    """
    assert output_of(code) == "-15\n"
