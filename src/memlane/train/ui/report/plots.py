"""Plots: lines and stacked areas as SVG, with the numbers that ``report.js`` shows on hover."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from memlane.train.ui.formatting import short_number
from memlane.train.ui.report.metrics import Column

_MAX_POINTS = 400
"""Points per line, about as many as a plot has pixels. More are averaged."""
_MAX_COARSE_POINTS = 100
"""Points per line of quantities that jump between updates: shares of time, throughput."""
_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 30

_Scale = Callable[[float], float]
"""From a value to a coordinate of the SVG."""


@dataclass(frozen=True)
class Line:
    name: str
    values: Column
    colour: int = 1
    """Number of a colour in ``report.css``."""
    low: Column | None = None
    """Lower edge of a band around the line."""
    high: Column | None = None
    """Upper edge of the band."""


def plot(
    title: str,
    unit: str,
    x: Column,
    lines: Sequence[Line],
    *,
    target: float | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
    stacked: bool = False,
) -> str:
    """Draw lines over ``x``, which has the unit ``unit``.

    ``target`` is a level to mark. The y axis includes ``floor`` and ``ceiling``. ``stacked`` lines are shares that add
    up to 1.
    """
    lines = [line for line in lines if any(not math.isnan(value) for value in line.values)]
    if len(x) < 2 or not lines:
        return (
            f"<figure><figcaption>{escape(title)}</figcaption><p class='muted'>not enough updates to draw</p></figure>"
        )
    bands = [line for line in lines if line.low is not None and line.high is not None]
    edges = [edge for line in bands for edge in (line.low, line.high) if edge is not None]
    limit = _MAX_COARSE_POINTS if stacked else _MAX_POINTS
    x, columns = _downsample(x, [*(line.values for line in lines), *edges], limit)
    columns, edges = columns[: len(lines)], columns[len(lines) :]
    if stacked:
        low, high = 0.0, 1.0
    else:
        values = [value for column in [*columns, *edges] for value in column if math.isfinite(value)]
        if target is not None and not _is_near(target, values):
            target = None
        values += [level for level in (target, floor, ceiling) if level is not None]
        low, high = min(values), max(values)
        if high - low < 1e-12:
            low, high = (low, low + 1) if floor is not None else (low - 0.5, high + 0.5)
    y_ticks = _ticks(low, high, 4)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    left, right = 0.0, max(x)

    def at_x(value: float) -> float:
        return _LEFT + (value - left) / max(right - left, 1e-12) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    elements = []
    for tick in y_ticks:
        text = f"{tick:.0%}" if stacked else short_number(tick)
        elements.append(_level("grid", at_y(tick)))
        elements.append(f'<text x="{_LEFT - 7}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in [tick for tick in _ticks(left, right, 5) if tick <= right]:
        text = short_number(tick)
        elements.append(f'<text x="{at_x(tick):.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{text}</text>')
    elements.append(f'<text x="0" y="{_HEIGHT - 9}">{unit}</text>')
    if stacked:
        elements += _stacked_areas(x, lines, columns, at_x, at_y)
    else:
        for line, lower, upper in zip(bands, edges[::2], edges[1::2], strict=True):
            elements.append(f'<polygon class="band k{line.colour}" points="{_band(x, lower, upper, at_x, at_y)}"/>')
        for line, column in zip(lines, columns, strict=True):
            elements.append(f'<path class="line c{line.colour}" d="{_path(x, column, at_x, at_y)}"/>')
    if target is not None:
        elements.append(_level("mark", at_y(target)))
        text_y = at_y(target) + (-5 if at_y(target) > _TOP + 14 else 14)
        elements.append(f'<text x="{_LEFT + 2}" y="{text_y:.1f}">target {short_number(target)}</text>')
    elements.append(f'<line class="cross" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" visibility="hidden"/>')
    hover = {
        "unit": unit,
        "x": [float(f"{value:.6g}") for value in x],
        "px": [round(at_x(value), 1) for value in x],
        "percent": stacked,
        "lines": {
            line.name: [_json_number(value) for value in column] for line, column in zip(lines, columns, strict=True)
        },
        "bands": {
            line.name: [[_json_number(value) for value in edge] for edge in (lower, upper)]
            for line, lower, upper in zip(bands, edges[::2], edges[1::2], strict=True)
        },
    }
    legend = ""
    if len(lines) > 1:
        legend = "".join(
            f'<span class="key"><i class="k{line.colour}"></i>{escape(line.name)}</span>' for line in lines
        )
    data = escape(json.dumps(hover, separators=(",", ":")))
    return (
        f'<figure data-plot="{data}"><figcaption>{escape(title)}<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} by {unit}">'
        f'{"".join(elements)}</svg>'
        f'<div class="tip" hidden></div></figure>'
    )  # fmt: skip


def throughput(steps: Column, seconds: Column) -> tuple[Column, Column]:
    """Steps per second between pairs of updates that are far enough apart to be steady, and the steps at their ends.

    The time before the first update is left out: processes start in it.
    """
    if not steps:
        return [], []
    count = _MAX_COARSE_POINTS
    updates = sorted({round(point * (len(steps) - 1) / count) for point in range(count + 1)})
    x, speed = [], []
    for begin, end in pairwise(updates):
        x.append(steps[end])
        speed.append((steps[end] - steps[begin]) / max(seconds[end] - seconds[begin], 1e-9))
    return x, speed


def _is_near(level: float, values: Column) -> bool:
    """Whether a level can be drawn without making the lines look flat."""
    low, high = min(values), max(values)
    return math.isfinite(level) and low - 4 * (high - low) <= level <= high + 4 * (high - low)


def _level(css_class: str, y: float) -> str:
    return f'<line class="{css_class}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _stacked_areas(
    x: Column, lines: Sequence[Line], columns: Sequence[Column], at_x: _Scale, at_y: _Scale
) -> Iterable[str]:
    lower = [0.0] * len(x)
    for line, column in zip(lines, columns, strict=True):
        upper = [y + (0 if math.isnan(value) else value) for y, value in zip(lower, column, strict=True)]
        edges = [
            [f"{at_x(a):.1f},{at_y(min(b, 1)):.1f}" for a, b in zip(x, edge, strict=True)] for edge in (upper, lower)
        ]
        yield f'<polygon class="area k{line.colour}" points="{" ".join(edges[0] + edges[1][::-1])}"/>'
        lower = upper


def _band(x: Column, lower: Column, upper: Column, at_x: _Scale, at_y: _Scale) -> str:
    """Corners of the area between two lines, where both are known."""
    known = [(a, b, c) for a, b, c in zip(x, lower, upper, strict=True) if math.isfinite(b) and math.isfinite(c)]
    above = [f"{at_x(a):.1f},{at_y(c):.1f}" for a, _, c in known]
    below = [f"{at_x(a):.1f},{at_y(b):.1f}" for a, b, _ in known]
    return " ".join(above + below[::-1])


def _path(x: Column, column: Column, at_x: _Scale, at_y: _Scale) -> str:
    """SVG path with gaps where numbers are missing."""
    commands, command = [], "M"
    for a, b in zip(x, column, strict=True):
        if not math.isfinite(b):
            command = "M"
            continue
        commands.append(f"{command}{at_x(a):.1f} {at_y(b):.1f}")
        command = "L"
    return "".join(commands)


def _downsample(x: Column, columns: Sequence[Column], limit: int) -> tuple[Column, list[Column]]:
    """Average neighbours so that at most ``limit`` points remain."""
    count = len(x)
    if count <= limit:
        return x, list(columns)
    edges = [round(point * count / limit) for point in range(limit + 1)]
    spans = list(pairwise(edges))
    return [x[end - 1] for _, end in spans], [[_mean(column[begin:end]) for begin, end in spans] for column in columns]


def _mean(values: Column) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _ticks(low: float, high: float, about: int) -> list[float]:
    """About ``about`` round numbers that reach from ``low`` to ``high`` and a little beyond."""
    span = max(high - low, 1e-12)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _json_number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
