"""Options of a training: settings as command lines write them, presets beneath them, and what a run directory keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memlane.train
from memlane.core import BudgetError
from memlane.train import options as options_module
from memlane.train.algorithms import ALGORITHMS, algorithm_for
from memlane.train.environments import make_envs
from memlane.train.options import (
    RUNNER_SETTINGS,
    OptionError,
    Options,
    check_settings,
    load_options,
    parse_settings,
    resolve_options,
)
from memlane.train.presets import APPO_PRESETS, PRESETS
from memlane.train.trainer import train


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("update_epochs=3", {"update_epochs": 3}),
        ("minibatch_size=1e3", {"minibatch_size": 1000}),
        ("learning_rate=1e-3", {"learning_rate": 0.001}),
        ("gamma=1", {"gamma": 1.0}),
        ("normalize_advantages=false", {"normalize_advantages": False}),
        ("normalize_advantages=True", {"normalize_advantages": True}),
        ("lr_schedule=adaptive", {"lr_schedule": "adaptive"}),
        ("max_restarts=2", {"max_restarts": 2}),
        ("network.hidden=(128,64)", {"network": {"hidden": (128, 64)}}),
        ("network.hidden=128,64", {"network": {"hidden": (128, 64)}}),
        ("network.hidden=32", {"network": {"hidden": (32,)}}),
        ("network.hidden=[32]", {"network": {"hidden": (32,)}}),
        ("network.lstm=16", {"network": {"lstm": 16}}),
    ],
)
def test_a_setting_becomes_what_the_algorithm_expects(text: str, expected: dict[str, Any]) -> None:
    found = parse_settings([text])
    assert found == expected
    assert type(next(iter(found.values()))) is type(next(iter(expected.values())))


@pytest.mark.parametrize(
    "text",
    [
        "update_epochs", "update_epochs=", "update_epochs=1.5", "update_epochs=true", "gamma=high",
        "lr_schedule=quadratic", "nothing=1", "=1", "network=1", "network.depth=3", "network.hidden=(1.5,)",
        "collectors=2", "normalize_advantages=1",
    ],
)  # fmt: skip
def test_a_wrong_setting_is_an_error(text: str) -> None:
    with pytest.raises(OptionError):
        parse_settings([text])


# ---------------------------------------------------------------------------------------------------------- suggestions


def test_an_unknown_setting_is_answered_with_the_nearest_and_with_all_known_names() -> None:
    with pytest.raises(
        OptionError, match=r"unknown setting 'learning_rat'; did you mean 'learning_rate'\? \(known are .*gamma.*\)"
    ):
        parse_settings(["learning_rat=1"])


def test_an_unknown_setting_that_nothing_is_near_is_answered_with_all_known_names() -> None:
    with pytest.raises(OptionError, match=r"unknown setting 'xyzzy' \(known are .*network\.hidden.*\)"):
        parse_settings(["xyzzy=1"])


@pytest.mark.parametrize(
    ("algo", "typed", "meant"),
    [
        ("appo", "n_steps", "num_steps"),
        ("appo", "n_epochs", "update_epochs"),
        ("appo", "batch_size", "minibatch_size"),
        ("appo", "clip_range", "clip_coef"),
        ("appo", "entropy_coef", "ent_coef"),
        ("appo", "net_arch", "network.hidden"),
        ("appo", "hidden", "network.hidden"),
        ("appo", "lstm", "network.lstm"),
        ("appo", "network.hiden", "network.hidden"),
        ("dqn", "n_steps", "n_step"),
        ("dqn", "exploration_initial_eps", "epsilon_start"),
        ("dqn", "exploration_final_eps", "epsilon_end"),
        ("dqn", "start_e", "epsilon_start"),
        ("dqn", "end_e", "epsilon_end"),
        ("dqn", "target_network_frequency", "target_update_interval"),
        ("dqn", "alpha", "priority_alpha"),
        ("sac", "alpha", "temperature"),
        ("sac", "ent_coef", "temperature"),
        ("sac", "q_lr", "learning_rate"),
    ],
)
def test_settings_of_other_libraries_are_answered_with_ours(algo: str, typed: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"unknown setting '{typed}'; did you mean '{meant}'\?"):
        parse_settings([f"{typed}=1"], algo)


@pytest.mark.parametrize(
    ("algo", "typed", "answer"),
    [
        ("appo", "num_minibatches", "set minibatch_size instead: num_steps * environments / num_minibatches"),
        ("appo", "total_timesteps", "did you mean the option max_steps, --max-steps of the command?"),
        ("appo", "double", "it is a setting of dqn (known are "),
        ("dqn", "clip_coef", "it is a setting of appo (known are "),
        ("appo", "buffer_size", "it is a setting of sac and dqn (known are "),
        ("dqn", "train_freq", "set samples_per_insert instead"),
        ("dqn", "gradient_steps", "set samples_per_insert instead"),
        ("sac", "policy_frequency", "the actor is updated in every gradient step"),
        ("sac", "target_network_frequency", "target networks follow by tau in every gradient step"),
    ],
)
def test_settings_of_other_libraries_that_no_one_setting_replaces_are_explained(
    algo: str, typed: str, answer: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse_settings([f"{typed}=1"], algo)
    assert f"unknown setting '{typed}'; {answer}" in str(caught.value)


def test_the_network_is_not_one_setting_but_has_some() -> None:
    with pytest.raises(OptionError) as caught:
        parse_settings(["network=3"])
    assert str(caught.value) == (
        "network has settings of its own: set one or more of network.hidden, network.lstm, "
        "network.normalize_observations, network.log_std, found 'network=3'"
    )


@pytest.mark.parametrize("name", ["save_interval", "device", "env_settings"])
def test_options_without_a_flag_are_answered_with_python(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_settings([f"{name}=1"])
    assert str(caught.value) == f"{name} can be set in Python only: memlane.train.train(Options(..., {name}=...))"


def test_every_option_has_a_flag_or_is_for_python() -> None:
    flags, python = options_module._OPTION_NAMES, options_module._PYTHON_OPTIONS
    assert {*flags, *python, "env", "config"} == set(Options.__dataclass_fields__)


def test_every_suggestion_is_a_setting_that_some_algorithm_has() -> None:
    known = {name for algo in ALGORITHMS for name in algorithm_for(algo).Config.__dataclass_fields__}
    known |= RUNNER_SETTINGS.keys() | set(memlane.train.NetworkConfig.__dataclass_fields__)
    known |= {f"network.{name}" for name in memlane.train.NetworkConfig.__dataclass_fields__}
    suggested = {name for names in options_module._SYNONYMS.values() for name in names}
    assert suggested - known == set()
    assert set(options_module._OPTION_SYNONYMS.values()) <= set(Options.__dataclass_fields__)
    assert set(options_module._ALGORITHM_SYNONYMS.values()) <= set(ALGORITHMS)


def test_unknown_keys_of_rl_cfg_are_answered_one_by_one() -> None:
    with pytest.raises(TypeError) as caught:
        check_settings(memlane.train.APPOConfig, {"gamma": 1, "seed": 1, "n_steps": 8, "n_epochs": 2, "num_envs": 3})
    assert str(caught.value).startswith(
        "unknown settings: 'n_epochs' (did you mean 'update_epochs'?), 'n_steps' (did you mean 'num_steps'?), "
        "'num_envs' (did you mean the option num_envs, --num-envs of the command?); known are clip_coef, "
    )


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"algo": "ppo"}, "algo must be one of appo, sac, dqn, found 'ppo'; did you mean 'appo'?"),
        ({"algo": "td3"}, "algo must be one of appo, sac, dqn, found 'td3'; did you mean 'sac'?"),
        (
            {"backend": "mujco"},
            "backend must be one of native, gymnasium, mujoco, found 'mujco'; did you mean 'mujoco'?",
        ),
        ({"env": "CartPol-v1"}, "unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        ({"env": "CartPole-v9"}, "unknown environment 'CartPole-v9'; did you mean 'CartPole-v1'?"),
        ({"env": "Brick-v0"}, "unknown environment 'Brick-v0'; did you mean 'Bricks-v0'?"),
        ({"config": {"n_steps": 3}}, "unknown settings: 'n_steps' (did you mean 'num_steps'?)"),
        ({"config": {"net_arch": (3,)}}, "unknown settings: 'net_arch' (did you mean 'network': {'hidden': ...}?)"),
        ({"config": {"lstm": 8}}, "unknown settings: 'lstm' (did you mean 'network': {'lstm': ...}?)"),
        ({"config": {"double": True}}, "unknown settings: 'double' (it is a setting of dqn)"),
        ({"config": {"device": "cpu"}}, "unknown settings: 'device' (did you mean the option device?)"),
        ({"config": {"network.lstm": 3}}, "unknown settings: 'network.lstm' (write 'network': {'lstm': ...})"),
        ({"config": {"network": {"hiden": (3,)}}}, "unknown network settings: 'hiden' (did you mean 'hidden'?)"),
        (
            {"config": {"lr_schedule": "liner"}},
            "lr_schedule must be one of constant, linear, adaptive, found 'liner'; did you mean 'linear'?",
        ),
    ],
)
def test_unknown_names_in_options_are_answered_with_known_ones(
    wrong: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        train(Options(**{"env": "CartPole-v1", "run_dir": tmp_path / "run", **wrong}))
    assert str(caught.value).startswith(answer)
    assert not (tmp_path / "run").exists()


def require_refusal(wrong: dict[str, Any], answer: str, folder: Path) -> None:
    """These options are an error that begins with ``answer``, and nothing is written."""
    with pytest.raises(OptionError) as caught:
        train(Options(**{"env": "CartPole-v1", "run_dir": folder / "run", **wrong}))
    assert str(caught.value).startswith(answer)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"env": 3}, "env must be a Gymnasium id, the name of a native environment, "),
        ({"algo": None}, "algo must be a string, found None"),
        ({"collectors": "2"}, "collectors must be an integer, found '2'"),
        ({"collectors": 1.5}, "collectors must be an integer, found 1.5"),
        ({"backend": 3}, "backend must be a string, found 3"),
        ({"seed": None}, "seed must be an integer, found None"),
        ({"max_steps": "many"}, "max_steps must be an integer, found 'many'"),
        ({"target": float("nan")}, "target must be a number, found nan"),
        ({"run_dir": 3}, "run_dir must be a string or a path, found 3"),
        ({"deterministic": "no"}, "deterministic must be True or False, found 'no'"),
        ({"config": None}, "config must be a dict, found None"),
        ({"config": memlane.train.APPOConfig()}, "config must be a dict, found APPOConfig("),
        ({"config": {"gamma": "high"}}, "gamma must be a number, found 'high'"),
        ({"config": {"num_steps": 3.5}}, "num_steps must be an integer, found 3.5"),
        ({"config": {"in_process": "no"}}, "in_process must be True or False, found 'no'"),
        (
            {"config": {"network": 3}},
            "network must be a NetworkConfig or a dict of its settings (hidden, lstm, normalize_observations, "
            "log_std), found 3",
        ),
        ({"config": {"network": {"hidden": 64}}}, "network.hidden must be integers such as (64, 64), found 64"),
    ],
)
def test_options_and_settings_of_another_type_are_errors_that_name_them(
    wrong: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    require_refusal(wrong, answer, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"max_seconds": -1}, "max_seconds must be above 0, found -1; leave it out for no limit"),
        ({"save_interval": 0}, "save_interval must be at least 1, found 0"),
        ({"device": "abacus"}, "device must be a torch device of this machine, such as 'cpu', found 'abacus': "),
        ({"config": {"gamma": 7}}, "gamma must be from 0 to 1, found 7"),
        ({"config": {"learning_rate": -3}}, "learning_rate must be at least 0, found -3"),
        ({"config": {"clip_coef": 0}}, "clip_coef must be above 0, found 0"),
        ({"config": {"network": {"hidden": (0,)}}}, "network.hidden must be sizes of at least 1, found (0,); "),
        ({"config": {"network": {"lstm": -1}}}, "network.lstm must be at least 0, found -1; 0: no LSTM"),
        ({"algo": "dqn", "config": {"epsilon_start": 7}}, "epsilon_start must be from 0 to 1, found 7"),
        ({"algo": "sac", "config": {"temperature": -1}}, "temperature must be at least 0, found -1"),
        ({"config": {"torch_threads": 0}}, "torch_threads must be at least 1, found 0"),
        ({"config": {"env_workers": -1}}, "env_workers must be at least 0 (the collector steps its environments), "),
        ({"config": {"env_workers": 2}}, "env_workers is for environments in Python, found 2 with the native backend"),
    ],
)
def test_options_and_settings_out_of_range_are_errors_that_name_them(
    wrong: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    require_refusal(wrong, answer, tmp_path)


@pytest.mark.parametrize(("name", "value"), [("seed", 3), ("collectors", 2), ("max_lag", 0), ("deterministic", True)])
def test_options_among_the_settings_are_errors_instead_of_being_ignored(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        resolve_options(Options("CartPole-v1", config={name: value}))
    answer = f"config has {name!r}, which is an option: write Options(..., {name}={value!r}) instead"
    assert str(caught.value) == answer


def test_numbers_are_integers_where_options_are() -> None:
    numbers: dict[str, Any] = {"max_steps": 1e6, "num_envs": np.int64(8), "target": 400}
    resolved = resolve_options(Options("CartPole-v1", **numbers))
    assert [repr(getattr(resolved, name)) for name in numbers] == ["1000000", "8", "400.0"]


def test_an_environment_instead_of_options_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r"options must be memlane\.train\.Options, found 'CartPole-v1'; write Options\('CartPole-v1'\)"
    ):
        train("CartPole-v1")  # type: ignore[arg-type]


def test_an_unregistered_environment_inside_a_function_keeps_its_own_error() -> None:
    import gymnasium

    with pytest.raises(gymnasium.error.UnregisteredEnv):
        make_envs(lambda: gymnasium.make("Nowhere-v1"), 1)


@pytest.mark.parametrize("backend", ["native", "gymnasium"])
def test_more_environments_than_memory_are_a_budget_error_before_any_is_made(backend: str) -> None:
    with pytest.raises(BudgetError, match="num_envs=1000000000 of CartPole-v1 needs"):
        make_envs("CartPole-v1", 10**9, backend)


# ------------------------------------------------------------------------------------------------- presets, directories


def test_what_is_left_open_is_the_presets() -> None:
    preset = APPO_PRESETS["CartPole-v1"]
    resolved = resolve_options(Options("CartPole-v1", config={"update_epochs": 2}))
    assert (resolved.num_envs, resolved.max_steps, resolved.target) == (
        preset.num_envs, preset.max_steps, preset.target,
    )  # fmt: skip
    assert resolved.config == {**preset.config, "update_epochs": 2}
    assert resolve_options(resolved) == resolved


def test_a_setting_of_the_network_leaves_the_presets_others_alone() -> None:
    resolved = resolve_options(Options("Hopper-v5", config={"network": {"hidden": (8,)}}))
    assert resolved.config["network"] == {"hidden": (8,), "log_std": -0.5}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_preset_has_settings_that_its_algorithm_knows(algo: str) -> None:
    for preset in PRESETS[algo].values():
        check_settings(algorithm_for(algo).Config, preset.config)


def test_a_run_directory_keeps_the_options_of_its_run(tmp_path: Path) -> None:
    resolved = resolve_options(Options("CartPole-v1", seed=3, run_dir=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"options": asdict(resolved)}, default=str))
    assert load_options(tmp_path) == resolved


def test_a_run_on_a_function_cannot_be_found_again_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"options": {"env": None}}))
    with pytest.raises(OptionError, match="a function"):
        load_options(tmp_path)


def test_every_setting_of_the_runner_can_be_set() -> None:
    flags = {"collectors", "max_lag", "deterministic", "seed"}
    texts = {int: "1", float: "1.0", bool: "true"}
    settable = parse_settings(f"{name}={texts[kind]}" for name, kind in RUNNER_SETTINGS.items() if name not in flags)
    assert set(settable) | flags == set(RUNNER_SETTINGS)


# ------------------------------------------------------------------------------------------------------ the front door


def test_the_package_shows_its_public_names_and_imports_them() -> None:
    assert dir(memlane.train) == sorted(memlane.train.__all__)
    assert {"train", "evaluate", "Options", "Result", "APPO", "SAC", "DQN"} <= set(memlane.train.__all__)
    assert all(getattr(memlane.train, name).__name__ == name for name in memlane.train.__all__)


def test_names_that_need_torch_say_what_to_install() -> None:
    code = """
import sys

class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, WithoutTorch())
import memlane.train

try:
    memlane.train.train
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == 'memlane.train.train needs torch: pip install "memlane[torch]"\n'


def test_options_are_made_and_resolved_without_torch() -> None:
    code = "import sys; from memlane.train import Options; from memlane.train.options import resolve_options; "
    code += "resolve_options(Options('CartPole-v1')); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
