"""Paths: the position of a subspace in a nested space, as one string. ``"cam.pos"`` is ``space["cam"]["pos"]``.

Paths are the field names of a layout, so two subspaces must never have the same one: dots and tildes in a key are
escaped. The field of a space that is not nested is called ``"value"``.

    >>> join_path("cam", escape_key("pos"))
    'cam.pos'
    >>> join_path("cam", escape_key("pos.x"))
    'cam.pos~dx'
"""

from __future__ import annotations

from collections.abc import Hashable

ROOT_NAME = "value"
"""The path of a space that is not part of another one."""


def join_path(path: str, name: str) -> str:
    """The path of the subspace ``name`` of the space at ``path``."""
    return f"{path}.{name}" if path else name


def escape_key(key: Hashable) -> str:
    """The key of a Dict space as one component of a path. Different keys give different components."""
    text = key if isinstance(key, str) else repr(key)
    escaped = text.replace("~", "~t").replace(".", "~d") or "~e"
    return escaped if isinstance(key, str) else f"~k{escaped}"
