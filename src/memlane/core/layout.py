"""Layout: named fields, each with a dtype and a shape, placed one after the other on cache lines of their own.

A layout is pure description: it is placed without memory, hashed, written into a segment's header, read back by another
process and compared. The offsets are never read from anywhere: they follow from the fields, so a hostile header cannot
point outside its segment.

    >>> layout = Layout({"obs": ("float32", (8, 4)), "done": (bool, 8)})
    >>> [(field.name, field.offset, field.nbytes) for field in layout]
    [('obs', 0, 128), ('done', 128, 8)]
    >>> Layout.from_bytes(layout.to_bytes()) == layout
    True
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from numpy.typing import DTypeLike, NDArray

from memlane.core.errors import LayoutError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT = 64
"""Bytes. A field begins on a cache line of its own, so two processes that write two fields never fight over one."""

LARGEST = 2**63 - 1
"""Bytes. The largest offset that the kernel and numpy can express."""

LONGEST_DESCRIPTION = 2**26
"""Bytes. Some 500,000 fields; more is a mistake, and in a header that was tampered with, an attack."""

SIGNAL = np.dtype({"names": ["value", "gate"], "formats": ["<i8", "<u4"], "offsets": [0, 8], "itemsize": 64})
"""The dtype of a field that is a signal, or an array of them: a counter and the gate that waiters sleep on."""

FieldSpec = tuple[DTypeLike, int | Iterable[int]]


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a layout. ``offset`` counts from the layout's first byte."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, buffer: Buffer, base: int = 0) -> NDArray[Any]:
        """The field as an array in ``buffer``, where the layout begins at byte ``base``."""
        return np.ndarray(self.shape, self.dtype, memoryview(buffer), base + self.offset)

    def __str__(self) -> str:
        return f"{self.name}: {'signal' if self.dtype == SIGNAL else self.dtype}{list(self.shape)}"


class Layout:
    """Named fields with their places. Immutable; equal when names, order, dtypes and shapes are equal."""

    __slots__ = ("_bytes", "fields", "hash", "nbytes")

    fields: dict[str, Field]
    nbytes: int
    hash: int

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        if not isinstance(fields, Mapping):
            raise LayoutError(f"expected a dict of fields, name: (dtype, shape), found {_excerpt(fields)}")
        placed: dict[str, Field] = {}
        offset = 0
        for name, spec in fields.items():
            field = _place(name, spec, offset)
            offset = _align(offset + field.nbytes)
            if offset > LARGEST:
                raise LayoutError(
                    f"the layout ends at byte {offset} after field {name!r}, but shared memory ends at {LARGEST}; "
                    "lower its shape"
                )
            placed[name] = field
        self.fields = placed
        self.nbytes = offset
        self._bytes = json.dumps(
            [[field.name, dtype_to_descr(field.dtype), field.shape] for field in placed.values()],
            separators=(",", ":"),
        ).encode()
        if len(self._bytes) > LONGEST_DESCRIPTION:
            raise LayoutError(
                f"{len(placed)} fields take {len(self._bytes)} bytes to describe; {LONGEST_DESCRIPTION} are possible"
            )
        self.hash = int.from_bytes(hashlib.blake2b(self._bytes, digest_size=8).digest(), "little")

    def to_bytes(self) -> bytes:
        """The description that ``from_bytes`` reads, the same on every machine."""
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Read a description. Trusts nothing in it: whatever is wrong is a ``LayoutError``."""
        try:
            entries = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"expected a list of fields in JSON, found {_excerpt(data)}: {error}") from None
        if not isinstance(entries, list):
            raise LayoutError(f"expected a list of fields, found {_excerpt(data)}")
        fields: dict[str, FieldSpec] = {}
        for position, entry in enumerate(entries):
            match entry:
                case [str(name), descr, list(shape)] if name not in fields:
                    try:
                        fields[name] = (descr_to_dtype(_as_descr(descr)), shape)
                    except Exception as error:  # numpy's parser has no list of what it throws at hostile text
                        raise LayoutError(f"field {name!r} has no dtype that numpy knows: {error}") from None
                case _:
                    raise LayoutError(
                        f"expected [name, dtype, shape] with a new name as field {position}, found {_excerpt(entry)}"
                    )
        return cls(fields)

    def views(self, buffer: Buffer, base: int = 0) -> dict[str, NDArray[Any]]:
        """All fields as arrays in ``buffer``, where the layout begins at byte ``base``."""
        return {name: field.view(buffer, base) for name, field in self.fields.items()}

    def difference(self, other: Layout) -> str:
        """In words, the first thing in which ``other`` differs from this layout; empty when nothing does."""
        for name, field in self.fields.items():
            found = other.fields.get(name)
            if found is None:
                return f"expected a field {name!r}, found only {list(other.fields)}"
            if (found.dtype, found.shape) != (field.dtype, field.shape):
                return f"expected field {field}, found {found}"
        for name in other.fields:
            if name not in self.fields:
                return f"expected no field {name!r}, found {other.fields[name]}"
        if list(self.fields) != list(other.fields):
            return f"expected the fields in the order {list(self.fields)}, found {list(other.fields)}"
        return ""

    def __getitem__(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            raise KeyError(f"there is no field {name!r}; the fields are {list(self.fields)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields.values())

    def __len__(self) -> int:
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return self.hash

    def __reduce__(self) -> tuple[object, ...]:
        return (Layout.from_bytes, (self._bytes,))

    def __repr__(self) -> str:
        return f"Layout({', '.join(map(str, self))}; {self.nbytes} bytes)"


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _place(name: str, spec: FieldSpec, offset: int) -> Field:
    if not isinstance(name, str) or not name:
        raise LayoutError(f"a field's name must be a non-empty string, found {name!r}")
    try:
        given_dtype, given_shape = () if isinstance(spec, str) else spec  # "f4" would be the pair "f", "4"
    except (TypeError, ValueError):
        raise LayoutError(f"field {name!r} must be a pair (dtype, shape), found {_excerpt(spec)}") from None
    dtype, inner_shape = _fixed_dtype(name, given_dtype)
    field = Field(name, dtype, _fixed_shape(name, given_shape) + inner_shape, offset)
    if len(field.shape) > 32:
        raise LayoutError(f"field {name!r} has {len(field.shape)} dimensions; 32 are possible")
    # Zero-size fields must not smuggle an impossible extent past the product: numpy refuses to view them.
    span = dtype.itemsize * math.prod(max(extent, 1) for extent in field.shape)
    if span > LARGEST:
        raise LayoutError(
            f"field {name!r} of dtype {dtype} and shape {list(field.shape)} would span {span} bytes; "
            f"the most that can be addressed is {LARGEST}"
        )
    return field


def _fixed_dtype(name: str, given: DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype in its plain form, and the shape that a sub-array dtype such as ``(float, (3,))`` adds."""
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except (TypeError, ValueError, SyntaxError) as error:
        raise LayoutError(f"field {name!r}: {_excerpt(given)} is not a dtype: {error}") from None
    inner_shape: tuple[int, ...] = ()
    if dtype.subdtype is not None:
        dtype, inner_shape = dtype.subdtype
    if dtype.hasobject or dtype.kind == "T":
        raise LayoutError(
            f"field {name!r} has dtype {dtype}, whose values are pointers into one process; "
            "shared memory takes numbers, bools, and strings of a fixed length"
        )
    if dtype.itemsize == 0:
        raise LayoutError(f"field {name!r} has dtype {given!r} of no size; give a length, as in 'S16' or 'U16'")
    described = None if dtype.isbuiltin == 2 else _described(dtype)
    if described is None:
        raise LayoutError(
            f"field {name!r} has dtype {dtype}, which another process could not recognise by its description; "
            f"store it under a numpy dtype of {dtype.itemsize} bytes and view it"
        )
    return described, inner_shape


def _described(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype as other processes have it, from numpy's description; None if that is not the same, as with fields that
    overlap or lie out of order. Of a plain dtype it is numpy's one object for it, by which the native side knows it at
    once; one that was pickled is a copy of that."""
    try:
        described: np.dtype[Any] = descr_to_dtype(dtype_to_descr(dtype))
    except (TypeError, ValueError):
        return None
    return described if described == dtype else None


def _fixed_shape(name: str, given: int | Iterable[int]) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in (given if isinstance(given, Iterable) else (given,)))
    except TypeError:
        raise LayoutError(f"field {name!r} must have a shape of whole numbers, found {_excerpt(given)}") from None
    if any(extent < 0 for extent in extents):
        raise LayoutError(f"field {name!r} has shape {list(extents)}; no extent may be negative")
    return extents


def _as_descr(value: Any) -> Any:
    """JSON has no tuples, numpy's descriptions of structured dtypes insist on them."""
    if isinstance(value, str):
        return value
    return [
        # A name that is a list is a title and a name.
        (tuple(name) if isinstance(name, list) else name, _as_descr(descr), *(tuple(extents) for extents in shape))
        for name, descr, *shape in value
    ]


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
