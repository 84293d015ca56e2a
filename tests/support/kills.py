"""The kill harness: processes that a test forks, watches and kills, and the count of what the kills hit.

`Template` is one warm interpreter that forks a process per request. A fork takes a millisecond, a new interpreter with
numpy a hundred, and only a process without threads can fork safely: pytest has some. This module, run as a program, is
that interpreter. It adopts orphans, so "no process is left" is the same as "the template has no children".

What a forked process does is a function, its life: core_lives.py, lane_lives.py, replay_lives.py. The first argument
of every life is the board, a segment that it shares with the test. There a victim notes the phase that it is in, and
survivors what they have done and seen.

`Processes` are the forked processes of one test. `Kills` adds the loop that kills, and the accounting: every kill must
be confirmed by the kernel, and the kills of a test must hit the phases that it names.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import pytest

from memlane.core import SIGNAL, Peer, Segment
from tests.support.processes import PROMISE, state_of, within

PATIENCE = 30.0
"""Seconds after which a test gives up on something that memlane does not promise, such as a fork."""

LONGEST_DELAY = 0.015
"""Seconds from a victim's start to its kill: some hundred turns of fast loops, a few of those with large segments."""

MOST_ROUNDS = 20
"""How many times its rounds a test may repeat until its kills have hit every phase that it names."""

LIVES = ("tests.support.core_lives", "tests.support.lane_lives", "tests.support.replay_lives", "tests.chaos.lives")

Life = Callable[..., object]


# ------------------------------------------------------------------------------------------------------------ the board

PLACES = 8
"""Processes of one test that can report something: each has a place on the board."""

VICTIM = 0
"""The place of the process that is killed."""


def board_layout(places: int = PLACES, **fields: Any) -> dict[str, Any]:
    """The layout of a board: what every test has, and the fields of this one."""
    return {
        "phase": ("S64", places),  # what a process does just now
        "ready": (SIGNAL, ()),  # counts the processes that have begun
        "go": (SIGNAL, ()),  # releases those that begin together
        "end": (SIGNAL, ()),  # tells survivors to return
        "progress": (SIGNAL, places),  # counts what a survivor has done
        "torn": (np.int64, places),  # payloads that were accepted although they are incomplete or mixed
        "slowest_ns": (np.int64, places),  # the longest that one operation of a survivor took
        **fields,
    }


def phase_of(board: Segment, place: int = VICTIM) -> Any:
    """The phase of one process, to be written as ``phase[...] = b"reads"``."""
    return board["phase"][place : place + 1]


def begin(board: Segment, place: int | None = None) -> None:
    """Called by a life when its preparations are done."""
    if place is not None:
        phase_of(board, place)[...] = b"begun"
    board.signal("ready").add()


def begin_together(board: Segment) -> None:
    """As ``begin``, and wait until the test releases all processes that it has forked."""
    begin(board)
    board.signal("go").wait(1)


# -------------------------------------------------------------------------------- the template: runs in its own process

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(line: Connection) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the template must have one thread to fork safely, found {threads}"
    gc.collect()
    gc.freeze()
    answers: dict[str, Callable[..., object]] = {
        "fork": partial(_fork, line),
        "reap": _reap,
        "reap_all": _reap_all,
        "changes": _changes,
        "send_signal": _send_signal,
        "kill_all": _kill_all,
    }
    while True:
        try:
            request, *arguments = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        line.send(answers[request](*arguments))


def _fork(line: Connection, life: bytes) -> int:
    """Only the child unpickles its arguments: the template never holds a segment."""
    return os.fork() or _live(line, life)


def _live(line: Connection, life: bytes) -> NoReturn:
    code = 1
    try:
        line.close()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the whole test run is killed, no process stays behind
        function, arguments = pickle.loads(life)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _reap(pid: int, seconds: float) -> int | None:
    """The exit code of a child (negative: the signal), or None if it still runs."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(seconds * 1000)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


def _reap_all(seconds: float) -> tuple[dict[int, int], int | None]:
    """The exit codes of all children and orphans, and when the last one had ended; None if some still run.

    Counts its own polls, not the clock: that jumps when a virtual machine is paused, and no process can end then.
    """
    exit_codes: dict[int, int] = {}
    polls = 0
    while polls < seconds * 1000:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_codes, time.monotonic_ns()
        if pid:
            exit_codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            polls += 1
            time.sleep(0.001)
    return exit_codes, None


def _changes() -> list[tuple[int, int | None]]:
    """The children that have ended since the last call, with their exit codes, and those that stopped, with None."""
    changes: list[tuple[int, int | None]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return changes
        if not pid:
            return changes
        changes.append((pid, None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)))


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_all() -> None:
    """End whatever a failed test has left, so that the next test begins alone."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not children:
            return


# ------------------------------------------------------------------------------------------ the template, from the test


class Template:
    """The process that forks on request. Segments with a name are made in ``shm_dir`` there, if it is given.

    ``prefix`` is a command that starts it: ``unshare`` with arguments puts it, and what it forks, into namespaces. In a
    pid namespace of its own, the pids are those of that namespace.
    """

    def __init__(self, shm_dir: Path | None = None, prefix: Collection[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # with threads it could not fork safely
        if shm_dir is not None:
            environment["MEMLANE_SHM_DIR"] = str(shm_dir)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.support.kills", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._line = Connection(ours.detach())
        # Opens the one descriptor that stands for all dead peers, so that counts of descriptors hold.
        Peer(1, 0).fileno()

    def _ask(self, *request: Any) -> Any:
        self._line.send_bytes(pickle.dumps(request))
        if not self._line.poll(PATIENCE) and not self._line.poll(PATIENCE):  # twice: the machine may have been paused
            raise TimeoutError(f"no answer from the template to {request[0]}")
        return self._line.recv()

    def fork(self, life: Life, *arguments: Any) -> int:
        """Run ``life`` in a new process; return its pid."""
        pid: int = self._ask("fork", pickle.dumps((life, arguments)))
        return pid

    def reap(self, pid: int) -> int | None:
        """Wait for a process; return its exit code (negative: the signal), or None if it still runs."""
        exit_code: int | None = self._ask("reap", pid, PATIENCE)
        return exit_code

    def reap_all(self, seconds: float) -> tuple[dict[int, int], int | None]:
        """The exit codes of all processes and of their orphans, and when the last had ended; None if some still run."""
        exit_codes, ended_ns = self._ask("reap_all", seconds)
        return exit_codes, ended_ns

    def changes(self) -> list[tuple[int, int | None]]:
        """Pid and exit code of each process that has ended since the last call, or None if it was stopped."""
        changes: list[tuple[int, int | None]] = self._ask("changes")
        return changes

    def send_signal(self, pid: int, number: int) -> None:
        """Send a signal to a process, if it has not ended. Also right if the template has its own pid namespace."""
        self._ask("send_signal", pid, number)

    def kill_all(self) -> None:
        self._ask("kill_all")

    def close(self) -> None:
        self._line.close()
        assert self._process.wait(PATIENCE) == 0


# ---------------------------------------------------------------------------------------------- the processes of a test


@dataclass(eq=False)
class Process:
    """A process that the template forked."""

    peer: Peer
    killed_ns: int = 0
    phase: str = ""
    """What it did when it was killed."""
    reaped: bool = False

    @property
    def pid(self) -> int:
        return self.peer.pid


class Processes:
    """The forked processes of one test, and the board that they share with it."""

    def __init__(self, template: Template, layout: Any, name: str | None = None) -> None:
        self.template = template
        self.board = Segment.create(layout, name=name)
        self.unreaped: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.board.close()
        self.template.kill_all()
        for process in self.unreaped:
            process.peer.close()

    def fork(self, life: Life, *arguments: Any) -> Process:
        process = Process(Peer.of(self.template.fork(life, self.board, *arguments), life.__name__))
        self.unreaped.append(process)
        return process

    def start(self, life: Life, *arguments: Any) -> Process:
        """Fork a process and wait until it has begun."""
        ready = self.board.signal("ready")
        awaited = ready.value + 1
        process = self.fork(life, *arguments)
        ready.wait(awaited, timeout=PATIENCE, peers=[process.peer])
        return process

    def go(self) -> None:
        """Release the forked processes together."""
        peers = [process.peer for process in self.unreaped]
        self.board.signal("ready").wait(len(peers), timeout=PATIENCE, peers=peers)
        self.board.signal("go").store(1)

    def reap(self, process: Process) -> int | None:
        """Wait for the end of a process; return its exit code, or None if it still runs."""
        exit_code = self.template.reap(process.pid)
        if exit_code is not None:
            process.reaped = True
            process.peer.close()
            self.unreaped.remove(process)
        return exit_code

    def stop(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        self.wait_for_state(process, "T")

    def resume(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGCONT)

    def wait_for_state(self, process: Process, states: str) -> str:
        """Wait until a process is in one of these states; see `state_of`."""
        deadline = time.monotonic() + PATIENCE
        while (state := state_of(process.pid)) not in states:
            assert time.monotonic() < deadline, f"{process.peer} is in state {state}, expected one of {states}"
            time.sleep(0.0005)
        return state

    def join(self, *processes: Process) -> None:
        """Tell these processes, or all, to return, and wait until they have."""
        self.board.signal("end").store(1)
        for process in processes or tuple(self.unreaped):
            exit_code = self.reap(process)
            assert exit_code == 0, f"{process.peer} was to return, found exit code {exit_code}"


class Kills(Processes):
    """The kills of one test: starts victims and survivors, kills, and accounts for every kill."""

    least_phases = 1
    """How many phases ten kills or more must have hit."""

    def __init__(self, template: Template, layout: Any, test: str, scale: int) -> None:
        super().__init__(template, layout)
        seed = kill_seed()
        self.random = random.Random(f"{seed} {test}")
        self.scale = scale
        self.kills = 0
        self.hits: Counter[str] = Counter()
        """Kills that the kernel confirmed, by the phase that they hit."""
        self._waits_ns: list[int] = []

    # ------------------------------------------------------------------------------------------------------------ loop

    def rounds(self, count: int, *, must_hit: Collection[str] = (), wipe: bool = True) -> Iterator[int]:
        """Yield ``count`` times the scale; each round must kill a process. The board is wiped before each.

        Goes on until some kill has hit a phase with each of the words ``must_hit`` in its name: where a kill lands is
        chance, and on a busy machine it may be the same phase many times.
        """
        rounds = count * self.scale
        for number in range(MOST_ROUNDS * rounds):
            if number >= rounds and not self._missed(must_hit):
                return
            before = self.hits.total()
            if wipe:
                self.wipe_board()
            yield number
            assert self.hits.total() > before, "a round must kill a process and reap it"
        missed = self._missed(must_hit)
        assert not missed, f"{self.hits.total()} kills hit {dict(self.hits)}, but not {missed}"

    def _missed(self, must_hit: Collection[str]) -> list[str]:
        missed = [words for words in must_hit if not any(words in phase for phase in self.hits)]
        if self.hits.total() >= 10 and len(self.hits) < self.least_phases:
            missed.append(f"{self.least_phases} phases")
        return missed

    def wipe_board(self, keep: Collection[str] = ()) -> None:
        """Set everything but the signals ``keep`` to zero."""
        for name, view in self.board.views().items():
            if view.dtype != SIGNAL:
                view[...] = np.zeros((), view.dtype)
            elif name not in keep:
                view["value"] = 0
        phase_of(self.board)[...] = b"not begun"

    def seed(self) -> int:
        return self.random.randrange(2**32)

    def delay(self, longest: float = LONGEST_DELAY) -> float:
        return self.random.uniform(0, longest)

    def sleep(self, longest: float = LONGEST_DELAY) -> None:
        """Sleep for a random time."""
        time.sleep(self.delay(longest))

    def start(self, life: Life, *arguments: Any, early: float = 0.0) -> Process:
        """Fork a process and wait until it has begun; with the probability ``early`` do not wait."""
        if self.random.random() < early:
            return self.fork(life, *arguments)
        return super().start(life, *arguments)

    def kill(self, victim: Process, *, look: bool = False, detail: Callable[[Peer], str] | None = None) -> None:
        """Send SIGKILL. Half of the victims are reaped at once, the others stay zombies until ``confirm``.

        ``look`` adds to the phase whether the victim ran or slept; ``detail`` adds what the shared memory shows.
        """
        state = f" ({state_of(victim.pid)})" if look else ""
        victim.killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        self.kills += 1
        assert victim.peer.wait(PATIENCE)
        victim.phase = self.board["phase"][VICTIM].decode() + state
        if detail is not None:
            victim.phase += detail(victim.peer)
        if self.random.random() < 0.5:
            self.confirm(victim)

    def confirm(self, victim: Process) -> None:
        """Reap a victim, if that has not been done, and count the kill."""
        if victim.reaped:
            return
        exit_code = self.reap(victim)
        assert exit_code == -signal.SIGKILL, f"died in {victim.phase!r} with {exit_code}, expected SIGKILL"
        self.hits[victim.phase] += 1

    def killed_itself(self, victim: Process) -> bool:
        """Wait for a victim that kills itself at some system call; whether it came that far."""
        exit_code = self.reap(victim)
        assert exit_code in (0, -signal.SIGKILL)
        if exit_code != 0:
            self.hits[self.board["phase"][VICTIM].decode()] += 1
        return bool(exit_code)

    # -------------------------------------------------------------------------------------------------------- promises

    def note_wait(self, begin_ns: int, end_ns: int | None = None) -> None:
        """Note something that is promised to take a second at most, from then until then, or until now."""
        self._waits_ns.append((time.monotonic_ns() if end_ns is None else end_ns) - begin_ns)

    @contextmanager
    def promptly(self) -> Iterator[None]:
        """As ``note_wait``, for what happens inside the block."""
        begin_ns = time.monotonic_ns()
        yield
        self.note_wait(begin_ns)

    def expect_progress(self, *places: int) -> None:
        """Each of these survivors must do something more, as promised within a second."""
        progress = [self.board.signal("progress", place) for place in places]
        with self.promptly():
            for signal_, value in [(signal_, signal_.value) for signal_ in progress]:
                signal_.wait(value + 2, timeout=PATIENCE)  # the second one was begun after the kill

    def expect_promises_kept(self) -> None:
        """One wait in a hundred may be longer: a busy machine sometimes gives a process no core for a second."""
        longest_ns = within(PROMISE) * 1e9
        late = sorted((wait_ns for wait_ns in self._waits_ns if wait_ns >= longest_ns), reverse=True)
        assert len(late) <= 1 + len(self._waits_ns) // 100, f"waits of {late} ns, {len(self._waits_ns)} in all"

    # ------------------------------------------------------------------------------------------------------ accounting

    def expect_kills_confirmed(self) -> None:
        """Every kill was confirmed by the kernel, and the kills hit different phases."""
        print(f"{self.hits.total()} kills")
        for phase, count in self.hits.most_common():
            print(f"    {count:5} {phase}")
        assert self.hits.total() >= self.kills
        assert not self._missed(())

    def expect_no_process_left(self) -> None:
        exit_codes, ended_ns = self.template.reap_all(1.0)
        assert ended_ns is not None, "processes left running"
        assert exit_codes == {}, f"processes that the test did not wait for: {exit_codes}"


KillsT = TypeVar("KillsT", bound=Kills)


@contextmanager
def accounted(make: Callable[[], KillsT], folder: Path, request: pytest.FixtureRequest) -> Iterator[KillsT]:
    """The kills of one test, and what every one of them must leave: no process, no name, no descriptor, kept promises.

    A test that failed has left things behind and said so: then the template only cleans up, so that one failure does
    not become that of every later test.
    """
    descriptors = len(os.listdir("/proc/self/fd"))
    failures = request.session.testsfailed
    try:
        with make() as kills:
            yield kills
            kills.board.close()
            if request.session.testsfailed == failures:
                kills.expect_no_process_left()
                names = [entry.name for entry in folder.iterdir()]
                assert not names, f"names left behind: {names}"
                kills.expect_promises_kept()
                kills.expect_kills_confirmed()
                assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors left open"
    finally:
        for entry in folder.iterdir():
            entry.unlink()


def kill_seed() -> int:
    """The seed of a test's random instants: MEMLANE_KILL_SEED repeats a run, as far as timing can be repeated."""
    seed = int(os.environ.get("MEMLANE_KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"MEMLANE_KILL_SEED={seed}")
    return seed


def scales(soak: int, **timeout: Any) -> list[Any]:
    """Parameters of a ``scale`` fixture: a test repeats its work ``soak`` times in `make soak`.

    They have the timeouts, too: one at the test itself would be the closer mark and hold for both.
    """
    marks = [pytest.mark.soak, pytest.mark.timeout(900, **timeout)]
    return [
        pytest.param(1, id="short", marks=pytest.mark.timeout(600, **timeout)),
        pytest.param(soak, id="soak", marks=marks),
    ]


if __name__ == "__main__":
    for _name in LIVES:
        importlib.import_module(_name)
    _serve(Connection(int(sys.argv[1])))
