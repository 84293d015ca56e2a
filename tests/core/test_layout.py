"""Layout: the offsets of fields, the description that other processes read, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import _native
from memlane.core import SIGNAL, Layout, LayoutError
from memlane.core import layout as layout_module
from tests.support import strategies as strategies
from tests.support.processes import output_of

FUZZ = settings(deadline=None, max_examples=100)


# -------------------------------------------------------------------------------------------------------------- placing


@FUZZ
@given(strategies.layouts)
def test_every_field_begins_on_a_cache_line_behind_the_field_before(layout: Layout) -> None:
    end = 0
    for field in layout:
        assert field.offset % 64 == 0
        assert end <= field.offset < end + 64
        end = field.offset + field.nbytes
    assert end <= layout.nbytes < end + 64
    assert layout.nbytes % 64 == 0


@FUZZ
@given(strategies.layouts)
def test_what_is_written_to_one_field_reaches_no_other(layout: Layout) -> None:
    memory = bytearray(layout.nbytes)
    for number, field in enumerate(layout, start=1):
        for at in range(field.offset, field.offset + field.nbytes):
            memory[at] = number
    for number, view in enumerate(layout.views(memory).values(), start=1):
        assert set(view.tobytes()) <= {number}


@FUZZ
@given(strategies.fields)
def test_a_view_has_the_dtype_and_the_shape_that_were_asked_for(fields: dict[str, Any]) -> None:
    layout = Layout(fields)
    views = layout.views(bytearray(layout.nbytes + 128), base=128)
    for name, (dtype, shape) in fields.items():
        base, inner = dtype.subdtype or (dtype, ())
        assert (views[name].dtype, views[name].shape) == (base, shape + inner)


def test_a_field_has_numpys_own_dtype_also_when_it_was_given_a_copy() -> None:
    copied = pickle.loads(pickle.dumps(np.dtype(np.float32)))
    assert copied is not np.dtype(np.float32)
    assert Layout({"x": (copied, 3)})["x"].dtype is np.dtype(np.float32)


def test_a_view_begins_at_the_base_plus_the_offset_of_its_field() -> None:
    layout = Layout({"a": ("u1", 3), "b": ("u1", 2)})
    memory = bytearray(range(200))
    assert layout["b"].view(memory, base=10).tolist() == [10 + 64, 10 + 65]


def test_a_whole_number_is_a_shape_of_one_dimension() -> None:
    assert Layout({"x": ("f4", 8)})["x"].shape == (8,)


def test_an_empty_shape_is_a_scalar() -> None:
    field = Layout({"x": ("f8", ())})["x"]
    assert (field.shape, field.nbytes, field.view(bytearray(8)).ndim) == ((), 8, 0)


def test_a_field_of_no_rows_takes_no_space() -> None:
    layout = Layout({"x": ("f4", (0, 5)), "y": ("f4", 1)})
    assert (layout["x"].nbytes, layout["y"].offset, layout.nbytes) == (0, 0, 64)


def test_a_layout_without_fields_takes_no_space() -> None:
    assert (Layout({}).nbytes, len(Layout({})), Layout.from_bytes(b"[]") == Layout({})) == (0, 0, True)


def test_the_shape_of_a_sub_array_dtype_joins_the_shape() -> None:
    assert Layout({"x": (np.dtype(("f4", (2, 3))), 5)}) == Layout({"x": ("f4", (5, 2, 3))})


def test_numpy_whole_numbers_are_a_shape() -> None:
    assert Layout({"x": ("f4", np.array([2, 3]))})["x"].shape == (2, 3)


def test_the_signal_dtype_is_the_native_struct() -> None:
    fields = SIGNAL.fields
    assert fields is not None
    assert SIGNAL.itemsize == _native.SIGNAL_BYTES
    assert (fields["value"][1], fields["gate"][1]) == _native.SIGNAL_OFFSETS
    assert (fields["value"][0], fields["gate"][0]) == (np.dtype("<i8"), np.dtype("<u4"))


# ----------------------------------------------------------------------------------------------------------- travelling


@FUZZ
@given(strategies.layouts)
def test_a_description_gives_the_same_layout_back(layout: Layout) -> None:
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert (again.hash, again.nbytes, again.fields) == (layout.hash, layout.nbytes, layout.fields)
    assert again.difference(layout) == ""


def test_a_layout_pickles() -> None:
    layout = Layout({"x": ("f4", (2, 3)), "y": ([("a", ">U3"), ("b", "f2", (2,))], ())})
    assert pickle.loads(pickle.dumps(layout)).fields == layout.fields


def test_the_description_is_part_of_format_version_1() -> None:
    layout = Layout({"obs": ("float32", (8, 4)), "done": (bool, 8), "at": ("M8[ns]", ()), "id": (">U3", 1)})
    assert layout.to_bytes() == b'[["obs","<f4",[8,4]],["done","|b1",[8]],["at","<M8[ns]",[]],["id",">U3",[1]]]'


def test_the_hash_is_what_b2sum_says_of_the_description() -> None:
    # printf '[["x","<f4",[3]]]' | b2sum -l 64
    assert Layout({"x": ("f4", 3)}).hash.to_bytes(8, "little").hex() == "b21c777af4851e39"


def test_another_process_computes_the_same_hash() -> None:
    code = "from memlane.core import Layout; print(Layout({'x': ('f4', (2, 3)), 'y': ('S5', ())}).hash)"
    assert int(output_of(code, PYTHONb21c777af4851e39SEED="7")) == Layout({"x": ("f4", (2, 3)), "y": ("S5", ())}).hash


@pytest.mark.parametrize(
    "other",
    [
        {"x": ("f4", 3), "z": ("i8", ())},
        {"y": ("i8", ()), "x": ("f4", 3)},
        {"x": (">f4", 3), "y": ("i8", ())},
        {"x": ("f4", (3, 1)), "y": ("i8", ())},
        {"x": ("f4", 3)},
    ],
    ids=["another name", "another order", "another byte order", "another shape", "a field less"],
)
def test_layouts_differ_in_hash_and_in_words_when_they_differ(other: dict[str, Any]) -> None:
    layout = Layout({"x": ("f4", 3), "y": ("i8", ())})
    assert layout != Layout(other)
    assert layout.hash != Layout(other).hash
    assert layout.difference(Layout(other)) != ""


def test_a_difference_names_the_field_the_expectation_and_the_finding() -> None:
    difference = Layout({"x": ("f4", 3)}).difference(Layout({"x": ("f4", 4)}))
    assert difference == "expected field x: float32[3], found x: float32[4]"


def test_asking_for_an_unknown_field_lists_the_known_ones() -> None:
    known = r"the fields are \['obs', 'reward'\]; did you mean 'reward'\?"
    with pytest.raises(KeyError, match=f"no field 'rewards'; {known}"):
        Layout({"obs": ("f4", 1), "reward": ("f4", 1)})["rewards"]


# ------------------------------------------------------------------------------------------------------------- refusing


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})
BACKWARDS = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ((object, 3), ["'bad'", "dtype object", "pointers"]),
        ((np.dtype([("a", "f4"), ("b", "O")]), 3), ["'bad'", "pointers"]),
        (("S0", 3), ["'bad'", "'S0'", "length"]),
        (("U", 3), ["'bad'", "'U'", "length"]),
        ((str, 3), ["'bad'", "length"]),
        (([], 3), ["'bad'", "without a size"]),
        (("float33", 3), ["'bad'", "float33", "not a dtype", "did you mean 'float32'?"]),
        ((7, 3), ["'bad'", "7", "not a dtype"]),
        ((OVERLAPPING, 3), ["'bad'", "another process cannot reconstruct"]),
        ((BACKWARDS, 3), ["'bad'", "another process cannot reconstruct"]),
        (("f4", -1), ["'bad'", "[-1]", "negative"]),
        (("f4", (2, -3)), ["'bad'", "[2, -3]", "negative"]),
        (("f4", 2.0), ["'bad'", "2.0", "integers"]),
        (("f4", (2, 3.5)), ["'bad'", "(2, 3.5)", "integers"]),
        (("f4", "12"), ["'bad'", "'12'", "integers"]),
        (("f4", None), ["'bad'", "None", "integers"]),
        (("f4", float("nan")), ["'bad'", "nan", "integers"]),
        (("f4", (1,) * 33), ["'bad'", "33 dimensions"]),
        ((np.dtype(("f4", (1,) * 20)), (1,) * 20), ["'bad'", "40 dimensions"]),
        (("f8", 2**60), ["'bad'", str(2**63), str(2**63 - 1)]),
        (("f8", (0, 2**62)), ["'bad'", str(2**65), str(2**63 - 1)]),
        (("u1", 10**30), ["'bad'", str(10**30)]),
        ("f4", ["'bad'", "'f4'", "(dtype, shape)"]),
        (np.float32, ["'bad'", "float32", "(dtype, shape)"]),
        (("f4",), ["'bad'", "('f4',)", "(dtype, shape)"]),
        (("f4", 2, 3), ["'bad'", "('f4', 2, 3)", "(dtype, shape)"]),
        (None, ["'bad'", "None", "(dtype, shape)"]),
    ],
    ids=repr,
)
def test_a_field_that_cannot_be_shared_is_an_error_that_names_field_expectation_and_value(
    spec: Any, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout({"good": ("f4", 1), "bad": spec})
    assert [word for word in words if word not in str(caught.value)] == []


def test_variable_length_strings_are_refused() -> None:
    string = getattr(np.dtypes, "StringDType", None)
    if string is None:
        pytest.skip("this numpy has no StringDType")
    with pytest.raises(LayoutError, match="'bad' has dtype StringDType"):
        Layout({"bad": (string(), 1)})


def test_a_dtype_that_an_extension_registered_is_refused() -> None:
    rational = pytest.importorskip("numpy._core._rational_tests", reason="numpy without its test dtypes").rational
    with pytest.raises(LayoutError, match="'bad' has dtype rational, which another process cannot reconstruct"):
        Layout({"bad": (rational, 1)})


@pytest.mark.parametrize("name", ["", 3, None, b"x"])
def test_a_name_must_be_a_string_with_something_in_it(name: Any) -> None:
    with pytest.raises(LayoutError, match=f"non-empty string, found {name!r}"):
        Layout({name: ("f4", 1)})


def test_fields_that_are_no_dict_are_refused() -> None:
    with pytest.raises(LayoutError, match="expected a dict of fields"):
        Layout([("x", ("f4", 1))])  # type: ignore[arg-type]


def test_fields_that_fit_one_by_one_but_not_together_are_refused() -> None:
    with pytest.raises(LayoutError, match="field 'b' ends at byte"):
        Layout({"a": ("u1", 2**62), "b": ("u1", 2**62)})


def test_a_description_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "MAX_DESCRIPTION_BYTES", 100)
    with pytest.raises(LayoutError, match=r"the description of 9 fields has .* bytes, at most 100 are possible"):
        Layout({f"field {i}": ("f4", 1) for i in range(9)})


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (b"", ["JSON"]),
        (b"\xff\xfe[]", ["JSON"]),
        (b"[[", ["JSON"]),
        (b"{}", ["list of fields", "{}"]),
        (b"null", ["list of fields", "null"]),
        (b"[1]", ["field 0", "found 1"]),
        (b'[["x","<f4"]]', ["field 0", "['x', '<f4']"]),
        (b'[["x","<f4",3]]', ["field 0", "['x', '<f4', 3]"]),
        (b'[[1,"<f4",[3]]]', ["field 0"]),
        (b'[["x","<f4",[3]],["x","<f4",[3]]]', ["field 1", "unique name"]),
        (b'[["","<f4",[3]]]', ["non-empty"]),
        (b'[["x","|O",[3]]]', ["'x'", "pointers"]),
        (b'[["x","no dtype",[3]]]', ["'x'", "numpy"]),
        (b'[["x",null,[3]]]', ["'x'", "numpy"]),
        (b'[["x",7,[3]]]', ["'x'", "numpy"]),
        (b'[["x",{"names":["a"]},[3]]]', ["'x'", "numpy"]),
        (b'[["x",[{"a":1}],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[{"0":1,"1":2}],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[["a"]],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[["a","<f4"],["a","<f4"]],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[["a","<f4",[-1]]],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[["a","<f4",[1e400]]],[3]]]', ["'x'", "numpy"]),
        (b'[["x",[["a","<f4",[99999999999999999999]]],[3]]]', ["'x'", "numpy"]),
        (b'[["x","|S99999999999",[3]]]', ["'x'", "numpy"]),
        (b'[["x","<f4",[-3]]]', ["'x'", "[-3]"]),
        (b'[["x","<f4",[1.5]]]', ["'x'", "[1.5]"]),
        (b'[["x","<f4",["3"]]]', ["'x'", "['3']"]),
        (b'[["x","<f4",[NaN]]]', ["'x'", "nan"]),
        (b'[["x","<f4",[9223372036854775807,9223372036854775807]]]', ["'x'", "9223372036854775807"]),
        (b'[["x","<f4",[' + b"9" * 5000 + b"]]]", ["JSON"]),
        (b"[" * 100_000, ["JSON"]),
        (b'[["x",' + b"[" * 800 + b"]" * 800 + b",[3]]]", ["'x'"]),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_a_hostile_description_is_an_error_that_says_where(description: bytes, words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.from_bytes(description)
    assert [word for word in words if word not in str(caught.value)] == []
    assert len(str(caught.value)) < 400  # an excerpt, not the attack itself


def parse(description: bytes) -> None:
    """Either a layout that can describe itself, or a LayoutError."""
    try:
        layout = Layout.from_bytes(description)
    except LayoutError:
        return
    assert Layout.from_bytes(layout.to_bytes()) == layout


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes_are_a_layout_or_a_layout_error(description: bytes) -> None:
    parse(description)


@settings(FUZZ, max_examples=200)
@given(st.lists(st.tuples(st.text(max_size=4), strategies.json_values, strategies.json_shapes), max_size=2))
def test_random_fields_in_json_are_a_layout_or_a_layout_error(entries: list[Any]) -> None:
    parse(json.dumps(entries).encode())


@FUZZ
@given(strategies.json_values)
def test_random_json_is_a_layout_or_a_layout_error(value: Any) -> None:
    parse(json.dumps(value).encode())


@settings(FUZZ, max_examples=200)
@given(st.data())
def test_a_description_with_changed_bytes_is_a_layout_or_a_layout_error(data: st.DataObject) -> None:
    description = bytearray(data.draw(strategies.layouts).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        description[data.draw(st.integers(0, len(description) - 1))] = data.draw(st.integers(0, 255))
    parse(bytes(description))


@FUZZ
@given(strategies.dtypes, st.lists(st.integers(0, 2**70), max_size=4))
def test_an_extent_of_any_size_is_placed_or_refused(dtype: np.dtype[Any], shape: list[int]) -> None:
    base, inner = dtype.subdtype or (dtype, ())
    extents = (*shape, *inner)
    fits = base.itemsize * math.prod(max(extent, 1) for extent in extents) <= 2**63 - 1
    try:
        assert Layout({"x": (dtype, shape)})["x"].shape == extents
    except LayoutError:
        # The last 63 bytes of the address range are lost to alignment.
        assert not fits or base.itemsize * math.prod(extents) > 2**63 - 64
    else:
        assert fits
