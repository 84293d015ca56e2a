"""Live display: what a training run prints. ``LiveDisplay`` for a terminal, ``LogLines`` for a log file,
``JsonLines`` for programs.

The learner's process draws, so a display gets every update but draws only a few times per second.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from memlane.runner.protocols import CollectorLost, Event
from memlane.train.run import Metrics, as_row, bottleneck
from memlane.train.ui.formatting import clock, collectors_and_envs, short_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_FRAME_SECONDS = 0.25
_MAX_DRAWING_SHARE = 0.01
"""Share of the time that drawing may take: a frame of 5 ms is followed by the next after half a second."""
_LINE_SECONDS = 3.0
_WINDOW_SECONDS = 2.0
"""Window of mean shares and speed: those of single updates jump."""
_MAX_EVENTS = 4
"""Events that a frame shows, the newest ones."""
_MAX_CURVE_POINTS = 1000
"""With more points of the return curve, every second one is dropped."""


@dataclass(frozen=True)
class RunSummary:
    """What a display shows about a run besides its metrics."""

    env: str
    run_dir: str
    max_steps: int
    target: float | None = None
    algo: str = "appo"
    collectors: int = 1
    num_envs: int = 1
    backend: str = ""


class Display(Protocol):
    def start(self) -> None: ...
    def update(self, metrics: Metrics) -> None: ...
    def stop(self) -> None: ...


def make_display(summary: RunSummary, *, as_json: bool = False) -> Display:
    """Choose the display for where the output goes. Without rich, a terminal gets log lines and a hint."""
    if as_json:
        return JsonLines(summary)
    if find_spec("rich") is None:
        if sys.stdout.isatty():
            print('The live display needs rich: pip install "memlane[cli]". Printing log lines instead.')
        return LogLines(summary)
    from rich.console import Console

    console = Console()
    return LiveDisplay(summary, console) if console.is_terminal else LogLines(summary)


# ------------------------------------------------------------------------------------------------------ for programs


class JsonLines:
    """A JSON object per line for every update and every event; its ``kind`` says which. Numbers that are not finite are
    null."""

    def __init__(self, summary: RunSummary, out: TextIO | None = None) -> None:
        self.summary = summary
        self._out = out or sys.stdout

    def start(self) -> None:
        self.write("start", asdict(self.summary))

    def update(self, metrics: Metrics) -> None:
        for event in metrics.events:
            self.write("collector_lost" if isinstance(event, CollectorLost) else "collector_joined", asdict(event))
        self.write("update", as_row(metrics))

    def write(self, kind: str, content: dict[str, Any]) -> None:
        # One write, so that Ctrl-C does not come between a line and its end.
        self._out.write(json.dumps({"kind": kind, **_only_finite(content)}, default=str) + "\n")
        self._out.flush()

    def stop(self) -> None:
        pass


def _only_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _only_finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------- for log files


class LogLines:
    """A line every few seconds, and one for every event."""

    def __init__(self, summary: RunSummary, out: TextIO | None = None, *, seconds: float = _LINE_SECONDS) -> None:
        self.summary = summary
        self.seconds = seconds
        self._out = out or sys.stdout
        self._window = MetricsWindow()
        self._next = 0.0
        self._unprinted: Metrics | None = None

    def start(self) -> None:
        self._print(_title(self.summary))

    def update(self, metrics: Metrics) -> None:
        self._window.add(metrics)
        for event in metrics.events:
            self._print(_event_line(metrics, event))
        now = time.monotonic()
        if now < self._next:
            self._unprinted = metrics
            return
        self._next = now + self.seconds
        self._print_metrics(metrics)

    def stop(self) -> None:
        if self._unprinted is not None:
            self._print_metrics(self._unprinted)

    def _print_metrics(self, metrics: Metrics) -> None:
        self._unprinted = None
        mean = self._window.mean(metrics)
        row = as_row(mean)
        self._print(
            f"{metrics.seconds:8.1f} s  {metrics.env_steps:>11,} steps  {mean.steps_per_second:>9,.0f}/s  "
            f"return {_number(metrics.mean_return):>7}  lag {row['lag_mean']:.1f}  ring {row['ring_fill']:4.0%}  "
            f"learner {mean.learner_busy:4.0%}  collectors {mean.collectors_busy:4.0%}  {_update_health(mean.learning)}"
        )

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


# ------------------------------------------------------------------------------------------------------ for terminals


class LiveDisplay:
    """The state of a run, drawn in place. Needs rich."""

    def __init__(self, summary: RunSummary, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.summary = summary
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._window = MetricsWindow()
        self._curve: list[tuple[float, float]] = []
        self._stride = 1
        self._updates = 0
        self._events: deque[tuple[str, str]] = deque(maxlen=_MAX_EVENTS)
        """Lines and their styles."""
        self._latest: Metrics | None = None
        self._next = 0.0

    def start(self) -> None:
        from rich.text import Text

        self._live.start()
        title = _title(self.summary)
        self._live.update(Text.assemble((title, "bold"), "\nstarting the collectors ..."), refresh=True)

    def update(self, metrics: Metrics) -> None:
        self._window.add(metrics)
        self._latest = metrics
        for event in metrics.events:
            self._events.append((_event_line(metrics, event), "red" if isinstance(event, CollectorLost) else "dim"))
        if self._updates % self._stride == 0 and math.isfinite(metrics.mean_return):
            self._curve.append((metrics.seconds, metrics.mean_return))
            if len(self._curve) > _MAX_CURVE_POINTS:
                self._curve = self._curve[::2]
                self._stride *= 2
        self._updates += 1
        begin = time.monotonic()
        if begin >= self._next:
            self._live.update(self.frame(metrics), refresh=True)
            self._next = begin + max(_FRAME_SECONDS, (time.monotonic() - begin) / _MAX_DRAWING_SHARE)

    def stop(self) -> None:
        """Draw the last frame, which stays on the screen."""
        if self._latest is not None:
            self._live.update(self.frame(self._latest), refresh=True)
        self._live.stop()

    def frame(self, metrics: Metrics) -> Text:
        """Assemble a frame as one text: rich's tables would cost several times as much."""
        from rich.text import Text

        width, height = self.console.width, self.console.height
        mean = self._window.mean(metrics)
        row, summary = as_row(mean), self.summary
        bar_width = max(min(width - 58, 40), 8)
        out = Text(no_wrap=True, overflow="crop")
        elapsed = clock(metrics.seconds)
        title = _title(summary)[: max(width - len(elapsed) - 2, 10)]
        out.append(title, "bold").append(" " * max(width - len(title) - len(elapsed) - 1, 1)).append(elapsed, "bold")
        out.append("\n\n")
        rows = max(min(height - 15 - len(self._events), 9), 3)
        self._plot(out, width - 1, rows)

        def line(name: str, share: float, colour: str, *texts: str) -> None:
            out.append(f"{name:>11} ", "dim")
            _bar(out, share, bar_width, colour)
            out.append("  " + "  ".join(texts) + "\n")

        progress = metrics.env_steps / max(summary.max_steps, 1)
        remaining = _remaining(metrics, mean, summary.max_steps)
        steps = f"{metrics.env_steps:,} of {summary.max_steps:,}"
        line("steps", progress, "blue", steps, f"{mean.steps_per_second:,.0f}/s", remaining)
        if summary.target is not None and math.isfinite(summary.target):
            returns = f"{_number(metrics.mean_return)} of {_number(summary.target)}"
            line("return", self._target_progress(metrics.mean_return), "green", returns)
        else:
            out.append(f"{'return':>11} ", "dim").append(f"{_number(metrics.mean_return)}\n")
        learning = round(100 * mean.learner_busy)
        line("learner", mean.learner_busy, "magenta", f"{learning:3}% learning, {100 - learning}% waiting")
        busy, env = mean.collectors_busy, mean.env_share
        line(
            "collectors", busy, "cyan",
            f"{busy:4.0%} collecting (environments {busy * env:.0%}, policy {busy * (1 - env):.0%})",
        )  # fmt: skip
        line("ring", row["ring_fill"], "yellow", f"{row['ring_fill']:4.0%} of {metrics.ring_slots} slots unread")
        out.append(f"{'policy':>11} ", "dim")
        out.append(
            f"version {metrics.version:,} · lag {row['lag_mean']:.1f} (max {row['lag_max']}) · "
            f"collectors {row['collectors']}, restarts {row['restarts']}\n"
        )
        learned = metrics.learning
        out.append(f"{'update':>11} ", "dim")
        out.append(
            " · ".join(f"{name} {_number(learned[key])}" for key, name in _UPDATE_METRICS.items() if key in learned)
        )
        out.append("\n\n").append(bottleneck(mean), "italic")
        for text, style in self._events:
            out.append("\n").append(text, style)
        return out

    def _target_progress(self, value: float) -> float:
        """How far the return is on its way from the first value to the target, from 0 to 1."""
        target = self.summary.target
        if target is None or not self._curve or not math.isfinite(value):
            return 0.0
        first = min(self._curve[0][1], value)
        return 1.0 if value >= target else (value - first) / (target - first)

    def _plot(self, out: Text, width: int, rows: int) -> None:
        points = self._curve
        if len(points) < 2:
            out.append("no episode has ended yet\n" if not points else "\n", "dim").append("\n" * rows)
            return
        values = [value for _, value in points]
        low, high = min(values), max(values)
        target = self.summary.target
        if target is not None and low <= target <= high + 4 * (high - low):
            high = max(high, target)
        else:
            target = None
        label_width = max(len(_number(low)), len(_number(high)), 4)
        lines = braille_curve(points, max(width - label_width - 3, 10), rows, low, high)
        target_row = None if target is None else _row_of(target, low, high, rows)
        for row, text in enumerate(lines):
            label = _number(high) if row == 0 else _number(low) if row == rows - 1 else ""
            out.append(f"{label:>{label_width}} ┤" if label else " " * label_width + " │", "dim")
            if row == target_row:
                # The target's level shows wherever the curve is not.
                for character in text:
                    if character == " ":
                        out.append("┄", "dim green")
                    else:
                        out.append(character, "bright_blue")
            else:
                out.append(text, "bright_blue")
            out.append("\n")
        begin, middle, end = f"{points[0][0]:.0f} s", "mean return of the last 100 episodes", f"{points[-1][0]:.0f} s"
        axis = middle.center(max(width - label_width - 3 - len(begin) - len(end), len(middle) + 2))
        out.append(" " * (label_width + 2) + begin + axis + end + "\n", "dim")


def braille_curve(points: Sequence[tuple[float, float]], width: int, rows: int, low: float, high: float) -> list[str]:
    """Draw a line through points with braille characters, which have two by four dots each: ``rows`` strings of
    ``width`` characters."""
    dot_columns, dot_rows = 2 * width, 4 * rows
    begin, end = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(dot_columns)]
    for x, y in points:
        columns[min(int((x - begin) / max(end - begin, 1e-9) * dot_columns), dot_columns - 1)].append(y)
    cells = [[0] * width for _ in range(rows)]
    previous: tuple[int, int] | None = None  # column and height of the last dot

    def dot(column: int, height: int) -> None:
        from_top = dot_rows - 1 - height
        cells[from_top // 4][column // 2] |= _DOTS[from_top % 4][column % 2]

    for column, values in enumerate(columns):
        if not values:
            continue
        y = sum(values) / len(values)
        height = round((y - low) / max(high - low, 1e-9) * (dot_rows - 1))
        if previous is None:
            previous = column, height
        distance = max(column - previous[0], 1)
        for between in range(previous[0], column + 1):  # a line from the last dot to this one
            share = (between - previous[0]) / distance
            start = round(previous[1] + share * (height - previous[1]))
            stop = round(previous[1] + min(share + 1 / distance, 1) * (height - previous[1]))
            for level in range(min(start, stop), max(start, stop) + 1):
                dot(between, level)
        previous = column, height
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot in a braille character: rows from the top, columns from the left."""


def _row_of(value: float, low: float, high: float, rows: int) -> int:
    return rows - 1 - round((value - low) / max(high - low, 1e-9) * (4 * rows - 1)) // 4


def _bar(out: Text, share: float, width: int, colour: str) -> None:
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    eighths = round(share * width * 8)
    filled = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])
    out.append(filled, colour).append("·" * (width - len(filled)), "dim")


# ------------------------------------------------------------------------------------------------- metrics as text


class MetricsWindow:
    """The updates of the last seconds."""

    def __init__(self, seconds: float = _WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._updates: deque[Metrics] = deque()

    def add(self, metrics: Metrics) -> None:
        self._updates.append(metrics)
        while len(self._updates) > 2 and self._updates[0].seconds < metrics.seconds - self.seconds:
            self._updates.popleft()

    def mean(self, metrics: Metrics) -> Metrics:
        """``metrics``, the latest, with speed and shares of time over the window."""
        first, *rest = self._updates
        if not rest:
            return metrics
        mean = replace(metrics)
        mean.compare(first, sum(update.learn_ns for update in rest), sum(update.wait_ns for update in rest))
        return mean


def _title(summary: RunSummary) -> str:
    processes = collectors_and_envs(summary.collectors, summary.num_envs)
    return " · ".join([summary.env, summary.algo, processes] + ([summary.backend] if summary.backend else []))


def _event_line(metrics: Metrics, event: Event) -> str:
    if isinstance(event, CollectorLost):
        text = f"collector lost, {'restarting it' if event.replaced else 'not restarted'}: {event.cause}"
    else:
        restart = f", restart {event.incarnation}" if event.incarnation else ""
        text = f"collector {event.worker} joined (pid {event.pid}{restart})"
    return f"{metrics.seconds:8.1f} s  {text}"


_UPDATE_METRICS = {
    "learning_rate": "learning rate", "kl": "kl", "entropy": "entropy", "explained_variance": "explained variance",
    "samples_per_insert": "samples per insert", "sample_age": "sample age", "replay_size": "replay size",
    "temperature": "temperature", "epsilon": "epsilon",
}  # fmt: skip
"""Metrics of an update that a frame shows, and their names there."""


def _update_health(learned: dict[str, float]) -> str:
    """The numbers that show best whether updates go well."""
    if "samples_per_insert" in learned:
        age = learned.get("sample_age", math.nan)  # nan before the first sample
        return f"samples/insert {learned['samples_per_insert']:.1f}  age {'-' if math.isnan(age) else f'{age:.0f}'}"
    return f"kl {learned.get('kl', 0):.4f}"


def _number(value: float) -> str:
    return short_number(value) if abs(value) < 0.001 or abs(value) >= 1e4 or math.isnan(value) else f"{value:.4g}"


def _remaining(metrics: Metrics, mean: Metrics, max_steps: int) -> str:
    if mean.steps_per_second <= 0:
        return ""
    return f"{clock(max(max_steps - metrics.env_steps, 0) / mean.steps_per_second)} left"
