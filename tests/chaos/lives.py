"""What the processes of the storms do. The plan of each is the fault that it meets: see cpp/src/sync/faults.hpp."""

from __future__ import annotations

import itertools
import os
import random
import time
from contextlib import suppress
from typing import Any

import numpy as np

from memlane import _native
from memlane.core import BudgetError, Segment, WaitTimeout
from memlane.lanes.replay import Replay
from memlane.lanes.ring import Ring
from memlane.lanes.sampler import ReplaySampler
from memlane.lanes.weights import Weights
from tests.support.kills import board_layout
from tests.support.payloads import (
    CheckedEnvs,
    Payload,
    checked_layout,
    count_broken,
    count_misplaced,
    count_misstacked,
    count_torn,
    fill,
    loose_rows,
    whole,
)

BODY = 48
"""Integers of a slot or of a weight set."""
WAIT = 0.2
"""Seconds after which a wait looks whether the storm is over."""


def arm(plan: str) -> None:
    if plan:
        _native.arm_fault(plan)  # type: ignore[attr-defined]


def storm_board(places: int, **fields: Any) -> dict[str, Any]:
    return board_layout(
        places,
        done=(np.int64, places),  # operations that a process has completed
        checked=(np.int64, places),  # slots, rows or weight sets that it has checked
        wrong=(np.int64, places),  # rows that are torn or wrongly put together
        **fields,
    )


# ----------------------------------------------------------------------------------------------------------------- ring


def ring_board(writers: int, readers: int, puts: int, takes: int) -> dict[str, Any]:
    """A board with a log of every put and every take, by writer and number and by reader and position."""
    return storm_board(
        writers + readers,
        begun=(np.int64, writers),  # the last number that a writer began to put
        put_begin=(np.int64, (writers, puts)),
        put_end=(np.int64, (writers, puts)),  # 0: the writer did not live to see it
        taken=(np.int64, readers),  # entries in the log of a reader
        item=(np.int64, (readers, takes)),  # writer << 32 | number
        take_begin=(np.int64, (readers, takes)),
        take_end=(np.int64, (readers, takes)),
    )


def write_ring(board: Segment, plan: str, place: int, ring: Ring) -> None:
    """Put increasing numbers; a successor goes on where its predecessor died."""
    end, writer, payload = board.signal("end"), ring.writer(place), Payload(BODY)
    begun, begin_ns, end_ns, done = board["begun"], board["put_begin"][place], board["put_end"][place], board["done"]
    arm(plan)
    for number in range(int(begun[place]) + 1, len(begin_ns)):
        payload.fill(number, place)
        begin_ns[number] = time.monotonic_ns()
        begun[place] = number
        while True:
            if end.value:
                return
            with suppress(WaitTimeout):
                if number % 2:
                    writer.put(payload.arrays, policy_version=number, timeout=WAIT)
                else:
                    with writer.claim(timeout=WAIT) as slot:
                        fill(slot, number, place)
                        slot.commit(policy_version=number)
                break
        end_ns[number] = time.monotonic_ns()
        done[place] += 1
    end.wait(1)


def read_ring(board: Segment, plan: str, place: int, ring: Ring, reader: int) -> None:
    """Take slots. A slot is logged before it is released: one that is not logged must be offered again."""
    end, handle = board.signal("end"), ring.reader()
    arm(plan)
    while not end.value and board["taken"][reader] < board["item"].shape[1]:
        begin_ns = time.monotonic_ns()
        with suppress(WaitTimeout), handle.take(timeout=WAIT) as slot:
            log_take(board, reader, slot, begin_ns, time.monotonic_ns())
            board["torn"][place] += not whole(slot)
            board["checked"][place] += 1
            board["done"][place] += 1
    end.wait(1)


def log_take(board: Segment, reader: int, slot: Any, begin_ns: int, end_ns: int) -> None:
    at = int(board["taken"][reader])
    board["take_begin"][reader, at], board["take_end"][reader, at] = begin_ns, end_ns
    board["item"][reader, at] = int(slot["writer"]) << 32 | int(slot["number"])
    board["taken"][reader] = at + 1


# -------------------------------------------------------------------------------------------------------------- weights


def publish_weights(board: Segment, plan: str, place: int, weights: Weights) -> None:
    end, payload = board.signal("end"), Payload(BODY)
    arm(plan)
    for number in itertools.count(int(board["done"][place]) + 1):
        weights.publish(payload.fill(number, place))
        board["done"][place] = number
        if end.value:
            return


def read_weights(board: Segment, plan: str, place: int, weights: Weights) -> None:
    """Read whole versions, never an older one after a newer one."""
    end, out, last = board.signal("end"), Payload(BODY).arrays, 0
    arm(plan)
    while not end.value:
        with suppress(WaitTimeout):
            weights.wait_for(last + 1, timeout=WAIT)
            version, _ = weights.read(out)
            board["torn"][place] += not whole(out)
            board["wrong"][place] += version < last
            last = version
            board["checked"][place] += 1
            board["done"][place] += 1


# ---------------------------------------------------------------------------------------------------------------- names


def own_names(board: Segment, plan: str, place: int, folder: str, most_slots: int) -> None:
    """Make, use and close named rings in a directory that may be too small for them: then creation is refused."""
    os.environ["MEMLANE_SHM_DIR"] = folder
    end, payload, chance = board.signal("end"), Payload(BODY), random.Random()
    arm(plan)
    for number in itertools.count(1):
        if end.value:
            return
        with suppress(BudgetError), named_ring(place, chance.randint(1, most_slots)) as ring:
            ring.writer(place).put(payload.fill(number, place))
            with ring.reader().take(timeout=WAIT) as slot:
                board["torn"][place] += not whole(slot)
            board["checked"][place] += 1
        board["done"][place] += 1


def named_ring(place: int, slots: int) -> Ring:
    return Ring(checked_layout(BODY), num_slots=slots, name=f"chaos-{place}")


# --------------------------------------------------------------------------------------------------------------- replay


def write_replay(board: Segment, plan: str, place: int, replay: Replay, streams: list[int], incarnation: int) -> None:
    end, done = board.signal("end"), board["done"]
    writer = replay.writer(streams) if replay.streams else replay.writer()
    envs = CheckedEnvs(streams, 100 * incarnation)
    arm(plan)
    for number in itertools.count(int(done[place])):
        rows, final = envs.step() if replay.streams else (loose_rows(place, 8 * number, 8), None)
        writer.add(rows, final=final)
        done[place] += 1
        if end.value:
            return


def make_sampler(replay: Replay, kind: str) -> ReplaySampler:
    match kind:
        case "steps":
            return replay.sampler(n_step=2, gamma=1.0)
        case "stacks":
            return replay.sampler(stack={"obs": 3})
        case "sequences":
            return replay.sampler(length=4)
        case _:
            return replay.sampler()


COUNT_WRONG = {"steps": count_misplaced, "stacks": count_misstacked, "sequences": count_broken, "loose": count_torn}


def sample_replay(board: Segment, plan: str, place: int, replay: Replay, kind: str, batch_size: int) -> None:
    """Sample and check batches, and set priorities, if there are any."""
    end, count_wrong = board.signal("end"), COUNT_WRONG[kind]
    while replay.added < replay.capacity:
        if end.value:
            return
        time.sleep(0.001)
    sampler = make_sampler(replay, kind)
    batch = sampler.batch(batch_size)
    chance = np.random.default_rng()
    arm(plan)
    while not end.value:
        sampler.sample(batch_size, out=batch)
        board["wrong"][place] += count_wrong(batch)
        board["checked"][place] += int(batch["valid"].sum()) if kind == "sequences" else batch_size
        if replay.alpha is not None:
            weights = batch["weight"] if kind != "sequences" else batch["weight"][:, 0]
            board["wrong"][place] += int((~((weights > 0) & (weights <= 1))).sum())
            replay.update_priorities(batch["key"], chance.random(batch_size))
        board["done"][place] += 1
    sampler.close()


def save_replay(board: Segment, plan: str, place: int, replay: Replay, file: str) -> None:
    end = board.signal("end")
    arm(plan)
    while not end.value:
        replay.save(file)
        board["done"][place] += 1
