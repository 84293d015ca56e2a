"""The tests of the lanes use the child processes and the template of victims that the tests of the core have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "core"))


@pytest.fixture(
    params=[
        pytest.param(1, id="short"),
        pytest.param(30, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ]
)
def dose(request: pytest.FixtureRequest) -> int:
    """How many times as much a race is given: `make soak` runs the same ones for longer."""
    return int(request.param)
