"""Prints how many states each search of a model visited, and how long it took."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    searches = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "search"
    ]
    if searches:
        terminalreporter.section("searches: states, seconds")
    for what, states, seconds in sorted(searches):
        terminalreporter.write_line(f"{states:>12,} {seconds:8.2f}  {what}")
