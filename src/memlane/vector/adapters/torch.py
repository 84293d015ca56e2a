"""Tensors: a batch as torch tensors over the same memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np


def as_tensors(batch: Any) -> Any:
    """The arrays of a batch, nested as they are, as torch tensors that share their memory: no copy is made. With
    ``copy=False`` the batch is only lent, and so are the tensors: copy what must outlive the next step, and do not
    write. What torch has no dtype for, and strings, stay what they are. A ``TensorDict`` takes the result as it is."""
    import torch

    if isinstance(batch, dict):
        return {key: as_tensors(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(as_tensors(value) for value in batch)
    if not isinstance(batch, np.ndarray):
        return batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so each time
        try:
            return torch.from_numpy(batch.view(np.ndarray))
        except TypeError:
            return batch
