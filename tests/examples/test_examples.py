"""Every example runs to its end as a script, with tiny sizes, and says what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import within

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "train_your_own_env",
    "survive_a_crash",
    "ppo_single_file",
    "sb3_on_memlane",
    "sac_single_file",
    "resume_replay",
]


def run(folder: Path, name: str, *arguments: str, ignore: str = "") -> str:
    """In a folder of its own, and with every warning an error in the script's process, but for those of the category
    ``ignore``."""
    ignored = ["-W", f"ignore::{ignore}"] if ignore else []
    command = [sys.executable, "-W", "error", *ignored, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=within(100), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_example_explains_its_options(tmp_path: Path, name: str) -> None:
    printed = run(tmp_path, name, "--help")
    first = (EXAMPLES / f"{name}.py").read_text().splitlines()[0].strip('"')
    assert " ".join(first.split()) in " ".join(printed.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 130


def test_an_environment_of_ones_own_is_trained_and_gets_better(tmp_path: Path) -> None:
    printed = run(tmp_path, "train_your_own_env", "--steps", "20000", "--run-dir", "run")
    before, after = map(float, re.findall(r"mean return of (?:random actions|the trained policy): (-?[\d.]+)", printed))
    assert after > before + 10, printed
    assert (tmp_path / "run" / "metrics.csv").exists()


def test_a_training_whose_collectors_are_killed_goes_on(tmp_path: Path) -> None:
    few = ["--every", "3000", "--kills", "3", "--target", "100"]
    printed = run(tmp_path, "survive_a_crash", *few, "--run-dir", "run")
    kills, lost, started = map(int, re.findall(r"(\d+) kills; (\d+) collectors were lost, (\d+) started", printed)[0])
    assert kills == 3
    assert kills - 2 <= lost <= kills  # the last ones may not have been noticed
    assert started == 2 + lost
    assert printed.count("was killed by SIGKILL") == lost
    assert "the target of 100 is reached" in printed


def test_the_single_file_stands_without_memlanes_training() -> None:
    assert "memlane.train" not in (EXAMPLES / "ppo_single_file.py").read_text()


@pytest.mark.parametrize("backend", ["native", "python"])
def test_the_single_file_learns_on_both_kinds_of_environments(tmp_path: Path, backend: str) -> None:
    printed = run(tmp_path, "ppo_single_file", "--backend", backend, "--target", "60", "--max-steps", "60000")
    assert "\nsolved: mean return" in printed, printed


def test_stable_baselines3_learns_on_memlanes_environments(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    # So few environments are faster without workers, and memlane may say so in a UserWarning.
    tiny = ["--steps", "4096", "--num-envs", "4", "--num-workers", "2"]
    printed = run(tmp_path, "sb3_on_memlane", *tiny, ignore="UserWarning")
    before, after = map(float, re.findall(r"mean return (?:before|after) training: ([\d.]+)", printed))
    assert before > 0
    assert after > 0


def test_without_stable_baselines3_the_example_says_how_to_install_it(tmp_path: Path) -> None:
    hide = "import importlib.util as u, runpy, sys; u.find_spec = lambda name: None; sys.argv = sys.argv[1:]; "
    hide += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", hide, str(EXAMPLES / "sb3_on_memlane.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=within(100), check=False)
    assert done.returncode == 1
    assert done.stderr == "stable_baselines3 is not installed: pip install 'memlane[sb3]'\n"


def test_sac_in_a_single_file_learns_from_its_replay(tmp_path: Path) -> None:
    printed = run(tmp_path, "sac_single_file", "--max-steps", "3000", "--learning-starts", "500", "--batch-size", "32")
    assert re.search(r"(solved|stopped) after 3,\d+ steps", printed), printed
    assert "memlane.train" not in (EXAMPLES / "sac_single_file.py").read_text()


def test_a_replay_in_a_file_outlives_three_kills(tmp_path: Path) -> None:
    printed = run(tmp_path, "resume_replay", "--file", "replay.memlane")
    assert printed.count("killed after") == 3
    assert "sampled by priority: none torn" in printed
    assert (tmp_path / "replay.memlane").exists()
