"""Batch: rows that were drawn from a replay, as one block of memory in which every field is a view.

One block, because then a batch is one copy away from any device, and one gather touches one place for each row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane.core import Layout


def packed(layout: Layout) -> np.dtype[Any]:
    """The fields of one row side by side, each where its dtype likes to begin; the widest first, so nothing is lost
    between them."""
    return packed_fields([(field.name, field.dtype, field.shape) for field in layout])


def packed_fields(
    fields: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]], begin: int = 0, multiple: int = 8
) -> np.dtype[Any]:
    """A dtype with these fields, the first of them ``begin`` bytes from the start; ``multiple`` bytes divide its
    size."""
    places: dict[str, int] = {}
    fields = list(fields)
    at = begin
    for name, dtype, shape in sorted(fields, key=lambda field: -alignment_of(field[1])):
        at = _up(at, alignment_of(dtype))
        places[name] = at
        at += dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    names = [name for name, _, _ in fields]
    widest = max([multiple, *(alignment_of(dtype) for _, dtype, _ in fields)])
    formats = [(dtype, shape) for _, dtype, shape in fields]
    return np.dtype(
        {
            "names": names,
            "formats": formats,
            "offsets": [places[name] for name in names],
            "itemsize": max(_up(at, widest), widest),
        }
    )


def alignment_of(dtype: np.dtype[Any]) -> int:
    # torch wants a complex number at a multiple of its whole size; numpy is content with half of it.
    return dtype.itemsize if dtype.kind == "c" else dtype.alignment


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Batch(dict[str, NDArray[Any]]):
    """A dict of arrays over one block. ``shape`` is (rows,), or (rows, length) for sequences."""

    __slots__ = ("_tensors", "block", "dtype", "shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], memory: NDArray[np.uint8] | None = None) -> None:
        records = np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)
        assert dtype.names is not None
        super().__init__((name, records[name]) for name in dtype.names)
        self.dtype = dtype
        self.shape = shape
        self._tensors: dict[str, Any] | None = None
        self.block: NDArray[np.uint8] = records.reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)

    def torch(self, device: str = "cpu") -> dict[str, Any]:
        """The same fields as tensors: on the CPU views of this block, on a device views of one copy of it."""
        if device != "cpu":
            return tensors(self.dtype, self.shape, self.block, device)
        if self._tensors is None:
            import torch

            self._tensors = {name: torch.from_numpy(array) for name, array in self.items()}
        return dict(self._tensors)


class Spares:
    """Memory of batches that nobody has any more, for the next ones. New memory costs a page fault for every 4 KB: a
    batch of 4096 rows in it takes twice as long."""

    MOST = 4

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def of(self, nbytes: int) -> NDArray[np.uint8]:
        for block in self._blocks:
            # Held by this list, by the loop and by the call: whoever has a view of it would be one more.
            if block.nbytes == nbytes and sys.getrefcount(block) == 3:
                return block
        block = np.empty(nbytes, np.uint8)
        self._blocks = [block, *self._blocks[: self.MOST - 1]]
        return block


def tensors(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    block: NDArray[np.uint8],
    device: str = "cpu",
    *,
    non_blocking: bool = False,
) -> dict[str, Any]:
    """Views of a block, or of one copy of it on ``device``, as torch tensors."""
    import torch

    moved = torch.from_numpy(block).to(device, non_blocking=non_blocking)
    return {name: _tensor(moved, offset, field, shape) for name, (field, offset) in _places(dtype).items()}


def _places(dtype: np.dtype[Any]) -> Mapping[str, tuple[np.dtype[Any], int]]:
    assert dtype.fields is not None
    return {name: (field[0], field[1]) for name, field in dtype.fields.items()}


def _tensor(block: Any, offset: int, field: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    import torch

    base, inner = (field.base, field.shape) if field.subdtype else (field, ())
    count = int(np.prod(inner, dtype=np.int64))
    part = block[:, offset : offset + base.itemsize * count].view(getattr(torch, base.name))
    return part.reshape(*shape, *inner) if not inner else part.unflatten(1, inner).unflatten(0, shape)
