"""Column of Text: the code points of each string, and how many there are.

The length is stored, not marked by a last character: ``""`` is a value like others, and what a longer string has left
behind is never seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Text
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.spaces.capacity import Capacities, split
from memlane.spaces.column import Column, SinglesColumn, column_of, fields_of, find
from memlane.spaces.paths import BARE, join

# Code points as the dtype "<i4" has them; a charset may have halves of surrogate pairs in it.
_CODEC = ("utf-32-le", "surrogatepass")


class TextColumn(SinglesColumn):
    def __init__(self, space: Text, codes: NDArray[Any], lengths: NDArray[Any], path: str) -> None:
        super().__init__(space, len(codes), path)
        self._codes = codes
        self._lengths = lengths
        self._shortest = space.min_length
        self._longest = space.max_length
        self._charset = space.character_set

    def convert(self, value: Any) -> NDArray[Any]:
        if not isinstance(value, str):
            raise TypeError(f"at {self.path!r}: expected a string, found {type(value).__name__}")
        if not self._shortest <= len(value) <= self._longest:
            raise ValueError(
                f"at {self.path!r}: expected {self._shortest} to {self._longest} characters, "
                f"found {len(value)} in {value[:40]!r}"
            )
        if not self._charset.issuperset(value):
            strange = next(character for character in value if character not in self._charset)
            raise ValueError(f"at {self.path!r}: character {strange!r} of {value[:40]!r} is not in the space's charset")
        return np.frombuffer(value.encode(*_CODEC), "<i4")

    def store(self, index: int, content: Any) -> None:
        self._codes[index, : len(content)] = content
        self._lengths[index] = len(content)

    def load(self, index: int, copy: bool) -> str:  # noqa: ARG002  a string is always a copy
        return self._codes[index, : self._lengths[index]].tobytes().decode(*_CODEC)


@fields_of.register(Text)
def _text_fields(space: Text, n: int, capacity: Capacities = None, prefix: str = "") -> dict[str, FieldSpec]:
    split(capacity, [], prefix or BARE)
    return {
        join(prefix, "codes"): (np.dtype("<i4"), (n, space.max_length)),
        join(prefix, "length"): (np.dtype("<i4"), (n,)),
    }


@column_of.register(Text)
def _text_column(space: Text, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Column:
    codes, lengths = (find(arrays, name, spec) for name, spec in fields_of(space, 0, None, prefix).items())
    return TextColumn(space, codes, lengths, prefix)
