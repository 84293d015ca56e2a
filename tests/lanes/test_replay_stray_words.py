"""Words of a replay that no writer or sampler stored: each call ends, works or raises a named error, within bounds.

What could crash or hang runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import _native
from memlane.core import MemlaneError, NothingToSample, SegmentError
from memlane.core.header import Header
from memlane.ipc import Replay
from tests.support.processes import PATIENCE, ask, child, within
from tests.support.replays import PLAIN, STEP, drawn, limit_life, play, step

LAST = 0
"""The last sequence number is the first word of the control block."""


def control(replay: Replay) -> Any:
    return replay.segment["control"].reshape(1).view(np.int64)


def heads(replay: Replay) -> Any:
    """The words at the start of each row: state, next, previous, version."""
    return replay.segment["rows"][:, :32].view(np.int64)


def nodes(replay: Replay) -> Any:
    """All sums of the sum tree."""
    leaves = -(-replay.capacity // 16) * 16
    return replay.segment["tree"][8 * leaves :].view(np.uint32)


def linked(capacity: int = 40, **options: Any) -> Replay:
    replay = Replay(STEP, capacity, streams=1, observations=["obs"], **options)
    play(replay.writer(), *range(1, 60))
    return replay


# -------------------------------------------------------------------------------------------------- every call ends


def set_priorities_beside(words: list[int], file: Path) -> list[float]:
    limit_life(PATIENCE / 4)
    with Replay.open(file) as replay:
        nodes(replay)[:] = np.resize(np.array(words, np.uint32), len(nodes(replay)))
        batch = replay.sampler(seed=0).sample(64)
        replay.update_priorities(batch["key"], np.ones(64))
        replay.add({"x": np.zeros((20, 2), np.int64)})
        return [float(weight) for weight in replay.sampler(seed=0).sample(64)["weight"]]


# NaNs with and without a sign, quiet and signalling, and what else is no sum.
@pytest.mark.parametrize(
    "words",
    [[0x7FC00001, 0xFFC00002, 0x7F800003, 0xFF800004, 0x7FFFFFFF], [0x7F800000, 0xFF800000], [0xBF800000, 0x7F7FFFFF]],
    ids=["NaN", "infinite", "negative and huge"],
)
def test_sums_of_priorities_that_are_no_numbers_end_no_call_and_spoil_no_weight(
    tmp_path: Path, words: list[int]
) -> None:
    with Replay(PLAIN, capacity=600, alpha=0.5) as replay:
        replay.add({"x": np.zeros((600, 2), np.int64)})
        replay.save(tmp_path / "replay")
    weights = ask(set_priorities_beside, words, tmp_path / "replay")
    assert np.isfinite(weights).all()


def test_sums_in_a_file_are_computed_again_when_it_is_opened(tmp_path: Path) -> None:
    with Replay(PLAIN, capacity=600, alpha=0.5, file=tmp_path / "replay") as replay:
        replay.add({"x": np.zeros((600, 2), np.int64)})
        nodes(replay)[:] = [0x7FC00001 + 7 * number for number in range(len(nodes(replay)))]
    with Replay.open(tmp_path / "replay") as replay:
        assert replay.native.total_priority() == pytest.approx(600)


@pytest.mark.parametrize("word", [0x7FC00001, 0x7F800000, 0xBF800000], ids=["NaN", "infinite", "negative"])
def test_a_priority_that_is_no_number_is_taken_as_0(word: int) -> None:
    with Replay(PLAIN, capacity=20, alpha=0.5) as replay:
        replay.add({"x": np.arange(40).reshape(20, 2)})
        replay.segment["tree"][8 * 5 : 8 * 5 + 4].view(np.uint32)[:] = word  # row 5
        replay.update_priorities(np.array([1]), [2.0])
        batch = replay.sampler(seed=0).sample(500)
        assert 5 not in batch["key"]
        assert np.isfinite(batch["weight"]).all()


def sample_without_chance(replay: Replay) -> int:
    limit_life(PATIENCE / 4)
    sampler = replay.sampler(seed=3)
    replay.segment["rng"][:] = 0
    return len(set(sampler.sample(500)["x"][:, 0].tolist()))


# A state of zeros returns 0 for ever, and a draw among a number of rows that is no power of two never ended.
def test_a_random_state_that_becomes_zeros_still_draws_all_rows() -> None:
    with Replay(PLAIN, capacity=7) as replay:
        replay.add({"x": np.arange(14).reshape(7, 2)})
        assert ask(sample_without_chance, replay) == 7


class Interrupted(Exception):
    pass


def open_until_a_signal(file: Path) -> float:
    def interrupt(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    with contextlib.suppress(Interrupted):
        Replay.open(file).close()
    return time.monotonic() - begin


# A header and 4 GB of nothing: looking at every row takes many seconds. Opening the file reserves its space.
def test_opening_a_large_file_can_be_interrupted(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("needs 6 GB of free space for temporary files")
    file = tmp_path / "sparse"
    with Replay(PLAIN, capacity=10) as small:
        integers = [(4 << 30) // small.bytes_per_transition, *small._integers[1:]]
        layout = Replay._expected_layout(small.layout, integers)
        header = Header.new(layout)
        description = small.segment["description"].tobytes()
    with file.open("wb") as raw:
        os.truncate(raw.fileno(), header.total_bytes)
        header.write(raw.fileno())
        for name, content in (("settings", np.array(integers, np.int64).tobytes()), ("description", description)):
            os.pwrite(raw.fileno(), content, header.header_bytes + layout[name].offset)
    assert ask(open_until_a_signal, file) < within(2.0)


# ------------------------------------------------------------------------------------------------- numbers are bounded


def add_after(replay: Replay, last: int) -> str:
    limit_life(PATIENCE / 4)
    before = {name: replay.segment[name].tobytes() for name in ("settings", "streams", "samplers", "rng", "rows")}
    control(replay)[LAST] = last
    with pytest.raises(SegmentError) as raised:
        replay.add({"x": np.zeros((3, 2), np.int64)})
    assert before == {name: replay.segment[name].tobytes() for name in before}
    return str(raised.value)


@pytest.mark.parametrize("last", [-3, -(2**62), 2**60, 2**61, 2**63 - 2, -(2**63)])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_a_last_number_that_is_none_is_an_error_and_nothing_is_written(last: int, alpha: float | None) -> None:
    with Replay(PLAIN, capacity=12, alpha=alpha) as replay:
        replay.add({"x": np.ones((5, 2), np.int64)})
        assert "is damaged: its last sequence number must be from 0 to 2^60, found" in ask(add_after, replay, last)


STRAY = [-1, -3, -(2**63), 2**63 - 1, 2**62 + 5, 1 << 40, 2**60]


def sample_with(replay: Replay, column: int, word: int) -> None:
    limit_life(PATIENCE / 4)
    heads(replay)[:, column] = word
    for options in ({"n_step": 3}, {"stack": {"obs": 3}}, {"length": 4}):
        with contextlib.suppress(NothingToSample):
            replay.sampler(seed=0, **options).sample(32)
    play(replay.writer(), *range(100, 120))
    assert drawn(replay)


@pytest.mark.parametrize("column", [0, 1, 2], ids=["state", "next", "previous"])
@pytest.mark.parametrize("word", STRAY)
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_links_and_states_of_any_value_lead_to_no_other_memory(column: int, word: int, alpha: float | None) -> None:
    with linked(alpha=alpha) as replay, child(sample_with, replay, column, word):
        pass


def resume_after(replay: Replay, word: int) -> None:
    limit_life(PATIENCE / 4)
    replay.segment["streams"][:] = word
    replay.writer(resume=True).add(step(7))


@pytest.mark.parametrize("word", STRAY)
def test_a_stream_that_ends_at_any_number_is_continued_within_bounds(word: int) -> None:
    with linked(alpha=0.5) as replay, child(resume_after, replay, word):
        pass


@pytest.mark.parametrize("word", STRAY)
def test_stray_words_are_not_carried_into_a_file(tmp_path: Path, word: int) -> None:
    with linked(alpha=0.5) as replay:
        replay.segment["streams"][:] = word
        heads(replay)[5, 0] = word
        replay.segment["tree"][8 * 9 : 8 * 9 + 4].view(np.uint32)[:] = 0x7FC00001
        replay.save(tmp_path / "replay")
    with Replay.load(tmp_path / "replay") as again:
        assert len(drawn(again)) > 30


# Regression: a writer asked for each slot whether its holder is alive: 6 s for a million slots.
def test_a_replay_whose_slots_are_all_held_is_told_at_once() -> None:
    with Replay(PLAIN, capacity=2_000_000) as replay, pickle.loads(pickle.dumps(replay.segment)) as other:
        heads_of_plain = replay.segment["rows"][:, :8].view(np.int64)
        heads_of_plain[:] = other.life.process() << 2 | 1  # a mapping of its own: to the replay, another live process
        begin = time.monotonic()
        with pytest.raises(MemlaneError, match="are held by other live writers"):
            replay.add({"x": np.zeros((1, 2), np.int64)})
        assert time.monotonic() - begin < within(1.0)


# Regression: all slots were looked at again for each row of the batch that random draws did not find.
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_a_batch_from_the_only_row_among_a_million_slots_is_drawn_at_once(alpha: float | None) -> None:
    capacity = 1_000_000
    with Replay(PLAIN, capacity=capacity, alpha=alpha) as replay:
        for _ in range(2):
            replay.add({"x": np.arange(2 * capacity).reshape(capacity, 2)})
        states = replay.segment["rows"][:, :8].view(np.int64)
        states[:700_000] = states[700_001:] = 0
        begin = time.thread_time()
        batch = replay.sampler(seed=0).sample(4096)
        assert time.thread_time() - begin < 1.0
        assert set(batch["x"][:, 0].tolist()) == {2 * 699_999}


# --------------------------------------------------------------------------------------------- settings are read once


@pytest.mark.parametrize(
    ("capacity", "stride", "streams"),
    [(2**60, 64, 0), (2**58, 64, 0), (-1, 64, 0), (0, 64, 0), (2**62 + 1, 4, 0), (4, 2**63, 0), (1, 8, 2**61 + 1)],
)
def test_sizes_whose_product_wraps_around_are_refused(capacity: int, stride: int, streams: int) -> None:
    with Replay({"x": ("int64", ())}, 4) as replay:
        mapping, base = replay.segment.window(0, replay.segment.layout.nbytes, writeable=True)
        segment = replay.segment.layout
        for tree in (None, base + segment["rng"].offset):
            with pytest.raises(SegmentError):
                _native.Replay(
                    *(mapping, *(base + segment[name].offset for name in ("control", "stored", "rows")), tree),
                    *(base + segment["streams"].offset, streams, capacity, stride),
                    *([replay._column("x")], (0, 0, 0, False), (0.0, 1, 0.0), 1.0, "replay"),
                )


def flip_capacity(replay: Replay, stop: Any) -> None:
    while not stop.is_set():
        replay.segment["settings"][0] = 5
        replay.segment["settings"][0] = 12


def test_settings_that_change_while_a_replay_is_attached_are_not_believed() -> None:
    stop = mp.get_context("fork").Event()
    with Replay(PLAIN, capacity=12, name=f"flip{os.getpid()}") as replay, child(flip_capacity, replay, stop):
        found = set()
        for _ in range(400):
            with contextlib.suppress(SegmentError), Replay.attach(replay.name or "") as other:
                found.add((other.capacity, other._integers[0], other.segment.layout["rows"].shape[0]))
        stop.set()
    assert found <= {(12, 12, 12)}


# ------------------------------------------------------------------------------------------------- a scribbling process


def scribble(replay: Replay, seed: int, stop: Any) -> None:
    """Store random words into control block, heads, priorities, streams and random states."""
    draw = np.random.default_rng(seed)
    places = [control(replay), heads(replay).reshape(-1), replay.segment["streams"]]
    places += [replay.segment["rng"].reshape(-1).view(np.int64), replay.segment["tree"].view(np.int64)]
    words = np.array([*STRAY, 0, 1, 2, 7, 40, 0x7FC00001, 0x7F800000FF800001, 41 << 2 | 2, 44 << 2 | 3], np.int64)
    while not stop.is_set():
        place = places[draw.integers(len(places))]
        place[draw.integers(len(place))] = draw.choice(words)


def use_beside_a_scribbler(replay: Replay, seconds: float) -> None:
    end = time.monotonic() + seconds
    calls = 0
    while time.monotonic() < end:
        limit_life(PATIENCE / 4)  # each round
        with contextlib.suppress(MemlaneError, ValueError):
            writer = replay.writer()
            for number in range(8):
                writer.add(step(number), timeout=0)
        for options in ({"n_step": 3}, {"stack": {"obs": 3}}, {"length": 4, "n_step": 2}):
            sampler = replay.sampler(seed=calls, **options)
            with contextlib.suppress(MemlaneError, ValueError):
                batch = sampler.sample(16, timeout=0)
                replay.update_priorities(batch["key"], np.ones(16))
            sampler.close()
        len(replay), replay.counters(), replay.native.first_implausible()
        calls += 1
    assert calls > 10


def test_beside_a_process_that_stores_random_words_every_call_ends_and_nothing_crashes() -> None:
    for seed in range(2):
        stop = mp.get_context("fork").Event()
        with (
            linked(alpha=0.5) as replay,
            child(scribble, replay, seed, stop),
            child(use_beside_a_scribbler, replay, 1.5) as user,
        ):
            user.join(PATIENCE)
            stop.set()
            assert user.exitcode == 0
