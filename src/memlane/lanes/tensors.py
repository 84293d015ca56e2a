"""Tensors: numpy arrays and torch tensors as bytes with a name, a dtype and a shape. torch is never imported here: a
tensor is recognised by what it can do.

numpy has no bfloat16 and no float8. Such a tensor is described as a record of one unsigned integer that carries the
dtype's name, so its bits travel unchanged and another process can tell it from a plain integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout
from memlane.core.layout import Field
from memlane.core.rows import address

Tensor = Any
"""A numpy array or a torch tensor."""

_SHARED_NAMES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout that holds these tensors, bit for bit."""
    return Layout({name: _spec(name, tensor) for name, tensor in tensors.items()})


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A copy of a torch tensor's content, whatever its dtype, device and strides; ``tensor_of`` makes it a tensor
    again."""
    twin = _twin(tensor)
    _copy(twin, tensor)
    return _seen_as_bytes(twin)


def tensor_of(field: Field, content: NDArray[np.uint8]) -> Tensor:
    """A new tensor with that content."""
    import torch

    name = field.dtype.names[0] if field.dtype.names else field.dtype.name
    tensor = torch.empty(field.shape, dtype=getattr(torch, name), device="cpu")
    _seen_as_bytes(tensor)[:] = content
    return tensor


def _seen_as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]


class TensorParts(_native.TensorParts):
    """Where the bytes of some tensors are, and where in a block of ``layout`` they belong: what one native copy takes.

    Looked up once and kept for as long as ``same`` or ``fits`` say that it serves. A tensor without a plain address (on
    another device, or not contiguous) goes through a contiguous twin.
    """

    __slots__ = ("twins",)

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], role: str, *, writeable: bool) -> None:
        if tensors.keys() != layout.fields.keys():
            missing = [name for name in layout.fields if name not in tensors]
            unknown = [name for name in tensors if name not in layout]
            raise KeyError(f"{role} must have the names of the layout; missing {missing}, unknown {unknown}")
        self.twins: list[tuple[Tensor, Tensor]] = []
        parts: list[tuple[str, Tensor, int, Tensor, int, int]] = []
        for name, tensor in tensors.items():
            field = layout[name]
            _check(field, name, tensor, role)
            if writeable and isinstance(tensor, np.ndarray | np.generic) and not tensor.flags.writeable:
                raise ValueError(f"{role}[{name!r}] is read-only")
            source = tensor
            if not _is_plain(tensor):
                source = _twin(tensor)
                self.twins.append((tensor, source))
            parts.append((name, tensor, field.offset, source, _address(source), field.nbytes))
        super().__init__(parts, writeable)

    def before_publish(self) -> None:
        for tensor, twin in self.twins:
            _copy(twin, tensor)

    def after_read(self) -> None:
        for tensor, twin in self.twins:
            _copy(tensor, twin)


def _spec(name: str, tensor: Tensor) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if isinstance(tensor, np.ndarray | np.generic):
        return tensor.dtype, tensor.shape
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(f"{name!r} must be a numpy array or a torch tensor, found {type(tensor).__name__}")
    return _numpy_dtype(str(tensor.dtype), tensor.element_size()), tuple(tensor.shape)


@cache
def _numpy_dtype(torch_dtype: str, itemsize: int) -> np.dtype[Any]:
    name = torch_dtype.removeprefix("torch.")
    return np.dtype(name if name in _SHARED_NAMES else [(name, f"u{itemsize}")])


def _check(field: Field, name: str, tensor: Tensor, role: str) -> None:
    dtype, shape = _spec(name, tensor)
    if dtype != field.dtype:
        raise TypeError(f"{role}[{name!r}] must have dtype {field.dtype}, found {dtype}")
    if shape != field.shape:
        raise ValueError(f"{role}[{name!r}] must have shape {list(field.shape)}, found {list(shape)}")


def _address(tensor: Tensor) -> int:
    if isinstance(tensor, np.ndarray):
        return address(tensor)
    return tensor.data_ptr()  # type: ignore[no-any-return]


def _is_plain(tensor: Tensor) -> bool:
    if isinstance(tensor, np.ndarray):
        return tensor.flags.c_contiguous
    if isinstance(tensor, np.generic) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())  # what torch has yet to do to the data when it is read


def _twin(tensor: Tensor) -> Tensor:
    """A contiguous tensor in this process's memory, of the same shape and dtype."""
    if isinstance(tensor, np.ndarray | np.generic):
        return np.empty(tensor.shape, tensor.dtype)
    return tensor.detach().new_empty(tensor.shape, device="cpu")


def _copy(to: Tensor, source: Tensor) -> None:
    if isinstance(to, np.ndarray):
        np.copyto(to, source)
    else:
        to.detach().copy_(source.detach())
