"""Columns of Sequence and Graph spaces: each row has space for the declared capacity, and the count in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Graph, GraphInstance, Sequence, Space
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.core.suggestions import did_you_mean
from memlane.spaces.capacity import Capacities, declared_capacity, split_capacity
from memlane.spaces.casting import as_array, checked_cast
from memlane.spaces.column import Column, PerRowColumn, column_of, fields_of, find_array
from memlane.spaces.nested import check_length
from memlane.spaces.paths import ROOT_NAME, join_path

_INT64 = np.dtype(np.int64)
_LINK = np.dtype(np.int32)


class Arena:
    """The storage of a column whose values vary in size: ``capacity`` rows of an inner column for each outer row.

    ``counts[row]`` of them are in use, from the first on.
    """

    def __init__(self, space: Space[Any], arrays: Mapping[str, NDArray[Any]], path: str, counts: NDArray[Any]) -> None:
        own = {name: array for name, array in arrays.items() if name == path or name.startswith(f"{path}.")}
        if not own:
            raise KeyError(f"there is no array {path!r}; the arrays are {list(arrays)}{did_you_mean(path, arrays)}")
        self.capacity: int = next(iter(own.values())).shape[1]
        self.column = column_of(space, {name: _flat(name, array) for name, array in own.items()}, path)
        self.counts = counts
        self.path = path

    def check(self, count: int, what: str) -> None:
        if count > self.capacity:
            raise ValueError(
                f"at {self.path!r}: {count} {what} needed, but the capacity declared is {self.capacity}; "
                "declare a larger Capacity"
            )

    def convert(self, values: Any, what: str) -> tuple[int, Any]:
        """Check a batch of items; return their count and the content to store."""
        count, content = self.column.convert_batch(values)
        self.check(count or 0, what)
        return count or 0, content

    def store(self, index: int, content: tuple[int, Any]) -> None:
        self.column.store_batch(index * self.capacity, content[1])
        self.counts[index] = content[0]

    def load(self, index: int, copy: bool) -> Any:
        begin = index * self.capacity
        return self.column.load_batch(begin, begin + int(self.counts[index]), copy)


class SequenceColumn(PerRowColumn):
    """Sequence; a value is a tuple of items."""

    def __init__(self, space: Sequence, arena: Arena, path: str) -> None:
        super().__init__(space, len(arena.counts), path)
        self._arena = arena

    def convert(self, value: Any) -> Any:
        if not isinstance(value, (tuple, list, np.ndarray)):
            raise TypeError(f"at {self.path!r}: expected a tuple of items, found {type(value).__name__}")
        self._arena.check(len(value), "items")
        return [self._arena.column.convert(item) for item in value]

    def store(self, index: int, content: Any) -> None:
        for row, item in enumerate(content, index * self._arena.capacity):
            self._arena.column.store(row, item)
        self._arena.counts[index] = len(content)

    def load(self, index: int, copy: bool) -> Any:
        begin = index * self._arena.capacity
        end = begin + int(self._arena.counts[index])
        return tuple(self._arena.column.load(row, copy) for row in range(begin, end))


class StackedSequenceColumn(SequenceColumn):
    """Sequence with ``stack=True``; a value is a batch of items."""

    def convert(self, value: Any) -> Any:
        return self._arena.convert(value, "items")

    def store(self, index: int, content: Any) -> None:
        self._arena.store(index, content)

    def load(self, index: int, copy: bool) -> Any:
        return self._arena.load(index, copy)


class GraphColumn(PerRowColumn):
    """Graph: nodes, and if the space has edges, for each edge its value and the two nodes that it links."""

    def __init__(self, space: Graph, nodes: Arena, edges: Arena | None, arrays: list[NDArray[Any]], path: str) -> None:
        super().__init__(space, len(nodes.counts), path)
        self._nodes = nodes
        self._edges = edges
        if edges is not None:
            self._has_edges, self._links = arrays

    def convert(self, value: Any) -> Any:
        check_length(value, 3, self.path)
        nodes, edges, links = value
        checked_nodes = self._nodes.convert(nodes, "nodes")
        if edges is None and links is None:
            return checked_nodes, None, None
        if edges is None or links is None:
            raise ValueError(f"at {self.path!r}: expected edges and edge_links, or None for both, found only one")
        if self._edges is None:
            raise ValueError(f"at {self.path!r}: expected None for edges, as the space has no edge_space")
        checked_edges = self._edges.convert(edges, "edges")
        return checked_nodes, checked_edges, self._convert_links(links, checked_edges[0], checked_nodes[0])

    def _convert_links(self, links: Any, edges: int, nodes: int) -> NDArray[Any]:
        path = join_path(self.path, "edge_links")
        array = as_array(links, path, (edges, 2), _LINK)
        if array.shape != (edges, 2):
            raise ValueError(f"at {path!r}: expected shape {(edges, 2)}, two nodes per edge, found {array.shape}")
        array = checked_cast(array, _LINK, path)
        outside = (array < 0) | (array >= nodes)
        if outside.any():
            raise ValueError(f"at {path!r}: expected links between {nodes} nodes, found {array[outside].flat[0]}")
        return array

    def store(self, index: int, content: Any) -> None:
        nodes, edges, links = content
        self._nodes.store(index, nodes)
        if self._edges is not None:
            self._has_edges[index] = edges is not None
            if edges is not None:
                self._edges.store(index, edges)
                self._links[index, : len(links)] = links

    def load(self, index: int, copy: bool) -> GraphInstance:
        nodes = self._nodes.load(index, copy)
        if self._edges is None or not self._has_edges[index]:
            return GraphInstance(nodes, None, None)
        links = self._links[index, : int(self._edges.counts[index])]
        return GraphInstance(nodes, self._edges.load(index, copy), links.copy() if copy else links)


@fields_of.register(Sequence)
def _sequence_fields(space: Sequence, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    items = declared_capacity(capacity, space, "items")
    (declared,) = split_capacity(capacity, ["items"], prefix or ROOT_NAME, own=True)
    return {
        join_path(prefix, "count"): (_INT64, (n,)),
        **_arena_fields(space.feature_space, n, items, declared, join_path(prefix, "items")),
    }


@fields_of.register(Graph)
def _graph_fields(space: Graph, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    nodes = declared_capacity(capacity, space, "nodes")
    node_capacity, edge_capacity = split_capacity(capacity, ["nodes", "edges"], prefix or ROOT_NAME, own=True)
    fields: dict[str, FieldSpec] = {
        join_path(prefix, "node_count"): (_INT64, (n,)),
        **_arena_fields(space.node_space, n, nodes, node_capacity, join_path(prefix, "nodes")),
    }
    if space.edge_space is not None:
        edges = declared_capacity(capacity, space, "edges")
        fields[join_path(prefix, "edge_count")] = (_INT64, (n,))
        fields |= _arena_fields(space.edge_space, n, edges, edge_capacity, join_path(prefix, "edges"))
        # In zeroed memory this is False: edges are None, as in a sample of Gymnasium without edges.
        fields[join_path(prefix, "has_edges")] = (np.dtype(bool), (n,))
        fields[join_path(prefix, "links")] = (_LINK, (n, edges, 2))
    return fields


@column_of.register(Sequence)
def _sequence_column(space: Sequence, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    counts = find_array(arrays, join_path(prefix, "count"), (_INT64, (0,)))
    arena = Arena(space.feature_space, arrays, join_path(prefix, "items"), counts)
    return (StackedSequenceColumn if space.stack else SequenceColumn)(space, arena, prefix)


@column_of.register(Graph)
def _graph_column(space: Graph, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    counts = find_array(arrays, join_path(prefix, "node_count"), (_INT64, (0,)))
    nodes = Arena(space.node_space, arrays, join_path(prefix, "nodes"), counts)
    if space.edge_space is None:
        return GraphColumn(space, nodes, None, [], prefix)
    counts = find_array(arrays, join_path(prefix, "edge_count"), (_INT64, (0,)))
    edges = Arena(space.edge_space, arrays, join_path(prefix, "edges"), counts)
    has_edges = find_array(arrays, join_path(prefix, "has_edges"), (bool, (0,)))
    links = find_array(arrays, join_path(prefix, "links"), (_LINK, (0, edges.capacity, 2)))
    return GraphColumn(space, nodes, edges, [has_edges, links], prefix)


def _arena_fields(space: Space[Any], n: int, capacity: int, declared: Capacities, path: str) -> dict[str, FieldSpec]:
    """The fields of ``n * capacity`` values of ``space``, with shape ``(n, capacity, ...)``."""
    fields: dict[str, FieldSpec] = {}
    for name, (dtype, shape) in fields_of(space, n * capacity, declared, path).items():
        _, *inner = (shape,) if isinstance(shape, int) else shape
        fields[name] = (dtype, (n, capacity, *inner))
    return fields


def _flat(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """``array`` with its first two dimensions merged, over the same memory."""
    n, capacity, *inner = array.shape
    flat = array.reshape(n * capacity, *inner)
    if array.size and not np.may_share_memory(flat, array):
        raise ValueError(f"array {name!r} must be contiguous, found strides {list(array.strides)}")
    return flat
