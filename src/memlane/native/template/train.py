"""Trains a linear policy for my_env by the cross-entropy method, in a few seconds. First: memlane build my_env.c

Each generation draws policies around the best so far and plays episodes with each, all side by side; the mean and the
spread of the best ones are where the next generation is drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memlane.native import NativeVectorEnv, load

POLICIES, BEST, EPISODES = 64, 10, 8  # each policy plays EPISODES environments of its own
Floats = NDArray[np.float64]


def play(envs: NativeVectorEnv, policies: Floats, seed: int) -> Floats:
    """The mean return of each policy over an episode in each of its environments. A policy is a row for each action:
    weights of the observation, and a constant; it takes the action with the largest sum."""
    observations, _ = envs.reset(seed=seed)
    num_envs, width = observations.shape
    playing, returns = np.ones(num_envs, bool), np.zeros(num_envs)
    weights, constants = policies[:, :, :-1].transpose(0, 2, 1), policies[:, None, :, -1]
    while playing.any():
        # Observations are the memory that the environments write into: they change with the next step.
        seen = observations.reshape(len(policies), -1, width)
        actions = (seen @ weights + constants).argmax(-1).reshape(num_envs)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    of_each: Floats = returns.reshape(len(policies), -1).mean(1)
    return of_each


def play_randomly(envs: NativeVectorEnv, seed: int) -> float:
    random = np.random.default_rng(seed)
    envs.reset(seed=seed)
    playing, returns = np.ones(envs.num_envs, bool), np.zeros(envs.num_envs)
    while playing.any():
        _, rewards, terminated, truncated, _ = envs.step(random.integers(3, size=envs.num_envs))
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    return float(returns.mean())


def train(envs: NativeVectorEnv, generations: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    shape = (3, 1 + 4)  # actions; a constant and the numbers of an observation
    mean, spread = np.zeros(shape), np.ones(shape)
    for generation in range(generations):
        policies = mean + spread * random.standard_normal((POLICIES, *shape))
        returns = play(envs, policies, seed + 1000 * generation)
        best = policies[np.argsort(returns)[-BEST:]]
        # The spread is kept wide at first, so that it does not settle on the first good thing that it finds.
        mean, spread = best.mean(0), best.std(0) + 0.5 * 0.9**generation
        print(f"generation {generation:2d}: mean return {returns.mean():5.2f}, best {returns.max():5.2f}", flush=True)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    envs = load(Path(__file__).with_name("my_env.so"), num_envs=POLICIES * EPISODES)
    policy = train(envs, chosen.generations, chosen.seed)
    unseen = chosen.seed + 10**9  # starts that training has not had
    print(f"random policy: mean return {play_randomly(envs, unseen):.2f}")
    print(f"trained policy: mean return {play(envs, policy[None], unseen)[0]:.2f}")
    envs.close()


if __name__ == "__main__":
    main()
