"""What a training is told: settings as command lines write them, presets beneath them, and what a folder remembers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from memlane.train import options as settings
from memlane.train.algorithms import base as runner
from memlane.train.options import settings_of
from memlane.train.presets import APPO_PRESETS
from memlane.train.trainer import OptionError, Options, options_of, settle


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs=3", {"epochs": 3}),
        ("minibatch=1e3", {"minibatch": 1000}),
        ("learning_rate=1e-3", {"learning_rate": 0.001}),
        ("gamma=1", {"gamma": 1.0}),
        ("normalize_advantages=false", {"normalize_advantages": False}),
        ("normalize_advantages=True", {"normalize_advantages": True}),
        ("schedule=adaptive", {"schedule": "adaptive"}),
        ("max_restarts=2", {"max_restarts": 2}),
        ("network.hidden=(128,64)", {"network": {"hidden": (128, 64)}}),
        ("network.hidden=[32]", {"network": {"hidden": (32,)}}),
        ("network.lstm=16", {"network": {"lstm": 16}}),
    ],
)
def test_a_setting_becomes_what_the_algorithm_expects(text: str, expected: dict[str, Any]) -> None:
    found = settings_of([text])
    assert found == expected
    assert type(next(iter(found.values()))) is type(next(iter(expected.values())))


@pytest.mark.parametrize(
    "text",
    [
        "epochs", "epochs=", "epochs=1.5", "epochs=true", "gamma=high", "schedule=quadratic", "nothing=1", "=1",
        "network=1", "network.depth=3", "network.hidden=(1.5,)", "collectors=2", "normalize_advantages=1",
    ],
)  # fmt: skip
def test_a_wrong_setting_is_an_error(text: str) -> None:
    with pytest.raises(OptionError):
        settings_of([text])


def test_an_error_names_what_could_have_been_meant() -> None:
    with pytest.raises(OptionError, match=r"there is no setting 'learning_rat'; there are .*learning_rate"):
        settings_of(["learning_rat=1"])


def test_what_is_left_open_is_the_presets() -> None:
    preset = APPO_PRESETS["CartPole-v1"]
    settled = settle(Options("CartPole-v1", config={"epochs": 2}))
    assert (settled.num_envs, settled.max_steps, settled.target) == (preset.num_envs, preset.max_steps, preset.target)
    assert settled.config == {**preset.config, "epochs": 2}
    assert settle(settled) == settled


def test_a_setting_of_the_network_leaves_the_presets_others_alone() -> None:
    settled = settle(Options("Hopper-v5", config={"network": {"hidden": (8,)}}))
    assert settled.config["network"] == {"hidden": (8,), "log_std": -0.5}


def test_a_folder_remembers_what_its_run_was_told(tmp_path: Path) -> None:
    told = settle(Options("CartPole-v1", seed=3, folder=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"options": asdict(told)}, default=str))
    assert options_of(tmp_path) == told


def test_a_run_on_a_function_cannot_be_found_again_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"options": {"env": None}}))
    with pytest.raises(OptionError, match="a function"):
        options_of(tmp_path)


def test_every_setting_of_the_runner_can_be_told() -> None:
    assert set(settings._RUNNER) | {"collectors", "max_lag", "deterministic", "seed"} == set(runner.RUNNER_SETTINGS)
