"""Paths: where in a nested space a part is, as one string. ``"cam.pos"`` is entry ``pos`` of entry ``cam``.

Paths name the fields of a layout, so two parts of a space must never have the same one: a key's own dots and tildes are
escaped. A space that is not nested is called ``"value"``.

    >>> join("cam", step("pos"))
    'cam.pos'
    >>> join("cam", step("pos.x"))
    'cam.pos~dx'
"""

from __future__ import annotations

from collections.abc import Hashable

BARE = "value"


def join(path: str, name: str) -> str:
    """The path of the part ``name`` of what is at ``path``."""
    return f"{path}.{name}" if path else name


def step(key: Hashable) -> str:
    """A Dict's key as one step of a path. Different keys give different steps."""
    text = key if isinstance(key, str) else repr(key)
    escaped = text.replace("~", "~t").replace(".", "~d") or "~e"
    return escaped if isinstance(key, str) else f"~k{escaped}"
