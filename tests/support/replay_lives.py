"""What the processes of the kill and race tests of the replay do: victims, survivors and racers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import SIGNAL, Segment, WaitTimeout
from memlane.ipc import Replay
from memlane.lanes.sampler import ReplaySampler
from tests.support.kills import PATIENCE, PLACES, begin_together, board_layout
from tests.support.payloads import CheckedEnvs, count_misplaced, count_torn, loose_rows

BOARD = board_layout(
    written=(SIGNAL, ()),  # counts the writers that have finished
    added=(np.int64, PLACES),  # rows that a writer knows to be added
    wrong=(np.int64, PLACES),  # rows that a sampler found torn or wrongly put together
    bad_weights=(np.int64, PLACES),  # importance weights outside (0, 1]
)


def stored(replay: Replay) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The state words and the contents of all slots, read without a sampler."""
    rows = replay.segment["rows"]
    head = _native.row_head_bytes(bool(replay.streams))
    words = np.ascontiguousarray(rows[:, :8]).view(np.int64)[:, 0]
    payload = np.ascontiguousarray(rows[:, head : head + replay.row_dtype.itemsize]).view(replay.row_dtype)[:, 0]
    return words, payload


def sampler_of(replay: Replay, seed: int) -> ReplaySampler:
    return replay.sampler(seed=seed, n_step=2, gamma=1.0) if replay.streams else replay.sampler(seed=seed)


# ---------------------------------------------------------------------------------------------------------------- races


def race_to_add(board: Segment, place: int, replay: Replay, count: int, batch: int, samplers: range) -> None:
    """Add ``count`` rows, ``batch`` at a time. On the way, wait until each sampler has sampled."""
    writer = replay.writer()
    begin_together(board)
    added = 0
    for first in range(0, count, batch):
        if first <= count // 2 < first + batch:
            wait_for_samplers(board, samplers)
        added += writer.add(loose_rows(place, first, min(batch, count - first)))
    board["added"][place] = added
    board.signal("written").add()


def race_to_step(board: Segment, place: int, replay: Replay, count: int, streams: list[int], samplers: range) -> None:
    """Add ``count`` rows of these streams. On the way, wait until each sampler has sampled."""
    writer, envs = replay.writer(streams), CheckedEnvs(streams)
    begin_together(board)
    added = 0
    while added < count:
        if added < count // 2 <= added + len(streams):
            wait_for_samplers(board, samplers)
        rows, final = envs.step()
        added += writer.add(rows, final=final)
    board["added"][place] = added
    board.signal("written").add()


def wait_for_samplers(board: Segment, samplers: range) -> None:
    """On a busy machine the writers could otherwise finish before a sampler has begun."""
    for place in samplers:
        board.signal("progress", place).wait(1, timeout=PATIENCE)


def race_to_sample(board: Segment, place: int, replay: Replay, writers: int) -> None:
    """Sample, check and update priorities, if there are any, until all writers have finished."""
    sampler, written, progress = sampler_of(replay, place), board.signal("written"), board.signal("progress", place)
    count_wrong = count_misplaced if replay.streams else count_torn
    chance = np.random.default_rng(place)
    begin_together(board)
    while replay.added < 16:
        time.sleep(0)
    while written.value < writers:
        batch = sampler.sample(32, beta=0.5)
        board["wrong"][place] += count_wrong(batch)
        if replay.alpha is not None:
            board["bad_weights"][place] += int((~((batch["weight"] > 0) & (batch["weight"] <= 1))).sum())
            replay.update_priorities(batch["key"], chance.random(32))
        progress.add()


# ------------------------------------------------------------------------------------------------ victims and survivors


def write_forever(board: Segment, place: int, replay: Replay, streams: list[int], first_episode: int) -> None:
    """Add as fast as possible until killed."""
    if replay.streams:
        writer, envs = replay.writer(streams), CheckedEnvs(streams, first_episode)
        begin_together(board)
        while True:
            rows, final = envs.step()
            writer.add(rows, final=final)
    loose = replay.writer()
    prepared = [loose_rows(place, first, 16) for first in range(0, 160, 16)]  # only the adding is left
    begin_together(board)
    for rows in itertools.cycle(prepared):
        loose.add(rows)


def survive_writing(board: Segment, place: int, replay: Replay, streams: list[int]) -> None:
    """Add until the test ends it; note how long the slowest add took."""
    writer = replay.writer(streams) if replay.streams else replay.writer()
    envs = CheckedEnvs(streams or [0])
    progress, end, slowest_ns = board.signal("progress", place), board.signal("end"), board["slowest_ns"]
    begin_together(board)
    for number in itertools.count():
        rows, final = envs.step() if replay.streams else (loose_rows(place, number, 1), None)
        before = time.monotonic_ns()
        try:
            board["added"][place] += writer.add(rows, final=final, timeout=0.1)
        except WaitTimeout:
            if end.value:
                return
            continue
        slowest_ns[place] = max(int(slowest_ns[place]), time.monotonic_ns() - before)
        progress.add()
        if end.value:
            return


def survive_sampling(board: Segment, place: int, replay: Replay) -> None:
    sampler, end, progress = sampler_of(replay, place), board.signal("end"), board.signal("progress", place)
    count_wrong = count_misplaced if replay.streams else count_torn
    begin_together(board)
    while replay.added < 16:
        time.sleep(0)
    while not end.value:
        with suppress(WaitTimeout):
            batch = sampler.sample(32, timeout=0.1)
            board["wrong"][place] += count_wrong(batch)
            if replay.alpha is not None:
                replay.update_priorities(batch["key"], np.ones(32))
            progress.add()


def add_until_limited(board: Segment, place: int, replay: Replay) -> None:
    """Add until the limiter makes it wait, and is killed there."""
    writer, progress = replay.writer(), board.signal("progress", place)
    begin_together(board)
    for number in itertools.count():
        writer.add(loose_rows(place, number, 4))
        progress.add()


def save_forever(board: Segment, place: int, replay: Replay, file: str) -> None:
    progress = board.signal("progress", place)
    begin_together(board)
    while True:
        replay.save(file)
        progress.add()


def save_and_die_early(board: Segment, replay: Replay, file: str) -> None:  # noqa: ARG001
    """Save, and die after the file has got its name and before it has its content."""
    create = Segment.create

    def create_and_die(*arguments: Any, **keywords: Any) -> Segment:
        create(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    Segment.create = create_and_die  # type: ignore[method-assign, assignment]
    replay.save(file)
