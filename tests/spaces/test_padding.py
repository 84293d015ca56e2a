"""Padded spaces: what fits in, what comes out, and what belongs to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space, Text, Tuple

from memlane.spaces.padding import fit_action, own_mask, pad_observation, padded_space

SMALL = Box(np.float32([1, -2]), np.float32([3, 4]))
LARGE = Box(-1, 1, (3,))


def padded(*spaces: Space[Any]) -> Any:
    return padded_space(dict(enumerate(spaces)))


def test_a_padded_box_has_the_largest_extents_and_the_widest_bounds() -> None:
    box = padded(SMALL, LARGE)
    assert (box.shape, box.dtype) == ((3,), np.float32)
    assert box.low.tolist() == [-1, -2, -1]
    assert box.high.tolist() == [3, 4, 1]
    assert padded(Box(0, 9, (2, 5)), Box(0, 9, (3, 4))).shape == (3, 5)


def test_the_bounds_of_padding_include_zero() -> None:
    box = padded(Box(5, 9, (1,)), Box(5, 9, (2,)))
    assert (box.low.tolist(), box.high.tolist()) == ([5, 0], [9, 9])
    assert box.contains(pad_observation(Box(5, 9, (1,)), box, np.float32([7])))


def test_equal_spaces_stay_what_they_are() -> None:
    space = Dict({"bits": MultiBinary(3), "text": Text(4)})
    assert padded(space, Dict({"bits": MultiBinary(3), "text": Text(4)})) is space


def test_observations_are_filled_up_with_zeros() -> None:
    observation = pad_observation(SMALL, LARGE, np.float32([2, 3]))
    assert (observation.tolist(), observation.dtype) == ([2, 3, 0], np.float32)


def test_an_observation_of_another_shape_than_its_space_is_not_hidden_by_padding() -> None:
    with pytest.raises(ValueError, match=r"expected an observation of shape \(2,\), found \(1,\)"):
        pad_observation(SMALL, LARGE, np.float32([2]))


def test_actions_lose_what_does_not_belong_to_the_space() -> None:
    assert fit_action(SMALL, np.float32([7, 8, 9])).tolist() == [7, 8]
    assert fit_action(Box(0, 9, (1, 2)), np.arange(9).reshape(3, 3)).tolist() == [[0, 1]]


@pytest.mark.parametrize(("start", "action", "expected"), [(0, 2, 2), (0, 3, 0), (0, 4, 0), (-1, 1, 1), (-1, 2, -1)])
def test_a_discrete_action_beyond_the_space_is_its_first(start: int, action: int, expected: int) -> None:
    assert fit_action(Discrete(3, start=start), np.int64(action)) == expected


def test_masks_show_the_elements_of_arrays_and_the_values_of_integers() -> None:
    assert own_mask(SMALL, LARGE).tolist() == [True, True, False]
    assert own_mask(LARGE, LARGE).tolist() == [True] * 3
    assert own_mask(Discrete(2), Discrete(4)).tolist() == [True, True, False, False]
    assert own_mask(MultiBinary(2), MultiBinary(2)).tolist() == [True, True]


def test_nested_spaces_are_padded_part_by_part() -> None:
    one = Dict({"act": Tuple((Discrete(2), SMALL)), "text": Text(4)})
    two = Dict({"act": Tuple((Discrete(3), LARGE)), "text": Text(4)})
    space = padded(one, two)
    assert space["act"][0] == Discrete(3)
    assert space["act"][1].shape == (3,)
    value = {"act": (1, np.float32([2, 3])), "text": "hi"}
    assert pad_observation(one, space, value)["act"][1].tolist() == [2, 3, 0]
    action = fit_action(one, {"act": (2, np.float32([2, 3, 4])), "text": "hi"})
    assert (action["act"][0], action["act"][1].tolist(), action["text"]) == (0, [2, 3], "hi")
    mask = own_mask(one, space)
    assert (mask["act"][0].tolist(), mask["act"][1].tolist()) == ([True, True, False], [True, True, False])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Box(0, 1, (2,)), Box(0, 1, (2, 2))),
        (Box(0, 1, (2,)), Box(0, 1, (3,), np.float64)),
        (Box(0, 1, (2,)), Discrete(2)),
        (Discrete(2), Discrete(3, start=1)),
        (Dict({"a": Discrete(2)}), Dict({"b": Discrete(3)})),
        (Tuple((Discrete(2),)), Tuple((Discrete(2), Discrete(2)))),
        (MultiBinary(2), MultiBinary(3)),
    ],
    ids=["dimensions", "dtype", "kind", "start", "keys", "length", "MultiBinary"],
)
def test_spaces_that_cannot_be_padded_are_named_with_their_owners(one: Space[Any], two: Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"spaces that can be padded.*of 'ann' and .*of 'bob' at 'action\.x'"):
        padded_space({"ann": Dict({"x": one}), "bob": Dict({"x": two})}, "action")
