"""How long the races of the lanes run."""

from __future__ import annotations

import pytest

from tests.support.kills import scales


@pytest.fixture(params=scales(soak=30))
def scale(request: pytest.FixtureRequest) -> int:
    """How many times the work of `make test` a race does: more in `make soak`."""
    return int(request.param)
