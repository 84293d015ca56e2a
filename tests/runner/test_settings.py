"""Settings of the runner: unknown names are answered with the nearest known one."""

from __future__ import annotations

import re
from typing import Any

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


def test_every_synonym_leads_to_a_setting() -> None:
    assert set(SYNONYMS.values()) <= SETTINGS.keys()
    assert not SYNONYMS.keys() & SETTINGS.keys()


@pytest.mark.parametrize(("backend", "meant"), [("gym", "gymnasium"), ("mujuco", "mujoco"), ("Native", "native")])
def test_an_unknown_backend_is_an_error_with_a_suggestion(backend: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"found '{backend}'; did you mean '{meant}'"):
        Tiny(None, {"sim_backend": backend})
