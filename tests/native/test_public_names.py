"""The names of ``memlane.native``: what it shows, what is low level, and that the examples in docstrings run."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType

import pytest

import memlane.native
import memlane.testing
from memlane.native import env, lowlevel, vector_env


@pytest.mark.parametrize("module", [memlane.native, memlane.testing], ids=lambda module: module.__name__)
def test_dir_shows_the_public_names_and_nothing_else(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


def test_the_public_names_are_what_training_code_needs() -> None:
    names = ["NativeEnv", "NativeVectorEnv", "Spec", "SpecError", "built_in_names", "load", "make"]
    assert memlane.native.__all__ == names


@pytest.mark.parametrize("name", ["built_in", "open_library", "read_spec"])
def test_machinery_is_in_the_low_level_module_only(name: str) -> None:
    assert hasattr(lowlevel, name)
    assert not hasattr(memlane.native, name)


@pytest.mark.parametrize("module", [memlane.native, memlane.testing, lowlevel], ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    mirrors = {"CEnvs", "CField", "CSetting", "CSpec"}  # of C structs, documented in the header
    public = [name for name in module.__all__ if not name.isupper() and name not in mirrors]
    assert [name for name in public if not inspect.getdoc(getattr(module, name))] == []


@pytest.mark.parametrize("module", [env, vector_env], ids=lambda module: module.__name__)
def test_the_examples_in_the_documentation_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.attempted > 0, result.failed) == (True, 0)
