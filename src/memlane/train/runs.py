"""Runs: what is in run directories, read from their files. Needs no torch."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from memlane.train.run_dir import holder_of

State = Literal["running", "finished", "stopped", "failed", "killed", "damaged"]
"""A process trains in it; its target or a limit was reached; Ctrl-C or a signal stopped it; an exception ended it; it
ended without a result; its files cannot be read."""

_MAX_DEPTH = 3
"""Levels of directories that are searched for runs."""
_TAIL_BYTES = 65_536
"""End of metrics.csv that has its last line: a line has some hundred bytes."""


@dataclass(frozen=True)
class RunInfo:
    """A run directory in a list of runs."""

    path: Path
    """The directory."""
    env: str = "?"
    """Name of the environment."""
    algo: str = "?"
    """Algorithm."""
    seed: int | None = None
    """Random seed."""
    steps: int = 0
    """Environment steps so far."""
    mean_return: float = math.nan
    """Mean return of the last 100 episodes; nan if none has ended."""
    state: State = "damaged"
    """Whether a process trains in it, or how it has ended."""
    holder: str = ""
    """The process that trains in it."""
    stopped_by: str = ""
    """What has stopped it: as in ``Result``, or "error"."""
    reason: str = ""
    """Why it has stopped, as text."""
    evaluation: float = math.nan
    """Mean return of the evaluation; nan if there was none."""
    target: float | None = None
    """Mean return at which the training stops."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything in config.json that changes what is learned, the seed apart; nested names are written with a dot."""

    def as_json(self) -> dict[str, Any]:
        """The same with numbers that JSON has: null instead of nan."""
        values = {**asdict(self), "path": str(self.path)}
        for name in ("mean_return", "evaluation", "target"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = None
        return values


def find_runs(directories: Iterable[Path]) -> list[RunInfo]:
    """The runs in these directories and in those below, each once, in the order of their names."""
    found: dict[Path, RunInfo] = {}
    for directory in directories:
        for path in _run_dirs(Path(directory), _MAX_DEPTH):
            found.setdefault(path.resolve(), read_run(path))
    return list(found.values())


def _run_dirs(path: Path, depth: int) -> Iterator[Path]:
    if os.path.lexists(path / "config.json"):
        yield path
    elif depth and path.is_dir():
        try:
            below = sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for name in below:
            yield from _run_dirs(path / name, depth - 1)


def read_run(path: Path) -> RunInfo:
    """Read a run directory. Files that cannot be read make it ``damaged``; that is no error in a list of runs."""
    holder = holder_of(path)
    try:
        config = json.loads((path / "config.json").read_bytes())
        options = config["options"]
        result = _read_result(path)
        row = _last_row(path / "metrics.csv")
        evaluation = (result.get("evaluation") or {}).get("mean_return", math.nan)
        return RunInfo(
            path,
            str(config["name"]),
            str(options["algo"]),
            int(options["seed"]),
            int(row.get("env_steps", 0)),
            row.get("mean_return", math.nan),
            "running" if holder else _state(result),
            holder or "",
            str(result.get("stopped_by", "")),
            str(result.get("reason", "")),
            float(evaluation),
            None if config.get("target") is None else float(config["target"]),
            _settings(config),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return RunInfo(path, state="damaged", reason=f"{type(error).__name__}: {error}")


def _read_result(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / "result.json").read_bytes()))
    except FileNotFoundError:
        return {}


def _state(result: Mapping[str, Any]) -> State:
    match result.get("stopped_by"):
        case None:
            return "killed"
        case "error":
            return "failed"
        case "target" | "max_steps" | "max_seconds":
            return "finished"
        case _:
            return "stopped"


def _last_row(path: Path) -> dict[str, float]:
    """The last whole line of metrics.csv; empty if there is none. The file may be large, so only its ends are read."""
    try:
        with path.open("rb") as file:
            names = file.readline().decode().strip().split(",")
            begin = file.tell()
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - _TAIL_BYTES))
            lines = file.read().decode().split("\n")[:-1]  # without what follows the last end of a line
    except FileNotFoundError:
        return {}
    for values in csv.reader(lines[-1:]):
        if len(values) == len(names):
            return {name: float(value) for name, value in zip(names, values, strict=True)}
    return {}


_LIMITS = {"seed", "run_dir", "max_steps", "max_seconds", "target", "save_interval", "save_seconds", "device", "env"}
"""Options that do not change what is learned in a step; ``env`` and ``seed`` have columns of their own."""


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in config["options"].items() if name not in {*_LIMITS, "algo"}}
    flat: dict[str, Any] = {}

    def flatten(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    flatten({name: value for name, value in options.items() if name not in ("config", "env_settings")}, "")
    flatten(options.get("config", {}), "")
    flatten(options.get("env_settings", {}), "env.")
    return flat
