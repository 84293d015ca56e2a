"""Capacity: the largest size of a Graph or Sequence value. These spaces do not declare one, but shared memory needs it.

A single ``Capacity`` applies to every graph and sequence in a space. A mapping from path to ``Capacity`` gives each its
own; the path ``""`` is the space itself, ``"items"`` the feature space of a sequence.

    >>> split_capacity({"cam.points": Capacity(items=8)}, ["cam", "pose"], "")
    [{'points': Capacity(items=8, nodes=None, edges=None)}, {}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from gymnasium.spaces import Space

from memlane.core.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest size of one Sequence or Graph value."""

    items: int | None = None
    """Items of a Sequence."""
    nodes: int | None = None
    """Nodes of a Graph."""
    edges: int | None = None
    """Edges of a Graph."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"Capacity({field.name}=...) must be an integer of at least 0, found {value!r}")


Capacities: TypeAlias = Capacity | Mapping[str, Capacity] | None
"""One capacity for all graphs and sequences in a space, or one for each path."""


def split_capacity(capacity: Capacities, names: Iterable[str], path: str, *, own: bool = False) -> list[Capacities]:
    """The capacities of each of the subspaces ``names``, with paths relative to it.

    ``path`` is the space's own path, for error messages. ``own`` says whether the space itself can have a capacity. A
    capacity for a subspace that does not exist is an error.
    """
    names = list(names)
    if not isinstance(capacity, Mapping):
        return [capacity] * len(names)
    by_name: dict[str, dict[str, Capacity]] = {name: {} for name in names}
    for where, declared in capacity.items():
        head, _, rest = where.partition(".")
        if where and head in by_name:
            by_name[head][rest] = declared
        elif where or not own:
            raise KeyError(
                f"at {path!r}: a capacity is declared for {where!r}, but there is no graph or sequence; "
                f"the subspaces are {names}{did_you_mean(head, names)}"
            )
    return list(by_name.values())


def declared_capacity(capacity: Capacities, space: Space[Any], what: str) -> int:
    """The declared number of ``what`` ("items", "nodes" or "edges"). Without one, Gymnasium's error is raised, with a
    remedy."""
    own = capacity.get("") if isinstance(capacity, Mapping) else capacity
    declared: int | None = getattr(own, what, None)
    if declared is not None:
        return declared
    raise TypeError(
        f"As {space} has a dynamic shape so its not possible to make a static shared memory. "
        f"For `AsyncVectorEnv`, disable `shared_memory`. Or declare its size: Capacity({what}=...)."
    )
