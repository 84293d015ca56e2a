"""Report: what a run's folder tells, as one page that needs nothing else: no server, no network, no library."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

_POINTS = 400
"""Of a line: as many as a plot has pixels to show. Rows between them are averaged."""
_COARSE = 100
"""Of what jumps from one update to the next: shares of time, throughput."""
_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 30

Column = list[float]
"""A number for each update; nan where there is none."""


def write_report(folder: str | Path) -> Path:
    """Make ``report.html`` from the folder's config.json, metrics.csv and result.json; any of the last two may be
    missing, as in a run that goes on or was killed."""
    folder = Path(folder)
    config = _json(folder / "config.json")
    result = _json(folder / "result.json")
    columns = read_metrics(folder / "metrics.csv")
    parts = [
        _header(config, result, columns),
        _tiles(result, columns),
        _picture(folder / "evaluation.gif"),
        _plots(config, columns),
        _commands(folder),
        _tables(config),
    ]
    title = escape(f"{_env_of(config)} · memlane")
    page = _PAGE.format(title=title, style=_STYLE, script=_SCRIPT, body="\n".join(parts))
    path = folder / "report.html"
    almost = path.with_name("report.html.new")
    almost.write_text(page, encoding="utf-8")
    os.replace(almost, path)
    return path


def read_metrics(path: Path) -> dict[str, Column]:
    """metrics.csv by columns. A run that was killed and resumed has made some updates twice: the later ones count."""
    if not path.exists():
        return {}
    rows: list[dict[str, float]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = {name: _number(text) for name, text in row.items() if name}
            if math.isnan(numbers.get("iteration", math.nan)):
                continue  # the last line of a killed run, cut off
            while rows and rows[-1]["iteration"] >= numbers["iteration"]:
                rows.pop()
            rows.append(numbers)
    names = list(rows[0]) if rows else []
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# ---------------------------------------------------------------------------------------------------------- the words


def _env_of(config: Mapping[str, Any]) -> str:
    return str(config.get("name") or config.get("options", {}).get("env") or "a run")


def _header(config: Mapping[str, Any], result: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    options = config.get("options", {})
    collectors, envs = options.get("collectors", 1), config.get("num_envs", "?")
    what = [
        str(options.get("algo", "")).upper(),
        f"{collectors} collector{'s' if collectors != 1 else ''} of {envs} environments",
        f"{config.get('backend', '?')} backend",
        f"seed {options.get('seed', '?')}",
    ]
    reason = str(result.get("reason", ""))
    if not reason:
        kind, says = "open", "no result yet: it is running, or was killed" if columns else "nothing measured yet"
    elif "target" in reason:
        kind, says = "good", reason
    else:
        kind, says = "plain", "stopped by Ctrl-C" if reason == "Ctrl-C" else reason
    return (
        f'<header><h1>{escape(_env_of(config))} <span class="badge {kind}">{escape(says)}</span></h1>'
        f'<p class="muted">{escape(" · ".join(word for word in what if word))}</p></header>'
    )


def _tiles(result: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    steps, seconds = _last(columns, "env_steps"), _last(columns, "seconds")
    evaluation = result.get("evaluation") or {}
    tiles = []
    if evaluation:
        spread = f"± {short(evaluation['std_return'])} over {evaluation['episodes']} episodes"
        tiles.append(("evaluation return", short(evaluation["mean_return"]), spread))
    tiles += [
        ("training return", short(_last(columns, "mean_return")), "last 100 episodes, exploring"),
        ("environment steps", short(steps), f"{short(_last(columns, 'iteration'))} updates"),
        ("time", _duration(seconds), "of training"),
        ("throughput", short(steps / seconds if seconds else math.nan), "steps/s, start-up included"),
        ("restarts", short(_last(columns, "restarts")), "collectors replaced"),
    ]
    return '<section class="tiles">' + "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in tiles
    ) + "</section>"  # fmt: skip


def _picture(path: Path) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        '<section><figure class="film"><figcaption>One evaluated episode</figcaption>'
        f'<img alt="the policy in its environment" src="data:image/gif;base64,{data}"></figure></section>'
    )


def _commands(folder: Path) -> str:
    where = shlex.quote(str(folder.resolve()))
    lines = {
        "Go on": f"memlane resume {where}",
        "Evaluate": f"memlane eval {where} --episodes 100",
        "See it play": f"memlane eval {where} --render gif",
        "All curves": f"tensorboard --logdir {where}",
    }
    rows = "".join(f"<tr><th>{name}</th><td><code>{escape(line)}</code></td></tr>" for name, line in lines.items())
    return f'<section><h2>Commands</h2><div class="wide"><table>{rows}</table></div></section>'


def _tables(config: Mapping[str, Any]) -> str:
    options = {name: value for name, value in config.get("options", {}).items() if name not in ("config", "run_dir")}
    algorithm = {name: value for name, value in config.get("algorithm", {}).items() if name not in options}
    tables = {"Options": options, "Algorithm": algorithm, "Versions": config.get("versions", {})}
    made = "".join(
        f"<div><h2>{name}</h2><table>{''.join(_row(key, value) for key, value in table.items())}</table></div>"
        for name, table in tables.items()
        if table
    )
    return f'<section class="tables">{made}</section>'


def _row(name: str, value: Any) -> str:
    text = "-" if value is None or value == {} else f"{value:g}" if isinstance(value, float) else str(value)
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"


def _last(columns: Mapping[str, Column], name: str) -> float:
    known = [value for value in columns.get(name, []) if not math.isnan(value)]
    return known[-1] if known else math.nan


def short(value: float) -> str:
    """For people: 1234567 is 1.23M."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    for limit, unit, name in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


# ---------------------------------------------------------------------------------------------------------- the plots


@dataclass(frozen=True)
class Line:
    name: str
    values: Column
    colour: int = 1
    """Which of the page's colours."""


def _plots(config: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    if not columns:
        return ""
    steps, seconds = columns["env_steps"], columns["seconds"]
    none = [math.nan] * len(steps)

    def line(name: str, column: str, colour: int = 1) -> Line:
        return Line(name, columns.get(column, none), colour)

    busy, share = columns.get("collectors_busy", none), columns.get("env_share", none)
    learning = columns.get("learner_busy", none)
    target = config.get("target")
    made = [
        _plot("Return over steps", "steps", steps, [line("return", "mean_return")], mark=target),
        _plot("Return over time", "s", seconds, [line("return", "mean_return")], mark=target),
        _throughput(steps, seconds),
        _plot(
            "Policy lag, versions", "steps", steps, [line("mean", "lag_mean"), line("largest", "lag_max", 3)], floor=0
        ),
        _plot(
            "Where the learner's time went", "steps", steps,
            [Line("learning", learning, 1), Line("waiting for rollouts", [1 - one for one in learning], 0)],
            stacked=True,
        ),
        _plot(
            "Where the collectors' time went", "steps", steps,
            [
                Line("environments", [one * two for one, two in zip(busy, share, strict=True)], 2),
                Line("policy", [one * (1 - two) for one, two in zip(busy, share, strict=True)], 1),
                Line("waiting for the learner", [1 - one for one in busy], 0),
            ],
            stacked=True,
        ),
        _plot("Ring fill, share of slots unread", "steps", steps, [line("fill", "ring_fill")], floor=0, ceiling=1),
    ]  # fmt: skip
    made += [_plot(title, "steps", steps, [line(name, column)], floor=floor)
             for title, name, column, floor in _OF_UPDATES if column in columns]  # fmt: skip
    return f'<section class="plots">{"".join(made)}</section>'


# Each algorithm tells some of these.
_OF_UPDATES: list[tuple[str, str, str, float | None]] = [
    ("Samples per insert", "samples per insert", "samples_per_insert", 0),
    ("Age of samples, versions", "age", "sample_age", 0),
    ("KL divergence of an update", "KL", "kl", 0),
    ("Policy loss", "policy loss", "policy_loss", None),
    ("Value loss", "value loss", "value_loss", 0),
    ("Critic loss", "critic loss", "critic_loss", 0),
    ("Actor loss", "actor loss", "actor_loss", None),
    ("Loss", "loss", "loss", 0),
    ("Value of what is drawn", "value", "value", None),
    ("Temperature", "temperature", "temperature", 0),
    ("Epsilon", "epsilon", "epsilon", 0),
    ("Entropy", "entropy", "entropy", None),
    ("Learning rate", "learning rate", "learning_rate", 0),
]


def _plot(
    title: str,
    unit: str,
    x: Column,
    lines: Sequence[Line],
    *,
    mark: float | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
    stacked: bool = False,
) -> str:
    """An SVG, and its numbers for the hover. ``mark`` is a level to compare with; ``stacked`` are shares of one."""
    lines = [line for line in lines if any(not math.isnan(value) for value in line.values)]
    if len(x) < 2 or not lines:
        return (
            f"<figure><figcaption>{escape(title)}</figcaption><p class='muted'>not enough updates to draw</p></figure>"
        )
    x, thin = _thinned(x, [line.values for line in lines], _COARSE if stacked else _POINTS)
    if stacked:
        low, high = 0.0, 1.0
    else:
        everything = [value for values in thin for value in values if math.isfinite(value)]
        if mark is not None and not _near(mark, everything):
            mark = None
        everything += [one for one in (mark, floor, ceiling) if one is not None]
        low, high = min(everything), max(everything)
        if high - low < 1e-12:
            low, high = (low, low + 1) if floor is not None else (low - 0.5, high + 0.5)
    y_ticks = _ticks(low, high, 4)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    left, right = 0.0, max(x)

    def at_x(value: float) -> float:
        return _LEFT + (value - left) / max(right - left, 1e-12) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = []
    for tick in y_ticks:
        text = f"{tick:.0%}" if stacked else short(tick)
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}"/>'
        )
        drawn.append(f'<text x="{_LEFT - 7}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in [tick for tick in _ticks(left, right, 5) if tick <= right]:
        drawn.append(f'<text x="{at_x(tick):.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{short(tick)}</text>')
    drawn.append(f'<text x="0" y="{_HEIGHT - 9}">{unit}</text>')
    if stacked:
        drawn += _areas(x, lines, thin, at_x, at_y)
    else:
        for line, values in zip(lines, thin, strict=True):
            drawn.append(f'<path class="line c{line.colour}" d="{_path(x, values, at_x, at_y)}"/>')
    if mark is not None:
        drawn.append(
            f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y(mark):.1f}" y2="{at_y(mark):.1f}"/>'
        )
        place = at_y(mark) + (-5 if at_y(mark) > _TOP + 14 else 14)
        drawn.append(f'<text x="{_LEFT + 2}" y="{place:.1f}">target {short(mark)}</text>')
    drawn.append(f'<line class="cross" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" visibility="hidden"/>')
    numbers = {
        "unit": unit,
        "x": [float(f"{value:.6g}") for value in x],
        "px": [round(at_x(value), 1) for value in x],
        "share": stacked,
        "lines": {line.name: [_plain(value) for value in values] for line, values in zip(lines, thin, strict=True)},
    }
    legend = ""
    if len(lines) > 1:
        legend = "".join(
            f'<span class="key"><i class="k{line.colour}"></i>{escape(line.name)}</span>' for line in lines
        )
    data = escape(json.dumps(numbers, separators=(",", ":")))
    return (
        f'<figure data-plot="{data}"><figcaption>{escape(title)}<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} by {unit}">'
        f'{"".join(drawn)}</svg>'
        f'<div class="tip" hidden></div></figure>'
    )  # fmt: skip


def _throughput(steps: Column, seconds: Column) -> str:
    """Between the first update, before which programs start, and the last, over spans of equal steps."""
    places = sorted({round(place * (len(steps) - 1) / _COARSE) for place in range(_COARSE + 1)}) if steps else []
    x, speed = [], []
    for begin, end in pairwise(places):
        x.append(steps[end])
        speed.append((steps[end] - steps[begin]) / max(seconds[end] - seconds[begin], 1e-9))
    return _plot("Throughput, steps/s", "steps", x, [Line("steps/s", speed)], floor=0)


def _near(mark: float, values: Column) -> bool:
    """Whether a level can be drawn without making the line flat."""
    low, high = min(values), max(values)
    return math.isfinite(mark) and low - 4 * (high - low) <= mark <= high + 4 * (high - low)


def _areas(x: Column, lines: Sequence[Line], values: Sequence[Column], at_x: Any, at_y: Any) -> Iterable[str]:
    below = [0.0] * len(x)
    for line, column in zip(lines, values, strict=True):
        above = [one + (0 if math.isnan(two) else two) for one, two in zip(below, column, strict=True)]
        there = [f"{at_x(a):.1f},{at_y(min(b, 1)):.1f}" for a, b in zip(x, above, strict=True)]
        back = [f"{at_x(a):.1f},{at_y(min(b, 1)):.1f}" for a, b in zip(x, below, strict=True)]
        yield f'<polygon class="area k{line.colour}" points="{" ".join(there + back[::-1])}"/>'
        below = above


def _path(x: Column, values: Column, at_x: Any, at_y: Any) -> str:
    """Broken where numbers are missing."""
    made, pen = [], "M"
    for a, b in zip(x, values, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        made.append(f"{pen}{at_x(a):.1f} {at_y(b):.1f}")
        pen = "L"
    return "".join(made)


def _thinned(x: Column, columns: Sequence[Column], most: int) -> tuple[Column, list[Column]]:
    """No more points than ``most``: means of neighbours."""
    many = len(x)
    if many <= most:
        return x, list(columns)
    edges = [round(place * many / most) for place in range(most + 1)]
    spans = list(pairwise(edges))
    return [x[end - 1] for _, end in spans], [[_mean(one[begin:end]) for begin, end in spans] for one in columns]


def _mean(values: Column) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that reach from ``low`` to ``high`` and a little beyond."""
    span = max(high - low, 1e-12)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _plain(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main><script>{script}</script></body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --page:#f6f7f9; --card:#fff; --ink:#1b1f26; --muted:#667080; --grid:#e6e9ee;
  --c0:#d5dae2; --c1:#2f6fdb; --c2:#d9822b; --good:#1b7f4d; --goodbg:#dcf3e6; --open:#8a5a00; --openbg:#fdf0d2; }
@media (prefers-color-scheme: dark) { :root { --page:#12151a; --card:#1b2027; --ink:#e6eaf0; --muted:#96a1b0;
  --grid:#2b323c; --c0:#3a434f; --c1:#6ea3ff; --c2:#f0a45a; --good:#7fe0ad; --goodbg:#173a29; --open:#f1c873;
  --openbg:#3d3014; } }
* { box-sizing: border-box }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif }
main { max-width:1200px; margin:0 auto; padding:28px 20px 60px }
h1 { font-size:28px; margin:0; display:flex; flex-wrap:wrap; align-items:center; gap:12px }
h2 { font-size:15px; margin:0 0 8px }
.muted { color:var(--muted); margin:4px 0 0 }
.badge { font-size:13px; font-weight:600; padding:3px 10px; border-radius:99px; background:var(--grid) }
.badge.good { color:var(--good); background:var(--goodbg) } .badge.open { color:var(--open); background:var(--openbg) }
section { margin-top:20px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(160px,1fr)); gap:12px }
.tile, figure, .tables > div, .wide { background:var(--card); border:1px solid var(--grid); border-radius:10px }
.tile { padding:12px 14px; display:flex; flex-direction:column }
.tile span, .tile small { color:var(--muted); font-size:13px } .tile b { font-size:24px; font-weight:650 }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr)); gap:14px }
figure { margin:0; padding:12px 14px 6px; position:relative }
figcaption { font-weight:600; font-size:14px; display:flex; flex-wrap:wrap; justify-content:space-between;
  gap:2px 14px }
.legend { font-weight:400; font-size:12.5px; color:var(--muted); display:flex; gap:12px; flex-wrap:wrap }
.key i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:5px }
.k0 { background:var(--c0); fill:var(--c0) } .k1 { background:var(--c1); fill:var(--c1) }
.k2, .k3 { background:var(--c2); fill:var(--c2) }
svg { display:block; width:100%; height:auto; margin-top:6px; font:11.5px system-ui,sans-serif }
svg text { fill:var(--muted) } .grid { stroke:var(--grid) }
.line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round }
.c1 { stroke:var(--c1) } .c2 { stroke:var(--c2) } .c3 { stroke:var(--c2); stroke-dasharray:1 7 }
.mark { stroke:var(--muted); stroke-dasharray:5 4 } .cross { stroke:var(--muted); stroke-opacity:.6 }
.tip { position:absolute; top:44px; pointer-events:none; background:var(--ink); color:var(--page); font-size:12px;
  padding:5px 8px; border-radius:6px; white-space:pre; z-index:1 }
.film { display:inline-block } .film img { display:block; margin:8px 0; border-radius:6px; max-width:100%;
  max-height:260px }
.wide { padding:6px 14px; overflow-x:auto }
.tables { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,260px),1fr)); gap:14px;
  align-items:start }
.tables > div { padding:12px 14px; overflow-x:auto }
table { border-collapse:collapse; width:100% } tr + tr { border-top:1px solid var(--grid) }
th { text-align:left; font-weight:400; color:var(--muted); padding:5px 16px 5px 0; white-space:nowrap; width:1% }
td { padding:5px 0; font-variant-numeric:tabular-nums; overflow-wrap:anywhere }
code { font:13px ui-monospace,Menlo,Consolas,monospace; white-space:nowrap }
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-plot]")) {
  const plot = JSON.parse(figure.dataset.plot), svg = figure.querySelector("svg");
  const tip = figure.querySelector(".tip"), cross = figure.querySelector(".cross");
  const say = v => v === null ? "-" : plot.share ? (100 * v).toFixed(0) + "%" : String(v);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - box.left) / scale;
    let i = plot.px.findIndex(p => p >= at);
    if (i < 0) i = plot.px.length - 1;
    if (i > 0 && at - plot.px[i - 1] < plot.px[i] - at) i--;
    cross.setAttribute("x1", plot.px[i]); cross.setAttribute("x2", plot.px[i]);
    cross.setAttribute("visibility", "visible");
    tip.textContent = [plot.x[i].toLocaleString("en") + " " + plot.unit,
      ...Object.entries(plot.lines).map(([name, values]) => name + "  " + say(values[i]))].join("\\n");
    tip.hidden = false;
    const left = box.left - figure.getBoundingClientRect().left + plot.px[i] * scale + 10;
    const room = figure.clientWidth - tip.offsetWidth - 8;
    tip.style.left = (left > room ? left - tip.offsetWidth - 20 : left) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
}
"""
