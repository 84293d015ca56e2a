"""PPO in a single file, in the style of CleanRL: networks in torch, and memlane's vector environments.

Use it if you want to write the training loop yourself, with memlane only as a fast vector environment. It prints the
mean return every 10 updates, and at the end whether CartPole-v1 was solved.

    python examples/ppo_single_file.py                     # native environments (C, in this process)
    python examples/ppo_single_file.py --backend python    # Gymnasium environments in worker processes
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
    """native: C environments in this process; python: Gymnasium environments in memlane's worker processes"""
    target: float = 475
    """solved when the mean return of the last 100 episodes reaches this"""
    max_steps: int = 500_000
    seed: int = 0
    num_envs: int = 16
    num_steps: int = 64
    """steps of each environment per rollout"""
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


def mlp(inputs: int, outputs: int, output_gain: float) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    nn.init.orthogonal_(network[-1].weight, output_gain)
    return network


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = make_envs(args)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    actor, critic = mlp(obs_dim, num_actions, 0.01), mlp(obs_dim, 1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)
    obs, shape = torch.zeros((args.num_steps + 1, args.num_envs, obs_dim)), (args.num_steps, args.num_envs)
    actions, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    rewards, terminations, dones = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    valid = torch.ones(args.num_steps + 1, args.num_envs, dtype=torch.bool)
    episode_returns, recent_returns = np.zeros(args.num_envs), deque(maxlen=100)
    global_step, start = 0, time.perf_counter()
    obs[-1] = torch.tensor(envs.reset(seed=args.seed)[0])

    for update in range(max(args.max_steps // (args.num_steps * args.num_envs), 1)):
        # Rollout. The step after the end of an episode only resets (autoreset mode NEXT_STEP): it is not valid data.
        obs[0], valid[0] = obs[-1].clone(), valid[-1].clone()
        for t in range(args.num_steps):
            with torch.no_grad():
                policy = Categorical(logits=actor(obs[t]))
            actions[t] = policy.sample()
            log_probs[t] = policy.log_prob(actions[t])
            next_obs, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            done = terminated | truncated
            obs[t + 1] = torch.tensor(next_obs)  # a copy: memlane writes the next step into the same array
            rewards[t], terminations[t], dones[t], valid[t + 1] = map(torch.tensor, (reward, terminated, done, ~done))
            episode_returns += reward
            recent_returns.extend(episode_returns[done])
            episode_returns[done] = 0
        global_step += args.num_steps * args.num_envs

        # Advantages (GAE). When an episode ends, obs[t + 1] is its last observation: bootstrap from it if truncated.
        with torch.no_grad():
            values = critic(obs).squeeze(-1)
        advantages, next_advantage = torch.zeros(shape), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            delta = rewards[t] + args.gamma * values[t + 1] * (1 - terminations[t]) - values[t]
            advantages[t] = next_advantage = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * next_advantage
        returns = advantages + values[:-1]

        # Update.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.max_steps)
        valid_rows = valid[:-1].flatten().nonzero().squeeze(-1)
        batch = [field.flatten(0, 1) for field in (obs[:-1], actions, log_probs, advantages, returns)]
        for _ in range(args.update_epochs):
            for rows in valid_rows[torch.randperm(len(valid_rows))].split(args.minibatch_size):
                b_obs, b_actions, b_log_probs, b_advantages, b_returns = (field[rows] for field in batch)
                ratio = (Categorical(logits=actor(b_obs)).log_prob(b_actions) - b_log_probs).exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std(correction=0) + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(ratio * b_advantages, clipped * b_advantages).mean()
                loss = policy_loss + 0.5 * (critic(b_obs).squeeze(-1) - b_returns).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

        mean, seconds = float(np.mean(recent_returns or [0])), time.perf_counter() - start
        solved = len(recent_returns) == 100 and mean >= args.target
        if update % 10 == 0 or solved:
            print(f"{global_step:8,} steps  {global_step / seconds:7,.0f} steps/s  mean return {mean:5.1f}")
        if solved:
            break
    outcome = f"{'' if solved else 'not '}solved: mean return {mean:.1f}"
    print(f"{outcome} after {global_step:,} steps in {seconds:.1f} s")
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
