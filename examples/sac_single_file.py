"""SAC in a single file, in the style of CleanRL: networks in torch, and memlane's native environments and replay.

Use it if you want to write the training loop yourself, with memlane's replay, which samples the next batch in the
background. It prints the mean return every 2,000 steps, and at the end whether Pendulum-v1 was solved.

    python examples/sac_single_file.py
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import memlane.native
from memlane.lanes import Replay, ReplayPipeline


@dataclass
class Args:
    target: float = -200
    """solved when the mean return of the last 20 episodes reaches this"""
    max_steps: int = 50_000
    seed: int = 0
    num_envs: int = 4
    learning_starts: int = 1_000
    """steps with random actions before the first gradient step"""
    batch_size: int = 256
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor: nn.Module, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Actions in [-1, 1] (tanh of a Gaussian), and their log-probabilities."""
    mean, log_std = actor(obs).chunk(2, -1)
    std = log_std.clamp(-5, 2).exp()
    raw = mean + std * torch.randn_like(mean)
    gaussian = -0.5 * ((raw - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    tanh_correction = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
    return raw.tanh(), (gaussian - tanh_correction).sum(-1)


def q_values(critics: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
    return torch.stack([critic(torch.cat([obs, action], -1)).squeeze(-1) for critic in critics])


def gradient_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = memlane.native.make("Pendulum-v1", args.num_envs, copy=True)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    action_scale = torch.from_numpy(envs.single_action_space.high)
    actor, critics = mlp(obs_dim, 2 * action_dim), nn.ModuleList(mlp(obs_dim + action_dim, 1) for _ in range(2))
    target_critics = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros((), requires_grad=True)
    parameters = (actor.parameters(), critics.parameters(), [log_alpha])
    actor_optimizer, critic_optimizer, alpha_optimizer = (torch.optim.Adam(p, args.learning_rate) for p in parameters)

    # Each observation is stored once; the sampler finds the next one in the stream of the same environment.
    fields = {
        "obs": ("float32", obs_dim), "action": ("float32", action_dim), "reward": ("float32", ()),
        "terminated": (bool, ()), "truncated": (bool, ()),
    }  # fmt: skip
    replay = Replay(fields, args.max_steps, streams=args.num_envs, observations=["obs"])
    writer = replay.writer()
    pipeline = ReplayPipeline(replay.sampler(seed=args.seed, gamma=args.gamma), args.batch_size)
    obs, _ = envs.reset(seed=args.seed)
    valid, episode_returns, recent_returns = np.ones(args.num_envs, bool), np.zeros(args.num_envs), deque(maxlen=20)
    start, solved = time.monotonic(), False
    while replay.added < args.max_steps and not solved:
        warm_up = replay.added < args.learning_starts
        with torch.no_grad():
            action = torch.rand(args.num_envs, action_dim) * 2 - 1 if warm_up else act(actor, torch.from_numpy(obs))[0]
        next_obs, reward, terminated, truncated, _ = envs.step((action * action_scale).numpy())
        done = terminated | truncated
        row = {"obs": obs, "action": action.numpy(), "reward": reward, "terminated": terminated, "truncated": truncated}
        added = writer.add(row, final={"obs": next_obs}, skip=~valid)  # the step after an episode's end only resets
        episode_returns += reward
        recent_returns.extend(episode_returns[done])
        episode_returns[done] = 0
        valid, obs = ~done, next_obs
        for _ in range(0 if warm_up else added):
            if not pipeline.started:
                pipeline.start()
            batch = pipeline.consume()
            pipeline.start()  # samples the next batch in the background
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                next_action, log_prob = act(actor, batch["next_obs"])
                next_value = q_values(target_critics, batch["next_obs"], next_action).min(0).values - alpha * log_prob
                target = batch["reward"] + batch["discount"] * next_value
            error = q_values(critics, batch["obs"], batch["action"]) - target
            gradient_step(critic_optimizer, error.square().mean(-1).sum())
            action, log_prob = act(actor, batch["obs"])
            value = q_values(critics, batch["obs"], action).min(0).values
            gradient_step(actor_optimizer, (alpha * log_prob - value).mean())
            gradient_step(alpha_optimizer, -(log_alpha * (log_prob.detach() - action_dim)).mean())
            with torch.no_grad():
                for target_parameter, parameter in zip(target_critics.parameters(), critics.parameters(), strict=True):
                    target_parameter.lerp_(parameter, args.tau)
        mean, seconds = np.mean(recent_returns or [np.nan]), time.monotonic() - start
        solved = len(recent_returns) == 20 and mean >= args.target
        if replay.added % 2000 < added and recent_returns:
            print(f"{replay.added:>7,} steps  mean return {mean:8.1f}  {seconds:5.1f} s", flush=True)
    print(f"{'solved' if solved else 'stopped'} after {replay.added:,} steps in {seconds:.1f} s")
    pipeline.close()
    replay.close()
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
