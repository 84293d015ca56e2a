"""Environments in C for these tests, each compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memlane.native import NativeVectorEnv, Spec, make
from memlane.native.lowlevel import open_library
from tests.support.native_envs import ECHOES, ENVS, OWN, Making, gcc


@pytest.fixture(scope="session")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The shared library of an environment in ``envs/``."""
    folder = tmp_path_factory.mktemp("native_envs")

    @cache
    def library(name: str) -> Path:
        source = ENVS / ("echo.c" if name in ECHOES else f"{name}.c")
        return gcc(source, folder / f"{name}.so", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", *ECHOES.get(name, []))

    return library


@pytest.fixture(scope="session")
def spec_of(library_of: Callable[[str], Path]) -> Callable[[str], Spec]:
    """The spec of an environment in ``envs/``."""
    return cache(lambda name: open_library(library_of(name)))


@pytest.fixture
def making(spec_of: Callable[[str], Spec]) -> Iterator[Making]:
    """Creates environments, of ``envs/`` or built in, and closes them after the test."""
    created: list[NativeVectorEnv] = []

    def create(name: str, num_envs: int = 1, **arguments: Any) -> NativeVectorEnv:
        if name in OWN:
            created.append(NativeVectorEnv(spec_of(name), num_envs, **arguments))
        else:
            created.append(make(name, num_envs, **arguments))
        return created[-1]

    yield create
    for envs in created:
        envs.close()
