"""The examples in the docstrings of the runner run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from memlane import runner

FILES = sorted(Path(runner.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", [file for file in FILES if ">>>" in file.read_text()], ids=lambda file: file.stem)
def test_the_examples_in_the_text_run(file: Path) -> None:
    result = doctest.testmod(importlib.import_module(f"memlane.runner.{file.stem}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_help_of_the_runner_has_an_example() -> None:
    assert ">>>" in (runner.AsyncRunner.__doc__ or "")


def test_every_promised_name_can_be_imported() -> None:
    assert [name for name in runner.__all__ if not hasattr(runner, name)] == []
