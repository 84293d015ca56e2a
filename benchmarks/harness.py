"""What every benchmark shares: turns, tables with ratios, and a JSON file with every raw value.

A benchmark makes ``Contender`` objects, lets them ``race`` in turns, and passes the tables and the expectations to a
``Report``. All times are nanoseconds per operation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

HERE = Path(__file__).resolve().parent
BARE = HERE.parent / "build" / "native" / "bare"
BARE_SECONDS = 120
BUSY_LOAD = 0.5
"""Load average of the last minute above which the numbers are not reliable."""

Kind = Literal["memlane", "peer", "limit", "other"]
"""``other`` does different work from the rest of its table and is shown for orientation, without an expectation."""


@dataclass
class Contender:
    """One row of a table. ``measure`` runs one round and returns nanoseconds per operation, one value per block."""

    name: str
    kind: Kind
    measure: Callable[[], Sequence[float]]
    skip: str = ""
    """Why it cannot run here; empty if it can."""
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [value for values in self.rounds for value in values]

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.rounds else math.nan

    @property
    def middle_half(self) -> tuple[float, float]:
        """The range that holds the middle half of all values."""
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def best_round(self) -> float:
        """The median of the fastest round: what the machine allows when it is idle."""
        return min(map(statistics.median, self.rounds), default=math.nan)


def race(contenders: Sequence[Contender], rounds: int) -> None:
    """Measure all contenders in turns, ``rounds`` times, so that a noisy minute of the machine affects all of them.

    Each round has a random order, so that no contender always runs after the same one. A rotation is not enough: the
    contender after bare C, which empties the caches, was 1.4 times slower. A peer that fails stays in the table with
    its error; a failure of memlane is raised.
    """
    order = random.Random(0)
    runners = [contender for contender in contenders if not contender.skip]
    for number in range(rounds):
        order.shuffle(runners)
        for contender in runners:
            if contender.skip:
                continue
            _progress(f"round {number + 1} of {rounds}: {contender.name}")
            try:
                contender.rounds.append(list(contender.measure()))
            except Exception as error:
                if contender.kind == "memlane":
                    raise
                contender.skip = f"failed: {type(error).__name__}: {error}"
                contender.rounds.clear()
    _progress("")


@dataclass
class Table:
    """Contenders that did the same work. ``reference`` names the one whose time the ratios divide by."""

    title: str
    reference: str
    contenders: Sequence[Contender]
    operation: str
    """What one operation is, in a few words."""
    operation_bytes: int = 0
    """Bytes that one operation moves; adds a column with GB/s."""
    rate: str = ""
    """The head of a column with operations per second; empty for no such column."""
    notes: Sequence[str] = ()
    """Lines below the table."""

    quantity: ClassVar[str] = "time"

    def format_value(self, value: float) -> str:
        return duration(value)

    def __getitem__(self, name: str) -> Contender:
        return next(contender for contender in self.contenders if contender.name == name)

    def text(self) -> str:
        head = ["", "median", "middle half", "best round", "ratio"] + (["GB/s"] if self.operation_bytes else [])
        head += [self.rate] if self.rate else []
        reference = self[self.reference].median
        lines: list[list[str]] = []
        notes = [f"  {note}" for note in self.notes]
        for contender in sorted(self.contenders, key=lambda contender: (bool(contender.skip), contender.median)):
            if contender.skip:
                notes.append(f"  {contender.name}: not measured, {contender.skip}")
                continue
            low, high = contender.middle_half
            cells = [
                contender.name,
                self.format_value(contender.median),
                f"{self.format_value(low)} .. {self.format_value(high)}",
            ]
            cells += [self.format_value(contender.best_round), f"{contender.median / reference:.2f}"]
            if self.operation_bytes:
                cells.append(f"{self.operation_bytes / contender.median:.2f}")
            if self.rate:
                cells.append(f"{1e9 / contender.median:,.0f}")
            lines.append(cells)
        widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
        rows = ["  ".join([line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)])
                for line in [head, *lines]]  # fmt: skip
        rule = "-" * len(rows[0])
        caption = (
            f"{self.quantity} for {self.operation}; ratio: {self.quantity} / {self.quantity} of {self.reference!r}"
        )
        return "\n".join([self.title, caption, rule, rows[0], rule, *rows[1:], *notes])

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "operation": self.operation,
            "operation_bytes": self.operation_bytes,
            "reference": self.reference,
            "notes": list(self.notes),
            "rows": [
                {
                    "name": row.name,
                    "kind": row.kind,
                    "skipped": row.skip,
                    "median_ns": row.median if row.rounds else None,
                    "ratio": row.median / self[self.reference].median if row.rounds else None,
                    "rounds_ns": [[round(value, 1) for value in values] for values in row.rounds],
                }
                for row in self.contenders
            ],
        }


@dataclass
class Expectation:
    """What memlane is expected to reach. ``measured`` is None if a contender that it compares is missing."""

    text: str
    measured: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def outcome(self) -> str:
        if self.measured is None or math.isnan(self.measured):
            return "not measured"
        too_low = self.at_least is not None and self.measured < self.at_least
        too_high = self.at_most is not None and self.measured > self.at_most
        return "missed" if too_low or too_high else "held"

    def __str__(self) -> str:
        measured = "" if self.measured is None or math.isnan(self.measured) else f" (measured {self.measured:.2f})"
        return f"{self.outcome.upper():>12}  {self.text}{measured}"


@dataclass
class Report:
    """Tables and expectations of one run: printed when added, and written as JSON at the end."""

    name: str
    options: argparse.Namespace
    peers: Sequence[str] = ()
    tables: list[Table] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = time.time()
        self._load = os.getloadavg()
        print(f"{machine()['processor']}, {machine()['cores']} cores, {machine()['kernel']}, "
              f"Python {machine()['python']}, load {self._load[0]:.2f}")  # fmt: skip
        if self._load[0] > BUSY_LOAD:
            print("this machine is busy: expect wide ranges, and do not publish these numbers")

    def add(self, table: Table) -> Table:
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)
        return table

    def expect(self, *expectations: Expectation) -> None:
        self.expectations += expectations

    def finish(self) -> None:
        """Print the expectations with their outcomes and write the JSON. A miss is a result, not an error."""
        print("\nexpected of memlane:")
        for expectation in self.expectations:
            print(f"  {expectation}")
        path = self.options.json
        if path is None and not self.options.quick:
            path = HERE / "results" / f"{self.name}.json"
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # One line per list of numbers, so that a diff of two results can be read.
        text = re.sub(
            r"\[[-+.\de,\s]+\]", lambda match: " ".join(match[0].split()), json.dumps(self.record(), indent=1)
        )
        path.write_text(text + "\n")
        print(f"\nall values: {path}")

    def record(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._begun)),
            "seconds": round(time.time() - self._begun, 1),
            "load_before": self._load,
            "options": {key: value for key, value in vars(self.options).items() if key != "json"},
            "machine": machine(),
            "versions": {package: version(package) for package in ("memlane", "numpy", *self.peers)},
            "tables": [table.record() for table in self.tables],
            "expectations": [
                {
                    "text": expectation.text,
                    "measured": expectation.measured,
                    "at_least": expectation.at_least,
                    "at_most": expectation.at_most,
                    "outcome": expectation.outcome,
                }
                for expectation in self.expectations
            ],
        }


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="run for a few seconds to see that it works; "
                           "the numbers mean little")  # fmt: skip
    arguments.add_argument("--json", type=Path, help="file for all values (default: benchmarks/results/<name>.json; "
                           "none with --quick)")  # fmt: skip
    arguments.add_argument("--rounds", type=int, help="number of turns of each contender")
    return arguments


def ratio(slower: Contender | None, faster: Contender | None) -> float | None:
    """How many times longer ``slower`` took; None if one of them is missing."""
    return slower.median / faster.median if slower and faster and slower.rounds and faster.rounds else None


def best(contenders: Sequence[Contender], prefix: str = "", kind: Kind | None = None) -> Contender | None:
    """The fastest measured contender of a kind whose name begins with ``prefix``."""
    rows = [row for row in contenders if row.rounds and row.name.startswith(prefix) and kind in (None, row.kind)]
    return min(rows, key=lambda row: row.median, default=None)


def threads_text(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")


# --------------------------------------------------------------------------------------------------- the bare limit


def bare_skip() -> str:
    """Why bare C cannot be measured; empty if it can."""
    return "" if os.access(BARE, os.X_OK) else "build/native/bare is not built (make build/native/.built)"


def bare(*arguments: object, core: int | None = None) -> list[float]:
    """Run the bare C program, without Python and memlane; return nanoseconds per operation, one value per block."""
    command = [str(BARE), *map(str, arguments)]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BARE_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"bare {arguments} ended with code {done.returncode}: {done.stderr.strip()}")
    values: list[float] = json.loads(done.stdout)["blocks_ns"]
    return values


# --------------------------------------------------------------------------------------------- machine and versions


@cache
def machine() -> dict[str, Any]:
    return {
        "processor": _first_match("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": int((_first_match("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "kernel": f"{platform.system()} {platform.release()}",
        "hypervisor": "hypervisor" in (_first_match("/proc/cpuinfo", "flags") or "").split(),
        "shmem_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def duration(ns: float) -> str:
    """Format with three digits and a unit: ``1.23 us``."""
    unit, size = next(((unit, size) for unit, size in (("ms", 1e6), ("us", 1e3)) if ns >= size), ("ns", 1.0))
    value = ns / size
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _first_match(path: str, key: str) -> str | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
