"""Lease: temporary zero-copy access to a part of a segment.

A zero-copy array is valid until its slot is used again. In normal mode a lease returns plain arrays and knows which of
them are still referenced. In debug mode (``debug=True`` or ``MEMLANE_DEBUG=1``) its arrays use a separate mapping of
the same memory, and when the lease ends

- a ``StaleViewWarning`` names each array that is still referenced and the line that took it,
- using such an array raises ``StaleView``,
- and its memory is replaced by poison (NaN or -1): code that bypasses numpy's methods, such as torch or C, cannot read
  data of the slot's next use, or write into it.

The class itself is native (``cpp/python/lease.hpp``): a lease of a ring's slot takes less than a microsecond.

    >>> from memlane.core import Lease, Segment
    >>> with Segment.create({"obs": ("float32", 4)}) as segment:
    ...     with Lease(segment) as lease:
    ...         lease["obs"][:] = 1
    ...         total = float(lease["obs"].sum())
    ...     total, lease.released
    (4.0, True)
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane._native import Lease as Lease
from memlane.core.errors import StaleView, StaleViewWarning
from memlane.core.layout import Layout
from memlane.core.segment import Window

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def debug_mode() -> bool:
    """Whether the environment variable ``MEMLANE_DEBUG`` turns debug mode on."""
    return os.environ.get("MEMLANE_DEBUG", "") not in ("", "0")


class Watch:
    """The debug mode of one lease: creates its arrays, in a mapping of their own, and finds those that outlive it."""

    def __init__(self, alias: Window, layout: Layout, writeable: bool, label: str) -> None:
        self._alias = alias
        self._layout = layout
        self._writeable = writeable
        self._label = label
        self._expiry = _Expiry(alias[0])
        self._taken: list[tuple[weakref.ref[NDArray[Any]], str]] = []

    def view(self, name: str) -> WatchedView:
        """Return the field as an array that detects its use after the end of the lease."""
        view = self._layout[name].view(*self._alias)
        if not self._writeable:
            view.flags.writeable = False
        line = _calling_line()
        self._taken.append((weakref.ref(view), f"{name} taken at {line}"))
        watched = view.view(WatchedView)
        watched._expiry, watched._origin = self._expiry, f"field {name!r} of {self._label}, taken at {line},"
        return watched

    def in_use(self) -> list[str]:
        """Return the arrays that are still referenced, each with the line that took it."""
        return [taken for ref, taken in self._taken if ref() is not None]

    def expire(self) -> None:
        """Make all arrays stale."""
        self._expiry.expire()

    def warn(self, in_use: list[str]) -> None:
        """Warn of the arrays that outlive the lease, on the line that ended it."""
        if in_use:
            warnings.warn(
                f"{len(in_use)} array(s) outlive the lease of {self._label}: {'; '.join(in_use)}. They now contain NaN "
                "or -1; copy what must be kept before the lease ends",
                StaleViewWarning,
                stacklevel=_calling_level() + 1,
            )


class _Expiry:
    """Whether a debug lease has ended; shared by the lease and all its arrays."""

    __slots__ = ("_mapping", "expired")

    def __init__(self, mapping: _native.Mapping) -> None:
        self._mapping = mapping
        self.expired = False

    def expire(self) -> None:
        self.expired = True
        self._mapping.retire()


class WatchedView(np.ndarray[Any, np.dtype[Any]]):
    """An array of a debug lease: each use checks that the lease is active. Results of computations are plain arrays."""

    _expiry: _Expiry | None = None
    _origin: str = ""

    def __array_finalize__(self, source: object) -> None:
        # Only arrays over the leased memory are watched; a copy is not.
        if isinstance(source, WatchedView) and np.may_share_memory(self.view(np.ndarray), source.view(np.ndarray)):
            self._expiry, self._origin = source._expiry, source._origin

    def _check(self) -> NDArray[Any]:
        if self._expiry is not None and self._expiry.expired:
            raise StaleView(f"{self._origin} was used after the lease ended; copy it while the lease is active")
        return self.view(np.ndarray)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        result = getattr(ufunc, method)(*map(_plain, inputs), **_plain_deep(kwargs))
        return out[0] if len(out) == 1 else result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        del types
        return function(*_plain_deep(args), **_plain_deep(kwargs))

    def __getitem__(self, key: Any) -> Any:
        self._check()
        return super().__getitem__(_plain_deep(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check()
        super().__setitem__(_plain_deep(key), _plain_deep(value))

    def __iter__(self) -> Iterator[Any]:
        self._check()
        return super().__iter__()

    def __repr__(self) -> str:
        return repr(self._check())

    def __str__(self) -> str:
        return str(self._check())

    def __reduce__(self) -> Any:
        return self._check().__reduce__()


def _checked(name: str) -> Callable[..., Any]:
    def method(self: WatchedView, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._check(), name)(*args, **kwargs)

    method.__name__ = name
    return method


# Slicing and ufuncs are checked above. These methods access the memory without either.
_UNCHECKED_METHODS = """
__array__ __bool__ __complex__ __contains__ __copy__ __deepcopy__ __dlpack__ __float__ __format__ __index__ __int__
__reduce_ex__ argmax argmin argpartition argsort astype byteswap choose clip compress copy cumprod cumsum dot dump dumps
fill flatten item nonzero partition put repeat searchsorted setfield sort take tobytes tofile tolist
"""
for _name in _UNCHECKED_METHODS.split():
    setattr(WatchedView, _name, _checked(_name))


def _plain(value: Any) -> Any:
    return value._check() if isinstance(value, WatchedView) else value


def _plain_deep(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_deep, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return list(map(_plain_deep, value))
    if isinstance(value, dict):
        return {key: _plain_deep(entry) for key, entry in value.items()}
    return _plain(value)


def _calling_line() -> str:
    """File, line and function of the innermost caller outside memlane."""
    frame = sys._getframe(_calling_level())
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _calling_level() -> int:
    """The number of frames from the function that calls this one up to the innermost caller outside memlane."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<frozen")):
        level, frame = level + 1, frame.f_back
    return level
