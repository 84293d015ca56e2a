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
