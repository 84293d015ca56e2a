"""Lease: it ends once, knows which of its arrays are in use, and in debug mode detects every use after its end."""

from __future__ import annotations

import collections
import copy
import gc
import io
import math
import operator
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import Layout, Lease, Segment, SegmentError, StaleView, StaleViewWarning
from memlane.core import lease as lease_module

FIELDS = {
    "obs": ("float32", (4, 3)),
    "square": ("float64", (3, 3)),
    "action": ("int64", 5),
    "done": (bool, 4),
    "step": ("int32", ()),
    "gain": ("float64", ()),
    "pair": ([("x", "f4"), ("y", "i8")], 3),
}
Pair = collections.namedtuple("Pair", "one two")


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(FIELDS) as segment:
        segment["obs"][:] = np.arange(12).reshape(4, 3)
        segment["action"][:] = np.arange(5)
        yield segment


@pytest.fixture
def stale(segment: Segment) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a debug lease that has ended."""
    lease = Lease(segment, debug=True)
    arrays = dict(lease)
    with pytest.warns(StaleViewWarning):
        lease.release()
    return arrays


def release_quietly(lease: Lease) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleViewWarning)
        lease.release()


# ------------------------------------------------------------------------------------------------------- while it holds


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_shows_the_shared_memory(segment: Segment, debug: bool) -> None:
    with Lease(segment, debug=debug) as lease:
        segment["obs"][1, 1] = 44
        assert lease["obs"][1, 1] == 44


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_written_through_a_lease_reaches_the_segment(segment: Segment, debug: bool) -> None:
    with Lease(segment, debug=debug) as lease:
        lease["obs"][0] = 7
        lease["action"][...] += 10
        np.copyto(lease["done"], True)
        np.add(lease["gain"], 2.5, out=lease["gain"])
    assert segment["obs"][0].tolist() == [7, 7, 7]
    assert segment["action"].tolist() == [10, 11, 12, 13, 14]
    assert (segment["done"].all(), segment["gain"]) == (True, 2.5)


VALUES: dict[str, Any] = {
    "the same dtype and shape": np.arange(4, dtype=np.float32),
    "another dtype": np.arange(4),
    "another order in memory": np.arange(8, dtype=np.float32)[::2],
    "one number": 7,
    "a list": [1, 2, 3, 4],
    "read-only": np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("debug", [False, True])
def test_assigning_to_a_field_copies_as_numpy_does(debug: bool, value: Any) -> None:
    with Segment.create({"before": ("float32", 3), "x": ("float32", 4), "after": ("float32", 3)}) as segment:
        with Lease(segment, debug=debug) as lease:
            lease["x"] = value
        expected = np.zeros(4, np.float32)
        expected[...] = value
        assert np.array_equal(segment["x"], expected)
        assert not segment["before"].any()
        assert not segment["after"].any()


@pytest.mark.parametrize("debug", [False, True])
def test_a_field_can_be_assigned_from_itself(debug: bool) -> None:
    with Segment.create({"x": ("int64", 4)}) as segment, Lease(segment, debug=debug) as lease:
        lease["x"] = np.arange(4)
        lease["x"] += 1
        lease["x"] = lease["x"][::-1]
        assert lease["x"].tolist() == [4, 3, 2, 1]


def test_an_assignment_goes_where_the_array_was_made_to_point() -> None:
    """An array whose flags or shape were changed in place is assigned by numpy, which knows what that means."""
    with Segment.create({"x": ("int64", 4)}) as segment, Lease(segment) as lease:
        array = lease["x"]
        array.shape = (2, 2)
        with pytest.raises(ValueError, match="broadcast"):
            lease["x"] = np.arange(4)
        lease["x"] = [[1, 2], [3, 4]]
        assert segment["x"].tolist() == [1, 2, 3, 4]
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            lease["x"] = np.zeros((2, 2), np.int64)


@pytest.mark.parametrize("debug", [False, True])
def test_what_cannot_be_assigned_is_an_error_and_changes_nothing(debug: bool) -> None:
    with Segment.create({"x": ("int64", 4)}) as segment:
        with Lease(segment, debug=debug, writeable=False) as lease, pytest.raises(ValueError, match="read-only"):
            lease["x"] = np.ones(4, np.int64)
        with Lease(segment, debug=debug) as lease:
            with pytest.raises(ValueError, match="broadcast"):
                lease["x"] = np.ones(5, np.int64)
            with pytest.raises(KeyError, match="'x'"):
                lease["y"] = np.ones(4, np.int64)
            with pytest.raises(TypeError, match="cannot be deleted"):
                del lease["x"]  # type: ignore[attr-defined]
        with pytest.raises(StaleView, match="has ended"):
            lease["x"] = np.ones(4, np.int64)
        assert not segment["x"].any()


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_that_only_reads_cannot_be_written(segment: Segment, debug: bool) -> None:
    with Lease(segment, writeable=False, debug=debug) as lease:
        view = lease["obs"]
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        del view


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_can_show_another_layout_further_in(segment: Segment, debug: bool) -> None:
    slot = Layout({"a": ("int64", 2), "b": ("int64", 3)})
    with Lease(segment, slot, segment.layout["action"].offset, debug=debug) as lease:
        assert lease["a"].tolist() == [0, 1]
        assert (len(lease), list(lease)) == (2, ["a", "b"])


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_beyond_the_segment_is_an_error(segment: Segment, debug: bool) -> None:
    with pytest.raises(SegmentError, match="are outside the"):
        Lease(segment, offset=64, debug=debug)


def test_an_unknown_field_is_a_key_error_that_lists_the_fields(segment: Segment) -> None:
    with Lease(segment) as lease, pytest.raises(KeyError, match="no field 'reward'; the fields are"):
        lease["reward"]


def test_its_label_says_what_is_leased(segment: Segment) -> None:
    with Lease(segment, label="slot 3 of ring 'r'") as lease:
        assert repr(lease) == "<Lease of slot 3 of ring 'r'>"
    assert repr(lease) == "<Lease of slot 3 of ring 'r', released>"


def test_arrays_of_a_plain_lease_are_plain_arrays(segment: Segment) -> None:
    with Lease(segment, debug=False) as lease:
        assert {type(array) for array in lease.values()} == {np.ndarray}


@pytest.mark.parametrize(("value", "debug"), [("1", True), ("yes", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_debug_mode(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, value: str | None, debug: bool
) -> None:
    if value is None:
        monkeypatch.delenv("MEMLANE_DEBUG", raising=False)
    else:
        monkeypatch.setenv("MEMLANE_DEBUG", value)
    with Lease(segment) as lease:
        assert (type(lease["obs"]) is not np.ndarray) == debug


def test_the_argument_has_the_last_word_on_debug_mode(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with Lease(segment, debug=False) as lease:
        assert type(lease["obs"]) is np.ndarray


# --------------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_ends_once(segment: Segment, debug: bool) -> None:
    ends: list[int] = []
    lease = Lease(segment, on_release=lambda: ends.append(1), debug=debug)
    assert not lease.released
    lease.release()
    lease.release()
    assert (ends, lease.released) == ([1], True)


def test_the_end_of_a_with_block_ends_a_lease_once(segment: Segment) -> None:
    ends: list[int] = []
    with Lease(segment, on_release=lambda: ends.append(1)) as lease:
        lease.release()
    assert ends == [1]


def test_a_lease_without_its_constructor_is_an_error() -> None:
    lease = Lease.__new__(Lease)
    for use in (lambda: lease["x"], lambda: len(lease), lease.release, lambda: lease.__exit__(None, None, None)):
        with pytest.raises(TypeError, match=r"created by __new__ alone; create it with Lease\(segment\)"):
            use()


def test_an_error_in_a_with_block_ends_the_lease(segment: Segment) -> None:
    ends: list[int] = []
    with pytest.raises(ZeroDivisionError), Lease(segment, on_release=lambda: ends.append(1)):
        _ = 1 / 0
    assert ends == [1]


def test_a_lease_can_end_after_its_segment_was_closed(segment: Segment) -> None:
    ends: list[int] = []
    lease = Lease(segment, on_release=lambda: ends.append(1), debug=True)
    segment.close()
    lease.release()
    assert ends == [1]


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_that_has_ended_gives_out_nothing(segment: Segment, debug: bool) -> None:
    lease = Lease(segment, debug=debug, label="slot 3")
    lease.release()
    with pytest.raises(StaleView, match=r"the lease of slot 3 has ended; access field 'obs' before release\(\)"):
        lease["obs"]


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_that_has_ended_still_knows_its_fields(segment: Segment, debug: bool) -> None:
    lease = Lease(segment, debug=debug)
    lease.release()
    assert list(lease) == list(FIELDS)


# -------------------------------------------------------------------------------------------------------------- holders


HOLD: dict[str, Callable[[np.ndarray[Any, Any]], object]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[1:3],
    "a slice of a slice": lambda array: array[1:3][:, ::2],
    "a reshaped array": lambda array: array.reshape(2, 6),
    "its transpose": lambda array: array.T,
    "asarray": np.asarray,
    "another dtype": lambda array: array.view("i4"),
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array)[1:],
    "dlpack": lambda array: np.from_dlpack(np.asarray(array)),
    "a closure": lambda array: lambda: array,
}


@pytest.mark.parametrize("way", HOLD)
@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_knows_that_an_array_is_in_use(segment: Segment, debug: bool, way: str) -> None:
    lease = Lease(segment, debug=debug)
    held = HOLD[way](lease["obs"])
    assert [holder.split()[0] for holder in lease.views_in_use()] == ["obs"]
    del held
    gc.collect()
    assert lease.views_in_use() == []
    lease.release()


FREE: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "a copy": lambda array: array.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "np.array": np.array,
    "a list": lambda array: array.tolist(),
    "astype": lambda array: array.astype("f8"),
    "a sum": lambda array: array.sum(),
    "a mean over an axis": lambda array: array.mean(axis=0),
    "a computation": lambda array: array * 2 + 1,
    "a comparison": lambda array: array > 3,
    "a stack": lambda array: np.stack([array, array]),
    "a stack of a named tuple": lambda array: np.stack(Pair(array, array)),
    "rows by index": lambda array: array[[0, 2]],
    "rows by mask": lambda array: array[np.array([True, False, True, False])],
    "a number": lambda array: array[1, 2],
    "a reshape that copies": lambda array: array.T.reshape(-1),
    "take": lambda array: array.take([0, 1], axis=0),
    "where": lambda array: np.where(array > 3, array, 0),
    "pickle": lambda array: pickle.loads(pickle.dumps(array)),
    "bytes": lambda array: array.tobytes(),
}


@pytest.mark.parametrize("way", FREE)
@pytest.mark.parametrize("debug", [False, True])
def test_what_was_copied_or_computed_stays_usable(segment: Segment, debug: bool, way: str) -> None:
    lease = Lease(segment, debug=debug)
    kept = FREE[way](lease["obs"])
    expected = FREE[way](segment["obs"])
    assert lease.views_in_use() == []
    lease.release()
    segment["obs"][:] = -5
    if isinstance(kept, np.ndarray):
        assert (kept + 0).tolist() == expected.tolist()
    else:
        assert kept == expected


def test_in_debug_mode_holders_name_the_file_and_line_that_took_them(segment: Segment) -> None:
    with Lease(segment, debug=True) as lease:
        held = lease["obs"]
        (holder,) = lease.views_in_use()
        del held
    assert re.fullmatch(rf"obs taken at {re.escape(__file__)}:\d+ in test_in_debug_mode_\w+", holder)


def test_an_array_taken_through_a_method_of_mappings_is_booked_on_the_line_of_the_caller(segment: Segment) -> None:
    with Lease(segment, debug=True) as lease:
        held = lease.get("obs")
        (holder,) = lease.views_in_use()
        del held
    assert f"obs taken at {__file__}:" in holder


def test_code_in_a_folder_that_only_begins_like_the_package_is_a_caller_too(segment: Segment) -> None:
    file = str(Path(lease_module.__file__).parents[1]) + "_plugin/user.py"
    with Lease(segment, debug=True) as lease:
        scope: dict[str, Any] = {"lease": lease}
        exec(compile("held = lease['obs']", file, "exec"), scope)
        (holder,) = lease.views_in_use()
        scope.clear()
    assert holder == f"obs taken at {file}:1 in <module>"


def test_an_array_that_outlives_a_debug_lease_is_a_warning_that_names_its_taker(segment: Segment) -> None:
    lease = Lease(segment, debug=True, label="slot 3")
    held = lease["obs"]
    with pytest.warns(StaleViewWarning) as caught:
        lease.release()
    (warning,) = caught
    assert str(warning.message).startswith(f"1 array(s) outlive the lease of slot 3: obs taken at {__file__}:")
    assert warning.filename == __file__
    del held


def test_the_warning_is_about_the_line_that_ended_the_lease_even_if_memlane_called_release(segment: Segment) -> None:
    with pytest.warns(StaleViewWarning) as caught, Lease(segment, debug=True) as lease:
        held = lease["obs"]
    (warning,) = caught
    assert warning.filename == __file__
    del held


def test_the_lane_gets_its_slot_back_before_the_warning(segment: Segment) -> None:
    ends: list[int] = []
    lease = Lease(segment, debug=True, on_release=lambda: ends.append(1))
    held = lease["obs"]
    with pytest.raises(StaleViewWarning):  # warnings are errors in these tests
        lease.release()
    assert ends == [1]
    del held


def test_there_is_no_warning_when_no_array_is_in_use(segment: Segment) -> None:
    lease = Lease(segment, debug=True)
    lease["obs"].sum()
    lease.release()


def test_a_plain_lease_does_not_warn(segment: Segment) -> None:
    lease = Lease(segment, debug=False)
    held = lease["obs"]
    lease.release()
    assert held.sum() == 66


# --------------------------------------------------------------------------------------------------------- stale arrays


USES: dict[str, Callable[[dict[str, Any]], object]] = {
    "indexing": lambda s: s["obs"][0],
    "indexing to a number": lambda s: s["obs"][0, 0],
    "indexing by name": lambda s: s["pair"]["x"],
    "assigning": lambda s: operator.setitem(s["obs"], 0, 1),
    "assigning lists": lambda s: operator.setitem(s["obs"], slice(0, 2), [[1, 2, 3], (4, 5, 6)]),
    "assigning a memoryview": lambda s: operator.setitem(s["obs"], ..., memoryview(np.ones((4, 3), "f4"))),
    "iteration": lambda s: list(s["obs"]),
    "reversed": lambda s: list(reversed(s["obs"])),
    "unpacking": lambda s: [*s["action"]],
    "membership": lambda s: 3 in s["action"],
    "repr": lambda s: repr(s["obs"]),
    "str": lambda s: str(s["obs"]),
    "format": lambda s: f"{s['obs']}",
    "format of a scalar": lambda s: f"{s['gain']:.2f}",
    "print": lambda s: print(s["obs"], file=io.StringIO()),
    "tolist": lambda s: s["obs"].tolist(),
    "tobytes": lambda s: s["obs"].tobytes(),
    "bytes": lambda s: bytes(s["obs"]),
    "item": lambda s: s["gain"].item(),
    "float": lambda s: float(s["gain"]),
    "int": lambda s: int(s["step"]),
    "complex": lambda s: complex(s["gain"]),
    "bool": lambda s: bool(s["gain"]),
    "as an index": lambda s: [1, 2, 3][s["step"]],
    "math": lambda s: math.sqrt(s["gain"]),
    "+": lambda s: s["obs"] + 1,
    "1 -": lambda s: 1 - s["obs"],
    "plain +": lambda s: np.zeros((4, 3)) + s["obs"],
    "-": lambda s: -s["obs"],
    "abs": lambda s: abs(s["obs"]),
    "@": lambda s: s["square"] @ np.eye(3),
    "divmod": lambda s: divmod(s["obs"], 2),
    "+=": lambda s: operator.iadd(s["obs"], 1),
    "plain +=": lambda s: operator.iadd(np.zeros((4, 3)), s["obs"]),
    "==": lambda s: s["obs"] == 1,
    "<": lambda s: s["obs"] < 1,
    "== of structures": lambda s: s["pair"] == np.zeros(3, s["pair"].dtype),
    "np.add(out=)": lambda s: np.add(np.zeros((4, 3)), 1, out=s["obs"]),
    "np.add(where=)": lambda s: np.add(np.zeros(4), 1, where=s["done"], out=np.zeros(4)),
    "np.add.at": lambda s: np.add.at(s["action"], [0], 1),
    "np.add.reduce": lambda s: np.add.reduce(s["obs"]),
    "np.divmod(out=)": lambda s: np.divmod(np.ones(5, int), 2, out=(s["action"], np.zeros(5, int))),
    "np.copyto from": lambda s: np.copyto(np.zeros((4, 3)), s["obs"]),
    "np.copyto to": lambda s: np.copyto(s["obs"], 1),
    "np.stack": lambda s: np.stack([s["obs"], s["obs"]]),
    "np.stack of a named tuple": lambda s: np.stack(Pair(s["obs"], s["obs"])),
    "np.concatenate of a deque": lambda s: np.concatenate(collections.deque([s["obs"], s["obs"]])),
    "np.block": lambda s: np.block([[s["square"], s["square"]], [s["square"], s["square"]]]),
    "np.mean": lambda s: np.mean(s["obs"]),
    "np.where": lambda s: np.where(s["done"], 1, 0),
    "np.array_equal": lambda s: np.array_equal(s["obs"], s["obs"]),
    "np.allclose": lambda s: np.allclose(np.zeros((4, 3)), s["obs"]),
    "np.einsum": lambda s: np.einsum("ij->i", s["obs"]),
    "np.linalg.norm": lambda s: np.linalg.norm(s["obs"]),
    "np.save": lambda s: np.save(io.BytesIO(), s["obs"]),
    "np.from_dlpack": lambda s: np.from_dlpack(s["obs"]),
    "mean": lambda s: s["obs"].mean(),
    "sum": lambda s: s["obs"].sum(),
    "max": lambda s: s["obs"].max(axis=0),
    "std": lambda s: s["obs"].std(),
    "any": lambda s: s["done"].any(),
    "round": lambda s: s["obs"].round(),
    "trace": lambda s: s["square"].trace(),
    "conj": lambda s: s["obs"].conj() + 0,
    "copy": lambda s: s["obs"].copy(),
    "copy.copy": lambda s: copy.copy(s["obs"]),
    "copy.deepcopy": lambda s: copy.deepcopy(s),
    "pickle": lambda s: pickle.dumps(s["obs"]),
    "astype": lambda s: s["obs"].astype("f8"),
    "a slice of a transpose": lambda s: s["obs"].T[0],
    "a flat view": lambda s: s["obs"].ravel() + 1,
    "a view of another dtype": lambda s: s["obs"].view("i4") + 1,
    "assigning to a living lease": lambda s: operator.setitem(s["living"]["obs"], slice(None), s["obs"]),
    "indexing a living lease": lambda s: s["living"]["obs"][s["done"]],
}
STRAIGHT: dict[str, Callable[[dict[str, Any]], object]] = {
    "__array__": lambda s: s["obs"].__array__(),
    "__bool__": lambda s: bool(s["gain"]),
    "__complex__": lambda s: complex(s["gain"]),
    "__contains__": lambda s: 3 in s["action"],
    "__copy__": lambda s: copy.copy(s["obs"]),
    "__deepcopy__": lambda s: copy.deepcopy(s["obs"]),
    "__dlpack__": lambda s: s["obs"].__dlpack__(),
    "__float__": lambda s: float(s["gain"]),
    "__format__": lambda s: format(s["step"], "d"),
    "__index__": lambda s: operator.index(s["step"]),
    "__int__": lambda s: int(s["step"]),
    "__reduce_ex__": lambda s: s["obs"].__reduce_ex__(5),
    "argmax": lambda s: s["obs"].argmax(),
    "argmin": lambda s: s["obs"].argmin(),
    "argpartition": lambda s: s["action"].argpartition(2),
    "argsort": lambda s: s["action"].argsort(),
    "astype": lambda s: s["obs"].astype(int),
    "byteswap": lambda s: s["obs"].byteswap(),
    "choose": lambda s: s["action"].choose([1, 2, 3, 4, 5]),
    "clip": lambda s: s["obs"].clip(0, 1),
    "compress": lambda s: s["action"].compress([True]),
    "copy": lambda s: s["obs"].copy(),
    "cumprod": lambda s: s["obs"].cumprod(),
    "cumsum": lambda s: s["obs"].cumsum(),
    "dot": lambda s: s["square"].dot(np.eye(3)),
    "dump": lambda s: s["obs"].dump("/dev/null"),
    "dumps": lambda s: s["obs"].dumps(),
    "fill": lambda s: s["obs"].fill(0),
    "flatten": lambda s: s["obs"].flatten(),
    "item": lambda s: s["obs"].item(0),
    "nonzero": lambda s: s["obs"].nonzero(),
    "partition": lambda s: s["action"].partition(2),
    "put": lambda s: s["action"].put(0, 1),
    "repeat": lambda s: s["action"].repeat(2),
    "searchsorted": lambda s: s["action"].searchsorted(2),
    "setfield": lambda s: s["action"].setfield(1, "i8"),
    "sort": lambda s: s["action"].sort(),
    "take": lambda s: s["action"].take([0]),
    "tobytes": lambda s: s["obs"].tobytes(),
    "tofile": lambda s: s["obs"].tofile("/dev/null"),
    "tolist": lambda s: s["obs"].tolist(),
}


def test_there_is_a_use_for_each_method_on_the_list() -> None:
    assert set(STRAIGHT) == set(lease_module._UNCHECKED_METHODS.split())


@pytest.mark.parametrize("use", [*USES, *(f"method {name}" for name in STRAIGHT)])
def test_the_use_of_a_stale_array_is_an_error_that_names_its_taker(
    segment: Segment, stale: dict[str, Any], use: str
) -> None:
    call = STRAIGHT[use.removeprefix("method ")] if use.startswith("method ") else USES[use]
    with Lease(segment, debug=True) as living:
        before = segment["obs"].copy(), segment["action"].copy()
        pattern = rf"field '\w+' of .*, taken at {re.escape(__file__)}:\d+ in stale, was used after the lease ended"
        with pytest.raises(StaleView, match=pattern):
            call({**stale, "living": living})
        assert np.array_equal(segment["obs"], before[0])
        assert np.array_equal(segment["action"], before[1])
        gc.collect()  # the traceback held arrays of the living lease


@pytest.mark.parametrize("use", [*USES, *(f"method {name}" for name in STRAIGHT)])
def test_the_same_use_works_while_the_lease_holds(segment: Segment, use: str) -> None:
    call = STRAIGHT[use.removeprefix("method ")] if use.startswith("method ") else USES[use]
    segment["action"][:] = [0, 1, 2, 3, 4]
    segment["square"][:] = np.eye(3)
    lease = Lease(segment, debug=True)
    plain = {name: array.copy() for name, array in segment.views().items()}
    arrays = dict(lease)
    try:
        result = call({**arrays, "living": arrays})
        expected = call({**plain, "living": plain})
        if isinstance(expected, np.ndarray):
            assert np.array_equal(np.asarray(result), expected, equal_nan=expected.dtype.kind == "f")
    finally:
        release_quietly(lease)


def test_the_shape_of_a_stale_array_may_still_be_asked(stale: dict[str, Any]) -> None:
    assert (stale["obs"].shape, stale["obs"].dtype, len(stale["obs"])) == ((4, 3), np.dtype("f4"), 4)


# --------------------------------------------------------------------------------------------------------------- poison


@pytest.fixture
def around(segment: Segment) -> dict[str, np.ndarray[Any, Any]]:
    """Plain arrays that were taken around the watch of a debug lease, which has ended since."""
    lease = Lease(segment, debug=True)
    arrays = {name: np.asarray(array) for name, array in lease.items()}
    release_quietly(lease)
    return arrays


def test_a_stale_array_of_floats_reads_nan_for_code_that_bypasses_the_check(around: dict[str, Any]) -> None:
    assert np.isnan(around["obs"]).all()
    assert math.isnan(memoryview(around["square"])[0, 0])


def test_a_stale_array_of_integers_reads_minus_one_for_code_that_bypasses_the_check(around: dict[str, Any]) -> None:
    assert around["action"].tolist() == [-1] * 5


def test_what_is_written_around_the_watch_does_not_reach_the_segment(segment: Segment, around: dict[str, Any]) -> None:
    around["obs"][:] = 99
    around["action"][:] = 99
    assert segment["obs"].ravel().tolist() == list(range(12))
    assert segment["action"].tolist() == list(range(5))


def test_what_is_written_to_the_segment_later_does_not_show_around_the_watch(
    segment: Segment, around: dict[str, Any]
) -> None:
    segment["obs"][:] = 5
    assert np.isnan(around["obs"]).all()


def test_numpy_calls_that_cannot_be_checked_get_poison_and_never_new_data(
    segment: Segment, stale: dict[str, Any]
) -> None:
    mine = np.zeros((4, 3))
    mine[:] = stale["obs"]
    assert np.isnan(mine).all()
    assert np.isnan(np.array(stale["obs"])).all()
    assert np.isnan(list(stale["obs"].flat)).all()
    assert segment["obs"].sum() == 66


def test_the_poison_of_one_lease_spares_the_arrays_of_another(segment: Segment) -> None:
    with Lease(segment, debug=True) as living:
        array = living["obs"]
        Lease(segment, debug=True).release()
        assert array.sum() == 66
        del array


def test_the_poison_reaches_no_neighbour_on_the_same_page(segment: Segment) -> None:
    slot = Layout({"x": ("int64", 5)})
    lease = Lease(segment, slot, segment.layout["action"].offset, debug=True)
    held = np.asarray(lease["x"])
    release_quietly(lease)
    assert held.tolist() == [-1] * 5
    assert (segment["action"].tolist(), segment["obs"].sum(), segment["square"].sum()) == (list(range(5)), 66, 0)
