"""Display: what a training looks like while it goes on. Three faces: a picture for a terminal, lines for a log file,
JSON for programs.

A display is told of every update and draws a few times a second at most: the learner, which draws, has better to do.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from memlane.runner.protocols import CollectorLost, Event
from memlane.train.run import Metrics, as_row, bottleneck
from memlane.train.ui.report import short

_FRAME_SECONDS = 0.25
_COST = 0.01
"""The share of the time that pictures may take: one of 5 ms is followed by the next after half a second."""
_LINE_SECONDS = 3.0
_WINDOW_SECONDS = 2.0
"""Shares and speed are means over so long: single updates jump."""
_EVENTS = 4
"""That a picture shows, the newest."""
_HISTORY = 1000
"""Points of the curve; beyond, every second one goes."""


@dataclass(frozen=True)
class Told:
    """What the training was told, as far as it is shown."""

    env: str
    folder: str
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


def display_for(told: Told, *, as_json: bool = False) -> Display:
    """The one that suits where the output goes."""
    if as_json:
        return JsonLines(told)
    console = Console()
    return Picture(told, console) if console.is_terminal else Lines(told)


# ------------------------------------------------------------------------------------------------------ for programs


class JsonLines:
    """An object for every update and every event: ``kind`` says which. Numbers that do not exist are null."""

    def __init__(self, told: Told, out: TextIO | None = None) -> None:
        self.told = told
        self._out = out or sys.stdout

    def start(self) -> None:
        self.say("start", asdict(self.told))

    def update(self, metrics: Metrics) -> None:
        for event in metrics.events:
            self.say("collector_lost" if isinstance(event, CollectorLost) else "collector_joined", asdict(event))
        self.say("update", as_row(metrics))

    def say(self, kind: str, content: dict[str, Any]) -> None:
        # One write: Ctrl-C does not come between a line and its end.
        self._out.write(json.dumps({"kind": kind, **_finite(content)}, default=str) + "\n")
        self._out.flush()

    def stop(self) -> None:
        pass


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------- for log files


class Lines:
    """A line every few seconds, and one for every event."""

    def __init__(self, told: Told, out: TextIO | None = None, *, seconds: float = _LINE_SECONDS) -> None:
        self.told = told
        self.seconds = seconds
        self._out = out or sys.stdout
        self._recent = Recent()
        self._next = 0.0
        self._unsaid: Metrics | None = None

    def start(self) -> None:
        self._print(_title(self.told))

    def update(self, metrics: Metrics) -> None:
        self._recent.add(metrics)
        for event in metrics.events:
            self._print(f"{metrics.seconds:8.1f} s  {_event(event)}")
        now = time.monotonic()
        if now < self._next:
            self._unsaid = metrics
            return
        self._next = now + self.seconds
        self._say(metrics)

    def stop(self) -> None:
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, metrics: Metrics) -> None:
        self._unsaid = None
        mean = self._recent.mean(metrics)
        row = as_row(mean)
        self._print(
            f"{metrics.seconds:8.1f} s  {metrics.env_steps:>11,} steps  {mean.steps_per_second:>9,.0f}/s  "
            f"return {_number(metrics.mean_return):>7}  lag {row['lag_mean']:.1f}  ring {row['ring_fill']:4.0%}  "
            f"learner {mean.learner_busy:4.0%}  collectors {mean.collectors_busy:4.0%}  {_update(mean.learning)}"
        )

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


# ------------------------------------------------------------------------------------------------------ for terminals


class Picture:
    """The whole state at a glance, drawn in place."""

    def __init__(self, told: Told, console: Console | None = None) -> None:
        self.told = told
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._recent = Recent()
        self._curve: list[tuple[float, float]] = []
        self._stride = 1
        self._seen = 0
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._latest: Metrics | None = None
        self._next = 0.0

    def start(self) -> None:
        self._live.start()
        self._live.update(Text.assemble((_title(self.told), "bold"), "\nstarting the collectors ..."), refresh=True)

    def update(self, metrics: Metrics) -> None:
        self._recent.add(metrics)
        self._latest = metrics
        for event in metrics.events:
            self._events.append(f"{metrics.seconds:8.1f} s  {_event(event)}")
        if self._seen % self._stride == 0 and math.isfinite(metrics.mean_return):
            self._curve.append((metrics.seconds, metrics.mean_return))
            if len(self._curve) > _HISTORY:
                self._curve = self._curve[::2]
                self._stride *= 2
        self._seen += 1
        begin = time.monotonic()
        if begin >= self._next:
            self._live.update(self.frame(metrics), refresh=True)
            self._next = begin + max(_FRAME_SECONDS, (time.monotonic() - begin) / _COST)

    def stop(self) -> None:
        """The last picture stays."""
        if self._latest is not None:
            self._live.update(self.frame(self._latest), refresh=True)
        self._live.stop()

    def frame(self, metrics: Metrics) -> Text:
        """One text, put together by hand: rich's tables would cost several times as much."""
        width, height = self.console.width, self.console.height
        mean = self._recent.mean(metrics)
        row, told = as_row(mean), self.told
        bar = max(min(width - 58, 40), 8)
        out = Text(no_wrap=True, overflow="crop")
        elapsed = _clock(metrics.seconds)
        title = _title(told)[: max(width - len(elapsed) - 2, 10)]
        out.append(title, "bold").append(" " * max(width - len(title) - len(elapsed) - 1, 1)).append(elapsed, "bold")
        out.append("\n\n")
        rows = max(min(height - 15 - len(self._events), 9), 3)
        self._plot(out, width - 1, rows)

        def line(name: str, share: float, colour: str, *words: str) -> None:
            out.append(f"{name:>11} ", "dim")
            _bar(out, share, bar, colour)
            out.append("  " + "  ".join(words) + "\n")

        share = metrics.env_steps / max(told.max_steps, 1)
        left = _left(metrics, mean, told.max_steps)
        words = f"{metrics.env_steps:,} of {told.max_steps:,}"
        line("steps", share, "blue", words, f"{mean.steps_per_second:,.0f}/s", left)
        if told.target is not None and math.isfinite(told.target):
            words = f"{_number(metrics.mean_return)} of {_number(told.target)}"
            line("return", self._reached(metrics.mean_return), "green", words)
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
            f"version {metrics.version:,} · lag {row['lag_mean']:.1f} (at most {row['lag_max']}) · "
            f"collectors {row['collectors']}, restarts {row['restarts']}\n"
        )
        learned = metrics.learning
        out.append(f"{'update':>11} ", "dim")
        out.append(" · ".join(f"{name} {_number(learned[key])}" for key, name in _SHOWN.items() if key in learned))
        out.append("\n\n").append(bottleneck(mean), "italic")
        for event in self._events:
            out.append("\n").append(event, "red" if " lost, " in event else "dim")
        return out

    def _reached(self, value: float) -> float:
        """How far from the first return to the target."""
        target = self.told.target
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
        target = self.told.target
        if target is not None and low <= target <= high + 4 * (high - low):
            high = max(high, target)
        else:
            target = None
        label = max(len(_number(low)), len(_number(high)), 4)
        drawn = curve(points, max(width - label - 3, 10), rows, low, high)
        level = None if target is None else _row_of(target, low, high, rows)
        for place, text in enumerate(drawn):
            name = _number(high) if place == 0 else _number(low) if place == rows - 1 else ""
            out.append(f"{name:>{label}} ┤" if name else " " * label + " │", "dim")
            if place == level and target is not None:
                # The level shows wherever the curve is not.
                for character in text:
                    if character == " ":
                        out.append("┄", "dim green")
                    else:
                        out.append(character, "bright_blue")
            else:
                out.append(text, "bright_blue")
            out.append("\n")
        begin, middle, end = f"{points[0][0]:.0f} s", "return of the last 100 episodes", f"{points[-1][0]:.0f} s"
        axis = middle.center(max(width - label - 3 - len(begin) - len(end), len(middle) + 2))
        out.append(" " * (label + 2) + begin + axis + end + "\n", "dim")


def curve(points: Sequence[tuple[float, float]], width: int, rows: int, low: float, high: float) -> list[str]:
    """A line through points as braille: two by four dots in each character. ``rows`` texts of ``width``."""
    across, up = 2 * width, 4 * rows
    begin, end = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(across)]
    for x, y in points:
        columns[min(int((x - begin) / max(end - begin, 1e-9) * across), across - 1)].append(y)
    cells = [[0] * width for _ in range(rows)]
    before: tuple[int, int] | None = None  # column and height of the last dot

    def dot(column: int, height: int) -> None:
        from_top = up - 1 - height
        cells[from_top // 4][column // 2] |= _DOTS[from_top % 4][column % 2]

    for column, found in enumerate(columns):
        if not found:
            continue
        y = sum(found) / len(found)
        height = round((y - low) / max(high - low, 1e-9) * (up - 1))
        if before is None:
            before = column, height
        for place in range(before[0], column + 1):  # a line from the last dot to this one
            share = (place - before[0]) / max(column - before[0], 1)
            here = round(before[1] + share * (height - before[1]))
            after = round(before[1] + min(share + 1 / max(column - before[0], 1), 1) * (height - before[1]))
            for level in range(min(here, after), max(here, after) + 1):
                dot(place, level)
        before = column, height
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Which bit of a braille character is which dot: rows from the top, columns from the left."""


def _row_of(value: float, low: float, high: float, rows: int) -> int:
    return rows - 1 - round((value - low) / max(high - low, 1e-9) * (4 * rows - 1)) // 4


def _bar(out: Text, share: float, width: int, colour: str) -> None:
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    eighths = round(share * width * 8)
    full = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])
    out.append(full, colour).append("·" * (width - len(full)), "dim")


# -------------------------------------------------------------------------------------------------------------- words


class Recent:
    """The updates of the last seconds."""

    def __init__(self, seconds: float = _WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._kept: deque[Metrics] = deque()

    def add(self, metrics: Metrics) -> None:
        self._kept.append(metrics)
        while len(self._kept) > 2 and self._kept[0].seconds < metrics.seconds - self.seconds:
            self._kept.popleft()

    def mean(self, metrics: Metrics) -> Metrics:
        """The latest, with speed and shares over the last seconds; collectors' by the counters, so by time."""
        first, *rest = self._kept
        if not rest:
            return metrics
        mean = replace(metrics)
        mean.compare(first, sum(one.learn_ns for one in rest), sum(one.wait_ns for one in rest))
        return mean


def _title(told: Told) -> str:
    many = f"{told.collectors} collector{'' if told.collectors == 1 else 's'} of {told.num_envs} environments"
    return " · ".join([told.env, told.algo, many] + ([told.backend] if told.backend else []))


def _event(event: Event) -> str:
    if isinstance(event, CollectorLost):
        return f"lost, {'another takes its place' if event.replaced else 'it stays away'}: {event.cause}"
    again = f", number {event.incarnation + 1} in its place" if event.incarnation else ""
    return f"collector {event.worker} joined (pid {event.pid}{again})"


_SHOWN = {
    "learning_rate": "learning rate", "kl": "kl", "entropy": "entropy", "explained_variance": "foreseen",
    "samples_per_insert": "samples per insert", "sample_age": "age of samples", "replay_size": "in replay",
    "temperature": "temperature", "epsilon": "epsilon",
}  # fmt: skip
"""Of what an update tells, what a person looks for."""


def _update(learned: dict[str, float]) -> str:
    """The one number that tells whether updates are as they should be."""
    if "samples_per_insert" in learned:
        age = learned.get("sample_age", math.nan)  # before the first sample there is none
        return f"samples/insert {learned['samples_per_insert']:.1f}  age {'-' if math.isnan(age) else f'{age:.0f}'}"
    return f"kl {learned.get('kl', 0):.4f}"


def _number(value: float) -> str:
    return short(value) if abs(value) < 0.001 or abs(value) >= 1e4 or math.isnan(value) else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _left(metrics: Metrics, mean: Metrics, max_steps: int) -> str:
    if mean.steps_per_second <= 0:
        return ""
    return f"{_clock(max(max_steps - metrics.env_steps, 0) / mean.steps_per_second)} left"
