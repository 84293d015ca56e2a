"""Train on your own environment: any gymnasium.Env, also one that is defined in your script.

Use it as a template: replace the class Docking by your environment. It prints the mean return of random actions, the
mean return during training, and at the end the mean return of the trained policy and the run directory.

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
    """A ship on a line has to reach the dock at position 0 and stay there.

    Actions: accelerate to the left, not at all, or to the right. The observation is position and speed.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, episode_steps: int = 50) -> None:
        self.episode_steps = episode_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.position, self.speed, self.step_number = self.np_random.uniform(-1, 1), 0.0, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.speed += 0.05 * (int(action) - 1)
        self.position += 0.5 * self.speed
        self.step_number += 1
        terminated = abs(self.position) > 2
        reward = -10.0 if terminated else 1 - abs(self.position)
        # terminated: the episode has no future. truncated: it has one, but the time is up. The learned values differ.
        truncated = self.step_number == self.episode_steps
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.position, self.speed], np.float32)


def mean_return_of_random_actions(episodes: int = 20) -> float:
    env, total = Docking(), 0.0
    env.action_space.seed(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += reward
            done = terminated or truncated
    return total / episodes


def print_progress(metrics: Metrics) -> None:
    if metrics.iteration % 10 == 0:
        print(f"  {metrics.env_steps:7,} steps, {metrics.seconds:4.1f} s: mean return {metrics.mean_return:6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps to train for")
    parser.add_argument("--collectors", type=int, default=1, help="processes that step environments")
    parser.add_argument("--run-dir", help="run directory (default: runs/Docking-appo-s0-<time>)")
    args = parser.parse_args()

    print(f"mean return of random actions: {mean_return_of_random_actions():.1f}")
    options = Options(
        env=Docking,  # a class or function that returns an environment; each collector calls it
        backend="gymnasium",
        collectors=args.collectors,
        num_envs=16,
        max_steps=args.steps,
        run_dir=args.run_dir,
        config={"learning_rate": 1e-3, "update_epochs": 8, "minibatch_size": 256},  # fields of memlane.train.APPOConfig
    )
    result = train(options, on_update=print_progress)
    print(f"mean return of the trained policy: {result.evaluation['mean_return']:.1f}")
    print(f"{result.env_steps:,} steps in {result.seconds:.1f} s; {result.reason}. Run directory: {result.run_dir}")


if __name__ == "__main__":
    main()
