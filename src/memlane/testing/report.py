"""Report: the rules for native environments, and how violations are described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RULES = {
    "init": "init accepts the settings, at least their default values",
    "no_crash": "every function returns without a crash",
    "buffer_bounds": "no function writes outside the buffers",
    "read_only": "no function writes to its inputs (actions, settings, steps; alive in step)",
    "reset": "reset does not write rewards, terminated or truncated",
    "observations": "observations are finite and within their declared bounds",
    "rewards": "rewards are finite and within reward_low to reward_high",
    "flags": "terminated, truncated, alive and fields of type bool are 0 or 1",
    "agents": "after a reset at least one agent is alive",
    "ranges": "a call with begin and end changes only the environments begin to end - 1",
    "determinism": "the same seed and actions give the same results, also while other environments run",
    "clean_reset": "results after a reset do not depend on earlier episodes",
    "infos": "reset writes every info",
    "random": "an environment uses only its own RNG state, random[i]",
    "num_envs": "results of an environment depend neither on its index nor on the number of environments",
    "autoreset": "episodes are the same in all three autoreset modes",
    "threads": "results are the same on one thread and on several",
    "past_end": "with steps_past_end, a step after the end of an episode affects nothing but its own rows",
    "render": "render writes its image and nothing else",
    "close": "close works at any time after init, and does not affect other environments",
}
"""The rules by name, in the order in which they are checked."""


@dataclass(frozen=True)
class Failure:
    """One violation of a rule: the first one found for each rule and field."""

    rule: str
    """Name of the rule, a key of ``RULES``."""
    expected: str
    """What the rule requires here."""
    found: str
    """What was found instead."""
    fix: str
    """What the author can do."""
    call: str = ""
    """The C function and its arguments."""
    field: str = ""
    """The array of ``memlane_envs``."""
    env: int | None = None
    """Index of the environment."""
    step: int | None = None
    """Number of steps before the call; -1 before the first step."""

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
        return "\n".join([*lines, f"  fix       {self.fix}"])


@dataclass(frozen=True)
class EnvReport:
    """Which rules were checked."""

    name: str
    """Name of the environment."""
    checked: tuple[str, ...]
    """Names of the rules that were checked."""
    skipped: dict[str, str]
    """Names of the rules that were not checked, and why."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.checked)} rules checked"]
        lines += [f"  {rule}: {RULES[rule]}" for rule in self.checked]
        lines += [f"  {rule}: not checked, {reason}" for rule, reason in self.skipped.items()]
        return "\n".join(lines)


class EnvCheckFailed(AssertionError):
    """An environment violates rules. ``failures`` has all violations that were found, ``report`` what was checked."""

    def __init__(self, report: EnvReport, failures: Sequence[Failure]) -> None:
        self.report, self.failures = report, tuple(failures)
        super().__init__(report, self.failures)

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the violated rules, each once."""
        return tuple(dict.fromkeys(failure.rule for failure in self.failures))

    def __str__(self) -> str:
        count = len(self.rules)
        head = f"{self.report.name} violates {count} rule{'s' if count != 1 else ''}: {', '.join(self.rules)}"
        blocks = [head, *(str(failure) for failure in self.failures)]
        if self.report.skipped:
            blocks.append("\n".join(f"{rule}: not checked, {reason}" for rule, reason in self.report.skipped.items()))
        return "\n\n".join(blocks)
