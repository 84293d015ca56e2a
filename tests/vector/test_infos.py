"""pack, merge and unpack: infos as entries, and as Gymnasium's dict of arrays with masks."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from memlane.vector.infos import merge, pack, pack_floats, unpack, unpack_floats
from tests.support.vector_envs import Speaker, difference, ours, reference


class Metres(float):
    """A number that is more than that."""


def gymnasium_infos(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """What Gymnasium makes of them."""
    envs: VectorEnv[Any, Any, Any] = VectorEnv()
    envs.num_envs = len(infos)
    merged: dict[str, Any] = {}
    for env, info in enumerate(infos):
        merged = envs._add_info(merged, info, env)
    return merged


def our_infos(infos: list[dict[str, Any]], bounds: list[int]) -> dict[str, Any]:
    """The same through workers that have the environments up to each of ``bounds``."""
    numbered = list(enumerate(infos))
    begins = [0, *bounds]
    packed = [pack(numbered[begin:end]) for begin, end in zip(begins, [*bounds, len(infos)], strict=True)]
    return merge(len(infos), pickle.loads(pickle.dumps(packed)))


# For each key one kind of value: of mixed kinds Gymnasium makes an error or cuts numbers.
_leaves: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "float32": st.integers(-99, 99).map(np.float32),
    "numpy bool": st.booleans().map(np.bool_),
    "array": st.integers(0, 255).map(lambda value: np.full((2, 2), value, np.uint8)),
    "array of no dimensions": st.integers(0, 9).map(np.array),
    "string": st.text(max_size=3),
    "list": st.lists(st.integers(0, 9), max_size=2),
    "None": st.none(),
}
_flat = st.fixed_dictionaries({}, optional=_leaves)
_infos = st.fixed_dictionaries({}, optional={**_leaves, "dict": _flat, "final_info": _flat, "final_obs": st.integers()})


@given(st.lists(_infos, min_size=1, max_size=5), st.data())
def test_infos_are_those_of_gymnasium_however_they_are_split_among_workers(infos: Any, data: st.DataObject) -> None:
    bounds = sorted(data.draw(st.lists(st.integers(0, len(infos)), max_size=3)))
    assert difference(gymnasium_infos(infos), our_infos(infos, bounds)) is None


def test_no_infos_are_an_empty_dict() -> None:
    assert our_infos([{}, {}], [1]) == {}


def test_an_environment_that_says_nothing_is_masked() -> None:
    infos = our_infos([{"x": 1}, {}, {"x": 3}], [2])
    assert infos["x"].tolist() == [1, 0, 3]
    assert infos["_x"].tolist() == [True, False, True]


@pytest.mark.parametrize("bounds", [[], [1]], ids=["one worker", "two workers"])
@pytest.mark.parametrize(
    ("one", "two", "dtype"),
    [(1, 1.75, "float64"), (True, 2, "int64"), (np.uint8(1), 300, "int64"), (np.float32(0.5), 0.1, "float64")],
    ids=str,
)
def test_an_entry_has_the_dtype_that_holds_all_its_values(one: Any, two: Any, dtype: str, bounds: list[int]) -> None:
    entry = our_infos([{"x": one}, {"x": two}], bounds)["x"]
    assert entry.dtype == dtype
    assert entry.tolist() == [one, two]


@pytest.mark.parametrize("bounds", [[], [1]], ids=["one worker", "two workers"])
def test_whole_numbers_are_exact_whatever_their_types(bounds: list[int]) -> None:
    large = 2**60 + 1
    assert our_infos([{"x": np.uint64(large)}, {"x": -1}], bounds)["x"].tolist() == [large, -1]


@pytest.mark.parametrize("bounds", [[], [1]], ids=["one worker", "two workers"])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, "text"),
        (1, None),
        (1, {"a": 2}),
        ({"a": 1, "b": {"c": 2}}, "text"),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), 1.5),
        (2**70, 1),
    ],
    ids=["text", "None", "dict", "nested", "shapes", "array", "large"],
)
def test_values_that_fit_into_no_array_are_kept_one_by_one(one: Any, two: Any, bounds: list[int]) -> None:
    infos = our_infos([{"x": one}, {"x": two}, {}], bounds)
    assert infos["x"].dtype == object
    np.testing.assert_equal(list(infos["x"]), [one, two, None])
    assert infos["_x"].tolist() == [True, True, False]


@given(st.lists(_infos, min_size=1, max_size=5))
def test_what_was_packed_is_unpacked_for_each_environment(infos: Any) -> None:
    unpacked = unpack(pickle.loads(pickle.dumps(pack(enumerate(infos)))))
    for env, info in enumerate(infos):
        np.testing.assert_equal(unpacked.get(env, {}), info)


@given(
    st.lists(st.sampled_from(["a", "b", "c d", "é"]), unique=True, min_size=1, max_size=4).flatmap(
        lambda keys: st.lists(st.tuples(*[st.floats(width=32) for _ in keys]).map(lambda row: (keys, row)), min_size=1)
    ),
    st.integers(0, 5),
    st.sampled_from([float, np.float64, np.float32]),
)
def test_floats_in_one_piece_are_the_entries_that_pack_makes(rows: Any, first: int, kind: Any) -> None:
    infos = [(env, dict(zip(keys, map(kind, row), strict=True))) for env, (keys, row) in enumerate(rows, first)]
    packed = pack_floats(infos)
    assert packed is not None
    ours, theirs = unpack_floats(*pickle.loads(pickle.dumps(packed))), pack(infos)
    assert not difference(merge(99, [ours]), merge(99, [theirs]))


@pytest.mark.parametrize(
    "infos",
    [
        [(0, {"a": 1.0}), (1, {"b": 1.0})],
        [(0, {"a": 1.0}), (1, {"a": 1.0, "b": 1.0})],
        [(0, {"a": 1.0}), (2, {"a": 1.0})],
        [(0, {"a": 1.0}), (1, {"a": 1})],
        [(0, {"a": True})],
        [(0, {"a": 1.0}), (1, {"a": np.float64(1)})],
        [(0, {"a": np.float32(1)}), (1, {"a": 1.0})],
        [(0, {"a": np.float16(1)})],
        [(0, {"a": np.ones(1)})],
        [(0, {"a": {"b": 1.0}})],
        [(0, {1: 1.0})],
        [(0, {"final_obs": 1.0})],
        [(0, {"a": Metres(1.0)})],
        [(0, {})],
        [],
    ],
    ids=str,
)
def test_whatever_is_not_floats_under_the_same_keys_is_left_to_pack(infos: Any) -> None:
    assert pack_floats(infos) is None


MIXED: dict[str, list[Any]] = {
    "floats, then None": [0.5, None, 1.5, None],
    "float32, then None": [np.float32(0.5), None, np.float32(1.5), None],
    "floats and integers, then None": [0.5, 2, None, True],
    "arrays, then None": [np.array([0.5, 1]), None, np.array([2.0, 3]), None],
    "None, then floats": [None, 0.5, 1.5, 2.5],
    "None, then integers": [None, 1, 2, 3],
    "None, then numbers of many types": [None, 1, 2.5, np.float32(0.1)],
    "None, then numpy's numbers": [None, None, np.float64(0.5), np.float64(1.5)],
    "None, then arrays": [None, np.array([1, 2]), np.array([3]), np.array([4, 5])],
    "None, then texts": [None, "a", "b", None],
    "texts, then numbers": ["a", 1, 2, 3.5],
    "numpy's booleans, then integers": [np.bool_(True), 1, 2, 3],
    "lists, then numbers": [[1], 1, 2, 3],
    "floats, then integers": [0.5, 1, 2, 3],
    "floats of numpy and Python": [np.float64(0.5), 0.25, 1.5, 2.5],
}


@pytest.mark.parametrize("bounds", [[], [1], [2], [3], [1, 2], [1, 2, 3], [0, 4]], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_values_of_mixed_types_are_those_of_gymnasium_however_they_are_split_among_workers(
    name: str, bounds: list[int]
) -> None:
    infos = [{"x": value, "deeper": {"x": value}} for value in MIXED[name]]
    assert difference(gymnasium_infos(infos), our_infos(infos, bounds)) is None
    infos[2] = {}  # missing
    assert difference(gymnasium_infos(infos), our_infos(infos, bounds)) is None


def mixed_speakers() -> list[Any]:
    """Four environments whose infos in step i are those of the i-th of ``MIXED``."""
    rows = list(zip(*MIXED.values(), strict=True))
    return [partial(Speaker, partial(_say, row)) for row in rows]


def _say(values: tuple[Any, ...], action: int, steps: int) -> dict[str, Any]:  # noqa: ARG001
    return {"x": values[steps - 1]}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("way", ["step", "send"])
def test_infos_of_mixed_types_are_those_of_gymnasium_whatever_the_number_of_workers(workers: int, way: str) -> None:
    with reference(mixed_speakers()) as expected, ours(mixed_speakers(), num_workers=workers) as envs:
        expected.reset()
        envs.reset()
        for name in MIXED:
            theirs = expected.step([0] * 4)[4]
            if way == "step":
                mine = envs.step([0] * 4)[4]
            else:
                envs.send([0] * 4)
                mine = envs.recv(4)[4]
            assert difference(theirs, mine) is None, f"{name}: {difference(theirs, mine)}"


@pytest.mark.parametrize("bounds", [[], [1], [2], [1, 2, 3]], ids=str)
def test_values_that_gymnasium_refuses_have_their_types_however_they_are_split_among_workers(bounds: list[int]) -> None:
    for values in ([1, 2, "text", 3.5], [1, None, 2.5, np.float32(3)], [True, None, 1, 0.5], [0.5, "text", 1, None]):
        found = our_infos([{"x": value} for value in values], bounds)["x"]
        assert [(type(value), value) for value in found] == [(type(value), value) for value in values]
