"""Casting: a value as an array of a field's dtype, or an error. Nothing is truncated, wrapped or rounded to an integer.

Floats may lose precision, because many environments compute in float64 and declare float32; they may not become
infinite. Integers must be exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane.core.suggestions import excerpt

_NUMBERS = "biufc"


def as_array(value: Any, path: str, shape: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``value`` as an array of whatever dtype and shape it has. ``shape`` and ``dtype`` are for the error message."""
    try:
        return np.asarray(value)
    except ValueError as error:  # a ragged list
        raise ValueError(
            f"at {path!r}: expected shape {shape} and dtype {dtype}, found a value that is not an array: {error}"
        ) from None


def batch_shape(shape: tuple[int, ...]) -> str:
    """The shape of a batch of values of this shape, for error messages.

    >>> batch_shape((2, 3)), batch_shape(())
    ('(n, 2, 3)', '(n,)')
    """
    return f"({', '.join(['n', *map(str, shape)])}{'' if shape else ','})"


def describe_shape(array: NDArray[Any]) -> str:
    """The shape of an array, for error messages; the value itself if it is a single one that is not a number."""
    return str(array.shape) if array.ndim or array.dtype.kind in _NUMBERS else excerpt(array.item())


def checked_cast(array: NDArray[Any], dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    """``array`` as ``dtype``, with the same values.

    Raises ``TypeError`` if ``dtype`` cannot represent its kind of number, and ``ValueError`` if a value is too large.
    """
    source = array.dtype
    if source == dtype:
        return array
    if source.kind not in _NUMBERS:
        raise TypeError(f"at {path!r}: expected dtype {dtype}, found {source} ({excerpt(array)})")
    if source.kind in "iu" and dtype.kind in "fc":
        return _cast_integers_to_floats(array, dtype, path)
    if np.can_cast(source, dtype, "safe") or not array.size:
        return array.astype(dtype)
    if source.kind == "c":
        raise TypeError(f"at {path!r}: expected dtype {dtype}, found {source}; take the real part of complex values")
    if dtype.kind == "f":
        try:
            with np.errstate(over="raise", invalid="ignore"):
                return array.astype(dtype)
        except FloatingPointError:
            overflows = np.isfinite(array) & (np.abs(array) >= np.finfo(dtype).max)
            _raise_if_any(array, overflows, dtype, path, ValueError)
            raise
    if dtype.kind == "b":
        _raise_if_any(array, (array != 0) & (array != 1), dtype, path, TypeError)
    else:
        if source.kind == "f":
            _raise_if_any(array, ~np.isfinite(array) | (array != np.trunc(array)), dtype, path, TypeError)
        # As Python integers, which compare exactly at any size.
        lowest, highest, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
        if lowest < limits.min or highest > limits.max:
            value = lowest if lowest < limits.min else highest
            raise ValueError(
                f"at {path!r}: expected values of dtype {dtype}, {limits.min} to {limits.max}, found {value}"
            )
    return array.astype(dtype)


def _cast_integers_to_floats(array: NDArray[Any], dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    """Checked here because numpy considers int64 to float64 safe, although a float64 has only 53 bits for integers."""
    with np.errstate(over="ignore"):
        floats = array.astype(dtype)
    exact_below = 2 ** (np.finfo(dtype).nmant + 1)
    if array.size and (int(array.max()) > exact_below or int(array.min()) < -exact_below):
        # In Python, which compares integers and floats exactly. Infinity equals no integer.
        pairs = zip(array.ravel().tolist(), floats.real.ravel().tolist(), strict=True)
        inexact = np.array([integer != number for integer, number in pairs]).reshape(array.shape)
        _raise_if_any(array, inexact, dtype, path, ValueError)
    return floats


def _raise_if_any(
    array: NDArray[Any],
    invalid: NDArray[Any],
    dtype: np.dtype[Any],
    path: str,
    error: type[TypeError] | type[ValueError],
) -> None:
    if invalid.any():
        value = array[invalid].flat[0]
        raise error(
            f"at {path!r}: expected dtype {dtype}, found {value!s} in {array.dtype}, which {dtype} cannot represent"
        )
