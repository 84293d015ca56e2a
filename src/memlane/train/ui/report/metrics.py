"""Metrics: ``metrics.csv`` of a run, by columns."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Column = list[float]
"""One number per update; nan where it is missing."""


def read_metrics(path: Path) -> dict[str, Column]:
    """Read the columns of ``metrics.csv``; none if there is no such file.

    A run that was killed and resumed has repeated the updates after its last checkpoint: the later rows count.
    """
    if not path.exists():
        return {}
    rows: list[dict[str, float]] = []
    with path.open(newline="") as file:
        for texts in csv.DictReader(file):
            row = {name: _parse_number(text) for name, text in texts.items() if name}
            if math.isnan(row.get("iteration", math.nan)):
                continue  # the last line of a killed run, cut off
            while rows and rows[-1]["iteration"] >= row["iteration"]:
                rows.pop()
            rows.append(row)
    names = list(rows[0]) if rows else []
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def last(columns: Mapping[str, Column], name: str) -> float:
    """The last known number of a column, or nan."""
    known = [value for value in columns.get(name, []) if not math.isnan(value)]
    return known[-1] if known else math.nan


def _parse_number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
