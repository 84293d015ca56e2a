"""``build`` with a real compiler: what it writes, and its errors."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memlane import _native
from memlane.core import MemlaneError
from memlane.native import load
from memlane.native.build import BuildError, build
from memlane.native.lowlevel import open_library

TINY = """
#include "memlane/env.h"
static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) ((float *)envs->observations[0])[i] = 0;
}
static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        ((float *)envs->observations[0])[i] += (float)((const int64_t *)envs->actions[0])[i]; /* MARK */
    }
}
static const memlane_field observations[] = {{.dtype = MEMLANE_FLOAT32, .low = 0, .high = 100}};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 3}};
MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI, .spec_bytes = sizeof(memlane_spec), .name = "tiny",
    .observations = observations, .actions = actions, .num_observations = 1, .num_actions = 1,
    .max_episode_steps = 10, .reset = reset, .step = step,
};
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "tiny.c", TINY)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that tests must not change."""
    return build(written(tmp_path_factory.mktemp("tiny") / "tiny.c", TINY))


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def changed(source: Path, old: str, new: str) -> Path:
    text = source.read_text()
    assert old in text
    return written(source, text.replace(old, new))


def program(file: Path, script: str) -> str:
    """A script that takes the place of the compiler."""
    written(file, f"#!/bin/sh\n{script}\n").chmod(0o755)
    return str(file)


def error_of(source: Path) -> str:
    with pytest.raises(BuildError) as raised:
        build(source)
    return str(raised.value)


def sum_after(library: Path, action: int) -> float:
    envs = load(library, num_envs=1)
    envs.reset(seed=1)
    observations, *_ = envs.step([action])
    envs.close()
    return float(observations[0])


# -------------------------------------------------------------------------------------------------------- what it makes


def test_the_library_lies_beside_the_source(library: Path) -> None:
    assert sorted(file.name for file in library.parent.iterdir()) == ["tiny.c", "tiny.so"]


def test_the_library_runs(library: Path) -> None:
    assert sum_after(library, 3) == 3


def test_others_may_read_the_library(library: Path) -> None:
    assert library.stat().st_mode & stat.S_IROTH


def test_the_library_is_put_where_it_is_wanted(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "other.so") == tmp_path / "other.so"
    assert open_library(tmp_path / "other.so").name == "tiny"


def test_a_folder_as_output_gets_the_library_by_the_name_of_the_source(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert build(source, tmp_path / "out") == tmp_path / "out" / "tiny.so"


def test_an_environment_in_cpp_is_built_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = TINY.replace('#include "memlane/env.h"', '#include <vector>\n#include "memlane/env.h"')
    library = build(written(tmp_path / "tiny.cpp", text.replace("/* MARK */", "std::vector<int> one(1);")))
    assert (open_library(library).name, capfd.readouterr().err) == ("tiny", "")


def test_the_library_is_optimised_for_this_processor_unless_native_is_false(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "logging", f'echo "$@" >> {tmp_path}/commands; exec cc "$@"'))
    build(source)
    build(source, native=False)
    with_it, without = (tmp_path / "commands").read_text().splitlines()
    assert ("-march=native" in with_it, "-march=native" in without) == (True, False)


def test_warnings_of_the_compiler_are_shown(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build(changed(source, "/* MARK */", "int unused_variable = 1;"))
    assert "unused_variable" in capfd.readouterr().err


def test_a_debug_build_tells_where_behaviour_is_undefined(source: Path) -> None:
    changed(source, "static void reset", "static volatile int big = 2147483647;\nstatic void reset")
    library = build(changed(source, "/* MARK */", "big = big + 1;"), debug=True)
    code = f"from memlane.native import load; e = load({str(library)!r}); e.reset(seed=1); e.step([1]); e.close()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "tiny.c:" in result.stderr
    assert "signed integer overflow" in result.stderr


# ------------------------------------------------------------------------------------------------------- building again


def test_a_process_that_has_the_old_library_loaded_goes_on_with_it(source: Path) -> None:
    library = build(source)
    envs = load(library, num_envs=1)
    envs.reset(seed=1)
    build(changed(source, "+= (float)", "+= 10 * (float)"))
    observations, *_ = envs.step([2])
    assert observations[0] == 2
    envs.close()


def test_a_process_that_starts_later_has_the_new_library(source: Path) -> None:
    build(source)
    library = build(changed(source, '.name = "tiny"', '.name = "second"'))
    code = f"from memlane.native.lowlevel import open_library; print(open_library({str(library)!r}).name)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "second\n"


@pytest.mark.parametrize("spoiled", ["this is not C", ".abi = 99,"])
def test_a_build_that_fails_leaves_the_library_before_it(source: Path, tmp_path: Path, spoiled: str) -> None:
    before = build(source).read_bytes()
    error_of(changed(source, ".abi = MEMLANE_ENV_ABI,", spoiled))
    assert source.with_suffix(".so").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.c", "tiny.so"]


# ------------------------------------------------------------------------------------------------------ what is missing


def test_an_error_is_one_of_memlane_and_a_runtime_error() -> None:
    assert issubclass(BuildError, MemlaneError)
    assert issubclass(BuildError, RuntimeError)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"there is no file {tmp_path}/none.c" in error_of(tmp_path / "none.c")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "is a directory" in error_of(tmp_path)


def test_what_does_not_look_like_c_is_not_compiled(tmp_path: Path) -> None:
    assert "should end in" in error_of(written(tmp_path / "env.py", ""))


def test_the_output_cannot_be_a_source_file(source: Path) -> None:
    with pytest.raises(BuildError, match="suffix of a source file"):
        build(source, source)
    assert source.read_text() == TINY


def test_the_folder_of_the_output_must_be_there(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"there is no directory .*none"):
        build(source, tmp_path / "none" / "tiny.so")


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [("debg", "; did you mean 'debug'?"), ("portable", "; did you mean 'native'?"), ("colour", "")],
)
def test_an_unknown_option_is_answered_with_the_nearest_one(option: str, suggestion: str, source: Path) -> None:
    expected = f"build() has no option {option!r}{suggestion} (options: output, debug, native)"
    with pytest.raises(TypeError, match=re.escape(expected)):
        build(source, **{option: True})  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_told(source: Path) -> None:
    with pytest.raises(BuildError, match=r"/proc/tiny\.so cannot be written"):
        build(source, "/proc/tiny.so")


def test_without_a_compiler_the_packages_that_have_one_are_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = error_of(source)
    assert "found no C compiler (cc, gcc, clang)" in error
    assert all(name in error for name in ("build-essential", "dnf install gcc", "CC"))


def test_a_compiler_that_was_chosen_but_is_not_there_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "CC is 'no-such-compiler -O2', but there is no program 'no-such-compiler'" in error_of(source)


def test_the_chosen_compiler_may_have_arguments(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -DMEMLANE_TEST_OF_ARGUMENTS")
    build(changed(source, "static void reset", "#ifndef MEMLANE_TEST_OF_ARGUMENTS\n#error\n#endif\nstatic void reset"))


def test_an_installation_without_the_header_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.so"))
    assert f"memlane/env.h is missing in {tmp_path}/include: install memlane again" in error_of(source)


def test_a_compiler_that_is_killed_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "dying", "kill -9 $$"))
    assert "the compiler was killed by SIGKILL" in error_of(source)


# -------------------------------------------------------------------------------------------------------- what is wrong


def test_an_error_in_the_source_is_shown_as_the_compiler_says_it(source: Path) -> None:
    error = error_of(changed(source, "/* MARK */", "nonsense;"))
    line = next(number for number, text in enumerate(source.read_text().splitlines(), 1) if "nonsense" in text)
    assert f"Start with the first error, line {line} of tiny.c" in error
    assert f"tiny.c:{line}:" in error
    assert "'nonsense' undeclared" in error or "undeclared identifier 'nonsense'" in error


def test_a_header_that_is_not_found_is_named(source: Path) -> None:
    error = error_of(changed(source, "memlane/env.h", "memlane/end.h"))
    assert "The header memlane/end.h was not found" in error


def test_a_source_without_an_environment_is_told_what_it_needs(tmp_path: Path) -> None:
    error = error_of(written(tmp_path / "empty.c", "int nothing;\n"))
    assert "empty.c compiles, but cannot be run" in error
    assert f"{tmp_path}/empty.so exports no memlane_env" in error


def test_a_spec_that_cannot_be_run_is_told_in_the_words_of_the_spec(source: Path) -> None:
    assert "the spec has no function 'step'" in error_of(changed(source, ".step = step,", ".close = step,"))


def test_a_function_that_is_defined_nowhere_is_named(source: Path) -> None:
    changed(source, "static void reset", "void never_written(void);\nstatic void reset")
    error = error_of(changed(source, "/* MARK */", "never_written();"))
    assert "undefined symbol: never_written" in error
    assert "used but not defined" in error


def test_a_library_that_crashes_when_it_is_read_does_not_crash_the_caller(source: Path) -> None:
    error = error_of(changed(source, ".observations = observations,", ".observations = (const memlane_field *)8,"))
    assert "the process that read its memlane_env was killed by SIGSEGV" in error


def test_a_library_that_ends_the_process_when_it_is_loaded_is_told(source: Path) -> None:
    changed(source, "#include", "#include <stdlib.h>\n#include")
    abort = "__attribute__((constructor)) static void at_start(void) { abort(); }\nstatic void reset"
    assert "SIGABRT" in error_of(changed(source, "static void reset", abort))


def test_messages_name_no_temporary_file(source: Path) -> None:
    assert ".memlane-build-" not in error_of(changed(source, ".abi = MEMLANE_ENV_ABI", ".abi = 99"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/null", path)], ids=["pipe", "device"])
def test_an_output_that_is_no_file_is_refused_and_stays(source: Path, tmp_path: Path, make: Any) -> None:
    output = tmp_path / "out.so"
    make(output)
    before = output.lstat()
    with pytest.raises(BuildError, match="is a device, a pipe or a socket; name a file"):
        build(source, output)
    assert output.lstat() == before


@pytest.mark.parametrize("name", ["-o.c", "-dumpversion.c", "@options.c"])
def test_a_file_name_is_no_option_of_the_compiler(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(source.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert build(name).name == Path(name).with_suffix(".so").name
    assert (tmp_path / name).with_suffix(".so").exists()
