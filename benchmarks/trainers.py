"""Trainers on a clock: what the process of a turn does, from the start of learning until its goal is reached.

A goal is a ``target``, the mean return of ``episodes`` episodes (None: no target), and its limits: ``max_steps``
environment steps, and ``seconds`` from the first training step on. The episodes are the last ones of the training. With
``evaluate_every``, they are episodes of the policy without exploration, after each such number of environment
steps: otherwise an entrant would be measured by its random actions. The clock is stopped during an evaluation.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Progress = Callable[[Any], int]
"""Training steps that a trainer has made: environment steps or gradient steps, depending on the benchmark."""
Act = Callable[[Any], Any]
"""Actions for a batch of observations."""


@dataclass
class Clock:
    """Every trainer asks it after each rollout whether the turn is over."""

    goal: dict[str, Any]
    begin: float = 0.0
    first: tuple[float, int] | None = None
    """Time and number of the first training steps: their rate is measured from there."""
    last: tuple[float, int] = (0.0, 0)
    env_steps: int = 0
    evaluated_at: int = 0
    """Environment steps at the last evaluation."""
    solved: bool = False

    def start(self) -> None:
        self.begin = time.monotonic()

    def over(self, env_steps: int, returns: Sequence[float], training_steps: int, act: Act) -> bool:
        """Whether the goal or a limit is reached. ``returns`` are those of the last episodes, at most as many as the
        goal has; ``training_steps`` are those until now; ``act`` is the policy without exploration."""
        self.env_steps = env_steps
        self.last = now, _ = time.monotonic() - self.begin, training_steps
        if training_steps and self.first is None:
            self.first = self.last
        goal, target = self.goal, self.goal["target"]
        if goal.get("evaluate_every"):
            due = env_steps // goal["evaluate_every"] > self.evaluated_at // goal["evaluate_every"]
            returns = self._evaluated(act) if due else []
        if target is not None and len(returns) >= goal["episodes"]:
            self.solved = statistics.fmean(returns) >= target
        late = self.first is not None and now - self.first[0] >= goal["seconds"]
        return self.solved or env_steps >= goal["max_steps"] or late

    def _evaluated(self, act: Act) -> list[float]:
        begin = time.monotonic()
        self.evaluated_at = self.env_steps
        returns = returns_of(act, self.goal["env"], self.goal["episodes"])
        self.begin += time.monotonic() - begin
        return returns

    def answer(self) -> list[float]:
        """Nanoseconds, environment steps, nanoseconds of one training step, and whether it was solved."""
        end, last_steps = self.last
        # If the first check was also the last, the rate can only be measured from the start.
        begin, first_steps = self.first if self.first and self.first != self.last else (0.0, 0)
        return [end * 1e9, self.env_steps, (end - begin) * 1e9 / max(last_steps - first_steps, 1), self.solved]


def returns_of(act: Act, env: str, episodes: int) -> list[float]:
    """Returns of one episode in each of ``episodes`` environments, which have the same seeds for every entrant."""
    import gymnasium
    import numpy as np

    envs = gymnasium.make_vec(env, episodes, "sync")
    observations, _ = envs.reset(seed=1_000_000)
    returns, alive = np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * alive
        alive &= ~(terminated | truncated)
    envs.close()
    return [float(value) for value in returns]


def memlane(
    clock: Clock, seed: int, progress: Progress, env: str, backend: str, algo: str = "appo", **settings: Any
) -> None:
    """Train with the settings of memlane's preset."""
    import torch

    from memlane.train.algorithms import algorithm_for
    from memlane.train.networks import leaf_arrays
    from memlane.train.presets import preset_for
    from memlane.train.run import Metrics, Run

    preset = preset_for(env, algo)
    rl_cfg = {**preset.config, "seed": seed, **settings}
    with algorithm_for(algo)(env, None, rl_cfg, sim_backend=backend, num_envs=preset.num_envs) as runner:
        run = runner.run = Run("run", tensorboard=False)
        assert run.recent_returns.maxlen is not None
        assert run.recent_returns.maxlen >= clock.goal["episodes"]

        def act(observations: Any) -> Any:
            policy = runner.learner.policy
            arrays = leaf_arrays(runner.observation_space, observations)
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            return policy.to_env(policy.act(tensors, deterministic=True)[0])

        def should_stop(metrics: Metrics) -> str | None:
            returns = list(run.recent_returns)[-clock.goal["episodes"] :]
            return "over" if clock.over(metrics.env_steps, returns, progress(runner), act) else None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / preset.max_steps  # as memlane train does
        runner.save_seconds = math.inf  # the peers save nothing either
        clock.start()
        runner.learn(max_iterations=10**9, save_interval=10**9)


def stable_baselines3(clock: Clock, model: Any, progress: Progress, schedule_steps: int) -> None:
    """Train a model; ``schedule_steps`` are its total steps, at which its schedules end."""
    from stable_baselines3.common.callbacks import BaseCallback

    def act(observations: Any) -> Any:
        return model.predict(observations, deterministic=True)[0]

    class Over(Exception):
        pass

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            episodes = [episode["r"] for episode in self.model.ep_info_buffer]
            if clock.over(self.num_timesteps, episodes, progress(self.model), act):
                raise Over  # a callback can only stop in the middle of a rollout

    clock.start()
    with contextlib.suppress(Over):
        model.learn(schedule_steps, Look())
