"""Rows: the same bytes that numpy would copy, or an error and no byte at all."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memlane.core import Rows, Segment
from tests.support import strategies as strategies

FUZZ = settings(deadline=None, max_examples=150)
ROW_SHAPES = st.lists(st.integers(0, 4), max_size=2).map(tuple)


class Table(dict[str, NDArray[Any]]):
    """Arrays of equal length, full of random bytes, with gaps between their rows or without."""

    def __repr__(self) -> str:  # not their values: random bytes need not be valid text
        return repr({name: (array.dtype, array.shape, array.strides) for name, array in self.items()})


@st.composite
def tables(draw: st.DrawFn, count: int | None = None) -> Table:
    count = draw(st.integers(0, 12)) if count is None else count
    table = Table()
    for name in draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True)):
        dtype = np.empty(0, draw(strategies.dtypes)).dtype  # a sub-array dtype loses its shape here
        table[name] = noise(count, draw(ROW_SHAPES), dtype, draw(st.sampled_from([0, 0, 3, 64])))
    return table


def noise(count: int, shape: tuple[int, ...], dtype: np.dtype[Any], gap: int = 0) -> NDArray[Any]:
    """Rows of random bytes, and as many random bytes as ``gap`` behind each."""
    row_bytes = dtype.itemsize * math.prod(shape)
    memory = np.random.default_rng().integers(0, 256, (count, row_bytes + gap), dtype=np.uint8)
    if memory.size == 0:
        return np.empty((count, *shape), dtype)
    return np.ndarray((count, *shape), dtype, memory, strides=(row_bytes + gap, *np.empty(shape, dtype).strides))


def bytes_of(array: NDArray[Any]) -> list[bytes]:
    return [array[row, ...].tobytes() for row in range(len(array))]


@FUZZ
@given(tables(), st.data())
def test_gather_copies_what_numpy_would(table: Table, data: st.DataObject) -> None:
    count = len(next(iter(table.values())))
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=20)) if count else []
    gathered = Rows(table).gather(indices, threads=data.draw(st.integers(1, 3)))
    assert list(gathered) == list(table)
    for name, array in table.items():
        expected = array[np.array(indices, int)]
        assert (gathered[name].dtype, gathered[name].shape) == (expected.dtype, expected.shape)
        assert bytes_of(gathered[name]) == bytes_of(expected)


@FUZZ
@given(tables(count=9), st.lists(st.integers(0, 8), max_size=12))
def test_scatter_copies_what_numpy_would(table: Table, indices: list[int]) -> None:
    values = {name: noise(len(indices), array.shape[1:], array.dtype) for name, array in table.items()}
    expected = {name: array.copy() for name, array in table.items()}
    for name, array in expected.items():
        for position, index in enumerate(indices):
            array[index, ...] = values[name][position, ...]  # of two equal indices the later wins
    Rows(table).scatter(indices, values)
    assert {name: bytes_of(array) for name, array in table.items()} == {
        name: bytes_of(array) for name, array in expected.items()
    }


@FUZZ
@given(tables(count=6))
def test_scatter_touches_no_byte_between_the_rows(table: Table) -> None:
    memories = {name: array.base.tobytes() for name, array in table.items() if array.base is not None}
    Rows(table).scatter(np.arange(6), Rows(table).gather(np.arange(6)))
    assert {name: table[name].base.tobytes() for name in memories} == memories  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 100, 128, 129, 4096])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_of_every_width_arrive_whole_with_any_number_of_threads(width: int, threads: int) -> None:
    random = np.random.default_rng(width)
    count = max(64, 2**20 // width)  # enough that every thread gets a share
    table = Rows({"x": random.integers(0, 256, (count, width), dtype=np.uint8)})
    indices = random.permutation(count)
    gathered = table.gather(indices, threads=threads)["x"]
    assert np.array_equal(gathered, table.arrays["x"][indices])
    copy = Rows({"x": np.zeros_like(gathered)})
    copy.scatter(indices, {"x": gathered}, threads=threads)
    assert np.array_equal(copy.arrays["x"], table.arrays["x"])


def test_more_threads_than_rows_are_fine() -> None:
    table = Rows({"x": np.arange(3 * 2**17, dtype=np.int64).reshape(3, -1)})
    assert np.array_equal(table.gather([2, 0], threads=64)["x"], table.arrays["x"][[2, 0]])


def test_several_threads_may_gather_at_once() -> None:
    table = Rows({"x": np.random.default_rng(0).integers(0, 256, (4096, 256), dtype=np.uint8)})
    wrong: list[int] = []

    def gather(seed: int) -> None:
        for _ in range(10):
            indices = np.random.default_rng(seed).integers(0, 4096, 2000)
            if not np.array_equal(table.gather(indices, threads=2)["x"], table.arrays["x"][indices]):
                wrong.append(seed)

    threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_fields_of_packed_rows_are_gathered_in_one_call() -> None:
    packed = np.zeros(10, [("obs", "f4", (3,)), ("action", "i1"), ("reward", ">f8")])
    packed["obs"] = np.arange(30).reshape(10, 3)
    packed["action"], packed["reward"] = np.arange(10), np.arange(10) / 2
    names = ["obs", "action", "reward"]
    gathered = Rows({name: packed[name] for name in names}).gather([9, 0, 9])
    for name in names:
        assert np.array_equal(gathered[name], packed[name][[9, 0, 9]])


def test_rows_of_a_segment_are_gathered_from_shared_memory() -> None:
    with Segment.create({"obs": ("f4", (5, 2)), "done": (bool, 5)}) as segment:
        table = Rows(segment.views())
        segment["obs"][3] = 7
        segment["done"][3] = True
        gathered = table.gather([3])
        assert (gathered["obs"].tolist(), gathered["done"].tolist()) == ([[7, 7]], [True])


def test_rows_of_structures_may_have_gaps() -> None:
    packed = np.zeros(4, [("pair", [("x", "f4"), ("y", "i2")]), ("rest", "u1")])
    packed["pair"]["y"] = np.arange(4)
    assert Rows({"pair": packed["pair"]}).gather([3, 1])["pair"]["y"].tolist() == [3, 1]


def test_memory_that_is_no_text_can_lie_in_a_field_of_text() -> None:
    table = Rows({"x": np.full(8, 0xFF, np.uint8).view("U1")})
    assert table.gather([1])["x"].tobytes() == b"\xff" * 4


def test_rows_keep_their_arrays_alive() -> None:
    table = Rows({"x": np.arange(1000)})
    assert table.gather([999])["x"].tolist() == [999]
    assert len(table) == 1000


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u4", "i8", "u8", ">i4"])
def test_indices_may_have_any_whole_dtype(dtype: str) -> None:
    assert Rows({"x": np.arange(9)}).gather(np.array([8, 1], dtype))["x"].tolist() == [8, 1]


def test_indices_may_have_gaps() -> None:
    assert Rows({"x": np.arange(9)}).gather(np.arange(9)[::3])["x"].tolist() == [0, 3, 6]


# ---------------------------------------------------------------------------------------------------------------- out


@pytest.fixture
def table() -> Rows:
    return Rows({"a": np.arange(12.0).reshape(6, 2), "b": np.arange(6)})


def test_gather_fills_the_arrays_that_it_is_given(table: Rows) -> None:
    out = {"a": np.zeros((2, 2)), "b": np.zeros(2, int)}
    assert table.gather([1, 5], out)["a"] is out["a"]
    assert (out["a"].tolist(), out["b"].tolist()) == ([[2, 3], [10, 11]], [1, 5])


def test_gather_fills_pinned_rows(table: Rows) -> None:
    out = Rows({"a": np.zeros((2, 2)), "b": np.zeros(2, int)})
    for indices in ([1, 5], [0, 4]):
        assert table.gather(indices, out)["b"] is out.arrays["b"]
        assert out.arrays["b"].tolist() == indices


def test_the_order_of_the_fields_of_out_does_not_matter(table: Rows) -> None:
    for out in ({"b": np.zeros(1, int), "a": np.zeros((1, 2))}, Rows({"b": np.zeros(1, int), "a": np.zeros((1, 2))})):
        gathered = table.gather([3], out)
        assert (gathered["a"].tolist(), gathered["b"].tolist()) == ([[6, 7]], [3])


def test_out_may_have_gaps_between_its_rows(table: Rows) -> None:
    wide = np.zeros((2, 5))
    table.gather([1, 5], {"a": wide[:, 1:3], "b": np.zeros(2, int)})
    assert wide.tolist() == [[0, 2, 3, 0, 0], [0, 10, 11, 0, 0]]


# ------------------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a": np.zeros((2, 2), "f4")}, TypeError, r"\['a'\] must have dtype float64, found float32"),
        ({"a": np.zeros((2, 2), ">f8")}, TypeError, r"\['a'\] must have dtype float64, found >f8"),
        ({"a": np.zeros((2, 3))}, ValueError, r"\['a'\] must have rows of shape \[2\], found \[3\]"),
        ({"a": np.zeros(2)}, ValueError, r"\['a'\] must have rows of shape \[2\], found \[\]"),
        ({"a": np.zeros((3, 2))}, ValueError, "field 'b' must have 3 rows, like the first field, found 2"),
        ({"a": np.zeros((3, 2)), "b": np.zeros(3, int)}, ValueError, "2 indices, but (out|values) has 3 rows"),
        ({"a": [[1.0, 2.0]] * 2}, TypeError, r"\['a'\] must be an array .*, found list"),
        ({"a": np.float64(1)}, TypeError, r"\['a'\] must be an array .*, found float64"),
        ({"c": np.zeros(2)}, KeyError, r"must have the fields \['a', 'b'\], found \['a', 'b', 'c'\]"),
        ({"a": np.zeros((2, 4))[:, ::2]}, ValueError, "field 'a' must have contiguous rows"),
        ({"a": np.zeros((2, 2))[::-1]}, ValueError, "field 'a' must have contiguous rows"),
        (
            {"a": np.broadcast_to(np.zeros(2), (2, 2))},
            ValueError,
            "field 'a' must have contiguous rows|read-only",
        ),
    ],
)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_partners_that_do_not_match_are_an_error_and_nothing_is_copied(
    table: Rows, direction: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    partner = {"a": np.full((2, 2), 99.0), "b": np.full(2, 99), **change}
    with pytest.raises(error, match=words):
        getattr(table, direction)([1, 5], partner)
    assert not {1, 5} & set(np.ravel(partner["b"]).tolist())
    assert (table.arrays["a"].ravel().tolist(), table.arrays["b"].tolist()) == (list(range(12)), list(range(6)))


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_missing_field_is_an_error(table: Rows, direction: str) -> None:
    with pytest.raises(KeyError, match=r"must have the fields \['a', 'b'\], found \['a'\]"):
        getattr(table, direction)([1, 5], {"a": np.zeros((2, 2))})


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        ([0, -1], IndexError, r"indices\[1\] must be at least 0 and below 6, found -1"),
        ([6, 0], IndexError, r"indices\[0\] must be at least 0 and below 6, found 6"),
        ([0, 2**62], IndexError, r"indices\[1\] must be at least 0 and below 6, found 4611686018427387904"),
        (np.array([0, 2**64 - 1], np.uint64), IndexError, r"indices\[1\] must be at least 0 and below 6, found"),
        ([0, 2**70], TypeError, "found dtype object"),
        ([0.0, 1.0], TypeError, "integers in one dimension, found dtype float64"),
        ([True, False], TypeError, "found dtype bool"),
        (["0", "1"], TypeError, "found dtype <U1"),
        ([[0, 1]], TypeError, r"shape \[1, 2\]"),
        (0, TypeError, r"shape \[\]"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_indices_that_name_no_row_are_an_error_and_nothing_is_copied(
    table: Rows, direction: str, indices: Any, error: type[Exception], words: str
) -> None:
    partner = {"a": np.full((2, 2), 99.0), "b": np.full(2, 99)}
    with pytest.raises(error, match=words):
        getattr(table, direction)(indices, partner)
    assert (partner["a"].tolist(), partner["b"].tolist()) == ([[99, 99], [99, 99]], [99, 99])
    assert (table.arrays["a"].ravel().tolist(), table.arrays["b"].tolist()) == (list(range(12)), list(range(6)))


def test_gather_into_read_only_arrays_is_an_error_and_nothing_is_copied(table: Rows) -> None:
    locked, free = np.full(2, 99), np.full((2, 2), 99.0)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\['b'\] is read-only"):
        table.gather([1, 5], {"a": free, "b": locked})
    assert (locked.tolist(), free.tolist()) == ([99, 99], [[99, 99], [99, 99]])


def test_scatter_into_read_only_rows_is_an_error_and_nothing_is_copied() -> None:
    locked, free = np.zeros(3), np.zeros(3)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=r"rows\['b'\] is read-only"):
        Rows({"a": free, "b": locked}).scatter([0], {"a": np.ones(1), "b": np.ones(1)})
    assert (locked.tolist(), free.tolist()) == ([0, 0, 0], [0, 0, 0])


def test_an_empty_table_has_no_row_to_gather() -> None:
    with pytest.raises(IndexError, match=r"indices\[0\] must be at least 0 and below 0, found 0"):
        Rows({"x": np.zeros((0, 3))}).gather([0])


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({}, ValueError, "at least one array"),
        ({"x": 5}, TypeError, "field 'x' must be an array .*, found int"),
        ({"x": np.array(5)}, TypeError, "field 'x' must be an array of at least one dimension"),
        ({"x": [1, 2]}, TypeError, "field 'x' must be an array .*, found list"),
        ({"x": np.array([None])}, TypeError, "field 'x' has dtype object"),
        ({"x": np.zeros(3, [("a", "O")])}, TypeError, "field 'x' has dtype .* Python objects"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, ValueError, "field 'y' must have 3 rows, like the first field, found 4"),
        ({"x": np.zeros((3, 2, 2)).transpose(0, 2, 1)}, ValueError, "field 'x' must have contiguous rows"),
        ({"x": np.asfortranarray(np.zeros((3, 2)))}, ValueError, "use np.ascontiguousarray"),
        ({"x": np.zeros(6)[::-1]}, ValueError, r"strides \[-8\]"),
        ({"x": np.broadcast_to(np.zeros(2), (3, 2))}, ValueError, r"strides \[0, 8\]"),
    ],
)
def test_arrays_that_cannot_be_copied_as_rows_are_an_error_that_names_the_field(
    arrays: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Rows(arrays)


def test_values_without_other_references_live_until_they_are_copied() -> None:
    class Fresh(dict[str, np.ndarray[Any, Any]]):
        """Every look makes a new array."""

        def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
            return np.full((4096, 64), 7.0)

    table = np.zeros((4096, 64))
    Rows({"x": table}).scatter(np.arange(4096), Fresh(x=np.zeros((4096, 64))))
    assert (table == 7).all()
