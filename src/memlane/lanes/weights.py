"""Weights: the latest version of named tensors, published by one process and read by any, without a lock.

``cpp/src/lanes/weights.hpp`` has the protocol between writer and readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout, Peer
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
    call ``Weights.attach(name)``. Usually one process publishes; if n do, use ``buffers=n + 2`` or more. The
    object remembers what it read last, so each reading thread needs one: ``Weights.from_segment(weights.segment)``.

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
        self._published: TensorParts | None = None
        self._read: TensorParts | None = None
        self._read_version = 0

    def publish(self, tensors: Mapping[str, Tensor]) -> int:
        """Publish a copy of ``tensors`` as the latest version and return its number.

        Names, dtypes and shapes must be those of the layout. Never waits for readers.
        """
        if version := self._native.publish_tensors(self._published, tensors):
            return version
        parts = self._published
        if parts is None or not parts.fits(tensors):
            parts = self._published = TensorParts(self.layout, tensors, "tensors", writeable=False)
        if parts.staging:
            parts.before_publish()
        return self._native.publish(parts)

    @property
    def version(self) -> int:
        """Number of the latest version; 0 before the first ``publish``."""
        return self._native.version()

    def read(self, out: Mapping[str, Tensor] | None = None) -> tuple[int, Mapping[str, Tensor]]:
        """Copy the latest version into ``out``, or into new arrays, and return ``(version, out)``.

        Version 0 means that nothing was published yet and nothing was copied. If ``out`` already has the latest version
        from the last ``read``, nothing is copied.
        """
        if out is None:
            out = {field.name: np.empty(field.shape, field.dtype) for field in self.layout}
        if (version := self._native.read_new(self._read, out, self._read_version)) >= 0:
            self._read_version = version
            return version, out
        parts = self._read
        if parts is None or not parts.same(out):
            self._read_version = 0
            if parts is None or not parts.fits(out):
                parts = self._read = TensorParts(self.layout, out, "out", writeable=True)
        if self._native.version() != self._read_version:
            self._read_version = self._native.read(parts)
            if parts.staging:
                parts.after_read()
        return self._read_version, out

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
