"""The processes that test_kills.py kills, those that must survive it, and the template that forks them all.

Run as a program, this is the template: one warm interpreter that forks a process per request. A fork costs a
millisecond, an interpreter with numpy a hundred, and only a process without threads can fork safely: pytest has some.
Requests and answers travel over a socket whose number is the only argument. The template adopts orphans, so "nobody is
left" is exactly "the template has no children".

What the processes share with the test is the board, a segment: the phase that a victim is in, and what a survivor saw.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import numpy as np

from memlane.core import SIGNAL, Layout, Peer, PeerDied, Segment, Signal, die_with, names, reclaim

SURVIVORS = 3
PAYLOAD = 8192  # int64 numbers, 64 KB: long enough for kills to land inside
END = 2**40  # a change to this value tells the survivors to go home

BOARD = Layout(
    {
        "phase": ("S64", ()),  # what the victim does just now
        "at_stake": (np.int64, ()),  # bytes of segments that the victim has made or is making
        "ready": (SIGNAL, ()),  # counts the processes that have begun
        "go": (SIGNAL, ()),
        "change": (SIGNAL, ()),
        "echo": (SIGNAL, SURVIVORS),
        "ended": (SIGNAL, ()),  # counts the survivors that have come to their end
        "ended_ns": (np.int64, SURVIVORS),
        "outcome": ("S32", SURVIVORS),
        "seen": (np.int64, SURVIVORS),  # the last number that a survivor accepted
        "accepted": (np.int64, SURVIVORS),
        "torn": (np.int64, SURVIVORS + 1),  # accepted although not whole; the last entry is the victim's
        "parcel": (np.uint8, 1024),
        "parcel_number": (np.int64, 1),
    }
)

LANE = Layout(
    {
        "buffers": (np.int64, (2, PAYLOAD)),
        "sums": (np.int64, 2),
        "claims": (np.int64, 2),  # the number that a buffer holds; negative while it is overwritten
        "version": (SIGNAL, ()),
    }
)


def checksum(number: int) -> int:
    return number * 0x9E3779B1 % 2**61


# ------------------------------------------------------------------------------------------------------ the template

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINE: Connection


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def serve() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the template must have one thread to fork safely, found {threads}"
    gc.collect()
    gc.freeze()
    while True:
        try:
            request, *arguments = pickle.loads(LINE.recv_bytes())
        except EOFError:
            return
        LINE.send(ANSWERS[request](*arguments))


def fork(life: bytes) -> int:
    """Only the child unpickles its arguments: the template never holds a segment."""
    return os.fork() or live(life)


def live(life: bytes) -> NoReturn:
    code = 1
    try:
        LINE.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the whole test run is killed, nobody stays behind
        name, arguments = pickle.loads(life)
        globals()[name](*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def reap(pid: int, seconds: float) -> int | None:
    """How a child ended (negative: the signal), or None if it has not."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(seconds * 1000)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


def reap_all(seconds: float) -> tuple[dict[int, int], int | None]:
    """How each child and each orphan ended, and when the last one was gone; None if some are left.

    Counts its own looks, not the clock: that jumps when a virtual machine is paused, and nobody could die meanwhile.
    """
    ends: dict[int, int] = {}
    looks = 0
    while looks < seconds * 1000:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ends, time.monotonic_ns()
        if pid:
            ends[pid] = os.waitstatus_to_exitcode(status)
        else:
            looks += 1
            time.sleep(0.001)
    return ends, None


def kill_all() -> None:
    """After a failed test: whoever is left, so that the next test begins alone."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not children:
            return


ANSWERS: dict[str, Callable[..., object]] = {"fork": fork, "reap": reap, "reap_all": reap_all, "kill_all": kill_all}


# ------------------------------------------------------------------------------------------------------------ phases


def begin(board: Segment, *, victim: bool = False) -> None:
    if victim:
        board["phase"][...] = b"begun"
    board.signal("ready").add()


def note_phases(board: Segment, halt_at: int = -1, by: int = signal.SIGKILL) -> None:
    """From here on the board names the last function that memlane entered and the system call that it made there.
    At the start or end of the call number ``halt_at`` the process gets the signal ``by``."""
    place = board["phase"]
    calls = itertools.count()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if not frame.f_globals.get("__name__", "").startswith("memlane."):
            return
        if event == "call":
            place[...] = frame.f_code.co_qualname.encode()
        elif event in ("c_call", "c_return") and arg.__module__ in ("posix", "fcntl"):
            after = "after " if event == "c_return" else ""
            place[...] = f"{frame.f_code.co_qualname}: {after}{arg.__name__}".encode()
            if next(calls) == halt_at:
                os.kill(os.getpid(), by)

    sys.setprofile(note)


@contextmanager
def report(board: Segment, place: int) -> Iterator[None]:
    """Says on the board how a survivor's waiting ended, and when."""
    outcome = "returned"
    try:
        yield
    except Exception as error:
        outcome = type(error).__name__
        if not isinstance(error, PeerDied):
            raise
    finally:
        board["ended_ns"][place] = time.monotonic_ns()
        board["outcome"][place] = outcome.encode()
        board.signal("ended").add()


def work(seconds: float) -> None:
    """Not a sleep: on a busy machine the victim would spend its life waiting to wake up, and die in no other phase."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


# ----------------------------------------------------------------------------------------------- making and finding

Kind = Literal["anonymous", "named", "file"]


def without_tmpfile() -> None:
    """As on a file system without O_TMPFILE: opening a directory for writing is refused, so files begin hidden."""
    os.O_TMPFILE = 0  # type: ignore[misc]


def make_and_unmake(kind: Kind, name: str, folder: Path, nbytes: int) -> None:
    layout = {"x": (np.uint8, nbytes)}
    match kind:
        case "anonymous":
            segment = Segment.create(layout)
        case "named":
            segment = Segment.create(layout, name=name)
        case "file":
            segment = Segment.create(layout, file=folder / name)
            segment.unlink()
    segment.close()


def create_and_close(board: Segment, kind: Kind, tmpfile: bool, name: str, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    if not tmpfile:
        without_tmpfile()
    note_phases(board)
    begin(board, victim=True)
    while True:
        nbytes = chance.choice([2**12, 2**20, 2**23, 2**24])
        board["at_stake"][...] = nbytes
        make_and_unmake(kind, name, folder, nbytes)
        board["at_stake"][...] = 0


def create_until(board: Segment, halt_at: int, kind: Kind, tmpfile: bool, name: str, folder: Path) -> None:
    """Makes and closes one segment; kills itself on the way, or returns if there were not that many calls."""
    if not tmpfile:
        without_tmpfile()
    note_phases(board, halt_at)
    make_and_unmake(kind, name, folder, 4096)


def reclaim_until(board: Segment, halt_at: int, by: int) -> None:
    note_phases(board, halt_at, by)
    reclaim()


def attach_and_close(board: Segment, name: str, number: int) -> None:
    note_phases(board)
    begin(board, victim=True)
    for turn in itertools.count():
        segment = Segment.attach(name, writeable=turn % 2 == 0)
        board["torn"][SURVIVORS] += int((segment["x"] != number).any())
        segment.close()


def hand_over(board: Segment) -> None:
    """Makes anonymous segments, each full of its number, and lays their pickles on the board."""
    parcel, number_word = board["parcel"], board.words("parcel_number")
    note_phases(board)
    begin(board, victim=True)
    for number in itertools.count(1):
        with Segment.create({"x": (np.int64, PAYLOAD)}) as segment:
            segment["x"][:] = number
            data = pickle.dumps(segment)
            number_word.compare_and_swap(0, number_word.load(0), -number)
            parcel[: len(data)] = np.frombuffer(data, np.uint8)
            number_word.store(0, number)
            board["phase"][...] = b"holds"
            work(0.0003)  # time to fetch it


def make_and_close(board: Segment, names_: list[str], nbytes: int, unlink: bool) -> None:
    """Makes all of them, waits until the survivors have attached, and closes one after the other."""
    segments = []
    for number, name in enumerate(names_, 1):
        segment = Segment.create({"x": (np.uint8, nbytes)}, name=name)
        segment["x"][:] = number
        segments.append(segment)
    board["at_stake"][...] = nbytes * len(segments)
    note_phases(board)
    begin(board, victim=True)
    board.signal("go").wait(1)
    for segment in segments:
        if unlink:
            segment.unlink()
        segment.close()
        board["at_stake"][...] -= nbytes
    board["phase"][...] = b"all closed"
    signal.pause()


def leave_corpses(board: Segment, names_: list[str], unborn: int) -> None:
    """Makes segments to be killed with: finished ones, and some that were begun where there is no O_TMPFILE."""
    kept: list[object] = [Segment.create({"x": (np.uint8, 4096)}, name=name) for name in names_]
    without_tmpfile()
    kept += [names.open_unnamed(names.directory()) for _ in range(unborn)]
    begin(board, victim=True)
    signal.pause()
    del kept


def reclaim_all(board: Segment) -> None:
    note_phases(board)
    begin(board, victim=True)
    reclaim()
    board["phase"][...] = b"all reclaimed"
    signal.pause()


def create_once(board: Segment, place: int, name: str) -> None:
    with report(board, place):
        begin(board)
        Segment.create({"x": (np.uint8, 4096)}, name=name).close()


def contend(board: Segment, place: int, name: str) -> None:
    """One of several that want the same name; a survivor counts its successes until it is told to go home."""
    change = board.signal("change")
    if place == SURVIVORS:
        note_phases(board)
    begin(board, victim=place == SURVIVORS)
    while change.value < END:
        with suppress(FileExistsError):
            segment = Segment.create({"x": (np.uint8, 4096)}, name=name)
            if place < SURVIVORS:
                board["accepted"][place] += 1
            segment.close()


# ------------------------------------------------------------------------------------------------ writing and waiting


def publish(board: Segment, lane: Segment, seed: int) -> None:
    """The writer of a lane of two buffers; goes on where the last one was killed."""
    chance = random.Random(seed)
    phase, buffers, sums = board["phase"], lane["buffers"], lane["sums"]
    claims, version = lane.words("claims"), lane.signal("version")
    parts = [np.split(buffer, 64) for buffer in buffers]  # as a real payload is: many stores, not one fast fill
    begin(board, victim=True)
    for number in itertools.count(version.value + 1):
        phase[...] = b"writes"
        place = number % 2
        claims.compare_and_swap(place, claims.load(place), -number)
        for part in parts[place]:
            part[:] = number
        sums[place] = checksum(number)
        claims.store(place, number)
        phase[...] = b"signals"
        version.store(number)
        if number % 64 == 0:
            phase[...] = b"works"
            work(chance.random() * 0.0002)  # lets the readers fall asleep now and then


def follow(board: Segment, place: int, lane: Segment, writer: Peer) -> None:
    """Reads whatever the writer publishes until it dies."""
    buffers, sums = lane["buffers"], lane["sums"]
    claims, version = lane.words("claims"), lane.signal("version")
    seen = version.value
    with report(board, place):
        begin(board)
        while True:
            number = version.wait(seen + 1, peers=[writer])
            claim = claims.load(number % 2)
            copy, total = buffers[number % 2].copy(), int(sums[number % 2])
            if claim < 0 or not claims.unchanged(number % 2, claim):
                continue  # overwritten meanwhile: there is something newer
            board["torn"][place] += int((copy != claim).any() or total != checksum(claim))
            board["accepted"][place] += 1
            board["seen"][place] = seen = claim


def echo(board: Segment, place: int, spin_limit_ns: int) -> None:
    """Answers every change."""
    change, answer = board.signal("change"), board.signal("echo", place)
    change.spin_limit_ns = spin_limit_ns
    seen = change.value
    begin(board)
    while seen < END:
        seen = change.wait(seen + 1)
        answer.store(seen)


def wait_for_changes(board: Segment, place: int, seed: int) -> None:
    """Waits in turns with and without spinning."""
    chance = random.Random(seed)
    phase = board["phase"]
    sleeper, spinner = board.signal("change"), board.signal("change")
    sleeper.spin_limit_ns, spinner.spin_limit_ns = 0, 3_000_000
    answer = board.signal("echo", place)
    seen = sleeper.value
    begin(board, victim=True)
    for turn in itertools.count():
        how: Signal = (sleeper, spinner)[turn % 2]
        phase[...] = (b"waits asleep", b"waits spinning")[turn % 2]
        seen = how.wait(seen + 1)
        phase[...] = b"answers"
        answer.store(seen)
        phase[...] = b"works"
        work(chance.random() * 0.003)


def signal_fast(board: Segment, seed: int) -> None:
    chance = random.Random(seed)
    phase, change = board["phase"], board.signal("change")
    begin(board, victim=True)
    while True:
        for _ in range(chance.randrange(300)):
            phase[...] = b"adds"
            value = change.add()
            phase[...] = b"stores"
            change.store(value + 1)
            phase[...] = b"swaps"
            change.compare_and_swap(value + 1, value + 2)
        phase[...] = b"works"
        work(chance.random() * 0.0002)


def wait_for_death(board: Segment, place: int, victim: Peer) -> None:
    """The first survivor waits for each change, the others for one that never comes."""
    change = board.signal("change")
    change.spin_limit_ns = (change.spin_limit_ns, change.spin_limit_ns, 0)[place]
    seen = change.value
    with report(board, place):
        begin(board)
        while True:
            board["seen"][place] = seen = change.wait(seen + 1 if place == 0 else END, peers=[victim])


# ------------------------------------------------------------------------------------------------------------ parents


def have_children(board: Segment, count: int, stubborn: bool) -> None:
    """A process with children that are to die with it. Stubborn ones do not listen to SIGTERM."""
    me = Peer.current("parent")
    begin(board, victim=True)
    for number in range(count):
        board["phase"][...] = f"forks child {number}".encode()
        if os.fork() == 0:
            try:
                be_child(board, number, me, stubborn)
            finally:
                os._exit(1)
    signal.pause()


def be_child(board: Segment, number: int, parent: Peer, stubborn: bool) -> None:
    phase = board["phase"]
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    phase[...] = f"child {number} ties its life".encode()
    die_with(parent)
    phase[...] = f"child {number} lives".encode()
    match number % 3:
        case 0:
            while True:
                signal.pause()
        case 1:
            board.signal("change").wait(END)
        case 2:
            while True:
                pass


if __name__ == "__main__":
    LINE = Connection(int(sys.argv[1]))
    serve()
