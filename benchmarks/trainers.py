"""Trainers on a clock: what the process of a turn does, from the start of learning until its goal is reached.

A goal is a ``target``, a mean return of ``episodes`` episodes (None: there is none), and its limits: ``max_steps``
environment steps, and ``seconds`` from the first training step on. The episodes are the last ones of the training. With
``evaluate_every``, they are episodes of the policy without exploration, after each so many environment steps: those who
explore by random actions would be measured by how many they take. The clock stands still meanwhile.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Progress = Callable[[Any], int]
"""How many training steps a trainer has made: environment steps or gradient steps, whatever its benchmark counts."""
Act = Callable[[Any], Any]
"""Actions for a batch of observations."""


@dataclass
class Clock:
    """Looked at after every rollout, by everybody: is it over?"""

    goal: dict[str, Any]
    begin: float = 0.0
    first: tuple[float, int] | None = None
    """When training steps had been made for the first time, and how many: their rate is counted from there."""
    last: tuple[float, int] = (0.0, 0)
    env_steps: int = 0
    evaluated_at: int = 0
    """Environment steps."""
    solved: bool = False

    def start(self) -> None:
        self.begin = time.monotonic()

    def over(self, env_steps: int, returns: Sequence[float], made: int, act: Act) -> bool:
        """``returns`` are those of the last episodes, as many as the goal says at most; ``made`` are the training
        steps until now; ``act`` is the policy without exploration."""
        self.env_steps = env_steps
        self.last = now, _ = time.monotonic() - self.begin, made
        if made and self.first is None:
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
        late, many = self.last
        # Over at the first look: there is nothing to count from but the start.
        early, few = self.first if self.first and self.first != self.last else (0.0, 0)
        return [late * 1e9, self.env_steps, (late - early) * 1e9 / max(many - few, 1), self.solved]


def returns_of(act: Act, env: str, episodes: int) -> list[float]:
    """One whole episode in each of ``episodes`` environments, the same ones for everybody."""
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
    return [float(one) for one in returns]


def memlane(
    clock: Clock, seed: int, progress: Progress, env: str, backend: str, algo: str = "appo", **settings: Any
) -> None:
    """With the settings of its preset."""
    import torch

    from memlane.train.algorithms import algorithm_for
    from memlane.train.networks import arrays_of
    from memlane.train.presets import preset_for
    from memlane.train.run import Metrics, Run

    preset = preset_for(env, algo)
    told = {**preset.config, "seed": seed, **settings}
    with algorithm_for(algo)(env, None, told, sim_backend=backend, num_envs=preset.num_envs) as runner:
        run = runner.run = Run("run", tensorboard=False)
        assert run.recent.maxlen is not None
        assert run.recent.maxlen >= clock.goal["episodes"]

        def act(observations: Any) -> Any:
            policy = runner.learner.policy
            seen = arrays_of(runner.observation_space, observations)
            actions, _ = policy.act_best({name: torch.from_numpy(one) for name, one in seen.items()}, None)
            return policy.actions.for_env(actions)

        def should_stop(metrics: Metrics) -> str | None:
            returns = list(run.recent)[-clock.goal["episodes"] :]
            return "over" if clock.over(metrics.env_steps, returns, progress(runner), act) else None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / preset.max_steps  # as memlane train does
        clock.start()
        runner.learn(max_iterations=10**9, save_interval=10**9)


def stable_baselines3(clock: Clock, model: Any, progress: Progress, schedule_steps: int) -> None:
    """``schedule_steps`` are those that the model is told it has: its schedules end with them, and so does it."""
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
