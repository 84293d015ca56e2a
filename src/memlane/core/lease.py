"""Lease: a borrowed view of a part of a segment that ends, and knows who still holds it.

A zero-copy view is valid until the slot that it shows is used again. In normal mode a lease hands out plain arrays and
can tell, when it ends, whether somebody kept one. In debug mode (``debug=True`` or ``MEMLANE_DEBUG=1``) it hands out
arrays over a mapping of its own, and when it ends

- a ``StaleViewWarning`` names each array that is still held and the line that took it,
- using such an array is a ``StaleView`` error at that place,
- and its memory is no longer the shared one but poison, NaN or -1 everywhere: not even code that goes around numpy
  (torch, C) can read a silently changed number, or write into a slot that now belongs to somebody else.
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
    """Whether ``MEMLANE_DEBUG`` asks for it."""
    return os.environ.get("MEMLANE_DEBUG", "") not in ("", "0")


class Lease(Mapping[str, NDArray[Any]]):
    """The fields of ``layout`` at byte ``offset`` of a segment's fields, borrowed until ``release``.

    ``on_release`` is called once, when the lease ends: that is where a lane takes its slot back.
    """

    __slots__ = (
        "__weakref__", "_end", "_given", "_on_release", "_source", "_window", "_writeable", "label", "layout",
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
        """``window`` is where the segment shows the fields; ``alias``, in debug mode, where this lease alone does."""
        self.layout = layout
        self.label = label
        self._writeable = writeable
        self._source = window[0]
        self._window: Window | None = alias or window
        self._end = _End(alias[0]) if alias is not None else None
        self._given: list[tuple[weakref.ref[NDArray[Any]], str, str]] = []

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The field as an array that is valid until the lease ends."""
        window = self._window
        if window is None:
            raise StaleView(f"the lease of {self.label} has ended; take field {name!r} before release()")
        if self._source.closed:
            raise SegmentClosed(f"{self.label} was used after its segment was closed; use it before close()")
        view = self.layout[name].view(*window)
        if not self._writeable:
            view.flags.writeable = False
        if self._end is None:
            self._given.append((weakref.ref(view), name, ""))
            return view
        place = _caller()
        self._given.append((weakref.ref(view), name, place))
        watched = view.view(WatchedView)
        watched._end, watched._taken = self._end, f"field {name!r} of {self.label}, taken at {place},"
        return watched

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.fields)

    def __len__(self) -> int:
        return len(self.layout)

    def holders(self) -> list[str]:
        """The arrays from this lease that are still alive, directly or behind a slice or a tensor of theirs, and in
        debug mode the lines that took them."""
        return [f"{name} taken at {place}" if place else name for ref, name, place in self._given if ref() is not None]

    @property
    def released(self) -> bool:
        return self._window is None

    def release(self) -> None:
        """End the lease. Again is harmless."""
        if self._window is None:
            return
        self._window = None
        if self._end is None:
            self._ended()
            return
        held = self.holders()
        self._end.come()
        self._ended()
        if held:
            warnings.warn(
                f"{len(held)} array(s) outlive the lease of {self.label}: {'; '.join(held)}. They now hold NaN or -1; "
                "copy what must be kept before the lease ends",
                StaleViewWarning,
                stacklevel=2,
            )

    def _ended(self) -> None:
        """What is to happen once, when the lease has ended."""
        if self._on_release is not None:
            self._on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.label}{', released' if self.released else ''}>"


class _End:
    """Whether a lease has ended; shared by the lease and all its views."""

    __slots__ = ("_mapping", "came")

    def __init__(self, mapping: _native.Mapping) -> None:
        self._mapping = mapping
        self.came = False

    def come(self) -> None:
        self.came = True
        self._mapping.retire()


class WatchedView(np.ndarray[Any, np.dtype[Any]]):
    """An array of a debug lease: each use asks whether the lease still holds. Results of computations are plain."""

    _end: _End | None = None
    _taken: str = ""

    def __array_finalize__(self, source: object) -> None:
        # Only what still shows the leased memory is watched: a copy is free.
        if isinstance(source, WatchedView) and np.may_share_memory(self.view(np.ndarray), source.view(np.ndarray)):
            self._end, self._taken = source._end, source._taken

    def _check(self) -> NDArray[Any]:
        if self._end is not None and self._end.came:
            raise StaleView(f"{self._taken} was used after the lease had ended; copy it while the lease holds")
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


# Slicing and ufuncs are caught above; these methods go straight to the memory.
_STRAIGHT = """
__array__ __bool__ __complex__ __contains__ __copy__ __deepcopy__ __dlpack__ __float__ __format__ __index__ __int__
__reduce_ex__ argmax argmin argpartition argsort astype byteswap choose clip compress copy cumprod cumsum dot dump dumps
fill flatten item nonzero partition put repeat searchsorted setfield sort take tobytes tofile tolist
"""
for _name in _STRAIGHT.split():
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


def _caller() -> str:
    """The nearest line outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<frozen")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
