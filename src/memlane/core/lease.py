"""Lease: temporary zero-copy access to a part of a segment.

A zero-copy array is valid until its slot is used again. In normal mode a lease returns plain arrays and knows which of
them are still referenced. In debug mode (``debug=True`` or ``MEMLANE_DEBUG=1``) its arrays use a separate mapping of
the same memory, and when the lease ends

- a ``StaleViewWarning`` names each array that is still referenced and the line that took it,
- using such an array raises ``StaleView``,
- and its memory is replaced by poison (NaN or -1): code that bypasses numpy's methods, such as torch or C, cannot read
  data of the slot's next use, or write into it.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core.errors import SegmentClosed, StaleView, StaleViewWarning
from memlane.core.layout import Layout
from memlane.core.segment import Segment, Window

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def debug_mode() -> bool:
    """Whether the environment variable ``MEMLANE_DEBUG`` turns debug mode on."""
    return os.environ.get("MEMLANE_DEBUG", "") not in ("", "0")


class Lease(Mapping[str, NDArray[Any]]):
    """Temporary zero-copy access to fields in a segment: a mapping from field name to array, until ``release``.

    Lanes return leases of their slots, for example from ``claim`` and ``take`` of a ring. Create one directly to access
    a plain segment. One thread at a time uses and releases a lease; ``with`` releases it at the end.

        >>> with Segment.create({"obs": ("float32", 4)}) as segment:
        ...     with Lease(segment) as lease:
        ...         lease["obs"][:] = 1
        ...         total = float(lease["obs"].sum())
        ...     total, lease.released
        (4.0, True)

    After the end of the lease its arrays may show other data at any time: copy what must outlive it. In debug mode,
    using such an array raises ``StaleView``. If the process dies with an active lease, the lane that issued it reclaims
    the slot; a lease over a plain segment owns nothing that would have to be reclaimed.

    Args:
        segment: The segment to access.
        layout: The fields to access; by default those of the segment.
        offset: Where ``layout`` begins, in bytes from the segment's first field.
        writeable: Whether the arrays may be written.
        on_release: Called once when the lease ends; a lane takes its slot back there.
        debug: Whether to detect stale arrays; by default if ``MEMLANE_DEBUG`` is set.
        label: The name of the lease in messages.
    """

    __slots__ = (
        "__weakref__", "_expiry", "_mapping", "_on_release", "_taken", "_window", "_writeable", "label", "layout",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        layout: Layout | None = None,
        offset: int = 0,
        *,
        writeable: bool = True,
        on_release: Callable[[], object] | None = None,
        debug: bool | None = None,
        label: str | None = None,
    ) -> None:
        self._on_release = on_release
        layout = layout or segment.layout
        label = label or f"bytes {offset} to {offset + layout.nbytes} of {segment.label}"
        window = segment.window(offset, layout.nbytes, writeable=writeable)
        debug = debug_mode() if debug is None else debug
        alias = segment.alias(offset, layout.nbytes, writeable=writeable) if debug else None
        self._begin(window, alias, layout, writeable, label)

    def _begin(self, window: Window, alias: Window | None, layout: Layout, writeable: bool, label: str) -> None:
        """Start the lease. ``window`` is in the segment's mapping; ``alias``, in debug mode, in a separate one."""
        self.layout = layout
        self.label = label
        self._writeable = writeable
        self._mapping = window[0]
        self._window: Window | None = alias or window
        self._expiry = _Expiry(alias[0]) if alias is not None else None
        self._taken: list[tuple[weakref.ref[NDArray[Any]], str, str]] = []

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The field as an array over the shared memory, valid until the lease ends."""
        window = self._window
        if window is None:
            raise StaleView(f"the lease of {self.label} has ended; access field {name!r} before release()")
        if self._mapping.closed:
            raise SegmentClosed(f"{self.label} was used after its segment was closed; use it before close()")
        view = self.layout[name].view(*window)
        if not self._writeable:
            view.flags.writeable = False
        if self._expiry is None:
            self._taken.append((weakref.ref(view), name, ""))
            return view
        line = _calling_line()
        self._taken.append((weakref.ref(view), name, line))
        watched = view.view(WatchedView)
        watched._expiry, watched._origin = self._expiry, f"field {name!r} of {self.label}, taken at {line},"
        return watched

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.fields)

    def __len__(self) -> int:
        return len(self.layout)

    def views_in_use(self) -> list[str]:
        """The names of the arrays from this lease that are still referenced, directly or through a slice or tensor. In
        debug mode, each with the line that took it."""
        return [f"{name} taken at {line}" if line else name for ref, name, line in self._taken if ref() is not None]

    @property
    def released(self) -> bool:
        """Whether the lease has ended."""
        return self._window is None

    def release(self) -> None:
        """End the lease. Calling it again has no effect."""
        if self._window is None:
            return
        self._window = None
        if self._expiry is None:
            self._after_release()
            return
        in_use = self.views_in_use()
        self._expiry.expire()
        self._after_release()
        if in_use:
            warnings.warn(
                f"{len(in_use)} array(s) outlive the lease of {self.label}: {'; '.join(in_use)}. They now contain NaN "
                "or -1; copy what must be kept before the lease ends",
                StaleViewWarning,
                stacklevel=_calling_level() + 1,
            )

    def _after_release(self) -> None:
        """Called once, when the lease has ended. Lanes override it."""
        if self._on_release is not None:
            self._on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.label}{', released' if self.released else ''}>"


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
