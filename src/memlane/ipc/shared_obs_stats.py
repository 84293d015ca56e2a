"""Shared observation normalization statistics for multi-process training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane.core import Layout
from memlane.core.arguments import as_count
from memlane.core.layout import Field
from memlane.lanes.tensors import Tensor, bytes_of, layout_of, tensor_of
from memlane.lanes.weights import Weights

_DESCRIPTION_BYTES = 8192


class SharedObsNormStats:
    """The latest normalization statistics, from the learner to any number of collectors.

    A value is a tuple such as ``(mean, std)``, or a dict, of arrays, tensors or numbers, of up to ``capacity_bytes`` in
    total. Shapes may differ from one ``put`` to the next. ``put`` and ``get`` never block.

    One process should ``put``; any process may ``get``. Each process gets each value at most once: ``get`` returns None
    until there is a newer one; ``latest`` returns the newest at any time. Pass the object as a ``Process`` argument;
    ``ctx``, the multiprocessing context, is accepted and not used.

        >>> import numpy as np
        >>> with SharedObsNormStats() as stats:
        ...     stats.put((np.zeros(2), np.ones(2)))
        ...     mean, std = stats.get()
        ...     print(mean, std, stats.get(), stats.latest()[1])
        [0. 0.] [1. 1.] None [1. 1.]

    When the learner dies, the last complete value stays readable. When a collector dies, nothing changes for the
    others. For statistics that collectors count themselves, use ``memlane.lanes.Stats``.
    """

    def __init__(self, ctx: Any = None, *, capacity_bytes: int = 1 << 20) -> None:
        del ctx
        as_count("capacity_bytes", capacity_bytes, 1)
        self._weights = Weights(_block(capacity_bytes))
        # Of the last value that `get` returned, and the process that called it: a forked or unpickled copy of this
        # object in another process has got nothing yet.
        self._got: tuple[int, int] = (0, os.getpid())

    @classmethod
    def segment_layout(cls, capacity_bytes: int = 1 << 20) -> Layout:
        """Return the layout of the segment without creating it, for a ``MemoryBudget``."""
        return Weights.segment_layout(_block(capacity_bytes))

    def put(self, stats: tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]) -> None:
        """Replace the latest statistics by ``stats``."""
        # An array or tensor could be iterated too, but its rows are not statistics.
        if not isinstance(stats, tuple | list | Mapping):
            raise TypeError(
                f"statistics must be a tuple such as (mean, std), or a dict, found {type(stats).__name__}; "
                "put a single one as (mean,)"
            )
        named = dict(stats) if isinstance(stats, Mapping) else {str(i): value for i, value in enumerate(stats)}
        kinds = [_kind(name, value) for name, value in named.items()]
        values = {name: np.asarray(value) if kind == "number" else value
                  for (name, value), kind in zip(named.items(), kinds, strict=True)}  # fmt: skip
        layout = layout_of(values)
        content = np.empty(layout.nbytes, np.uint8)
        for field, kind in zip(layout, kinds, strict=True):
            if kind == "tensor":
                _part(content, field)[:] = bytes_of(values[field.name])
            else:
                field.view(content.data)[...] = values[field.name]
        description = [isinstance(stats, Mapping), kinds, layout.to_bytes().decode()]
        self._publish(np.frombuffer(json.dumps(description).encode(), np.uint8), content)

    def get(self) -> tuple[Tensor, ...] | dict[str, Tensor] | None:
        """Return the latest statistics; None if nothing was put since this process last called ``get``.

        The types are those that were put. Threads of one process share what was got: each value goes to one of them.
        """
        process = os.getpid()
        if (self._weights.version, process) == self._got:
            return None
        version, stats = self._read()
        self._got = version, process
        return stats

    def latest(self) -> tuple[Tensor, ...] | dict[str, Tensor] | None:
        """Return the latest statistics, however often they were got before; None before the first ``put``.

        Does not change what ``get`` returns next.
        """
        return self._read()[1]

    def _publish(self, description: NDArray[np.uint8], content: NDArray[np.uint8]) -> None:
        for part, used, remedy in (
            ("description", description, "put fewer statistics, or shorter names"),
            ("content", content, "create it with a larger capacity_bytes"),
        ):
            capacity = self._weights.layout[part].nbytes
            if used.nbytes > capacity:
                raise ValueError(
                    f"the {part} of the statistics takes {used.nbytes} bytes, there is room for {capacity}; {remedy}"
                )
        self._weights.publish_some(
            {"lengths": np.array([description.nbytes, content.nbytes]), "description": description, "content": content}
        )

    def _read(self) -> tuple[int, tuple[Tensor, ...] | dict[str, Tensor] | None]:
        """Return the number of the latest version, and its statistics.

        Reads the lengths first, then all of one version; again if that version has other lengths.
        """
        lengths = np.zeros(2, np.int64)
        if self._weights.read_some({"lengths": lengths}) == 0:
            return 0, None
        while True:
            expected = lengths.copy()
            description, content = (np.empty(length, np.uint8) for length in expected)
            version = self._weights.read_some({"lengths": lengths, "description": description, "content": content})
            if (lengths == expected).all():
                return version, _decode(description, content)

    def close(self) -> None:
        """Release the memory. Calling it again has no effect."""
        self._weights.close()

    def __enter__(self) -> SharedObsNormStats:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _block(capacity_bytes: int) -> Layout:
    return Layout(
        {
            "lengths": ("int64", 2),
            "description": ("uint8", _DESCRIPTION_BYTES),
            "content": ("uint8", capacity_bytes),
        }
    )


def _decode(description: NDArray[np.uint8], content: NDArray[np.uint8]) -> tuple[Tensor, ...] | dict[str, Tensor]:
    is_dict, kinds, layout = json.loads(description.tobytes())
    fields = Layout.from_bytes(layout.encode())
    values = {field.name: _as_kind(kind, field, content) for field, kind in zip(fields, kinds, strict=True)}
    return values if is_dict else tuple(values.values())


def _kind(name: str, value: Tensor) -> str:
    if isinstance(value, np.generic):  # first: np.float64 is a float as well
        return "scalar"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, np.ndarray):
        return "array"
    if hasattr(value, "data_ptr"):
        return "tensor"
    raise TypeError(f"statistic {name!r} must be an array, a tensor or a number, found {type(value).__name__}")


def _part(content: NDArray[np.uint8], field: Field) -> NDArray[np.uint8]:
    return content[field.offset : field.offset + field.nbytes]


def _as_kind(kind: str, field: Field, content: NDArray[np.uint8]) -> Tensor:
    if kind == "tensor":
        return tensor_of(field, _part(content, field))
    array = field.view(content.data)
    if kind == "number":
        return array.item()
    return array[()] if kind == "scalar" else array.copy()
