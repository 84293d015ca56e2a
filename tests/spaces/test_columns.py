"""Columns: values are read as they were written, in the form of Gymnasium's batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Space, Text, Tuple
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.core import Layout, Segment
from memlane.spaces import column_of, fields_of
from tests.support.processes import ask
from tests.support.spaces import (
    ALL,
    ROOMY,
    Angle,
    Unknown,
    column_in,
    fixed_spaces,
    plain_column,
    same,
    spaces,
    write_column,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)


@every_space
def test_single_values_are_read_back_as_the_batch_that_gymnasium_makes_of_them(space: Space[Any]) -> None:
    space.seed(1)
    batch = batch_space(space, 5).sample()
    column = plain_column(space, 5, ROOMY)
    for index, value in enumerate(iterate(batch_space(space, 5), batch)):
        column.write(index, value)
    assert same(column.read(), batch)


@every_space
def test_a_batch_is_read_back_as_it_was_written(space: Space[Any]) -> None:
    space.seed(2)
    batch = batch_space(space, 5).sample()
    column = plain_column(space, 5, ROOMY)
    column.write_batch(batch)
    assert same(column.read(), batch)


@every_space
def test_a_column_is_filled_wholly_or_not_at_all(space: Space[Any]) -> None:
    space.seed(2)
    before, after = (batch_space(space, 5).sample() for _ in range(2))
    column = plain_column(space, 5, ROOMY)
    column.write_batch(before)
    assert same(column.read(), after if column.try_write_all(after) else before)


@pytest.mark.parametrize("space", [Box(-1, 1, (2, 3)), Box(0, 255, (4,), np.uint8), Discrete(7), Discrete(7, start=-3)])
def test_plain_numbers_fill_a_column(space: Space[Any]) -> None:
    space.seed(2)
    batch = batch_space(space, 5).sample()
    column = plain_column(space, 5)
    assert column.try_write_all(batch)
    assert same(column.read(), batch)


@pytest.mark.parametrize(
    "values",
    [[1, 1], np.ones(3, np.int64), np.ones((2, 1), np.int64), np.ones(2, np.int32), np.ones(2), np.array([1, 3]),
     np.array([-1, 1]), np.ones(4, np.int64)[::2], np.ones(2, ">i8"), np.ma.ones(2, np.int64), None],
    ids=["a list", "too many", "a dimension more", "another dtype", "floats", "too large", "too small", "a slice",
         "big-endian", "a subclass", "nothing"],
)  # fmt: skip
def test_what_is_not_plainly_right_fills_nothing(values: Any) -> None:
    column = plain_column(Discrete(3), 2)
    assert not column.try_write_all(values)
    assert column.read().tolist() == [0, 0]


def test_numbers_that_begin_at_any_byte_fill_a_column() -> None:
    column = plain_column(Discrete(300), 2)
    values = np.frombuffer(b"\0" + np.array([7, 299]).tobytes(), np.int64, offset=1)
    assert not values.flags.aligned
    assert column.try_write_all(values)
    assert column.read().tolist() == [7, 299]


@pytest.mark.parametrize("rows", [np.zeros(4, np.int64)[::2], np.frombuffer(bytes(16), np.int64)])
def test_rows_that_cannot_be_written_in_one_piece_are_not_filled(rows: Any) -> None:
    column = column_of(Discrete(3), {"value": rows})
    assert not column.try_write_all(np.ones(2, np.int64))
    assert column.read().tolist() == [0, 0]


@every_space
def test_a_batch_can_begin_at_any_row(space: Space[Any]) -> None:
    space.seed(3)
    batch = batch_space(space, 3).sample()
    column = plain_column(space, 5, ROOMY)
    column.write_batch(batch, begin=2)
    assert same(column.read(2, 5), batch)


@every_space
def test_one_row_is_read_as_the_value_that_was_written(space: Space[Any]) -> None:
    space.seed(4)
    value = space.sample()
    column = plain_column(space, 3, ROOMY)
    column.write(1, value)
    assert same(column.read_row(1), value)


@every_space
def test_a_second_value_leaves_nothing_of_the_first(space: Space[Any]) -> None:
    space.seed(5)
    column = plain_column(space, 1, ROOMY)
    for value in [space.sample() for _ in range(8)]:
        column.write(0, value)
        assert same(column.read_row(0), value)


@every_space
def test_a_copy_does_not_change_with_the_rows(space: Space[Any]) -> None:
    space.seed(6)
    first, second = space.sample(), space.sample()
    column = plain_column(space, 1, ROOMY)
    column.write(0, first)
    copy = column.read_row(0)
    column.write(0, second)
    assert same(copy, first)


@given(space=spaces, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=80, deadline=None)
def test_any_nesting_of_spaces_is_read_back_as_written(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    column = plain_column(space, 3, ROOMY)
    for index, value in enumerate(values):
        column.write(index, value)
    assert all(same(column.read_row(index), value) for index, value in enumerate(values))


@given(space=fixed_spaces, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_any_batch_is_read_back_as_written(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    batch = batch_space(space, 3).sample()
    column = plain_column(space, 3)
    column.write_batch(batch)
    assert same(column.read(), batch)


@given(space=spaces, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=6, deadline=None)
def test_any_nesting_of_spaces_goes_from_one_process_to_another(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    with Segment.create(fields_of(space, 3, ROOMY)) as segment:
        ask(write_column, segment, space, values)
        column = column_in(segment, space)
        assert all(same(column.read_row(index), value) for index, value in enumerate(values))


@pytest.mark.parametrize("space", [Box(0, 1, (2,)), Discrete(3), MultiDiscrete([2, 3]), MultiBinary(4)], ids=repr)
def test_rows_are_the_array_itself(space: Space[Any]) -> None:
    arrays = {"value": np.zeros((4, *(space.shape or ())), space.dtype)}
    assert column_of(space, arrays).rows is arrays["value"]


@pytest.mark.parametrize(
    "space", [Text(3), Dict({"a": Discrete(2)}), Tuple((Discrete(2),)), OneOf((Discrete(2),))], ids=repr
)
def test_a_column_of_more_than_one_plain_array_has_no_rows(space: Space[Any]) -> None:
    assert plain_column(space, 2).rows is None


@pytest.mark.parametrize("space", [Box(0, 1, (2,)), Discrete(3), MultiDiscrete([2, 3]), MultiBinary(4)], ids=repr)
def test_without_a_copy_the_batch_is_a_view_of_the_rows(space: Space[Any]) -> None:
    column = plain_column(space, 4)
    assert np.shares_memory(column.read(1, 3, copy=False), column.rows)


@pytest.mark.parametrize("space", [Dict({}), Tuple(())], ids=repr)
def test_a_space_without_parts_knows_how_many_rows_it_has(space: Space[Any]) -> None:
    assert plain_column(space, 3).n == 3


# --------------------------------------------------------------------------------------------------------------- fields


def test_a_bare_space_is_called_value() -> None:
    assert fields_of(Box(0, 1, (2,)), 3) == {"value": (np.dtype("float32"), (3, 2))}


def test_the_name_of_a_field_is_its_path_in_the_space() -> None:
    space = Dict(
        {"cam": Dict({"pos": Box(0, 1, (2,))}), "both": Tuple((Discrete(2), OneOf((Discrete(3), MultiBinary(2)))))}
    )
    assert list(fields_of(space, 1)) == ["both.0", "both.1.choice", "both.1.0", "both.1.1", "cam.pos"]


def test_keys_with_dots_do_not_collide_with_nested_keys() -> None:
    space = Dict(
        {"a": Dict({"b": Discrete(2), "": Discrete(2)}), "a.b": Discrete(2), "a~db": Discrete(2), "": Discrete(2)}
    )
    assert len(fields_of(space, 1)) == 5


def test_two_spaces_fit_into_one_layout_under_two_prefixes() -> None:
    fields = fields_of(Text(3), 2, prefix="obs") | fields_of(Discrete(4), 2, prefix="action")
    with Segment.create(fields) as segment:
        column_of(Text(3), segment.views(), "obs").write(1, "abc")
        column_of(Discrete(4), segment.views(), "action").write(1, 3)
        assert column_of(Text(3), segment.views(), "obs").read() == ("", "abc")


@every_space
def test_every_field_has_a_row_for_each_value(space: Space[Any]) -> None:
    assert {field.shape[0] for field in Layout(fields_of(space, 7, ROOMY))} == {7}


def test_arrays_of_another_dtype_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'value' must have dtype float32 and shape \(n, 2\), found float64 and \(4, 2\)"
    ):
        column_of(Box(0, 1, (2,)), {"value": np.zeros((4, 2))})


def test_a_missing_array_is_named() -> None:
    with pytest.raises(KeyError, match=r"no array 'cam.pos'; the arrays are .'pos'"):
        column_of(Dict({"cam": Dict({"pos": Discrete(2)})}), {"pos": np.zeros(3, np.int64)})


# ------------------------------------------------------------------------------------------------------- custom spaces


@pytest.mark.parametrize("space", [Angle(), Dict({"a": Angle()}), OneOf((Angle(), Discrete(2)))], ids=type)
def test_a_registered_custom_space_has_a_column_also_inside_others(space: Space[Any]) -> None:
    value = space.sample()
    column = plain_column(space, 2)
    column.write(1, value)
    assert same(column.read_row(1), value)


@pytest.mark.parametrize("function", [fields_of, column_of])
def test_a_custom_space_that_is_not_registered_is_named(function: Any) -> None:
    with pytest.raises(CustomSpaceError, match=f"Unknown.* doesn't have an registered `{function.__name__}` function"):
        function(Unknown(), {})
    with pytest.raises(CustomSpaceError, match=r"Supported are Box, Discrete, .* Graph and Sequence\.$"):
        function(Unknown(), {})


@pytest.mark.parametrize("function", [fields_of, column_of])
def test_something_that_is_no_space_is_a_type_error(function: Any) -> None:
    with pytest.raises(TypeError, match=f"provided to `{function.__name__}` is not a gymnasium Space instance"):
        function("Box", {})
