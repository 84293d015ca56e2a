"""Weights: the latest version of named tensors, published by a writer and read by anybody, without a lock.

The writer fills a buffer that is not the latest and publishes it with one atomic number; a reader copies the latest and
is told if its buffer was recycled meanwhile, in which case the copy is made again. So the writer never waits for
readers, readers never stop the writer, and a read is one version. ``native/src/weights.hpp`` says how, and what
happens when somebody dies.

    >>> import numpy as np
    >>> with Weights({"w": ("float32", (2, 2)), "steps": ("int64", ())}) as weights:
    ...     weights.publish({"w": np.ones((2, 2), np.float32), "steps": np.array(5)})
    ...     version, arrays = weights.read()
    ...     print(version, arrays["w"].sum(), arrays["steps"])
    1
    1 4.0 5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout, Peer
from memlane.core.layout import FieldSpec
from memlane.core.rows import address
from memlane.lanes.lane import Lane, as_layout
from memlane.lanes.tensors import Tensor, TensorParts


class Weights(Lane):
    """Weights of any layout in a segment of their own: anonymous, or under ``name`` for unrelated processes."""

    def __init__(self, layout: Layout | Mapping[str, FieldSpec], *, buffers: int = 3, name: str | None = None) -> None:
        block = as_layout(layout)
        self._create(block, self.segment_layout(block, buffers), name, [buffers])

    @classmethod
    def segment_layout(cls, layout: Layout, buffers: int = 3) -> Layout:
        """What the weights take from the machine, before they are made."""
        if not 2 <= buffers <= _native.MAX_BUFFERS:
            raise ValueError(f"buffers must be 2 to {_native.MAX_BUFFERS}, found {buffers}")
        return Layout(
            {
                **cls._describe(layout, 1),
                "control": (f"V{_native.WEIGHTS_CONTROL_BYTES}", ()),
                # Bytes, not records: numpy's records end at 2 GiB.
                "buffers": ("uint8", (buffers, max(layout.nbytes, 64))),
            }
        )

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
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
        """Make a copy of these the latest version and return its number. Names, dtypes and shapes must be the layout's.
        Never waits, whatever the readers do."""
        if version := self._native.publish_tensors(self._published, tensors):
            return version
        parts = self._published
        if parts is None or not parts.fits(tensors):
            parts = self._published = TensorParts(self.layout, tensors, "tensors", writeable=False)
        if parts.twins:
            parts.before_publish()
        return self._native.publish(parts)

    @property
    def version(self) -> int:
        """The number of the latest version; 0 before the first."""
        return self._native.version()

    def read(self, out: Mapping[str, Tensor] | None = None) -> tuple[int, Mapping[str, Tensor]]:
        """Copy the latest version out, into ``out`` or new arrays. Version 0 means that there is none yet and that
        nothing was copied. What was read last into the same ``out`` is not copied again."""
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
            if parts.twins:
                parts.after_read()
        return self._read_version, out

    def publish_some(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """``publish`` of the first bytes of some fields; what the other bytes of this version hold is undefined."""
        return self._native.publish(self._beginnings(arrays, writeable=False))

    def read_some(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """``read`` of the first bytes of some fields, all of one version, whose number is returned."""
        return self._native.read(self._beginnings(arrays, writeable=True))

    def _beginnings(self, arrays: Mapping[str, NDArray[Any]], *, writeable: bool) -> _native.TensorParts:
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
        """Wait until ``version`` or a later one is there and return the latest number."""
        return self._native.wait_for(version, timeout, peers)

    def counters(self) -> dict[str, int]:
        """``version``: publications; ``retries``: copies that were overwritten while they were made, and made again."""
        return {"version": self.version, "retries": self._native.retries()}
