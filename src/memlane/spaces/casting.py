"""Casting: a value as an array of a field's dtype, or an error. Nothing is cut, wrapped or rounded to a whole number.

Floats may lose digits, because environments compute in float64 and declare float32 all the time; they may not become
infinite. Whole numbers may not lose any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = "biufc"


def as_array(value: Any, path: str, shape: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """What numpy makes of ``value``, as it is."""
    try:
        return np.asarray(value)
    except ValueError as error:  # a ragged list
        raise ValueError(f"at {path!r}: expected shape {shape} and dtype {dtype}, found no array: {error}") from None


def cast(array: NDArray[Any], dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    """``array`` in ``dtype`` with the same values. ``TypeError`` if its kind of number cannot be stored there,
    ``ValueError`` if it is too large."""
    source = array.dtype
    if source == dtype:
        return array
    if source.kind not in _NUMBERS:
        raise TypeError(f"at {path!r}: expected dtype {dtype}, found {source} ({_excerpt(array)})")
    if source.kind in "iu" and dtype.kind in "fc":
        return _exactly(array, dtype, path)
    if np.can_cast(source, dtype, "safe") or not array.size:
        return array.astype(dtype)
    if source.kind == "c":
        _refuse(array, array.imag != 0, dtype, path, TypeError)
        return cast(array.real, dtype, path)
    if dtype.kind == "f":
        try:
            with np.errstate(over="raise", invalid="ignore"):
                return array.astype(dtype)
        except FloatingPointError:
            _refuse(array, np.isfinite(array) & (np.abs(array) >= np.finfo(dtype).max), dtype, path, ValueError)
            raise
    if dtype.kind == "b":
        _refuse(array, (array != 0) & (array != 1), dtype, path, TypeError)
    else:
        if source.kind == "f":
            _refuse(array, ~np.isfinite(array) | (array != np.trunc(array)), dtype, path, TypeError)
        # As Python's integers, which compare exactly whatever their size.
        lowest, highest, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
        if lowest < limits.min or highest > limits.max:
            found = lowest if lowest < limits.min else highest
            raise ValueError(
                f"at {path!r}: expected values of dtype {dtype}, {limits.min} to {limits.max}, found {found}"
            )
    return array.astype(dtype)


def _exactly(array: NDArray[Any], dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    """Whole numbers as floats. numpy calls int64 to float64 safe, which has 53 bits for them."""
    with np.errstate(over="ignore"):
        floats = array.astype(dtype)
    all_below = 2 ** (np.finfo(dtype).nmant + 1)
    if array.size and (int(array.max()) > all_below or int(array.min()) < -all_below):
        # In Python, which compares whole numbers and floats exactly; infinity is equal to none.
        pairs = zip(array.ravel().tolist(), floats.real.ravel().tolist(), strict=True)
        wrong = np.array([one != two for one, two in pairs]).reshape(array.shape)
        _refuse(array, wrong, dtype, path, ValueError)
    return floats


def _refuse(
    array: NDArray[Any], wrong: NDArray[Any], dtype: np.dtype[Any], path: str, error: type[TypeError] | type[ValueError]
) -> None:
    if wrong.any():
        found = array[wrong].flat[0]
        raise error(f"at {path!r}: expected dtype {dtype}, found {found!s} in {array.dtype}, which it cannot hold")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
