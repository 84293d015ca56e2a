"""The check of the order: it accepts every order of a queue, and finds each slot that was taken too early."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.chaos.order import find_overtaken


def taken(*slots: tuple[int, int, int, int]) -> list[int]:
    """The slots found, of (commit begin, commit end, take begin, take end)."""
    columns = np.array(slots, np.int64).reshape(-1, 4).T
    return find_overtaken(*columns).tolist()


def by_pairs(columns: NDArray[np.int64]) -> list[int]:
    begin, end, take_begin, take_end = columns
    pairs = (end[:, None] < begin[None, :]) & (take_begin[:, None] > take_end[None, :])
    return np.flatnonzero(pairs.any(axis=0)).tolist()


def test_no_slot_is_no_violation() -> None:
    assert taken() == []


def test_slots_that_are_taken_in_the_order_of_their_commits_are_in_order() -> None:
    assert taken((0, 1, 10, 11), (2, 3, 12, 13), (4, 5, 14, 15)) == []


def test_a_slot_that_is_taken_before_an_older_one_is_found() -> None:
    assert taken((0, 1, 20, 21), (2, 3, 12, 13)) == [1]


def test_commits_that_overlap_may_be_taken_in_either_order() -> None:
    assert taken((0, 3, 20, 21), (2, 5, 12, 13)) == []


def test_takes_that_overlap_may_be_in_either_order() -> None:
    assert taken((0, 1, 12, 21), (2, 3, 11, 13)) == []


def test_it_finds_what_a_comparison_of_all_pairs_finds() -> None:
    chance = np.random.default_rng(7)
    found = 0
    for _ in range(200):
        begin, take_begin = np.sort(chance.integers(0, 60, 12)), chance.integers(60, 120, 12)
        columns = np.stack(
            [begin, begin + chance.integers(0, 8, 12), take_begin, take_begin + chance.integers(0, 8, 12)]
        )
        assert find_overtaken(*columns).tolist() == by_pairs(columns)
        found += bool(by_pairs(columns))
    assert found > 0
