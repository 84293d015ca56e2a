"""torch: a batch as tensors over the same memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np


def as_tensors(batch: Any) -> Any:
    """Convert the arrays of a batch, nested as they are, to torch tensors that share their memory.

    With ``copy=False`` the batch is on loan until the next step, and so are the tensors: copy what must outlive it, and
    do not write to them. Strings and arrays of a dtype that torch does not have stay as they are. A ``TensorDict``
    takes the result as it is."""
    import torch

    if isinstance(batch, dict):
        return {key: as_tensors(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(as_tensors(value) for value in batch)
    if not isinstance(batch, np.ndarray):
        return batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and warns each time
        try:
            return torch.from_numpy(batch.view(np.ndarray))
        except TypeError:
            return batch
