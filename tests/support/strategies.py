"""Random dtypes, shapes and layouts for hypothesis."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import strategies as st

from memlane.core import Layout

strings = hnp.byte_string_dtypes(min_len=1, max_len=20) | hnp.unicode_string_dtypes(min_len=1, max_len=20)
scalars: st.SearchStrategy[np.dtype[Any]] = st.one_of(hnp.scalar_dtypes(), strings)  # both byte orders
dtypes: st.SearchStrategy[np.dtype[Any]] = st.one_of(
    scalars, hnp.nested_dtypes(scalars, max_leaves=3, max_itemsize=256), st.just(np.dtype("V5"))
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
fields = st.dictionaries(st.text(min_size=1, max_size=12), st.tuples(dtypes, shapes), max_size=5)
layouts = fields.map(Layout)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["<f4", "|b1", "O", "|O", "<M8[ns]", "S", "U0", "V", "f4,f4", "(2,3)f8", "a", "T", "<i9", ">U3"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
json_shapes = json_values | st.lists(st.integers(-2, 2**64), max_size=3)


# ------------------------------------------------------------------------------------------------- arrays and tensors


def _stepped(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = np.zeros([2 * extent + 1 for extent in array.shape], array.dtype)
    view = wide[(*(slice(1, None, 2) for _ in array.shape), ...)]
    view[...] = array
    return view


def _negative(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    backwards = (*(slice(None, None, -1) for _ in array.shape), ...)
    return np.array(array[backwards])[backwards]


def _unaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = bytearray(array.nbytes + 1)
    view: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory, 1)
    view[...] = array
    return view


class Subclass(np.ndarray[Any, Any]):
    """A class of arrays, as np.memmap is."""


MEMORY: dict[str, Any] = {
    "contiguous": np.array,
    "in Fortran's order": lambda array: np.array(array, order="F"),
    "stepped": _stepped,
    "with negative strides": _negative,
    "unaligned": _unaligned,
    "transposed": lambda array: np.array(array.T).T,
    "of a subclass": lambda array: array.copy().view(Subclass),
}
"""Functions that copy an array into memory of this kind; the copy can be written to."""
READ_ONLY_MEMORY: dict[str, Any] = {
    "read-only": lambda array: (
        np.frombuffer(array.tobytes() or b"\0", np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
    ),
    # Only where that keeps the dtype: a scalar has the byte order of the machine, and a string its own length.
    "a scalar": lambda array: array[()] if array[()].dtype == array.dtype else array,
}
"""The same, of kinds that cannot be written to."""
memory = st.sampled_from(sorted(MEMORY))
any_memory = st.sampled_from(sorted(MEMORY | READ_ONLY_MEMORY))


def in_memory(array: np.ndarray[Any, Any], kind: str) -> Any:
    """A copy of ``array`` in memory of this kind."""
    return (MEMORY | READ_ONLY_MEMORY)[kind](array)


@st.composite
def contents(draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of random bytes, NaNs of all kinds included. Bools are 0 or 1 and strings are valid."""
    nbytes = dtype.itemsize * int(np.prod(shape))
    random = draw(st.randoms(use_true_random=False))
    if dtype.kind in "biufcmMV" and not dtype.names:
        data = random.randbytes(nbytes) if dtype.kind != "b" else bytes(random.choices(range(2), k=nbytes))
        return np.frombuffer(bytearray(data) or bytearray(1), np.uint8)[:nbytes].view(dtype).reshape(shape)
    return draw(hnp.arrays(dtype, shape))
