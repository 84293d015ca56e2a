"""Shared by the tests of spaces: spaces of every kind, custom and random ones, and a comparison of values.

A spawned child imports this module, and with it the registrations of the custom spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from hypothesis import strategies as st

from memlane.core import Layout, Segment
from memlane.spaces import (
    Capacity,
    Column,
    column_of,
    create_shared_memory,
    fields_of,
    read_from_shared_memory,
    write_to_shared_memory,
)

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "f2", "f4", "f8"]
CHARSET = "aé漢😀\x00 .~"
"""Characters of one to four bytes in UTF-8, and those that are easily lost."""

FIXED: dict[str, Space[Any]] = {
    **{f"Box {dtype}": Box(0, 1, (2, 3), np.dtype(dtype).type) for dtype in DTYPES},
    "Box of unlimited floats": Box(-np.inf, np.inf, (4,), np.float64),
    "Box of no dimensions": Box(-1, 1, ()),
    "Box of no elements": Box(-1, 1, (0, 3)),
    "Discrete": Discrete(5),
    "Discrete from -3": Discrete(5, start=-3),
    "Discrete int8": Discrete(100, dtype=np.int8),
    "MultiDiscrete": MultiDiscrete([2, 3, 4], start=[-1, 0, 5]),
    "MultiDiscrete of two dimensions": MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16),
    "MultiBinary": MultiBinary((2, 3)),
    "Text": Text(6, min_length=0),
    "Text of all unicode": Text(6, min_length=0, charset=CHARSET),
    "Dict": Dict({"pos": Box(-1, 1, (2,)), "note": Text(4), "cam": Dict({"rgb": Box(0, 255, (2, 2, 3), np.uint8)})}),
    "Tuple": Tuple((Discrete(3), Tuple((Box(-1, 1, (2,)), MultiBinary(4))), Text(3))),
    "OneOf": OneOf((Discrete(3), Box(-1, 1, (2,)), Text(5, min_length=0))),
    "Dict of OneOf": Dict({"either": OneOf((Box(0, 1, (3,)), MultiBinary(2))), "or": Discrete(2)}),
}
"""Spaces that Gymnasium's functions can share as well."""

BEYOND: dict[str, Space[Any]] = {
    "OneOf of Dict and Tuple": OneOf(
        (Dict({"a": Box(0, 1, (2,)), "b": Text(3)}), Tuple((Discrete(2), OneOf((Text(2),)))))
    ),
    "Sequence of Box": Sequence(Box(-1, 1, (2,))),
    "Sequence of Box of no dimensions": Sequence(Box(-1, 1, ())),
    "Sequence of Discrete": Sequence(Discrete(4)),
    "Sequence of Text": Sequence(Text(3)),
    "Sequence of Dict": Sequence(Dict({"a": Box(0, 1, (2,)), "b": Text(3)})),
    "Sequence of OneOf": Sequence(OneOf((Discrete(2), Text(3)))),
    "Sequence of Sequence": Sequence(Sequence(Box(-1, 1, (2,)))),
    "stacked Sequence of Box": Sequence(Box(-1, 1, (2,)), stack=True),
    "stacked Sequence of Discrete": Sequence(Discrete(4), stack=True),
    "stacked Sequence of Text": Sequence(Text(3), stack=True),
    "stacked Sequence of Dict": Sequence(Dict({"a": Box(0, 1, (2,)), "b": Tuple((Discrete(3),))}), stack=True),
    "Graph of Box": Graph(Box(-1, 1, (3,)), Box(-1, 1, (2,))),
    "Graph of Discrete": Graph(Discrete(4), Discrete(3)),
    "Graph without edges": Graph(Box(-1, 1, (3,)), None),
    "Dict of Graph and Sequence": Dict({"map": Graph(Discrete(3), Box(0, 1, ())), "path": Sequence(MultiBinary(3))}),
}
"""Spaces that Gymnasium's functions refuse or mix up."""

ALL = FIXED | BEYOND
ROOMY = Capacity(items=64, nodes=16, edges=128)
"""For any sample: Gymnasium draws the length of a sequence from a geometric distribution of mean 4."""


# -------------------------------------------------------------------------------------------------------- custom spaces


class Angle(Space[float]):
    """A custom space: an angle, which a user keeps as sine and cosine."""

    def __init__(self) -> None:
        super().__init__((), np.dtype(np.float64))

    def sample(self, mask: Any = None, probability: Any = None) -> float:  # noqa: ARG002
        return float(self.np_random.uniform(-3, 3))

    def contains(self, x: Any) -> bool:
        return isinstance(x, float)


class Unknown(Space[Any]):
    """A custom space that is not registered."""


PAIR = Box(-1, 1, (2,), np.float64)


@create_shared_memory.register(Angle)
def _create_angles(space: Angle, n: int = 1, ctx: Any = None) -> Any:  # noqa: ARG001
    return create_shared_memory(PAIR, n, ctx)


@read_from_shared_memory.register(Angle)
def _read_angles(space: Angle, shared_memory: Any, n: int = 1) -> Any:  # noqa: ARG001
    sine, cosine = read_from_shared_memory(PAIR, shared_memory, n).T
    return np.arctan2(sine, cosine)


@write_to_shared_memory.register(Angle)
def _write_angle(space: Angle, index: int, value: float, shared_memory: Any) -> None:  # noqa: ARG001
    write_to_shared_memory(PAIR, index, [np.sin(value), np.cos(value)], shared_memory)


@fields_of.register(Angle)
def _angle_fields(space: Angle, n: int, capacity: Any = None, prefix: str = "") -> Any:  # noqa: ARG001
    return fields_of(Box(-4, 4, (), np.float64), n, None, prefix)


@column_of.register(Angle)
def _angle_column(space: Angle, arrays: Any, prefix: str = "") -> Column:  # noqa: ARG001
    return column_of(Box(-4, 4, (), np.float64), arrays, prefix)


# -------------------------------------------------------------------------------------------------------------- columns


def plain_column(space: Space[Any], n: int, capacity: Any = None) -> Column:
    """A column over ordinary memory, zeroed."""
    layout = Layout(fields_of(space, n, capacity))
    arrays = layout.views(bytearray(layout.nbytes))
    return column_of(space, arrays)


def column_in(segment: Segment, space: Space[Any]) -> Column:
    return column_of(space, segment.views())


def same(one: Any, two: Any) -> bool:
    """Equal in form, in dtype and in every value."""
    if isinstance(one, Mapping):
        return isinstance(two, Mapping) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    if one is None or isinstance(one, str):
        return type(one) is type(two) and bool(one == two)
    left, right = np.asarray(one), np.asarray(two)
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


# ------------------------------------------------------------------------------------------------ what children do


def write_all(space: Space[Any], values: list[Any], memory: Any) -> None:
    for index, value in enumerate(values):
        write_to_shared_memory(space, index, value, memory)


def write_column(segment: Segment, space: Space[Any], values: list[Any]) -> None:
    column = column_in(segment, space)
    for index, value in enumerate(values):
        column.write(index, value)


# ------------------------------------------------------------------------------------------------------- random spaces

_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_boxes = st.builds(lambda shape, dtype: Box(0, 1, shape, np.dtype(dtype).type), _shapes, st.sampled_from(DTYPES))
_discretes = st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 50), st.integers(-50, 50))
_multi_discretes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(MultiDiscrete)
_multi_binaries = st.integers(1, 5).map(MultiBinary)
_texts = st.builds(
    lambda length, charset: Text(length, min_length=0, charset=charset),
    st.integers(0, 5),
    st.text(min_size=1, max_size=9),
)
_keys = st.text(alphabet="ab.~0é", max_size=3)


def _nested(inner: st.SearchStrategy[Space[Any]]) -> st.SearchStrategy[Space[Any]]:
    return (
        st.dictionaries(_keys, inner, max_size=3).map(Dict)
        | st.lists(inner, max_size=3).map(Tuple)
        | st.lists(inner, min_size=1, max_size=3).map(OneOf)
    )


fixed_spaces = st.recursive(_boxes | _discretes | _multi_discretes | _multi_binaries | _texts, _nested, max_leaves=6)
_dynamic_spaces = st.builds(Sequence, fixed_spaces, stack=st.booleans()) | st.builds(
    Graph, _boxes | _discretes, st.none() | _boxes | _discretes
)
spaces: st.SearchStrategy[Space[Any]] = fixed_spaces | _nested(fixed_spaces | _dynamic_spaces) | _dynamic_spaces
