"""Settings of the runner: unknown names are answered with the nearest known one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from memlane.runner.async_runner import SETTINGS, SYNONYMS
from tests.support.tiny_runner import Tiny


class Strict(Tiny):
    algorithm_settings = ("gamma", "num_steps")


@pytest.mark.parametrize(
    ("rl_cfg", "words"),
    [
        ({"max_lagg": 1}, "unknown rl_cfg keys: 'max_lagg' (did you mean 'max_lag'?); known are "),
        ({"num_workers": 2}, "unknown rl_cfg keys: 'num_workers' (did you mean 'collectors'?); known are "),
        ({"gama": 0.9}, "unknown rl_cfg keys: 'gama' (did you mean 'gamma'?); known are "),
        (
            {"gama": 0.9, "n_workers": 2},
            "unknown rl_cfg keys: 'gama' (did you mean 'gamma'?), 'n_workers' (did you mean 'collectors'?); known are ",
        ),
        ({"zzz": 1}, "unknown rl_cfg keys: 'zzz'; known are collectors, deterministic, gamma, "),
    ],
)
def test_unknown_settings_are_errors_with_a_suggestion(rl_cfg: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        Strict(**rl_cfg)


def test_settings_of_the_runner_and_of_the_algorithm_are_known() -> None:
    Strict(gamma=0.9, num_steps=4, collectors=1, rollout_timeout=5.0).close()


def test_a_runner_that_names_no_settings_accepts_any() -> None:
    with Tiny(anything=3) as runner:
        assert runner.rl_cfg["anything"] == 3


@pytest.mark.parametrize(
    ("rl_cfg", "error", "words"),
    [
        ({"collectors": "two"}, TypeError, "collectors must be an integer, found 'two'"),
        ({"collectors": 1.5}, TypeError, "collectors must be an integer, found 1.5"),
        ({"max_lag": None}, TypeError, "max_lag must be an integer, found None"),
        ({"max_restarts": float("inf")}, TypeError, "max_restarts must be an integer, found inf"),
        ({"deterministic": "False"}, TypeError, "deterministic must be True or False, found 'False'"),
        ({"in_process": "no"}, TypeError, "in_process must be True or False, found 'no'"),
        ({"rollout_timeout": [5]}, TypeError, "rollout_timeout must be a number, found [5]"),
        ({"rollout_timeout": -1}, ValueError, "rollout_timeout must be 0 or more, found -1"),
        ({"restart_window": -1}, ValueError, "restart_window must be 0 or more, found -1"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be 0 or more, found -1"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_used_is_an_error_that_names_it(
    rl_cfg: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Strict(**rl_cfg)


def test_settings_may_be_texts_and_numbers_of_other_types() -> None:
    with Strict(collectors="2", max_lag=2.0, rollout_timeout=5, deterministic=0, max_restarts=np.int64(3)) as runner:
        assert (runner.num_collectors, runner.max_lag, runner.rollout_timeout) == (2, 2, 5.0)
        assert runner.deterministic is False


@pytest.mark.parametrize("call", [lambda runner: runner.rollouts().__enter__(), lambda runner: runner.publish({})])
def test_a_runner_that_is_not_open_says_what_to_call(call: Any) -> None:
    with Tiny() as runner, pytest.raises(ValueError, match=r"the runner is not open; call open\(\) before"):
        call(runner)


def test_every_synonym_leads_to_a_setting() -> None:
    assert set(SYNONYMS.values()) <= SETTINGS.keys()
    assert not SYNONYMS.keys() & SETTINGS.keys()


@pytest.mark.parametrize(("backend", "meant"), [("gym", "gymnasium"), ("mujuco", "mujoco"), ("Native", "native")])
def test_an_unknown_backend_is_an_error_with_a_suggestion(backend: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"found '{backend}'; did you mean '{meant}'"):
        Tiny(None, {"sim_backend": backend})
