"""Observations: the batches that ``reset`` and ``step`` return: copies or views of the rows that environments write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from memlane.core import Segment
from memlane.core.lease import Lease, debug_mode
from memlane.spaces import Column
from memlane.spaces.objects import ObjectColumn, column_with_objects
from memlane.spaces.paths import ROOT_NAME


class Observations:
    """Makes batches of the observations in ``column``.

    With ``copy``, every batch is the caller's own. Without, it is a read-only view of the rows, valid until the next
    ``reset``, ``step`` or ``send``; in debug mode a use after that is an error (see ``Lease``).

    ``fields`` are the arrays of ``space`` (``observation.<path>``); for debug mode they must be in ``segment``.
    ``objects`` are the parts of it that are not arrays. Debug mode watches neither these nor, with a space of None, the
    arrays behind ``column``."""

    def __init__(
        self,
        column: Column | None,
        space: Space[Any] | None,
        fields: dict[str, NDArray[Any]],
        segment: Segment | None,
        *,
        copy: bool,
        objects: Mapping[str, ObjectColumn] | None = None,
    ) -> None:
        self.column = column
        self._space = space
        self._segment = segment
        self._copy = copy
        self._objects = objects or {}
        self._lease: Lease | None = None
        self._rows = column.rows if column is not None and copy else None
        self._view: Column | None = None
        if space is not None and not copy and not debug_mode():
            views = {name: read_only(array) for name, array in fields.items()}
            self._view = part_column("observation", space, views, self._objects)

    @property
    def same(self) -> bool:
        """Whether every batch consists of the same views."""
        return self._view is not None and not self._objects

    def batch(self) -> Any:
        """The observations of all environments."""
        if self._rows is not None:
            return self._rows.copy()
        assert self.column is not None
        if self._copy:
            return self.column.read(copy=True)
        if self._space is None:
            return read_only_batch(self.column.read(copy=False))
        if self._view is not None:
            batch = self._view.read(copy=False)
            return read_only_batch(batch) if self._objects else batch
        assert self._segment is not None
        self._lease = Lease(self._segment, writeable=False, label="the observations of a step", debug=True)
        # Only those of the observations: a view that is still held when the lease ends is reported.
        views = {name: self._lease[name] for name in self._lease if name.startswith("observation.")}
        borrowed = part_column("observation", self._space, views, self._objects)
        assert borrowed is not None
        batch = borrowed.read(copy=False)
        return read_only_batch(batch) if self._objects else batch

    def end(self) -> None:
        """End the lease of the last batch: the rows are about to change."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def part_column(
    part: str,
    space: Space[Any] | None,
    fields: dict[str, NDArray[Any]],
    objects: Mapping[str, ObjectColumn] | None = None,
) -> Column | None:
    """The column of one part of a step ("observation" or "action"), over the fields of a segment or views of them, and
    ``objects`` at their paths. Its errors name the part: "at 'action': ..."."""
    if space is None:
        return None
    root = f"{part}.{ROOT_NAME}"  # the field of a space that is not nested
    arrays = {**fields, part: fields[root]} if root in fields else fields
    return column_with_objects(space, arrays, objects or {}, part)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


def read_only_batch(batch: Any) -> Any:
    """A batch, nested as it is, with ``read_only`` views of its arrays. Values that are neither arrays nor dicts,
    tuples or lists of them stay as they are."""
    if isinstance(batch, np.ndarray):
        return read_only(batch)
    if isinstance(batch, dict):
        return {key: read_only_batch(part) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [read_only_batch(part) for part in batch]
        if isinstance(batch, list):
            return parts
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)  # GraphInstance is a named tuple
    return batch
