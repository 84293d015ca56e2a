"""How fast is a vector environment in the loop that it is used in: beside a torch policy, and in whole programs?

The first tables are a loop of a policy and a step: a multilayer perceptron with two hidden layers of 64 units chooses
the actions, on torch's default threads and on one. The others are whole training programs. Each turn is a new process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.entrants import missing
from benchmarks.harness import Contender, Expectation, Report, Table, best, parser, race, ratio
from benchmarks.turns import Effort, answer_turn, measured, turn_in_new_process
from benchmarks.vector_workloads import env_fns, missing_for

CART_POLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
LOOPS = [(CART_POLE, 1), (CART_POLE, 8), (CART_POLE, 16), (CART_POLE, 64), (CHEETAH, 8)]
"""Environments of the tables with a policy."""
DEFAULT = "default threads"


# ------------------------------------------------------------------------------------------- in the process of a turn


def vector_env(library: str, workload: str, num_envs: int, settings: dict[str, Any]) -> Any:
    from gymnasium import vector

    fns = env_fns(workload, num_envs)
    if library == "memlane":
        from memlane.vector import AsyncVectorEnv

        return AsyncVectorEnv(fns, **settings)
    return {"Sync": vector.SyncVectorEnv, "Async": vector.AsyncVectorEnv}[library](fns)


def policy_loop(request: dict[str, Any]) -> list[float]:
    """Nanoseconds for one pass of the loop."""
    import torch

    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    envs = vector_env(request["library"], request["workload"], request["num_envs"], request["settings"])
    discrete = hasattr(envs.single_action_space, "n")
    outputs = int(envs.single_action_space.n) if discrete else envs.single_action_space.shape[0]
    inputs = envs.single_observation_space.shape[0]
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, outputs),
    )  # fmt: skip
    observations, _ = envs.reset(seed=0)

    def advance() -> int:
        nonlocal observations
        with torch.no_grad():
            chosen = network(torch.as_tensor(observations, dtype=torch.float32))
            if discrete:
                chosen = torch.distributions.Categorical(logits=chosen).sample()
        observations, *_ = envs.step(chosen.numpy())
        return 1

    return measured(advance, envs.close, [request["warm_up"], *[request["seconds"]] * request["blocks"]])


def sb3_ppo(request: dict[str, Any]) -> list[float]:
    """Nanoseconds for one environment step of a training with Stable-Baselines3's PPO and its default settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

    fns = env_fns(request["workload"], request["num_envs"])
    if request["library"] == "memlane":
        from memlane.vector.adapters.sb3 import SB3VecEnv

        envs = SB3VecEnv(fns, **request["settings"])
    else:
        envs = {"Dummy": DummyVecEnv, "Subproc": SubprocVecEnv}[request["library"]](fns)
    model = PPO("MlpPolicy", VecMonitor(envs), n_steps=request["n_steps"], seed=0, device="cpu")
    rollout = request["n_steps"] * request["num_envs"]
    model.learn(rollout)  # starts everything, and fills the caches
    values = []
    for _ in range(request["blocks"]):
        begin = time.monotonic_ns()
        model.learn(rollout, reset_num_timesteps=False)
        values.append((time.monotonic_ns() - begin) / rollout)
    envs.close()
    return values


def cleanrl_ppo(request: dict[str, Any]) -> list[float]:
    """Nanoseconds for one environment step of a PPO in one file, written as CleanRL's."""
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


TURNS: dict[str, Callable[[dict[str, Any]], list[float]]] = {
    function.__name__: function for function in (policy_loop, sb3_ppo, cleanrl_ppo)
}


def take_turn(request: dict[str, Any]) -> list[float]:
    return TURNS[request["turn"]](request)


# ------------------------------------------------------------------------------------------ in the process of the run


@dataclass
class Entry:
    name: str
    library: str
    settings: dict[str, Any]
    skip: str = ""


def contenders(turn: str, workload: str, num_envs: int, entries: Sequence[Entry], effort: Effort,
               **request: Any) -> list[Contender]:  # fmt: skip
    def measure(entry: Entry) -> Callable[[], list[float]]:
        asked = {"turn": turn, "workload": workload, "num_envs": num_envs, "library": entry.library,
                 "settings": entry.settings, **vars(effort), **request}  # fmt: skip
        return lambda: turn_in_new_process(__file__, asked, numeric_threads=None)

    absent = missing("torch") or missing_for(workload)
    return [
        Contender(entry.name, "memlane" if entry.library == "memlane" else "peer", measure(entry), absent or entry.skip)
        for entry in entries
    ]


def add_loop(report: Report, workload: str, num_envs: int, threads: int | None, effort: Effort, rounds: int) -> None:
    entries = [
        Entry("memlane", "memlane", {}),
        Entry("memlane, num_workers=0", "memlane", {"num_workers": 0}),
        Entry("gymnasium Sync", "Sync", {}),
        Entry("gymnasium Async", "Async", {}),
    ]
    rows = contenders("policy_loop", workload, num_envs, entries, effort, threads=threads)
    race(rows, rounds)
    what = DEFAULT if threads is None else "one torch thread"
    title = f"{num_envs} {workload} and a policy, {what}"
    report.add(Table(title, "memlane", rows, "a policy and a step of all environments"))
    peer, ours = best(rows, "gymnasium"), rows[0]
    if num_envs == 1:
        ours, least = rows[1], 0.95
    elif threads is None:
        least = 1.0 if workload == CHEETAH else 0.95
    else:
        least = {(CART_POLE, 8): 1.0, (CART_POLE, 16): 1.1}.get((workload, num_envs), 1.4)
    report.expect(Expectation(f"{title}: {ours.name} at least {least} times as fast as the better of Sync and Async",
                              ratio(peer, ours), at_least=least))  # fmt: skip


def add_sb3(report: Report, workload: str, num_envs: int, effort: Effort, rounds: int, quick: bool) -> None:
    absent = missing("stable_baselines3")
    entries = [
        Entry("SB3VecEnv", "memlane", {}, absent),
        Entry("DummyVecEnv", "Dummy", {}, absent),
        Entry("SubprocVecEnv", "Subproc", {}, absent),
    ]
    rows = contenders("sb3_ppo", workload, num_envs, entries, effort, n_steps=64 if quick else 256)
    race(rows, rounds)
    title = f"Stable-Baselines3's PPO, {num_envs} {workload}"
    report.add(Table(title, "SB3VecEnv", rows, "an environment step, collected and learned from", rate="steps/s"))
    peer = best(rows, kind="peer")
    least = 1.3 if workload == CHEETAH else 1.0
    report.expect(Expectation(f"{title}: SB3VecEnv at least {least} times as fast as the better of Dummy and Subproc",
                              ratio(peer, rows[0]), at_least=least))  # fmt: skip


def add_cleanrl(report: Report, num_envs: int, effort: Effort, rounds: int) -> None:
    entries = [
        Entry("memlane", "memlane", {}), Entry("gymnasium Sync", "Sync", {}), Entry("gymnasium Async", "Async", {}),
    ]  # fmt: skip
    rows = contenders("cleanrl_ppo", CART_POLE, num_envs, entries, effort)
    race(rows, rounds)
    title = f"PPO in one file, as CleanRL's, {num_envs} {CART_POLE}"
    report.add(Table(title, "memlane", rows, "an environment step, collected and learned from", rate="steps/s"))
    report.expect(Expectation(f"{title}: memlane no slower than the better of Sync and Async",
                              ratio(best(rows, "gymnasium"), rows[0]), at_least=1))  # fmt: skip


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    tables = ["policy", "sb3", "cleanrl"]
    arguments.add_argument("--tables", nargs="*", choices=tables, default=tables,
                           help="tables to measure (default: all)")  # fmt: skip
    options = arguments.parse_args()
    quick = options.quick
    effort = Effort(2, 0.05, 0.05) if quick else Effort(3, 0.5, 0.7)
    rounds = options.rounds or (1 if quick else 5)
    report = Report("real_loop", options, peers=["gymnasium", "mujoco", "torch", "stable-baselines3"])
    if "policy" in options.tables:
        for workload, num_envs in LOOPS[1:2] if quick else LOOPS:
            for threads in (None, 1):
                add_loop(report, workload, num_envs, threads, effort, rounds)
    if "sb3" in options.tables:
        for workload, num_envs in [(CART_POLE, 4)] if quick else [(CART_POLE, 8), (CHEETAH, 8)]:
            add_sb3(report, workload, num_envs, effort, rounds, quick)
    if "cleanrl" in options.tables:
        for num_envs in (4,) if quick else (4, 16):
            add_cleanrl(report, num_envs, effort, rounds)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        answer_turn(take_turn)
    else:
        main()
