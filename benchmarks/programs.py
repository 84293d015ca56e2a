"""Whole programs (training, and TorchRL's data collection) as users of the libraries write them, for
``benchmarks/real_loop.py``.

Each function runs one program in the process of a turn and returns nanoseconds per environment step, one value per
block.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.turns import measured
from benchmarks.vector_workloads import env_fns


def vector_env(library: str, workload: str, num_envs: int, settings: dict[str, Any]) -> Any:
    """A vector environment with Gymnasium's interface."""
    from gymnasium import vector

    fns = env_fns(workload, num_envs)
    if library == "memlane":
        from memlane.vector import AsyncVectorEnv

        return AsyncVectorEnv(fns, **settings)
    return {"Sync": vector.SyncVectorEnv, "Async": vector.AsyncVectorEnv}[library](fns, **settings)


def sb3_vec_env(library: str, workload: str, num_envs: int, settings: dict[str, Any]) -> Any:
    """A vectorized environment with Stable-Baselines3's interface."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

    fns = env_fns(workload, num_envs)
    if library == "memlane":
        from memlane.vector.adapters.sb3 import SB3VecEnv

        return VecMonitor(SB3VecEnv(fns, **settings))
    return VecMonitor({"Dummy": DummyVecEnv, "Subproc": SubprocVecEnv}[library](fns))


def learned(model: Any, steps: int, blocks: int) -> list[float]:
    """Nanoseconds per environment step of ``blocks`` times ``steps`` steps of a Stable-Baselines3 model."""
    model.learn(steps)  # starts everything, and fills the caches
    values = []
    for _ in range(blocks):
        begin = time.monotonic_ns()
        model.learn(steps, reset_num_timesteps=False)
        values.append((time.monotonic_ns() - begin) / steps)
    model.get_env().close()
    return values


def sb3_ppo(request: dict[str, Any]) -> list[float]:
    """Stable-Baselines3's PPO with its default settings but for the length of a rollout."""
    from stable_baselines3 import PPO

    envs = sb3_vec_env(request["library"], request["workload"], request["num_envs"], request["settings"])
    model = PPO("MlpPolicy", envs, n_steps=request["n_steps"], seed=0, device="cpu")
    return learned(model, request["n_steps"] * request["num_envs"], request["blocks"])


def sb3_dqn(request: dict[str, Any]) -> list[float]:
    """Stable-Baselines3's DQN on one environment, with its default settings; it learns from the 100th step on."""
    from stable_baselines3 import DQN

    envs = sb3_vec_env(request["library"], request["workload"], request["num_envs"], request["settings"])
    model = DQN("MlpPolicy", envs, learning_starts=100, seed=0, device="cpu")
    return learned(model, request["steps"], request["blocks"])


def torchrl_collector(request: dict[str, Any]) -> list[float]:
    """TorchRL's collector with a policy of two hidden layers, on a vector environment or on TorchRL's own."""
    import torch
    from gymnasium.vector import AutoresetMode
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv

    library, workload, num_envs = request["library"], request["workload"], request["num_envs"]
    if library in ("SerialEnv", "ParallelEnv"):
        env = {"SerialEnv": SerialEnv, "ParallelEnv": ParallelEnv}[library](num_envs, lambda: GymEnv(workload))
    else:  # the mode that GymWrapper asks for
        settings = {**request["settings"], "autoreset_mode": AutoresetMode.SAME_STEP}
        env = GymWrapper(vector_env(library, workload, num_envs, settings))
    torch.manual_seed(0)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
            )

        def forward(self, observation: Any) -> Any:
            sample = torch.distributions.Categorical(logits=self.layers(observation)).sample()
            return nn.functional.one_hot(sample, actions)

    policy = TensorDictModule(Policy(), ["observation"], ["action"])
    collector = Collector(env, policy, frames_per_batch=32 * num_envs, total_frames=-1)
    batches = iter(collector)
    return measured(lambda: next(batches).numel(), collector.shutdown,
                    [request["warm_up"], *[request["seconds"]] * request["blocks"]])  # fmt: skip


def cleanrl_ppo(request: dict[str, Any]) -> list[float]:
    """A PPO in one file, written as CleanRL's."""
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    envs = vector_env(request["library"], request["workload"], request["num_envs"], request["settings"])
    inputs, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    num_envs, num_steps = request["num_envs"], 128

    def layers(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    actor, critic = layers(actions), layers(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((num_steps, num_envs, inputs))
    acts, logprobs, rewards, dones, values = (torch.zeros((num_steps, num_envs)) for _ in range(5))
    next_obs, next_done = torch.as_tensor(envs.reset(seed=0)[0]), torch.zeros(num_envs)

    def iteration() -> None:
        nonlocal next_obs, next_done
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                distribution = torch.distributions.Categorical(logits=actor(next_obs))
                action = distribution.sample()
                values[step] = critic(next_obs).flatten()
            acts[step], logprobs[step] = action, distribution.log_prob(action)
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards[step] = torch.as_tensor(reward, dtype=torch.float32)
            next_obs = torch.as_tensor(observation)
            next_done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        with torch.no_grad():
            last = critic(next_obs).flatten()
            advantages, carried = torch.zeros_like(rewards), torch.zeros(num_envs)
            for step in reversed(range(num_steps)):
                alive = 1 - (next_done if step == num_steps - 1 else dones[step + 1])
                following = last if step == num_steps - 1 else values[step + 1]
                delta = rewards[step] + 0.99 * following * alive - values[step]
                carried = delta + 0.99 * 0.95 * alive * carried
                advantages[step] = carried
            returns = advantages + values
        flat = [each.flatten(0, 1) for each in (obs, acts, logprobs, advantages, returns)]
        rows, minibatch = num_steps * num_envs, num_steps * num_envs // 4
        for _ in range(4):
            for part in torch.randperm(rows).split(minibatch):
                b_obs, b_acts, b_logprobs, b_advantages, b_returns = (each[part] for each in flat)
                distribution = torch.distributions.Categorical(logits=actor(b_obs))
                ratio_ = (distribution.log_prob(b_acts) - b_logprobs).exp()
                normal = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                policy_loss = torch.max(-normal * ratio_, -normal * ratio_.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (critic(b_obs).flatten() - b_returns).pow(2).mean()
                loss = policy_loss - 0.01 * distribution.entropy().mean() + 0.5 * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    def advance() -> int:
        iteration()
        return num_steps * num_envs

    return measured(advance, envs.close, [request["warm_up"], *[request["seconds"]] * request["blocks"]])
