"""Tensor memory: the check that the bytes of a torch tensor exist before native code, or numpy, reads their address.

torch is not imported here: a torch tensor is recognised by its ``untyped_storage`` method.
"""

from __future__ import annotations

from typing import Any


def require_memory(label: str, tensor: Any) -> None:
    """Raise unless ``tensor`` is no torch tensor, or a dense one whose storage has all of its elements.

    A tensor describes a storage, and the storage can be smaller: FSDP resizes the storages of parameters that it does
    not need to 0 bytes. Their address is that of other memory, or of none.
    """
    if not hasattr(tensor, "untyped_storage"):
        return
    require_dense(label, tensor)
    if tensor.numel() == 0:
        return
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # also a FakeTensor, which says "cpu"
        raise TypeError(f"{label} must have data, found {_kind(tensor)}; pass a tensor on a real device")
    needed = _bytes_in_storage(tensor)
    if storage.nbytes() < needed:
        raise ValueError(
            f"{label} needs {needed} bytes for its shape {list(tensor.shape)}, but its storage has {storage.nbytes()}: "
            "it was resized, as FSDP does with parameters while they are sharded; gather it first"
        )
    if not _address(storage):
        raise TypeError(f"{label} must have data of its own, found {_kind(tensor)}; pass a plain torch.Tensor")


def require_dense(label: str, tensor: Any) -> None:
    """Raise unless the bytes of a torch tensor are its elements."""
    if tensor.is_nested:
        raise TypeError(f"{label} must have one shape, found a nested tensor; use torch.nested.to_padded_tensor")
    if str(tensor.layout) != "torch.strided":
        raise TypeError(f"{label} must be dense, found a tensor of layout {tensor.layout}; use tensor.to_dense()")
    if tensor.is_quantized:
        raise TypeError(
            f"{label} must not be quantised, found {tensor.dtype}: its scale and zero point would be lost; use "
            "tensor.dequantize(), or tensor.int_repr() and share the scale yourself"
        )


def _bytes_in_storage(tensor: Any) -> int:
    """The number of bytes from the beginning of the storage to the end of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def _address(storage: Any) -> int:
    try:
        return int(storage.data_ptr())
    except RuntimeError:  # the storage of a tensor that only wraps others, such as a DTensor
        return 0


def _kind(tensor: Any) -> str:
    return f"a {type(tensor).__name__} on the device {str(tensor.device)!r}"
