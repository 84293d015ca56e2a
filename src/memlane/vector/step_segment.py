"""Steps: the lane between a vector environment and its workers.

Everything of a step is a row of one segment: the action that goes out, the observation, reward and flags that come
back. Each worker owns the rows of its environments. A command is one signal out, and an arrival at one quorum back;
nothing is pickled and, while both sides are awake, nothing asks the kernel.

    field          written by     when
    quorum[c]      workers        they have done what was asked, counted in environments; one of two cells is in use
    go[w]          the parent     a signal: worker w has a command
    command[w]     the parent     before ``go``: which, and in which cell of the quorum to arrive
    progress[w]    worker w       all the time; see ``THROUGH`` and those after it
    asked[i]       the parent     before ``go``: environment i is to make its step number so many (``send``)
    answered[i]    i's worker     after that step
    action.*       the parent     before ``go``
    observation.*, rewards, terminated, truncated, info.*, told.*     i's worker, before it arrives
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gymnasium import Space
from gymnasium.spaces import Box
from numpy.typing import NDArray

from memlane import _native
from memlane.core import SIGNAL, Layout, Segment
from memlane.core.layout import FieldSpec
from memlane.spaces import fields_of
from memlane.spaces.arrays import ArrayColumn
from memlane.spaces.registered import RegisteredColumn
from memlane.vector.observations import part_column

STEP, SEND, MESSAGE, CLOSE = range(4)
"""Commands: step all environments; step those that are asked; read a message; end. The native side (``Order``) knows
them by these numbers."""

THROUGH, STEPS, TOLD, FINISHED = range(4)
"""A worker's words in ``progress``: environments of this command that are through; steps since its start; messages that
it has announced; commands that it has finished. The native side (``progress``) knows them by these numbers."""

_LINE = 8  # words in a cache line: what different processes write does not share one


@dataclass(frozen=True)
class Plan:
    """What a segment of steps is made for."""

    num_envs: int
    ranges: list[range]
    """The environments of each worker."""
    observation_space: Space[Any] | None
    """Of one environment; None when observations lie elsewhere: in ``registered``, or in messages."""
    action_space: Space[Any] | None
    registered: RegisteredColumn | None = None
    """Where observations lie whose space a user registered."""
    capacity: Any = None
    action_capacity: Any = None
    info_spec: Mapping[str, FieldSpec] = field(default_factory=dict)

    def layout(self) -> Layout:
        workers, n = len(self.ranges), self.num_envs
        fields: dict[str, FieldSpec] = {
            "quorum": (f"V{_native.QUORUM_BYTES}", 2),
            "go": (SIGNAL, workers),
            "command": ("int64", (workers, _LINE)),
            "progress": ("int64", (workers, _LINE)),
            "asked": ("int64", n),
            "answered": ("int64", n),
            "rewards": ("float64", n),
            "terminated": ("bool", n),
            "truncated": ("bool", n),
        }
        for part, space, capacity in (
            ("observation", self.observation_space, self.capacity),
            ("action", self.action_space, self.action_capacity),
        ):
            if space is not None:
                for name, spec in fields_of(space, n, capacity).items():
                    fields[f"{part}.{name}"] = spec
        for key, (dtype, shape) in self.info_spec.items():
            fields[f"info.{key}"] = (dtype, (n, *(shape if isinstance(shape, tuple) else (shape,))))
            fields[f"told.{key}"] = ("bool", n)
        return Layout(fields)


class Steps:
    """A segment of steps, seen by the parent or by a worker."""

    def __init__(self, segment: Segment, plan: Plan) -> None:
        self.segment = segment
        self.plan = plan
        mapping, base = segment.window(0, segment.layout.nbytes, writeable=True)
        cells = base + segment.layout["quorum"].offset
        self.quorums = [_native.Quorum(mapping, cells + cell * _native.QUORUM_BYTES, "the workers") for cell in (0, 1)]
        self.go = [segment.signal("go", worker) for worker in range(len(plan.ranges))]
        commands = base + segment.layout["command"].offset
        self.commands = [_native.Command(go, mapping, commands + w * 8 * _LINE) for w, go in enumerate(self.go)]
        self.progress = segment["progress"]
        self._progress = segment.words("progress")
        self.asked = segment.words("asked")
        self.answered = segment.words("answered")
        self.rewards = segment["rewards"]
        self.terminated = segment["terminated"]
        self.truncated = segment["truncated"]
        views = segment.views()
        self.observations = part_column("observation", plan.observation_space, views) or plan.registered
        self.actions = part_column("action", plan.action_space, views)
        self.infos = {key: (_unbounded(key, segment[f"info.{key}"]), segment[f"told.{key}"]) for key in plan.info_spec}

    @classmethod
    def create(cls, plan: Plan) -> Steps:
        return cls(Segment.create(plan.layout()), plan)

    def __reduce__(self) -> tuple[object, ...]:
        return (Steps, (self.segment, self.plan))

    @property
    def told(self) -> int:
        """How many messages all workers have announced."""
        return self._progress.sum(TOLD, _LINE)

    def close(self) -> None:
        self.segment.close()


def _unbounded(key: str, rows: NDArray[Any]) -> ArrayColumn:
    """Rows of numbers of any size; what does not fit into the dtype is an error all the same."""
    return ArrayColumn(Box(0, 1, rows.shape[1:], rows.dtype.type), rows, f"info {key}")


def split(num_envs: int, num_workers: int) -> list[range]:
    """Environments to workers: contiguous ranges that differ by one at most."""
    bounds = [worker * num_envs // num_workers for worker in range(num_workers + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
