"""Graph and Sequence: they work with a declared capacity, and a larger value is an error with the numbers."""

from __future__ import annotations

from typing import Any

import gymnasium.vector.utils as theirs
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, Sequence, Space, Text, Tuple

from memlane.core import Layout
from memlane.spaces import Capacity, column_of, create_shared_memory, fields_of
from tests.support.spaces import plain_column, same

PLANE = Graph(Box(-1, 1, (2,)), Discrete(3))
NODES = np.float32([[1, 2], [3, 4], [5, 6]])
EDGES = np.int64([0, 1, 2, 0])
LINKS = np.int32([[0, 1], [1, 2], [2, 0], [1, 1]])


@pytest.mark.parametrize("space", [Sequence(Discrete(2)), PLANE], ids=type)
@pytest.mark.parametrize("create", [lambda space: fields_of(space, 2), lambda space: create_shared_memory(space, 2)])
def test_without_a_capacity_the_error_is_gymnasiums_with_a_remedy(space: Space[Any], create: Any) -> None:
    with pytest.raises(TypeError) as ours:
        create(space)
    with pytest.raises(TypeError) as reference:
        theirs.create_shared_memory(space, 2)
    what = "items" if isinstance(space, Sequence) else "nodes"
    assert str(ours.value) == f"{reference.value} Or declare its size: Capacity({what}=...)."


def test_a_capacity_of_the_wrong_kind_says_which_is_missing() -> None:
    with pytest.raises(TypeError, match=r"declare its size: Capacity\(edges=...\)"):
        fields_of(PLANE, 2, Capacity(nodes=3))


@pytest.mark.parametrize("items", [-1, 2.5, "3"])
def test_a_capacity_is_a_whole_number(items: Any) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 0"):
        Capacity(items=items)


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_sequence_may_be_as_long_as_its_capacity(stack: bool, length: int) -> None:
    space = Sequence(Box(-1, 1, (2,)), stack=stack)
    value = np.arange(2 * length, dtype=np.float32).reshape(length, 2)
    column = plain_column(space, 2, Capacity(items=3))
    column.write(1, value if stack else tuple(value))
    assert same(column.read_row(1), value if stack else tuple(value))


@pytest.mark.parametrize("stack", [False, True])
def test_a_sequence_that_is_too_long_names_both_numbers(stack: bool) -> None:
    column = plain_column(Dict({"path": Sequence(Discrete(5), stack=stack)}), 2, Capacity(items=3))
    with pytest.raises(ValueError, match=r"at 'path.items': 4 items needed, but the capacity declared is 3"):
        column.write(0, {"path": np.arange(4)})


def test_a_sequence_next_to_a_full_one_keeps_its_items() -> None:
    column = plain_column(Sequence(Text(3)), 3, Capacity(items=2))
    column.write_batch((("a",), ("bb", "cc"), ("ddd",)))
    assert column.read() == (("a",), ("bb", "cc"), ("ddd",))


def test_a_shorter_sequence_leaves_nothing_of_a_longer_one() -> None:
    column = plain_column(Sequence(Text(3)), 1, Capacity(items=3))
    column.write(0, ("aaa", "bbb", "ccc"))
    column.write(0, ("d",))
    assert column.read() == (("d",),)


def test_a_sequence_with_one_wrong_item_is_not_stored_in_part() -> None:
    column = plain_column(Sequence(Discrete(5)), 1, Capacity(items=3))
    column.write(0, (1, 2))
    with pytest.raises(ValueError, match="at 'items': expected 0 to 4, found 5"):
        column.write(0, (3, 5))
    assert column.read() == ((1, 2),)


def test_something_that_is_no_tuple_is_not_a_sequence() -> None:
    with pytest.raises(TypeError, match="expected a tuple of items, found str"):
        plain_column(Sequence(Text(1)), 1, Capacity(items=3)).write(0, "abc")


def test_a_stacked_sequence_is_a_view_without_a_copy() -> None:
    space = Sequence(Box(-1, 1, (2,)), stack=True)
    arrays = Layout(fields_of(space, 2, Capacity(items=3))).views(bytearray(4096))
    column = column_of(space, arrays)
    column.write(1, NODES)
    assert np.shares_memory(column.read_row(1, copy=False), arrays["items"])


# --------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    "value",
    [
        GraphInstance(NODES, EDGES, LINKS),
        GraphInstance(NODES, None, None),
        GraphInstance(NODES, EDGES[:0], LINKS[:0]),
        GraphInstance(NODES[:1], EDGES[:1], np.int32([[0, 0]])),
        GraphInstance(NODES[:0], None, None),
    ],
    ids=["full", "None for edges", "no edges", "one node", "no nodes"],
)
def test_a_graph_is_read_back_as_written(value: GraphInstance) -> None:
    column = plain_column(PLANE, 2, Capacity(nodes=3, edges=4))
    column.write(1, value)
    assert same(column.read_row(1), value)


def test_a_smaller_graph_leaves_nothing_of_a_larger_one() -> None:
    column = plain_column(PLANE, 1, Capacity(nodes=3, edges=4))
    column.write(0, GraphInstance(NODES, EDGES, LINKS))
    column.write(0, GraphInstance(NODES[:1], None, None))
    assert same(column.read_row(0), GraphInstance(NODES[:1], None, None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (GraphInstance(NODES.repeat(2, 0), None, None), "at 'nodes': 6 nodes needed, but the capacity declared is 3"),
        (GraphInstance(NODES, EDGES.repeat(2), LINKS.repeat(2, 0)), "'edges': 8 edges needed, .* declared is 4"),
        (GraphInstance(NODES, EDGES, None), "edges and edge_links, or None for both"),
        (GraphInstance(NODES, None, LINKS), "edges and edge_links, or None for both"),
        (GraphInstance(NODES, EDGES, LINKS[:2]), r"expected shape \(4, 2\), two nodes per edge, found \(2, 2\)"),
        (GraphInstance(NODES, EDGES, LINKS + 1), "expected links between 3 nodes, found 3"),
        (GraphInstance(NODES, EDGES, LINKS - 1), "expected links between 3 nodes, found -1"),
        (
            GraphInstance(NODES[:, :1], None, None),
            r"at 'nodes': expected shape \(n, 2\), one row per value, found \(3, 1\)",
        ),
        (GraphInstance(NODES, EDGES + 1, LINKS), "at 'edges': expected 0 to 2, found 3"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(value: GraphInstance, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_column(PLANE, 1, Capacity(nodes=3, edges=4)).write(0, value)


def test_a_graph_without_an_edge_space_takes_no_edges() -> None:
    with pytest.raises(ValueError, match="the space has no edge_space"):
        plain_column(Graph(Discrete(3), None), 1, Capacity(nodes=3)).write(0, GraphInstance([0, 1], EDGES, LINKS))


# ------------------------------------------------------------------------------------------------- capacities by path


NESTED = Dict({"map": PLANE, "both": Tuple((Sequence(Discrete(2)), Sequence(Sequence(Discrete(2)))))})


def test_each_place_can_have_a_capacity_of_its_own() -> None:
    capacity = {
        "map": Capacity(nodes=3, edges=4),
        "both.0": Capacity(items=5),
        "both.1": Capacity(items=6),
        "both.1.items": Capacity(items=7),
    }
    shapes = {name: tuple(field.shape) for name, field in Layout(fields_of(NESTED, 2, capacity)).fields.items()}
    assert shapes == {
        "both.0.count": (2,),
        "both.0.items": (2, 5),
        "both.1.count": (2,),
        "both.1.items.count": (2, 6),
        "both.1.items.items": (2, 6, 7),
        "map.node_count": (2,),
        "map.nodes": (2, 3, 2),
        "map.edge_count": (2,),
        "map.edges": (2, 4),
        "map.has_edges": (2,),
        "map.links": (2, 4, 2),
    }


def test_the_space_itself_is_the_empty_path() -> None:
    assert fields_of(Sequence(Discrete(2)), 1, {"": Capacity(items=5)})["items"] == (np.dtype(np.int64), (1, 5))


@pytest.mark.parametrize("where", ["mop", "map.node", "both.0.items", "", "both"])
def test_a_capacity_for_a_place_without_graph_or_sequence_is_an_error(where: str) -> None:
    capacity = {
        "map": Capacity(nodes=3, edges=4),
        "both.0": Capacity(items=5),
        "both.1": Capacity(items=5),
        "both.1.items": Capacity(items=5),
        where: Capacity(items=1),
    }
    with pytest.raises(KeyError, match="a capacity is declared for"):
        create_shared_memory(NESTED, 1, capacity=capacity)


def test_arrays_whose_items_do_not_follow_each_other_are_refused() -> None:
    arrays = {"count": np.zeros(4, np.int64), "items": np.zeros((4, 6, 2), np.float32)[:, :3]}
    with pytest.raises(ValueError, match="'items' must be contiguous"):
        column_of(Sequence(Box(-1, 1, (2,))), arrays)
