"""The three lessons: what the exercises ask for, then what only real shared memory can show."""

from __future__ import annotations

import doctest
import itertools
import multiprocessing as mp
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memlane.lessons
from memlane import SharedCircularBuffer, shared_memory_rl_pipeline, zero_copy_env_simulation
from memlane.core import PeerDied, SegmentError
from tests.support.processes import ask

SPAWN = mp.get_context("spawn")


def test_the_examples_in_the_documentation_are_true() -> None:
    assert doctest.testmod(memlane.lessons).failed == 0


# ------------------------------------------------------------------------------------------------------- pipeline

STEPS = [(0, [1.0, 2.0], 1.5, False), (2, [3.0, 4.0], 2.0, True), (0, [5.0, 6.00006], 1 / 3, False)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_pipeline_returns_what_was_written_whoever_writes(workers: int) -> None:
    assert shared_memory_rl_pipeline(3, 2, STEPS, workers=workers) == {
        "observations": [[5.0, 6.0001], [0.0, 0.0], [3.0, 4.0]],
        "rewards": [0.3333, 0.0, 2.0],
        "dones": [0, 0, 1],
        "mean_obs": [2.6667, 3.3334],
        "mean_reward": 0.7778,
        "num_done": 1,
        "active_mean_reward": 0.1667,
        "total_shared_bytes": 3 * 2 * 8 + 3 * 8 + 3,
    }


def test_the_pipeline_of_all_done_envs_has_an_active_mean_reward_of_zero() -> None:
    result = shared_memory_rl_pipeline(2, 1, [(0, [1], 3.0, True), (1, [1], 5.0, True)])
    assert (result["active_mean_reward"], result["mean_reward"], result["num_done"]) == (0.0, 4.0, 2)


def test_the_pipeline_returns_plain_python_values() -> None:
    result = shared_memory_rl_pipeline(
        2, 1, [(np.int64(1), np.array([2.5], np.float32), np.float32(1), np.bool_(True))]
    )
    assert type(result["dones"][0]) is int
    assert type(result["rewards"][1]) is float
    assert {type(result[key]) for key in ("num_done", "total_shared_bytes")} == {int}
    assert {type(result[key]) for key in ("mean_reward", "active_mean_reward")} == {float}


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        ((3, [1.0, 2.0], 0.0, False), IndexError, r"step_data\[1\]: there is no env 3; num_envs is 3"),
        ((-1, [1.0, 2.0], 0.0, False), IndexError, r"step_data\[1\]: there is no env -1"),
        ((0.5, [1.0, 2.0], 0.0, False), ValueError, r"step_data\[1\]: the env id must be an integer, found 0.5"),
        ((0, [1.0], 0.0, False), ValueError, r"step_data\[1\]: the observation must have shape \[2\], found \[1\]"),
        ((0, ["a", 1], 0.0, False), ValueError, r"step_data\[1\]: the observation must be made of numbers"),
        ((0, [[1.0], [1.0, 2.0]], 0.0, False), ValueError, r"step_data\[1\]: .* rows of different lengths"),
        ((0, [1.0, 2.0], None, False), ValueError, r"step_data\[1\]: the reward must be made of numbers, found None"),
        ((0, [1.0, 2.0], 0.0, "no"), ValueError, r"step_data\[1\]: done must be"),
        ((0, [1.0, 2.0], 0.0, 2), ValueError, r"step_data\[1\]: done must be True or False, found 2"),
        ((0, [1.0, 2.0]), ValueError, r"step_data\[1\] must be \(env_id, obs, reward, done\)"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_step_is_named_and_leaves_nothing_behind(
    shm_dir: Path, entry: Any, error: type[Exception], text: str, workers: int
) -> None:
    with pytest.raises(error, match=text):
        shared_memory_rl_pipeline(3, 2, [STEPS[0], entry], workers=workers)
    assert list(shm_dir.iterdir()) == []


def test_a_worker_that_dies_is_an_error_that_names_it_and_leaves_nothing_behind(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memlane.lessons.sys, "executable", "/bin/false")
    with pytest.raises(PeerDied, match=r"worker 0 \(pid \d+\) exited with code 1"):
        shared_memory_rl_pipeline(3, 2, STEPS, workers=2)
    assert list(shm_dir.iterdir()) == []


@pytest.mark.parametrize("arguments", [(0, 2), (-1, 2), (2, -1), (1.5, 2)])
def test_impossible_sizes_are_refused(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        shared_memory_rl_pipeline(*arguments, [])


# ------------------------------------------------------------------------------------------------ circular buffer


def push_number(buffer: SharedCircularBuffer, number: int) -> None:
    """A transition whose every part follows from one number, so that a torn one shows."""
    state = [float(number)] * buffer.state_dim
    buffer.push(state, number, number / 2, [-float(number)] * buffer.state_dim, number % 2 == 1)


def assert_whole(batch: dict[str, list[Any]], state_dim: int) -> list[int]:
    for row in zip(*batch.values(), strict=True):
        number = row[1]
        expected = ([number] * state_dim, number, number / 2, [-number] * state_dim, number % 2 == 1)
        assert row == expected, f"a torn transition: {row}"
    return batch["actions"]


def test_a_new_buffer_is_empty() -> None:
    with SharedCircularBuffer(3, 2) as buffer:
        assert len(buffer) == 0
        assert buffer.latest(2) == {"states": [], "actions": [], "rewards": [], "next_states": [], "dones": []}
        with pytest.raises(ValueError, match="the buffer is empty"):
            buffer.sample(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 25), st.integers(0, 12), st.integers(0, 2**31))
def test_the_buffer_equals_a_plain_list(capacity: int, state_dim: int, pushes: int, n: int, seed: int) -> None:
    slots: dict[int, int] = {}
    with SharedCircularBuffer(capacity, state_dim) as buffer:
        for number in range(pushes):
            push_number(buffer, number)
            slots[number % capacity] = number
        size = min(pushes, capacity)
        assert len(buffer) == size
        assert assert_whole(buffer.latest(n), state_dim) == list(range(pushes))[max(0, pushes - min(n, size)) :]
        if size:
            drawn = np.random.RandomState(seed).randint(0, size, size=n)
            assert assert_whole(buffer.sample(n, seed=seed), state_dim) == [slots[slot] for slot in drawn]


def test_batches_are_plain_python_values() -> None:
    with SharedCircularBuffer(2, 1) as buffer:
        buffer.push(np.ones(1, np.float32), np.int64(3), np.float32(0.5), [2], np.bool_(True))
        batch = buffer.sample(1, seed=0)
    assert batch == {"states": [[1.0]], "actions": [3], "rewards": [0.5], "next_states": [[2.0]], "dones": [True]}
    kinds = [type(batch["states"][0][0]), type(batch["actions"][0]), type(batch["rewards"][0]), type(batch["dones"][0])]
    assert kinds == [float, int, float, bool]


@pytest.mark.parametrize(
    ("transition", "text"),
    [
        (([1.0], 0, 0.0, [1.0, 2.0], False), r"state must have shape \[2\], found \[1\]"),
        (([1.0, 2.0], 0.5, 0.0, [1.0, 2.0], False), "action must be an integer"),
        (([1.0, 2.0], 2**63, 0.0, [1.0, 2.0], False), "action must be an integer of at most 64 bits"),
        (([1.0, 2.0], 0, "high", [1.0, 2.0], False), "reward must be made of numbers"),
        (([1.0, 2.0], 0, 0.0, [1.0, None], False), "next_state must be made of numbers"),
        (([1.0, 2.0], 0, 0.0, [1.0, 2.0], 7), "done must be True or False"),
    ],
)
def test_a_bad_transition_is_refused_and_changes_nothing(transition: Any, text: str) -> None:
    with SharedCircularBuffer(2, 2) as buffer:
        push_number(buffer, 1)
        for _ in range(100):  # more often than there are spare cells
            with pytest.raises(ValueError, match=text):
                buffer.push(*transition)
        push_number(buffer, 2)
        assert buffer.latest(9)["actions"] == [1, 2]


def push_many(buffer: SharedCircularBuffer, first: int, count: int, done: Connection) -> None:
    for number in range(first, first + count):
        push_number(buffer, number)
    done.send(True)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_buffer_handed_to_a_process_is_the_same_buffer(method: str) -> None:
    context = mp.get_context(method)
    with SharedCircularBuffer(10, 3) as buffer:
        here, there = context.Pipe()
        process = context.Process(target=push_many, args=(buffer, 5, 4, there))
        process.start()
        assert here.recv()
        process.join()
        assert assert_whole(buffer.latest(10), 3) == [5, 6, 7, 8]


@pytest.mark.parametrize("capacity", [1, 3, 200])
def test_nothing_is_torn_and_no_push_is_lost_while_several_processes_push(capacity: int) -> None:
    writers, pushes, state_dim = 3, 3000, 64
    with SharedCircularBuffer(capacity, state_dim) as buffer:
        pipes = [SPAWN.Pipe() for _ in range(writers)]
        processes = [
            SPAWN.Process(target=push_many, args=(buffer, writer * 1_000_000, pushes, pipe[1]))
            for writer, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        reads = 0
        while any(process.is_alive() for process in processes):
            if len(buffer):
                assert_whole(buffer.sample(16), state_dim)
                seen = assert_whole(buffer.latest(capacity), state_dim)
                assert len(seen) == len(set(seen)) <= capacity
                for writer in range(writers):  # each writer's own pushes keep their order
                    own = [number for number in seen if number // 1_000_000 == writer]
                    assert own == sorted(own)
                reads += 1
        for process in processes:
            process.join()
        assert reads > 0
        assert [pipe[0].poll() for pipe in pipes] == [True] * writers
        assert buffer._head.value == writers * pushes
        last = assert_whole(buffer.latest(capacity), state_dim)
        assert len(last) == capacity


def push_forever(buffer: SharedCircularBuffer, started: Connection) -> None:
    started.send(True)
    number = 0
    while True:
        push_number(buffer, number)
        number += 1


def test_writers_killed_in_the_middle_of_a_push_cost_nobody_else_anything() -> None:
    """Sixty-eight kills: four more than there are spare cells. Cells that the dead held must come back."""
    rng = np.random.default_rng(7)
    context = mp.get_context("fork")
    with SharedCircularBuffer(5, 256) as buffer:
        for _ in range(68):
            here, there = context.Pipe()
            victim = context.Process(target=push_forever, args=(buffer, there))
            victim.start()
            here.recv()
            time.sleep(rng.uniform(0, 0.004))
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            before = buffer._head.value
            push_number(buffer, 123)
            assert buffer._head.value in (before + 1, before + 2)  # the victim's last may have been half counted
            assert assert_whole(buffer.latest(1), 256) == [123]
            assert_whole(buffer.sample(20), 256)
            assert len(set(buffer.latest(5)["actions"])) >= 1


def test_a_stopped_writer_delays_nobody() -> None:
    context = mp.get_context("fork")
    with SharedCircularBuffer(4, 64) as buffer:
        here, there = context.Pipe()
        stopped = context.Process(target=push_forever, args=(buffer, there))
        stopped.start()
        here.recv()
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            for number in range(1000):
                push_number(buffer, number)
            assert assert_whole(buffer.latest(4), 64) == [996, 997, 998, 999]
        finally:
            stopped.kill()
            stopped.join()


def use_after(field: str, index: int, word: int) -> list[str]:
    """Overwrite a word and call everything; the text of each error, "" for a call that worked."""
    outcomes = []
    with SharedCircularBuffer(4, 2) as buffer:
        for number in range(6):
            push_number(buffer, number)
        words = buffer._segment[field]["value"] if field == "head" else buffer._segment[field][index : index + 1]
        words[...] = word
        for call in (
            lambda: push_number(buffer, 7),
            lambda: buffer.sample(9),
            lambda: buffer.latest(4),
            lambda: len(buffer),
        ):
            try:
                call()
                outcomes.append("")
            except SegmentError as error:
                outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("word", [2**38 << 24, 7 << 24 | 0xFFFFFF, 12 << 24, 9 << 24, -1, -(2**63), 2**63 - 1])
def test_a_stray_word_in_the_order_is_a_segment_error_and_never_an_endless_push(word: int) -> None:
    # Six pushes into four slots: the next is for slot 2.
    outcomes = ask(use_after, "order", 2, word)
    assert [outcome for outcome in outcomes if "the buffer is damaged" in outcome]
    assert "the buffer is damaged" in outcomes[0]


@pytest.mark.parametrize("word", [-1, -(2**63), 2**40, 2**63 - 1])
def test_a_stray_number_of_pushes_ends_every_call(word: int) -> None:
    assert len(ask(use_after, "head", 0, word)) == 4


def test_a_buffer_whose_cells_all_seem_taken_refuses_a_push() -> None:
    with SharedCircularBuffer(4, 2) as buffer:
        buffer._segment["cells"][:] = buffer._life.process()
        with pytest.raises(SegmentError, match="none of 68 cells is free"):
            push_number(buffer, 1)


# ------------------------------------------------------------------------------------------------- zero-copy hazard


def test_a_view_changes_with_the_next_step_and_a_copy_does_not() -> None:
    steps = [([[1, 2], [3, 4]], [1, 1], [0, 1]), ([[5.00004, 6], [7, 8.00006]], [2, 2], [True, False])]
    result = zero_copy_env_simulation(
        2,
        2,
        steps,
        [
            ("read_buffer",),
            ("step",),
            ("store_view", "view"),
            ("store_copy", "copy"),
            ("check_alias", "view"),
            ("check_alias", "copy"),
            ("step",),
            ("read", "view"),
            ("read", "copy"),
            ("auto_reset",),
            ("read", "view"),
            ["read_buffer"],
        ],
    )
    assert result == {
        "reads": [
            [[0.0, 0.0], [0.0, 0.0]],
            [[5.0, 6.0], [7.0, 8.0001]],
            [[1.0, 2.0], [3.0, 4.0]],
            [[0.0, 0.0], [7.0, 8.0001]],
            [[0.0, 0.0], [7.0, 8.0001]],
        ],
        "alias_checks": [True, False],
        "total_copies": 1,
        "total_views": 1,
        "total_bytes_saved": 2 * 2 * 8,
        "buffer_reallocs": 0,
    }


def test_steps_may_come_one_by_one_without_an_end() -> None:
    steps = (([[number, number]], [0], [0]) for number in itertools.count())
    result = zero_copy_env_simulation(1, 2, steps, iter([("step",), ("step",), ("read_buffer",)]))
    assert result["reads"] == [[[1, 1]]]


@pytest.mark.parametrize(
    ("steps", "commands", "error", "text"),
    [
        (iter([]), [("step",)], IndexError, r"commands\[0\]: step_data has only 0 steps"),
        ([], [("step",)], IndexError, r"commands\[0\]: step_data has only 0 steps"),
        ([], [("read", "x")], KeyError, r"commands\[0\]: nothing was stored as 'x'"),
        ([], [("read_buffer",), ("jump",)], ValueError, r"commands\[1\] must be step, .* found \('jump',\)"),
        ([([[1]], [0], [0])], [("step",)], ValueError, r"step_data\[0\]: obs must have shape \[1, 2\], found \[1, 1\]"),
        ([([[1, 2]], [0])], [("step",)], ValueError, r"step_data\[0\] must be \(obs, rewards, dones\)"),
        ([([[1, 2]], [0], [5])], [("step",)], ValueError, r"step_data\[0\]: dones must be True or False"),
    ],
)
def test_a_bad_command_or_step_is_named(steps: Any, commands: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zero_copy_env_simulation(1, 2, steps, commands)
