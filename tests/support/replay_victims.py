"""The processes that race over a replay, those that are killed there, and those that must survive it.

Run as a program, this is the template that forks them, as ``lane_victims.py`` is for the other lanes.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import SIGNAL, Layout, Segment, WaitTimeout
from memlane.ipc import Replay
from memlane.lanes.sampler import ReplaySampler
from tests.support import core_victims as victims

PLACES = 8
"""Processes of one test that report something."""

RACE = Layout(
    {
        "ready": (SIGNAL, ()),  # counts the processes that have begun
        "go": (SIGNAL, ()),
        "end": (SIGNAL, ()),  # tells those to go home that would go on for ever
        "written": (SIGNAL, ()),  # counts the writers that have finished
        "progress": (SIGNAL, PLACES),
        "added": (np.int64, PLACES),  # what each writer knows to be added
        "wrong": (np.int64, PLACES),  # rows that a sampler found torn or wrongly put together
        "strange": (np.int64, PLACES),  # weights that are not in (0, 1]
        "slowest_ns": (np.int64, PLACES),
    }
)

# ------------------------------------------------------------------------------------------- rows that check themselves

BODY = 48

LOOSE = {"writer": ("int64", ()), "number": ("int64", ()), "body": ("int64", BODY)}
"""A row that stands for itself. All of its body follows from who wrote it and which of that writer's it is."""

LINKED = {
    "obs": ("int64", (BODY,)),
    "reward": ("float32", ()),
    "terminated": (bool, ()),
    "truncated": (bool, ()),
}
"""A row of a stream. Its observation begins with stream, episode and step, from which the rest follows."""

_RAMP = np.arange(1, BODY + 1)


def body_of(writer: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    return _RAMP * (number * 31 + writer + 1)[:, None]


def loose_rows(writer: int, first: int, count: int) -> dict[str, NDArray[Any]]:
    numbers = np.arange(first, first + count)
    writers = np.full(count, writer)
    return {"writer": writers, "number": numbers, "body": body_of(writers, numbers)}


def torn(rows: Any) -> int:
    """How many of these rows are not whole."""
    return int((rows["body"] != body_of(rows["writer"], rows["number"])).any(axis=1).sum())


def seen(streams: NDArray[np.int64], episodes: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    obs = _RAMP * (streams * 10_007 + episodes * 101 + steps)[:, None]
    obs[:, 0], obs[:, 1], obs[:, 2] = streams, episodes, steps
    return obs


def length_of(episodes: NDArray[np.int64]) -> NDArray[np.int64]:
    return 1 + episodes * 7 % 11


def misplaced(batch: Any) -> int:
    """How many rows of a batch (n_step=2, gamma=1) are not whole, or not what two steps of one episode lead to.

    Episodes end by turns: terminated and truncated, both with a last observation.
    """
    obs, after = batch["obs"], batch["next_obs"]
    streams, episodes, steps = obs[:, 0], obs[:, 1], obs[:, 2]
    to = after[:, 2]
    ended = to == length_of(episodes)
    wrong = (obs != seen(streams, episodes, steps)).any(axis=1) | (after != seen(streams, episodes, to)).any(axis=1)
    wrong |= (to <= steps) | (to > steps + 2) | (to > length_of(episodes))
    wrong |= batch["terminated"] != (ended & (episodes % 2 == 0))
    wrong |= batch["truncated"] != (ended & (episodes % 2 == 1))
    wrong |= batch["reward"] != np.where(to == steps + 2, 2 * steps + 1, steps)
    return int(wrong.sum())


class Environments:
    """Streams whose every step follows from its place."""

    def __init__(self, streams: list[int], first_episode: int = 0) -> None:
        self.streams = np.array(streams)
        self.episodes = first_episode + self.streams
        self.steps = np.zeros_like(self.streams)

    def step(self) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        obs = seen(self.streams, self.episodes, self.steps)
        reward = self.steps.astype(np.float32)
        self.steps += 1
        ended = self.steps == length_of(self.episodes)
        final = {"obs": seen(self.streams, self.episodes, self.steps)}
        rows = {
            "obs": obs,
            "reward": reward,
            "terminated": ended & (self.episodes % 2 == 0),
            "truncated": ended & (self.episodes % 2 == 1),
        }
        self.episodes = self.episodes + ended
        self.steps[ended] = 0
        return rows, final


def stored(replay: Replay) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The state words of all slots and what lies in them, past every sampler."""
    rows = replay.segment["rows"]
    head = _native.row_head_bytes(bool(replay.streams))
    words = np.ascontiguousarray(rows[:, :8]).view(np.int64)[:, 0]
    payload = np.ascontiguousarray(rows[:, head : head + replay.row_dtype.itemsize]).view(replay.row_dtype)[:, 0]
    return words, payload


def sampler_of(replay: Replay, seed: int) -> ReplaySampler:
    return replay.sampler(seed=seed, n_step=2, gamma=1.0) if replay.streams else replay.sampler(seed=seed)


def begin(race: Segment) -> None:
    race.signal("ready").add()
    race.signal("go").wait(1)


# ---------------------------------------------------------------------------------------------------------------- races


def race_to_add(race: Segment, place: int, replay: Replay, count: int, batch: int) -> None:
    """So many rows, some at a time."""
    writer = replay.writer()
    begin(race)
    added = 0
    for first in range(0, count, batch):
        added += writer.add(loose_rows(place, first, min(batch, count - first)))
    race["added"][place] = added
    race.signal("written").add()


def race_to_step(race: Segment, place: int, replay: Replay, count: int, streams: list[int]) -> None:
    writer, environments = replay.writer(streams), Environments(streams)
    begin(race)
    added = 0
    while added < count:
        rows, final = environments.step()
        added += writer.add(rows, final=final)
    race["added"][place] = added
    race.signal("written").add()


def race_to_sample(race: Segment, place: int, replay: Replay, writers: int) -> None:
    """Draws, checks and, where there are priorities, sets them, until all writers have finished."""
    sampler, written, progress = sampler_of(replay, place), race.signal("written"), race.signal("progress", place)
    fault = misplaced if replay.streams else torn
    chance = np.random.default_rng(place)
    begin(race)
    while replay.added < 16:
        time.sleep(0)
    while written.value < writers:
        batch = sampler.sample(32, beta=0.5)
        race["wrong"][place] += fault(batch)
        if replay.alpha is not None:
            race["strange"][place] += int((~((batch["weight"] > 0) & (batch["weight"] <= 1))).sum())
            replay.update_priorities(batch["key"], chance.random(32))
        progress.add()


# ------------------------------------------------------------------------------------------------ victims and survivors


def write_for_ever(race: Segment, place: int, replay: Replay, streams: list[int], first_episode: int) -> None:
    """Adds as fast as it can, until it is killed."""
    if replay.streams:
        writer, environments = replay.writer(streams), Environments(streams, first_episode)
        begin(race)
        while True:
            rows, final = environments.step()
            writer.add(rows, final=final)
    loose = replay.writer()
    ready = [loose_rows(place, first, 16) for first in range(0, 160, 16)]  # all that is left to do is adding
    begin(race)
    for rows in itertools.cycle(ready):
        loose.add(rows)


def survive_writing(race: Segment, place: int, replay: Replay, streams: list[int]) -> None:
    """Adds until told to go home, and tells how long the slowest add took."""
    writer = replay.writer(streams) if replay.streams else replay.writer()
    environments = Environments(streams or [0])
    progress, end, slowest_ns = race.signal("progress", place), race.signal("end"), race["slowest_ns"]
    begin(race)
    for number in itertools.count():
        rows, final = environments.step() if replay.streams else (loose_rows(place, number, 1), None)
        before = time.monotonic_ns()
        try:
            race["added"][place] += writer.add(rows, final=final, timeout=0.1)
        except WaitTimeout:
            if end.value:
                return
            continue
        slowest_ns[place] = max(int(slowest_ns[place]), time.monotonic_ns() - before)
        progress.add()
        if end.value:
            return


def survive_sampling(race: Segment, place: int, replay: Replay) -> None:
    sampler, end, progress = sampler_of(replay, place), race.signal("end"), race.signal("progress", place)
    fault = misplaced if replay.streams else torn
    begin(race)
    while replay.added < 16:
        time.sleep(0)
    while not end.value:
        with suppress(WaitTimeout):
            batch = sampler.sample(32, timeout=0.1)
            race["wrong"][place] += fault(batch)
            if replay.alpha is not None:
                replay.update_priorities(batch["key"], np.ones(32))
            progress.add()


def add_held_back(race: Segment, place: int, replay: Replay) -> None:
    """Adds until the limiter holds it back, and is killed there."""
    writer, progress = replay.writer(), race.signal("progress", place)
    begin(race)
    for number in itertools.count():
        writer.add(loose_rows(place, number, 4))
        progress.add()


def save_for_ever(race: Segment, place: int, replay: Replay, file: str) -> None:
    progress = race.signal("progress", place)
    begin(race)
    while True:
        replay.save(file)
        progress.add()


def save_and_die_young(replay: Replay, file: str) -> None:
    """Dies between the file's name and its content."""
    create = Segment.create

    def create_and_die(*arguments: Any, **names: Any) -> Segment:
        create(*arguments, **names)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    Segment.create = create_and_die  # type: ignore[method-assign, assignment]
    replay.save(file)


LIVES = {
    function.__name__: function
    for function in (
        race_to_add,
        race_to_step,
        race_to_sample,
        write_for_ever,
        survive_writing,
        survive_sampling,
        add_held_back,
        save_for_ever,
        save_and_die_young,
    )
}

if __name__ == "__main__":
    victims.LINE = Connection(int(sys.argv[1]))
    vars(victims).update(LIVES)
    victims.serve()
