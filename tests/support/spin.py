"""Spin: reads the header of a Promela model, makes its verifier and runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"
MISSING = "the Promela models need spin and gcc: apt-get install spin gcc"

_HEADER = re.compile(r"^// (small|large|mutant): +(\w+) +(.+)$", re.MULTILINE)
_STATES = re.compile(r"^ *([\d.e+]+) states, stored", re.MULTILINE)
_ERRORS = re.compile(r"errors: (\d+)")
_FINDING = re.compile(r"^pan:\d+: (.+?)(?: \(at depth|$)", re.MULTILINE)
_INCOMPLETE = ("max search depth too small", "out of memory", "reached -DMEMLIM bound", "VECTORSZ")


@dataclass(frozen=True)
class Bounds:
    """One line ``small:`` or ``large:`` of a model's header: how many processes there are and what they do."""

    name: str
    defines: tuple[str, ...]
    large: bool


@dataclass(frozen=True)
class Mutant:
    """One line ``mutant:`` of a model's header: a plausible bug, and the bounds within which Spin finds it."""

    name: str
    bounds: str
    text: str


@dataclass(frozen=True)
class Model:
    """A file of ``models/``."""

    path: Path
    bounds: tuple[Bounds, ...]
    mutants: tuple[Mutant, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    def small(self, name: str) -> Bounds:
        """The small bounds of this name."""
        (found,) = (bounds for bounds in self.bounds if bounds.name == name and not bounds.large)
        return found


@dataclass(frozen=True)
class Verdict:
    """What a verifier found."""

    errors: int
    findings: tuple[str, ...]
    """The kinds of errors: a violated assertion, an invalid end state, or a cycle."""
    states: int
    seconds: float
    """Time of the search, without the making of the verifier."""
    output: str
    trail: str
    """The end of the run that leads to the first error."""


def available() -> bool:
    """Whether Spin and a C compiler are installed."""
    return shutil.which("spin") is not None and shutil.which("gcc") is not None


@cache
def models() -> tuple[Model, ...]:
    """All models, with the bounds and mutants of their headers."""
    found = []
    for path in sorted(MODELS.glob("*.pml")):
        bounds: list[Bounds] = []
        mutants: list[Mutant] = []
        for kind, name, rest in _HEADER.findall(path.read_text()):
            if kind == "mutant":
                where, text = rest.split(maxsplit=1)
                mutants.append(Mutant(name, where, text))
            else:
                bounds.append(Bounds(name, tuple(rest.split()), kind == "large"))
        found.append(Model(path, tuple(bounds), tuple(mutants)))
    return tuple(found)


def verify(
    model: Model, bounds: Bounds, directory: Path, *, mutant: str | None = None, cycles: bool = False, timeout: float
) -> Verdict:
    """Search all states for violated assertions and invalid end states; with ``cycles``, for runs that never end.

    Large bounds use bitstate hashing: a state is two or three bits, and a few states may be missed. A mutant's search
    stops at the first error."""
    defines = [f"-D{define}" for define in bounds.defines]
    if mutant is not None:
        defines.append(f"-DMUTANT_{mutant}")
    _run(["spin", "-a", *defines, str(model.path)], directory, timeout)
    options = ["-DNP" if cycles else "-DSAFETY", "-DVECTORSZ=2048"]
    options += ["-DBITSTATE"] if bounds.large else ["-DMEMLIM=3000"]
    # A mutant's search is short: compiling the verifier takes 0.7 s with -O0 and 4.0 s with -O1.
    level = "-O0" if mutant is not None else "-O1"
    _run(["gcc", level, "-w", *options, "-o", "pan", "pan.c"], directory, timeout)
    began = time.monotonic()
    depth = "-m2000000" if bounds.large else "-m200000"
    arguments = ["-n", depth, "-c1", *(["-l"] if cycles else []), "-w32" if bounds.large else "-w22"]
    output = _run(["./pan", *arguments], directory, timeout)
    seconds = time.monotonic() - began
    incomplete = [sign for sign in _INCOMPLETE if sign in output]
    errors = _ERRORS.search(output)
    states = _STATES.search(output)
    if errors is None or states is None or (incomplete and mutant is None):
        raise AssertionError(f"the search is incomplete {incomplete}:\n{output}")
    trail = ""
    if int(errors[1]) and mutant is None:
        found = next(directory.glob("*.trail"))  # spin looks for it beside the model
        trail = _run(["spin", "-k", str(found), "-p", "-g", *defines, str(model.path)], directory, timeout)[-20_000:]
    findings = tuple(_FINDING.findall(output))
    return Verdict(int(errors[1]), findings, round(float(states[1])), seconds, output, trail)


def _run(command: list[str], directory: Path, timeout: float) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0 and command[0] != "./pan":
        raise AssertionError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout
