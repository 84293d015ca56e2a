"""Threads of linear algebra: one in each worker, where the library is loaded after the worker's birth."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from memlane.core.children import THREAD_LIMITS
from tests.support.processes import PATIENCE, script
from tests.support.vector_envs import Counter, ours


def _threads(_: Any) -> int | None:
    """How many threads the OpenBLAS that numpy has loaded uses in this process."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for library in libraries:
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(loaded := ctypes.CDLL(library), name):
                return int(getattr(loaded, name)())
    return None


def print_threads(context: str) -> None:
    with ours([Counter] * 2, context=context) as envs:
        print(envs.apply(_threads))


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_worker_has_one_thread_for_linear_algebra(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new interpreter: another test may have started the fork server, with numpy in it."""
    for name in THREAD_LIMITS:
        monkeypatch.delenv(name, raising=False)
    code = "import sys; from tests.vector.test_blas_threads import print_threads; print_threads(sys.argv[1])"
    with script(code, context) as process:
        threads, errors = process.communicate(timeout=PATIENCE)  # a slow start is noted on stderr
    assert process.returncode == 0, errors
    if threads == "(None, None)\n":
        pytest.skip("numpy has no OpenBLAS here")
    assert threads == "(1, 1)\n"
