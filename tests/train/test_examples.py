"""The examples in the docstrings of training run."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["options", "algorithms.appo"])
def test_the_examples_in_the_text_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"memlane.train.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
