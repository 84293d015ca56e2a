"""A storm for each lane, for vector environments and for the runner: each draws its settings and returns its counts."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memlane.core import Peer, WaitTimeout, reclaim
from memlane.lanes.replay import Replay
from memlane.lanes.ring import Ring
from memlane.lanes.weights import Weights
from memlane.vector import AsyncVectorEnv
from tests.chaos import lives
from tests.chaos.order import find_overtaken
from tests.chaos.storm import ByName, Counts, Role, Storm
from tests.support.failing_envs import makers
from tests.support.kills import Template
from tests.support.payloads import LINKED, LOOSE, CheckedEnvs, Payload, checked_layout, loose_rows, whole
from tests.support.replay_lives import stored
from tests.support.tiny_runner import Tiny
from tests.support.transports import Count
from tests.vector.test_kills import ENVS, WORKERS, CheckedRun, FaultInjector

CROWD = 64
"""Processes of the storms that are crowded."""
LANE = "chaos-lane"
RESTARTS = 30.0
"""Seconds that a turn may take: the new process of a worker or collector may die at a fault point too, several times
in a row."""


# ----------------------------------------------------------------------------------------------------------------- ring


class RingStorm(Storm):
    """Every put and every take is logged, with the times between which it happened."""

    def __init__(self, templates: Sequence[Template], chance: random.Random, crowded: bool) -> None:
        self.num_writers = CROWD // 2 if crowded else chance.randint(1, 5)
        self.num_readers = CROWD // 2 if crowded else chance.randint(1, 4)
        puts = 40_000 // self.num_writers + 2_000
        layout = lives.ring_board(self.num_writers, self.num_readers + 1, puts, 80_000 // self.num_readers + 4_000)
        super().__init__(templates, layout, chance)
        self.ring = Ring(
            checked_layout(lives.BODY),
            num_slots=chance.choice([2, 3, 5, 8]) if not crowded else chance.choice([4, 16]),
            overflow=chance.choice(["block", "block", "drop_oldest"]),
            name=LANE,
        )
        ring = ByName(Ring.attach, LANE)
        self.readers_die = chance.random() < 0.5
        self.unfinished: set[tuple[int, int]] = set()
        """The last log entry of each dead reader: it may have died before the release, so the slot may come again."""
        for place in range(self.num_writers):
            self.play(Role(lives.write_ring, place, (ring,), spared=place == 0))
        for reader in range(self.num_readers):
            spared = not self.readers_die or reader == 0
            self.play(Role(lives.read_ring, self.num_writers + reader, (ring, reader), spared))

    def exhausted(self) -> bool:
        """Whether a log is full."""
        puts, takes = self.board["put_begin"].shape[1], self.board["item"].shape[1]
        return bool(self.board["begun"].max() >= puts - 1 or self.board["taken"].max() >= takes)

    def on_death(self, role: Role) -> None:
        if role.life is lives.read_ring:
            reader = role.arguments[1]
            self.unfinished.add((reader, int(self.board["taken"][reader]) - 1))

    def check(self) -> None:
        counts, board = self.counts, self.board
        self._drain()
        counters = self.ring.counters()
        lengths = board["taken"]
        rows = [(reader, at) for reader in range(len(lengths)) for at in range(int(lengths[reader]))]
        index = np.array(rows, np.int64).reshape(-1, 2).T
        items, begin, end = (board[name][index[0], index[1]] for name in ("item", "take_begin", "take_end"))
        # A slot may be logged again only if the one that logged it before died right after that.
        released = np.array([entry not in self.unfinished for entry in rows], np.bool_)
        _, times = np.unique(items[released], return_counts=True)
        counts.twice += int((times > 1).sum())
        seen = set(items.tolist())
        lost = 0
        for writer in range(self.num_writers):
            committed = np.flatnonzero(board["put_end"][writer])
            lost += sum(writer << 32 | int(number) not in seen for number in committed)
        counts.wrong += sum(not 0 < (item & 0xFFFFFFFF) <= board["begun"][item >> 32] for item in seen)
        excused = counters["dropped"] + counters["abandoned"] if self.ring.overflow == "drop_oldest" else 0
        counts.lost += max(0, lost - excused)
        uncounted = abs(counters["written"] - counters["read"] - counters["dropped"] - self.ring.unread)
        counts.lost += max(0, uncounted - counts.kills)  # each killed process can make it wrong by one
        self._check_order(items, begin, end)
        self._claim_all()

    def _drain(self) -> None:
        reader, at = self.ring.reader(), self.num_readers
        while True:
            try:
                with reader.take(timeout=0) as slot:
                    self.counts.torn += not whole(slot)
                    self.counts.checked += 1
                    now = np.iinfo(np.int64).max  # after everything else
                    lives.log_take(self.board, at, slot, now, now)
            except WaitTimeout:
                return

    def _check_order(self, items: Any, begin: Any, end: Any) -> None:
        """Not if readers died: a slot that one of them held is taken late, and that is right."""
        if self.readers_die:
            return
        writers, numbers = items >> 32, items & 0xFFFFFFFF
        commit_end = self.board["put_end"][writers, numbers]
        commit_end = np.where(commit_end == 0, end, commit_end)  # its writer died: it was committed when it was taken
        overtaken = find_overtaken(self.board["put_begin"][writers, numbers], commit_end, begin, end)
        self.counts.overtaken += len(overtaken)

    def _claim_all(self) -> None:
        """No slot is lost: the ring can be filled again."""
        writer, claimed = self.ring.writer(), []
        for _ in range(self.ring.segment.layout["slots"].shape[0]):
            try:
                claimed.append(writer.claim(timeout=0))
            except WaitTimeout:
                self.counts.leaks += 1
        for slot in claimed:
            slot.release()


def ring_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:  # noqa: ARG001
    with RingStorm(templates, chance, crowded=chance.random() < 0.25) as storm:
        storm.run(seconds)
        storm.settle()
        storm.check()
        storm.ring.close()
    return storm.counts


# -------------------------------------------------------------------------------------------------------------- weights


def weights_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:  # noqa: ARG001
    writers, readers = chance.randint(1, 4), chance.choice([2, 4, 12])
    body = lives.BODY
    weights = Weights(checked_layout(body), buffers=writers + 2, name=LANE)
    with Storm(templates, lives.storm_board(writers + readers), chance) as storm:
        for place in range(writers + readers):
            life = lives.publish_weights if place < writers else lives.read_weights
            storm.play(Role(life, place, (ByName(Weights.attach, LANE),), spared=place in (0, writers)))
        storm.run(seconds)
        storm.settle()
        version, arrays = weights.read()
        storm.counts.torn += not whole(arrays)
        for number in range(1, 4):  # every buffer can be published to
            storm.counts.lost += weights.publish(Payload(body).fill(number)) != version + number
        weights.close()
    return storm.counts


# ---------------------------------------------------------------------------------------------------------------- names

TMPFS_MEGABYTES = 4


@contextmanager
def tiny_tmpfs(folder: Path) -> Iterator[Path]:
    """A file system of a few megabytes where this user may mount one, else a plain directory."""
    tiny = folder / "tiny"
    tiny.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={TMPFS_MEGABYTES}m", "tmpfs"]
    mounted = subprocess.run(["mount", *options, str(tiny)], capture_output=True, check=False).returncode == 0
    try:
        yield tiny
    finally:
        if mounted:
            subprocess.run(["umount", str(tiny)], check=True)
        shutil.rmtree(tiny)


def names_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:
    """Owners of named segments die at any point of creation, use and removal; what they leave is reclaimed."""
    owners = chance.choice([4, 16])
    with tiny_tmpfs(folder) as tiny, Storm(templates, lives.storm_board(owners), chance) as storm:
        for place in range(owners):
            storm.play(Role(lives.own_names, place, (str(tiny), 1500), spared=place == 0))
        storm.run(seconds)
        storm.settle()
        reclaim(tiny)
        storm.counts.leaks += len(list(tiny.iterdir()))
    return storm.counts


# --------------------------------------------------------------------------------------------------------------- replay


def replay_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:
    linked = chance.random() < 0.75
    writers, each = chance.randint(1, 6), 3
    samplers = chance.choice([2, 4, 8])
    replay = Replay(
        LINKED if linked else LOOSE,
        capacity=chance.choice([64, 300, 2000]),
        streams=writers * each if linked else 0,
        observations=["obs"] if linked else [],
        alpha=chance.choice([None, 0.6]),
        name=LANE,
    )
    attached = ByName(Replay.attach, LANE)
    file = folder / "saved-replay"
    kinds = ["steps", "stacks", "sequences"] if linked else ["loose"]
    with Storm(templates, lives.storm_board(writers + samplers + 1), chance) as storm:
        for place in range(writers):
            streams = list(range(place * each, (place + 1) * each))
            arguments = (attached, streams)
            storm.play(Role(lives.write_replay, place, arguments, spared=place == 0, counts_incarnations=True))
        for number in range(samplers):
            kind = kinds[number % len(kinds)]
            sampler = (attached, kind, chance.choice([8, 64, 256, 2048]))
            storm.play(Role(lives.sample_replay, writers + number, sampler, spared=number == 0))
        storm.play(Role(lives.save_replay, writers + samplers, (attached, str(file))))
        storm.run(seconds)
        storm.settle()
        check_replay(storm.counts, replay, kinds)
        replay.save(file)
        with Replay.load(file) as loaded:
            check_replay(storm.counts, loaded, kinds)
        replay.close()
        file.unlink()
    return storm.counts


def check_replay(counts: Counts, replay: Replay, kinds: list[str]) -> None:
    """Batches of every kind are right, and after one more round nothing is left of the dead."""
    for kind in kinds:
        sampler = lives.make_sampler(replay, kind)
        batch = sampler.sample(256)
        counts.wrong += lives.COUNT_WRONG[kind](batch)
        counts.checked += 256
        sampler.close()
    if replay.streams:
        writer, envs = replay.writer(), CheckedEnvs(list(range(replay.streams)), 10**6)
        for _ in range(2 * replay.capacity // replay.streams + 1):
            rows, final = envs.step()
            writer.add(rows, final=final)
    else:
        replay.add(loose_rows(99, 0, replay.capacity))
    states = stored(replay)[0] & 3
    counts.leaks += int((states == 1).sum())  # slots that are still claimed
    counts.lost += abs(len(replay) - int((states == 2).sum()))


# -------------------------------------------------------------------------------------------------- vector environments


class ArmedMaker:
    """Makes an environment whose worker dies at one of its fault points."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self.make, self.seed = make, seed

    def __call__(self) -> Any:
        chance = random.Random(f"{self.seed} {os.getpid()}")
        lives.arm(f"die:{int(10 ** chance.uniform(2, 4))}")
        return self.make()


class ChaosRun(CheckedRun):
    """Ends when its time is over, not after a number of faults."""

    def may_have_died(self, worker: Peer) -> bool:
        return not worker.alive  # by the injector, or at a fault point

    def __init__(self, counts: Counts, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts = counts

    def run(self) -> None:
        self.reset()
        self.injector.start()
        while not self.injector.over.is_set():
            begin = time.monotonic()
            self.turn()
            self.counts.note_stall(time.monotonic() - begin, RESTARTS)
        self.injector.join()


def vector_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:  # noqa: ARG001
    counts, mode = Counts(), chance.choice(["NextStep", "SameStep", "Disabled"])
    seed = chance.randrange(2**32)
    envs = AsyncVectorEnv(
        [ArmedMaker(make, seed) for make in makers(ENVS)],
        num_workers=WORKERS,
        on_error="restart",
        max_restarts=10**9,
        autoreset_mode=mode,
    )
    injector = FaultInjector(envs, 10**9, f"injector {seed}")
    run = ChaosRun(counts, envs, injector, mode, f"run {seed}")
    timer = threading.Timer(seconds, injector.over.set)
    timer.start()
    try:
        run.run()
    except Exception as error:
        counts.failures.append(f"vector environment, {mode}, seed {seed}: {type(error).__name__}: {error}")
    finally:
        injector.over.set()
        timer.cancel()
        envs.close(terminate=True)
    counts.kills = len(run.all_peers) - WORKERS
    counts.stops = injector.injected["stop"]
    counts.checked = run.ledger.checked
    counts.leaks = sum(peer.alive for peer in run.all_peers)
    return counts


# --------------------------------------------------------------------------------------------------------------- runner


class ArmedCount(Count):
    """Collectors that die at one of their fault points."""

    def __call__(self, env: Any, weights: Any, sink: Any, context: Any) -> None:
        chance = random.Random(f"{self.steps} {context.worker} {context.incarnation}")
        lives.arm(f"die:{int(10 ** chance.uniform(1, 3.5))}")
        super().__call__(env, weights, sink, context)


def runner_storm(templates: Sequence[Template], chance: random.Random, seconds: float, folder: Path) -> Counts:  # noqa: ARG001
    counts, collectors = Counts(), chance.randint(1, 4)
    runner = Tiny(
        ArmedCount(steps=chance.randrange(2**20)),
        collectors=collectors,
        max_restarts=10**9,
        max_lag=chance.randint(0, 3),
    )
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()
    try:
        runner.begin()
        while not over.is_set():
            begin = time.monotonic()
            runner.go_on(1)
            counts.note_stall(time.monotonic() - begin, RESTARTS)
        counts.kills = runner.restarts
        numbers: dict[int, list[int]] = {}
        for update in runner.updates:
            for worker, number, _ in update:
                numbers.setdefault(worker, []).append(number)
                counts.checked += 1
        for found in numbers.values():  # a successor goes on with the number at which its predecessor died
            counts.lost += len(set(range(max(found) + 1)) - set(found))
            counts.twice += len(found) - len(set(found))
        counts.torn = runner.torn
    except Exception as error:
        counts.failures.append(f"runner: {type(error).__name__}: {error}")
    finally:
        timer.cancel()
        runner.close()
    return counts


STORMS: dict[str, Callable[[Sequence[Template], random.Random, float, Path], Counts]] = {
    "ring": ring_storm,
    "weights": weights_storm,
    "names": names_storm,
    "replay": replay_storm,
    "vector": vector_storm,
    "runner": runner_storm,
}
