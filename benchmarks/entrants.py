"""Entrants of training benchmarks, and their tables.

Each turn is a new process of the running benchmark with its own seed; all entrants have the same seeds. What a turn
does is in ``trainers``. One turn is measured in several ways, so an entrant has a ``Contender`` in several tables.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness import Contender, Kind, Report, Table, race
from benchmarks.turns import turn_in_new_process

CORES = len(os.sched_getaffinity(0))
UNSOLVED = 10
"""A run that never solved its task counts as this many times what it used (PAR10 in algorithm configuration): the
median stays the same, and no file has infinite numbers."""
PATIENCE = 90.0
"""Seconds for everything outside the time limit of a goal (imports, first rollouts, exit): several times what the
slowest needs."""


@dataclass
class Entrant:
    name: str
    kind: Kind
    trainer: str
    settings: dict[str, Any]
    goal: dict[str, Any]
    skip: str = ""
    answers: list[list[float]] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)
    """Nanoseconds of the whole process of each turn."""

    def measure(self) -> list[float]:
        request = {"trainer": self.trainer, "settings": self.settings, "goal": self.goal, "seed": len(self.answers)}
        begin = time.monotonic_ns()
        answer = turn_in_new_process(sys.argv[0], request, self.goal["seconds"] + PATIENCE)
        self.processes.append(time.monotonic_ns() - begin)
        self.answers.append(answer)
        return answer[:1]

    def with_goal(self, **changes: Any) -> Entrant:
        """A copy with a changed goal and no turns."""
        return replace(self, goal={**self.goal, **changes}, answers=[], processes=[])

    @property
    def unsolved(self) -> str:
        """A note about runs that never solved their task; empty if there are none."""
        count = sum(not solved for *_, solved in self.answers)
        return f"{self.name}: {count} of {len(self.answers)} runs never solved it" if count else ""

    def contender(self, value: Callable[[list[float], float], float], penalty: bool = True) -> Contender:
        """A table row: one value per turn, from its answer and the time of its process."""
        rounds = [
            [value(answer, process) * (UNSOLVED if penalty and not answer[3] else 1)]
            for answer, process in zip(self.answers, self.processes, strict=True)
        ]
        return Contender(self.name, self.kind, list, self.skip, rounds)


def run_turns(entrants: Sequence[Entrant], rounds: int, quick: bool) -> None:
    if not quick:  # once before, so that no measured process compiles modules
        for entrant in {entrant.trainer: entrant for entrant in entrants if not entrant.skip}.values():
            entrant.with_goal(max_steps=1).measure()
    racing = [Contender(entrant.name, entrant.kind, entrant.measure, entrant.skip) for entrant in entrants]
    race(racing, rounds)
    for entrant, contender in zip(entrants, racing, strict=True):
        entrant.skip = contender.skip
        if entrant.skip:
            entrant.answers.clear()
            entrant.processes.clear()


def missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


# --------------------------------------------------------------------------------------------------------------- tables


class StepsTable(Table):
    """Counts environment steps instead of nanoseconds."""

    quantity = "steps"

    def format_value(self, value: float) -> str:
        return f"{value:,.0f}"

    def record(self) -> dict[str, Any]:
        return {**super().record(), "unit": "environment steps, not nanoseconds"}


def add_until_tables(report: Report, task: str, reference: str, entrants: Sequence[Entrant]) -> tuple[Table, Table]:
    """Add the tables of time until the task was solved, of whole processes, and of environment steps. Entrants that
    never solved it are named below each."""
    notes = [
        f"{text}; they count as {UNSOLVED} times what they used" for entrant in entrants if (text := entrant.unsolved)
    ]
    until = Table(f"{task}: time", reference, [entrant.contender(lambda answer, _: answer[0]) for entrant in entrants],
                  "learning, from its start until solved", notes=notes)  # fmt: skip
    process = Table(f"{task}: whole process", reference,
                    [entrant.contender(lambda _, process: process) for entrant in entrants],
                    "a new Python process, imports and exit included", notes=notes)  # fmt: skip
    steps = StepsTable(f"{task}: environment steps", reference,
                       [entrant.contender(lambda answer, _: answer[1]) for entrant in entrants],
                       "learning, from its start until solved", notes=notes)  # fmt: skip
    for table in (until, process, steps):
        report.add(table)
    return until, steps


def add_rate_table(
    report: Report, title: str, reference: str, entrants: Sequence[Entrant], operation: str, rate: str
) -> Table:
    """Add the table of training steps per second, with solved and unsolved runs."""
    rows = [entrant.contender(lambda answer, _: answer[2], penalty=False) for entrant in entrants]
    return report.add(Table(title, reference, rows, operation, rate=rate))
