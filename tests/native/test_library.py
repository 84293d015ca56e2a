"""Library: where native environments come from, and the errors when there are none."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from memlane.native import NativeEnv, SpecError, built_in_names, load, make
from memlane.native.lowlevel import built_in, open_library
from tests.support.native_envs import gcc

HELPED = """
#include "memlane/env.h"
double helper(double x);
static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) ((double *)envs->observations[0])[i] = helper(1);
}
double helper(double x) { return x + NUMBER; }
static const memlane_field observations[] = {{.dtype = MEMLANE_FLOAT64, .low = 0, .high = 100}};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 3}};
MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI, .spec_bytes = sizeof(memlane_spec), .name = "Helped", .observations = observations,
    .actions = actions, .num_observations = 1, .num_actions = 1, .reset = reset, .step = reset,
};
"""


def test_the_names_of_built_in_environments_are_sorted_and_each_opens() -> None:
    names = built_in_names()
    assert names == sorted(names)
    assert [built_in(name).name for name in names] == names


def test_an_unknown_name_is_an_error_that_names_those_that_there_are() -> None:
    names = ", ".join(built_in_names())
    with pytest.raises(
        LookupError, match=re.escape(f"unknown native environment 'Chess-v9' (built-in environments: {names})")
    ):
        make("Chess-v9")


@pytest.mark.parametrize("name", ["CartPol-v1", "CartPole", "cartpole-v1", "memlane/CartPole-v1"])
@pytest.mark.parametrize("create", [make, NativeEnv], ids=["make", "NativeEnv"])
def test_a_misspelt_name_is_answered_with_the_nearest_one(create: Callable[[str], Any], name: str) -> None:
    expected = f"unknown native environment {name!r}; did you mean 'CartPole-v1'? (built-in environments: Acrobot-v1, "
    with pytest.raises(LookupError, match=re.escape(expected)):
        create(name)


def test_gymnasium_answers_a_misspelt_id_with_the_nearest_one() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match=r"`CartPol` doesn't exist in namespace memlane.*`CartPole`"):
        gymnasium.make("memlane/CartPol-v1")


def test_a_file_that_is_not_there_is_an_error_that_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.so.*memlane build"):
        open_library(tmp_path / "none.so")


def test_a_file_that_is_no_library_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(SpecError, match=r"text\.so cannot be loaded"):
        open_library(tmp_path / "text.so")


def test_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"{tmp_path.name} cannot be loaded"):
        open_library(tmp_path)


def test_a_library_that_lacks_a_function_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "lacking.c").write_text("extern void nowhere(void);\nvoid (*here)(void) = nowhere;\n")
    gcc(tmp_path / "lacking.c", tmp_path / "lacking.so", "-shared", "-fPIC")
    with pytest.raises(SpecError, match=r"lacking\.so cannot be loaded.*nowhere"):
        open_library(tmp_path / "lacking.so")


def test_a_library_without_the_symbol_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int something_else = 1;\n")
    gcc(tmp_path / "other.c", tmp_path / "other.so", "-shared", "-fPIC")
    with pytest.raises(SpecError, match=r"other\.so exports no memlane_env; .*MEMLANE_EXPORT const memlane_spec"):
        open_library(tmp_path / "other.so")


def test_a_path_may_be_a_text_and_relative(library_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = library_of("mixed")
    monkeypatch.chdir(file.parent)
    assert open_library("mixed.so").name == "Mixed"


def test_two_libraries_with_helpers_of_one_name_each_call_their_own(tmp_path: Path) -> None:
    (tmp_path / "helped.c").write_text(HELPED)
    seen = []
    for number in (10, 20):
        file = gcc(tmp_path / "helped.c", tmp_path / f"helped{number}.so", "-shared", "-fPIC", f"-DNUMBER={number}")
        envs = load(file, num_envs=1)
        observations, _ = envs.reset(seed=1)
        seen.append(float(observations[0]))
        envs.close()
    assert seen == [11, 21]


def test_one_library_may_be_opened_twice(library_of: Callable[[str], Path]) -> None:
    first, second = load(library_of("mixed"), num_envs=2), load(library_of("mixed"), num_envs=2)
    first.reset(seed=1)
    second.reset(seed=2)
    before = second.state.copy()
    first.reset(seed=3)
    assert (second.state == before).all()
    first.close()
    second.close()


@pytest.mark.parametrize("which", ["built in", "loaded"])
def test_a_spec_goes_to_another_process_as_what_it_is_or_not_at_all(
    which: str, library_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """An address means nothing there; ``AsyncVectorEnv([lambda: NativeEnv(spec)])`` takes one along."""
    spec = built_in("CartPole-v1") if which == "built in" else open_library(library_of("mixed"))
    try:
        packed = pickle.dumps(spec)
    except (TypeError, AttributeError, pickle.PicklingError):
        return
    (tmp_path / "spec").write_bytes(packed)
    code = (
        "import pickle, sys; from memlane.native import NativeEnv;"
        "spec = pickle.loads(open(sys.argv[1], 'rb').read()); print(spec.name); NativeEnv(spec).reset(seed=1)"
    )
    # As on most machines: addresses differ from process to process.
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "spec"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, spec.name), done.stderr


def test_environments_of_a_library_outlive_its_file(library_of: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "copy.so"
    file.write_bytes(library_of("mixed").read_bytes())
    envs = load(file, num_envs=2)
    os.unlink(file)
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    envs.close()
