"""How long the races of the lanes run."""

from __future__ import annotations

import pytest


@pytest.fixture(
    params=[
        pytest.param(1, id="short"),
        pytest.param(30, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ]
)
def dose(request: pytest.FixtureRequest) -> int:
    """How many times as much a race is given: `make soak` runs the same ones for longer."""
    return int(request.param)
