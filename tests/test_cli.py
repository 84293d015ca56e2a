"""The command ``memlane``, as a user calls it: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memlane import cli
from memlane.native import built_in_names, open_library
from memlane.native.new import new

COMMAND = Path(sys.executable).with_name("memlane")


def memlane(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous integration likes to claim that there is one."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return new("orchard", tmp_path / "orchard") / "orchard.c"


# ------------------------------------------------------------------------------------------------------------- commands


def test_help_lists_every_command() -> None:
    result = memlane("--help")
    assert result.returncode == 0
    assert all(f"• {name} " in result.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = memlane(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"usage: memlane {name}" in result.stdout


def test_help_imports_nothing_that_is_slow() -> None:
    code = """
import sys
from memlane import cli
try:
    cli.main(["--help"])
except SystemExit:
    slow = {"gymnasium", "torch", "memlane.native", "memlane.vector", "rich"}
    print(sorted(slow & set(sys.modules)), file=sys.stderr)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "[]\n"


def test_new_writes_a_folder_and_says_what_comes_next(tmp_path: Path) -> None:
    result = memlane("new", "orchard", "--folder", "trees", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "trees" / "orchard.c").exists()
    assert [line.strip() for line in result.stdout.splitlines()[2:]] == [
        "cd trees",
        "memlane build orchard.c",
        "pytest",
        "python train.py",
    ]


def test_build_makes_a_library_and_says_how_to_load_it(source: Path) -> None:
    result = memlane("build", "orchard.c", cwd=source.parent)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == 'orchard.so is ready: memlane.native.load("orchard.so", num_envs=1024)\n'
    assert open_library(source.with_suffix(".so")).name == "orchard"


def test_build_puts_the_library_where_it_is_wanted(source: Path, tmp_path: Path) -> None:
    assert memlane("build", source, "--output", tmp_path / "other.so").returncode == 0
    assert (tmp_path / "other.so").exists()


def test_build_passes_its_flags_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "telling"
    compiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert memlane("build", source, "--debug", "--portable").returncode == 0
    told = (tmp_path / "told").read_text().split()
    assert ("-g" in told, "-march=native" in told) == (True, False)


def test_envs_has_a_line_for_each_environment() -> None:
    lines = memlane("envs").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == built_in_names()


def test_envs_tells_spaces_limit_and_settings() -> None:
    (line,) = [line for line in memlane("envs").stdout.splitlines() if line.startswith("CartPole-v1")]
    assert line.split() == ["CartPole-v1", "float32[4]", "Discrete(2)", "500", "sutton_barto_reward=0"]


def test_the_module_can_be_run_too() -> None:
    result = subprocess.run([sys.executable, "-m", "memlane.cli", "envs"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_error_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    result = memlane("build", "none.c", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: there is no file none.c; `memlane new NAME` writes one to begin with\n"


def test_what_the_compiler_says_is_shown_as_it_is(source: Path) -> None:
    """Brackets are no markup, and long lines stay lines: editors jump to them."""
    long = "int [bold] a_name_that_is_as_long_as_names_are_in_the_programs_of_people_who_write_very_long_names;"
    source.write_text(source.read_text() + long)
    result = memlane("build", "orchard.c", cwd=source.parent)
    assert result.returncode == 1
    assert long in result.stderr


def test_a_folder_that_exists_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "orchard").mkdir()
    result = memlane("new", "orchard", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: orchard is there already")


def test_an_error_of_ours_that_was_not_meant_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        """Has a bug."""
        raise ZeroDivisionError

    monkeypatch.setitem(cli.COMMANDS, "broken", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["broken"])


@pytest.mark.parametrize("arguments", [["bild"], ["build"], ["envs", "--all"], []], ids=" ".join)
def test_a_wrong_call_ends_with_2(arguments: list[str]) -> None:
    result = memlane(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_ctrl_c_is_quiet_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec sleep 60\n")
    compiler.chmod(0o755)
    # A terminal sends Ctrl-C to all of its foreground processes.
    command = subprocess.Popen(
        [COMMAND, "build", source],
        env={**os.environ, "CC": str(compiler)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=30)
    assert (command.returncode, out, err) == (130, b"", b"")
    assert sorted(file.name for file in source.parent.iterdir()) == [
        "README.md",
        "orchard.c",
        "test_orchard.py",
        "train.py",
    ]
