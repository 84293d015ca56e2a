"""Rows: copy rows by index between shared memory and arrays, several fields in one call, without the GIL.

>>> import numpy as np
>>> table = Rows({"obs": np.arange(12.0).reshape(6, 2), "done": np.zeros(6, bool)})
>>> table.gather([5, 0])["obs"].tolist()
[[10.0, 11.0], [0.0, 1.0]]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane import _native

_INT64 = np.dtype(np.int64)


class Rows:
    """Arrays of equal length, pinned: their addresses are taken once and used by every copy.

    Each row of each array must lie in one piece; from row to row there may be gaps (a field of packed rows). Copies are
    bit by bit: dtypes and shapes must be equal, nothing is cast. Indices are checked before anything is copied and,
    unlike numpy's, never count from the end.
    """

    __slots__ = ("_native", "_target", "arrays", "count")

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if not arrays:
            raise ValueError("rows need at least one array")
        self.arrays = dict(arrays)
        for name, array in self.arrays.items():
            _require_array(f"field {name!r}", array)
        self.count = len(next(iter(self.arrays.values())))
        self._target: Rows | None = None
        self._native = _native.Rows(self.count, [_pinned(name, array, self.count) for name, array in arrays.items()])

    def gather(
        self, indices: ArrayLike, out: Rows | Mapping[str, NDArray[Any]] | None = None, threads: int = 1
    ) -> dict[str, NDArray[Any]]:
        """``out[name][i] = rows[name][indices[i]]`` for every field. Without ``out``, new arrays.

        A ``Rows`` as ``out`` saves looking the arrays up again. ``threads`` are used when there is enough for each.
        """
        where = _indices(indices)
        if out is not None and out is self._target:  # looked at before
            self._native.gather(where, out._native, threads)
            return out.arrays
        if out is None:
            out = {name: np.empty((len(where), *array.shape[1:]), array.dtype) for name, array in self.arrays.items()}
        target = self._matching(out, "out")
        for name, array in target.arrays.items():
            if not array.flags.writeable:
                raise ValueError(f"out[{name!r}] is read-only")
        if target is out:
            self._target = target
        self._native.gather(where, target._native, threads)
        return target.arrays

    def scatter(self, indices: ArrayLike, values: Rows | Mapping[str, NDArray[Any]], threads: int = 1) -> None:
        """``rows[name][indices[i]] = values[name][i]`` for every field. Of two equal indices the later wins, unless
        there are several threads: then either may, field by field."""
        for name, array in self.arrays.items():
            if not array.flags.writeable:
                raise ValueError(f"rows[{name!r}] is read-only")
        source = self._matching(values, "values")  # kept: it may be all that keeps the arrays alive
        self._native.scatter(_indices(indices), source._native, threads)

    def _matching(self, given: Rows | Mapping[str, NDArray[Any]], role: str) -> Rows:
        other = given if isinstance(given, Rows) else None
        arrays = given.arrays if isinstance(given, Rows) else given
        if arrays.keys() != self.arrays.keys():
            raise KeyError(f"{role} must have the fields {list(self.arrays)}, found {list(arrays)}")
        for name, array in self.arrays.items():
            found = arrays[name]
            if other is None:
                _require_array(f"{role}[{name!r}]", found)
            if found.dtype != array.dtype:
                raise TypeError(f"{role}[{name!r}] must have dtype {array.dtype}, found {found.dtype}")
            if found.shape[1:] != array.shape[1:]:
                raise ValueError(
                    f"{role}[{name!r}] must have rows of shape {list(array.shape[1:])}, found {list(found.shape[1:])}"
                )
        if other is not None and list(arrays) == list(self.arrays):
            return other
        return Rows({name: arrays[name] for name in self.arrays})

    def __len__(self) -> int:
        return self.count


def _indices(given: ArrayLike) -> NDArray[np.int64]:
    if type(given) is np.ndarray and given.dtype is _INT64 and given.ndim == 1 and given.flags.c_contiguous:
        return given
    indices = np.asarray(given)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise TypeError(
            f"indices must be whole numbers in one dimension, found dtype {indices.dtype} and "
            f"shape {list(indices.shape)}"
        )
    return np.ascontiguousarray(indices, np.int64)


def _require_array(label: str, array: object) -> None:
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeError(f"{label} must be an array of at least one dimension, found {type(array).__name__}")
    if array.dtype.hasobject:
        raise TypeError(f"{label} has dtype {array.dtype}; Python objects cannot be copied as bytes")


def _pinned(name: str, array: NDArray[Any], count: int) -> tuple[int, int, int]:
    """Address, stride and row size in bytes."""
    if len(array) != count:
        raise ValueError(f"field {name!r} has {len(array)} rows, the first field has {count}")
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    # array[0, ...] is an array where array[0] could be a scalar: that of a string cannot be made from any bytes, and
    # that of a structure has the flags of the whole.
    in_one_piece = count == 0 or row_bytes == 0 or array[0, ...].flags.c_contiguous
    stride = array.strides[0] if count > 1 else row_bytes
    if not in_one_piece or stride < row_bytes:
        raise ValueError(
            f"field {name!r} must have each row in one piece, one after the other; it has shape {list(array.shape)} "
            f"and strides {list(array.strides)}; use np.ascontiguousarray"
        )
    return address(array), stride, row_bytes


def address(array: NDArray[Any]) -> int:
    """Where its first byte is, for native code that keeps pointers. Whoever uses it keeps the array alive."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
