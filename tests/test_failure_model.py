"""docs/failure-model.md: each promise there names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "failure-model.md").read_text()


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def promises() -> list[str]:
    """The rows of all tables, without their headings."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith("| ---") and not row.endswith("| test |")]


@pytest.mark.parametrize("row", promises(), ids=lambda row: row.split("|")[1].strip())
def test_each_promise_names_tests_that_exist(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named, "this promise names no test"
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
