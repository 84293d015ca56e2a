"""The layers of the C++ code: a file includes only its own layer and the layers below it.

    os <- sync <- lanes <- envs <- python

A build for model checks (``MEMLANE_MODEL``) replaces the atomics and the copies of ``sync`` by those of ``cpp/model``,
which only ``sync`` may include. Only ``cpp/python`` may use Python, nanobind and numpy. The C environments, and the
headers for their authors, use nothing but ``memlane/*.h`` and the C standard library.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CPP = Path(__file__).parents[2] / "cpp"
LAYERS = ("os", "sync", "lanes", "envs", "python")

SOURCES = sorted(file for file in (CPP / "src").rglob("*") if file.suffix in {".cpp", ".hpp"})
BINDINGS = sorted(file for file in (CPP / "python").rglob("*") if file.suffix in {".cpp", ".hpp"})
C_FILES = sorted([*(CPP / "envs").glob("*.c"), *(CPP / "include" / "memlane").glob("*.h")])

GENERATED = {"built_in_envs.inc"}  # by CMake, for cpp/python/envs.cpp
MODEL = "model/atomic.hpp"
PYTHON_HEADER = re.compile(r"(Python\.h|structmember\.h|nanobind/|pybind11/|numpy/)")
C_LIBRARY = {
    "assert.h", "complex.h", "ctype.h", "errno.h", "fenv.h", "float.h", "inttypes.h", "iso646.h", "limits.h",
    "locale.h", "math.h", "setjmp.h", "signal.h", "stdalign.h", "stdarg.h", "stdatomic.h", "stdbool.h", "stddef.h",
    "stdint.h", "stdio.h", "stdlib.h", "stdnoreturn.h", "string.h", "tgmath.h", "threads.h", "time.h", "uchar.h",
    "wchar.h", "wctype.h",
}  # fmt: skip


def name(file: Path) -> str:
    return file.relative_to(CPP).as_posix()


def quoted_includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE)


def system_includes(file: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s+<([^>]+)>", file.read_text(), re.MULTILINE)


def layer_of(file: Path) -> str:
    return file.relative_to(CPP).parts[1 if file.is_relative_to(CPP / "src") else 0]


def test_there_are_files_of_every_layer() -> None:
    assert {layer_of(file) for file in [*SOURCES, *BINDINGS]} == set(LAYERS)
    assert C_FILES


@pytest.mark.parametrize("file", [*SOURCES, *BINDINGS], ids=name)
def test_a_file_includes_only_its_own_layer_and_those_below(file: Path) -> None:
    allowed = LAYERS[: LAYERS.index(layer_of(file)) + 1]
    for include in quoted_includes(file):
        layer = include.split("/")[0]
        if layer == "memlane":  # the C interface of environments
            assert "envs" in allowed, f"{name(file)} includes {include}, which only envs and python may"
        elif include == MODEL:
            assert layer_of(file) == "sync", f"{name(file)} includes {include}, which only sync may"
        elif include not in GENERATED or layer_of(file) != "python":
            assert layer in allowed, f"{name(file)} includes {include}; its layer may include {allowed}"


@pytest.mark.parametrize("file", [*SOURCES, *BINDINGS], ids=name)
def test_every_include_names_an_existing_file_from_the_root_of_its_tree(file: Path) -> None:
    for include in quoted_includes(file):
        if include not in GENERATED:
            found = [root for root in (CPP / "src", CPP, CPP / "include") if (root / include).is_file()]
            assert found, f'{name(file)} includes "{include}", which is in none of cpp/src, cpp and cpp/include'


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_the_core_does_not_use_python(file: Path) -> None:
    for include in [*system_includes(file), *quoted_includes(file)]:
        assert not PYTHON_HEADER.match(include), f"{name(file)} includes {include}; only cpp/python may"


@pytest.mark.parametrize("file", C_FILES, ids=name)
def test_c_environments_use_only_memlane_headers_and_the_c_library(file: Path) -> None:
    for include in quoted_includes(file):
        assert re.fullmatch(r"memlane/\w+\.h", include), f'{name(file)} includes "{include}"'
        assert (CPP / "include" / include).is_file(), f'{name(file)} includes "{include}", which does not exist'
    assert set(system_includes(file)) <= C_LIBRARY
