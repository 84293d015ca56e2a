"""The examples in the docstrings of the lanes run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from memlane import lanes

FILES = sorted(Path(lanes.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", [file for file in FILES if ">>>" in file.read_text()], ids=lambda file: file.stem)
def test_the_examples_in_the_text_run(file: Path) -> None:
    result = doctest.testmod(importlib.import_module(f"memlane.lanes.{file.stem}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "name", ["Batch", "Limiter", "Replay", "ReplayPipeline", "ReplaySampler", "Ring", "Stats", "Weights"]
)
def test_help_of_a_lane_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(lanes, name).__doc__ or "")


def test_every_promised_name_can_be_imported() -> None:
    assert [name for name in lanes.__all__ if not hasattr(lanes, name)] == []
