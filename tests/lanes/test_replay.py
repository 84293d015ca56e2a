"""Replay: what can be stored, how rows come in, what is refused before anything is written, and what is counted."""

from __future__ import annotations

import gc
import pickle
import re
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memlane.core import (
    BudgetError,
    Layout,
    LayoutError,
    Segment,
    SegmentClosed,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    fresh_name,
)
from memlane.ipc import Limiter, Replay, Weights
from memlane.lanes.replay import MAX_SAMPLERS
from tests.support import replays as replay_support
from tests.support.processes import METHODS, ask, child
from tests.support.replays import PLAIN, STEP, contents, drawn, final, play, step


@pytest.fixture
def plain() -> Iterator[Replay]:
    with Replay(PLAIN, capacity=10) as replay:
        yield replay


@pytest.fixture
def single() -> Iterator[Replay]:
    """One stream."""
    with Replay(STEP, capacity=20, streams=1, observations=["obs"]) as replay:
        yield replay


@pytest.fixture
def double() -> Iterator[Replay]:
    """Two streams."""
    with Replay(STEP, capacity=20, streams=2, observations=["obs"]) as replay:
        yield replay


def pairs(*numbers: int) -> dict[str, Any]:
    return {"x": np.array([[number, -number] for number in numbers], np.int64)}


def numbers_in(replay: Replay) -> list[int]:
    batch = replay.sampler(seed=0).sample(300)
    assert (batch["x"][:, 0] == -batch["x"][:, 1]).all()
    return sorted(set(batch["x"][:, 0].tolist()))


# -------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, dict[str, Any]] = {
    "dict observations": {
        "obs/image": ("uint8", (21, 21, 3)),
        "obs/joints": ("float32", (7,)),
        "obs/goal/position": ("float64", (2,)),
        "action": ("int64", ()),
    },
    "every width": {
        name: (name, (3,)) for name in ("int8", "uint16", "int32", "uint64", "float16", "float32", "complex128", "bool")
    },
    "one byte": {"x": ("uint8", ())},
    "scalars and nothing": {"step": ("uint16", ()), "none": ("float32", (0, 3)), "z": ("complex64", (2,))},
    # Once: "for an unknown reason" for all of these. The native side wants the very dtype object that numpy has once
    # for each of its plain types, and what the slow path converts to is not that one.
    "records": {"transition": ([("obs", "f4", (3,)), ("action", "i8"), ("done", "?")], (2,))},
    "text": {"who": ("S5", ())},
    "dates": {"when": ("M8[s]", ())},
    "the other end first": {"x": (">f4", 2)},
}


def anything(layout: Layout, rows: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(5)
    return {
        field.name: np.frombuffer(chance.bytes(rows * field.nbytes), np.uint8)
        .view(field.dtype)
        .reshape(rows, *field.shape)
        if field.dtype.kind != "b"
        else chance.random((rows, *field.shape)) < 0.5
        for field in layout
    }


@pytest.mark.parametrize("fields", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_any_layout_come_back_bit_for_bit(fields: dict[str, Any]) -> None:
    layout = Layout({**fields, "row": ("int64", ())})
    given = anything(layout, 5) | {"row": np.arange(5)}
    with Replay(layout, capacity=7) as replay:
        assert replay.add(given) == 5
        batch = replay.sampler(seed=0).sample(20)
        assert set(batch["row"].tolist()) == set(range(5))
        for name, array in given.items():
            assert (batch[name].dtype, batch[name].shape[1:]) == (array.dtype, array.shape[1:])
            for place, row in enumerate(batch["row"]):
                assert batch[name][place].tobytes() == array[row].tobytes()


# Once: which fields are observations is kept in the bits of one int64: OverflowError from the 64th field on.
def test_an_observation_may_be_any_of_many_fields() -> None:
    many = {**STEP, **{f"sensor{number}": ("float32", ()) for number in range(70)}}
    with Replay(many, capacity=4, streams=1, observations=["sensor69"]) as replay:
        assert replay.observations == ["sensor69"]


def test_the_fields_of_a_row_lie_side_by_side() -> None:
    with Replay({"a": ("uint8", ()), "b": ("float64", ()), "c": ("uint8", 3)}, capacity=4) as replay:
        assert replay.row_dtype.itemsize == 16


def test_segment_layout_says_beforehand_what_a_replay_takes() -> None:
    with Replay(STEP, capacity=33, streams=3, alpha=0.6) as replay:
        expected = Replay.segment_layout(STEP, 33, streams=3, alpha=0.6)
        assert expected == replay.segment.layout
        assert expected.nbytes <= replay.nbytes


def test_bytes_per_transition_counts_row_and_priority() -> None:
    with Replay(PLAIN, 1000) as bare, Replay(PLAIN, 1000, alpha=0.5) as weighted:
        assert bare.bytes_per_transition >= 16
        assert 8 <= weighted.bytes_per_transition - bare.bytes_per_transition <= 10


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"row": {}}, LayoutError, "a row needs at least one field"),
        ({"capacity": 0}, ValueError, "capacity must be 1 or more, found 0"),
        ({"capacity": 2.5}, TypeError, "integer"),
        ({"streams": -1}, ValueError, "streams must be 0 or more"),
        ({"streams": 1, "capacity": 1}, ValueError, "capacity must be 2 or more in a replay with streams, found 1"),
        ({"streams": 0.5}, TypeError, "streams must be an integer, 0 or more, found 0.5"),
        ({"capacity": "10"}, TypeError, "capacity must be an integer, 1 or more, found '10'"),
        ({"streams": 1, "observations": "obs"}, TypeError, "observations must be a list of names, such as ['obs']"),
        ({"alpha": "0.6"}, ValueError, "alpha must be above 0, or None to sample uniformly, found '0.6'"),
        ({"limiter": 2.0}, TypeError, "limiter must be a Limiter or None, found 2.0"),
        ({"row": PLAIN, "streams": 1}, LayoutError, "need a field 'reward' of dtype float32 or float64 and shape []"),
        (
            {"row": {**STEP, "truncated": ("uint8", ())}, "streams": 1},
            LayoutError,
            "'truncated' of dtype bool and shape [], found",
        ),
        ({"row": {**STEP, "reward": ("float32", 1)}, "streams": 1}, LayoutError, "'reward'"),
        ({"streams": 1, "observations": ["pixels"]}, ValueError, "found 'pixels'"),
        ({"streams": 1, "observations": ["ob"]}, ValueError, "found 'ob'; did you mean 'obs'?"),
        ({"observations": ["obs"]}, ValueError, "observations=['obs'] need streams"),
        ({"alpha": 0.0}, ValueError, "alpha must be above 0"),
        ({"alpha": float("nan")}, ValueError, "alpha must be above 0"),
        ({"name": "a", "file": "b"}, SegmentError, "expected a name or a file, not both"),
        ({"capacity": 2**45}, BudgetError, "bytes"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Replay(**{"row": STEP, "capacity": 10, **arguments})


def test_a_replay_knows_what_it_was_made_with() -> None:
    limiter = Limiter(2.0, 5, 40.0)
    with Replay(STEP, 9, streams=2, observations=["obs"], alpha=0.7, limiter=limiter) as replay:
        assert (replay.capacity, replay.streams, replay.observations) == (9, 2, ["obs"])
        assert (replay.alpha, replay.limiter, replay.layout) == (0.7, limiter, Layout(STEP))


# --------------------------------------------------------------------------------------------------------------- adding


def test_one_row_can_be_added_as_plain_python_values() -> None:
    with Replay({"a": ("float32", ()), "b": ("int64", ()), "c": (bool, ()), "d": ("float64", 2)}, capacity=3) as replay:
        assert replay.add({"a": 0.5, "b": 7, "c": True, "d": [1, 2]}) == 1
        batch = replay.sampler(seed=0).sample(1)
    assert {name: array[0].tolist() for name, array in batch.items()} == {"a": 0.5, "b": 7, "c": True, "d": [1.0, 2.0]}


def test_one_row_can_be_added_without_a_dimension_for_rows(plain: Replay) -> None:
    assert plain.add({"x": np.array([4, -4])}) == 1
    assert numbers_in(plain) == [4]


def test_as_many_rows_as_the_arrays_have_are_added(plain: Replay) -> None:
    assert plain.add(pairs(1, 2, 3)) == 3
    assert numbers_in(plain) == [1, 2, 3]


def test_no_rows_at_all_are_added_without_complaint(plain: Replay) -> None:
    assert plain.add({"x": np.empty((0, 2), np.int64)}) == 0
    assert (plain.added, plain.size) == (0, 0)


GIVEN = np.array([[1, -1], [2, -2]])
FORMS: dict[str, Any] = {
    "as it is": GIVEN,
    "a list": GIVEN.tolist(),
    "narrower": GIVEN.astype(np.int8),
    "columns first": np.asfortranarray(GIVEN),
    "every second": np.repeat(GIVEN, 2, axis=0)[::2],
    "the other end first": GIVEN.astype(">i8"),
    "read-only": np.frombuffer(GIVEN.tobytes(), np.int64).reshape(2, 2),
    "a tensor": torch.from_numpy(GIVEN.copy()),
    # Once: numpy holds longlong and int64 for the same dtype, the native side not: "for an unknown reason".
    "of the same width by another name": GIVEN.astype(np.longlong),
}


@pytest.mark.parametrize("given", FORMS.values(), ids=FORMS)
def test_whole_numbers_are_taken_in_any_form_that_holds_them(plain: Replay, given: Any) -> None:
    assert plain.add({"x": given}) == 2
    assert numbers_in(plain) == [1, 2]


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool", ">f8"])
def test_numbers_become_floats_where_floats_are_stored(dtype: str) -> None:
    with Replay({"x": ("float32", 2)}, capacity=4) as replay:
        replay.add({"x": np.array([[1, 0]], dtype)})
        assert replay.sampler(seed=0).sample(3)["x"].tolist() == [[1, 0]] * 3


def test_double_rewards_are_stored_as_the_nearest_float() -> None:
    with Replay({"reward": ("float32", ())}, capacity=4) as replay:
        replay.add({"reward": np.array([0.1])})
        replay.add({"reward": np.float64(0.1)})
        replay.add({"reward": 0.1})
        assert set(replay.sampler(seed=0).sample(30)["reward"].tolist()) == {float(np.float32(0.1))}


LARGE: dict[str, Any] = {
    "one number": 1e300,
    "a scalar": np.float64(-1e300),
    "one row": np.array([1e300]),
    "rows": np.array([0.5, 1e300, -1e301]),
    "rows apart": np.array([0.5, 0.5, -1e300, 0.5])[::2],
    "a list": [0.5, 1e300],
    "long doubles": np.array([1e300], np.longdouble),
    "just too large": np.array([0.5, np.nextafter(2.0**128, 0)]),
    "rounded up to too large": np.array([2.0**128 - 2.0**103]),
}


@pytest.mark.parametrize("given", LARGE.values(), ids=LARGE)
def test_a_number_too_large_for_a_float_is_refused_by_name_and_not_stored_as_infinite(given: Any) -> None:
    with Replay({"done": (bool, ()), "reward": ("float32", ())}, capacity=4) as replay:
        before = contents(replay)
        large = next(number for number in np.atleast_1d(given) if abs(number) > 1e30)
        with pytest.raises(ValueError, match=re.escape(f"rows['reward'] must fit into float32, found {large!s}; ")):
            replay.add({"done": np.zeros(np.shape(given), bool), "reward": given})
        assert contents(replay) == before


def test_what_is_infinite_or_no_number_is_stored_as_it_is_and_the_largest_float_too() -> None:
    largest = float(np.finfo(np.float32).max)
    numbers = [np.inf, -np.inf, np.nan, largest, -largest, np.nextafter(2.0**128 - 2.0**103, 0)]
    with Replay({"x": ("float32", ())}, capacity=18) as replay:
        replay.add({"x": np.array(numbers)})
        replay.add({"x": numbers})
        for number in numbers:
            replay.add({"x": number})
        found = np.unique(replay.sampler(seed=0).sample(2000)["x"])
        assert np.array_equal(found, np.float32([-np.inf, -largest, largest, np.inf, np.nan]), equal_nan=True)


def test_what_a_row_holds_that_is_not_read_may_be_too_large(double: Replay) -> None:
    """Final observations of running episodes, and skipped rows, are often uninitialised memory."""
    rows = step(1, 2, truncated=[False, True])
    last = {"obs": np.array([[1e300, 1e300], [3.0, 3.0]])}
    writer = double.writer()
    assert writer.add(rows, final=last) == 2
    with pytest.raises(ValueError, match=re.escape("final['obs'] must fit into float32, found 1e+300")):
        writer.add(rows, final={"obs": last["obs"][::-1].copy()})
    wild = rows | {"obs": np.array([[1e300, 1e300], [2.0, 2.0]])}
    assert writer.add(wild, final=last, skip=[True, False]) == 1
    with pytest.raises(ValueError, match=re.escape("rows['obs'] must fit into float32, found 1e+300")):
        writer.add(wild, final=last, skip=[False, True])


def test_rows_may_come_in_any_mapping(single: Replay) -> None:
    assert single.writer().add(UserDict(step(3, truncated=True)), final=UserDict(final(4))) == 1
    assert drawn(single)[3]["next_obs"] == [4.0, 4.0]


def test_what_is_stored_is_a_copy(plain: Replay) -> None:
    given = pairs(1)
    plain.add(given)
    given["x"][:] = 9
    assert numbers_in(plain) == [1]


ROWS = np.zeros((2, 2), np.int64)


@pytest.mark.parametrize(
    ("rows", "skip", "error", "words"),
    [
        ({}, None, ValueError, "rows must have the fields ['x'], found []: 'x' is missing"),
        ({"x": ROWS, "y": ROWS}, None, ValueError, "rows must have the fields ['x'], found ['x', 'y']: 'y' is unknown"),
        ({"y": ROWS}, None, ValueError, "found ['y']"),
        ({"X": ROWS}, None, ValueError, "rows must have the fields ['x'], found ['X']; did you mean 'x'?"),
        (
            {"x": np.zeros((2, 3), np.int64)},
            None,
            ValueError,
            "rows['x'] must have shape [rows, 2] or [2], found [2, 3]",
        ),
        ({"x": np.zeros((1, 2, 2), np.int64)}, None, ValueError, "found [1, 2, 2]"),
        ({"x": 3}, None, ValueError, "found []"),
        ({"x": ROWS.astype(float)}, None, TypeError, "rows['x'] must have dtype int64, found float64"),
        ({"x": [["a", "b"]]}, None, TypeError, "must have dtype int64, found <U1"),
        (
            {"x": np.full((1, 2), 2**63, np.uint64)},
            None,
            ValueError,
            "must fit into int64, found values from 9223372036",
        ),
        (
            {"x": np.zeros((11, 2), np.int64)},
            None,
            ValueError,
            "11 rows (final observations included) are more than the 10",
        ),
        ({"x": ROWS}, [True], ValueError, "skip must have 2 rows, found shape [1]"),
        ({"x": ROWS}, [1, 0], TypeError, "skip must be one bool for each row, found int64"),
        ({"x": ROWS}, [[True, False]], TypeError, "skip must be one bool for each row"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    plain: Replay, rows: Any, skip: Any, error: type[Exception], words: str
) -> None:
    plain.add(pairs(1, 2))
    before = contents(plain)
    with pytest.raises(error, match=re.escape(words)):
        plain.writer().add(rows, skip=skip)
    assert contents(plain) == before


def test_fields_must_have_equally_many_rows() -> None:
    with Replay({"a": ("float32", ()), "b": ("float32", 2)}, capacity=4) as replay:
        before = contents(replay)
        with pytest.raises(ValueError, match=re.escape("rows['b'] must have 2 rows, found 3")):
            replay.add({"a": np.zeros(2, "f4"), "b": np.zeros((3, 2), "f4")})
        assert contents(replay) == before


LAST = {"truncated": [False, True]}


@pytest.mark.parametrize(
    ("rows", "arguments", "error", "words"),
    [
        (step(1), {}, ValueError, "must have 2 rows, found 1"),
        (step(1, 2, 3), {}, ValueError, "must have 2 rows, found 3"),
        (step(1, 2), {"env_ids": [0]}, ValueError, "must have 1 rows, found 2"),
        (step(1, 2), {"env_ids": [0, 2]}, IndexError, "2"),
        (
            step(1, 2, **LAST),
            {},
            ValueError,
            "row 1 is truncated: its value is bootstrapped from the observation",
        ),
        (step(1, 2, **LAST), {"final": {}}, ValueError, "final must have the fields ['obs'], found []"),
        (step(1, 2, **LAST), {"final": {**final(1, 2), "reward": [0, 0]}}, ValueError, "found ['obs', 'reward']"),
        (step(1, 2, **LAST), {"final": final(1)}, ValueError, "final['obs'] must have 2 rows, found 1"),
        (
            step(1, 2, **LAST),
            {"final": {"obs": np.zeros((2, 5))}},
            ValueError,
            "final['obs'] must have shape [rows, 2]",
        ),
        (step(1, 2, **LAST), {"final": {"obs": np.zeros((2, 2), complex)}}, TypeError, "final['obs'] must have dtype"),
        (step(1, 2) | {"truncated": [0.0, 1.0]}, {}, TypeError, "truncated must be one bool for each row"),
        (step(1, 2) | {"terminated": np.zeros((2, 1), bool)}, {}, TypeError, "terminated must be one bool"),
        (step(1, 2), {"skip": [True, False, False]}, ValueError, "skip must have 2 rows"),
        (
            {name: rows for name, rows in step(1, 2).items() if name != "truncated"},
            {},
            ValueError,
            "must have the fields",
        ),
        # Once: "operands could not be broadcast together", which names neither the field nor what was expected.
        (step(1, 2) | {"terminated": [False] * 3}, {}, ValueError, "terminated"),
    ],
)
def test_rows_of_streams_that_do_not_fit_are_refused_before_anything_is_written(
    double: Replay, rows: Any, arguments: Any, error: type[Exception], words: str
) -> None:
    writer = double.writer()
    writer.add(step(8, 9))
    before = contents(double)
    with pytest.raises(error, match=re.escape(words)):
        writer.add(rows, **arguments)
    assert contents(double) == before


def test_final_observations_count_among_the_rows_that_must_fit() -> None:
    with Replay(STEP, capacity=3, streams=2, observations=["obs"]) as replay:
        writer = replay.writer()
        with pytest.raises(ValueError, match=re.escape("4 rows (final observations included) are more than the 3")):
            writer.add(step(1, 2, truncated=True), final=final(1, 2))
        assert (replay.added, replay.size) == (0, 0)
        assert writer.add(step(1, 2, truncated=[True, False]), final=final(1, 2)) == 2


def test_rows_that_are_skipped_are_not_stored_and_not_counted(plain: Replay) -> None:
    assert plain.writer().add(pairs(1, 2, 3), skip=[False, True, False]) == 2
    assert (plain.added, numbers_in(plain)) == (2, [1, 3])


def test_a_replay_may_be_filled_with_one_add(plain: Replay) -> None:
    assert plain.add(pairs(*range(10))) == 10
    assert plain.size == 10


# -------------------------------------------------------------------------------------------------- old rows and counts


def test_new_rows_overwrite_the_oldest(plain: Replay) -> None:
    for begin in range(0, 25, 5):
        plain.add(pairs(*range(begin, begin + 5)))
    assert numbers_in(plain) == list(range(15, 25))


def test_a_replay_of_one_row_keeps_the_newest() -> None:
    with Replay(PLAIN, capacity=1) as replay:
        for number in range(3):
            replay.add(pairs(number))
            assert numbers_in(replay) == [number]


def test_added_counts_from_the_start_and_size_what_is_stored(plain: Replay) -> None:
    seen = []
    for number in range(13):
        plain.add(pairs(number))
        seen.append((plain.added, plain.size, len(plain)))
    assert seen == [(count, min(count, 10), min(count, 10)) for count in range(1, 14)]


def test_final_observations_are_not_counted_as_transitions(single: Replay) -> None:
    play(single.writer(), 1, 2, 3, end="truncated")
    assert (single.added, single.size) == (3, 3)


def test_final_observations_take_the_place_of_the_oldest_transitions() -> None:
    with Replay(STEP, capacity=4, streams=1, observations=["obs"]) as replay:
        writer = replay.writer()
        play(writer, 1, 2, 3)
        play(writer, 4, end="truncated")
        assert (replay.added, replay.size, replay.counters()["evicted"]) == (4, 3, 1)
        assert sorted(drawn(replay)) == [2, 3, 4]


def test_counters_tell_what_was_added_sampled_and_evicted(plain: Replay) -> None:
    plain.add(pairs(*range(8)))
    plain.add(pairs(*range(5)))
    plain.sampler(seed=0).sample(17)
    counters = plain.counters()
    assert {name: count for name, count in counters.items() if count} == {"added": 13, "sampled": 17, "evicted": 3}
    assert set(counters) == {
        *("admitted", "added", "sampled", "evicted", "abandoned", "avoided", "stale_priorities", "redrawn"),
        *("held_writers", "held_samplers"),
    }


def test_rows_that_lacked_a_neighbour_are_counted_as_redrawn(single: Replay) -> None:
    play(single.writer(), 1, 2)  # the newest has no next observation yet
    single.sampler(seed=0).sample(100)
    assert 20 < single.counters()["redrawn"] < 300


def test_samples_per_insert_is_what_was_drawn_for_each_row(plain: Replay) -> None:
    assert plain.samples_per_insert == 0.0
    plain.add(pairs(1, 2, 3, 4))
    plain.sampler(seed=0).sample(10)
    assert plain.samples_per_insert == 2.5


# -------------------------------------------------------------------------------------------------------------- writers


def test_each_writer_fills_its_own_streams(double: Replay) -> None:
    first, second = double.writer([1]), double.writer([0])
    play(first, 1, 2)
    play(second, 11, 12)
    play(first, 3)
    found = drawn(double)
    assert {number: row["next_obs"][0] for number, row in found.items()} == {1: 2, 2: 3, 11: 12}


def test_env_ids_say_which_streams_the_rows_are_of(double: Replay) -> None:
    writer = double.writer()
    writer.add(step(1, 11))
    writer.add(step(12), env_ids=[1])
    writer.add(step(13, 2), env_ids=[1, 0])
    assert {number: row["next_obs"][0] for number, row in drawn(double).items()} == {1: 2, 11: 12, 12: 13}


def test_env_ids_are_positions_among_the_writers_own_streams() -> None:
    with Replay(STEP, capacity=20, streams=5, observations=["obs"]) as replay:
        writer = replay.writer([4, 2])
        writer.add(step(1), env_ids=[0])
        assert [bool(newest) for newest in replay.segment["streams"]] == [False, False, False, False, True]


def test_a_skipped_row_leaves_its_stream_as_it_was(double: Replay) -> None:
    writer = double.writer()
    writer.add(step(1, 11))
    writer.add(step(99, 12), skip=[True, False])
    writer.add(step(2, 13))
    assert {number: row["next_obs"][0] for number, row in drawn(double).items()} == {1: 2, 11: 12, 12: 13}


def test_a_skipped_row_needs_no_final_observation(double: Replay) -> None:
    assert double.writer().add(step(1, 2, truncated=[True, False]), skip=[True, False]) == 1


def test_a_new_writer_begins_new_episodes(single: Replay) -> None:
    play(single.writer(), 1, 2)
    play(single.writer(), 3, 4)
    found = drawn(single, n_step=5, gamma=1.0, stack={"obs": 2})
    assert {number: (row["reward"], row["obs"][0][0]) for number, row in found.items()} == {1: (1, 1), 3: (1, 3)}


def test_a_writer_that_resumes_goes_on_where_the_last_one_was(single: Replay) -> None:
    play(single.writer(), 1, 2)
    play(single.writer(resume=True), 3, 4)
    assert {number: row["next_obs"][0] for number, row in drawn(single).items()} == {1: 2, 2: 3, 3: 4}


def test_a_writer_leaves_the_streams_of_others_alone(double: Replay) -> None:
    first = double.writer([0])
    play(first, 1)
    double.writer([1])
    play(first, 2)
    assert sorted(drawn(double)) == [1]


def test_cut_begins_a_new_episode_and_the_row_before_it_is_not_drawn(single: Replay) -> None:
    writer = single.writer()
    play(writer, 1, 2)
    writer.cut()
    play(writer, 3, 4)
    found = drawn(single, stack={"obs": 2})
    assert {number: row["obs"][0][0] for number, row in found.items()} == {1: 1, 3: 3}


def test_cut_is_for_the_streams_at_these_positions(double: Replay) -> None:
    writer = double.writer([1, 0])
    writer.add(step(1, 11))
    writer.cut([1])
    writer.add(step(2, 12))
    assert sorted(drawn(double)) == [1]


# Once: a mask is taken for the positions 0 and 1: cut([F, F, T]) cuts the streams 0 and 1, and env_ids=[T, F, T] puts
# three rows into the streams 1, 0 and 1. Fractions are cut off likewise.
@pytest.mark.parametrize("given", [np.array([False, False, True]), np.array([1.7])])
def test_positions_that_are_no_whole_numbers_are_refused_or_mean_what_they_say(given: Any) -> None:
    with Replay(STEP, capacity=20, streams=3, observations=["obs"]) as replay:
        writer = replay.writer()
        writer.add(step(1, 11, 21))
        newest = replay.segment["streams"].tolist()
        try:
            writer.cut(given)
        except (TypeError, ValueError, IndexError):
            assert replay.segment["streams"].tolist() == newest
        else:
            assert replay.segment["streams"].tolist() == [*newest[:2], 0]
        with pytest.raises((TypeError, ValueError, IndexError)):
            writer.add(step(*range(len(given))), env_ids=given)


# Once: an AssertionError without a word.
def test_cut_without_streams_says_that_there_are_none(plain: Replay) -> None:
    with pytest.raises(Exception, match="streams"):
        plain.writer().cut()


@pytest.mark.parametrize("streams", [[2], [-1], [0, 0]])
def test_a_writer_can_only_have_different_streams_that_are_there(double: Replay, streams: list[int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"streams must be different numbers from 0 to 1, found {streams}")):
        double.writer(streams)


@pytest.mark.parametrize("given", [{"final": {"x": np.zeros(1, np.int64)}}, {"env_ids": [0]}])
def test_a_replay_without_streams_refuses_what_needs_them(plain: Replay, given: dict[str, Any]) -> None:
    """Once: both were ignored."""
    with pytest.raises(ValueError, match=r"final and env_ids need streams, but the replay of .* has none"):
        plain.writer().add({"x": np.zeros(1, np.int64)}, **given)
    assert plain.added == 0


@pytest.mark.parametrize("timeout", [-1, float("nan")])
@pytest.mark.parametrize("rows", [{"x": np.zeros((1, 2), np.int64)}, {"x": [[0, 0]]}], ids=["array", "list"])
def test_a_timeout_that_is_no_duration_is_refused_although_nothing_waits(
    plain: Replay, rows: dict[str, Any], timeout: float
) -> None:
    with pytest.raises(ValueError, match=r"timeout must be None .* or a number of seconds"):
        plain.add(rows, timeout=timeout)
    assert plain.added == 0
    plain.add(rows)
    with pytest.raises(ValueError, match=r"timeout must be None .* or a number of seconds"):
        plain.sampler().sample(1, timeout=timeout)
    assert plain.counters()["sampled"] == 0


@pytest.mark.parametrize("rows", [None, [0], 0])
def test_rows_that_are_not_a_dict_are_an_error_that_names_the_fields(plain: Replay, rows: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"rows must be a dict with the fields ['x'], found {rows!r}")):
        plain.add(rows)


def test_a_replay_without_streams_has_none_to_give(plain: Replay) -> None:
    with pytest.raises(ValueError, match="has no streams; create it with streams=2"):
        plain.writer([0, 1])


# Once: without observations there is nothing to give as final, but a truncated row asks for it; `final={}` is then
# refused "for an unknown reason". So no episode of such a replay can ever be truncated.
@pytest.mark.parametrize("last", [None, {}])
def test_rows_without_observations_can_be_truncated(last: dict[str, Any] | None) -> None:
    with Replay(STEP, capacity=5, streams=1) as replay:
        assert replay.writer().add(step(1, truncated=True), final=last) == 1
        assert drawn(replay, 5)[1]["truncated"] is True


# ----------------------------------------------------------------------------------------------------- other processes


def test_a_pickled_replay_is_the_same_memory(single: Replay) -> None:
    with pickle.loads(pickle.dumps(single)) as other:
        play(other.writer(), 1, 2, 3, end="truncated")
        assert (single.added, sorted(drawn(single))) == (3, [1, 2, 3])


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_another_process_adds_can_be_drawn_here(single: Replay, method: str) -> None:
    with child(replay_support.add_some, single, method=method):
        pass
    assert sorted(drawn(single)) == [1, 2, 3]


def test_strangers_find_a_replay_by_its_name() -> None:
    name = fresh_name()
    with Replay(STEP, 10, streams=1, observations=["obs"], alpha=0.5, name=name) as replay:
        assert replay.name == name
        play(replay.writer(), 1, 2)
        with Replay.attach(name, layout=STEP) as other:
            assert (other.alpha, other.streams, sorted(drawn(other))) == (0.5, 1, [1])
        with pytest.raises(SegmentError, match=f"the layout of replay '{name}' differs: expected"):
            Replay.attach(name, layout=PLAIN)
        with pytest.raises(SegmentExists):
            Replay(PLAIN, 10, name=name)
    with pytest.raises(SegmentMissing):
        Replay.attach(name)


def test_another_lane_is_not_taken_for_a_replay() -> None:
    name = fresh_name()
    with Weights(PLAIN, name=name), pytest.raises(SegmentError, match="is not a replay lane"):
        Replay.attach(name)


def test_a_replay_does_not_work_read_only() -> None:
    name = fresh_name()
    with (
        Replay(PLAIN, 10, name=name),
        Segment.attach(name, writeable=False) as segment,
        pytest.raises(SegmentError, match="read-only"),
    ):
        Replay.from_segment(segment)


def test_after_close_everything_says_so(single: Replay) -> None:
    writer, sampler = single.writer(), single.sampler(seed=0)
    play(writer, 1, 2)
    single.close()
    single.close()
    for use in (
        lambda: play(writer, 3),
        lambda: sampler.sample(1),
        lambda: single.added,
        single.counters,
        single.sampler,
    ):
        with pytest.raises(SegmentClosed):
            use()
    sampler.close()


def test_samplers_give_their_places_back_when_they_are_closed_or_forgotten(plain: Replay) -> None:
    kept = [plain.sampler(seed=0) for _ in range(MAX_SAMPLERS)]
    with pytest.raises(SegmentError, match=f"all {MAX_SAMPLERS} entries"):
        plain.sampler()
    kept[3].close()
    kept[3].close()
    kept[3] = plain.sampler()
    assert kept[3].place == 3
    del kept[5]
    gc.collect()
    assert plain.sampler().place == 5


def test_what_the_support_calls_everything_is_everything_that_add_changes(plain: Replay) -> None:
    """Otherwise the tests above that compare it would see nothing."""
    before = contents(plain)
    plain.add(pairs(1))
    assert contents(plain) != before
    assert ask(replay_support.contents, plain) == contents(plain)
