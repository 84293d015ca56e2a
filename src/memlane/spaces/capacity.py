"""Capacity: how much room a value of changing size gets. Graphs and sequences have none of their own.

One ``Capacity`` holds for every graph and sequence in a space. A mapping from path to ``Capacity`` tells them apart;
the path ``""`` is the space itself, ``"items"`` what a sequence is made of.

    >>> split({"cam.points": Capacity(items=8)}, ["cam", "pose"], "")
    [{'points': Capacity(items=8, nodes=None, edges=None)}, {}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from gymnasium.spaces import Space


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that one value may have: ``items`` of a Sequence, ``nodes`` and ``edges`` of a Graph."""

    items: int | None = None
    nodes: int | None = None
    edges: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            found = getattr(self, field.name)
            if found is not None and (not isinstance(found, int) or found < 0):
                raise ValueError(f"Capacity({field.name}=...) must be a whole number of at least 0, found {found!r}")


Capacities: TypeAlias = Capacity | Mapping[str, Capacity] | None


def split(capacity: Capacities, names: Iterable[str], path: str, *, own: bool = False) -> list[Capacities]:
    """The capacities as each of the parts ``names`` sees them. A path that leads nowhere is an error, not ignored;
    ``own`` says whether the space can have a capacity itself."""
    names = list(names)
    if not isinstance(capacity, Mapping):
        return [capacity] * len(names)
    parts: dict[str, dict[str, Capacity]] = {name: {} for name in names}
    for where, declared in capacity.items():
        head, _, rest = where.partition(".")
        if where and head in parts:
            parts[head][rest] = declared
        elif where or not own:
            raise KeyError(
                f"at {path!r}: a capacity is declared for {where!r}, but no graph or sequence is there; "
                f"the parts are {names}"
            )
    return list(parts.values())


def room(capacity: Capacities, space: Space[Any], what: str) -> int:
    """How many ``what`` a value of ``space`` may have. Gymnasium's error if nobody said."""
    own = capacity.get("") if isinstance(capacity, Mapping) else capacity
    declared: int | None = getattr(own, what, None)
    if declared is not None:
        return declared
    text = (
        f"As {space} has a dynamic shape so its not possible to make a static shared memory. "
        "For `AsyncVectorEnv`, disable `shared_memory`."
    )
    raise TypeError(text if capacity is None else f"{text} Or declare its size: Capacity({what}=...).")
