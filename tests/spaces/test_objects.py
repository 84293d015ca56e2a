"""Columns of objects: the parts of a space that no array holds, beside the parts that arrays hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, OneOf, Sequence, Space, Tuple

from memlane.spaces import Capacity, fields_of
from memlane.spaces.objects import ObjectColumn, column_with_objects, split_fields
from tests.support.spaces import Unknown

NESTED = Dict({"a": Tuple((Unknown(), Discrete(3))), "b.c": Unknown(), "d": Box(-1, 1, (2,))})


def column(space: Space[Any], n: int) -> tuple[Any, dict[str, ObjectColumn]]:
    fields, custom = split_fields(space, n)
    objects = {path: ObjectColumn(part, n, path) for path, part in custom.items()}
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in fields.items()}
    return column_with_objects(space, arrays, objects), objects


def test_custom_parts_are_found_by_path_and_the_others_have_their_fields() -> None:
    fields, custom = split_fields(NESTED, 4)
    assert fields == {"a.1": (np.dtype(np.int64), (4,)), "d": (np.dtype(np.float32), (4, 2))}
    assert list(custom) == ["a.0", "b~dc"]


@pytest.mark.parametrize("space", [Discrete(3), Dict({"x": Box(-1, 1, (2,)), "y": Tuple(())})], ids=["leaf", "Dict"])
def test_a_space_without_custom_parts_has_the_fields_that_it_always_has(space: Space[Any]) -> None:
    assert split_fields(space, 4) == (fields_of(space, 4), {})


@pytest.mark.parametrize(
    "part", [Unknown(), OneOf((Unknown(), Discrete(2))), Sequence(Unknown())], ids=lambda part: type(part).__name__
)
def test_a_space_that_only_contains_a_custom_one_is_an_object_as_a_whole(part: Space[Any]) -> None:
    capacity = Capacity(items=3)
    assert split_fields(part, 4, capacity) == ({}, {"": part})
    assert list(split_fields(Tuple((part, Discrete(2))), 4, capacity)[1]) == ["0"]


def test_a_graph_or_sequence_without_capacity_stays_an_error() -> None:
    with pytest.raises(TypeError, match="dynamic shape"):
        split_fields(Tuple((Unknown(), Sequence(Discrete(2)))), 4)


def test_values_are_read_as_they_were_written() -> None:
    values = [{"a": (f"one {row}", row), "b.c": [row], "d": np.float32([row, 1])} for row in range(3)]
    rows, _ = column(NESTED, 3)
    for row, value in enumerate(values):
        rows.write(row, value)
    batch = rows.read()
    assert batch["a"][0] == ("one 0", "one 1", "one 2")
    assert batch["a"][1].tolist() == [0, 1, 2]
    assert batch["b.c"] == ([0], [1], [2])
    assert batch["d"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert rows.read_row(2)["a"] == ("one 2", 2)
    assert rows.load_rows([2, 0])["b.c"] == ([2], [0])
    assert [row["b.c"] for row in rows.read_each()] == [[0], [1], [2]]


def test_copies_do_not_change_with_the_objects() -> None:
    rows, _ = column(NESTED, 1)
    pages: list[int] = []
    rows.write(0, {"a": ("x", 0), "b.c": pages, "d": np.zeros(2, np.float32)})
    copies = [rows.read()["b.c"], (rows.read_row(0)["b.c"],), rows.load_rows([0])["b.c"]]
    borrowed = rows.read(copy=False)["b.c"]
    pages.append(1)
    assert copies == [([],)] * 3
    assert borrowed == ([1],)


def test_what_was_written_is_taken_once_and_read_where_it_is_put() -> None:
    writer, written = column(NESTED, 2)
    reader, received = column(NESTED, 2)
    writer.write(1, {"a": ("go", 2), "b.c": None, "d": np.ones(2, np.float32)})
    for path, objects in written.items():
        received[path].values.update(objects.take_written())
        assert objects.take_written() == {}
    assert reader.read_row(1)["a"][0] == "go"
    assert writer.read_row(1)["a"][0] is None


def test_rows_that_were_never_written_are_zeros_where_the_space_has_zeros() -> None:
    box, unknown = ObjectColumn(Box(-1, 1, (2,)), 2, "box"), ObjectColumn(Unknown(), 2, "unknown")
    for objects in (box, unknown):
        objects.fill_with_zeros()
    assert box.read().tolist() == [[0, 0], [0, 0]]
    assert unknown.read() == (None, None)
