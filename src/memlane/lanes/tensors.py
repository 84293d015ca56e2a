"""Tensors: numpy arrays and torch tensors as bytes with a name, a dtype and a shape.

torch is imported only by ``tensor_of``; elsewhere a tensor is recognised by its ``data_ptr`` method.

numpy has no bfloat16 and no float8. Such a tensor is described as a record of one unsigned integer whose field has the
dtype's name: the bits are copied unchanged, and another process can tell the record from a plain integer.
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
from memlane.core.suggestions import did_you_mean
from memlane.core.tensor_memory import require_dense, require_memory

Tensor = Any
"""A numpy array or a torch tensor."""

_SHARED_NAMES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout with the names, dtypes and shapes of ``tensors``.

    >>> import numpy as np
    >>> layout_of({"w": np.zeros((2, 3), np.float32), "steps": np.array(0)})
    Layout(w: float32[2, 3], steps: int64[]; 128 bytes)
    """
    return Layout({name: _spec(name, tensor) for name, tensor in tensors.items()})


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a copy of a torch tensor's bytes, whatever its dtype, device and strides. ``tensor_of`` is the inverse."""
    require_memory("the tensor", tensor)
    copy = _empty_staging_copy(tensor)
    _copy(copy, tensor)
    return _view_as_bytes(copy)


def array_of(values: Any) -> NDArray[Any]:
    """Return a torch tensor or anything that numpy accepts as an array: a view where that is possible, else a copy.

    A tensor of a dtype that numpy does not have, such as bfloat16, gets the dtype that ``layout_of`` gives.
    """
    if not hasattr(values, "untyped_storage"):
        return np.asarray(values)
    dtype, shape = _spec("the tensor", values)
    if values.device.type == "cpu" and not dtype.names and not _is_lazy(values):
        return np.asarray(values.detach())
    return bytes_of(values).view(dtype).reshape(shape)


def tensor_of(field: Field, content: NDArray[np.uint8]) -> Tensor:
    """Return a new torch tensor of the field's dtype and shape with these bytes."""
    import torch

    name = field.dtype.names[0] if field.dtype.names else field.dtype.name
    tensor = torch.empty(field.shape, dtype=getattr(torch, name), device="cpu")
    _view_as_bytes(tensor)[:] = content
    return tensor


def _view_as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]


class TensorParts(_native.TensorParts):
    """The addresses of tensors and their offsets in a block of ``layout``: the argument of one native copy.

    Built once and reused while ``same`` or ``fits`` is true. A tensor that cannot be copied from its address (on
    another device, or not contiguous) is copied through a contiguous staging copy.
    """

    __slots__ = ("staging",)

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], role: str, *, writeable: bool) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(f"{role} must be a dict of arrays or tensors, found {type(tensors).__name__}")
        if tensors.keys() != layout.fields.keys():
            raise KeyError(_name_mismatch(role, layout, tensors))
        self.staging: list[tuple[Tensor, Tensor]] = []
        """Pairs of a tensor and its staging copy."""
        parts: list[tuple[str, Tensor, int, Tensor, int, int]] = []
        for name, tensor in tensors.items():
            field = layout[name]
            _check(field, name, tensor, role)
            require_memory(f"{role}[{name!r}]", tensor)
            # A record that was taken out of an array is a scalar too, although numpy lets it be written to.
            if writeable and (
                isinstance(tensor, np.generic) or (isinstance(tensor, np.ndarray) and not tensor.flags.writeable)
            ):
                raise ValueError(f"{role}[{name!r}] is read-only; pass a writeable array")
            if writeable and _shares_elements(tensor):
                raise ValueError(
                    f"{role}[{name!r}] has elements that share memory, as np.broadcast_to and torch.expand make them; "
                    "pass a copy, which has memory for each"
                )
            source = tensor
            if not _is_plain(tensor):
                source = _empty_staging_copy(tensor)
                self.staging.append((tensor, source))
            parts.append((name, tensor, field.offset, source, _address(source), field.nbytes))
        super().__init__(parts, writeable)

    def before_publish(self) -> None:
        """Copy tensors into their staging copies."""
        for tensor, copy in self.staging:
            _copy(copy, tensor)

    def after_read(self) -> None:
        """Copy staging copies into their tensors."""
        for tensor, copy in self.staging:
            _copy(tensor, copy)


def _name_mismatch(role: str, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    missing = [name for name in layout.fields if name not in tensors]
    unknown = [name for name in tensors if name not in layout]
    hint = did_you_mean(unknown[0], missing) if unknown else ""
    return f"{role} must have the names of the layout; missing {missing}, unknown {unknown}{hint}"


def _spec(name: str, tensor: Tensor) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if isinstance(tensor, np.ndarray | np.generic):
        return tensor.dtype, tensor.shape
    if not hasattr(tensor, "data_ptr"):
        hint = ""
        if isinstance(tensor, Mapping):
            hint = f"; flatten nested dicts, for example {{'{name}.{next(iter(tensor), 'key')}': ...}}"
        elif isinstance(tensor, tuple | list):
            hint = "; pass the tensors themselves, not their dtypes and shapes"
        raise TypeError(f"{name!r} must be a numpy array or a torch tensor, found {type(tensor).__name__}{hint}")
    require_dense(repr(name), tensor)
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
    """Return whether the tensor's bytes can be copied from its address."""
    if isinstance(tensor, np.ndarray):
        return tensor.flags.c_contiguous
    if isinstance(tensor, np.generic) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return not _is_lazy(tensor)


def _is_lazy(tensor: Tensor) -> bool:
    """Return whether torch negates or conjugates a tensor only when it is read."""
    return bool(tensor.is_neg() or tensor.is_conj())


def _shares_elements(tensor: Tensor) -> bool:
    """Return whether several elements lie at one address, so that they cannot be written one by one."""
    strides = tensor.strides if isinstance(tensor, np.ndarray) else tensor.stride()
    shared = any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, strides, strict=True))
    return shared and 0 not in tensor.shape


def _empty_staging_copy(tensor: Tensor) -> Tensor:
    """Return an uninitialised contiguous CPU tensor of the same shape and dtype."""
    if isinstance(tensor, np.ndarray | np.generic):
        return np.empty(tensor.shape, tensor.dtype)
    return tensor.detach().new_empty(tensor.shape, device="cpu")


def _copy(destination: Tensor, source: Tensor) -> None:
    if isinstance(destination, np.ndarray):
        np.copyto(destination, source)
    else:
        destination.detach().copy_(source.detach())
