"""Races and kills over a replay, between real processes, with rows that check themselves.

Outcomes of a row. Acceptable: sampled whole, as itself and with its own steps around it, until newer rows overwrite it.
Forbidden: sampled in part, put together from another stream or episode, counted but missing, or present but not counted
although its writer lives. A writer that is killed or stopped costs its own unfinished rows and delays no other process.

`make soak` runs the same with more rows and more kills.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.ipc import Limiter, Replay
from tests.support import replay_lives as lives
from tests.support.kills import PATIENCE, Kills, Template, accounted
from tests.support.payloads import LINKED, LOOSE, CheckedEnvs, count_misplaced, count_torn, loose_rows
from tests.support.processes import child, wait_for
from tests.support.replay_lives import sampler_of, stored
from tests.support.replays import STEP, step

WRITING, COMPLETE = 1, 2


@pytest.fixture
def kills(template: Template, kill_folder: Path, scale: int, request: pytest.FixtureRequest) -> Iterator[Kills]:
    make = partial(Kills, template, lives.BOARD, request.node.originalname, scale)
    with accounted(make, kill_folder, request) as kills:
        yield kills


def held(replay: Replay) -> int:
    """Slots that a writer holds, or held when it died."""
    return int((stored(replay)[0] & 3 == WRITING).sum())


def complete(replay: Replay) -> int:
    """Transitions that are stored."""
    return int((stored(replay)[0] & 3 == COMPLETE).sum())


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "by priority"])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_independent_rows_are_sampled_whole_while_writers_overwrite_them(
    kills: Kills, scale: int, writers: int, alpha: float | None
) -> None:
    """Once some weights were NaN and the rest of their batch 0; see sampler_test.cpp, "a sampler held anywhere while a
    row is overwritten gives whole rows and finite weights"."""
    each = 24_000 * scale // writers
    with Replay(LOOSE, capacity=64, alpha=alpha) as replay:
        samplers = range(writers, writers + 2)
        for place in range(writers):
            kills.fork(lives.race_to_add, place, replay, each, 7, samplers)
        for place in samplers:
            kills.fork(lives.race_to_sample, place, replay, writers)
        kills.go()
        kills.join()
        expect_all_counted(kills, replay)
        words, rows = stored(replay)
        assert count_torn(rows) == 0
        assert kills.board["added"].sum() == writers * each
        assert len(set(words.tolist())) == replay.capacity


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "by priority"])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_streams_are_sampled_step_by_step_while_writers_overwrite_them(
    kills: Kills, scale: int, writers: int, alpha: float | None
) -> None:
    each = 8_000 * scale // writers
    with Replay(LINKED, capacity=96, streams=2 * writers, observations=["obs"], alpha=alpha) as replay:
        samplers = range(writers, writers + 2)
        for place in range(writers):
            kills.fork(lives.race_to_step, place, replay, each, [2 * place, 2 * place + 1], samplers)
        for place in samplers:
            kills.fork(lives.race_to_sample, place, replay, writers)
        kills.go()
        kills.join()
        expect_all_counted(kills, replay)
        assert count_misplaced(sampler_of(replay, 1).sample(400)) == 0


def expect_all_counted(kills: Kills, replay: Replay) -> None:
    counters, board = replay.counters(), kills.board
    assert board["wrong"].sum() == 0
    assert board["bad_weights"].sum() == 0
    assert counters["added"] == board["added"].sum() == replay.added
    assert counters["abandoned"] == 0
    words, _ = stored(replay)
    assert replay.size == (words & 3 == COMPLETE).sum() == counters["added"] - counters["evicted"]
    assert all(board.signal("progress", place).value > 0 for place in np.flatnonzero(board["added"] == 0)[:2])


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_every_row_of_every_writer_is_stored_once_where_the_capacity_suffices(
    kills: Kills, scale: int, writers: int
) -> None:
    each = 4_000 * min(scale, 10) // writers
    with Replay(LOOSE, capacity=writers * each + 50, alpha=0.5) as replay:
        for place in range(writers):
            kills.fork(lives.race_to_add, place, replay, each, 3 + place, range(writers, writers + 1))
        kills.fork(lives.race_to_sample, writers, replay, writers)
        kills.go()
        kills.join()
        words, rows = stored(replay)
        complete = words & 3 == COMPLETE
        assert sorted((words[complete] >> 2).tolist()) == list(range(1, writers * each + 1))
        rows_found = sorted(zip(rows["writer"][complete].tolist(), rows["number"][complete].tolist(), strict=True))
        assert rows_found == [(writer, number) for writer in range(writers) for number in range(each)]
        assert (replay.added, replay.size) == (writers * each, writers * each)
        assert count_torn(rows[complete]) == 0
        # A sampler finds them all: with 24 draws for each row, one is missed less than once in a million runs.
        replay.update_priorities(words[complete] >> 2, np.ones(writers * each))
        batch = replay.sampler(seed=1).sample(24 * writers * each)
        assert len(np.unique(batch["key"])) == writers * each
        assert count_torn(batch) == 0


# ------------------------------------------------------------------------------------------------------ killed, stopped


@pytest.mark.parametrize("linked", [False, True], ids=["loose", "streams"])
def test_writers_killed_at_random_instants_cost_only_their_unfinished_rows(kills: Kills, linked: bool) -> None:
    streams = 4 if linked else 0
    row, observations = (LINKED, ["obs"]) if linked else (LOOSE, [])
    with Replay(row, capacity=96, streams=streams, observations=observations, alpha=0.6) as replay:
        kills.fork(lives.survive_writing, 0, replay, [0, 1])
        kills.fork(lives.survive_sampling, 1, replay)
        kills.go()
        abandoned = 0
        for kill in kills.rounds(24, wipe=False):
            victim = kills.start(lives.write_forever, 2, replay, [2, 3], 100 * kill)
            kills.sleep(0.01)
            kills.kill(victim)
            kills.expect_progress(0, 1)  # the victim may still be a zombie
            kills.confirm(victim)
            assert wait_for(lambda: held(replay) <= 1)  # the survivor's own
            abandoned = replay.counters()["abandoned"]
            assert abandoned <= 2 * (kill + 1)
        kills.join()
        assert kills.board["wrong"].sum() == 0
        kills.note_wait(0, int(kills.board["slowest_ns"][0]))
        assert held(replay) == 0
        counters = replay.counters()
        assert counters["added"] >= kills.board["added"].sum()
        assert replay.size == complete(replay)
        if linked:
            assert count_misplaced(sampler_of(replay, 1).sample(400)) == 0
        else:
            assert count_torn(stored(replay)[1]) == 0
        print(f"{abandoned} rows abandoned")


# Regression: rows were counted at the end of `add`. A writer that was killed before left all rows of the call uncounted
# for ever, and those that it had overwritten counted: 171,000 of 200,000.
def test_the_size_is_right_after_writers_were_killed_while_they_added_many_rows(scale: int) -> None:
    for _ in range(4 * scale):
        with Replay(LOOSE, capacity=60_000) as replay:
            with child(replay.add, loose_rows(1, 0, 50_000)) as victim:
                assert spin_until(lambda replay=replay: replay.segment["rows"][1000, 0] != 0)
                victim.kill()
            assert 1000 <= complete(replay) < 50_000  # killed while it added
            assert complete(replay) <= replay.size <= complete(replay) + held(replay)
            for number in range(2):
                replay.add(loose_rows(0, 40_000 * number, 40_000))
            assert len(replay) == complete(replay) == 60_000


def spin_until(condition: Callable[[], object]) -> bool:
    """Like ``wait_for``, without a pause in which the writer could finish."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


# Regression: a sequence ended, as if nothing followed, at a row that was overwritten while the sequence was drawn.
def test_sequences_end_early_only_at_the_newest_row_of_their_stream() -> None:
    length = 12
    wide = {**STEP, "obs": ("float32", 65_536)}  # copied long enough to be overwritten meanwhile
    with Replay(wide, 40, streams=1, observations=["obs"]) as replay, child(step_forever, replay) as writer:
        assert wait_for(lambda: replay.added > 40)
        sampler = replay.sampler(seed=0, length=length, extras=["key"])
        whole = 0
        for _ in range(500):
            newest = replay.native.last_sequence()
            batch = sampler.sample(8)
            rows = batch["valid"].sum(axis=1)
            last = batch["key"][np.arange(8), rows - 1]
            # The newest row of all may be reserved only, the one before it has no successor yet.
            assert (last[rows < length] >= newest - 2).all()
            whole += int((rows == length).sum())
        assert whole > 100
        assert replay.counters()["redrawn"] > 0
        writer.kill()


def step_forever(replay: Replay) -> None:
    writer = replay.writer()
    row = {**step(0), "obs": np.zeros((1, *replay.layout["obs"].shape), np.float32)}
    while True:
        writer.add(row)


def test_a_stopped_writer_that_holds_a_slot_blocks_no_other_and_its_death_frees_the_slot(
    kills: Kills, scale: int
) -> None:
    for _ in range(scale):
        with Replay(LOOSE, capacity=24, alpha=0.6) as replay:
            victim = kills.start(lives.write_forever, 2, replay, [], 0)
            kills.go()
            for _ in range(2000):
                kills.stop(victim)
                if held(replay):
                    break
                kills.resume(victim)
                time.sleep(0.0001)
            assert held(replay) == 1
            before = replay.counters()
            sampler = replay.sampler(seed=1)
            for number in range(240):
                assert replay.add(loose_rows(0, number, 1)) == 1
                assert count_torn(sampler.sample(8)) == 0
            after = replay.counters()
            assert after["added"] == before["added"] + 240
            assert after["avoided"] >= before["avoided"] + 9  # once per pass over the slots
            assert (held(replay), after["abandoned"]) == (1, before["abandoned"])
            kills.kill(victim)
            kills.confirm(victim)
            for number in range(48):
                replay.add(loose_rows(0, number, 1))
            assert held(replay) == 0
            assert replay.counters()["abandoned"] == before["abandoned"] + 1
            assert count_torn(stored(replay)[1]) == 0


def test_a_writer_killed_while_the_limiter_makes_it_wait_does_not_delay_others(kills: Kills) -> None:
    with Replay(LOOSE, capacity=200, limiter=Limiter(ratio=1.0, min_size=20, error_buffer=40)) as replay:
        sampler = replay.sampler(seed=1)
        kills.board.signal("go").store(1)
        for kill in kills.rounds(4, wipe=False):
            victim = kills.start(lives.add_until_limited, 0, replay)
            assert wait_for(lambda: replay.counters()["held_writers"] > kill)  # noqa: B023
            time.sleep(0.002)
            kills.kill(victim)
            with kills.promptly():
                sampler.sample(32, timeout=PATIENCE)
                assert replay.add(loose_rows(1, kill, 8), timeout=PATIENCE) == 8
            kills.confirm(victim)
        with kills.promptly():
            assert count_torn(sampler.sample(8, timeout=PATIENCE)) == 0


def test_a_limiter_with_the_error_buffer_that_it_requires_never_makes_both_sides_wait() -> None:
    """Eight rows at a time do not meet min_size=10. Until there is enough to sample from, no writer may wait: the
    second add would wait for samples, and samples for ten rows."""
    with Replay(LOOSE, capacity=200, limiter=Limiter(ratio=1.0, min_size=10, error_buffer=4.5)) as replay:
        assert replay.add(loose_rows(0, 0, 8), timeout=0.2) == 8
        assert replay.add(loose_rows(0, 8, 8), timeout=0.2) == 8
        replay.sampler(seed=1).sample(1, timeout=0.2)


# ----------------------------------------------------------------------------------------------------------- priorities


def test_an_error_too_large_for_a_priority_is_refused_or_limited() -> None:
    """A finite error whose power does not fit into a float would become an infinite priority: one row would be sampled
    always, and every new row would get infinity as well. So would the sum of sixteen that just fit."""
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
def writing_streams(kills: Kills, capacity: int) -> Iterator[Replay]:
    with Replay(LINKED, capacity=capacity, streams=4, observations=["obs"], alpha=0.6) as replay:
        for place in range(2):
            kills.fork(lives.survive_writing, place, replay, [2 * place, 2 * place + 1])
        kills.go()
        assert wait_for(lambda: replay.added > 32)
        yield replay


def test_a_replay_saved_while_others_write_can_be_loaded_whole(kills: Kills, scale: int, tmp_path: Path) -> None:
    with writing_streams(kills, 256) as replay:
        for _ in range(20 * scale):
            replay.save(tmp_path / "replay")
            with Replay.load(tmp_path / "replay") as loaded:
                assert count_misplaced(sampler_of(loaded, 1).sample(200)) == 0
                assert loaded.added <= replay.added
        kills.join()


@pytest.mark.parametrize("fresh", [True, False], ids=["a new file", "again and again"])
def test_a_save_that_is_killed_leaves_a_file_that_can_be_loaded(kills: Kills, tmp_path: Path, fresh: bool) -> None:
    """A row whose link leads to one that was not saved yet would look damaged; see replay_test.cpp, "a save killed at
    any change leaves what can be loaded"."""
    file = tmp_path / "replay"
    with Replay(LINKED, capacity=8_000, streams=4, observations=["obs"], alpha=0.6) as replay:
        writer, envs = replay.writer(), CheckedEnvs([0, 1, 2, 3])
        kills.board.signal("go").store(1)
        loaded, seconds = 0, 0.012
        for _ in kills.rounds(12, wipe=False):
            for _ in range(150):
                rows, final = envs.step()
                writer.add(rows, final=final)
            if fresh:
                file.unlink(missing_ok=True)
            victim = kills.start(lives.save_forever, 0, replay, str(file))
            kills.sleep(seconds)
            kills.kill(victim)
            kills.confirm(victim)
            seconds = 0.012 if loaded else 2 * seconds  # a busy machine may need longer for a save
            if not file.exists():
                continue  # killed before the file was made
            with Replay.load(file) as copy:
                words, _ = stored(copy)
                if (words & 3 == COMPLETE).sum() > 100:
                    assert count_misplaced(sampler_of(copy, 1).sample(200)) == 0
                    loaded += 1
        replay.save(file)
        with Replay.load(file) as copy:
            assert copy.size == replay.size
            assert count_misplaced(sampler_of(copy, 1).sample(200)) == 0
    assert loaded > 0


def test_a_save_killed_right_after_it_made_the_file_leaves_none_or_one_that_can_be_loaded(
    kills: Kills, tmp_path: Path
) -> None:
    """A file that got its name before its settings and row description were written would, after a kill in between, be
    no replay, and every later save to that name would fail. So a save writes a file beside it and renames that."""
    file = tmp_path / "replay"
    with Replay(LOOSE, capacity=64) as replay:
        replay.add(loose_rows(0, 0, 32))
        assert kills.reap(kills.fork(lives.save_and_die_early, replay, str(file))) == -signal.SIGKILL
        if file.exists():
            Replay.load(file).close()
        replay.save(file)
        with Replay.load(file) as copy:
            assert copy.size == 32


def test_a_replay_in_a_file_that_is_saved_to_that_file_leaves_writers_their_slots(tmp_path: Path) -> None:
    """If the copy were the replay itself, every slot that a writer holds just now would be emptied; the next writer
    would claim it too, and both would write into one row. So where both are one file, a save is only an fsync."""
    file = tmp_path / "replay"
    with Replay(LOOSE, capacity=64, file=file) as replay:
        replay.add(loose_rows(0, 0, 32))
        writing = replay.segment.life.process() << 2 | WRITING
        replay.segment["rows"][40, :8] = np.array([writing]).view(np.uint8)  # a writer in the middle of a row
        replay.save(file)
        assert stored(replay)[0][40] == writing


def test_streams_of_a_save_end_at_rows_that_the_file_knows(tmp_path: Path) -> None:
    """If the ends of the streams were read after the rows, when writers are further, a process that loads the file and
    resumes would link its first row to a number that the copy has not assigned yet: a file saved from it would be
    "damaged", and once the number is assigned, to any stream, frames would be stacked across both. So a save reads the
    ends before the rows and stores them after; and a file with ends above its last number is refused."""
    file = tmp_path / "replay"
    with Replay(LINKED, capacity=64, streams=2, observations=["obs"]) as replay:
        envs = CheckedEnvs([0, 1], 6)
        writer = replay.writer()

        def step() -> None:
            rows, final = envs.step()
            writer.add(rows, final=final)

        for _ in range(3):
            step()
        native = replay.native

        class Busy:
            """Another writer adds right after the rows were saved."""

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
