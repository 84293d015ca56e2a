"""StepSegment: the shared memory between a vector environment and its workers.

Everything that belongs to a step is a row of one segment: the action that the parent writes, and the observation,
reward and flags that the worker writes. Each worker owns the rows of its environments. The parent advances one signal
per worker to issue a command; workers arrive at one quorum when they are done. Nothing is pickled, and while both sides
are awake there is no system call.

    field                written by     when
    quorum[c]            workers        after a command, counted in environments; one of the two cells is in use
    go[w]                the parent     a signal: worker w has a command
    command[w]           the parent     before ``go``: the command (``COMMAND_*``) and the cell of the quorum
    progress[w]          worker w       all the time; the words ``PROGRESS_*``
    requested_step[i]    the parent     before ``go`` (``send``): number of the step that environment i is to make
    completed_step[i]    i's worker     after that step
    action.*             the parent     before ``go``
    action_format.*      the parent     before ``go``: the form of the action; see ``actions``
    action_other.*       the parent     before ``go``: the action, if it has another form than the space says
    observation.*, rewards, terminated, truncated, info.*, info_present.*     i's worker, before it arrives
    float_infos[:, i], float_forms[w]     i's worker w, before it arrives: see ``float_infos``

Parts of an observation that no array can hold are objects of each process (``objects``): the worker writes them there
and sends them in its message, from which the parent stores them in its own.

The numbers ``COMMAND_*`` and ``PROGRESS_*`` are defined in cpp/python/vector/commands.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box
from numpy.typing import NDArray

from memlane import _native
from memlane._native import PROGRESS_BUSY_NS, PROGRESS_FLOAT_INFOS, PROGRESS_MESSAGES_SENT
from memlane.core import SIGNAL, Layout, Segment
from memlane.core.layout import FieldSpec
from memlane.spaces import Column, fields_of
from memlane.spaces.arrays import ArrayColumn
from memlane.spaces.objects import ObjectColumn, split_fields
from memlane.spaces.registered import RegisteredColumn
from memlane.vector.actions import SharedActions, form_fields
from memlane.vector.float_infos import FloatInfos
from memlane.vector.messages import pickle_for_worker
from memlane.vector.observations import part_column

_LINE_WORDS = 8
"""64-bit words in a cache line: words that different processes write do not share one."""

SPIN_NS = 200_000
"""How long a worker, and a parent with no more workers than cores, spins at most before it sleeps. To wake a halted
core took up to 140 us on a virtual machine, and code ran a third slower there for the next 50 us. 64 CartPoles in two
workers that spin took 310 us per step, 330 with 50 us of spinning; in a parent that spins, 16 CartPoles and a policy on
one torch thread took 130 us instead of 141."""


@dataclass(frozen=True)
class StepSegmentSpec:
    """What a step segment has room for."""

    num_envs: int
    """Environments of all workers."""
    ranges: list[range]
    """The environments of each worker."""
    observation_space: Space[Any] | None
    """Observation space of one environment; None when observations are in ``registered``."""
    action_space: Space[Any] | None
    """Action space of one environment; None when actions travel in messages."""
    registered: RegisteredColumn | None = None
    """Where observations are whose space a user registered."""
    objects: Mapping[str, Space[Any]] = field(default_factory=dict)
    """Parts of an observation that travel in messages, by path; the path "" is the whole observation."""
    capacity: Any = None
    """Capacity of Graph and Sequence spaces in observations."""
    action_capacity: Any = None
    """Capacity of Graph and Sequence spaces in actions."""
    info_spec: Mapping[str, FieldSpec] = field(default_factory=dict)
    """Declared infos: key to (dtype, shape)."""
    any_form: bool = False
    """Whether actions may have other dtypes and shapes than ``action_space`` says; see ``actions.has_forms``."""

    def layout(self) -> Layout:
        """The layout of the segment; the module docstring has the fields."""
        workers, n = len(self.ranges), self.num_envs
        fields: dict[str, FieldSpec] = {
            "quorum": (f"V{_native.QUORUM_BYTES}", 2),
            "go": (SIGNAL, workers),
            "command": ("int64", (workers, _LINE_WORDS)),
            "progress": ("int64", (workers, _LINE_WORDS)),
            "requested_step": ("int64", n),
            "completed_step": ("int64", n),
            "rewards": ("float64", n),
            "terminated": ("bool", n),
            "truncated": ("bool", n),
        }
        if self.observation_space is not None and "" not in self.objects:
            observation_fields, _ = split_fields(self.observation_space, n, self.capacity)
            fields |= {f"observation.{name}": spec for name, spec in observation_fields.items()}
        if self.action_space is not None:
            action_fields = fields_of(self.action_space, n, self.action_capacity)
            fields |= {f"action.{name}": spec for name, spec in action_fields.items()}
        if self.any_form and self.action_space is not None:
            fields |= form_fields(self.action_space, n)
        for key, (dtype, shape) in self.info_spec.items():
            fields[f"info.{key}"] = (dtype, (n, *(shape if isinstance(shape, tuple) else (shape,))))
            fields[f"info_present.{key}"] = ("bool", n)
        fields |= FloatInfos.fields(n, workers)
        return Layout(fields)


class DeclaredInfo(NamedTuple):
    """The rows of one key of ``info_spec``."""

    column: ArrayColumn
    """The values."""
    present: NDArray[np.bool_]
    """Whether each environment's last info had the key."""


class StepSegment:
    """A step segment, as the parent or a worker sees it. It may be pickled to a worker."""

    def __init__(self, segment: Segment, spec: StepSegmentSpec) -> None:
        self.segment = segment
        self.spec = spec
        mapping, base = segment.window(0, segment.layout.nbytes, writeable=True)
        cells = base + segment.layout["quorum"].offset
        self.quorums = [
            _native.Quorum(mapping, cells + cell * _native.QUORUM_BYTES, "the environments") for cell in (0, 1)
        ]
        self.progress = segment["progress"]
        self._progress_words = segment.words("progress")
        self.requested_step = segment.words("requested_step")
        self.completed_step = segment.words("completed_step")
        self.rewards = segment["rewards"]
        self.terminated = segment["terminated"]
        self.truncated = segment["truncated"]
        views = segment.views()
        self.objects: dict[str, ObjectColumn] = {}
        """Parts of the observations that travel in messages, by path."""
        for path, space in spec.objects.items():
            whole_path = f"observation.{path}" if path else "observation"
            self.objects[whole_path] = ObjectColumn(space, spec.num_envs, whole_path)
        observations = part_column("observation", spec.observation_space, views, self.objects) or spec.registered
        assert observations is not None
        self.observations: Column = observations
        self.actions = part_column("action", spec.action_space, views)
        self.shared_actions = SharedActions(self.actions, views) if self.actions is not None and spec.any_form else None
        """The actions in the form in which the caller gave them; None if ``actions`` checks and casts all."""
        format_field = self.shared_actions and self.shared_actions.format_field
        self.action_formats = segment.words(format_field) if format_field else None
        self.infos = {
            key: DeclaredInfo(_unbounded_column(key, segment[f"info.{key}"]), segment[f"info_present.{key}"])
            for key in spec.info_spec
        }
        self.float_infos = FloatInfos(segment["float_infos"], segment["float_forms"], self.progress)

    @classmethod
    def create(cls, spec: StepSegmentSpec) -> StepSegment:
        """Create the memory, in the parent."""
        return cls(Segment.create(spec.layout()), spec)

    def __reduce__(self) -> tuple[object, ...]:
        return (StepSegment, (self.segment, self.spec))

    @cached_property
    def pickled(self) -> bytes:
        """The step segment as bytes that any number of workers can unpickle."""
        return pickle_for_worker(self)

    def command_word(self, worker: int, spin_ns: int | None = None) -> _native.CommandWord:
        """The command of one worker, which waits for the next one with ``spin_ns`` nanoseconds of spinning."""
        go = self.segment.signal("go", worker)
        if spin_ns is not None:
            go.spin_limit_ns = spin_ns
        field = self.segment.layout["command"]
        mapping, offset = self.segment.window(field.offset, field.nbytes, writeable=True)
        return _native.CommandWord(go, mapping, offset + worker * 8 * _LINE_WORDS)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that all workers together have spent on commands."""
        return self._progress_words.sum(PROGRESS_BUSY_NS, _LINE_WORDS)

    @property
    def messages_sent(self) -> int:
        """Messages that all workers together have sent."""
        return self._progress_words.sum(PROGRESS_MESSAGES_SENT, _LINE_WORDS)

    @property
    def float_infos_written(self) -> int:
        """Commands of all workers together whose infos are in ``float_infos``."""
        return self._progress_words.sum(PROGRESS_FLOAT_INFOS, _LINE_WORDS)

    def close(self) -> None:
        """Release the mapping of this process."""
        self.segment.close()


def _unbounded_column(key: str, rows: NDArray[Any]) -> ArrayColumn:
    """Rows of numbers without bounds; a number that does not fit the dtype is still an error."""
    return ArrayColumn(Box(0, 1, rows.shape[1:], rows.dtype.type), rows, f"info {key}")


def split_envs(num_envs: int, num_workers: int) -> list[range]:
    """Distribute environments over workers: contiguous ranges whose lengths differ by at most one."""
    bounds = [worker * num_envs // num_workers for worker in range(num_workers + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
