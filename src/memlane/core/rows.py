"""Rows: copy rows by index between shared memory and arrays, several fields in one call, without the GIL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane import _native

_INT64 = np.dtype(np.int64)


class Rows:
    """Arrays of equal length whose rows are copied by index. Their addresses are looked up once, not for each copy.

    Each row must be contiguous; there may be gaps between rows (a field of packed rows). Copies are bytewise: dtypes
    and shapes must be equal, nothing is cast. Indices are checked before anything is copied; unlike in numpy, negative
    indices are errors.

        >>> table = Rows({"obs": np.arange(12.0).reshape(6, 2), "done": np.zeros(6, bool)})
        >>> table.gather([5, 0])["obs"].tolist()
        [[10.0, 11.0], [0.0, 1.0]]

    Any thread may call any method. Rows that another process writes during a copy may be torn: check a version or a
    sequence number afterwards, as the lanes do.
    """

    arrays: dict[str, NDArray[Any]]
    count: int
    """Number of rows."""

    __slots__ = ("_native", "_target", "arrays", "count")

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if not arrays:
            raise ValueError("Rows needs at least one array, found none")
        self.arrays = dict(arrays)
        for name, array in self.arrays.items():
            _require_array(f"field {name!r}", array)
        self.count = len(next(iter(self.arrays.values())))
        self._target: Rows | None = None
        self._native = _native.Rows(
            self.count, [_row_layout(name, array, self.count) for name, array in arrays.items()]
        )

    def gather(
        self, indices: ArrayLike, out: Rows | Mapping[str, NDArray[Any]] | None = None, threads: int = 1
    ) -> dict[str, NDArray[Any]]:
        """Copy ``out[name][i] = rows[name][indices[i]]`` for every field, and return ``out``; by default new arrays.

        A ``Rows`` as ``out`` is fastest: it is checked once, not for each call. Up to ``threads`` threads copy when
        there is enough work for each.
        """
        checked = _check_indices(indices)
        if out is not None and out is self._target:  # checked by an earlier call
            self._native.gather(checked, out._native, threads)
            return out.arrays
        if out is None:
            out = {name: np.empty((len(checked), *array.shape[1:]), array.dtype) for name, array in self.arrays.items()}
        target = self._matching(out, "out")
        for name, array in target.arrays.items():
            if not array.flags.writeable:
                raise ValueError(f"out[{name!r}] is read-only; pass a writeable array")
        if target is out:
            self._target = target
        self._native.gather(checked, target._native, threads)
        return target.arrays

    def scatter(self, indices: ArrayLike, values: Rows | Mapping[str, NDArray[Any]], threads: int = 1) -> None:
        """Copy ``rows[name][indices[i]] = values[name][i]`` for every field.

        If an index occurs twice, the later value is kept; with several threads, either value may be kept, separately
        for each field.
        """
        for name, array in self.arrays.items():
            if not array.flags.writeable:
                raise ValueError(f"rows[{name!r}] is read-only; attach its segment with writeable=True")
        source = self._matching(values, "values")  # a local: it may hold the only reference to the arrays
        self._native.scatter(_check_indices(indices), source._native, threads)

    def _matching(self, argument: Rows | Mapping[str, NDArray[Any]], role: str) -> Rows:
        """``argument`` as rows with the fields of this object, in the same order."""
        other = argument if isinstance(argument, Rows) else None
        arrays = argument.arrays if isinstance(argument, Rows) else argument
        if arrays.keys() != self.arrays.keys():
            raise KeyError(f"{role} must have the fields {list(self.arrays)}, found {list(arrays)}")
        for name, array in self.arrays.items():
            match = arrays[name]
            if other is None:
                _require_array(f"{role}[{name!r}]", match)
            if match.dtype != array.dtype:
                raise TypeError(f"{role}[{name!r}] must have dtype {array.dtype}, found {match.dtype}")
            if match.shape[1:] != array.shape[1:]:
                raise ValueError(
                    f"{role}[{name!r}] must have rows of shape {list(array.shape[1:])}, found {list(match.shape[1:])}"
                )
        if other is not None and list(arrays) == list(self.arrays):
            return other
        return Rows({name: arrays[name] for name in self.arrays})

    def __len__(self) -> int:
        return self.count


def _check_indices(indices: ArrayLike) -> NDArray[np.int64]:
    if type(indices) is np.ndarray and indices.dtype is _INT64 and indices.ndim == 1 and indices.flags.c_contiguous:
        return indices
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"indices must be integers in one dimension, found dtype {array.dtype} and shape {list(array.shape)}"
        )
    return np.ascontiguousarray(array, np.int64)


def _require_array(label: str, array: object) -> None:
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        found = "one of shape []" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{label} must be an array of at least one dimension, found {found}")
    if array.dtype.hasobject:
        raise TypeError(f"{label} has dtype {array.dtype}; Python objects cannot be copied as bytes")


def _row_layout(name: str, array: NDArray[Any], count: int) -> tuple[int, int, int]:
    """Address of the first row, and stride and size of a row in bytes."""
    if len(array) != count:
        raise ValueError(f"field {name!r} must have {count} rows, like the first field, found {len(array)}")
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    # array[0, ...] is always an array. array[0] may be a scalar: numpy cannot make a string scalar from arbitrary
    # bytes, and a structured scalar has the flags of the whole array.
    row_contiguous = count == 0 or row_bytes == 0 or array[0, ...].flags.c_contiguous
    stride = array.strides[0] if count > 1 else row_bytes
    if not row_contiguous or stride < row_bytes:
        raise ValueError(
            f"field {name!r} must have contiguous rows in ascending order, found shape {list(array.shape)} "
            f"and strides {list(array.strides)}; use np.ascontiguousarray"
        )
    return address(array), stride, row_bytes


def address(array: NDArray[Any]) -> int:
    """The address of the first byte, for native code that keeps pointers. The caller keeps the array alive."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
