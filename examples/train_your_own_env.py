"""Train an environment of your own: any gymnasium.Env, also one that is defined in your script.

python examples/train_your_own_env.py
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from memlane.train import Metrics, Options, train


class Docking(gymnasium.Env[np.ndarray, int]):
    """A ship on a line fires to the left, not at all, or to the right. It is to come to the dock at 0, and stay."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, episode_steps: int = 50) -> None:
        self.episode_steps = episode_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.place, self.speed, self.step_number = self.np_random.uniform(-1, 1), 0.0, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.speed += 0.05 * (int(action) - 1)
        self.place += 0.5 * self.speed
        self.step_number += 1
        lost = abs(self.place) > 2
        reward = -10.0 if lost else 1 - abs(self.place)
        # terminated: there is no future. truncated: there is one, but time is up. Learning depends on the difference.
        return self._observation(), reward, lost, self.step_number == self.episode_steps, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.place, self.speed], np.float32)


def mean_return_of_random_actions(episodes: int = 20) -> float:
    env, total = Docking(), 0.0
    env.action_space.seed(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += reward
            over = terminated or truncated
    return total / episodes


def show(metrics: Metrics) -> None:
    if metrics.iteration % 10 == 0:
        print(f"  {metrics.env_steps:7,} steps, {metrics.seconds:4.1f} s: mean return {metrics.mean_return:6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps of the training")
    parser.add_argument("--collectors", type=int, default=1, help="processes that step environments")
    parser.add_argument("--run-dir", help="directory of the run (default: runs/Docking-<time>)")
    args = parser.parse_args()

    print(f"before: a return of {mean_return_of_random_actions():.1f}, with random actions")
    options = Options(
        env=Docking,  # a class or a function that makes one environment; each collector makes its own
        backend="gymnasium",
        collectors=args.collectors,
        num_envs=16,
        max_steps=args.steps,
        run_dir=args.run_dir,
        config={"learning_rate": 1e-3, "update_epochs": 8, "minibatch_size": 256},  # see memlane.train.APPOConfig
    )
    result = train(options, on_update=show)
    print(f"after: a return of {result.evaluation['mean_return']:.1f}, with deterministic actions")
    print(f"{result.env_steps:,} steps in {result.seconds:.1f} s; {result.reason}. The run: {result.run_dir}")


if __name__ == "__main__":
    main()
