"""Sweeps: which runs they have, and what is checked before any starts. tests/test_cli.py runs some."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from memlane.core.cores import core_count
from memlane.train import OptionError, Options
from memlane.train import sweep as sweep_module
from memlane.train.sweep import Sweep, parse_seeds
from tests.support.training import write_run


def sweep_of(directory: Path, settings: list[str] | None = None, seeds: str = "2", **changes: Any) -> Sweep:
    parallel = changes.pop("parallel", None)
    options = Options(**{"env": "CartPole-v1", **changes})
    return Sweep(options, parse_seeds(seeds), settings or [], directory=directory, parallel=parallel)


def test_the_examples_in_the_text_run() -> None:
    assert doctest.testmod(sweep_module).failed == 0


@pytest.mark.parametrize("text", ["", "0", "-3", "x", "5-3", "1,1", "1,", "2.5"])
def test_seeds_that_are_none_are_an_error(text: str) -> None:
    with pytest.raises(OptionError, match="seeds must be a number of seeds"):
        parse_seeds(text)


def test_there_is_a_run_for_every_seed_and_combination_of_values(tmp_path: Path) -> None:
    settings = ["learning_rate=1e-3,1e-4", "network.hidden=(8,8),(16,)", "update_epochs=2"]
    jobs = sweep_of(tmp_path, settings, "7,8").jobs
    assert [job.name for job in jobs] == [
        f"CartPole-v1-appo-learning_rate={rate}-hidden={hidden}-s{seed}"
        for rate in ("1e-3", "1e-4")
        for hidden in ("8,8", "16")
        for seed in (7, 8)
    ]
    assert jobs[-1].options.config == {"learning_rate": 1e-4, "update_epochs": 2, "network": {"hidden": (16,)}}
    assert jobs[-1].settings == ("learning_rate=1e-4", "network.hidden=(16,)", "update_epochs=2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": ["learning_rat=1"]}, "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
        ({"settings": ["num_steps=8,0"]}, "num_steps must be at least 1, found 0"),
        ({"settings": ["gamma"]}, "a setting is written KEY=VALUE, found 'gamma'"),
        ({"settings": ["gamma=0.9", "gamma=0.8"]}, "gamma is set twice"),
        ({"settings": ["gamma=0.9,0.9"]}, "two runs would be CartPole-v1-appo-gamma=0.9-s0; write different values"),
        ({"env": "CartPol-v1"}, "unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ({"max_steps": 0}, "max_steps must be at least 1, found 0"),
        ({"parallel": 0}, "parallel must be at least 1, found 0"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        sweep_of(tmp_path / "sweep", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_has_runs_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(OptionError, match="has runs already: choose another directory"):
        sweep_of(tmp_path)


def test_as_many_runs_as_the_cores_have_room_for_go_on_at_the_same_time(tmp_path: Path) -> None:
    assert sweep_of(tmp_path).parallel == max(core_count() // 2, 1)
    assert sweep_of(tmp_path, collectors=10**6).parallel == 1
    assert sweep_of(tmp_path, parallel=3).parallel == 3


def test_the_options_reach_the_command(tmp_path: Path) -> None:
    options = {"algo": "dqn", "num_envs": 4, "target": -5.5, "max_steps": 10, "deterministic": True}
    (job,) = sweep_of(tmp_path, seeds="3,4", **options).jobs[1:]
    assert sweep_module._arguments(job.options) == [
        "train", "CartPole-v1", "--algo=dqn", "--collectors=1", "--num-envs=4", "--seed=4", "--max-steps=10",
        "--target=-5.5", "--save-seconds=60.0", "--max-lag=1", "--deterministic",
    ]  # fmt: skip
