"""The command ``memlane``, as a user calls it: in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memlane import cli
from memlane.native import built_in_names
from memlane.native.lowlevel import open_library
from memlane.native.new import new
from memlane.train.algorithms import ALGORITHMS
from memlane.train.run_dir import holder_of
from tests.support.processes import wait_for, within

COMMAND = Path(sys.executable).with_name("memlane")


def memlane(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=within(100))


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


def test_new_writes_a_directory_and_says_what_comes_next(tmp_path: Path) -> None:
    result = memlane("new", "orchard", "--dir", "trees", cwd=tmp_path)
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
    assert result.stdout == 'orchard.so is ready: memlane.load("orchard.so", num_envs=1024)\n'
    assert open_library(source.with_suffix(".so")).name == "orchard"


def test_build_puts_the_library_where_it_is_wanted(source: Path, tmp_path: Path) -> None:
    assert memlane("build", source, "--output", tmp_path / "other.so").returncode == 0
    assert (tmp_path / "other.so").exists()


def test_build_passes_its_flags_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "recording"
    compiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/flags\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert memlane("build", source, "--debug", "--portable").returncode == 0
    flags = (tmp_path / "flags").read_text().split()
    assert ("-g" in flags, "-march=native" in flags) == (True, False)


def test_envs_has_a_line_for_each_environment() -> None:
    lines = memlane("envs").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : lines.index("")]] == built_in_names()


def test_envs_shows_spaces_limit_presets_and_settings() -> None:
    (line,) = [line for line in memlane("envs").stdout.splitlines() if line.startswith("CartPole-v1")]
    expected = "CartPole-v1 float32[4] Discrete(2) 500 appo 475, dqn 475 sutton_barto_reward=0"
    assert line.split() == expected.split()


def test_envs_shows_all_text_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        cli, "_console", lambda **_: Console(width=80, force_terminal=True, no_color=True, highlight=False)
    )
    assert cli.main(["envs"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line) for line in lines[: lines.index("")]) <= 80
    begin = next(line.index("settings") for line in lines if "settings" in line)
    assert "sutton_barto_reward=0" in "".join(line[begin:].strip() for line in lines)


def test_envs_names_presets_of_other_environments() -> None:
    assert "HalfCheetah-v5" in memlane("envs").stdout.splitlines()[-1]


def test_the_module_can_be_run_too() -> None:
    result = subprocess.run([sys.executable, "-m", "memlane", "envs"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------------------- training


STEPS = 32 * 32
"""Environment steps per update of CartPole's preset."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of a few updates, and what the command said."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = ("CartPole-v1", "--max-steps", str(3 * STEPS), "--run-dir", folder, "--set", "update_epochs=1",
                 "clip_coef=0.3")  # fmt: skip
    return folder, memlane("train", *arguments, "--set", "network.hidden=(16,)")


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_training_leaves_a_whole_run_and_says_what_comes_next(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, said = trained
    assert (said.returncode, said.stderr) == (0, "")
    there = {file.name.partition(".out")[0] for file in folder.iterdir()}
    assert there == {"checkpoint.pt", "config.json", "events", "metrics.csv", "report.html", "result.json", "run.lock"}
    made = json.loads((folder / "result.json").read_text())
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + made["iteration"]
    assert made["env_steps"] >= 3 * STEPS
    assert made["stopped_by"] == "max_steps"
    resume = f"memlane resume {folder} --max-steps {6 * STEPS}\n"
    for words in (f"{folder}/report.html", f"memlane eval {folder}", resume, "evaluated: return"):
        assert words in said.stdout
    config = json.loads((folder / "config.json").read_text())
    assert (config["algorithm"]["update_epochs"], config["algorithm"]["clip_coef"]) == (1, 0.3)
    assert config["algorithm"]["network"] == {"hidden": [16]}


def test_eval_prints_returns_and_writes_a_gif(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = trained[0]
    said = memlane("eval", folder, "--episodes", "5", "--render", "gif")
    assert (said.returncode, said.stderr) == (0, "")
    returns, gif = said.stdout.splitlines()
    assert re.fullmatch(
        r"CartPole-v1: return [\d.]+ ± [\d.]+ over 5 episodes, from [\d.]+ to [\d.]+; mean episode length [\d.]+",
        returns,
    )
    assert gif == f"{folder}/evaluation.gif shows the first episode; it is in {folder}/report.html too"
    assert (folder / "evaluation.gif").read_bytes().startswith(b"GIF89a")
    assert "data:image/gif" in (folder / "report.html").read_text()


def test_resume_goes_on_counting_and_json_is_a_line_for_each_update(
    trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    said = memlane("resume", folder, "--max-steps", str(5 * STEPS), "--json")
    assert (said.returncode, said.stderr) == (0, "")
    found = objects(said.stdout)
    made = json.loads((trained[0] / "result.json").read_text())["iteration"]
    updates = [one["iteration"] for one in found if one["kind"] == "update"]
    assert updates == list(range(made + 1, made + 1 + len(updates)))
    assert found[0]["kind"] == "start"
    assert found[-1]["kind"] == "result"
    assert found[-1]["env_steps"] >= 5 * STEPS
    rows = [int(line.split(",")[0]) for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    assert rows == list(range(1, updates[-1] + 1))
    assert json.loads((folder / "config.json").read_text())["max_steps"] == 5 * STEPS


SIGNALS = {
    "Ctrl-C": (signal.SIGINT, 130, ("--collectors", "2")),
    "SIGTERM": (signal.SIGTERM, 143, ("--collectors", "2", "--backend", "gymnasium", "--set", "env_workers=1")),
    "SIGHUP": (signal.SIGHUP, 129, ("--algo", "dqn")),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_in_mid_training_saves_is_quiet_and_leaves_no_process(tmp_path: Path, name: str) -> None:
    number, code, arguments = SIGNALS[name]
    folder = tmp_path / "run"
    # A terminal, `timeout` and batch systems send a signal to all processes of a program.
    command = start_training("--num-envs", "4", "--target", "inf", "--run-dir", folder, "--json", *arguments)
    assert command.stdout is not None
    assert command.stderr is not None
    said: list[dict[str, Any]] = []
    while [one["kind"] for one in said].count("update") < 3:
        said.append(json.loads(command.stdout.readline()))
    if name == "SIGTERM":
        os.kill(command.pid, number)  # as `timeout` does: first to its child, then to the group
    os.killpg(command.pid, number)
    said += objects(command.stdout.read())  # communicate() would skip what readline() has buffered
    err = command.stderr.read()
    assert (command.wait(within(100)), err) == (code, "")
    assert (said[-1]["kind"], said[-1]["stopped_by"], said[-1]["evaluation"]) == ("result", name, {})
    assert not [one for one in said if one["kind"] == "collector_lost"]
    assert {"checkpoint.pt", "report.html", "result.json"} <= {file.name for file in folder.iterdir()}
    command.stdout.close()
    command.stderr.close()
    deadline = time.monotonic() + 5  # the fork server sees the end of its pipe
    while (left := session_of(command.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def start_training(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "train", "CartPole-v1", *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True, **options},
    )


def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    master, terminal = os.openpty()
    folder = tmp_path / "run"
    command = start_training(
        "--num-envs", "4", "--target", "inf", "--run-dir", folder, start_new_session=False, stdout=None, stderr=None,
        preexec_fn=lambda: os.login_tty(terminal),
    )  # fmt: skip
    os.close(terminal)
    with command:
        try:
            assert wait_for(lambda: (folder / "metrics.csv").exists(), within(60))
            os.close(master)
            assert command.wait(within(100)) == 129
        finally:
            command.kill()
    assert json.loads((folder / "result.json").read_text())["stopped_by"] == "SIGHUP"
    assert (folder / "checkpoint.pt").exists()


def test_two_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path: Path) -> None:
    arguments = ("--max-steps", str(3 * STEPS), "--set", "update_epochs=1", "--json")
    commands = [start_training(*arguments, cwd=tmp_path) for _ in range(2)]
    told = [objects(command.communicate(timeout=within(100))[0]) for command in commands]
    assert [command.returncode for command in commands] == [0, 0]
    made = {tmp_path / one[0]["run_dir"] for one in told}
    assert made == set((tmp_path / "runs").iterdir())
    assert len(made) == 2
    for folder in made:
        assert re.fullmatch(r"CartPole-v1-appo-s0-\d{8}-\d{6}(-2)?", folder.name)
        rows = [int(line.split(",")[0]) for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
        assert rows == list(range(1, len(rows) + 1))


def test_a_directory_in_which_another_process_trains_is_refused_and_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    folder = tmp_path / "run"
    limits = ("--num-envs", "4", "--target", "inf", "--max-steps", str(10**9), "--save-seconds", "0.01")
    command = start_training(*limits, "--run-dir", folder, stdout=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: (folder / "checkpoint.pt").exists(), within(60))
        assert cli.main(["train", "CartPole-v1", "--run-dir", str(folder)]) == 1
        assert capsys.readouterr().err == f"error: {folder} has a run already: resume it, or choose another directory\n"
        assert cli.main(["resume", str(folder)]) == 1
        assert re.fullmatch(
            rf"error: {folder} is in use: pid {command.pid} \(.*\) trains in it; wait until it has ended, or choose "
            "another directory\n",
            capsys.readouterr().err,
        )
        assert cli.main(["runs", str(tmp_path), "--json"]) == 0
        (line,) = objects(capsys.readouterr().out)
        assert (line["state"], line["env"], line["path"]) == ("running", "CartPole-v1", str(folder))
        assert cli.main(["report", str(folder)]) == 0
        assert cli.main(["eval", str(folder), "--episodes", "1"]) == 0
    finally:
        command.kill()
        command.communicate()
    capsys.readouterr()
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    (line,) = objects(capsys.readouterr().out)
    assert line["state"] == "killed"


def test_a_finished_run_that_is_resumed_says_so_and_what_to_add(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    folder = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    assert cli.main(["resume", str(folder)]) == 0
    said, errors = capsys.readouterr()
    assert errors == ""
    assert "the run was finished before, and nothing was trained. The last command below trains on" in said
    assert said.endswith(f"memlane resume {folder} --max-steps {6 * STEPS}\n")
    assert cli.main(["resume", str(folder), "--json"]) == 0
    (found,) = objects(capsys.readouterr().out)
    assert (found["kind"], found["stopped_by"]) == ("result", "max_steps")


def session_of(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.append(int(folder.name))
    return found


def test_ctrl_c_while_programs_start_is_quiet(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [COMMAND, "train", "CartPole-v1", "--run-dir", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while len(session_of(command.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # into the imports of both
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=within(100))
    assert (command.returncode, err) == (130, b"")
    assert out.count(b"\n") <= 1  # a quick machine has got as far as the title


@pytest.mark.soak
def test_a_library_can_be_trained_on_and_evaluated_from_another_folder(source: Path, tmp_path: Path) -> None:
    assert memlane("build", source).returncode == 0
    limits = ("--num-envs", "4", "--set", "num_steps=8", "update_epochs=1")
    said = memlane(
        "train", "orchard.so", *limits, "--max-steps", "64", "--run-dir", tmp_path / "run", cwd=source.parent
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert f"memlane eval {tmp_path}/run --trust --render gif" in said.stdout
    said = memlane("eval", "run", "--trust", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")


WRONG = {
    "an environment that is not there": ["Nowhere-v1"],
    "a setting that is not there": ["CartPole-v1", "--set", "learning_rat=1"],
    "a setting of another kind": ["CartPole-v1", "--set", "update_epochs=many"],
    "an option as a setting": ["CartPole-v1", "--set", "max_lag=2"],
    "a setting without a value": ["CartPole-v1", "--set", "update_epochs"],
    "a choice that is none": ["CartPole-v1", "--set", "lr_schedule=quadratic"],
    "no environments": ["CartPole-v1", "--num-envs", "0"],
    "no collectors": ["CartPole-v1", "--collectors", "0"],
    "no steps": ["CartPole-v1", "--max-steps", "0"],
    "less than no time": ["CartPole-v1", "--max-seconds", "-5"],
    "no time between checkpoints": ["CartPole-v1", "--save-seconds", "0"],
    "a library that is not there": ["nowhere.so"],
    "a run directory that cannot be": ["CartPole-v1", "--run-dir", "/proc/run"],
    "a backend that has it not": ["Hopper-v5", "--backend", "native"],
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_a_training_that_cannot_be_is_one_message_and_leaves_no_folder(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["resume", "eval", "report"])
def test_a_folder_that_is_no_run_is_one_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    assert cli.main([name, str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} is not a run directory: it has no config.json\n"


def test_a_run_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text("iteration\n1\n")
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    assert cli.main(["train", "CartPole-v1", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("has a run already: resume it, or choose another directory\n")
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


# --------------------------------------------------------------------------------------------------------- several runs


def test_runs_lists_every_run_with_its_state(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    heading, line = memlane("runs", trained[0].parent).stdout.splitlines()
    assert heading.split() == ["env", "algo", "seed", "steps", "return", "state", "run"]
    words = line.split()
    assert (words[:3], words[5:]) == (["CartPole-v1", "appo", "0"], ["finished", str(trained[0])])


def test_runs_of_a_directory_without_any_says_so(tmp_path: Path) -> None:
    said = memlane("runs", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "runs has no runs; `memlane train` makes one in runs/\n")


def test_report_writes_the_report_again(
    trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    (folder / "report.html").unlink()
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert "CartPole-v1" in (folder / "report.html").read_text()


def test_compare_writes_a_page(
    trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", str(trained[0]), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/page.html\n"
    assert "1 run in 1 group" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("arguments", [["compare"], ["compare", "nowhere"]])
def test_nothing_to_compare_is_a_wrong_call(arguments: list[str], tmp_path: Path) -> None:
    said = memlane(*arguments, cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("error: ")


TINY = ("--num-envs", "4", "--set", "update_epochs=1", "num_steps=8", "network.hidden=(8,)")


def test_a_sweep_trains_every_seed_and_names_a_run_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "CartPole-v1-appo-s1").touch()  # no directory can be made there
    limits = ("--seeds", "3", "--parallel", "3", "--max-steps", "64")
    said = memlane("sweep", "CartPole-v1", *limits, "--dir", folder, *TINY)
    assert (said.returncode, said.stderr) == (1, "")
    lines = said.stdout.splitlines()
    assert lines[0] == f"3 runs in {folder}, 3 at a time"
    assert len(re.findall(r": the limit of 64 steps is reached; \d+ steps, return ", said.stdout)) == 2
    (failure,) = [line for line in lines if "CartPole-v1-appo-s1: failed: error: the run directory" in line]
    assert failure.endswith(f"({folder}/CartPole-v1-appo-s1.log)")
    assert lines[-1] == "1 of 3 runs failed: CartPole-v1-appo-s1; their .log files say why"
    assert "2 runs in 1 group" in (folder / "compare.html").read_text()


@pytest.mark.parametrize("name", ["Ctrl-C", "SIGTERM"])
def test_a_signal_stops_all_runs_of_a_sweep_and_keeps_what_there_is(tmp_path: Path, name: str) -> None:
    number, code, _ = SIGNALS[name]
    folder = tmp_path / "sweep"
    command = subprocess.Popen(
        [COMMAND, "sweep", "CartPole-v1", "--seeds", "3", "--parallel", "2", "--target", "inf", "--dir", folder, *TINY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        runs = [folder / f"CartPole-v1-appo-s{seed}" for seed in range(2)]
        assert wait_for(lambda: all((run / "metrics.csv").exists() for run in runs), within(60))
        os.killpg(command.pid, number)
        out, err = command.communicate(timeout=within(100))
    finally:
        command.kill()
    assert (command.returncode, err) == (code, "")
    assert f"{name}: waiting for 2 runs to save and stop" in out
    assert [json.loads((run / "result.json").read_text())["stopped_by"] for run in runs] == [name, name]
    assert not (folder / "CartPole-v1-appo-s2").exists()
    assert "2 runs in 1 group" in (folder / "compare.html").read_text()


def test_the_runs_of_a_sweep_that_is_killed_save_and_stop(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run = folder / "CartPole-v1-appo-s0"
    command = subprocess.Popen(
        [COMMAND, "sweep", "CartPole-v1", "--seeds", "1", "--target", "inf", "--dir", folder, *TINY],
        stdout=subprocess.DEVNULL,
    )
    assert wait_for(lambda: (run / "metrics.csv").exists(), within(60))
    command.kill()
    command.wait()
    assert wait_for(lambda: (run / "result.json").exists())
    assert json.loads((run / "result.json").read_text())["stopped_by"] == "SIGTERM"
    assert wait_for(lambda: holder_of(run) is None)


# -------------------------------------------------------------------------------------------------------- the machine


def test_doctor_has_a_line_for_each_finding_and_ends_with_1_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    said = memlane("doctor")
    assert (said.returncode, said.stderr) == (0, "")
    assert re.search(r"^ok +Python +3", said.stdout, re.MULTILINE)
    from memlane import doctor

    monkeypatch.setattr(doctor, "CHECKS", [lambda: [doctor.Finding("fail", "luck", "none left", "get some")]])
    assert cli.main(["doctor"]) == 1


def test_clean_removes_what_the_dead_left_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_SHM_DIR", str(tmp_path))
    code = """
import os
from memlane.core import Segment
segment = Segment.create({"numbers": ("int64", 8)}, name="forgotten")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code])
    said = memlane("clean").stdout
    assert said.startswith(f"removed {tmp_path}/memlane-forgotten, ")
    assert list(tmp_path.iterdir()) == []
    assert memlane("clean").stdout == f"nothing to remove: {tmp_path} has no segment of a dead process\n"


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_error_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    result = memlane("build", "none.c", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: there is no file none.c; `memlane new NAME` writes a template\n"


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
    assert result.stderr.startswith("error: orchard already exists and was not changed")


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


@pytest.mark.parametrize("arguments", [["train", "--help"], ["envs"]], ids=" ".join)
def test_a_reader_that_is_gone_ends_the_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = subprocess.run([COMMAND, *arguments], stdout=output, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_command_alone_prints_the_help() -> None:
    assert memlane().stdout == memlane("--help").stdout


def test_an_unknown_command_is_answered_with_the_nearest_one() -> None:
    result = memlane("trian", "CartPole-v1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: unknown command 'trian'; did you mean 'train'?\n"
        f"Commands: {', '.join(cli.COMMANDS)}. `memlane --help` describes them.\n"
    )


def test_an_unknown_algorithm_is_answered_with_the_nearest_one() -> None:
    result = memlane("train", "CartPole-v1", "--algo", "ppo")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: algo must be one of appo, sac, dqn, found 'ppo'; did you mean 'appo'?\n"


def test_a_wrong_value_of_render_is_answered_with_the_right_one(
    trained: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(trained[0]), "--render", "mp4"]) == 2
    assert capsys.readouterr().err == "error: render must be gif, found 'mp4'\n"


def test_the_environment_may_follow_a_double_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--collectors", "0", "--", "CartPole-v1"]) == 1
    assert capsys.readouterr().err == "error: collectors must be at least 1, found 0\n"


def test_set_needs_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "CartPole-v1", "--set"]) == 2
    assert capsys.readouterr().err == "error: --set needs one or more KEY=VALUE, found none\n"


def test_an_unknown_option_is_answered_with_the_nearest_one() -> None:
    result = memlane("train", "CartPole-v1", "--num-env", "3")
    assert result.returncode == 2
    assert "--num-envs INT" in result.stderr


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--total-timesteps", "did you mean --max-steps?"),
        ("--learning-rate=1e-3", "settings of the algorithm are written --set learning_rate=VALUE"),
        ("--n-epochs", "settings of the algorithm are written --set update_epochs=VALUE"),
        ("--hidden", "settings of the algorithm are written --set network.hidden=VALUE"),
        ("--net-arch", "settings of the algorithm are written --set network.hidden=VALUE"),
        ("--max-restarts", "settings of the algorithm are written --set max_restarts=VALUE"),
        ("--device", "it can be set in Python only: memlane.train.train(Options(..., device=...))"),
        (
            "--dueling",
            "`memlane train --help` lists the options, and settings of the algorithm are written --set KEY=VALUE",
        ),
        ("--num-minibatches", "--set minibatch_size instead: num_steps * environments / num_minibatches"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(
    flag: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "CartPole-v1", flag, "5"]) == 2
    assert capsys.readouterr().err == f"error: unknown option {flag}; {answer}\n"


def test_the_help_of_train_names_the_algorithms() -> None:
    assert f"--algo {{{','.join(ALGORITHMS)}}}" in memlane("train", "--help").stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_no_default_of_none(name: str) -> None:
    """The help says what happens instead."""
    assert "None" not in memlane(name, "--help").stdout


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
    out, err = command.communicate(timeout=within(100))
    assert (command.returncode, out, err) == (130, b"", b"")
    assert sorted(file.name for file in source.parent.iterdir()) == [
        "README.md",
        "orchard.c",
        "test_orchard.py",
        "train.py",
    ]
