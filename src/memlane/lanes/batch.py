"""Batch: rows sampled from a replay, as one block of memory in which every field is a view.

With one block, a batch moves to a device in one copy, and a gather touches one memory range per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout

Memory = NDArray[np.uint8] | _native.Block
"""What a batch can be placed in."""


def packed(layout: Layout) -> np.dtype[Any]:
    """Return the dtype of one row: the fields aligned, those with the largest alignment first to avoid padding."""
    return packed_fields([(field.name, field.dtype, field.shape) for field in layout])


def packed_fields(
    fields: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]], begin: int = 0, multiple: int = 8
) -> np.dtype[Any]:
    """Return a dtype with these fields, starting at byte ``begin``. Its size is a multiple of ``multiple`` bytes."""
    offsets: dict[str, int] = {}
    fields = list(fields)
    end = begin
    for name, dtype, shape in sorted(fields, key=lambda field: -alignment_of(field[1])):
        offsets[name] = _round_up(end, alignment_of(dtype))
        end = offsets[name] + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    names = [name for name, _, _ in fields]
    widest = max([multiple, *(alignment_of(dtype) for _, dtype, _ in fields)])
    formats = [(dtype, shape) for _, dtype, shape in fields]
    return np.dtype(
        {
            "names": names,
            "formats": formats,
            "offsets": [offsets[name] for name in names],
            "itemsize": max(_round_up(end, widest), widest),
        }
    )


def alignment_of(dtype: np.dtype[Any]) -> int:
    """Return the alignment that both numpy and torch accept, in bytes."""
    # torch aligns a complex number to its size, numpy to half of it.
    return dtype.itemsize if dtype.kind == "c" else dtype.alignment


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Batch(dict[str, NDArray[Any]]):
    """A sampled batch: a dict of arrays that are views of one block of memory.

    ``shape`` is (rows,), or (rows, length) for sequences. ``ReplaySampler`` lists the fields.

        >>> import numpy as np
        >>> from memlane.lanes import Replay
        >>> with Replay({"x": ("float32", 2)}, capacity=10) as replay:
        ...     _ = replay.add({"x": np.ones((5, 2), np.float32)})
        ...     batch = replay.sampler(seed=0).sample(3)
        >>> batch.shape, batch["x"].shape, batch.torch()["x"].sum().item()
        ((3,), (3, 2), 6.0)
    """

    __slots__ = ("_tensors", "block", "dtype", "shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], memory: Memory | None = None) -> None:
        # Each field is an array over this one, which keeps `memory` alive.
        records: NDArray[Any] = np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]
        assert dtype.names is not None
        for name in dtype.names:  # 0.4 us less than a generator given to dict()
            self[name] = records[name]
        self.dtype = dtype
        self.shape = shape
        self._tensors: dict[str, Any] | None = None
        self.block: NDArray[np.uint8] = records.reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)

    def torch(self, device: str = "cpu") -> dict[str, Any]:
        """Return the fields as torch tensors: on the CPU views of this block, on a device views of one copy of it."""
        if device != "cpu":
            return tensors(self.dtype, self.shape, self.block, device)
        if self._tensors is None:
            import torch

            self._tensors = {name: torch.from_numpy(array) for name, array in self.items()}
        return dict(self._tensors)


def tensors(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    block: NDArray[np.uint8],
    device: str = "cpu",
    *,
    non_blocking: bool = False,
) -> dict[str, Any]:
    """Return the fields of a block, or of one copy of it on ``device``, as torch tensors."""
    import torch

    moved = torch.from_numpy(block).to(device, non_blocking=non_blocking)
    return {name: _tensor(moved, offset, field, shape) for name, (field, offset) in _columns(dtype).items()}


def _columns(dtype: np.dtype[Any]) -> Mapping[str, tuple[np.dtype[Any], int]]:
    assert dtype.fields is not None
    return {name: (field[0], field[1]) for name, field in dtype.fields.items()}


def _tensor(block: Any, offset: int, field: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    import torch

    base, inner = (field.base, field.shape) if field.subdtype else (field, ())
    count = int(np.prod(inner, dtype=np.int64))
    part = block[:, offset : offset + base.itemsize * count].view(getattr(torch, base.name))
    return part.reshape(*shape, *inner) if not inner else part.unflatten(1, inner).unflatten(0, shape)
