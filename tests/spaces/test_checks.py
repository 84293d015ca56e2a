"""The checks of columns: a value that does not fit the space is an error with its path, and nothing is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Space, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.spaces import plain_column, same

PIXELS = Box(0, 255, (2,), np.uint8)
FLOATS = Box(-1, 1, (2,), np.float32)
FLAGS = Box(0, 1, (2,), np.bool_)
SPACE = Dict({"cam": Dict({"rgb": PIXELS}), "move": Tuple((Discrete(3), Text(4)))})
VALUE = {"cam": {"rgb": np.uint8([1, 2])}, "move": (1, "abcd")}

REFUSED: list[tuple[Space[Any], Any, type[Exception], str]] = [
    (PIXELS, np.uint8([1, 2, 3]), ValueError, r"expected shape \(2,\), found \(3,\)"),
    (PIXELS, np.uint8([[1], [2]]), ValueError, r"expected shape \(2,\), found \(2, 1\)"),
    (PIXELS, [[1], [2, 3]], ValueError, r"expected shape \(2,\) and dtype uint8, found a value that is not an array"),
    (PIXELS, [300.7, 0], TypeError, "expected dtype uint8, found 300.7 in float64"),
    (PIXELS, [1.5, 0], TypeError, "expected dtype uint8, found 1.5 in float64"),
    (PIXELS, [np.nan, 0], TypeError, "expected dtype uint8, found nan in float64"),
    (PIXELS, [np.inf, 0], TypeError, "expected dtype uint8, found inf in float64"),
    (PIXELS, [300, 0], ValueError, "expected values of dtype uint8, 0 to 255, found 300"),
    (PIXELS, [300.0, 0], ValueError, "expected values of dtype uint8, 0 to 255, found 300"),
    (PIXELS, [-1, 0], ValueError, "expected values of dtype uint8, 0 to 255, found -1"),
    (PIXELS, [1 + 2j, 0], TypeError, "expected dtype uint8, found complex128; take the real part"),
    (PIXELS, np.complex128([1, 2]), TypeError, "expected dtype uint8, found complex128; take the real part"),
    (PIXELS, ["1", "2"], TypeError, "expected dtype uint8, found <U1"),
    (PIXELS, [2**70, 0], TypeError, "expected dtype uint8, found object"),
    (PIXELS, None, ValueError, r"expected shape \(2,\), found None"),
    (PIXELS, "ab", ValueError, r"expected shape \(2,\), found 'ab'"),
    (FLOATS, [1e300, 0], ValueError, r"expected dtype float32, found 1e\+300 in float64"),
    (FLOATS, [1j, 0], TypeError, "expected dtype float32, found complex128; take the real part"),
    (FLOATS, [2**24 + 1, 0], ValueError, "expected dtype float32, found 16777217 in int64"),
    (Box(-1, 1, (2,), np.float16), [0, 70000], ValueError, "expected dtype float16, found 70000 in int64"),
    (Box(-1, 1, (), np.float64), -(2**53) - 1, ValueError, "expected dtype float64, found -9007199254740993 in int64"),
    (FLAGS, [2, 0], TypeError, "expected dtype bool, found 2 in int64"),
    (FLAGS, [0.5, 0], TypeError, "expected dtype bool, found 0.5 in float64"),
    (Box(-1, 1, (), np.int64), np.uint64(2**63), ValueError, "found 9223372036854775808"),
    (Box(0, 1, (), np.uint64), np.int64(-1), ValueError, "found -1"),
    (Box(0, 1, (), np.int64), 2.0**63, ValueError, "found 9223372036854775808"),
    (Discrete(3), 3, ValueError, "expected 0 to 2, found 3"),
    (Discrete(3), -1, ValueError, "expected 0 to 2, found -1"),
    (Discrete(3, start=5), np.int64(4), ValueError, "expected 5 to 7, found 4"),
    (Discrete(3, start=5), np.array(8), ValueError, "expected 5 to 7, found 8"),
    (Discrete(3), 2**70, ValueError, "expected 0 to 2, found 1180591620717411303424"),
    (Discrete(3), 1.5, TypeError, "found 1.5 in float64"),
    (Discrete(3), [1], ValueError, r"expected shape \(\), found \(1,\)"),
    (Discrete(3), "1", TypeError, "found <U1"),
    (MultiDiscrete([2, 3], start=[0, 4]), [1, 3], ValueError, "expected 4 to 6, found 3"),
    (MultiDiscrete([2, 3]), [2, 0], ValueError, "expected 0 to 1, found 2"),
    (MultiBinary(2), [0, 2], ValueError, "expected 0 to 1, found 2"),
    (MultiBinary(2), [0, -1], ValueError, "expected 0 to 1, found -1"),
    (Text(3), "abcd", ValueError, "expected 1 to 3 characters, found 4 in 'abcd'"),
    (Text(3), "", ValueError, "expected 1 to 3 characters, found 0 in ''"),
    (Text(3), "a-b", ValueError, "character '-' of 'a-b' is not in the space's charset"),
    (Text(3), 5, TypeError, "expected a string, found int"),
    (OneOf((Discrete(2), Text(2))), (2, 0), ValueError, "expected a choice from 0 to 1, found 2"),
    (OneOf((Discrete(2), Text(2))), (-1, "a"), ValueError, "expected a choice from 0 to 1, found -1"),
    (OneOf((Discrete(2), Text(2))), (0.5, 0), TypeError, "with an integer choice, found float"),
    (OneOf((Discrete(2), Text(2))), 0, TypeError, "expected a tuple of 2 values, found int"),
    (OneOf((Discrete(2), Text(2))), (1, "abc"), ValueError, "at '1': expected 1 to 2 characters"),
    (Tuple((Discrete(2), Discrete(2))), (1,), ValueError, "expected a tuple of 2 values, found 1"),
    (Tuple((Discrete(2),)), {0: 1}, TypeError, "expected a tuple of 1 values, found dict"),
    (Dict({"a": Discrete(2)}), {}, KeyError, "missing=\\['a'\\], unknown=\\[\\]"),
    (Dict({"a": Discrete(2)}), {"a": 0, "b": 1}, KeyError, "missing=\\[\\], unknown=\\['b'\\]"),
    (Dict({"a": Discrete(2)}), [0], TypeError, "expected a dict with the keys .'a'., found list"),
]

ACCEPTED: list[tuple[Space[Any], Any, Any]] = [
    (PIXELS, [1, 255], np.uint8([1, 255])),
    (PIXELS, (1.0, 255.0), np.uint8([1, 255])),
    (PIXELS, [True, False], np.uint8([1, 0])),
    (FLOATS, np.float64([0.1, np.nan])[:1].repeat(2), np.float32([0.1, 0.1])),
    (FLOATS, [np.inf, -np.inf], np.float32([np.inf, -np.inf])),
    (FLOATS, [5, -7], np.float32([5, -7])),
    (FLOATS, [2**24, -(2**30)], np.float32([2**24, -(2**30)])),
    (FLOATS, np.array([1, 2], ">f4"), np.float32([1, 2])),
    (FLOATS, np.float32([[1, 9], [2, 9]])[:, 0], np.float32([1, 2])),
    (FLAGS, [1, 0.0], np.array([True, False])),
    (Box(-1, 1, (), np.float32), 0.5, np.float32(0.5)),
    (Discrete(3, start=-1), -1, np.int64(-1)),
    (Discrete(3), np.uint8(2), np.int64(2)),
    (Discrete(3), np.array(2), np.int64(2)),
    (Discrete(3), True, np.int64(1)),
    (Discrete(3), 2.0, np.int64(2)),
    (Discrete(200, dtype=np.uint8), 199, np.uint8(199)),
    (MultiDiscrete([2, 3], start=[0, 4]), [1, 6], np.int64([1, 6])),
    (MultiBinary(3), [True, False, True], np.int8([1, 0, 1])),
    (Text(3), np.str_("abc"), "abc"),
    (Text(3, min_length=0), "", ""),
    (Tuple((Discrete(2), Text(2))), [1, "ab"], (np.int64(1), "ab")),
    (OneOf((Discrete(2), Text(2))), [np.array(1), "ab"], (np.int64(1), "ab")),
]


@pytest.mark.parametrize(("space", "value", "error", "message"), REFUSED)
def test_a_value_that_does_not_fit_is_refused(
    space: Space[Any], value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plain_column(space, 2).write(0, value)


@pytest.mark.parametrize(("space", "value", "stored"), ACCEPTED)
def test_a_value_that_only_looks_different_is_stored(space: Space[Any], value: Any, stored: Any) -> None:
    column = plain_column(space, 2)
    column.write(1, value)
    assert same(column.read_row(1), stored)


@pytest.mark.parametrize(
    ("change", "error", "where"),
    [
        ({"cam": {"rgb": [1, 256]}}, ValueError, "cam.rgb"),
        ({"cam": {"depth": 1}}, KeyError, "cam"),
        ({"move": (3, "a")}, ValueError, "move.0"),
        ({"move": (1, "abcde")}, ValueError, "move.1"),
        ({"move": (1,)}, ValueError, "move"),
        ({"more": 1}, KeyError, "value"),
    ],
)
def test_an_error_names_the_path_in_the_space(change: dict[str, Any], error: type[Exception], where: str) -> None:
    with pytest.raises(error, match=f"at '{where}': "):
        plain_column(SPACE, 1).write(0, VALUE | change)


def test_a_value_with_one_wrong_part_is_not_stored_in_part() -> None:
    column = plain_column(SPACE, 1)
    column.write(0, VALUE)
    with pytest.raises(ValueError, match=r"move.1"):
        column.write(0, {"cam": {"rgb": np.uint8([7, 7])}, "move": (2, "too long")})
    assert same(column.read_row(0), {"cam": {"rgb": np.uint8([1, 2])}, "move": (np.int64(1), "abcd")})


def test_a_batch_with_one_wrong_value_is_not_stored_in_part() -> None:
    column = plain_column(Text(3), 2)
    with pytest.raises(ValueError, match="1 to 3"):
        column.write_batch(("abc", "abcd"))
    assert column.read() == ("", "")


@pytest.mark.parametrize(
    ("space", "batch", "message"),
    [
        (PIXELS, np.zeros((2, 3), np.uint8), r"expected shape \(n, 2\), one row per value, found \(2, 3\)"),
        (PIXELS, np.uint8(3), r"expected shape \(n, 2\), one row per value, found \(\)"),
        (PIXELS, [[1, 2], [3, 256]], "found 256"),
        (Discrete(3), [0, 3], "expected 0 to 2, found 3"),
        (
            Dict({"a": Discrete(3), "b": Discrete(3)}),
            {"a": [1, 2], "b": [1]},
            "the same number of values in every subspace",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(space: Space[Any], batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_column(space, 2).write_batch(batch)


def test_a_string_is_not_taken_for_a_batch_of_characters() -> None:
    with pytest.raises(TypeError, match="expected a tuple of values, one per row, found str"):
        plain_column(Text(3), 3).write_batch("abc")


@pytest.mark.parametrize("space", [PIXELS, Discrete(3), MultiBinary(2), Text(3), SPACE], ids=type)
@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_that_does_not_exist_is_an_index_error(space: Space[Any], index: int) -> None:
    with pytest.raises(IndexError, match=f"there are 2 rows, no row {index}"):
        plain_column(space, 2).write(index, space.sample())


@pytest.mark.parametrize("begin", [-1, 1])
def test_a_batch_beyond_the_last_row_is_an_index_error(begin: int) -> None:
    with pytest.raises(IndexError, match=f"2 values from row {begin} on do not fit into 2 rows"):
        plain_column(Discrete(3), 2).write_batch([1, 2], begin)


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (0, 3), (2, 1)])
def test_rows_that_do_not_exist_cannot_be_read(begin: int, end: int) -> None:
    with pytest.raises(IndexError, match=f"there are 2 rows, no rows {begin} to {end}"):
        plain_column(Discrete(3), 2).read(begin, end)


def test_the_bounds_of_a_box_are_not_checked() -> None:
    column = plain_column(FLOATS, 1)
    column.write(0, [5, 6])
    assert column.read().tolist() == [[5, 6]]


_INTEGERS = st.sampled_from(["int8", "uint8", "int16", "uint32", "int64", "uint64"])


@given(value=hnp.arrays(hnp.integer_dtypes() | hnp.floating_dtypes(), 3), dtype=_INTEGERS)
def test_whole_numbers_are_stored_exactly_or_not_at_all(value: np.ndarray[Any, Any], dtype: str) -> None:
    column = plain_column(Box(0, 1, (3,), np.dtype(dtype).type), 1)
    try:
        column.write(0, value)
    except (TypeError, ValueError):
        limits = np.iinfo(dtype)
        fits = [float(x).is_integer() and limits.min <= int(x) <= limits.max for x in value if np.isfinite(x)]
        assert not (len(fits) == 3 and all(fits))
    else:
        assert [int(stored) for stored in column.read()[0]] == value.tolist()
