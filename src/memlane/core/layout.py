"""Layout: named fields, each with a dtype and a shape, one after the other, each on its own cache lines.

A layout owns no memory. It is hashed, written into a segment's header, and read and compared by other processes.
Offsets are never stored: they follow from the fields, so a corrupt or hostile header cannot point outside its segment.
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
from memlane.core.suggestions import did_you_mean, excerpt

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT = 64
"""Bytes. Each field begins on its own cache line, so that writers of two fields never contend for one line."""

MAX_BYTES = 2**63 - 1
"""The largest offset in bytes that the kernel and numpy can express."""

MAX_DESCRIPTION_BYTES = 2**26
"""The largest description in bytes: about 500,000 fields. A header that claims more is corrupt or hostile."""

SIGNAL = np.dtype({"names": ["value", "gate"], "formats": ["<i8", "<u4"], "offsets": [0, 8], "itemsize": 64})
"""The dtype of a field of signals: for each one a counter, and the futex word that waiters sleep on."""

FieldSpec = tuple[DTypeLike, int | Iterable[int]]
"""The description of a field: ``(dtype, shape)``. ``()`` is the shape of a scalar, ``8`` is short for ``(8,)``."""


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a layout."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the layout to the start of the field."""

    @property
    def nbytes(self) -> int:
        """Size of the field in bytes, without padding."""
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, buffer: Buffer, base: int = 0) -> NDArray[Any]:
        """The field as an array in ``buffer``, where the layout begins at byte ``base``."""
        return np.ndarray(self.shape, self.dtype, memoryview(buffer), base + self.offset)

    def __str__(self) -> str:
        return f"{self.name}: {'signal' if self.dtype == SIGNAL else self.dtype}{list(self.shape)}"


class Layout:
    """Named fields with their dtypes, shapes and offsets: what a ``Segment`` contains.

    Build one from a dict of ``name: (dtype, shape)``. It is immutable, pickles, and needs no memory. Two layouts are
    equal if names, order, dtypes and shapes are equal.

        >>> layout = Layout({"obs": ("float32", (8, 4)), "done": (bool, 8), "ready": (SIGNAL, ())})
        >>> [(field.name, field.offset, field.nbytes) for field in layout]
        [('obs', 0, 128), ('done', 128, 8), ('ready', 192, 64)]
        >>> Layout.from_bytes(layout.to_bytes()) == layout
        True

    Fields hold numbers, bools, fixed-length strings and structures of them, and ``SIGNAL``. A field that another
    process could not read, such as a field of Python objects, raises ``LayoutError``.
    """

    __slots__ = ("_bytes", "fields", "hash", "nbytes")

    fields: dict[str, Field]
    """The fields by name, in order."""
    nbytes: int
    """Size of all fields in bytes, with padding."""
    hash: int
    """A 64-bit hash of the description, the same on every machine."""

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        if not isinstance(fields, Mapping):
            raise LayoutError(f"expected a dict of fields, name: (dtype, shape), found {excerpt(fields)}")
        self.fields = {}
        offset = 0
        for name, spec in fields.items():
            field = _make_field(name, spec, offset)
            offset = _align(offset + field.nbytes)
            if offset > MAX_BYTES:
                raise LayoutError(
                    f"field {name!r} ends at byte {offset}, but the largest possible offset is {MAX_BYTES}; "
                    "reduce its shape"
                )
            self.fields[name] = field
        self.nbytes = offset
        self._bytes = json.dumps(
            [[field.name, dtype_to_descr(field.dtype), field.shape] for field in self.fields.values()],
            separators=(",", ":"),
        ).encode()
        if len(self._bytes) > MAX_DESCRIPTION_BYTES:
            raise LayoutError(
                f"the description of {len(self.fields)} fields has {len(self._bytes)} bytes, "
                f"at most {MAX_DESCRIPTION_BYTES} are possible; use fewer fields"
            )
        self.hash = int.from_bytes(hashlib.blake2b(self._bytes, digest_size=8).digest(), "little")

    def to_bytes(self) -> bytes:
        """The description that ``from_bytes`` reads. It is the same on every machine."""
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Read a description. Its content is not trusted: invalid bytes raise ``LayoutError``."""
        try:
            entries = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"expected a list of fields in JSON, found {excerpt(data)}: {error}") from None
        if not isinstance(entries, list):
            raise LayoutError(f"expected a list of fields, found {excerpt(data)}")
        fields: dict[str, FieldSpec] = {}
        for position, entry in enumerate(entries):
            match entry:
                case [str(name), descr, list(shape)] if name not in fields:
                    try:
                        fields[name] = (descr_to_dtype(_as_descr(descr)), shape)
                    except Exception as error:  # numpy does not document what its parser raises
                        raise LayoutError(f"field {name!r} has a dtype that numpy does not know: {error}") from None
                case _:
                    raise LayoutError(
                        f"expected [name, dtype, shape] with a unique name as field {position}, found {excerpt(entry)}"
                    )
        return cls(fields)

    def views(self, buffer: Buffer, base: int = 0) -> dict[str, NDArray[Any]]:
        """All fields as arrays in ``buffer``, where the layout begins at byte ``base``."""
        return {name: field.view(buffer, base) for name, field in self.fields.items()}

    def difference(self, other: Layout) -> str:
        """The first difference between ``other`` and this layout, as a sentence; empty if they are equal."""
        for name, field in self.fields.items():
            match = other.fields.get(name)
            if match is None:
                return f"expected a field {name!r}, found only {list(other.fields)}"
            if (match.dtype, match.shape) != (field.dtype, field.shape):
                return f"expected field {field}, found {match}"
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
            raise KeyError(
                f"there is no field {name!r}; the fields are {list(self.fields)}{did_you_mean(str(name), self.fields)}"
            ) from None

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


def _make_field(name: str, spec: FieldSpec, offset: int) -> Field:
    if not isinstance(name, str) or not name:
        raise LayoutError(f"a field's name must be a non-empty string, found {name!r}")
    try:
        dtype_like, shape_like = () if isinstance(spec, str) else spec  # "f4" would unpack to "f" and "4"
    except (TypeError, ValueError):
        raise LayoutError(f"field {name!r} must be a pair (dtype, shape), found {excerpt(spec)}") from None
    dtype, inner_shape = _check_dtype(name, dtype_like)
    field = Field(name, dtype, _check_shape(name, shape_like) + inner_shape, offset)
    if len(field.shape) > 32:
        raise LayoutError(f"field {name!r} has {len(field.shape)} dimensions, at most 32 are possible; merge some")
    # max(extent, 1): numpy cannot view an array with an impossible extent, even if another extent is zero.
    span = dtype.itemsize * math.prod(max(extent, 1) for extent in field.shape)
    if span > MAX_BYTES:
        raise LayoutError(
            f"field {name!r} of dtype {dtype} and shape {list(field.shape)} would span {span} bytes, "
            f"at most {MAX_BYTES} can be addressed; reduce its shape"
        )
    return field


def _check_dtype(name: str, dtype_like: DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype of one element, and the shape that a sub-array dtype such as ``(float, (3,))`` adds."""
    try:
        dtype: np.dtype[Any] = np.dtype(dtype_like)
    except (TypeError, ValueError, SyntaxError) as error:
        hint = did_you_mean(dtype_like, _DTYPE_NAMES) if isinstance(dtype_like, str) else ""
        raise LayoutError(f"field {name!r}: {excerpt(dtype_like)} is not a dtype: {error}{hint}") from None
    inner_shape: tuple[int, ...] = ()
    if dtype.subdtype is not None:
        dtype, inner_shape = dtype.subdtype
    if dtype.hasobject or dtype.kind == "T":
        raise LayoutError(
            f"field {name!r} has dtype {dtype}, whose values are pointers into one process; "
            "shared memory holds numbers, bools and strings of a fixed length"
        )
    if dtype.itemsize == 0:
        raise LayoutError(f"field {name!r} has dtype {dtype_like!r} without a size; add a length, as in 'S16' or 'U16'")
    described = None if dtype.isbuiltin == 2 else _from_description(dtype)
    if described is None:
        raise LayoutError(
            f"field {name!r} has dtype {dtype}, which another process cannot reconstruct from its description; "
            f"store it as a numpy dtype of {dtype.itemsize} bytes and view it"
        )
    return described, inner_shape


_DTYPE_NAMES = ("bool", "float16", "float32", "float64", "complex64", "complex128") + tuple(
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
)


def _from_description(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype that another process reconstructs from numpy's description; None if it differs from ``dtype``, as with
    fields that overlap or are out of order. For a builtin dtype the result is numpy's singleton, which native code
    recognises by identity; an unpickled dtype may be a copy."""
    try:
        described: np.dtype[Any] = descr_to_dtype(dtype_to_descr(dtype))
    except (TypeError, ValueError):
        return None
    return described if described == dtype else None


def _check_shape(name: str, shape: int | Iterable[int]) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in (shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise LayoutError(f"field {name!r} must have a shape of integers, found {excerpt(shape)}") from None
    if any(extent < 0 for extent in extents):
        raise LayoutError(f"field {name!r} must have a shape without negative extents, found {list(extents)}")
    return extents


def _as_descr(value: Any) -> Any:
    """A dtype description from JSON in the form that numpy accepts: JSON has no tuples, numpy requires them."""
    if isinstance(value, str):
        return value
    return [
        # A name that is a list is a pair of title and name.
        (tuple(name) if isinstance(name, list) else name, _as_descr(descr), *(tuple(extents) for extents in shape))
        for name, descr, *shape in value
    ]
