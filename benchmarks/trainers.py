"""Trainers on a clock: what the process of a turn does, from the start of learning until its goal is reached.

A goal is a ``target``: the mean return of the last ``episodes`` episodes of the training (None: there is none), and its
limits: ``max_steps`` environment steps, and ``seconds`` from the first training step on.
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


@dataclass
class Clock:
    """Looked at after every rollout, by everybody: is it over?"""

    goal: dict[str, Any]
    begin: float = 0.0
    first: tuple[float, int] | None = None
    """When training steps had been made for the first time, and how many: their rate is counted from there."""
    last: tuple[float, int] = (0.0, 0)
    env_steps: int = 0
    solved: bool = False

    def start(self) -> None:
        self.begin = time.monotonic()

    def over(self, env_steps: int, returns: Sequence[float], made: int) -> bool:
        """``returns`` are those of the last episodes, as many as the goal says at most; ``made`` are the training
        steps until now."""
        self.env_steps = env_steps
        self.last = now, _ = time.monotonic() - self.begin, made
        if made and self.first is None:
            self.first = self.last
        goal, target = self.goal, self.goal["target"]
        if target is not None and len(returns) >= goal["episodes"]:
            self.solved = statistics.fmean(returns) >= target
        late = self.first is not None and now - self.first[0] >= goal["seconds"]
        return self.solved or env_steps >= goal["max_steps"] or late

    def answer(self) -> list[float]:
        """Nanoseconds, environment steps, nanoseconds of one training step, and whether it was solved."""
        late, many = self.last
        # Over at the first look: there is nothing to count from but the start.
        early, few = self.first if self.first and self.first != self.last else (0.0, 0)
        return [late * 1e9, self.env_steps, (late - early) * 1e9 / max(many - few, 1), self.solved]


def memlane(
    clock: Clock, seed: int, progress: Progress, env: str, backend: str, algo: str = "appo", **settings: Any
) -> None:
    """With the settings of its preset."""
    from memlane.train.algorithms import algorithm_for
    from memlane.train.presets import preset_for
    from memlane.train.run import Metrics, Run

    preset = preset_for(env, algo)
    told = {**preset.config, "seed": seed, **settings}
    with algorithm_for(algo)(env, None, told, sim_backend=backend, num_envs=preset.num_envs) as runner:
        run = runner.run = Run("run", tensorboard=False)
        assert run.recent.maxlen is not None
        assert run.recent.maxlen >= clock.goal["episodes"]

        def should_stop(metrics: Metrics) -> str | None:
            returns = list(run.recent)[-clock.goal["episodes"] :]
            return "over" if clock.over(metrics.env_steps, returns, progress(runner)) else None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / preset.max_steps  # as memlane train does
        clock.start()
        runner.learn(max_iterations=10**9, save_interval=10**9)


def stable_baselines3(clock: Clock, model: Any, progress: Progress, schedule_steps: int) -> None:
    """``schedule_steps`` are those that the model is told it has: its schedules end with them, and so does it."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Over(Exception):
        pass

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            episodes = [episode["r"] for episode in self.model.ep_info_buffer]
            if clock.over(self.num_timesteps, episodes, progress(self.model)):
                raise Over  # a callback can only stop in the middle of a rollout

    clock.start()
    with contextlib.suppress(Over):
        model.learn(schedule_steps, Look())
