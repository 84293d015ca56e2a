"""What the tests of training share: tiny environments, and an evaluation that is independent of the code under test.

Light to import, because every collector process imports it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from memlane.train.algorithms.appo import APPO
from memlane.train.networks import ActorCritic
from memlane.train.presets import preset_for
from memlane.train.run import Run

EVALUATION_EPISODES = 20


class Script(gymnasium.Env[Any, Any]):
    """Scripted episodes, each of a given length and with a given end. An observation is the number of the episode and
    that of the step within it; the reward of a step is its number, counted from 1."""

    observation_space = Box(-1, 1000, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, *episodes: tuple[int, str]) -> None:
        self._episodes = episodes
        self._episode = -1
        self._step = 0

    def _look(self) -> Any:
        return np.array([self._episode, self._step], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self._episode, self._step = self._episode + 1, 0
        return self._look(), {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        self._step += 1
        length, end = self._episodes[self._episode]
        over = self._step == length
        return self._look(), float(self._step), over and end == "terminated", over and end == "truncated", {}


class Cliff(gymnasium.Env[Any, Any]):
    """Raises after ``steps`` steps; the message has the time."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, steps: int = 50) -> None:
        self._left = steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError(f"over the cliff at {time.monotonic_ns()}")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def moment_of(text: str) -> float:
    """When ``Cliff`` raised, in seconds of the monotonic clock, which all processes share."""
    return int(text.split("over the cliff at ")[1].split(",")[0].split("\n")[0]) / 1e9


class QuietRun(Run):
    """Without TensorBoard, and closed when it is garbage-collected."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, tensorboard=False)

    def __del__(self) -> None:
        self.close()


def preset_runner(env: str, folder: Path, seed: int, **changes: Any) -> APPO:
    """A runner with the preset's settings that stops at the preset's target."""
    preset = preset_for(env)
    rl_cfg = {**preset.config, "seed": seed, **changes}
    runner = APPO(env, None, rl_cfg, sim_backend="native", num_envs=preset.num_envs)
    run = runner.run = QuietRun(folder)
    runner.should_stop = lambda metrics: (
        "solved" if len(run.recent_returns) >= 20 and metrics.mean_return >= (preset.target or 0) else None
    )
    return runner


def updates_of(env: str, runner: APPO, steps: int | None = None) -> int:
    """The number of updates in ``steps`` environment steps; by default the preset's."""
    return -(-(steps or preset_for(env).max_steps) // (runner.num_envs * runner.config.num_steps))


def mean_return(policy: ActorCritic, env: str, seed: int = 77) -> float:
    """Mean return of one episode in each of several Gymnasium environments, with deterministic actions."""
    (name,) = policy.encoder.leaves

    def act(observations: Any) -> Any:
        actions, _ = policy.act({name: torch.from_numpy(observations)}, deterministic=True)
        return policy.to_env(actions)

    return mean_of(gymnasium.make_vec(env, EVALUATION_EPISODES, vectorization_mode="sync"), act, seed)


def mean_score(env: str, act: Any, games: int = 400) -> float:
    """Mean return of one episode in each of ``games`` native environments."""
    import memlane.native

    return mean_of(memlane.native.make(env, num_envs=games, copy=True), act, seed=5)


def mean_of(envs: Any, act: Any, seed: int) -> float:
    """Mean return of the first episode of each environment."""
    observations, _ = envs.reset(seed=seed)
    returns, alive = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while alive.any():
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * alive
        alive &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def write_run(
    run_dir: Path,
    *,
    returns: Sequence[float] = (10.0, 20.0),
    stopped_by: str | None = None,
    evaluation: float = math.nan,
    **options: Any,
) -> Path:
    """Write a run directory by hand: an update of 100 steps and 0.5 s for each of ``returns``."""
    run_dir.mkdir(parents=True)
    given = {"env": "CartPole-v1", "algo": "appo", "seed": 0, "collectors": 1, "config": {}, **options}
    config = {"name": given["env"], "options": given, "target": 475.0, "num_envs": 4, "max_steps": 1000}
    (run_dir / "config.json").write_text(json.dumps(config))
    rows = [f"{number},{100 * number},{number / 2},{value}" for number, value in enumerate(returns, 1)]
    (run_dir / "metrics.csv").write_text("\n".join(["iteration,env_steps,seconds,mean_return", *rows, ""]))
    if stopped_by is not None:
        result: dict[str, Any] = {"stopped_by": stopped_by, "reason": f"because of {stopped_by}", "evaluation": {}}
        if not math.isnan(evaluation):
            result["evaluation"] = {"mean_return": evaluation, "std_return": 0.0, "episodes": 1}
        (run_dir / "result.json").write_text(json.dumps(result))
    return run_dir
