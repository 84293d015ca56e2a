"""A fork server for each module of tests, with the module already imported: without it, the start of a
worker took 60 ms longer."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _warm_fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    server: Any = forkserver._forkserver
    before = server._preload_modules
    server._stop()
    mp.set_forkserver_preload(["memlane.vector.worker", request.module.__name__])
    yield
    server._stop()
    server._preload_modules = before
