"""Columns of spaces that no array holds: their values are Python objects of this process, which travel in messages.

A custom space that is not registered has no fields. Where it is part of a Dict or Tuple, ``split_fields`` finds it, and
``column_with_objects`` puts an ``ObjectColumn`` in its place; the other parts are arrays as always.

    >>> from gymnasium.spaces import Dict, Discrete, Space
    >>> space = Dict({"at": Discrete(4), "mission": Space()})
    >>> fields, objects = split_fields(space, n=2)
    >>> fields, list(objects)
    ({'at': (dtype('int64'), (2,))}, ['mission'])
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split_capacity
from memlane.spaces.column import Column, PerRowColumn, RowIndices, column_of, fields_of
from memlane.spaces.nested import DictColumn, TupleColumn, subspaces_of
from memlane.spaces.paths import ROOT_NAME, join_path


class ObjectColumn(PerRowColumn):
    """Values of any space, as the objects that were stored. Nothing is checked, and batches are those of Gymnasium's
    ``concatenate``.

    The rows are not shared: the process that writes calls ``take_written`` and sends the result, and the process that
    reads adds it to ``values``."""

    def __init__(self, space: Space[Any], n: int, path: str) -> None:
        super().__init__(space, n, path)
        self.values: dict[int, Any] = {}
        """Values by row; a row that has none is None."""
        self.written: dict[int, Any] = {}
        """Values by row that were stored and not taken. Always the same dict: native code stores into it too."""
        self._batch: Any = None

    def fill_with_zeros(self) -> None:
        """Let rows that were never stored be zeros, where Gymnasium knows the zeros of the space."""
        try:
            zeros = create_empty_array(self.space, n=self.n, fn=np.zeros)
            rows = list(iterate(batch_space(self.space, self.n), zeros))
        except CustomSpaceError:
            return
        self.values.update(enumerate(map(deepcopy, rows)))

    def take_written(self) -> dict[int, Any]:
        """The values that were stored since the last call, by row."""
        taken = self.written.copy()
        self.written.clear()
        return taken

    def convert(self, value: Any) -> Any:
        return value

    def store(self, index: int, content: Any) -> None:
        self.written[index] = content

    def load(self, index: int, copy: bool) -> Any:
        value = self.written[index] if index in self.written else self.values.get(index)
        return deepcopy(value) if copy else value

    def load_batch(self, begin: int, end: int, copy: bool) -> Any:
        """With ``copy=False``, the next batch of all rows overwrites this one."""
        if (begin, end) != (0, self.n):
            return self.load_rows(range(begin, end))
        if self._batch is None:
            self._batch = create_empty_array(self.space, n=self.n, fn=np.zeros)
        batch = concatenate(self.space, [self.load(index, copy=False) for index in range(self.n)], self._batch)
        return deepcopy(batch) if copy else batch

    def load_rows(self, rows: RowIndices) -> Any:
        out: Any = create_empty_array(self.space, n=len(rows))
        return concatenate(self.space, [self.load(int(index), copy=True) for index in rows], out)


def split_fields(
    space: Space[Any], n: int, capacity: Capacities = None, prefix: str = ""
) -> tuple[dict[str, FieldSpec], dict[str, Space[Any]]]:
    """``fields_of`` for a space that may have custom parts: the fields of all other parts, and these parts by path."""
    try:
        return fields_of(space, n, capacity, prefix), {}
    except CustomSpaceError:
        if not isinstance(space, Dict | Tuple):
            if isinstance(capacity, Mapping) and capacity:
                raise KeyError(
                    f"at {prefix or ROOT_NAME!r}: a capacity is declared, but values of {type(space)} travel in "
                    f"messages and need none, found {dict(capacity)}; do not declare it"
                ) from None
            return {}, {prefix: space}
    fields: dict[str, FieldSpec] = {}
    objects: dict[str, Space[Any]] = {}
    subspaces = subspaces_of(space)
    capacities = split_capacity(capacity, subspaces, prefix or ROOT_NAME)
    for (name, subspace), declared in zip(subspaces.items(), capacities, strict=True):
        part_fields, part_objects = split_fields(subspace, n, declared, join_path(prefix, name))
        fields |= part_fields
        objects |= part_objects
    return fields, objects


def column_with_objects(
    space: Space[Any], arrays: Mapping[str, NDArray[Any]], objects: Mapping[str, ObjectColumn], prefix: str = ""
) -> Column:
    """``column_of``, with the columns ``objects`` at their paths."""
    if prefix in objects:
        return objects[prefix]
    if not any(path.startswith(join_path(prefix, "")) for path in objects):
        return column_of(space, arrays, prefix)
    assert isinstance(space, Dict | Tuple)
    parts = [
        column_with_objects(subspace, arrays, objects, join_path(prefix, name))
        for name, subspace in subspaces_of(space).items()
    ]
    kind = DictColumn if isinstance(space, Dict) else TupleColumn
    return kind(space, parts, parts[0].n, prefix)  # type: ignore[arg-type]
