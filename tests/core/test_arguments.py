"""Arguments: an argument that cannot be used is an error that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memlane.core.arguments import as_count, as_names, is_finite_number


@pytest.mark.parametrize("value", [1, np.int8(7), True, 2**80])
def test_an_integer_that_is_large_enough_is_returned_as_an_int(value: Any) -> None:
    assert as_count("size", value, 1) == value
    assert type(as_count("size", value, 1)) is int


@pytest.mark.parametrize("value", [0, -1, np.int64(-5)])
def test_an_integer_that_is_too_small_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^size must be 1 or more, found {value}$"):
        as_count("size", value, 1)


@pytest.mark.parametrize("value", [1, 9])
def test_an_integer_outside_of_both_bounds_is_an_error(value: int) -> None:
    with pytest.raises(ValueError, match=f"^size must be 2 to 8, found {value}$"):
        as_count("size", value, 2, 8)


@pytest.mark.parametrize("value", [1.0, "1", None, [1], np.float32(2)])
def test_something_else_than_an_integer_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^size must be an integer, 1 or more, found ") as caught:
        as_count("size", value, 1)
    assert str(caught.value).endswith(repr(value))


@pytest.mark.parametrize("value", [0, -1.5, np.float32(2), np.int8(3), True])
def test_numbers_are_finite_numbers(value: Any) -> None:
    assert is_finite_number(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.float64("inf"), "1", None, [1.0], 1j])
def test_everything_else_is_not_a_finite_number(value: Any) -> None:
    assert not is_finite_number(value)


@pytest.mark.parametrize("value", [["a", "b"], ("a", "b"), {"a": 1, "b": 2}])
def test_names_are_returned_as_a_list(value: Any) -> None:
    assert as_names("fields", value) == ["a", "b"]


def test_a_single_string_is_not_a_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"^fields must be a list of names, such as \['obs'\], found 'obs'$"):
        as_names("fields", "obs")
