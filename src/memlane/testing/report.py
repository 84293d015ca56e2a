"""Report: the rules that a native environment keeps, and how a broken one is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RULES = {
    "init": "init accepts the settings, defaults above all",
    "runs": "the functions return, without a crash",
    "guards": "nothing is written outside the buffers",
    "given": "what is given to be read is not written",
    "reset": "reset leaves rewards and ends alone",
    "observations": "observations are finite and within the bounds that are declared",
    "rewards": "rewards are finite and within reward_low to reward_high",
    "flags": "terminated, truncated, alive and everything of type bool are 0 or 1",
    "agents": "after a reset at least one agent is in the game",
    "ranges": "a call for begin to end touches these environments and no others",
    "determinism": "the same seed gives the same, also while other environments run",
    "fresh": "a reset leaves nothing of the episodes before",
    "infos": "a reset writes every info, or they tell of the episode before",
    "random": "an environment draws from its own random word only",
    "num_envs": "what an environment does depends on no other, nor on how many there are",
    "autoreset": "episodes are the same in all three autoreset modes",
    "threads": "results are the same on one thread and on several",
    "past_end": "with steps_past_end, a step after the end does no harm",
    "render": "render writes its picture and nothing else",
    "close": "close can be called at any time after init, and everything can be made again",
}
"""Every rule, by its short name, in the order in which they are checked."""


@dataclass(frozen=True)
class Failure:
    """One rule that was broken: the first time, for each field."""

    rule: str
    expected: str
    found: str
    do: str
    """What the author can do about it."""
    call: str = ""
    """The function, as it was called."""
    field: str = ""
    env: int | None = None
    step: int | None = None
    """How many steps all had made before; -1 for the first reset and what comes before it."""

    def __str__(self) -> str:
        where = [
            f"in {self.call}" if self.call else "",
            f"environment {self.env}" if self.env is not None else "",
            ("before the first step" if self.step < 0 else f"step {self.step}") if self.step is not None else "",
            f"field {self.field}" if self.field else "",
        ]
        lines = [f"{self.rule}: {RULES[self.rule]}", f"  expected  {self.expected}", f"  found     {self.found}"]
        if any(where):
            lines.append(f"  where     {', '.join(part for part in where if part)}")
        return "\n".join([*lines, f"  do        {self.do}"])


@dataclass(frozen=True)
class EnvReport:
    """What was checked. ``skipped``: rules that were not, and why."""

    name: str
    checked: tuple[str, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.checked)} rules checked"]
        lines += [f"  {rule}: {RULES[rule]}" for rule in self.checked]
        lines += [f"  {rule}: not checked, {why}" for rule, why in self.skipped.items()]
        return "\n".join(lines)


class EnvCheckFailed(AssertionError):
    """An environment breaks rules. ``failures`` has all that were found, ``report`` what was looked at."""

    def __init__(self, report: EnvReport, failures: Sequence[Failure]) -> None:
        self.report, self.failures = report, tuple(failures)
        super().__init__(report, self.failures)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that are broken, each once."""
        return tuple(dict.fromkeys(failure.rule for failure in self.failures))

    def __str__(self) -> str:
        count = len(self.rules)
        head = f"{self.report.name} breaks {count} rule{'s' if count != 1 else ''}: {', '.join(self.rules)}"
        blocks = [head, *(str(failure) for failure in self.failures)]
        if self.report.skipped:
            blocks.append("\n".join(f"{rule}: not checked, {why}" for rule, why in self.report.skipped.items()))
        return "\n\n".join(blocks)
