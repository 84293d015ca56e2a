"""create, read and write as Gymnasium has them: the same results, in every process, also for custom spaces."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import re
from typing import Any

import gymnasium.vector.utils as theirs
import numpy as np
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Space, Text, Tuple
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

import memlane.spaces as ours
from memlane.spaces import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from tests.support.processes import METHODS, ask
from tests.support.spaces import ALL, FIXED, ROOMY, Angle, Unknown, fixed_spaces, same, write_all

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
N = 3


def samples(space: Space[Any], seed: int) -> list[Any]:
    space.seed(seed)
    return [space.sample() for _ in range(N)]


def through(module: Any, space: Space[Any], values: list[Any]) -> Any:
    """The values, written and read with the functions of ``module``."""
    memory = module.create_shared_memory(space, N)
    for index, value in enumerate(values):
        module.write_to_shared_memory(space, index, value, memory)
    return module.read_from_shared_memory(space, memory, N)


@pytest.mark.parametrize("space", FIXED.values(), ids=FIXED)
def test_reads_equal_gymnasiums(space: Space[Any]) -> None:
    values = samples(space, 1)
    assert same(through(ours, space, values), through(theirs, space, values))


@pytest.mark.parametrize("space", ALL.values(), ids=ALL)
def test_a_batch_of_gymnasium_is_read_back_as_it_is(space: Space[Any]) -> None:
    space.seed(2)
    batch = batch_space(space, N).sample()
    memory = create_shared_memory(space, N, capacity=ROOMY)
    write_all(space, list(iterate(batch_space(space, N), batch)), memory)
    assert same(read_from_shared_memory(space, memory, N), batch)


@pytest.mark.parametrize("space", FIXED.values(), ids=FIXED)
def test_memory_has_the_form_of_gymnasiums(space: Space[Any]) -> None:
    def form(memory: Any) -> Any:
        if isinstance(memory, dict):
            return {key: form(part) for key, part in memory.items()}
        return tuple(map(form, memory)) if isinstance(memory, tuple) else "leaf"

    assert form(create_shared_memory(space, N)) == form(theirs.create_shared_memory(space, N))


@given(space=fixed_spaces, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_any_nesting_of_spaces_equals_what_a_column_would_hold(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    batch = batch_space(space, N).sample()
    memory = create_shared_memory(space, N)
    column = ours.column_of(space, _arrays(space))
    column.write_batch(batch)
    write_all(space, [column.read_row(index) for index in range(N)], memory)
    assert same(_with_arrays(read_from_shared_memory(space, memory, N)), _with_arrays(batch))


def _arrays(space: Space[Any]) -> dict[str, Any]:
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in ours.fields_of(space, N).items()}  # type: ignore[arg-type]


def _with_arrays(value: Any) -> Any:
    """Scalars as arrays of no dimensions: Gymnasium takes an alternative of a OneOf as a row, and that is a scalar."""
    if isinstance(value, dict):
        return {key: _with_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_with_arrays, value))
    return value if isinstance(value, str) else np.asarray(value)


# ------------------------------------------------------------------------------------------------------------ processes


@pytest.mark.parametrize("method", METHODS)
def test_the_parent_reads_what_a_child_wrote(method: str) -> None:
    space = Dict({name: ALL[name] for name in ["Text of all unicode", "OneOf", "Tuple", "Graph of Box", "Box f2"]})
    space.spaces["value"] = Text(3)
    values = samples(space, 4)
    memory = create_shared_memory(space, N, mp.get_context(method), capacity=ROOMY)
    ask(write_all, space, values, memory, method=method)
    batch = read_from_shared_memory(space, memory, N)
    assert same(batch["value"], tuple(value["value"] for value in values))
    assert same(batch["Graph of Box"], tuple(value["Graph of Box"] for value in values))
    assert same(batch["OneOf"], tuple(value["OneOf"] for value in values))
    assert same(batch["Box f2"], np.stack([value["Box f2"] for value in values]))


@pytest.mark.parametrize("method", METHODS)
def test_a_custom_space_is_written_by_a_child(method: str) -> None:
    space = Dict({"heading": Angle()})
    memory = create_shared_memory(space, N)
    ask(write_all, space, [{"heading": 0.5}, {"heading": -1.0}, {"heading": 2.0}], memory, method=method)
    assert read_from_shared_memory(space, memory, N)["heading"] == pytest.approx([0.5, -1.0, 2.0])


@pytest.mark.parametrize("space", [Box(0, 1, (2,)), Discrete(3), MultiDiscrete([2, 3]), MultiBinary(4)], ids=repr)
def test_what_was_read_changes_with_a_later_write(space: Space[Any]) -> None:
    memory = create_shared_memory(space, N)
    before = read_from_shared_memory(space, memory, N)
    write_to_shared_memory(space, 1, np.ones(space.shape or (), space.dtype), memory)
    assert np.shares_memory(before, read_from_shared_memory(space, memory, N))
    assert before[1].all()


def test_what_was_read_outlives_the_memory_object() -> None:
    space = Box(0, 1, (2,))
    memory = create_shared_memory(space, N)
    write_to_shared_memory(space, 2, [3, 4], memory)
    batch = read_from_shared_memory(space, memory, N)
    del memory
    assert batch[2].tolist() == [3, 4]


# ------------------------------------------------------------------------------------------------------- second values


@pytest.mark.parametrize("second", ["", "b", "bbb", "\x00"])
def test_a_text_shows_nothing_of_a_longer_one_before(second: str) -> None:
    space = Text(4, min_length=0, charset="ab\x00")
    memory = create_shared_memory(space, 2)
    write_to_shared_memory(space, 0, "aaaa", memory)
    write_to_shared_memory(space, 0, second, memory)
    assert read_from_shared_memory(space, memory, 2) == (second, "")


def test_another_alternative_replaces_the_first() -> None:
    space = OneOf((Discrete(3), Text(4)))
    memory = create_shared_memory(space, 1)
    write_to_shared_memory(space, 0, (1, "abcd"), memory)
    write_to_shared_memory(space, 0, (0, 2), memory)
    assert read_from_shared_memory(space, memory, 1) == ((0, 2),)


def test_a_refused_alternative_leaves_the_first() -> None:
    space = OneOf((Discrete(3), Text(4)))
    memory = create_shared_memory(space, 1)
    write_to_shared_memory(space, 0, (1, "abcd"), memory)
    with pytest.raises(ValueError, match="at '0': expected 0 to 2, found 7"):
        write_to_shared_memory(space, 0, (0, 7), memory)
    assert read_from_shared_memory(space, memory, 1) == ((1, "abcd"),)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"cam": {"rgb": [1, 300]}, "move": (0, 1)}, ValueError, "at 'cam.rgb': .* found 300"),
        ({"cam": {"rgb": [1, 2]}, "move": (0, 5)}, ValueError, "at 'move.1': expected 0 to 2, found 5"),
        ({"cam": {"bgr": [1, 2]}, "move": (0, 1)}, KeyError, "at 'cam': .*missing=.'rgb'., unknown=.'bgr'."),
        ({"cam": {"rgb": [1, 2]}, "move": (0,)}, ValueError, "at 'move': expected a tuple of 2 values, found 1"),
        ({"cam": {"rgb": [1, 2]}}, KeyError, "at 'value': .*missing=.'move'."),
    ],
)
def test_an_error_names_the_path_in_the_space_that_was_shared(value: Any, error: type[Exception], message: str) -> None:
    space = Dict({"cam": Dict({"rgb": Box(0, 255, (2,), np.uint8)}), "move": Tuple((Discrete(3), Discrete(3)))})
    with pytest.raises(error, match=message):
        write_to_shared_memory(space, 0, value, create_shared_memory(space, 1))


@pytest.mark.parametrize("name", ["Box f4", "Discrete", "Text", "Dict", "OneOf", "Tuple"])
@pytest.mark.parametrize("index", [-1, N])
def test_an_index_that_does_not_exist_is_refused(name: str, index: int) -> None:
    with pytest.raises(IndexError, match=f"there are {N} rows, no row {index}"):
        write_to_shared_memory(ALL[name], index, ALL[name].sample(), create_shared_memory(ALL[name], N))


KINDS = ["Box f4", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "OneOf", "Tuple"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("index", [True, np.bool_(True), np.int8(1), np.array(1)], ids=["bool", "bool_", "int8", "0-d"])
def test_an_index_of_any_kind_is_the_number_of_one_row(name: str, index: Any) -> None:
    """numpy took a bool for a mask: True wrote every row, False none."""
    space = ALL[name]
    first, second, third = samples(space, 5)
    memory, expected = create_shared_memory(space, N), create_shared_memory(space, N)
    write_all(space, [first, first, third], memory)
    write_all(space, [first, second, third], expected)
    write_to_shared_memory(space, index, second, memory)
    assert same(read_from_shared_memory(space, memory, N), read_from_shared_memory(space, expected, N))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("index", [np.array([1]), [1], 1.0, None, "1"], ids=repr)
def test_what_is_not_the_number_of_a_row_is_refused(name: str, index: Any) -> None:
    space = ALL[name]
    memory = create_shared_memory(space, N)
    write_all(space, samples(space, 6), memory)
    before = pickle.dumps(read_from_shared_memory(space, memory, N))
    with pytest.raises(TypeError, match="index must be the number of a row, found "):
        write_to_shared_memory(space, index, space.sample(), memory)
    assert pickle.dumps(read_from_shared_memory(space, memory, N)) == before


OTHERS: list[tuple[Space[Any], Space[Any], str]] = [
    (Box(0, 1, (6,)), Box(0, 1, (2, 3)), "value"),
    (Box(0, 1, (2,)), Box(0, 1, (2,), np.float64), "value"),
    (Discrete(5), Discrete(3), "value"),
    (Text(3), Text(4), "value"),
    (Dict({"cam": Tuple((Discrete(2), Text(3)))}), Dict({"cam": Tuple((Discrete(2), Discrete(2)))}), "cam.1"),
    (OneOf((Text(3), Discrete(2))), OneOf((Text(4), Discrete(2))), "0"),
]


@pytest.mark.parametrize(("made", "given", "path"), OTHERS)
def test_the_space_of_other_memory_is_refused_and_both_are_named(
    made: Space[Any], given: Space[Any], path: str
) -> None:
    def leaf(space: Any) -> Any:
        for step in path.split(".") if path != "value" else []:
            space = space[step] if isinstance(space, Dict) else space.spaces[int(step)]
        return space

    memory = create_shared_memory(made, N)
    value = given.sample() if not isinstance(given, OneOf) else (0, "a")
    message = re.escape(f"at {path!r}: the memory is for values of {leaf(made)}, found {leaf(given)}; pass the space")
    with pytest.raises(ValueError, match=message):
        write_to_shared_memory(given, 0, value, memory)
    with pytest.raises(ValueError, match=message):
        read_from_shared_memory(given, memory, N)


@pytest.mark.parametrize("name", ALL)
def test_an_equal_space_is_as_good_as_the_one_that_the_memory_was_made_for(name: str) -> None:
    memory = create_shared_memory(ALL[name], N, capacity=ROOMY)
    again = pickle.loads(pickle.dumps(ALL[name]))
    value = again.sample()
    for space in (again, ALL[name], again):
        write_to_shared_memory(space, 1, value, memory)
        read_from_shared_memory(space, memory, N)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("nothing", [False, True], ids=["Gymnasium's", "None"])
def test_memory_that_somebody_else_made_is_refused(name: str, nothing: bool) -> None:
    space = ALL[name]
    memory = None if nothing else theirs.create_shared_memory(space, N)
    with pytest.raises(TypeError, match="expected memory that memlane's create_shared_memory made for "):
        write_to_shared_memory(space, 0, space.sample(), memory)
    with pytest.raises(TypeError, match="expected memory that memlane's create_shared_memory made for "):
        read_from_shared_memory(space, memory, N)


@pytest.mark.parametrize("name", ["Box f4", "Text", "OneOf"])
def test_reading_another_number_of_values_than_there_are_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the memory is for 3 values of .*, found n=1"):
        read_from_shared_memory(ALL[name], create_shared_memory(ALL[name], N))


# -------------------------------------------------------------------------------------------------------- custom spaces


@pytest.mark.parametrize(
    ("space", "value", "read"),
    [
        (Angle(), 0.5, lambda batch: batch[1]),
        (Dict({"a": Angle(), "b": Discrete(2)}), {"a": 0.5, "b": 1}, lambda batch: batch["a"][1]),
        (Tuple((Discrete(2), Tuple((Angle(),)))), (0, (0.5,)), lambda batch: batch[1][0][1]),
        (OneOf((Discrete(2), Angle())), (1, 0.5), lambda batch: batch[1][1]),
    ],
    ids=["alone", "Dict", "Tuple", "OneOf"],
)
def test_a_registered_custom_space_works_also_inside_others(space: Space[Any], value: Any, read: Any) -> None:
    memory = create_shared_memory(space, N)
    write_to_shared_memory(space, 1, value, memory)
    assert read(read_from_shared_memory(space, memory, N)) == pytest.approx(0.5)


def test_a_custom_space_next_to_a_sequence_needs_to_know_nothing_of_capacities() -> None:
    space = Dict({"heading": Angle(), "path": ALL["Sequence of Box"]})
    assert set(create_shared_memory(space, 2, capacity=ROOMY)) == {"heading", "path"}


FUNCTIONS = {
    "create_shared_memory": lambda module, space: module.create_shared_memory(space, 2),
    "read_from_shared_memory": lambda module, space: module.read_from_shared_memory(space, None, 2),
    "write_to_shared_memory": lambda module, space: module.write_to_shared_memory(space, 0, 1, None),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    ("space", "error"), [(Unknown(), CustomSpaceError), ("Box", TypeError)], ids=["custom", "none"]
)
def test_what_cannot_be_shared_is_gymnasiums_error(function: Any, space: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as mine:
        function(ours, space)
    with pytest.raises(error) as reference:
        function(theirs, space)
    assert str(mine.value) == str(reference.value)
