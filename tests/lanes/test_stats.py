"""Stats: several collectors give the moments that one would give, also when some die."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from memlane.core import BudgetError, MemlaneError, SegmentClosed, SegmentError, fresh_name
from memlane.ipc import Moments, Stats, Weights
from tests.support import lanes as lane_support
from tests.support.processes import METHODS, PATIENCE, ask, child, output_of

FLOATS = st.floats(-1e6, 1e6, width=32)


def batches_of(shape: tuple[int, ...]) -> Any:
    """Some batches of vectors, some of them empty."""
    batch = st.integers(0, 5).flatmap(lambda count: hnp.arrays(np.float64, (count, *shape), elements=FLOATS))
    return st.lists(batch, max_size=6)


def expect_same(found: Moments, vectors: NDArray[np.float64]) -> None:
    """The moments that numpy computes over all vectors at once."""
    assert found.count == len(vectors)
    if len(vectors) == 0:
        assert not found.mean.any()
        assert not found.variance.any()
        return
    scale = max(1.0, float(np.abs(vectors).max()))
    assert np.allclose(found.mean, vectors.mean(axis=0), rtol=1e-10, atol=1e-10 * scale)
    assert np.allclose(found.variance, vectors.var(axis=0), rtol=1e-9, atol=1e-10 * scale**2)
    assert np.allclose(found.std, vectors.std(axis=0), rtol=1e-6, atol=1e-5 * scale)


# ------------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_several_collectors_count_what_numpy_counts_over_all(shape: tuple[int, ...], data: st.DataObject) -> None:
    parts = data.draw(st.lists(batches_of(shape), min_size=1, max_size=4))
    with Stats(shape) as stats:
        for batches in parts:
            collector = stats.collector()
            for batch in batches:
                collector.add(batch)
        everything = [batch for batches in parts for batch in batches]
        expect_same(stats.merged(), np.concatenate([np.zeros((0, *shape)), *everything]))


@pytest.mark.parametrize("method", METHODS)
def test_collectors_in_several_processes_count_what_numpy_counts_over_all(method: str) -> None:
    chance = np.random.default_rng(3)
    parts = [[chance.normal(5, number + 1, (100, 4)) for _ in range(20)] for number in range(3)]
    with Stats(4) as stats:
        with (
            child(lane_support.count_vectors, stats, parts[0], method=method),
            child(lane_support.count_vectors, stats, parts[1], method=method),
            child(lane_support.count_vectors, stats, parts[2], method=method),
        ):
            pass
        expect_same(stats.merged(), np.concatenate([batch for batches in parts for batch in batches]))


def test_what_a_killed_collector_counted_stays_and_the_next_one_goes_on_from_there() -> None:
    chance = np.random.default_rng(4)
    first, second, third = ([chance.normal(0, 1, (50, 2)) for _ in range(10)] for _ in range(3))
    with Stats(2, places=2) as stats:
        mine = stats.collector()
        with child(lane_support.count_and_die, stats, first) as process:
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL
        place = ask(lane_support.count_vectors, stats, second)
        for batch in third:
            mine.add(batch)
        assert place != mine.place
        expect_same(stats.merged(), np.concatenate([*first, *second, *third]))


def test_numbers_far_from_zero_keep_their_variance() -> None:
    """The difference of two large sums of squares would not."""
    vectors = np.random.default_rng(5).normal(1e8, 1.0, (1000, 2))
    with Stats(2) as stats:
        for part in np.split(vectors, 10):
            stats.collector().add(part)
        assert np.allclose(stats.merged().variance, vectors.var(axis=0), rtol=1e-6)


def test_leading_dimensions_are_counted_as_vectors() -> None:
    with Stats(3) as stats:
        stats.collector().add(np.ones((4, 5, 3)))
        stats.collector().add(np.ones(3))
        assert stats.merged().count == 21


def test_plain_numbers_can_be_counted() -> None:
    with Stats(()) as stats:
        collector = stats.collector()
        collector.add([1.0, 2.0, 3.0])
        collector.add(6.0)
        moments = stats.merged()
        assert (moments.count, float(moments.mean), float(moments.variance)) == (4, 3, 3.5)


def test_nothing_has_no_mean_and_no_variance() -> None:
    with Stats(2) as stats:
        moments = stats.merged()
        assert (moments.count, moments.mean.tolist(), moments.variance.tolist()) == (0, [0, 0], [0, 0])


def test_vectors_of_another_shape_are_refused_and_not_counted() -> None:
    with Stats((2, 3)) as stats:
        collector = stats.collector()
        for wrong in (np.zeros((4, 3, 2)), np.zeros(3), 1.0):
            with pytest.raises(ValueError, match=r"vectors must have shape \[\.\.\., 2, 3\], found \["):
                collector.add(wrong)
        assert stats.merged().count == 0


@given(batches_of((2,)))
def test_moments_add_up_in_any_order(batches: list[NDArray[np.float64]]) -> None:
    forwards = sum(map(Moments.of, batches), Moments.none((2,)))
    backwards = sum(map(Moments.of, reversed(batches)), Moments.none((2,)))
    vectors = np.concatenate([np.zeros((0, 2)), *batches])
    expect_same(forwards, vectors)
    expect_same(backwards, vectors)


# --------------------------------------------------------------------------------------------------------------- places


def test_each_collector_has_a_place_of_its_own() -> None:
    with Stats(1, places=3) as stats:
        assert sorted(stats.collector().place for _ in range(3)) == [0, 1, 2]


def test_when_all_places_are_taken_by_the_living_the_next_one_is_told_so() -> None:
    with Stats(1, places=1) as stats:
        stats.collector()
        with pytest.raises(MemlaneError, match=r"all 1 entries .* belong to running processes"):
            stats.collector()


def test_an_entry_without_a_free_buffer_does_not_ask_for_an_argument_that_there_is_not() -> None:
    with Stats(3, places=1) as stats:
        collector = stats.collector()
        stats.segment["control"].view(np.int64)[8:11] = stats.segment.life.process()  # all buffers are being filled
        with pytest.raises(
            MemlaneError, match=r"entry 0 of the stats .*; let only the collector of this entry"
        ) as info:
            collector.add(np.ones(3))
        assert "more buffers" not in str(info.value)
        assert collector.moments.count == stats.merged().count == 0


def test_a_place_that_is_left_goes_to_the_next_with_what_was_counted() -> None:
    with Stats(1, places=1) as stats:
        first = stats.collector()
        first.add([[1.0]])
        first.close()
        second = stats.collector()
        second.add([[3.0]])
        assert (stats.merged().count, stats.merged().mean.tolist()) == (2, [2])


@pytest.mark.parametrize("places", [0, -1])
def test_there_is_at_least_one_place(places: int) -> None:
    with pytest.raises(ValueError, match=f"places must be 1 or more, found {places}"):
        Stats(1, places=places)


# ------------------------------------------------------------------------------------------------ travelling and ending


def test_an_unrelated_process_attaches_by_name() -> None:
    with Stats(2, name=fresh_name("stats")) as stats:
        output_of(
            """
            import sys
            from memlane.ipc import Stats
            with Stats.attach(sys.argv[1]) as stats:
                stats.collector().add([[1.0, 2.0], [3.0, 4.0]])
            """,
            stats.name,
        )
        assert stats.merged().mean.tolist() == [2, 3]


def test_attaching_to_another_lane_is_refused() -> None:
    with (
        Weights({"x": ("float64", 2)}, name=fresh_name("weights")) as weights,
        pytest.raises(SegmentError, match="is not a stats lane"),
    ):
        Stats.attach(weights.name or "")


# Regression: a KeyError came from the first call that needed the field.
@pytest.mark.parametrize("change", [(b"mean", b"meen"), (b"squares", b"squeres"), (b"<f8", b"<i8")], ids=str)
def test_a_segment_whose_record_is_not_that_of_statistics_is_refused(change: tuple[bytes, bytes]) -> None:
    with Stats(2, name=fresh_name("stats")) as stats:
        description = stats.layout.to_bytes().replace(*change)
        stats.segment["description"][:] = list(description)
        with pytest.raises(SegmentError, match="is not a stats lane"):
            Stats.attach(stats.name or "")


def test_what_statistics_take_is_known_before_they_are_made() -> None:
    with Stats((3, 2), places=5) as stats:
        assert stats.segment.layout.nbytes == Stats.segment_layout((3, 2), 5).nbytes


USES: dict[str, Callable[[Stats, Any], object]] = {
    "collector": lambda stats, _: stats.collector(),
    "merged": lambda stats, _: stats.merged(),
    "add": lambda _, collector: collector.add([[1.0]]),
    "close": lambda _, collector: collector.close(),
    "pickle": lambda stats, _: pickle.dumps(stats),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_close_is_an_error(use: Callable[[Stats, Any], object]) -> None:
    stats = Stats(1)
    collector = stats.collector()
    stats.close()
    with pytest.raises(SegmentClosed):
        use(stats, collector)


def test_the_learner_publishes_what_the_collectors_counted() -> None:
    """Statistics from the collectors to the learner, and normalizers back."""
    vectors = np.random.default_rng(6).normal(2, 3, (200, 3))
    with Stats(3) as stats, Weights({"mean": ("float64", 3), "std": ("float64", 3)}) as weights:
        with child(lane_support.count_vectors, stats, np.split(vectors, 4)):
            pass
        moments = stats.merged()
        weights.publish({"mean": moments.mean, "std": moments.std})
        _, normaliser = ask(lane_support.read_weights, weights)
    assert np.allclose(normaliser["mean"], vectors.mean(axis=0))
    assert np.allclose(normaliser["std"], vectors.std(axis=0))


def test_more_places_than_processes_are_refused_at_once() -> None:
    with pytest.raises(
        BudgetError, match="places must be at most 65536, found 10000000; it is the number of collectors"
    ):
        Stats(shape=3, places=10**7)
