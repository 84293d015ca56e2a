"""PPO in a single file, in the manner of CleanRL: torch and memlane's vector environments, and nothing else.

python examples/ppo_single_file.py
python examples/ppo_single_file.py --backend python    # Gymnasium's environments, in worker processes
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical

import memlane.native
import memlane.vector


@dataclass
class Args:
    backend: Literal["native", "python"] = "native"
    """native: C, in this process; python: in the workers of memlane.vector.AsyncVectorEnv"""
    target: float = 475
    """solved when the mean return of the last 100 episodes is so high"""
    max_steps: int = 500_000
    seed: int = 0
    num_envs: int = 16
    num_steps: int = 64
    update_epochs: int = 10
    minibatch_size: int = 256
    learning_rate: float = 2e-3
    gamma: float = 0.98
    gae_lambda: float = 0.9
    clip_coef: float = 0.2


def make_envs(args: Args) -> gymnasium.vector.VectorEnv:
    if args.backend == "native":
        return memlane.native.make("CartPole-v1", args.num_envs)
    return memlane.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * args.num_envs)


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    nn.init.orthogonal_(made[-1].weight, gain)
    return made


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = make_envs(args)
    inputs, choices = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    policy, value = network(inputs, choices, 0.01), network(inputs, 1, 1.0)
    both = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(both, lr=args.learning_rate, eps=1e-5)
    rows = (args.num_steps, args.num_envs)
    obs = torch.zeros((args.num_steps + 1, args.num_envs, inputs))
    actions, log_probs = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
    rewards, terminated, ended = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows)
    valid = torch.ones(args.num_steps + 1, args.num_envs, dtype=torch.bool)
    returns, recent = np.zeros(args.num_envs), deque(maxlen=100)
    made, begin = 0, time.perf_counter()
    first, _ = envs.reset(seed=args.seed)
    obs[-1] = torch.tensor(first)

    for update in range(max(args.max_steps // (args.num_steps * args.num_envs), 1)):
        # Collect. After the end of an episode the next step is a reset (NEXT_STEP): it is no experience, not valid.
        obs[0], valid[0] = obs[-1].clone(), valid[-1].clone()
        for t in range(args.num_steps):
            with torch.no_grad():
                chances = Categorical(logits=policy(obs[t]))
            actions[t] = chances.sample()
            log_probs[t] = chances.log_prob(actions[t])
            later, reward, dead, late, _ = envs.step(actions[t].numpy())
            over = dead | late
            obs[t + 1] = torch.tensor(later)  # a copy: memlane writes the next step in the same place
            rewards[t], terminated[t], ended[t], valid[t + 1] = map(torch.tensor, (reward, dead, over, ~over))
            returns += reward
            recent.extend(returns[over])
            returns[over] = 0
        made += args.num_steps * args.num_envs

        # Judge: GAE. At an end obs[t + 1] is the last observation, so whoever ran out of time still has a future.
        with torch.no_grad():
            values = value(obs).squeeze(-1)
        advantages, following = torch.zeros(rows), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            surprise = rewards[t] + args.gamma * values[t + 1] * (1 - terminated[t]) - values[t]
            advantages[t] = following = surprise + args.gamma * args.gae_lambda * (1 - ended[t]) * following
        targets = advantages + values[:-1]

        # Learn.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - made / args.max_steps)
        use = valid[:-1].flatten().nonzero().squeeze(-1)
        flat = [one.flatten(0, 1) for one in (obs[:-1], actions, log_probs, advantages, targets)]
        for _ in range(args.update_epochs):
            for some in use[torch.randperm(len(use))].split(args.minibatch_size):
                seen, chosen, old, good, target = (one[some] for one in flat)
                ratio = (Categorical(logits=policy(seen)).log_prob(chosen) - old).exp()
                good = (good - good.mean()) / (good.std(correction=0) + 1e-8)
                gain = torch.min(ratio * good, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * good).mean()
                loss = 0.5 * (value(seen).squeeze(-1) - target).square().mean() - gain
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(both, 0.5)
                optimizer.step()

        mean = float(np.mean(recent or [0]))
        solved = len(recent) == recent.maxlen and mean >= args.target
        if update % 10 == 0 or solved:
            print(f"{made:8,} steps  {made / (time.perf_counter() - begin):7,.0f} a second  mean return {mean:5.1f}")
        if solved:
            break
    outcome, seconds = "solved" if solved else "not solved", time.perf_counter() - begin
    print(f"{outcome}: mean return {mean:.1f} after {made:,} steps in {seconds:.1f} s")
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
