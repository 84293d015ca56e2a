"""ReplaySampler: what a batch has of each row, across steps, frames and sequences, and how rows are chosen."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memlane.core import MemlaneError, NothingToSample
from memlane.ipc import Limiter, Replay
from tests.support.processes import wait_for
from tests.support.replays import PLAIN, STEP, contents, drawn, final, fits, play, step


@pytest.fixture
def single() -> Iterator[Replay]:
    with Replay(STEP, capacity=20, streams=1, observations=["obs"]) as replay:
        yield replay


@pytest.fixture
def weighted() -> Iterator[Replay]:
    """Eight rows, by priority."""
    with Replay({"x": ("int64", ())}, capacity=8, alpha=1.0) as replay:
        replay.add({"x": np.arange(1, 9)})
        yield replay


def first(row: dict[str, Any], name: str) -> list[float]:
    """The frames of a stacked field, each by its first number."""
    return [frame[0] for frame in row[name]]


# ---------------------------------------------------------------------------------------------------- next observations


def test_every_observation_is_stored_once_and_drawn_as_the_next_one_too(single: Replay) -> None:
    play(single.writer(), 1, 2, 3)
    assert single.segment["rows"].tobytes().count(np.full(2, 2, "f4").tobytes()) == 1
    assert {number: row["next_obs"] for number, row in drawn(single).items()} == {1: [2, 2], 2: [3, 3]}


def test_the_newest_row_of_a_stream_is_drawn_when_the_next_one_comes(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1)
    with pytest.raises(
        NothingToSample, match=r"1 transitions are stored, but none has the neighbours that this sampler needs"
    ):
        single.sampler(seed=0).sample(4)
    play(writer, 2)
    assert sorted(drawn(single)) == [1]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_after_an_episodes_last_row_comes_its_final_observation(single: Replay, end: str) -> None:
    writer = single.writer()
    play(writer, 1, 2, end=end)
    play(writer, 11, 12)
    assert {number: row["next_obs"][0] for number, row in drawn(single).items()} == {1: 2, 2: 2.5, 11: 12}


def test_final_observations_are_never_drawn_themselves(single: Replay) -> None:
    writer = single.writer()
    for number in range(6):
        play(writer, number, end="truncated")
    assert {row["obs"][0] for row in drawn(single).values()} == set(range(6))


def test_only_final_observations_of_rows_that_ended_are_read() -> None:
    with Replay(STEP, capacity=20, streams=3, observations=["obs"]) as replay:
        writer = replay.writer()
        writer.add(
            step(1, 11, 21, terminated=[True, False, False], truncated=[False, False, True]), final=final(7, 8, 9)
        )
        writer.add(step(2, 12, 22))
        assert {number: row["next_obs"][0] for number, row in drawn(replay).items()} == {1: 7, 11: 12, 21: 9}


def test_a_terminated_row_needs_no_final_observation(single: Replay) -> None:
    writer = single.writer()
    writer.add(step(1, terminated=True))
    assert drawn(single)[1]["discount"] == 0.0
    writer.add(step(2))
    assert drawn(single, stack={"obs": 2})[1]["discount"] == 0.0


def test_terminated_and_truncated_come_out_as_they_were_given(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2, end="terminated")
    play(writer, 3, 4, end="truncated")
    flags = {number: (row["terminated"], row["truncated"]) for number, row in drawn(single).items()}
    assert flags == {1: (False, False), 2: (True, False), 3: (False, False), 4: (False, True)}


def test_the_discount_is_zero_where_the_episode_terminated_and_not_where_it_was_truncated(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2, end="terminated")
    play(writer, 3, 4, end="truncated")
    assert {number: row["discount"] for number, row in drawn(single, gamma=0.5).items()} == {
        1: 0.5,
        2: 0,
        3: 0.5,
        4: 0.5,
    }


def test_a_row_that_is_both_terminated_and_truncated_has_no_value_after_it(single: Replay) -> None:
    single.writer().add(step(1, terminated=True, truncated=True), final=final(2))
    assert drawn(single)[1]["discount"] == 0.0


def test_without_streams_rows_come_out_alone_whatever_they_are_called() -> None:
    with Replay(STEP, capacity=5) as replay:
        replay.add(step(1, 2, terminated=True, truncated=True, reward=3))
        found = drawn(replay)
    assert set(found[1]) == set(STEP)
    assert (found[1]["reward"], found[1]["terminated"]) == (3, True)


# -------------------------------------------------------------------------------------------------------------- n steps


def test_n_step_rewards_are_discounted_sums_and_lead_n_steps_ahead(single: Replay) -> None:
    writer = single.writer()
    for number in range(1, 6):
        writer.add(step(number, reward=number))
    row = drawn(single, n_step=3, gamma=0.5, extras=["horizon"])[1]
    assert (row["reward"], row["discount"], row["next_obs"][0], row["horizon"]) == (1 + 2 / 2 + 3 / 4, 1 / 8, 4, 3)


def test_where_what_is_stored_ends_there_are_fewer_steps(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4)
    found = drawn(single, n_step=3, gamma=0.5, extras=["horizon"])
    assert {number: row["horizon"] for number, row in found.items()} == {1: 3, 2: 2, 3: 1}
    assert (found[2]["reward"], found[2]["discount"], found[2]["next_obs"][0]) == (1.5, 0.25, 4)


@pytest.mark.parametrize(("end", "discount"), [("terminated", 0.0), ("truncated", 0.25)])
def test_steps_never_go_on_behind_an_episodes_end(single: Replay, end: str, discount: float) -> None:
    writer = single.writer()
    play(writer, 1, 2, 3, end=end)
    play(writer, 11, 12, 13, 14, 15)
    row = drawn(single, n_step=4, gamma=0.5, extras=["horizon"])[2]
    assert (row["horizon"], row["reward"], row["discount"], row["next_obs"][0]) == (2, 1.5, discount, 3.5)
    assert row[end] is True


def test_terminated_and_truncated_tell_how_the_last_of_the_steps_ended(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, end="terminated")
    found = drawn(single, n_step=2, gamma=0.5)
    assert {number: row["terminated"] for number, row in found.items()} == {1: False, 2: True, 3: True}


def test_double_rewards_are_summed_as_doubles() -> None:
    with Replay({**STEP, "reward": ("float64", ())}, capacity=9, streams=1, observations=["obs"]) as replay:
        writer = replay.writer()
        for number in range(3):
            writer.add(step(number) | {"reward": np.array([0.1])})
        assert drawn(replay, n_step=2, gamma=0.9)[0]["reward"] == 0.1 + 0.9 * 0.1


def test_the_row_itself_is_that_of_the_first_step(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4)
    assert {number: row["obs"][0] for number, row in drawn(single, n_step=3).items()} == {1: 1, 2: 2, 3: 3}


# --------------------------------------------------------------------------------------------------------------- frames


def test_a_stack_holds_the_last_frames_the_oldest_first(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4, 5)
    row = drawn(single, stack={"obs": 3})[4]
    assert (first(row, "obs"), first(row, "next_obs")) == ([2, 3, 4], [3, 4, 5])


def test_before_an_episodes_begin_its_first_frame_is_repeated(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2, 3, end="truncated")
    play(writer, 11, 12, 13)
    found = drawn(single, stack={"obs": 3})
    assert [first(found[number], "obs") for number in (1, 2, 11, 12)] == [
        [1, 1, 1],
        [1, 1, 2],
        [11, 11, 11],
        [11, 11, 12],
    ]
    assert [first(found[number], "next_obs") for number in (1, 11)] == [[1, 1, 2], [11, 11, 12]]


def test_a_final_observation_is_stacked_upon_the_frames_before_it(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2, 3, end="truncated")
    play(writer, 11, end="terminated")
    found = drawn(single, stack={"obs": 3})
    assert (first(found[3], "next_obs"), first(found[11], "next_obs")) == ([2, 3, 3.5], [11, 11, 11.5])


def test_the_stack_of_the_next_observation_is_that_of_the_last_step(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4, end="truncated")
    found = drawn(single, n_step=2, stack={"obs": 2})
    assert {number: first(row, "next_obs") for number, row in found.items()} == {
        1: [2, 3],
        2: [3, 4],
        3: [4, 4.5],
        4: [4, 4.5],
    }


def test_a_row_whose_frames_are_partly_overwritten_is_not_drawn() -> None:
    with Replay(STEP, capacity=5, streams=1, observations=["obs"]) as replay:
        play(replay.writer(), *range(10))
        assert sorted(drawn(replay)) == [5, 6, 7, 8]
        assert {number: first(row, "obs") for number, row in drawn(replay, stack={"obs": 3}).items()} == {
            7: [5, 6, 7],
            8: [6, 7, 8],
        }


def test_any_field_can_be_stacked_and_the_others_stay_as_they_are(single: Replay) -> None:
    play(single.writer(), 1, 2, 3)
    batch = single.sampler(seed=0, stack={"number": 2}).sample(50)
    assert (batch["number"].shape, batch["obs"].shape) == ((50, 2), (50, 2))
    assert set(map(tuple, batch["number"].tolist())) == {(1, 1), (1, 2)}


# Once: the sum over the steps is stored over the oldest frame of a stacked reward (and so are the flags).
@pytest.mark.parametrize("name", ["reward", "terminated"])
def test_a_stack_of_what_is_summed_over_the_steps_is_refused_or_right(single: Replay, name: str) -> None:
    writer = single.writer()
    for number in range(1, 5):
        writer.add(step(number, reward=number))
    writer.add(step(5, terminated=True, reward=5))
    try:
        sampler = single.sampler(seed=0, stack={name: 2})
    except ValueError:
        return
    batch = sampler.sample(100)
    for number, frames in zip(batch["number"].tolist(), batch[name].tolist(), strict=True):
        expected = [max(number - 1, 1), number] if name == "reward" else [False, number == 5]
        assert frames == expected


def test_a_stack_of_one_is_no_stack(single: Replay) -> None:
    play(single.writer(), 1, 2)
    assert single.sampler(seed=0, stack={"obs": 1}).sample(1)["obs"].shape == (1, 2)


# ------------------------------------------------------------------------------------------------------------ sequences


def test_a_sequence_is_rows_that_follow_each_other(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4, 5)
    row = drawn(single, length=3)[2]
    assert (row["number"], row["valid"]) == ([2, 3, 4], [True, True, True])
    assert [obs[0] for obs in row["next_obs"]] == [3, 4, 5]


def test_a_sequence_that_ends_early_is_filled_up_with_zeros_that_are_not_valid(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2, end="truncated")
    play(writer, 11, 12, 13)
    found = drawn(single, length=3, extras=["key", "horizon", "version"])
    assert {number: (row["number"], row["valid"]) for number, row in found.items()} == {
        1: ([1, 2, 0], [True, True, False]),
        2: ([2, 0, 0], [True, False, False]),
        11: ([11, 12, 0], [True, True, False]),  # 13 has no next observation yet
        12: ([12, 0, 0], [True, False, False]),
    }
    assert not any(np.any(row[name][2]) for row in found.values() for name in row)


def test_a_sequence_ends_with_the_flags_of_its_episodes_last_row(single: Replay) -> None:
    play(single.writer(), 1, 2, end="terminated")
    row = drawn(single, length=2)[1]
    assert (row["terminated"], row["discount"]) == ([False, True], [pytest.approx(0.99), 0])


def test_sequences_have_steps_and_frames_too(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, 4)
    row = drawn(single, length=2, n_step=2, gamma=0.5, stack={"obs": 2})[2]
    assert (row["reward"], [frames[0][0] for frames in row["obs"]]) == ([1.5, 1.0], [1, 2])


def test_a_batch_of_sequences_has_a_dimension_for_steps(single: Replay) -> None:
    play(single.writer(), 1, 2, 3)
    batch = single.sampler(seed=0, length=4, stack={"obs": 3}).sample(5)
    assert batch.shape == (5, 4)
    assert (batch["obs"].shape, batch["reward"].shape, batch["valid"].shape) == ((5, 4, 3, 2), (5, 4), (5, 4))
    tensors = batch.torch()
    assert all(torch.equal(tensors[name], torch.from_numpy(array.copy())) for name, array in batch.items())


# -------------------------------------------------------------------------------------------------------------- batches


def test_extras_are_the_key_the_version_and_the_steps(single: Replay) -> None:
    writer = single.writer()
    writer.add(step(1), version=2**40)
    writer.add(step(2), version=3)
    writer.add(step(3))
    found = drawn(single, extras=["key", "version", "horizon"])
    assert {number: (row["key"], row["version"], row["horizon"]) for number, row in found.items()} == {
        1: (1, 2**40, 1),
        2: (2, 3, 1),
    }


def test_the_version_of_a_row_without_streams_comes_back_or_is_refused() -> None:
    with Replay(PLAIN, capacity=3) as replay:
        replay.add({"x": [9, 9]}, version=5)
        try:
            sampler = replay.sampler(seed=0, extras=["version"])
        except ValueError:
            return
        assert sampler.sample(2)["version"].tolist() == [5, 5]


def test_a_batch_has_the_fields_in_their_types(single: Replay) -> None:
    play(single.writer(), 1, 2)
    batch = single.sampler(seed=0, extras=["key", "horizon"]).sample(3)
    assert {name: (array.dtype.name, array.shape[1:]) for name, array in batch.items()} == {
        "obs": ("float32", (2,)),
        "number": ("int64", ()),
        "reward": ("float32", ()),
        "terminated": ("bool", ()),
        "truncated": ("bool", ()),
        "next_obs": ("float32", (2,)),
        "discount": ("float32", ()),
        "key": ("int64", ()),
        "horizon": ("int32", ()),
    }


def test_all_fields_of_a_batch_lie_in_one_block(single: Replay) -> None:
    play(single.writer(), 1, 2)
    batch = single.sampler(seed=0).sample(3)
    assert all(np.shares_memory(array, batch.block) for array in batch.values())


def test_the_tensors_of_a_batch_are_views_of_it(single: Replay) -> None:
    play(single.writer(), 1, 2, 3)
    batch = single.sampler(seed=0).sample(6)
    for name, tensor in batch.torch().items():
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(batch[name])))
        assert tensor.data_ptr() == batch[name].__array_interface__["data"][0]
    batch.torch()["reward"][:] = 7
    assert batch["reward"].tolist() == [7] * 6


TORCH = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "complex64", "complex128"]


# Once: complex fields may begin where torch cannot view them (their alignment is that of one half).
@pytest.mark.parametrize("dtype", TORCH)
def test_a_field_of_any_type_becomes_a_tensor_whatever_stands_beside_it(dtype: str) -> None:
    with Replay(
        {"flag": (bool, ()), "half": ("float32", 3), "wide": ("float64", ()), "x": (dtype, 3)}, capacity=2
    ) as replay:
        given = np.array([1, 0, 1]).astype(dtype)
        replay.add({"flag": True, "half": np.ones(3, "f4"), "wide": 1.0, "x": given})
        assert replay.sampler(seed=0).sample(2).torch()["x"][1].tolist() == given.tolist()


def test_a_batch_can_be_filled_again(single: Replay) -> None:
    play(single.writer(), *range(9))
    sampler, other = single.sampler(seed=5), single.sampler(seed=5)
    out = sampler.batch(4)
    for _ in range(3):
        assert sampler.sample(4, out=out) is out
        assert {name: array.tolist() for name, array in out.items()} == {
            name: array.tolist() for name, array in other.sample(4).items()
        }


def test_a_batch_can_lie_in_memory_of_ones_own(single: Replay) -> None:
    play(single.writer(), 1, 2)
    sampler = single.sampler(seed=0)
    memory = np.zeros(3 * sampler.dtype.itemsize, np.uint8)
    batch = sampler.sample(3, out=sampler.batch(3, memory))
    assert batch["obs"].tolist() == [[1, 1]] * 3
    assert np.shares_memory(batch["obs"], memory)


KEPT: dict[str, Any] = {
    "the batch": lambda batch: (batch, lambda kept: kept["number"]),
    "a field": lambda batch: (batch["number"], lambda kept: kept),
    "a part of a field": lambda batch: (batch["number"][:], lambda kept: kept),
    "the block": lambda batch: (batch.block, lambda kept: kept.copy()),
    "a buffer of a field": lambda batch: (memoryview(batch["number"]), np.asarray),
    "a tensor": lambda batch: (batch.torch()["number"], lambda kept: kept.numpy()),
    "a view of a tensor": lambda batch: (batch.torch()["number"][::1].detach(), lambda kept: kept.numpy()),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_batch_of_which_somebody_keeps_anything_is_not_drawn_into_again(single: Replay, what: str) -> None:
    play(single.writer(), *range(18))
    sampler = single.sampler(seed=5)
    kept, look = KEPT[what](sampler.sample(16))
    before = look(kept).tolist()
    for _ in range(10):
        sampler.sample(16)
    assert look(kept).tolist() == before


def test_batches_that_are_all_kept_are_all_different(single: Replay) -> None:
    play(single.writer(), *range(18))
    sampler, other = single.sampler(seed=5), single.sampler(seed=5)
    kept = [sampler.sample(16) for _ in range(12)]
    assert [batch["number"].tolist() for batch in kept] == [other.sample(16)["number"].tolist() for _ in range(12)]


def test_only_a_batch_of_this_sampler_and_size_can_be_filled(single: Replay) -> None:
    play(single.writer(), 1, 2)
    sampler = single.sampler(seed=0)
    for out in (sampler.batch(3), single.sampler(n_step=2).batch(2)):
        with pytest.raises(ValueError, match=re.escape("out must be what this sampler's batch(2) returned")):
            sampler.sample(2, out=out)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"n_step": 0}, "n_step must be 1 or more, found 0"),
        ({"length": 0}, "length must be 1 or more, found 0"),
        ({"threads": 0}, "threads must be 1 or more, found 0"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1, found 1.5"),
        ({"gamma": float("nan")}, "gamma must be between 0 and 1"),
        ({"stack": {"pixels": 2}}, "found 'pixels': 2"),
        ({"stack": {"ob": 2}}, "found 'ob': 2; did you mean 'obs'?"),
        ({"extras": ["horizont"]}, "found ['horizont']; did you mean 'horizon'?"),
        ({"stack": {"obs": 0}}, "found 'obs': 0"),
        ({"extras": ["weight"]}, "extras must be among ['key', 'version', 'horizon'], found ['weight']"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_and_takes_no_place(single: Replay, wish: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        single.sampler(**wish)
    assert not single.segment["samplers"].any()


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"extras": "key"}, "extras must be a list of names, such as ['key'], found 'key'"),
        ({"seed": 0.5}, "seed must be None or an integer, found 0.5"),
        ({"length": 1.5}, "length must be an integer, 1 or more, found 1.5"),
    ],
)
def test_a_sampler_with_a_wrong_type_is_refused_and_takes_no_place(single: Replay, wish: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        single.sampler(**wish)
    assert not single.segment["samplers"].any()


@pytest.mark.parametrize("wish", [{"n_step": 2}, {"length": 2}, {"stack": {"x": 2}}, {"extras": ["horizon"]}])
def test_what_follows_an_environment_needs_streams(wish: dict[str, Any]) -> None:
    with (
        Replay(PLAIN, capacity=3) as replay,
        pytest.raises(ValueError, match=re.escape("create the replay with streams=")),
    ):
        replay.sampler(**wish)


@pytest.mark.parametrize(("name", "wish"), [("next_obs", {}), ("discount", {}), ("key", {"extras": ["key"]})])
def test_fields_that_a_batch_has_of_its_own_must_not_be_in_the_rows(name: str, wish: dict[str, Any]) -> None:
    fields = {**STEP, name: ("int64", ())}
    with (
        Replay(fields, capacity=3, streams=1, observations=["obs"]) as replay,
        pytest.raises(ValueError, match=re.escape(f"the sampler adds the fields ['{name}'] to a batch")),
    ):
        replay.sampler(**wish)


# Once: below 0 it is numpy that complains, about "negative dimensions".
@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_one_row_or_more(single: Replay, size: int) -> None:
    with pytest.raises(ValueError, match="batch_size must be 1 or more"):
        single.sampler(seed=0).sample(size)


def test_an_empty_replay_says_so() -> None:
    with Replay(PLAIN, capacity=3) as replay:
        before = contents(replay)
        with pytest.raises(NothingToSample, match=r"0 transitions are stored; add some first"):
            replay.sampler(seed=0).sample(1)
        assert contents(replay) == before


def test_a_sampler_is_for_one_thread_at_a_time() -> None:
    with Replay(PLAIN, capacity=3, limiter=Limiter(1.0)) as replay:
        sampler = replay.sampler(seed=0)
        waiting = threading.Thread(target=lambda: sampler.sample(1, timeout=20))
        waiting.start()
        assert wait_for(lambda: replay.counters()["held_samplers"])
        with pytest.raises(MemlaneError, match="is used by another thread; create a sampler for each thread"):
            sampler.sample(1, timeout=0)
        replay.add({"x": [1, 2]})
        waiting.join()


# --------------------------------------------------------------------------------------------------------------- chance


def test_rows_without_priorities_are_drawn_alike() -> None:
    with Replay({"x": ("int64", ())}, capacity=37) as replay:
        replay.add({"x": np.arange(30)})
        replay.add({"x": np.arange(30, 50)})
        counts = np.bincount(replay.sampler(seed=3).sample(20_000)["x"], minlength=50)
    assert not counts[:13].any()
    assert fits(counts[13:], np.ones(37))


def test_rows_that_can_be_drawn_are_drawn_alike_whatever_lies_between_them(single: Replay) -> None:
    writer = single.writer()
    play(writer, 0, 1, end="truncated")
    play(writer, 2, end="truncated")
    play(writer, 3, 4, 5)
    counts = np.bincount(single.sampler(seed=3).sample(10_000)["number"])
    assert fits(counts, np.ones(5))


def test_equal_seeds_give_equal_batches_and_others_do_not(single: Replay) -> None:
    play(single.writer(), *range(18))
    first, second, third = (single.sampler(seed=seed) for seed in (7, 7, 8))
    for _ in range(3):
        batch = first.sample(32)["number"].tolist()
        assert batch == second.sample(32)["number"].tolist()
        assert batch != third.sample(32)["number"].tolist()


def test_samplers_without_a_seed_differ(single: Replay) -> None:
    play(single.writer(), *range(18))
    first, second = single.sampler(), single.sampler()
    assert first.sample(64)["number"].tolist() != second.sample(64)["number"].tolist()


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_the_number_of_threads_changes_nothing(alpha: float | None) -> None:
    fields = {**STEP, "obs": ("float32", 256)}
    rows = step(*range(50)) | {"obs": np.random.default_rng(0).random((50, 256), np.float32)}
    with Replay(fields, capacity=60, streams=1, observations=["obs"], alpha=alpha) as replay:
        writer = replay.writer()
        for place in range(50):
            writer.add({name: array[place : place + 1] for name, array in rows.items()})
        one, many = (replay.sampler(seed=2, n_step=2, stack={"obs": 2}, threads=threads) for threads in (1, 4))
        for _ in range(3):
            expected, found = one.sample(256), many.sample(256)
            assert all(np.array_equal(found[name], array) for name, array in expected.items())


# ----------------------------------------------------------------------------------------------------------- priorities


def test_rows_are_drawn_by_priority_to_the_power_of_alpha() -> None:
    with Replay({"x": ("int64", ())}, capacity=40, alpha=0.5) as replay:
        replay.add({"x": np.arange(40)})
        errors = np.random.default_rng(1).permutation(np.arange(1, 41)).astype(float)
        assert replay.update_priorities(np.arange(1, 41), errors) == 40
        counts = np.bincount(replay.sampler(seed=3).sample(30_000)["x"], minlength=40)
    assert fits(counts, np.sqrt(errors))


def test_single_draws_follow_the_priorities_too(weighted: Replay) -> None:
    weighted.update_priorities(np.arange(1, 9), np.arange(1.0, 9.0))
    sampler = weighted.sampler(seed=3)
    out = sampler.batch(1)
    counts = np.bincount([int(sampler.sample(1, out=out)["x"][0]) for _ in range(4000)], minlength=9)[1:]
    assert fits(counts, np.arange(1.0, 9.0))


def test_rows_that_nobody_learned_from_have_the_highest_priority_so_far(weighted: Replay) -> None:
    weighted.update_priorities(np.arange(1, 8), np.full(7, 50.0))
    weighted.update_priorities(np.array([8]), [1.0])
    weighted.add({"x": np.array([9])})  # over row 1
    counts = np.bincount(weighted.sampler(seed=3).sample(8000)["x"], minlength=10)
    assert fits(counts[2:], np.array([50.0] * 6 + [1.0, 50.0]))


def test_only_the_size_of_an_error_counts_and_none_is_too_small_to_be_drawn(weighted: Replay) -> None:
    weighted.update_priorities(np.arange(1, 9), [-2.0, 2, 0, 0, 0, 0, 0, 0])
    assert weighted.native.total_priority() == pytest.approx(4 + 8e-6, rel=1e-5)
    assert fits(np.bincount(weighted.sampler(seed=0).sample(2000)["x"], minlength=3)[1:3], np.ones(2))


def test_a_row_with_error_0_is_drawn_like_one_with_an_error_of_a_millionth() -> None:
    """With alpha 0.1, a millionth is a quarter: an error of 0 that meant priority 0 would show."""
    with Replay({"x": ("int64", ())}, 8, alpha=0.1) as replay:
        replay.writer().add({"x": np.arange(8)})
        errors = np.array([0.0, -0.0, 0.0, 0.0, 1.0, -1.0, 1.0, 1.0])
        assert replay.update_priorities(np.arange(1, 9), errors) == 8
        counts = np.bincount(replay.sampler(seed=4).sample(8000)["x"], minlength=8)
        assert fits(counts, (np.abs(errors) + 1e-6) ** 0.1)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_importance_to_the_power_of_beta(weighted: Replay, beta: float) -> None:
    weighted.update_priorities(np.arange(1, 9), np.arange(1.0, 9.0))
    batch = weighted.sampler(seed=0).sample(64, beta=beta)
    shares = batch["x"] / batch["x"].min()
    assert batch["weight"].tolist() == pytest.approx((shares**-beta).tolist(), rel=1e-4)
    assert batch["weight"].max() == 1.0


def test_a_key_finds_its_row_again(weighted: Replay) -> None:
    batch = weighted.sampler(seed=0).sample(64)
    assert (batch["key"] == batch["x"]).all()
    chosen = batch["key"] == 3
    assert weighted.update_priorities(batch["key"][chosen], np.full(chosen.sum(), 1e6)) == chosen.sum()
    assert (weighted.sampler(seed=1).sample(100)["x"] == 3).mean() > 0.95


def test_keys_of_rows_that_were_overwritten_change_nothing_and_are_counted(weighted: Replay) -> None:
    weighted.add({"x": np.array([11, 12, 13])})  # over 1, 2 and 3
    assert weighted.update_priorities(np.array([1, 2, 3, 4]), [1e9, 1e9, 1e9, 1.0]) == 1
    assert weighted.counters()["stale_priorities"] == 3
    assert weighted.native.total_priority() == pytest.approx(8, rel=1e-4)
    assert sorted(set(weighted.sampler(seed=0).sample(200)["x"].tolist())) == [4, 5, 6, 7, 8, 11, 12, 13]


# Once: a key that was never given out counts as a row that is still there, and its empty slot gets a priority.
def test_keys_that_nobody_was_given_change_nothing() -> None:
    with Replay({"x": ("int64", ())}, capacity=8, alpha=1.0) as replay:
        replay.add({"x": np.array([1])})
        assert replay.update_priorities(np.array([1, 5]), [1.0, 1.0]) == 1
        assert replay.native.total_priority() == pytest.approx(1.0, rel=1e-4)


def test_priorities_can_be_given_as_tensors(weighted: Replay) -> None:
    batch = weighted.sampler(seed=0).sample(16).torch()
    assert weighted.update_priorities(batch["key"], torch.ones(16)) == 16


@pytest.mark.parametrize(
    ("keys", "errors", "error", "words"),
    [
        (np.array([1, 2]), [1.0], ValueError, "errors must have shape [2], one number for each key, found [1]"),
        (np.array([1.0]), [1.0], TypeError, "keys must be batch['key'], int64 in one dimension, found float64"),
        (np.array([[[1]]]), [[1.0]], TypeError, "of shape [1, 1, 1]"),
        (np.array([1, 0]), [1.0, 1.0], ValueError, "found 0 at position 1"),
        (np.array([1, -3]), [1.0, 1.0], ValueError, "found -3 at position 1"),
        (np.array([1, 2]), [1.0, np.nan], ValueError, "errors must be finite, found nan at position 1"),
        (np.array([1, 2]), [1.0, np.inf], ValueError, "errors must be finite, found inf at position 1"),
        (np.array([1, 2]), [1.0, 1e300], ValueError, "the error 1e+300 at position 1 is too large for a priority"),
    ],
)
def test_priorities_that_make_no_sense_are_refused_before_anything_is_written(
    weighted: Replay, keys: Any, errors: Any, error: type[Exception], words: str
) -> None:
    before = contents(weighted)
    with pytest.raises(error, match=re.escape(words)):
        weighted.update_priorities(keys, errors)
    assert contents(weighted) == before


# Once: stored as a float, 1e39 is infinite. From then on one row is drawn always, all weights are nan, so is the
# priority of new rows, and what is saved is called damaged.
def test_an_error_too_large_for_a_float_leaves_the_weights_finite(weighted: Replay) -> None:
    try:
        weighted.update_priorities(np.array([3]), [1e39])
    except ValueError:
        return
    assert np.isfinite(weighted.sampler(seed=0).sample(32)["weight"]).all()


def test_a_replay_without_priorities_says_how_to_have_them() -> None:
    with Replay(PLAIN, capacity=3) as replay, pytest.raises(MemlaneError, match=re.escape("create it with alpha=0.6")):
        replay.update_priorities(np.array([1]), [1.0])


def test_rows_of_streams_get_their_priority_when_they_can_be_drawn() -> None:
    with Replay(STEP, capacity=20, streams=1, observations=["obs"], alpha=1.0) as replay:
        writer = replay.writer()
        totals = []
        for number in range(3):
            play(writer, number)
            totals.append(replay.native.total_priority())
        play(writer, 3, end="truncated")
        assert [*totals, replay.native.total_priority()] == [0, 1, 2, 4]
        assert sorted(drawn(replay)) == [0, 1, 2, 3]


def test_the_steps_of_a_sequence_share_its_weight() -> None:
    with Replay(STEP, capacity=20, streams=1, observations=["obs"], alpha=1.0) as replay:
        play(replay.writer(), 1, 2, 3, 4)
        replay.update_priorities(np.array([1, 2, 3]), [1.0, 2.0, 4.0])
        batch = replay.sampler(seed=0, length=2).sample(60)
    both = batch["valid"].all(1)
    assert (batch["weight"][both, 0] == batch["weight"][both, 1]).all()
    assert not batch["weight"][~batch["valid"]].any()
    assert batch["weight"][:, 0].tolist() == pytest.approx((0.5 ** (batch["number"][:, 0] - 1)).tolist(), rel=1e-4)
