"""ReplayBuffer: the reference's face of a replay. What it takes, what it refuses, and what a sample looks like."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memlane.core import NothingToSample, SegmentClosed
from memlane.ipc import ReplayBuffer, transition_layout
from memlane.ipc.shared_buffer import SharedBufferBase
from tests.support import replays as replay_support
from tests.support.processes import METHODS, child
from tests.support.replays import contents


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(10, 3, 2, "cpu", seed=1) as buffer:
        yield buffer


@pytest.fixture
def critical() -> Iterator[ReplayBuffer]:
    """With a critic that sees more."""
    with ReplayBuffer(10, 3, 2, "cpu", critic_dim=4, seed=1) as buffer:
        yield buffer


def rows(*numbers: float, critic: bool = False) -> dict[str, Any]:
    return replay_support.transitions(*numbers, critic=critic)


def stored(buffer: ReplayBuffer) -> dict[float, dict[str, Any]]:
    """All rows, by the first number of their observation."""
    batch = buffer.sample(200)
    return {float(batch["obs"][i, 0]): {name: batch[name][i].tolist() for name in batch} for i in range(200)}


# ------------------------------------------------------------------------------------------------------------ the face


def test_the_constructor_is_that_of_the_reference() -> None:
    parameters = list(inspect.signature(ReplayBuffer).parameters.values())
    assert [(parameter.name, parameter.default) for parameter in parameters[:7]] == [
        ("capacity", inspect.Parameter.empty),
        ("obs_dim", inspect.Parameter.empty),
        ("action_dim", inspect.Parameter.empty),
        ("device", inspect.Parameter.empty),
        ("defer_gpu", False),
        ("critic_dim", 0),
        ("packed_cpu_storage", False),
    ]


def test_what_is_about_storage_on_a_device_is_accepted_and_changes_nothing() -> None:
    with ReplayBuffer(10, 3, 2, "cpu", True, 0, True, seed=1) as given, ReplayBuffer(10, 3, 2, "cpu", seed=1) as plain:
        assert (given.defer_gpu, given.packed_cpu_storage) == (True, True)
        for buffer in (given, plain):
            buffer.add(**rows(1, 2, 3))
        assert torch.equal(given.sample(20)["obs"], plain.sample(20)["obs"])


def test_it_is_a_shared_buffer_over_a_replay(buffer: ReplayBuffer) -> None:
    assert isinstance(buffer, SharedBufferBase)
    assert (buffer.capacity, buffer.device, buffer.critic_dim) == (10, "cpu", 0)
    assert buffer.replay.layout == transition_layout(3, 2)
    assert buffer.nbytes == buffer.replay.nbytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity must be 1 or more, found 0"),
        ({"obs_dim": 0}, "obs_dim must be 1 or more, found 0"),
        ({"action_dim": 0}, "action_dim must be 1 or more, found 0"),
        ({"critic_dim": -1}, "critic_dim must be 0 or more, found -1"),
    ],
)
def test_a_buffer_that_cannot_be_is_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplayBuffer(**{"capacity": 10, "obs_dim": 3, "action_dim": 2, "device": "cpu", **arguments})


def test_ptr_counts_all_rows_and_size_those_that_are_stored(buffer: ReplayBuffer) -> None:
    seen = []
    for _ in range(4):
        buffer.add(**rows(1, 2, 3, 4))
        seen.append((buffer.ptr[0], buffer.size[0], len(buffer)))
    assert seen == [(4, 4, 4), (8, 8, 8), (12, 10, 10), (16, 10, 10)]


def test_counts_look_like_arrays_of_one(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2))
    assert (len(buffer.size), buffer.size[-1], int(buffer.size), repr(buffer.ptr)) == (1, 2, 2, "[2]")
    with pytest.raises(IndexError, match=re.escape("there is one count, at [0]; found [1]")):
        buffer.size[1]


# --------------------------------------------------------------------------------------------------------------- adding


def test_what_is_added_is_what_is_drawn(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2))
    found = stored(buffer)
    assert sorted(found) == [1, 2]
    assert found[2] == {
        "obs": [2, 2, 2],
        "actions": [-2, -2],
        "rewards": 20,
        "next_obs": [2.5, 2.5, 2.5],
        "dones": 0,
        "truncated": 1,
    }


def test_a_critic_has_observations_of_its_own(critical: ReplayBuffer) -> None:
    critical.add(**rows(1, 2, critic=True))
    assert (stored(critical)[2]["critic"], stored(critical)[2]["next_critic"]) == ([12] * 4, [12.5] * 4)


@pytest.mark.parametrize("name", ["rewards", "dones", "truncated"])
def test_numbers_of_rows_may_be_a_column(buffer: ReplayBuffer, name: str) -> None:
    given = rows(1, 2)
    buffer.add(**given | {name: np.asarray(given[name])[:, None]})
    assert stored(buffer)[2][name] == given[name][1]


def test_flags_may_be_true_and_false(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2) | {"dones": np.array([True, False]), "truncated": [False, True]})
    assert {number: (row["dones"], row["truncated"]) for number, row in stored(buffer).items()} == {
        1: (1, 0),
        2: (0, 1),
    }


def test_tensors_are_taken_as_they_are(critical: ReplayBuffer) -> None:
    given = {
        name: torch.tensor(np.asarray(array), requires_grad=name == "obs")
        for name, array in rows(1, 2, critic=True).items()
    }
    critical.add(
        **given,
        terminal_mask=torch.tensor([True, False]),
        terminal_next_obs=torch.full((1, 3), 7.0),
        terminal_next_critic=torch.full((2, 4), 8.0),
    )
    assert (stored(critical)[1]["next_obs"], stored(critical)[1]["next_critic"]) == ([7.0] * 3, [8.0] * 4)


def test_where_an_episode_ended_the_next_observation_is_the_terminal_one(buffer: ReplayBuffer) -> None:
    every = np.full((3, 3), 9.0) * np.arange(1, 4)[:, None]
    buffer.add(**rows(1, 2, 3), terminal_mask=[0, 1, 1], terminal_next_obs=every)
    assert {number: row["next_obs"][0] for number, row in stored(buffer).items()} == {1: 1.5, 2: 18, 3: 27}


def test_terminal_observations_may_come_for_the_set_rows_alone(critical: ReplayBuffer) -> None:
    critical.add(
        **rows(1, 2, 3, critic=True),
        terminal_mask=np.array([[True], [False], [True]]),
        terminal_next_obs=[[7.0] * 3, [8.0] * 3],
        terminal_next_critic=[[70.0] * 4, [80.0] * 4],
    )
    found = stored(critical)
    assert {number: row["next_obs"][0] for number, row in found.items()} == {1: 7, 2: 2.5, 3: 8}
    assert {number: row["next_critic"][0] for number, row in found.items()} == {1: 70, 2: 12.5, 3: 80}


def test_no_terminal_observation_is_needed_where_none_is_set(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2), terminal_mask=[False, False])
    assert stored(buffer)[1]["next_obs"] == [1.5] * 3


def test_what_was_given_is_left_as_it_was(buffer: ReplayBuffer) -> None:
    given = rows(1, 2)
    before = given["next_obs"].copy()
    buffer.add(**given, terminal_mask=[True, False], terminal_next_obs=np.zeros((1, 3)))
    assert (given["next_obs"] == before).all()


# Once: terminal observations are put into a copy of next_obs in its own type: of 0.5, whole numbers keep 0.
def test_terminal_observations_keep_their_fractions_beside_whole_numbers(buffer: ReplayBuffer) -> None:
    buffer.add(
        **rows(1) | {"next_obs": np.zeros((1, 3), np.int64)},
        terminal_mask=[True],
        terminal_next_obs=np.full((1, 3), 0.5),
    )
    assert stored(buffer)[1]["next_obs"] == [0.5] * 3


TOO_LARGE = np.array([[1, 1, 1], [1, 1e300, 1]])


def test_infinite_rewards_and_those_that_are_no_numbers_stay_what_they_are(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2, 3) | {"rewards": np.array([np.inf, -np.inf, np.nan])})
    assert [stored(buffer)[number]["rewards"] for number in (1, 2)] == [np.inf, -np.inf]
    assert np.isnan(stored(buffer)[3]["rewards"])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "obs too large for a float": ({"obs": TOO_LARGE}, ValueError, "rows['obs'] must fit into float32, found 1e+300"),
    "next_obs too large": ({"next_obs": TOO_LARGE}, ValueError, "rows['next_obs'] must fit into float32, found 1e+300"),
    "rewards too large": ({"rewards": [1.0, -1e39]}, ValueError, "rows['rewards'] must fit into float32, found -1e+39"),
    "a terminal observation too large": (
        {"terminal_mask": [0, 1], "terminal_next_obs": TOO_LARGE},
        ValueError,
        "rows['next_obs'] must fit into float32, found 1e+300",
    ),
    "obs of another width": ({"obs": np.zeros((2, 4))}, ValueError, "rows['obs'] must have shape [rows, 3] or [3]"),
    "fewer actions": ({"actions": np.zeros((1, 2))}, ValueError, "rows['actions'] must have 2 rows, found 1"),
    "fewer rewards": ({"rewards": [1.0]}, ValueError, "rows['rewards'] must have 2 rows, found 1"),
    "more dones": ({"dones": [0, 0, 1]}, ValueError, "rows['dones'] must have 2 rows, found 3"),
    "rewards in words": ({"rewards": ["a", "b"]}, TypeError, "rewards must be numbers, found <U1"),
    "complex obs": (
        {"obs": np.zeros((2, 3), complex)},
        TypeError,
        "rows['obs'] must have dtype float32, found complex128",
    ),
    "a mask of another length": ({"terminal_mask": [True]}, ValueError, "terminal_mask must have shape [2], found [1]"),
    "a mask of other numbers": (
        {"terminal_mask": [0.5, 1]},
        ValueError,
        "terminal_mask must be true or false for each row",
    ),
    "a mask alone": ({"terminal_mask": [0, 1]}, ValueError, "set for 1 rows: terminal_next_obs must be given"),
    "no mask": ({"terminal_next_obs": np.zeros((2, 3))}, ValueError, "terminal observations need a terminal_mask"),
    "terminal observations that are too many": (
        {"terminal_mask": [0, 1], "terminal_next_obs": np.zeros((3, 3))},
        ValueError,
        "terminal_next_obs must have shape [2, 3], or [1, 3] for the set rows alone, found [3, 3]",
    ),
    "a critic": ({"critic": np.zeros((2, 4))}, ValueError, "the buffer has critic_dim=0"),
    "a terminal critic": ({"terminal_next_critic": np.zeros((2, 4))}, ValueError, "the buffer has critic_dim=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_whatever_does_not_fit_is_refused_before_anything_is_written(buffer: ReplayBuffer, case: str) -> None:
    change, error, words = BAD[case]
    buffer.add(**rows(8, 9))
    before = contents(buffer.replay)
    with pytest.raises(error, match=re.escape(words)):
        buffer.add(**rows(1, 2) | change)
    assert contents(buffer.replay) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"critic": None}, "critic and next_critic must be given"),
        ({"next_critic": None}, "critic and next_critic must be given"),
        ({"critic": np.zeros((2, 3))}, "rows['critic'] must have shape [rows, 4]"),
        ({"terminal_mask": [0, 1], "terminal_next_obs": np.zeros((1, 3))}, "terminal_next_critic must be given"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused_before_anything_is_written(
    critical: ReplayBuffer, change: dict[str, Any], words: str
) -> None:
    before = contents(critical.replay)
    with pytest.raises(ValueError, match=re.escape(words)):
        critical.add(**rows(1, 2, critic=True) | change)
    assert contents(critical.replay) == before


@pytest.mark.parametrize("count", [11, 19, 20, 21, 57])
def test_of_more_rows_than_it_holds_the_newest_stay(buffer: ReplayBuffer, count: int) -> None:
    buffer.add(**rows(100, 101, 102))
    buffer.add(**rows(*range(count)))
    assert (buffer.ptr[0], buffer.size[0]) == (3 + count, 10)
    assert sorted(stored(buffer)) == list(range(count - 10, count))


def test_of_more_rows_than_it_holds_the_terminal_observations_stay_with_their_rows(buffer: ReplayBuffer) -> None:
    mask = np.arange(25) % 2 == 0
    buffer.add(**rows(*range(25)), terminal_mask=mask, terminal_next_obs=np.full((25, 3), 7.0))
    found = {number: row["next_obs"][0] for number, row in stored(buffer).items()}
    assert found == {number: 7.0 if number % 2 == 0 else number + 0.5 for number in range(15, 25)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": [0.0] * 24 + [1e39]}, "rows['rewards'] must fit into float32, found 1e+39"),
        ({"rewards": [0.0] * 24}, "rows['rewards'] must have 25 rows, found 24"),
        ({"obs": np.zeros((25, 4))}, "rows['obs'] must have shape [rows, 3] or [3]"),
    ],
)
def test_more_rows_than_it_holds_are_all_checked_before_one_is_written(
    buffer: ReplayBuffer, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        buffer.add(**rows(*range(25)) | change)
    assert (buffer.ptr[0], buffer.size[0]) == (0, 0)


def test_a_single_transition_wider_than_the_capacity_is_one_row() -> None:
    with ReplayBuffer(2, 3, 2, "cpu", seed=1) as buffer:
        buffer.add(np.ones(3), np.ones(2), 1.0, np.ones(3), 0.0, 0.0)
        assert (buffer.ptr[0], buffer.size[0]) == (1, 1)


# -------------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(("critic_dim", "more"), [(0, {}), (4, {"critic": 4, "next_critic": 4})])
def test_a_sample_is_float32_tensors_by_name(critic_dim: int, more: dict[str, int]) -> None:
    with ReplayBuffer(10, 3, 2, "cpu", critic_dim=critic_dim) as buffer:
        buffer.add(**rows(1, 2, critic=bool(critic_dim)))
        batch = buffer.sample(5)
    shapes = {"obs": (5, 3), "actions": (5, 2), "rewards": (5,), "next_obs": (5, 3), "dones": (5,), "truncated": (5,)}
    shapes |= {name: (5, width) for name, width in more.items()}
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    assert {tensor.dtype for tensor in batch.values()} == {torch.float32}
    assert {str(tensor.device) for tensor in batch.values()} == {"cpu"}


def test_a_sample_goes_to_the_device(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1))
    buffer.device = "meta"  # the one device besides the CPU that every torch has
    assert buffer.sample(2)["obs"].device.type == "meta"


def test_a_sample_is_a_new_copy_each_time(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1))
    first = buffer.sample(2)
    first["obs"][:] = 99
    assert buffer.sample(2)["obs"].tolist() == [[1, 1, 1]] * 2
    assert first["obs"].tolist() == [[99, 99, 99]] * 2


def test_a_sample_may_be_larger_than_what_is_stored(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1, 2))
    assert len(buffer.sample(50)["obs"]) == 50


def test_an_empty_buffer_says_so(buffer: ReplayBuffer) -> None:
    with pytest.raises(NothingToSample, match="0 transitions are stored; add some first"):
        buffer.sample(1)


# Once: below 0 it is numpy that complains, about "negative dimensions".
@pytest.mark.parametrize("size", [0, -2])
def test_a_sample_has_one_row_or_more(buffer: ReplayBuffer, size: int) -> None:
    buffer.add(**rows(1))
    with pytest.raises(ValueError, match="batch_size must be 1 or more"):
        buffer.sample(size)


def test_equal_seeds_draw_equal_rows() -> None:
    drawn = []
    for seed in (3, 3, 4):
        with ReplayBuffer(10, 3, 2, "cpu", seed=seed) as buffer:
            buffer.add(**rows(*range(10)))
            drawn.append(buffer.sample(40)["obs"][:, 0].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


# ---------------------------------------------------------------------------------------------------- other processes


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_a_child_process_adds_are_drawn_here(buffer: ReplayBuffer, method: str) -> None:
    with child(replay_support.collect, buffer, method=method):
        pass
    assert (buffer.ptr[0], sorted(stored(buffer))) == (3, [1, 2, 3])


def test_a_pickled_buffer_is_the_same_memory_with_the_same_settings() -> None:
    with (
        ReplayBuffer(10, 3, 2, "cpu", defer_gpu=True, critic_dim=4, seed=1) as buffer,
        pickle.loads(pickle.dumps(buffer)) as other,
    ):
        assert (other.device, other.defer_gpu, other.packed_cpu_storage, other.critic_dim) == ("cpu", True, False, 4)
        other.add(**rows(1, critic=True))
        assert buffer.size[0] == 1
        buffer.add(**rows(2, critic=True))
        assert sorted(stored(other)) == [1, 2]


def test_after_close_everything_says_so(buffer: ReplayBuffer) -> None:
    buffer.add(**rows(1))
    buffer.close()
    buffer.cleanup()
    for use in (lambda: buffer.add(**rows(1)), lambda: buffer.sample(1), lambda: buffer.size[0]):
        with pytest.raises(SegmentClosed):
            use()
