"""The duration of the race tests."""

from __future__ import annotations

import pytest


@pytest.fixture(
    params=[
        pytest.param(1, id="short"),
        pytest.param(30, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ]
)
def dose(request: pytest.FixtureRequest) -> int:
    """Factor on the duration of a race test; `make soak` runs the long ones."""
    return int(request.param)
