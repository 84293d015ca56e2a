"""Weights: the latest version of named tensors, published by one process and read by any, without a lock.

``cpp/src/lanes/weights.hpp`` has the protocol between writer and readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout, MemlaneError, Peer
from memlane.core.arguments import as_count
from memlane.core.layout import FieldSpec
from memlane.core.rows import address
from memlane.lanes.lane import Lane, as_layout, require_settings
from memlane.lanes.tensors import Tensor, TensorParts


class Weights(Lane):
    """The latest version of named tensors in shared memory: a writer publishes, any number of processes read.

    ``layout`` has names, dtypes and shapes: a ``Layout`` (``layout_of(state_dict)``), or ``{name: (dtype, shape)}``.
    Tensors may be numpy arrays, or torch tensors on any device.

    Any process that has the weights may read: pass the object as a ``Process`` argument, or create it with ``name`` and
    call ``Weights.attach(name)``. Usually one process publishes; if n do, use ``buffers=n + 2`` or more. Threads may
    share the object; each reads into tensors of its own.

        >>> import numpy as np
        >>> with Weights({"w": ("float32", (2, 2)), "steps": ("int64", ())}) as weights:
        ...     weights.publish({"w": np.ones((2, 2), np.float32), "steps": np.array(5)})
        ...     version, arrays = weights.read()
        ...     print(version, arrays["w"].sum(), arrays["steps"])
        1
        1 4.0 5

    The writer fills one of ``buffers`` copies that is not the latest, then makes it the latest atomically. So it never
    waits for readers, and a read returns one complete version: a copy that was overwritten while it was made is
    repeated.

    When the writer dies, even in the middle of a publication, the latest complete version stays readable and another
    process may publish the next. When a reader dies, nothing changes for the others.
    """

    def __init__(self, layout: Layout | Mapping[str, FieldSpec], *, buffers: int = 3, name: str | None = None) -> None:
        block = as_layout(layout)
        self._create(block, self.segment_layout(block, buffers), name, [buffers])

    @classmethod
    def segment_layout(cls, layout: Layout, buffers: int = 3) -> Layout:
        """Return the layout of the weights' segment without creating it, for a ``MemoryBudget``."""
        as_count("buffers", buffers, 2, _native.MAX_BUFFERS)
        return Layout(
            {
                **cls._describe(layout, 1),
                "control": (f"V{_native.WEIGHTS_CONTROL_BYTES}", ()),
                # Bytes, not records: a numpy record is limited to 2 GiB.
                "buffers": ("uint8", (buffers, max(layout.nbytes, 64))),
            }
        )

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        require_settings(settings, 1)
        (buffers,) = settings
        return cls.segment_layout(layout, buffers)

    def _bind(self, settings: list[int]) -> None:
        buffers = self.segment.layout["buffers"]
        mapping, base = self.segment.window(0, self.segment.layout.nbytes, writeable=True)
        self._native = _native.Weights(
            mapping,
            base + self.segment.layout["control"].offset,
            base + buffers.offset,
            settings[0],
            buffers.shape[1],
            f"weights of {self.segment.label}",
        )
        # The tensors of the last call, which usually come again. Threads may share them: a call copies what it needs.
        self._published: TensorParts | None = None
        self._read: TensorParts | None = None
        # Tensors with staging copies, which only one thread may use: a call takes them out of the list.
        self._staged_published: list[TensorParts] = []
        self._staged_read: list[TensorParts] = []

    def publish(self, tensors: Mapping[str, Tensor]) -> int:
        """Publish a copy of ``tensors`` as the latest version and return its number.

        Names, dtypes and shapes must be those of the layout. Never waits for readers.
        """
        if version := self._native.publish_tensors(self._published, tensors):
            return version
        parts = _take_out(self._staged_published, tensors)
        if parts is None:
            parts = TensorParts(self.layout, tensors, "tensors", writeable=False)
        parts.before_publish()
        version = self._native.publish(parts)
        if parts.staging:
            self._staged_published.append(parts)
        else:
            self._published = parts
        return version

    @property
    def version(self) -> int:
        """Number of the latest version; 0 before the first ``publish``."""
        return self._native.version()

    def read(self, out: Mapping[str, Tensor] | None = None) -> tuple[int, Mapping[str, Tensor]]:
        """Copy the latest version into ``out``, or into new arrays, and return ``(version, out)``.

        Version 0 means that nothing was published yet and ``out`` was not changed; without ``out``, that is an error.
        If ``out`` already has the latest version from the last ``read``, nothing is copied.
        """
        if out is None:
            if not self.version:
                raise MemlaneError(
                    f"nothing was published yet in the {self._native.label}; call publish first, or wait_for(1) where "
                    "another process publishes"
                )
            out = {field.name: np.empty(field.shape, field.dtype) for field in self.layout}
        if (version := self._native.read_tensors(self._read, out)) >= 0:
            return version, out
        parts = _take_out(self._staged_read, out)
        if parts is None:
            parts = TensorParts(self.layout, out, "out", writeable=True)
        known = parts.version
        version = self._native.read(parts)
        if version != known:
            parts.after_read()
        if parts.staging:
            self._staged_read.append(parts)
        else:
            self._read = parts
        return version, out

    def publish_some(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Publish only the first bytes of some fields; the other bytes of this version are undefined."""
        return self._native.publish(self._prefixes(arrays, writeable=False))

    def read_some(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Read only the first bytes of some fields, all of one version, and return its number."""
        return self._native.read(self._prefixes(arrays, writeable=True))

    def _prefixes(self, arrays: Mapping[str, NDArray[Any]], *, writeable: bool) -> _native.TensorParts:
        parts = []
        for name, array in arrays.items():
            field = self.layout[name]
            if array.dtype != field.dtype or array.nbytes > field.nbytes or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name!r} must be contiguous {field.dtype} of at most {field.nbytes} bytes, "
                    f"found {array.dtype} of {array.nbytes}"
                )
            parts.append((name, array, field.offset, array, address(array), array.nbytes))
        return _native.TensorParts(parts, writeable)

    def wait_for(self, version: int, timeout: float | None = None, peers: Iterable[Peer] = ()) -> int:
        """Wait until ``version`` or a later one is published and return the latest number.

        Waits at most ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).
        """
        return self._native.wait_for(version, timeout, peers)

    def counters(self) -> dict[str, int]:
        """Return ``version`` (publications) and ``retries`` (reads repeated because the writer overtook them)."""
        return {"version": self.version, "retries": self._native.retries()}


def _take_out(staged: list[TensorParts], tensors: Mapping[str, Tensor]) -> TensorParts | None:
    """Take parts of exactly these tensors out of the list: no other thread uses them until they are put back."""
    try:
        parts = staged.pop()  # atomic; parts of other tensors are forgotten
    except IndexError:
        return None
    return parts if parts.same(tensors) else None
