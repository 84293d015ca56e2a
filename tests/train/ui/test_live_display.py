"""What a training prints: the live display, log lines and JSON."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from memlane.runner.protocols import CollectorJoined, CollectorLost
from memlane.train.run import Metrics
from memlane.train.ui.live_display import (
    JsonLines,
    LiveDisplay,
    LogLines,
    RunSummary,
    braille_curve,
    make_display,
)

SUMMARY = RunSummary("CartPole-v1", "runs/one", 100_000, 475.0, "appo", 2, 32, "native")
LOST = CollectorLost(1, 0, 123, "collector 1 (pid 123) was killed by SIGKILL", True)


def metrics(number: int, **changes: Any) -> Metrics:
    """An update every 40 ms, of which the collectors work for 10."""
    counters = {
        "env_ns": number * 2_000_000, "policy_ns": number * 8_000_000, "wait_ns": number * 30_000_000,
        "unread": 1, "collectors": 2, "restarts": 0,
    }  # fmt: skip
    made = {
        "iteration": number, "env_steps": 1000 * number, "lags": [0, 1], "version": number + 1, "wait_ns": 1_000_000,
        "learn_ns": 39_000_000, "counters": counters, "ring_slots": 4, "seconds": 0.04 * number,
        "mean_return": 5.0 * number, "steps_per_second": 25_000.0, "learning": {"kl": 0.005, "learning_rate": 1e-3},
    }  # fmt: skip
    return Metrics(**{**made, **changes})


def live_display(summary: RunSummary = SUMMARY, width: int = 100, height: int = 40) -> LiveDisplay:
    return LiveDisplay(summary, Console(file=io.StringIO(), force_terminal=True, width=width, height=height))


def shown(updates: int = 50, summary: RunSummary = SUMMARY, **size: int) -> str:
    display = live_display(summary, **size)
    for number in range(1, updates + 1):
        display.update(metrics(number))
    return display.frame(metrics(updates)).plain


# ----------------------------------------------------------------------------------------------------- the live display


def test_a_frame_shows_the_whole_state() -> None:
    text = shown()
    for words in (
        "CartPole-v1 · appo · 2 collectors with 32 environments each · native", "50,000 of 100,000", "25,000/s",
        "0:00:02", "250 of 475", "98% learning, 2% waiting", "25% collecting (environments 5%, policy 20%)",
        "25% of 4 slots unread", "version 51 · lag 0.5 (max 1)", "restarts 0", "learning rate 0.001", "kl 0.005",
        "The collectors wait for the learner",
    ):  # fmt: skip
        assert words in text


def test_shares_are_of_the_last_seconds_and_not_of_one_update() -> None:
    display = live_display()
    for number in range(1, 100):
        display.update(metrics(number))
    late = metrics(100, wait_ns=39_000_000, learn_ns=1_000_000, learner_busy=0.025)
    display.update(late)
    assert "% learning" in display.frame(late).plain
    assert "  2% learning" not in display.frame(late).plain


def test_lost_and_new_collectors_are_lines() -> None:
    display = live_display()
    display.update(metrics(1, events=[LOST, CollectorJoined(1, 1, 124)]))
    text = display.frame(metrics(1)).plain
    assert "collector lost, restarting it: collector 1 (pid 123) was killed by SIGKILL" in text
    assert "collector 1 joined (pid 124, restart 1)" in text


def test_a_frame_fits_a_small_terminal() -> None:
    lines = shown(width=60, height=16).splitlines()
    assert len(lines) <= 18
    assert max(len(line) for line in lines if "┤" in line or "│" in line) <= 60


@pytest.mark.parametrize("value", [math.nan, 0.0, -1e9, 1e9, math.inf])
def test_any_return_can_be_shown(value: float) -> None:
    display = live_display()
    for number in range(1, 4):
        display.update(metrics(number, mean_return=value))
    assert "return" in display.frame(metrics(4, mean_return=value)).plain


@pytest.mark.parametrize("target", [None, math.inf, -math.inf, 0.0])
def test_any_target_can_be_shown(target: float | None) -> None:
    assert "steps" in shown(summary=RunSummary("X", "runs/x", 0, target))


def test_drawing_takes_a_hundredth_of_the_time_at_most() -> None:
    display = live_display()
    display.start()
    frames = 0
    frame = display.frame

    def counted(latest: Metrics) -> Any:
        nonlocal frames
        frames += 1
        time.sleep(0.01)
        return frame(latest)

    display.frame = counted  # type: ignore[method-assign]
    begin = time.monotonic()
    number = 0
    while time.monotonic() - begin < 0.9:
        number += 1
        display.update(metrics(number))
        time.sleep(0.001)
    assert frames == 1
    display.stop()
    assert frames == 2  # the last one stays on the screen


def test_the_curve_keeps_its_shape_however_long_the_training_is() -> None:
    display = live_display()
    for number in range(1, 5001):
        display.update(metrics(number))
    assert len(display._curve) <= 1000
    assert display._curve[0][1] == 5.0
    assert display._curve[-1][1] > 24_900


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    drawn = braille_curve([(x, x) for x in range(100)], 10, 4, 0, 99)
    assert [len(line) for line in drawn] == [10] * 4
    assert drawn[3][0] != " "
    assert drawn[0][9] != " "
    assert drawn[0][0] == drawn[3][9] == " "


def test_a_line_between_two_points_has_no_gaps() -> None:
    drawn = braille_curve([(0, 0), (1, 1)], 10, 4, 0, 1)
    assert all(any(line[column] != " " for line in drawn) for column in range(10))
    assert all(line.strip() for line in drawn)


# ---------------------------------------------------------------------------------------------------- lines and JSON


def test_lines_come_every_few_seconds_and_at_the_end() -> None:
    out = io.StringIO()
    display = LogLines(SUMMARY, out, seconds=1000)
    display.start()
    for number in range(1, 11):
        display.update(metrics(number))
    display.stop()
    title, first, last = out.getvalue().splitlines()
    assert title.startswith("CartPole-v1")
    assert "1,000 steps" in first
    assert "10,000 steps" in last


@pytest.mark.parametrize(("age", "said"), [(math.nan, "age -"), (7.4, "age 7")])
def test_samples_have_no_age_before_there_are_any(age: float, said: str) -> None:
    out = io.StringIO()
    LogLines(SUMMARY, out, seconds=1000).update(metrics(1, learning={"samples_per_insert": 0.0, "sample_age": age}))
    assert out.getvalue().rstrip().endswith(f"samples/insert 0.0  {said}")


def test_an_event_is_a_line_at_once() -> None:
    out = io.StringIO()
    display = LogLines(SUMMARY, out, seconds=1000)
    display.update(metrics(1))
    display.update(metrics(2, events=[LOST]))
    assert "killed by SIGKILL" in out.getvalue().splitlines()[-1]


def test_every_line_of_json_is_an_object_without_nan() -> None:
    out = io.StringIO()
    display = JsonLines(SUMMARY, out)
    display.start()
    display.update(metrics(1, mean_return=math.nan, events=[LOST, CollectorJoined(1, 1, 124)]))
    display.write("result", {"evaluation": {"returns": [1.0, math.inf]}})

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found = [json.loads(line, parse_constant=refuse) for line in out.getvalue().splitlines()]
    assert [one["kind"] for one in found] == ["start", "collector_lost", "collector_joined", "update", "result"]
    assert found[3]["mean_return"] is None
    assert found[3]["env_steps"] == 1000
    assert found[4]["evaluation"]["returns"] == [1.0, None]


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(make_display(SUMMARY), LogLines)
    assert isinstance(make_display(SUMMARY, as_json=True), JsonLines)


@pytest.mark.parametrize(("terminal", "hint"), [
    (True, 'The live display needs rich: pip install "memlane[cli]". Printing log lines instead.\n'),
    (False, ""),
])  # fmt: skip
def test_without_rich_there_are_lines_and_a_terminal_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, hint: str
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(make_display(SUMMARY), LogLines)
    assert out.getvalue() == hint
