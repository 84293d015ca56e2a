"""The page: ``report.html`` of a run, filled in from its files and self-contained."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from memlane.train.files import replacing
from memlane.train.options import OptionError, names_code
from memlane.train.ui.formatting import collectors_and_envs, duration, resume_command, short_number
from memlane.train.ui.report.metrics import Column, last, read_metrics
from memlane.train.ui.report.plots import Line, plot, throughput
from memlane.train.ui.report.skeleton import fill_page


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` from config.json, metrics.csv and result.json of a run.

    metrics.csv and result.json may be missing: the run is not finished or was killed.
    """
    run_dir = Path(run_dir)
    try:
        page = _page(run_dir).encode()
    except Exception as error:  # a damaged file can lead to any
        raise OptionError(
            f"the report of {run_dir} cannot be written: its config.json, metrics.csv or result.json is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    path = run_dir / "report.html"
    with replacing(path) as file:
        file.write(page)
    return path


def _page(run_dir: Path) -> str:
    config = _read_json(run_dir / "config.json")
    result = _read_json(run_dir / "result.json")
    columns = read_metrics(run_dir / "metrics.csv")
    status_class, status = _status(result, columns)
    name = str(config.get("name") or config.get("options", {}).get("env") or "run")
    commands = _commands(run_dir, config, result)
    sections = [
        f'<section class="tiles">{_tiles(result, columns)}</section>',
        _animation(run_dir / "evaluation.gif"),
        f'<section class="plots">{_plots(config, columns)}</section>',
        f'<section><h2>Commands</h2><div class="wide"><table>{commands}</table></div></section>',
        f'<section class="tables">{_tables(config)}</section>',
    ]
    heading = f'{escape(name)} <span class="badge {status_class}">{escape(status)}</span>'
    return fill_page(name, heading, _summary(config), "\n".join(sections))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _status(result: Mapping[str, Any], columns: Mapping[str, Column]) -> tuple[str, str]:
    """CSS class and text of the badge beside the title."""
    reason = str(result.get("reason", ""))
    if not reason:
        return "open", "not finished: the run is in progress or was killed" if columns else "no updates yet"
    return "good" if result.get("stopped_by") == "target" else "plain", reason


def _summary(config: Mapping[str, Any]) -> str:
    options = config.get("options", {})
    parts = [
        str(options.get("algo", "")).upper(),
        collectors_and_envs(options.get("collectors", 1), config.get("num_envs", "?")),
        f"{config.get('backend', '?')} backend",
        f"seed {options.get('seed', '?')}",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(result: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    steps, seconds = last(columns, "env_steps"), last(columns, "seconds")
    evaluation = result.get("evaluation") or {}
    tiles = []
    if evaluation:
        spread = f"± {short_number(evaluation['std_return'])} over {evaluation['episodes']} episodes"
        tiles.append(("evaluation return", short_number(evaluation["mean_return"]), spread))
    tiles += [
        ("training return", short_number(last(columns, "mean_return")), "mean of the last 100 episodes"),
        ("environment steps", short_number(steps), f"{short_number(last(columns, 'iteration'))} updates"),
        ("time", duration(seconds), "of training"),
        ("throughput", short_number(steps / seconds if seconds else math.nan), "steps/s, including start-up"),
        ("restarts", short_number(last(columns, "restarts")), "of collectors"),
    ]
    return "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )


def _animation(path: Path) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        '<section><figure class="animation"><figcaption>One evaluation episode</figcaption>'
        f'<img alt="the policy in its environment" src="data:image/gif;base64,{data}"></figure></section>'
    )


def _commands(run_dir: Path, config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    path = trusted = shlex.quote(str(run_dir.resolve()))
    if names_code(config.get("options", {}).get("env")):
        trusted = f"{path} --trust"
    commands = {
        "Resume": resume_command(
            trusted, result.get("stopped_by", ""), config.get("max_steps") or 1, result.get("env_steps", 0)
        ),
        "Evaluate": f"memlane eval {trusted} --episodes 100",
        "Record a GIF": f"memlane eval {trusted} --render gif",
    }
    rows = [f"<tr><th>{name}</th><td><code>{escape(line)}</code></td></tr>" for name, line in commands.items()]
    if any(run_dir.glob("events.out.*")):
        rows.append(f"<tr><th>TensorBoard</th><td><code>tensorboard --logdir {escape(path)}</code></td></tr>")
    else:
        install = 'not installed during this run; <code>pip install "memlane[cli]"</code> installs it'
        rows.append(f"<tr><th>TensorBoard</th><td>{install}</td></tr>")
    return "".join(rows)


def _tables(config: Mapping[str, Any]) -> str:
    hidden = ("config", "run_dir")
    options = {name: value for name, value in config.get("options", {}).items() if name not in hidden}
    algorithm = {name: value for name, value in config.get("algorithm", {}).items() if name not in options}
    tables = {
        "Options": options,
        "Algorithm settings (others: default)": algorithm,
        "Versions": config.get("versions", {}),
    }
    return "".join(
        f"<div><h2>{title}</h2><table>{''.join(_row(name, value) for name, value in table.items())}</table></div>"
        for title, table in tables.items()
        if table
    )


def _row(name: str, value: Any) -> str:
    text = "-" if value is None or value == {} else f"{value:g}" if isinstance(value, float) else str(value)
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"


# ---------------------------------------------------------------------------------------------------------- the plots


def _plots(config: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    if not columns:
        return ""
    steps, seconds = columns["env_steps"], columns["seconds"]
    missing = [math.nan] * len(steps)

    def line(name: str, column: str, colour: int = 1) -> Line:
        return Line(name, columns.get(column, missing), colour)

    busy, env_share = columns.get("collectors_busy", missing), columns.get("env_share", missing)
    learning = columns.get("learner_busy", missing)
    target = config.get("target")
    speed_steps, speed = throughput(steps, seconds)
    plots = [
        plot("Return over steps", "steps", steps, [line("return", "mean_return")], target=target),
        plot("Return over time", "s", seconds, [line("return", "mean_return")], target=target),
        plot("Throughput, steps/s", "steps", speed_steps, [Line("steps/s", speed)], floor=0),
        plot("Policy lag, versions", "steps", steps, [line("mean", "lag_mean"), line("max", "lag_max", 3)], floor=0),
        plot(
            "Learner time", "steps", steps,
            [Line("learning", learning, 1), Line("waiting for rollouts", [1 - share for share in learning], 0)],
            stacked=True,
        ),
        plot(
            "Collector time", "steps", steps,
            [
                Line("environments", [a * b for a, b in zip(busy, env_share, strict=True)], 2),
                Line("policy", [a * (1 - b) for a, b in zip(busy, env_share, strict=True)], 1),
                Line("waiting for the learner", [1 - share for share in busy], 0),
            ],
            stacked=True,
        ),
        plot("Ring fill, share of slots unread", "steps", steps, [line("fill", "ring_fill")], floor=0, ceiling=1),
    ]  # fmt: skip
    plots += [
        plot(title, "steps", steps, [line(name, column)], floor=floor)
        for title, name, column, floor in _UPDATE_METRICS
        if column in columns
    ]
    return "".join(plots)


_UPDATE_METRICS: list[tuple[str, str, str, float | None]] = [
    ("Samples per insert", "samples per insert", "samples_per_insert", 0),
    ("Sample age, versions", "age", "sample_age", 0),
    ("KL divergence of an update", "KL", "kl", 0),
    ("Policy loss", "policy loss", "policy_loss", None),
    ("Value loss", "value loss", "value_loss", 0),
    ("Critic loss", "critic loss", "critic_loss", 0),
    ("Actor loss", "actor loss", "actor_loss", None),
    ("Loss", "loss", "loss", 0),
    ("Mean value of sampled actions", "value", "value", None),
    ("Temperature", "temperature", "temperature", 0),
    ("Epsilon", "epsilon", "epsilon", 0),
    ("Entropy", "entropy", "entropy", None),
    ("Learning rate", "learning rate", "learning_rate", 0),
]
"""Plots of what updates measure: title, name of the line, column, lowest value. Each algorithm has some of these."""
