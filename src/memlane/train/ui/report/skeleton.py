"""The skeleton of the pages: what the report of a run and a comparison of runs share."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template


def fill_page(title: str, heading: str, summary: str, body: str) -> str:
    """A page that needs nothing else. ``title`` and ``summary`` are text, ``heading`` and ``body`` are HTML."""
    return Template(_resource("report.html")).substitute(
        title=escape(title),
        heading=heading,
        summary=escape(summary),
        body=body,
        style=_resource("report.css"),
        script=_resource("report.js"),
    )


def _resource(name: str) -> str:
    return resources.files("memlane.train.ui.report").joinpath(name).read_text(encoding="utf-8")
