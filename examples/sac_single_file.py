"""SAC in a single file, in the manner of CleanRL: torch, memlane's native environments and replay, nothing else.

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
from memlane.ipc import Replay, ReplayPipeline


@dataclass
class Args:
    target: float = -200
    """solved when the mean return of the last 20 episodes is so high"""
    max_steps: int = 50_000
    seed: int = 0
    num_envs: int = 4
    learning_starts: int = 1_000
    """steps of random actions before the first gradient step"""
    batch_size: int = 256
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor: nn.Module, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Actions within -1 and 1, and the logarithms of their densities."""
    mean, log_std = actor(obs).chunk(2, -1)
    std = log_std.clamp(-5, 2).exp()
    raw = mean + std * torch.randn_like(mean)
    normal = -0.5 * ((raw - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
    return raw.tanh(), (normal - squash).sum(-1)


def learn(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = memlane.native.make("Pendulum-v1", args.num_envs, copy=True)
    inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    high = torch.from_numpy(envs.single_action_space.high)

    actor, critics = mlp(inputs, 2 * outputs), nn.ModuleList(mlp(inputs + outputs, 1) for _ in range(2))
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_temperature = torch.zeros((), requires_grad=True)
    parts = (actor.parameters(), critics.parameters(), [log_temperature])
    learn_actor, learn_critics, learn_temperature = (torch.optim.Adam(part, args.learning_rate) for part in parts)

    def worth(networks: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
        return torch.stack([one(torch.cat([obs, action], -1)).squeeze(-1) for one in networks])

    # Every observation is stored once; the next one is found along the stream of its environment.
    row = {
        "obs": ("float32", inputs), "action": ("float32", outputs), "reward": ("float32", ()),
        "terminated": (bool, ()), "truncated": (bool, ()),
    }  # fmt: skip
    replay = Replay(row, args.max_steps, streams=args.num_envs, observations=["obs"])
    writer = replay.writer()
    pipeline = ReplayPipeline(replay.sampler(seed=args.seed, gamma=args.gamma), args.batch_size)

    obs, _ = envs.reset(seed=args.seed)
    valid, returns = np.ones(args.num_envs, bool), np.zeros(args.num_envs)
    recent: deque[float] = deque(maxlen=20)
    begin = time.monotonic()
    while replay.added < args.max_steps and not (len(recent) == 20 and np.mean(recent) >= args.target):
        warm = replay.added < args.learning_starts
        with torch.no_grad():
            action = torch.rand(args.num_envs, outputs) * 2 - 1 if warm else act(actor, torch.from_numpy(obs))[0]
        after, reward, terminated, truncated, _ = envs.step((action * high).numpy())
        step = {"obs": obs, "action": action.numpy(), "reward": reward, "terminated": terminated}
        step["truncated"] = truncated
        added = writer.add(step, final={"obs": after}, skip=~valid)  # what follows an end only resets
        returns += reward
        recent.extend(returns[terminated | truncated])
        returns[terminated | truncated] = 0
        valid, obs = ~(terminated | truncated), after
        for _ in range(0 if warm else added):
            if not pipeline.started:
                pipeline.start()
            batch = pipeline.consume()
            pipeline.start()  # drawn while this one is learned from
            temperature = log_temperature.detach().exp()
            with torch.no_grad():
                next_action, log_prob = act(actor, batch["next_obs"])
                value = worth(targets, batch["next_obs"], next_action).min(0).values - temperature * log_prob
                target = batch["reward"] + batch["discount"] * value
            learn(learn_critics, (worth(critics, batch["obs"], batch["action"]) - target).square().mean(-1).sum())
            action, log_prob = act(actor, batch["obs"])
            learn(learn_actor, (temperature * log_prob - worth(critics, batch["obs"], action).min(0).values).mean())
            learn(learn_temperature, -(log_temperature * (log_prob.detach() - outputs)).mean())
            with torch.no_grad():
                for mine, theirs in zip(targets.parameters(), critics.parameters(), strict=True):
                    mine.lerp_(theirs, args.tau)
        if replay.added % 2000 < args.num_envs and recent:
            print(
                f"{replay.added:>7,} steps  return {np.mean(recent):8.1f}  {time.monotonic() - begin:5.1f} s",
                flush=True,
            )
    solved = len(recent) == 20 and np.mean(recent) >= args.target
    print(f"{'solved' if solved else 'stopped'} after {replay.added:,} steps and {time.monotonic() - begin:.1f} s")
    pipeline.close()
    replay.close()
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
