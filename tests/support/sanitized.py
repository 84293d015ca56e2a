"""Run pytest with another build of the native module: ``python -m tests.support.sanitized LIBRARY PYTEST_ARGUMENT...``.

``make thread-test`` does that with a build for ThreadSanitizer, whose runtime must be preloaded. The library is loaded
in this process only: workers and collectors that tests start have the usual one.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

import memlane


def load_native(path: str) -> None:
    """Load the library as ``memlane._native``, before anything has imported it."""
    name = "memlane._native"
    assert name not in sys.modules, "the usual build was imported first"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    memlane._native = module  # type: ignore[attr-defined]


if __name__ == "__main__":
    load_native(sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
