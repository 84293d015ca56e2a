"""Arguments: checks of what callers pass, with errors that name the argument."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from memlane._native import check_timeout as check_timeout


def as_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value`` as an integer from ``least`` to ``most``. ``name`` is the argument that the error names.

    >>> as_count("num_slots", 4, 1)
    4
    >>> as_count("num_slots", 0, 1)
    Traceback (most recent call last):
    ValueError: num_slots must be 1 or more, found 0
    """
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, {allowed}, found {value!r}") from None
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be {allowed}, found {number}")
    return number


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number, of Python or numpy, that is neither infinite nor NaN."""
    return isinstance(value, Real) and math.isfinite(value)


def as_names(name: str, value: Any) -> list[str]:
    """Return ``value``, names in any iterable, as a list. A single string is an error: it would be a list of letters.

    >>> as_names("observations", ("obs", "mask"))
    ['obs', 'mask']
    >>> as_names("observations", "obs")
    Traceback (most recent call last):
    TypeError: observations must be a list of names, such as ['obs'], found 'obs'
    """
    if isinstance(value, str):
        raise TypeError(f"{name} must be a list of names, such as [{value!r}], found {value!r}")
    return list(value)
