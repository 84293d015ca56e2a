"""Entrants of a race to a trained policy, and the tables about them.

Each turn is a new process of the script that runs, with a seed of its own, the same seeds for everybody; what it does
is in ``trainers``. One turn is measured in several ways, so an entrant has a ``Contender`` in each of several tables.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness import Contender, Kind, Report, Table, race
from turns import turn_in_new_process

CORES = len(os.sched_getaffinity(0))
UNSOLVED = 10
"""A run that never solved its task counts as so many times what it used: the median stays what it is, and no file has
infinite numbers in it. Algorithm configuration calls it PAR10."""
PATIENCE = 90.0
"""Seconds for whatever a turn does outside of its goal's seconds (imports, first rollouts, its end): several times what
the slowest needs."""


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
    """How long each turn's whole process took."""

    def measure(self) -> list[float]:
        request = {"trainer": self.trainer, "settings": self.settings, "goal": self.goal, "seed": len(self.answers)}
        begin = time.monotonic_ns()
        answer = turn_in_new_process(sys.argv[0], request, self.goal["seconds"] + PATIENCE)
        self.processes.append(time.monotonic_ns() - begin)
        self.answers.append(answer)
        return answer[:1]

    def with_goal(self, **changes: Any) -> Entrant:
        """The same with another goal, and no turns yet."""
        return replace(self, goal={**self.goal, **changes}, answers=[], processes=[])

    @property
    def unsolved(self) -> str:
        """What to say about runs that never solved their task; empty when there are none."""
        count = sum(not solved for *_, solved in self.answers)
        return f"{self.name}: {count} of {len(self.answers)} runs never solved it" if count else ""

    def contender(self, value: Callable[[list[float], float], float], penalty: bool = True) -> Contender:
        """A row: a value of each turn, from its answer and the time of its process."""
        rounds = [
            [value(answer, whole) * (UNSOLVED if penalty and not answer[3] else 1)]
            for answer, whole in zip(self.answers, self.processes, strict=True)
        ]
        return Contender(self.name, self.kind, list, self.skip, rounds)


def run_turns(entrants: Sequence[Entrant], rounds: int, quick: bool) -> None:
    if not quick:  # once before: whoever is first would compile everybody's modules, in the table of whole processes
        for entrant in {one.trainer: one for one in entrants if not one.skip}.values():
            entrant.with_goal(max_steps=1).measure()
    racing = [Contender(one.name, one.kind, one.measure, one.skip) for one in entrants]
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

    def shown(self, value: float) -> str:
        return f"{value:,.0f}"

    def record(self) -> dict[str, Any]:
        return {**super().record(), "unit": "environment steps, in the place of nanoseconds"}


def add_until_tables(report: Report, task: str, reference: str, entrants: Sequence[Entrant]) -> tuple[Table, Table]:
    """How long until the task was solved, and with how many environment steps; the whole process between them. Those
    who never solved it are named below each."""
    notes = [f"{text}; they count as {UNSOLVED} times what they used" for one in entrants if (text := one.unsolved)]
    until = Table(f"{task}: time", reference, [one.contender(lambda answer, _: answer[0]) for one in entrants],
                  "learning, from its start until solved", notes=notes)  # fmt: skip
    whole = Table(f"{task}: whole process", reference, [one.contender(lambda _, whole: whole) for one in entrants],
                  "a new Python, imports and end included", notes=notes)  # fmt: skip
    steps = StepsTable(f"{task}: environment steps", reference,
                       [one.contender(lambda answer, _: answer[1]) for one in entrants],
                       "learning, from its start until solved", notes=notes)  # fmt: skip
    for table in (until, whole, steps):
        report.add(table)
    return until, steps


def add_rate_table(
    report: Report, title: str, reference: str, entrants: Sequence[Entrant], operation: str, rate: str
) -> Table:
    """Training steps per second, of those that solved it and of those that did not alike."""
    rows = [one.contender(lambda answer, _: answer[2], penalty=False) for one in entrants]
    return report.add(Table(title, reference, rows, operation, rate=rate))
