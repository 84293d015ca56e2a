"""The comparison: several runs in one page. Runs that differ only in their seed are one line, with their range."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from memlane.train.files import replacing
from memlane.train.options import OptionError
from memlane.train.runs import RunInfo
from memlane.train.ui.formatting import short_number
from memlane.train.ui.report.metrics import Column, read_metrics
from memlane.train.ui.report.plots import Line, plot
from memlane.train.ui.report.skeleton import fill_page

_POINTS = 200
"""Points per line."""
_COLOURS = (1, 2, 4, 5, 6, 7, 8)
"""Numbers of the colours in ``report.css``."""


@dataclass(frozen=True)
class _Group:
    """Runs of one environment, one algorithm and one set of settings."""

    env: str
    name: str
    """Algorithm, and the settings that other groups of the environment have another value of."""
    runs: list[RunInfo]
    curves: list[dict[str, Column]]
    """Columns of metrics.csv of each run."""
    colour: int


def write_comparison(runs: Sequence[RunInfo], path: Path) -> Path:
    """Write a page about runs: lines of their returns, and tables of what they have reached."""
    groups = _groups(runs)
    envs = list(dict.fromkeys(group.env for group in groups))
    plots = [figure for env in envs for figure in _plots(env, [group for group in groups if group.env == env])]
    sections = [
        f'<section class="plots">{"".join(plots)}</section>',
        _section("Groups", _group_table(groups)),
        _section("Runs", _run_table(groups, [run for run in runs if run.state == "damaged"], path.parent)),
    ]
    title = " · ".join(envs) or "runs"
    summary = (
        f"{_count(len(runs), 'run')} in {_count(len(groups), 'group')}. A line is the mean over the seeds of a group, "
        "its band reaches from the lowest to the highest run, and a run that has ended keeps its last return."
    )
    try:
        with replacing(path) as file:
            file.write(fill_page(title, escape(title), summary, "\n".join(sections)).encode())
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _groups(runs: Sequence[RunInfo]) -> list[_Group]:
    by_settings: dict[tuple[str, str, str], list[RunInfo]] = {}
    for run in runs:
        if run.state != "damaged":
            key = run.env, run.algo, json.dumps(run.settings, sort_keys=True, default=str)
            by_settings.setdefault(key, []).append(run)
    groups = []
    for number, ((env, algo, _), members) in enumerate(by_settings.items()):
        rivals = [others[0].settings for key, others in by_settings.items() if key[:2] == (env, algo)]
        members = sorted(members, key=lambda run: (run.seed or 0, str(run.path)))
        name = " · ".join([algo, *_differences(members[0].settings, rivals)])
        curves = [_read(run.path) for run in members]
        groups.append(_Group(env, name, members, curves, _COLOURS[number % len(_COLOURS)]))
    return groups


def _differences(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that not all have alike, as text."""
    names = sorted({name for other in others for name in other})
    return [
        f"{name}={_text(settings.get(name, 'default'))}"
        for name in names
        if any(other.get(name) != settings.get(name) for other in others)
    ]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(run_dir: Path) -> dict[str, Column]:
    try:
        return read_metrics(run_dir / "metrics.csv")
    except (OSError, ValueError, LookupError):
        return {}  # the line is missing, and the table says what is known


# ---------------------------------------------------------------------------------------------------------- the plots


def _plots(env: str, groups: Sequence[_Group]) -> list[str]:
    targets = {run.target for group in groups for run in group.runs}
    target = targets.pop() if len(targets) == 1 else None
    return [
        _plot(f"{env}: return over {title}", unit, column, groups, target)
        for title, unit, column in (("steps", "steps", "env_steps"), ("time", "s", "seconds"))
    ]


def _plot(title: str, unit: str, column: str, groups: Sequence[_Group], target: float | None) -> str:
    known = [_known_points(curve, column) for group in groups for curve in group.curves]
    end = max((points[0][-1] for points in known if points[0]), default=0.0)
    grid = [end * number / (_POINTS - 1) for number in range(_POINTS)]
    lines = []
    for group in groups:
        values = [_resample(*_known_points(curve, column), grid) for curve in group.curves]
        rows = [[value for value in row if not math.isnan(value)] for row in zip(*values, strict=True)]
        means = [sum(row) / len(row) if row else math.nan for row in rows]
        several = len(group.runs) > 1
        low = [min(row, default=math.nan) for row in rows] if several else None
        high = [max(row, default=math.nan) for row in rows] if several else None
        lines.append(Line(group.name, means, group.colour, low, high))
    return plot(title, unit, grid, lines, target=target)


def _known_points(curve: Mapping[str, Column], column: str) -> tuple[Column, Column]:
    pairs = zip(curve.get(column, []), curve.get("mean_return", []), strict=False)
    known = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in known], [y for _, y in known]


def _resample(x: Column, y: Column, grid: Column) -> Column:
    """Values at the points of ``grid``: between those of the run, nan before the first, the last one after the end."""
    values = []
    for point in grid:
        after = bisect_right(x, point)
        if after == 0:
            values.append(math.nan)
        elif after == len(x):
            values.append(y[-1])
        else:
            share = (point - x[after - 1]) / max(x[after] - x[after - 1], 1e-12)
            values.append(y[after - 1] + share * (y[after] - y[after - 1]))
    return values


# --------------------------------------------------------------------------------------------------------- the tables


def _group_table(groups: Sequence[_Group]) -> str:
    rows = []
    for group in groups:
        solved = [run.steps for run in group.runs if run.stopped_by == "target"]
        key = f'<span class="key"><i class="k{group.colour}"></i></span>{escape(group.name)}'
        rows.append(
            [
                escape(group.env),
                key,
                str(len(group.runs)),
                f"{len(solved)} of {len(group.runs)}",
                f"{short_number(median(solved))} / {short_number(max(solved))}" if solved else "-",
                _mean_and_range([run.mean_return for run in group.runs]),
                _mean_and_range([run.evaluation for run in group.runs]),
            ]
        )
    headings = ["environment", "group", "runs", "reached the target", "steps to it: median / most",
                "last return: mean (range)", "evaluation: mean (range)"]  # fmt: skip
    return _table(headings, rows)


def _run_table(groups: Sequence[_Group], damaged: Sequence[RunInfo], directory: Path) -> str:
    rows = [
        [
            escape(run.env), escape(group.name), str(run.seed), run.state, short_number(run.steps),
            short_number(run.mean_return), short_number(run.evaluation), _link(run.path, directory),
        ]
        for group in groups
        for run in group.runs
    ]  # fmt: skip
    rows += [["-"] * 3 + ["damaged"] + ["-"] * 3 + [escape(str(run.path))] for run in damaged]
    return _table(["environment", "group", "seed", "state", "steps", "return", "evaluation", "run"], rows)


def _link(run_dir: Path, directory: Path) -> str:
    report = run_dir / "report.html"
    if not report.exists():
        return escape(str(run_dir))
    return f'<a href="{quote(os.path.relpath(report, directory))}">{escape(str(run_dir))}</a>'


def _mean_and_range(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "-"
    spread = f" ({short_number(min(known))} to {short_number(max(known))})" if len(known) > 1 else ""
    return short_number(sum(known) / len(known)) + spread


def _section(title: str, table: str) -> str:
    return f'<section><h2>{title}</h2><div class="wide">{table}</div></section>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="columns"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
