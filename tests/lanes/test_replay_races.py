"""Races and kills over a replay, between real processes, with rows that check themselves.

Outcomes of a row: drawn whole, as itself and with its own steps around it, until newer ones overwrite it: acceptable.
Drawn in part, put together from another stream or episode, counted but not there, or there but not counted although its
writer lives: forbidden. A writer that is killed or stopped costs its own unfinished rows and nobody's time.

`make soak` runs the same with more rows and more kills.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import Peer, Segment
from memlane.ipc import Limiter, Replay
from tests.support import replay_victims as replay_victims
from tests.support.lane_victims import Template
from tests.support.lanes import PROMISE, state_of
from tests.support.replay_victims import (
    LINKED,
    LOOSE,
    RACE,
    Environments,
    loose_rows,
    misplaced,
    sampler_of,
    stored,
    torn,
)

PATIENCE = 60.0
WRITING, COMPLETE = 1, 2


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    process = Template(PATIENCE, replay_victims.__name__)
    Peer(1, 0).fileno()  # the one descriptor that stands for all the dead
    yield process
    process.close()


class Scene:
    """The processes of one test."""

    def __init__(self, template: Template, race: Segment) -> None:
        self.template = template
        self.race = race
        self.peers: list[Peer] = []

    def start(self, life: str, *arguments: Any) -> Peer:
        peer = Peer.of(self.template.fork(life, self.race, *arguments), life)
        self.peers.append(peer)
        return peer

    def go(self) -> None:
        self.race.signal("ready").wait(len(self.peers), timeout=PATIENCE, peers=self.peers)
        self.race.signal("go").store(1)

    def begin(self, life: str, *arguments: Any) -> Peer:
        """One more, that begins at once."""
        ready = self.race.signal("ready")
        awaited = ready.value + 1
        peer = self.start(life, *arguments)
        ready.wait(awaited, timeout=PATIENCE, peers=[peer])
        return peer

    def kill(self, victim: Peer) -> None:
        os.kill(victim.pid, signal.SIGKILL)
        assert victim.wait(PATIENCE)
        self.bury(victim)

    def bury(self, victim: Peer) -> None:
        assert self.template.reap(victim.pid) == -signal.SIGKILL
        self.peers.remove(victim)
        victim.close()

    def expect_progress(self, *places: int) -> None:
        """Each of the survivors does something more within a second."""
        progress = [self.race.signal("progress", place) for place in places]
        for signal_, value in [(signal_, signal_.value) for signal_ in progress]:
            signal_.wait(value + 2, timeout=PROMISE)

    def join(self) -> None:
        """They must all return."""
        self.race.signal("end").store(1)
        ends = {peer.name: self.template.reap(peer.pid) for peer in self.peers}
        assert set(ends.values()) <= {0}, ends


@pytest.fixture
def scene(template: Template) -> Iterator[Scene]:
    with Segment.create(RACE) as race:
        scene = Scene(template, race)
        yield scene
        template.ask("kill_all")
        for peer in scene.peers:
            peer.close()


def held(replay: Replay) -> int:
    """Slots that somebody writes into, or did when he died."""
    return int((stored(replay)[0] & 3 == WRITING).sum())


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["alike", "by priority"])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_loose_rows_are_drawn_whole_while_writers_go_round_and_round(
    scene: Scene, dose: int, writers: int, alpha: float | None
) -> None:
    """Once some weights were NaN and the rest of their batch 0; see sampler_test.cpp, "a
    sampler held anywhere while a row is overwritten gives whole rows and finite weights"."""
    each = 24_000 * dose // writers
    with Replay(LOOSE, capacity=64, alpha=alpha) as replay:
        for place in range(writers):
            scene.start("race_to_add", place, replay, each, 7)
        for place in range(writers, writers + 2):
            scene.start("race_to_sample", place, replay, writers)
        scene.go()
        scene.join()
        expect_all_counted(scene, replay)
        words, rows = stored(replay)
        assert torn(rows) == 0
        assert scene.race["added"].sum() == writers * each
        assert len(set(words.tolist())) == replay.capacity


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["alike", "by priority"])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_streams_are_drawn_step_by_step_while_writers_go_round_and_round(
    scene: Scene, dose: int, writers: int, alpha: float | None
) -> None:
    each = 8_000 * dose // writers
    with Replay(LINKED, capacity=96, streams=2 * writers, observations=["obs"], alpha=alpha) as replay:
        for place in range(writers):
            scene.start("race_to_step", place, replay, each, [2 * place, 2 * place + 1])
        for place in range(writers, writers + 2):
            scene.start("race_to_sample", place, replay, writers)
        scene.go()
        scene.join()
        expect_all_counted(scene, replay)
        assert misplaced(sampler_of(replay, 1).sample(400)) == 0


def expect_all_counted(scene: Scene, replay: Replay) -> None:
    counters, race = replay.counters(), scene.race
    assert race["wrong"].sum() == 0
    assert race["strange"].sum() == 0
    assert counters["added"] == race["added"].sum() == replay.added
    assert counters["abandoned"] == 0
    words, _ = stored(replay)
    assert replay.size == (words & 3 == COMPLETE).sum() == counters["added"] - counters["evicted"]
    assert all(race.signal("progress", place).value > 0 for place in np.flatnonzero(race["added"] == 0)[:2])


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_every_row_of_every_writer_is_found_once_where_there_is_room_for_all(
    scene: Scene, dose: int, writers: int
) -> None:
    each = 4_000 * min(dose, 10) // writers
    with Replay(LOOSE, capacity=writers * each + 50, alpha=0.5) as replay:
        for place in range(writers):
            scene.start("race_to_add", place, replay, each, 3 + place)
        scene.start("race_to_sample", writers, replay, writers)
        scene.go()
        scene.join()
        words, rows = stored(replay)
        there = words & 3 == COMPLETE
        assert sorted((words[there] >> 2).tolist()) == list(range(1, writers * each + 1))
        found = sorted(zip(rows["writer"][there].tolist(), rows["number"][there].tolist(), strict=True))
        assert found == [(writer, number) for writer in range(writers) for number in range(each)]
        assert (replay.added, replay.size) == (writers * each, writers * each)
        assert torn(rows[there]) == 0
        # And a sampler finds them all: none is missed by 24 draws for each more than once in a million runs.
        replay.update_priorities(words[there] >> 2, np.ones(writers * each))
        batch = replay.sampler(seed=1).sample(24 * writers * each)
        assert len(np.unique(batch["key"])) == writers * each
        assert torn(batch) == 0


# ------------------------------------------------------------------------------------------------------ killed, stopped


@pytest.mark.parametrize("linked", [False, True], ids=["loose", "streams"])
def test_writers_killed_at_random_instants_cost_only_their_unfinished_rows(
    scene: Scene, dose: int, linked: bool
) -> None:
    chance, streams = random.Random(dose), 4 if linked else 0
    row, observations = (LINKED, ["obs"]) if linked else (LOOSE, [])
    with Replay(row, capacity=96, streams=streams, observations=observations, alpha=0.6) as replay:
        scene.start("survive_writing", 0, replay, [0, 1])
        scene.start("survive_sampling", 1, replay)
        scene.go()
        abandoned = 0
        for kill in range(24 * dose):
            victim = scene.begin("write_for_ever", 2, replay, [2, 3], 100 * kill)
            time.sleep(chance.uniform(0, 0.01))
            os.kill(victim.pid, signal.SIGKILL)
            assert victim.wait(PATIENCE)
            scene.expect_progress(0, 1)  # the dead one may still be a zombie
            scene.bury(victim)
            wait_for(lambda: held(replay) <= 1)  # the survivor's own
            abandoned = replay.counters()["abandoned"]
            assert abandoned <= 2 * (kill + 1)
        scene.join()
        assert scene.race["wrong"].sum() == 0
        assert scene.race["slowest_ns"][0] < PROMISE * 1e9
        assert held(replay) == 0
        counters = replay.counters()
        assert counters["added"] >= scene.race["added"].sum()
        if linked:
            assert misplaced(sampler_of(replay, 1).sample(400)) == 0
        else:
            assert torn(stored(replay)[1]) == 0
        print(f"{24 * dose} kills, {abandoned} rows abandoned")


def test_a_stopped_writer_that_holds_a_slot_blocks_nobody_and_its_death_gives_it_back(scene: Scene, dose: int) -> None:
    for _ in range(dose):
        with Replay(LOOSE, capacity=24, alpha=0.6) as replay:
            victim = scene.begin("write_for_ever", 2, replay, [], 0)
            scene.go()
            for _ in range(2000):
                os.kill(victim.pid, signal.SIGSTOP)
                wait_for(lambda pid=victim.pid: state_of(pid) == "T")
                if held(replay):
                    break
                os.kill(victim.pid, signal.SIGCONT)
                time.sleep(0.0001)
            assert held(replay) == 1
            before = replay.counters()
            sampler = replay.sampler(seed=1)
            for number in range(240):
                assert replay.add(loose_rows(0, number, 1)) == 1
                assert torn(sampler.sample(8)) == 0
            after = replay.counters()
            assert after["added"] == before["added"] + 240
            assert after["avoided"] >= before["avoided"] + 9  # once in each round
            assert (held(replay), after["abandoned"]) == (1, before["abandoned"])
            scene.kill(victim)
            for number in range(48):
                replay.add(loose_rows(0, number, 1))
            assert held(replay) == 0
            assert replay.counters()["abandoned"] == before["abandoned"] + 1
            assert torn(stored(replay)[1]) == 0


def test_a_writer_killed_while_the_limiter_holds_it_back_does_not_hold_back_others(scene: Scene, dose: int) -> None:
    with Replay(LOOSE, capacity=200, limiter=Limiter(ratio=1.0, min_size=20, error_buffer=40)) as replay:
        sampler = replay.sampler(seed=1)
        scene.race.signal("go").store(1)
        for kill in range(1, 4 * dose + 1):
            victim = scene.begin("add_held_back", 0, replay)
            wait_for(lambda: replay.counters()["held_writers"] >= kill)  # noqa: B023
            time.sleep(0.002)
            scene.kill(victim)
            sampler.sample(32, timeout=PROMISE)
            assert replay.add(loose_rows(1, kill, 8), timeout=PROMISE) == 8
        assert torn(sampler.sample(8, timeout=PROMISE)) == 0


def test_a_limiter_with_the_error_buffer_that_it_asks_for_never_holds_back_both_sides() -> None:
    """Eight rows at a time do not meet min_size=10. Until there is enough to sample from, nobody may be held back: the
    second add would wait for samples, and samples for ten rows."""
    with Replay(LOOSE, capacity=200, limiter=Limiter(ratio=1.0, min_size=10, error_buffer=4.5)) as replay:
        assert replay.add(loose_rows(0, 0, 8), timeout=0.2) == 8
        assert replay.add(loose_rows(0, 8, 8), timeout=0.2) == 8
        replay.sampler(seed=1).sample(1, timeout=0.2)


# ----------------------------------------------------------------------------------------------------------- priorities


def test_an_error_too_large_for_a_priority_is_refused_or_limited() -> None:
    """A finite error whose power does not fit into a float would be an infinite priority: one row is drawn for all, and
    every new row gets infinity as well. So would be the sum of sixteen that just fit."""
    with Replay(LOOSE, capacity=64, alpha=1.0) as replay:
        replay.add(loose_rows(0, 0, 32))
        sampler = replay.sampler(seed=1)
        batch = sampler.sample(64)
        errors = np.ones(64)
        errors[:8] = 1e39, 3e38, 3e38, 3e38, 3e38, 1e308, 3e38, 3e38
        try:
            replay.update_priorities(batch["key"], errors)
        except ValueError:
            return
        replay.add(loose_rows(0, 32, 8))
        assert np.isfinite(replay.native.total_priority())
        batch = sampler.sample(64)
        assert np.isfinite(batch["weight"]).all()


# --------------------------------------------------------------------------------------------------------------- saving


@contextmanager
def writing_streams(scene: Scene, capacity: int) -> Iterator[Replay]:
    with Replay(LINKED, capacity=capacity, streams=4, observations=["obs"], alpha=0.6) as replay:
        for place in range(2):
            scene.start("survive_writing", place, replay, [2 * place, 2 * place + 1])
        scene.go()
        wait_for(lambda: replay.added > 32)
        yield replay


def test_what_is_saved_while_others_write_can_be_loaded_whole(scene: Scene, dose: int, tmp_path: Path) -> None:
    with writing_streams(scene, 256) as replay:
        for _ in range(20 * dose):
            replay.save(tmp_path / "replay")
            with Replay.load(tmp_path / "replay") as loaded:
                assert misplaced(sampler_of(loaded, 1).sample(200)) == 0
                assert loaded.added <= replay.added
        scene.join()


@pytest.mark.parametrize("fresh", [True, False], ids=["a new file", "again and again"])
def test_a_save_that_is_killed_leaves_a_file_that_can_be_loaded(
    scene: Scene, dose: int, tmp_path: Path, fresh: bool
) -> None:
    """a row whose link leads to one that was not saved yet looks like damage; see replay_test.cpp,
    "a save killed at any change leaves what can be loaded"."""
    chance, file = random.Random(dose), tmp_path / "replay"
    with Replay(LINKED, capacity=8_000, streams=4, observations=["obs"], alpha=0.6) as replay:
        writer, environments = replay.writer(), Environments([0, 1, 2, 3])
        scene.race.signal("go").store(1)
        loaded = 0
        for _ in range(12 * dose):
            for _ in range(150):
                rows, final = environments.step()
                writer.add(rows, final=final)
            if fresh:
                file.unlink(missing_ok=True)
            victim = scene.begin("save_for_ever", 0, replay, str(file))
            time.sleep(chance.uniform(0, 0.012))
            scene.kill(victim)
            if not file.exists():
                continue  # killed before there was one
            with Replay.load(file) as copy:
                words, _ = stored(copy)
                if (words & 3 == COMPLETE).sum() > 100:
                    assert misplaced(sampler_of(copy, 1).sample(200)) == 0
                    loaded += 1
        replay.save(file)
        with Replay.load(file) as copy:
            assert copy.size == replay.size
            assert misplaced(sampler_of(copy, 1).sample(200)) == 0
    assert loaded > 0


def test_a_save_killed_right_after_it_made_the_file_leaves_none_or_one_that_can_be_loaded(
    template: Template, tmp_path: Path
) -> None:
    """the file gets its name before the settings and the description of the rows stand in it. One
    killed in between leaves a file that is no replay, and every later save to that name fails on it. Cure: make it
    under another name beside it, and rename it when it is complete."""
    file = tmp_path / "replay"
    with Replay(LOOSE, capacity=64) as replay:
        replay.add(loose_rows(0, 0, 32))
        assert template.reap(template.fork("save_and_die_young", replay, str(file))) == -signal.SIGKILL
        if file.exists():
            Replay.load(file).close()
        replay.save(file)
        with Replay.load(file) as copy:
            assert copy.size == 32


def test_a_replay_in_a_file_that_is_saved_to_that_file_leaves_writers_their_slots(tmp_path: Path) -> None:
    """the copy is the replay itself, so every slot that a writer holds just now is made empty under
    his hands; the next writer claims it too, and both write into one row. Cure: where both are one file, only fsync."""
    file = tmp_path / "replay"
    with Replay(LOOSE, capacity=64, file=file) as replay:
        replay.add(loose_rows(0, 0, 32))
        writing = Peer.of(os.getpid()).word << 2 | WRITING
        replay.segment["rows"][40, :8] = np.array([writing]).view(np.uint8)  # a writer in the middle of a row
        replay.save(file)
        assert stored(replay)[0][40] == writing


def test_streams_of_a_save_end_at_rows_that_the_file_knows(tmp_path: Path) -> None:
    """the ends of the streams are read after the rows, when writers are further. Who loads the file
    and resumes links its first row to a number that the copy has not given out yet: a file saved from it then is
    "damaged", and when the number is given out, to any stream, frames are stacked across both. Cure: read the ends
    before the rows, store them after; and refuse ends above the last number when a file is opened."""
    file = tmp_path / "replay"
    with Replay(LINKED, capacity=64, streams=2, observations=["obs"]) as replay:
        environments = Environments([0, 1], 6)
        writer = replay.writer()

        def step() -> None:
            rows, final = environments.step()
            writer.add(rows, final=final)

        for _ in range(3):
            step()
        native = replay.native

        class Busy:
            """Somebody else adds right after the rows were saved."""

            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

            def save_into(self, copy: Any) -> int:
                changed = native.save_into(copy)
                step()
                return changed

        replay.native = Busy()  # type: ignore[assignment]
        replay.save(file)
        replay.native = native
    with Replay.load(file) as loaded:
        last = int(loaded.segment["control"].tobytes()[:8][::-1].hex(), 16)
        assert (loaded.segment["streams"] <= last).all()
