"""Trains a linear policy for my_env with the cross-entropy method. Run `memlane build my_env.c` first.

Each generation samples policies from a normal distribution and plays episodes with all of them at the same time. The
best ones determine the mean and the standard deviation of the next generation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memlane.native import NativeVectorEnv, load

POLICIES, BEST, EPISODES = 64, 10, 8  # each policy plays EPISODES environments
Floats = NDArray[np.float64]


def play(envs: NativeVectorEnv, policies: Floats, seed: int) -> Floats:
    """Return the mean return of each policy over one episode in each of its environments.

    A policy has a row per action: weights for the observation and a constant. It takes the action with the largest sum.
    """
    observations, _ = envs.reset(seed=seed)
    num_envs, width = observations.shape
    playing, returns = np.ones(num_envs, bool), np.zeros(num_envs)
    weights, constants = policies[:, :, :-1].transpose(0, 2, 1), policies[:, None, :, -1]
    while playing.any():
        # This is a view of the memory that the environments write into: the next step overwrites it.
        by_policy = observations.reshape(len(policies), -1, width)
        actions = (by_policy @ weights + constants).argmax(-1).reshape(num_envs)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    means: Floats = returns.reshape(len(policies), -1).mean(1)
    return means


def play_randomly(envs: NativeVectorEnv, seed: int) -> float:
    rng = np.random.default_rng(seed)
    envs.reset(seed=seed)
    playing, returns = np.ones(envs.num_envs, bool), np.zeros(envs.num_envs)
    while playing.any():
        _, rewards, terminated, truncated, _ = envs.step(rng.integers(3, size=envs.num_envs))
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    return float(returns.mean())


def train(envs: NativeVectorEnv, generations: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    shape = (3, 4 + 1)  # actions; weights for the observation and a constant
    mean, std = np.zeros(shape), np.ones(shape)
    for generation in range(generations):
        policies = mean + std * rng.standard_normal((POLICIES, *shape))
        returns = play(envs, policies, seed + 1000 * generation)
        best = policies[np.argsort(returns)[-BEST:]]
        # Extra noise at first, so that the search does not converge on the first good policy.
        mean, std = best.mean(0), best.std(0) + 0.5 * 0.9**generation
        print(f"generation {generation:2d}: mean return {returns.mean():5.2f}, best {returns.max():5.2f}", flush=True)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    envs = load(Path(__file__).with_name("my_env.so"), num_envs=POLICIES * EPISODES)
    policy = train(envs, args.generations, args.seed)
    unseen = args.seed + 10**9  # initial states that training has not used
    print(f"random policy: mean return {play_randomly(envs, unseen):.2f}")
    print(f"trained policy: mean return {play(envs, policy[None], unseen)[0]:.2f}")
    envs.close()


if __name__ == "__main__":
    main()
