"""Tests of my_env: its own rules, and those for all environments. Run them with pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memlane.native import NativeVectorEnv, load
from memlane.native.build import build
from memlane.testing import check_env

BASKET, FRUIT = 0, 1
"""Indices in an observation."""
LEFT, STAY, RIGHT = range(3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(Path(__file__).with_name("my_env.c"), tmp_path_factory.mktemp("my_env"))


@pytest.fixture
def envs(library: Path) -> Iterator[NativeVectorEnv]:
    envs = load(library, num_envs=64)
    yield envs
    envs.close()


def follow_the_fruit(observations: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.where(observations[:, FRUIT] > observations[:, BASKET], RIGHT, LEFT)


def test_it_follows_the_rules_for_all_environments(library: Path) -> None:
    check_env(library)


def test_following_the_fruit_reaches_the_step_limit(envs: NativeVectorEnv) -> None:
    observations, _ = envs.reset(seed=1)
    caught = np.zeros(envs.num_envs)
    for _ in range(500):
        observations, rewards, terminated, truncated, _ = envs.step(follow_the_fruit(observations))
        caught += rewards
        assert not terminated.any()
    assert truncated.all()
    assert caught.min() >= 15


def test_running_from_the_fruit_catches_nothing_and_ends_the_episode_soon(envs: NativeVectorEnv) -> None:
    observations, _ = envs.reset(seed=1)
    away = np.where(observations[:, FRUIT] > 0, LEFT, RIGHT)
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(30):
        _, rewards, terminated, _, _ = envs.step(away)
        assert not rewards[~ended].any()
        ended |= terminated
    # The wind may carry a fruit from the centre to the other side, where the basket is.
    assert ended.mean() > 0.9
