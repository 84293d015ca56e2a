"""Column of a Text space: the code points of each string, and its length.

The length is stored, not marked by a terminating character: an empty string needs no special case, and the end of a
longer string that was stored before is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Text
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split_capacity
from memlane.spaces.column import Column, PerRowColumn, column_of, fields_of, find_array
from memlane.spaces.paths import ROOT_NAME, join_path

# Code points in the format of dtype "<i4". A charset may contain halves of surrogate pairs.
_CODEC = ("utf-32-le", "surrogatepass")


class TextColumn(PerRowColumn):
    def __init__(self, space: Text, codes: NDArray[Any], lengths: NDArray[Any], path: str) -> None:
        super().__init__(space, len(codes), path)
        self._codes = codes
        self._lengths = lengths
        self._min_length = space.min_length
        self._max_length = space.max_length
        self._charset = space.character_set

    def convert(self, value: Any) -> NDArray[Any]:
        if not isinstance(value, str):
            raise TypeError(f"at {self.path!r}: expected a string, found {type(value).__name__}")
        if not self._min_length <= len(value) <= self._max_length:
            raise ValueError(
                f"at {self.path!r}: expected {self._min_length} to {self._max_length} characters, "
                f"found {len(value)} in {value[:40]!r}"
            )
        if not self._charset.issuperset(value):
            invalid = next(character for character in value if character not in self._charset)
            raise ValueError(f"at {self.path!r}: character {invalid!r} of {value[:40]!r} is not in the space's charset")
        return np.frombuffer(value.encode(*_CODEC), "<i4")

    def store(self, index: int, content: Any) -> None:
        self._codes[index, : len(content)] = content
        self._lengths[index] = len(content)

    def load(self, index: int, copy: bool) -> str:  # noqa: ARG002  a string is always a copy
        return self._codes[index, : self._lengths[index]].tobytes().decode(*_CODEC)


@fields_of.register(Text)
def _text_fields(space: Text, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    split_capacity(capacity, [], prefix or ROOT_NAME)
    return {
        join_path(prefix, "codes"): (np.dtype("<i4"), (n, space.max_length)),
        join_path(prefix, "length"): (np.dtype("<i4"), (n,)),
    }


@column_of.register(Text)
def _text_column(space: Text, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    codes, lengths = (find_array(arrays, name, spec) for name, spec in fields_of(space, 0, None, prefix).items())
    return TextColumn(space, codes, lengths, prefix)
