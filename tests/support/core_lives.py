"""What the processes of core/test_kills.py do: the victims that are killed, and the survivors beside them."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

from memlane.core import SIGNAL, Layout, Peer, PeerDied, Segment, Signal, die_with, names, reclaim
from tests.support.kills import PLACES, VICTIM, begin, board_layout, phase_of

PAYLOAD = 8192  # int64 integers, 64 KB: long enough for kills to land inside
END = 2**40  # a change to this value tells the survivors to return

BOARD = board_layout(
    at_stake=(np.int64, ()),  # bytes of segments that the victim has made or is making
    change=(SIGNAL, ()),
    echo=(SIGNAL, PLACES),
    ended=(SIGNAL, ()),  # counts the survivors whose wait has ended
    ended_ns=(np.int64, PLACES),
    outcome=("S32", PLACES),
    seen=(np.int64, PLACES),  # the last number that a survivor accepted
    accepted=(np.int64, PLACES),
    parcel=(np.uint8, 1024),
    parcel_number=(np.int64, 1),
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


# ------------------------------------------------------------------------------------------------------------ phases


def note_phases(board: Segment, halt_at: int = -1, by: int = signal.SIGKILL) -> None:
    """Note on the board the last function of memlane that was entered and the system call that it made there.

    At the start or end of the call number ``halt_at`` the process sends itself the signal ``by``.
    """
    phase = phase_of(board)
    calls = itertools.count()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if not frame.f_globals.get("__name__", "").startswith("memlane."):
            return
        if event == "call":
            phase[...] = frame.f_code.co_qualname.encode()
        elif event in ("c_call", "c_return") and arg.__module__ in ("posix", "fcntl"):
            after = "after " if event == "c_return" else ""
            phase[...] = f"{frame.f_code.co_qualname}: {after}{arg.__name__}".encode()
            if next(calls) == halt_at:
                os.kill(os.getpid(), by)

    sys.setprofile(note)


@contextmanager
def report(board: Segment, place: int) -> Iterator[None]:
    """Note on the board how a survivor's wait ended, and when."""
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
    """Keep the core busy. A victim that slept would, on a busy machine, be killed in no other phase."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


# ------------------------------------------------------------------------------------------------ making and finding

Kind = Literal["anonymous", "named", "file"]


def without_tmpfile() -> None:
    """Behave as on a file system without O_TMPFILE, where new files have a hidden name."""
    os.O_TMPFILE = 0  # type: ignore[misc]


def make_and_remove(kind: Kind, name: str, folder: Path, nbytes: int) -> None:
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
    begin(board, VICTIM)
    while True:
        nbytes = chance.choice([2**12, 2**20, 2**23, 2**24])
        board["at_stake"][...] = nbytes
        make_and_remove(kind, name, folder, nbytes)
        board["at_stake"][...] = 0


def create_until(board: Segment, halt_at: int, kind: Kind, tmpfile: bool, name: str, folder: Path) -> None:
    """Make and close one segment; kill itself at call ``halt_at``, or return if there were fewer calls."""
    if not tmpfile:
        without_tmpfile()
    note_phases(board, halt_at)
    make_and_remove(kind, name, folder, 4096)


def reclaim_until(board: Segment, halt_at: int, by: int) -> None:
    note_phases(board, halt_at, by)
    reclaim()


def attach_and_close(board: Segment, name: str, number: int) -> None:
    note_phases(board)
    begin(board, VICTIM)
    for turn in itertools.count():
        segment = Segment.attach(name, writeable=turn % 2 == 0)
        board["torn"][VICTIM] += int((segment["x"] != number).any())
        segment.close()


def hand_over(board: Segment) -> None:
    """Make anonymous segments, each full of its number, and put their pickles on the board."""
    parcel, number_word = board["parcel"], board.words("parcel_number")
    note_phases(board)
    begin(board, VICTIM)
    for number in itertools.count(1):
        with Segment.create({"x": (np.int64, PAYLOAD)}) as segment:
            segment["x"][:] = number
            data = pickle.dumps(segment)
            number_word.compare_and_swap(0, number_word.load(0), -number)
            parcel[: len(data)] = np.frombuffer(data, np.uint8)
            number_word.store(0, number)
            phase_of(board)[...] = b"holds"
            work(0.0003)  # time to fetch it


def make_and_close(board: Segment, names_: list[str], nbytes: int, unlink: bool) -> None:
    """Make all segments, wait until the survivors have attached, and close one after the other."""
    segments = []
    for number, name in enumerate(names_, 1):
        segment = Segment.create({"x": (np.uint8, nbytes)}, name=name)
        segment["x"][:] = number
        segments.append(segment)
    board["at_stake"][...] = nbytes * len(segments)
    note_phases(board)
    begin(board, VICTIM)
    board.signal("go").wait(1)
    for segment in segments:
        if unlink:
            segment.unlink()
        segment.close()
        board["at_stake"][...] -= nbytes
    phase_of(board)[...] = b"all closed"
    signal.pause()


def hold_segments(board: Segment, names_: list[str], unfinished: int) -> None:
    """Hold finished segments, and unfinished ones as they are where there is no O_TMPFILE, until killed."""
    kept: list[object] = [Segment.create({"x": (np.uint8, 4096)}, name=name) for name in names_]
    without_tmpfile()
    kept += [names.open_unnamed(names.directory()) for _ in range(unfinished)]
    begin(board, VICTIM)
    signal.pause()
    del kept


def reclaim_all(board: Segment) -> None:
    note_phases(board)
    begin(board, VICTIM)
    reclaim()
    phase_of(board)[...] = b"all reclaimed"
    signal.pause()


def create_once(board: Segment, place: int, name: str) -> None:
    with report(board, place):
        begin(board)
        Segment.create({"x": (np.uint8, 4096)}, name=name).close()


def contend(board: Segment, place: int, name: str) -> None:
    """Make segments of the same name as other processes; a survivor counts its successes until END."""
    change = board.signal("change")
    if place == VICTIM:
        note_phases(board)
    begin(board, place)
    while change.value < END:
        with suppress(FileExistsError):
            segment = Segment.create({"x": (np.uint8, 4096)}, name=name)
            if place != VICTIM:
                board["accepted"][place] += 1
            segment.close()


# ------------------------------------------------------------------------------------------------ writing and waiting


def publish(board: Segment, lane: Segment, seed: int) -> None:
    """Write a lane of two buffers, from where the last writer was killed."""
    chance = random.Random(seed)
    phase, buffers, sums = phase_of(board), lane["buffers"], lane["sums"]
    claims, version = lane.words("claims"), lane.signal("version")
    parts = [np.split(array, 64) for array in buffers]  # many stores, as a real payload takes, not one fast fill
    begin(board, VICTIM)
    for number in itertools.count(version.value + 1):
        phase[...] = b"writes"
        buffer = number % 2
        claims.compare_and_swap(buffer, claims.load(buffer), -number)
        for part in parts[buffer]:
            part[:] = number
        sums[buffer] = checksum(number)
        claims.store(buffer, number)
        phase[...] = b"signals"
        version.store(number)
        if number % 64 == 0:
            phase[...] = b"works"
            work(chance.random() * 0.0002)  # lets the readers fall asleep now and then


def follow(board: Segment, place: int, lane: Segment, writer: Peer) -> None:
    """Read what the writer publishes until it dies."""
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
                continue  # overwritten meanwhile: there is a newer number
            board["torn"][place] += int((copy != claim).any() or total != checksum(claim))
            board["accepted"][place] += 1
            board["seen"][place] = seen = claim


def echo(board: Segment, place: int, spin_limit_ns: int) -> None:
    """Answer every change."""
    change, answer = board.signal("change"), board.signal("echo", place)
    change.spin_limit_ns = spin_limit_ns
    seen = change.value
    begin(board)
    while seen < END:
        seen = change.wait(seen + 1)
        answer.store(seen)


def wait_for_changes(board: Segment, seed: int) -> None:
    """Wait with and without spinning, in turns."""
    chance = random.Random(seed)
    phase = phase_of(board)
    sleeper, spinner = board.signal("change"), board.signal("change")
    sleeper.spin_limit_ns, spinner.spin_limit_ns = 0, 3_000_000
    answer = board.signal("echo", VICTIM)
    seen = sleeper.value
    begin(board, VICTIM)
    for turn in itertools.count():
        waiter: Signal = (sleeper, spinner)[turn % 2]
        phase[...] = (b"waits asleep", b"waits spinning")[turn % 2]
        seen = waiter.wait(seen + 1)
        phase[...] = b"answers"
        answer.store(seen)
        phase[...] = b"works"
        work(chance.random() * 0.003)


def signal_fast(board: Segment, seed: int) -> None:
    chance = random.Random(seed)
    phase, change = phase_of(board), board.signal("change")
    begin(board, VICTIM)
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
    """The first survivor waits for each change, the others for one that never happens."""
    change = board.signal("change")
    change.spin_limit_ns = (change.spin_limit_ns, change.spin_limit_ns, 0)[place - 1]
    seen = change.value
    with report(board, place):
        begin(board)
        while True:
            board["seen"][place] = seen = change.wait(seen + 1 if place == 1 else END, peers=[victim])


# ------------------------------------------------------------------------------------------------------------ parents


def have_children(board: Segment, count: int, stubborn: bool) -> None:
    """Fork children that are to die with this process. Stubborn ones ignore SIGTERM."""
    me = Peer.current("parent")
    begin(board, VICTIM)
    for number in range(count):
        phase_of(board)[...] = f"forks child {number}".encode()
        if os.fork() == 0:
            try:
                be_child(board, number, me, stubborn)
            finally:
                os._exit(1)
    signal.pause()


def be_child(board: Segment, number: int, parent: Peer, stubborn: bool) -> None:
    phase = phase_of(board)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    phase[...] = f"child {number} calls die_with".encode()
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
