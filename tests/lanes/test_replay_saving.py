"""Saving a replay: what comes back, what is written again, and what becomes of files that are not what they seem."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memlane.core import NothingToSample, Segment, SegmentError, SegmentExists, SegmentMissing, WaitTimeout
from memlane.ipc import Limiter, Replay, ReplaySampler, Weights
from tests.support.lanes import timed_out
from tests.support.payloads import LOOSE, count_torn, loose_rows
from tests.support.processes import PATIENCE, child, state_of, wait_for
from tests.support.replay_lives import stored
from tests.support.replays import PLAIN, STEP, drawn, final, limit_life, step


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "replay"


def made(**arguments: Any) -> Replay:
    return Replay(STEP, **{"capacity": 12, "streams": 2, "observations": ["obs"], "alpha": 0.7, **arguments})


def fill(replay: Replay, begin: int = 0, *, resume: bool = False) -> None:
    """More than it holds, with episodes that end both ways, and one that goes on."""
    writer = replay.writer(resume=resume)
    for number in range(begin, begin + 8):
        ends = number % 8 == 3
        writer.add(
            step(number, 100 + number, terminated=[ends, False], truncated=[False, ends], reward=number),
            final=final(number + 0.5, number + 100.5) if ends else None,
            version=number,
        )


@pytest.fixture
def full() -> Iterator[Replay]:
    with made() as replay:
        fill(replay)
        batch = replay.sampler(seed=4).sample(30)
        replay.update_priorities(batch["key"], np.linspace(0.1, 9, 30))
        replay.update_priorities(np.array([1, 2]), [1.0, 1.0])  # stale
        yield replay


def everything(replay: Replay) -> dict[str, Any]:
    found = drawn(replay, 2000, n_step=2, stack={"obs": 2}, extras=["key", "version", "horizon"])
    return {
        "rows": {number: {name: row[name] for name in row if name != "weight"} for number, row in found.items()},
        "total": replay.native.total_priority(),
        "streams": replay.segment["streams"].tolist(),
        "highest": float(replay.segment["control"].reshape(1).view(np.float32)[96]),
    }


# ------------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("how", [Replay.load, Replay.open])
def test_what_was_saved_is_there_again(full: Replay, file: Path, how: Any) -> None:
    full.save(file)
    counters = full.counters()
    assert counters["stale_priorities"] == 2
    with how(file) as again:
        assert again.counters() == counters
        assert (again.added, again.size, again.layout, again.alpha) == (full.added, full.size, full.layout, full.alpha)
        assert everything(again) == everything(full)


# Once: the times that the limiter held somebody back are not carried into the file.
def test_all_counters_come_back(file: Path) -> None:
    with Replay(PLAIN, capacity=4, limiter=Limiter(1.0, 3)) as replay:
        assert timed_out(replay.sampler(seed=0).sample, 1, timeout=1e-6)
        replay.save(file)
        with Replay.load(file) as again:
            assert again.counters() == replay.counters()


def test_the_limiter_goes_on_with_its_account(file: Path) -> None:
    with Replay({"x": ("int64", ())}, capacity=50, limiter=Limiter(1.0, 2, 8.0)) as replay:
        replay.add({"x": np.arange(6)})
        replay.sampler(seed=0).sample(7)
        replay.save(file)
    with Replay.load(file) as again:
        sampler = again.sampler(seed=0)
        assert again.limiter == Limiter(1.0, 2, 8.0)
        assert [timed_out(sampler.sample, 1, timeout=1e-6) for _ in range(6)] == [False] * 5 + [True]


@pytest.mark.parametrize("alpha", [None, 0.7])
@pytest.mark.parametrize("how", [Replay.load, Replay.open])
def test_who_saves_reopens_and_goes_on_gets_the_batches_of_who_never_stopped(
    file: Path, how: Any, alpha: float | None
) -> None:
    def live(replay: Replay, sampler: Any, begin: int) -> list[bytes]:
        seen = []
        for round_begin in (begin, begin + 8):
            fill(replay, round_begin, resume=True)
            batch = sampler.sample(16)
            if alpha is not None:
                replay.update_priorities(batch["key"], np.arange(16.0))
            seen.append(b"".join(array.tobytes() for array in batch.values()))
        return seen

    with made(alpha=alpha) as steady, made(alpha=alpha) as stopped:
        sampler, other = steady.sampler(seed=9, n_step=2), stopped.sampler(seed=9, n_step=2)
        assert live(steady, sampler, 0) == live(stopped, other, 0)
        stopped.save(file)
        with how(file) as again:
            assert live(steady, sampler, 16) == live(again, again.sampler(n_step=2), 16)
            assert again.counters() == steady.counters()


def test_each_sampler_goes_on_with_its_own_chance(full: Replay, file: Path) -> None:
    samplers = [full.sampler(seed=seed) for seed in (1, 2)]
    full.save(file)
    with Replay.load(file) as again:
        others = [again.sampler() for _ in range(2)]
        for sampler, other in zip(samplers, others, strict=True):
            assert sampler.sample(32)["key"].tolist() == other.sample(32)["key"].tolist()


def test_keys_from_before_are_still_good(full: Replay, file: Path) -> None:
    batch = full.sampler(seed=3).sample(10)
    full.save(file)
    with Replay.load(file) as again:
        assert again.update_priorities(batch["key"], np.ones(10)) == 10


def test_an_empty_replay_can_be_saved(file: Path) -> None:
    with made() as replay:
        assert replay.save(file) == 0
    with Replay.load(file) as again:
        fill(again)
        assert again.size > 0
        assert drawn(again)


# --------------------------------------------------------------------------------------------- what is written, and how


def test_a_second_save_writes_only_what_changed(full: Replay, file: Path) -> None:
    assert full.save(file) == 12
    assert full.save(file) == 0
    # One new row overwrites the oldest; the one before it learns what follows.
    full.writer([1], resume=True).add(step(77))
    assert full.save(file) == 2
    with Replay.load(file) as again:
        assert everything(again) == everything(full)


def test_new_priorities_alone_are_saved_too(full: Replay, file: Path) -> None:
    full.save(file)
    full.update_priorities(full.sampler(seed=6).sample(20)["key"], np.full(20, 30.0))
    full.save(file)
    with Replay.load(file) as again:
        assert everything(again) == everything(full)


def test_a_loaded_replay_leaves_the_file_alone(full: Replay, file: Path) -> None:
    full.save(file)
    with Replay.load(file) as again:
        fill(again, 50)
    with Replay.load(file) as again:
        assert everything(again) == everything(full)


def test_what_is_added_to_an_opened_replay_is_in_the_file_at_once(full: Replay, file: Path) -> None:
    full.save(file)
    with Replay.open(file) as opened:
        fill(opened, 50)
        with Replay.load(file) as again:
            assert everything(again) == everything(opened)


def test_a_replay_can_live_in_a_file_from_the_start(file: Path) -> None:
    with made(file=file) as replay:
        fill(replay)
        before = everything(replay)
        with pytest.raises(SegmentExists):
            made(file=file)
    with Replay.open(file) as again:
        assert everything(again) == before


def test_a_replay_in_a_file_can_be_saved_into_that_file(file: Path) -> None:
    with made(file=file) as replay:
        fill(replay)
        before = everything(replay)
        assert replay.save(file) == 0
        assert everything(replay) == before


def test_a_replay_in_a_file_can_be_pickled(file: Path) -> None:
    with made(file=file) as replay:
        fill(replay)
        with pickle.loads(pickle.dumps(replay)) as other:
            assert everything(other) == everything(replay)


@pytest.mark.parametrize("change", [{"capacity": 13}, {"alpha": 0.6}, {"streams": 3}, {"observations": []}])
def test_a_file_of_another_replay_is_not_overwritten(full: Replay, file: Path, change: dict[str, Any]) -> None:
    with made(**change) as other:
        other.save(file)
    before = file.read_bytes()
    with pytest.raises(SegmentError, match=r"holds another replay .*; save to another file, or remove it"):
        full.save(file)
    assert file.read_bytes() == before


def test_a_file_that_is_no_replay_is_not_overwritten(full: Replay, file: Path) -> None:
    file.write_bytes(b"my thesis" * 1000)
    with pytest.raises(SegmentError):
        full.save(file)
    assert file.read_bytes() == b"my thesis" * 1000


# ------------------------------------------------------------------------------------------------------- one at a time


def save_forever(replay: Replay, file: Path) -> None:
    while True:
        with contextlib.suppress(SegmentError):
            replay.save(file)


WIDE = {"number": ("int64", 16_384)}
"""A row that takes long to copy; all its numbers are equal."""


def overwrite_forever(replay: Replay) -> None:
    for number in range(2**40):
        replay.add({"number": np.full((1, 16_384), number)})


# Race: two savers of one replay, stopped and continued while a writer overwrites it.
#   one of them saves, the other is refused   acceptable
#   a row that was put together from several  FORBIDDEN
def test_two_processes_that_save_to_one_file_do_not_ruin_it(file: Path) -> None:
    with Replay(WIDE, capacity=4) as replay:
        with child(save_forever, replay, file) as first, child(save_forever, replay, file) as second:
            for _ in range(12):
                with child(overwrite_forever, replay) as writer:
                    time.sleep(0.05)
                    writer.kill()
                time.sleep(0.05)
                for saver in (first, second):
                    os.kill(saver.pid or 0, signal.SIGSTOP)
                    assert wait_for(lambda saver=saver: state_of(saver.pid) == "T")
                assert mixed_rows(file) == 0
                for saver in (first, second):
                    os.kill(saver.pid or 0, signal.SIGCONT)
            first.kill()
            second.kill()
        replay.save(file)
        assert mixed_rows(file) == 0


def mixed_rows(file: Path) -> int:
    """Stored rows that were put together from several, read without ``Replay.open``, which a stopped saver prevents."""
    with Segment.attach(file=file) as segment:
        rows = segment["rows"]
        complete = rows[:, :8].copy().view(np.int64)[:, 0] & 3 == 2
        numbers = rows[complete, 8 : 8 + 8 * 16_384].copy().view(np.int64)
        return int((numbers != numbers[:, :1]).any(axis=1).sum())


def test_a_second_saver_is_told_who_saves_and_the_death_of_that_process_frees_the_file(file: Path) -> None:
    with Replay(LOOSE, capacity=100_000) as replay:
        replay.add(loose_rows(0, 0, 100_000))
        replay.save(file)
        with child(save_forever, replay, file) as saver:
            message = ""
            for _ in range(2000):
                os.kill(saver.pid or 0, signal.SIGSTOP)
                assert wait_for(lambda: state_of(saver.pid) == "T")
                try:
                    replay.save(file)
                except SegmentError as error:
                    message = str(error)
                    break
                os.kill(saver.pid or 0, signal.SIGCONT)
                time.sleep(0.001)
            assert f"is in use: pid {saver.pid} (" in message
            assert "saves to it or has it open; wait until it has finished, or use another file" in message
            for how in (Replay.open, Replay.load):
                with pytest.raises(SegmentError, match=rf"is in use: pid {saver.pid} \(.*\) saves to it; wait until"):
                    how(file)
            saver.kill()
        assert replay.save(file) >= 0
        with Replay.load(file) as again:
            assert (len(again), count_torn(stored(again)[1])) == (100_000, 0)


def hold_open(file: Path, pipe: Any) -> None:
    with Replay.open(file):
        pipe.send(None)
        time.sleep(PATIENCE)


def test_a_file_that_is_open_elsewhere_can_be_opened_and_loaded_but_not_saved_to(full: Replay, file: Path) -> None:
    full.save(file)
    arrived, pipe = mp.Pipe(duplex=False)
    with child(hold_open, file, pipe) as holder:
        assert arrived.poll(PATIENCE)
        with Replay.open(file) as opened, Replay.load(file) as loaded:
            assert opened.size == loaded.size == full.size
        with pytest.raises(SegmentError, match=f"is in use: pid {holder.pid} "):
            full.save(file)
        holder.kill()
    assert full.save(file) == 0
    arrived.close()
    pipe.close()


def test_a_replay_that_this_process_has_open_in_a_file_is_not_overwritten(full: Replay, file: Path) -> None:
    full.save(file)
    with Replay.open(file) as opened, pytest.raises(SegmentError, match=rf"pid {os.getpid()} \(this process\)"):
        full.save(file)
    assert opened.segment.closed
    assert full.save(file) == 0


def test_a_replay_that_was_pickled_keeps_its_file_from_being_saved_to(file: Path) -> None:
    with made() as other:
        with made(file=file) as replay:
            again = pickle.loads(pickle.dumps(replay))
        with again, pytest.raises(SegmentError, match="is in use"):
            other.save(file)
        other.save(file)


# ---------------------------------------------------------------------------------------------------------- wrong files


def test_a_file_that_is_not_there_is_missed(file: Path) -> None:
    with pytest.raises(SegmentMissing, match=r"there is no file '.*'; Replay\.save writes one"):
        Replay.load(file)


@pytest.mark.parametrize("foreign", [b"", b"\0" * 10_000, b"PK\x03\x04" * 5000], ids=["empty", "zeros", "zip"])
def test_a_file_of_something_else_is_refused(file: Path, foreign: bytes) -> None:
    file.write_bytes(foreign)
    for how in (Replay.load, Replay.open):
        with pytest.raises(SegmentError):
            how(file)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SegmentError):
        Replay.load(tmp_path)


def test_the_file_of_another_lane_is_refused(file: Path) -> None:
    with Weights(PLAIN) as weights:
        os_file = weights.segment._fd
        file.write_bytes(os.pread(os_file, weights.nbytes, 0))
    with pytest.raises(SegmentError, match="is not a replay lane"):
        Replay.load(file)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_refused(full: Replay, file: Path, share: float) -> None:
    full.save(file)
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(SegmentError):
        Replay.load(file)


# Where a number lies: a field, and which of its 64-bit words. Reserved numbers are the first word of the control block.
LAST, HIGHEST = ("control", 0), ("control", 48)
NAN = 0x7FF8_0000_0000_0000


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (("rows", 0), -1),
        (("rows", 0), 2),  # complete, number 0
        (("rows", 0), 1 << 40 | 2),  # a number that was never given out
        (("rows", 1), -(2**50)),  # what follows
        (("rows", 1), 2**50),
        (("rows", 2), -1),  # what came before
        (("rows", 2), 2**50),
        (("tree", 3), 0xFFC0_0000),  # a priority that is no number
        (("tree", 3), 0xBF80_0000),  # below 0
        (("streams", 1), -1),
        (("control", 8), -1),  # added
        (("control", 32), -1),  # evicted
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(
    full: Replay, file: Path, place: tuple[str, int], word: int
) -> None:
    full.save(file)
    put(file, place, word)
    for how in (Replay.load, Replay.open):
        with pytest.raises(SegmentError, match=r"is damaged: .*; restore it from a copy"):
            how(file)


def put(file: Path, place: tuple[str, int], word: int) -> None:
    with Replay.open(file) as replay:
        segment = replay.segment
        offset = segment.nbytes - segment.layout.nbytes + segment.layout[place[0]].offset + 8 * place[1]
    with file.open("r+b") as raw:
        raw.seek(offset)
        raw.write((word % 2**64).to_bytes(8, "little"))


DAMAGES = {
    "a number next to the last there is": (LAST, 2**63 - 3),  # Once: the next rows get numbers below 0
    "numbers far ahead of the rows": (LAST, 2**40),
    "a ratio that is no number": (("settings", 5), NAN),  # Once: ValueError, not SegmentError
    "a buffer that is no number": (("settings", 7), NAN),  # Once: ValueError, not SegmentError
    "a least number below 1": (("settings", 6), -1),  # Once: ValueError, not SegmentError
    "a power that is no number": (("settings", 3), NAN),  # Once: every new priority is nan, and nothing is drawn
    "observations that are no fields": (("settings", 2), 1 << 50),
    "a highest priority that is no number": (HIGHEST, 0x7FC0_0000),  # Once: new rows get it, and nothing is drawn
    "strangers among the samplers": (("samplers", 0), -1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_with_impossible_numbers_is_refused_or_works(file: Path, damage: str) -> None:
    with made(limiter=Limiter(1.0, 2)) as replay:
        fill(replay)
        replay.save(file)
    put(file, *DAMAGES[damage])
    with child(use, file):
        pass


# Once: with no row to compare it with, a last number below 0 is believed; rows are then written before the first slot,
# over the priorities, the random states and whatever else lies there.
def test_an_empty_replay_whose_last_number_is_below_0_is_refused_or_works(file: Path) -> None:
    with made() as replay:
        replay.save(file)
    put(file, LAST, -(2**40))
    with child(use, file):
        pass


# Once: a state of zeros, which one set bit beside it makes look like one from before, throws the same number for ever,
# and a draw among any number of rows that is no power of two never ends. No signal but SIGKILL ends it.
def test_a_random_state_of_zeros_is_refused_or_works(file: Path) -> None:
    with made(alpha=None) as replay:
        fill(replay)
        replay.save(file)
    put(file, ("rng", 5), 1)
    with child(use, file):
        pass


# Once: KeyError 'next_x', when a sampler is made.
def test_observations_without_streams_are_refused_or_work(file: Path) -> None:
    with Replay({"x": ("int64", ())}, capacity=4) as replay:
        replay.add({"x": np.arange(3)})
        replay.save(file)
    put(file, ("settings", 2), 1)
    try:
        again = Replay.load(file)
    except SegmentError:
        return
    with again:
        again.sampler(seed=0).sample(1)


def use(file: Path) -> None:
    """All that one does with a replay; in a process of its own, which dies if it takes too long.

    The replay may have become another: with other names, other observations. Then it must work as that one.
    """
    limit_life(3.0)
    for how in (Replay.load, Replay.open):
        try:
            replay = how(file)
        except SegmentError:
            continue
        with replay:
            sampler = replay.sampler(n_step=2, stack=dict.fromkeys(replay.observations[:1], 2))
            with contextlib.suppress(NothingToSample, WaitTimeout):  # what was damaged may be gone
                sampler.sample(8, timeout=1e-3)
            try:
                go_on(replay, sampler)
            except WaitTimeout:
                continue  # damaged accounts of a limiter may hold everybody back
            except ValueError as error:
                if "need an error_buffer of at least" not in str(error):  # so may a limiter that came to be
                    raise


def go_on(replay: Replay, sampler: ReplaySampler) -> None:
    before = replay.segment["rng"].tobytes(), replay.segment["samplers"].tobytes()
    add_zeros(replay)
    assert before == (replay.segment["rng"].tobytes(), replay.segment["samplers"].tobytes())
    for _ in range(3):  # what was added now must come out
        batch = sampler.sample(8, timeout=1e-3)
        if replay.alpha is not None:
            assert np.isfinite(batch["weight"]).all()
            replay.update_priorities(batch["key"], np.ones(8))


def add_zeros(replay: Replay) -> None:
    """More than it holds, in a few episodes."""
    writer = replay.writer()
    for number in range(replay.capacity + 3):
        rows = {field.name: np.zeros((replay.streams, *field.shape), field.dtype) for field in replay.layout}
        ends = number % 4 == 3 and "terminated" in rows and bool(replay.observations)
        if ends:
            rows["terminated"][:] = True
        writer.add(rows, final={name: rows[name] for name in replay.observations} if ends else None, timeout=1e-3)


FIELDS = list(Replay.segment_layout(STEP, 12, streams=2, alpha=0.7).fields)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,  # each example is a process: the same few on every machine, and no search for smaller ones
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    flips=st.lists(
        st.tuples(st.sampled_from(["header", *FIELDS]), st.integers(0, 2**16), st.integers(1, 255)),
        min_size=1,
        max_size=4,
    )
)
def test_a_file_with_flipped_bytes_works_or_is_refused(
    full: Replay, tmp_path: Path, flips: list[tuple[str, int, int]]
) -> None:
    file = tmp_path / "flipped"
    file.unlink(missing_ok=True)
    full.save(file)
    content = bytearray(file.read_bytes())
    header = full.segment.nbytes - full.segment.layout.nbytes
    for name, place, flip in flips:
        if name == "header":
            content[place % header] ^= flip
        else:
            field = full.segment.layout[name]
            content[header + field.offset + place % field.nbytes] ^= flip
    file.write_bytes(content)
    with child(use, file):
        pass
