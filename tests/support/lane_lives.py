"""What the processes of the kill and race tests of the lanes do: victims, survivors and racers."""

from __future__ import annotations

import itertools
import random
import signal
import time
from contextlib import suppress
from typing import Any

import numpy as np

from memlane.core import SIGNAL, Segment, WaitTimeout
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.lanes.ring import Ring, Writer
from memlane.lanes.stats import Stats
from memlane.lanes.weights import Weights
from tests.support import lanes as lane_support
from tests.support.kills import PLACES, begin, begin_together, board_layout, phase_of
from tests.support.payloads import Payload, fill, whole

LATEST = 2**15
"""The numbers of a writer are smaller: those that were seen must fit on the board."""

BOARD = board_layout(
    disorder=(np.int64, PLACES),
    committed=(np.int64, PLACES),  # the last number that a writer knows to be committed
    begun=(np.int64, PLACES),  # the last number that a writer began to write
    seen=(bool, (PLACES, PLACES, LATEST)),  # by reader and writer: the numbers that a reader has read
)


# ----------------------------------------------------------------------------------------------------------- one call


def claim_and_die(ring: Ring) -> None:
    _slot = ring.writer(9).claim(timeout=0)
    lane_support.die()


def take_and_die(ring: Ring) -> None:
    _slot = ring.reader().take(timeout=0)
    lane_support.die()


# -------------------------------------------------------------------------------------------------------- ring: victims


def write_slots(board: Segment, place: int, ring: Ring, seed: int) -> None:
    """Write as fast as possible, in place or by copy. On the board, ``begun`` is the last number that may be committed,
    ``committed`` the last one that is."""
    chance = random.Random(seed)
    phase, begun, committed = phase_of(board, place), board["begun"], board["committed"]
    writer, payload = ring.writer(place), Payload()
    begin(board)
    for number in range(1, LATEST):
        if chance.random() < 0.5:
            phase[...] = b"claims"
            with writer.claim() as slot:
                begun[place] = number
                phase[...] = b"writes"
                for part in np.split(slot["body"], 64):  # many stores, so that kills land between them
                    part[:] = -number
                fill(slot, number, place)
                phase[...] = b"commits"
                slot.commit(policy_version=number)
        else:
            payload.fill(number, place)
            begun[place] = number
            phase[...] = b"puts"
            writer.put(payload.arrays, policy_version=number)
        committed[place] = number
        phase[...] = b"rests"
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.0003)
    signal.pause()


def read_slots(board: Segment, place: int, ring: Ring) -> None:
    """Read as fast as possible. A number is noted as seen before its slot is released: then the slot may be offered
    again. A number that is not noted must be offered again."""
    phase, torn, reader = phase_of(board, place), board["torn"], ring.reader()
    begin(board)
    while True:
        phase[...] = b"takes"
        with reader.take() as slot:
            phase[...] = b"reads"
            for _ in range(8):  # long enough for kills to land inside
                torn[place] += not whole(slot)
            note(board, place, slot)
            phase[...] = b"releases"


def note(board: Segment, place: int, slot: Any) -> None:
    board["seen"][place, int(slot["writer"]), int(slot["number"])] = True


# ------------------------------------------------------------------------------------------------------ ring: survivors


def survive_writing(board: Segment, place: int, ring: Ring, pause: float = 0.0) -> None:
    """Write until the test ends it; note how long the slowest write took."""
    payload, writer = Payload(), ring.writer(place)
    progress, end, slowest_ns = board.signal("progress", place), board.signal("end"), board["slowest_ns"]
    begin(board)
    for number in range(1, LATEST):
        payload.fill(number, place)
        before = time.monotonic_ns()
        board["begun"][place] = number
        while not put(writer, payload, number):
            if end.value:
                return
        slowest_ns[place] = max(int(slowest_ns[place]), time.monotonic_ns() - before)
        board["committed"][place] = number
        progress.add()
        if end.value:
            return
        time.sleep(pause)
    end.wait(1)


def put(writer: Writer, payload: Payload, number: int) -> bool:
    try:
        writer.put(payload.arrays, policy_version=number, timeout=0.1)
    except WaitTimeout:
        return False
    return True


def survive_reading(board: Segment, place: int, ring: Ring, pause: float = 0.0) -> None:
    """Read until the test ends it. A number that was read before must not come again."""
    reader, read = ring.reader(), set()
    progress, end = board.signal("progress", place), board.signal("end")
    begin(board)
    while not end.value:
        with suppress(WaitTimeout), reader.take(timeout=0.1) as slot:
            board["torn"][place] += not whole(slot)
            number = int(slot["writer"]), int(slot["number"])
            board["disorder"][place] += number in read
            read.add(number)
            note(board, place, slot)
            progress.add()
            time.sleep(pause)


# -------------------------------------------------------------------------------------------------------------- weights

BODY = 2**16
"""Integers of a weight set, 512 KB: long enough for kills to land inside a copy."""


def publish_weights(board: Segment, place: int, weights: Weights) -> None:
    phase, payload = phase_of(board, place), Payload(BODY)
    begin(board)
    for number in itertools.count(1):
        if number % 8 == 1:  # filling takes longer than publishing, and is not what is to be killed
            phase[...] = b"fills"
            payload.fill(number, place)
        board["begun"][place] = number
        phase[...] = b"publishes"
        weights.publish(payload.arrays)
        board["committed"][place] = number


def survive_publishing(board: Segment, place: int, weights: Weights) -> None:
    payload = Payload(BODY)
    progress, end, slowest_ns = board.signal("progress", place), board.signal("end"), board["slowest_ns"]
    begin(board)
    for number in itertools.count(1):
        payload.fill(number, place)
        board["begun"][place] = number
        before = time.monotonic_ns()
        weights.publish(payload.arrays)
        slowest_ns[place] = max(int(slowest_ns[place]), time.monotonic_ns() - before)
        board["committed"][place] = number
        progress.add()
        if end.value:
            return


def read_weights(board: Segment, place: int, weights: Weights, waits: bool) -> None:
    """Read until the test ends it: only complete weights, and never an older version after a newer one."""
    out, last = Payload(BODY).arrays, 0
    progress, end, phase = board.signal("progress", place), board.signal("end"), phase_of(board, place)
    begin(board)
    while not end.value:
        if waits:
            phase[...] = b"waits for a version"
            try:
                weights.wait_for(last + 1, timeout=0.1)
            except WaitTimeout:
                continue
        phase[...] = b"reads"
        version, _ = weights.read(out)
        phase[...] = b"checks"
        if version != last:
            board["torn"][place] += not whole(out)
            board["disorder"][place] += version < last
            last = version
            progress.add()


# ----------------------------------------------------------------------------------------------------------- statistics


def count_up(board: Segment, place: int, stats: Stats) -> None:
    """Count one vector at a time; note how many were begun and how many are certain."""
    collector = stats.collector()
    begin(board)
    for number in itertools.count(int(collector.moments.count) + 1):
        board["begun"][place] = number
        phase_of(board, place)[...] = b"adds"
        collector.add(np.full((1, 2), float(number)))
        board["committed"][place] = number


# ---------------------------------------------------------------------------------------------------------------- races


def race_board(readers: int, most: int) -> dict[str, Any]:
    """The board of a race: what each reader got, in its order, as writer << 32 | number."""
    return board_layout(
        written=(SIGNAL, ()),  # counts the writers that have finished
        got=(np.int64, (readers, most)),
        count=(np.int64, readers),
        mismatched=(np.int64, readers),
    )


def race_to_write(race: Segment, place: int, ring: Ring, count: int, body: int, pause: float, by_copy: bool) -> None:
    writer, payload = ring.writer(place), Payload(body)
    begin_together(race)
    for number in range(1, count + 1):
        if by_copy:
            writer.put(payload.fill(number, place), policy_version=number)
        else:
            with writer.claim() as slot:
                fill(slot, number, place)
                slot.commit(policy_version=number)
        work(pause)
    race.signal("written").add()


def race_to_read(race: Segment, place: int, ring: Ring, writers: int, body: int, pause: float, by_copy: bool) -> None:
    """Read until all writers have finished and the ring is empty."""
    reader, out = ring.reader(), Payload(body).arrays
    got, written = race["got"][place], race.signal("written")
    count = torn = mismatched = 0
    begin_together(race)
    while True:
        finished = written.value == writers
        try:
            if by_copy:
                head, payload = reader.get(out, timeout=0.02), out
                slot = None
            else:
                slot = reader.take(timeout=0.02)
                head, payload = slot.head, slot
        except WaitTimeout:
            if finished:
                break
            continue
        writer, number = int(payload["writer"]), int(payload["number"])
        work(pause)  # in the middle of the reading
        torn += not whole(payload)
        mismatched += (head.writer, head.policy_version) != (writer, number)
        if slot is not None:
            slot.release()
        got[count] = writer << 32 | number
        count += 1
    race["count"][place], race["torn"][place], race["mismatched"][place] = count, torn, mismatched


def work(seconds: float) -> None:
    """Keep the core busy: a sleep of a few microseconds takes a hundred."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def race_to_publish(race: Segment, place: int, weights: Weights, count: int, body: int) -> None:
    """Publish as fast as possible, from two payloads that were filled before: only the copying is left."""
    payloads = [Payload(body).fill(number, place) for number in (1, 2)]
    begin_together(race)
    for number in range(count):
        weights.publish(payloads[number % 2])
    race.signal("written").add()


def race_to_follow(race: Segment, place: int, weights: Weights, writers: int, body: int, waits: bool) -> None:
    """Read the latest version until all writers have finished; note the versions."""
    out, written = Payload(body).arrays, race.signal("written")
    got = race["got"][place]
    count = torn = version = 0
    begin_together(race)
    while True:
        finished = written.value == writers
        if waits and not finished:
            with suppress(WaitTimeout):
                weights.wait_for(version + 1, timeout=0.02)
        latest, _ = weights.read(out)
        if latest != version:
            version = latest
            torn += not whole(out)
            got[count % len(got)] = version
            count += 1
        elif finished:
            break
    race["count"][place], race["torn"][place] = count, torn


def race_to_empty(race: Segment, place: int, ring: Ring, rounds: int) -> None:
    """Empty a full ring as fast as possible, once per round."""
    got, reader, out, count = race["got"][place], ring.reader(), {"x": np.zeros(1, np.int64)}, 0
    go, written = race.signal("go"), race.signal("written")
    begin(race)
    for number in range(1, rounds + 1):
        go.wait(number)
        while True:
            try:
                got[count] = reader.get(out, timeout=0).sequence
            except WaitTimeout:
                break
            count += 1
        race["count"][place] = count
        written.add()


def poll_ring(race: Segment, ring: Ring) -> None:
    """Poll a ring without waiting: a process that is stopped at any instant is likely in the middle of a scan."""
    got, reader, written, count = race["got"][0], ring.reader(), race.signal("written"), 0
    counted = race["count"]
    begin(race)
    while not written.value:
        try:
            slot = reader.take(timeout=0)
        except WaitTimeout:
            continue
        got[count] = slot.sequence
        slot.release()
        count += 1
        counted[0] = count


# ---------------------------------------------------------------------------------------------------------------- names


def own_lanes(board: Segment, names: list[str]) -> None:
    """Make, use and close named lanes."""
    phase = phase_of(board)
    begin(board)
    while True:
        phase[...] = b"makes lanes"
        buffer = RolloutRingBuffer(4, 8, 3, 2, shm_name_prefix=names[0])
        sync = SharedWeightSync({"w": (1000,)}, shm_name=names[1])
        phase[...] = b"uses lanes"
        for number in range(20):
            lane_support.collect(buffer, 1, number)
            sync.write_weights({"w": np.full(1000, number, np.float32)})
        phase[...] = b"closes lanes"
        buffer.cleanup()
        sync.cleanup()
