"""How long until a policy is trained, and how many training steps per second are made?

Each turn is a new process with a seed of its own. The clock runs from the start of learning until the mean return of
the last 100 episodes is 475, checked after each rollout. It includes the start of memlane's collectors, and no imports.
The time of the whole process has a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from benchmarks import trainers
from benchmarks.entrants import CORES, Entrant, add_rate_table, add_until_tables, missing, run_turns
from benchmarks.harness import Expectation, Report, best, parser, ratio, threads_text
from benchmarks.trainers import Clock
from benchmarks.turns import main_or_turn

CART_POLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
SECONDS = 90.0
"""Time limit of a turn: several times what the slowest entrant needs, unless its threads contend for the cores."""


# ------------------------------------------------------------------------------------------- in the process of a turn


def take_turn(request: dict[str, Any]) -> list[float]:
    clock = Clock(request["goal"])
    TRAINERS[request["trainer"]](clock, request["seed"], **request["settings"])
    return clock.answer()


def memlane(clock: Clock, seed: int, **settings: Any) -> None:
    trainers.memlane(clock, seed, attrgetter("env_steps"), **settings)


def stable_baselines3(
    clock: Clock, seed: int, env: str, num_envs: int, threads: int, schedule_steps: int, processes: bool = False,
    normalize: bool = False, **settings: Any,
) -> None:  # fmt: skip
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    torch.set_num_threads(threads)
    kind, how = (SubprocVecEnv, {"start_method": "fork"}) if processes else (DummyVecEnv, {})
    envs = make_vec_env(env, num_envs, seed=seed, vec_env_cls=kind, vec_env_kwargs=how)
    if normalize:
        envs = VecNormalize(envs, norm_reward=False)
    linear = {name: settings.pop(name) for name in ("learning_rate", "clip_range")}
    model = PPO(
        "MlpPolicy", envs, seed=seed, device="cpu", stats_window_size=clock.goal["episodes"],
        **{name: lambda left, start=start: start * left for name, start in linear.items()}, **settings,
    )  # fmt: skip
    trainers.stable_baselines3(clock, model, attrgetter("num_timesteps"), schedule_steps)
    envs.close()


TRAINERS: dict[str, Callable[..., None]] = {"memlane": memlane, "stable_baselines3": stable_baselines3}


# ------------------------------------------------------------------------------------------ in the process of the run

STEP = "one environment step, collected and learned from"
ZOO_CART_POLE = {
    "env": CART_POLE, "num_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98,
    "gae_lambda": 0.8, "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2,
}  # fmt: skip
"""rl-zoo's settings for PPO."""


def settings_of_our_preset(env: str) -> dict[str, Any]:
    """The settings of memlane's preset under Stable-Baselines3's names, with normalised observations."""
    from memlane.train.presets import preset_for

    preset = preset_for(env)
    config = preset.config
    return {
        "env": env, "num_envs": preset.num_envs, "n_steps": config["num_steps"],
        "batch_size": config["minibatch_size"], "n_epochs": config["update_epochs"],
        "learning_rate": config["learning_rate"], "clip_range": 0.2, "normalize": True,
        "schedule_steps": preset.max_steps, "policy_kwargs": {"net_arch": list(config["network"]["hidden"])},
    }  # fmt: skip


def cart_pole(report: Report, quick: bool, rounds: int) -> None:
    if quick:
        goal = {"target": 30.0, "episodes": 20, "max_steps": 20_000, "seconds": 20.0}
    else:
        goal = {"target": 475.0, "episodes": 100, "max_steps": 500_000, "seconds": SECONDS}
    sb3 = {**ZOO_CART_POLE, "schedule_steps": 500_000}
    threads = [1] if quick else sorted({1, min(CORES, 2)})
    entrants = [
        Entrant("memlane, native", "memlane", "memlane", {"env": CART_POLE, "backend": "native"}, goal),
        Entrant("memlane, Python", "memlane", "memlane", {"env": CART_POLE, "backend": "gymnasium"}, goal),
        *[
            Entrant(
                f"stable-baselines3, {threads_text(one)}", "peer", "stable_baselines3", {**sb3, "threads": one}, goal,
                missing("stable_baselines3"),
            )
            for one in threads
        ],
    ]  # fmt: skip
    run_turns(entrants, rounds, quick)
    reference, what = "memlane, Python", f"{CART_POLE} until the mean return is {goal['target']:g}"
    until, steps = add_until_tables(report, what, reference, entrants)
    add_rate_table(report, f"{CART_POLE}: training steps", reference, entrants, STEP, "steps/s")
    peer, fewest = best(until.contenders, "stable", "peer"), best(steps.contenders, "stable", "peer")
    ours, native = until["memlane, Python"], until["memlane, native"]
    report.expect(
        Expectation(f"{CART_POLE}, Python environments: solved in at most half of stable-baselines3's time",
                    ratio(ours, peer), at_most=0.5),
        Expectation(f"{CART_POLE}, native environments: solved in at most a quarter of stable-baselines3's time",
                    ratio(native, peer), at_most=0.25),
        Expectation(f"{CART_POLE}, Python environments: solved with no more steps than stable-baselines3",
                    ratio(steps["memlane, Python"], fewest), at_most=1.0),
        Expectation(f"{CART_POLE}, native environments: solved with no more steps than stable-baselines3",
                    ratio(steps["memlane, native"], fewest), at_most=1.0),
    )  # fmt: skip


def cheetah(report: Report, seconds: float, quick: bool, rounds: int) -> None:
    if skip := missing("mujoco"):
        print(f"\n{CHEETAH}: not measured, {skip} (pip install 'gymnasium[mujoco]')")
        return
    goal = {"target": None, "episodes": 100, "max_steps": 10**9, "seconds": seconds}
    ours, same = {"env": CHEETAH, "backend": "gymnasium"}, settings_of_our_preset(CHEETAH)
    threads = [1] if quick else sorted({1, min(CORES, 2)})
    absent = missing("stable_baselines3")
    small = {**same, "n_steps": 256, "batch_size": 64, "threads": 1}  # its defaults: 2048 steps, 64 rows
    entrants = [
        Entrant("memlane", "memlane", "memlane", ours, goal),
        *([] if quick else [Entrant("memlane, 2 collectors", "memlane", "memlane", {**ours, "collectors": 2}, goal)]),
        *[
            Entrant(f"stable-baselines3, {threads_text(one)}", "peer", "stable_baselines3",
                    {**same, "threads": one}, goal, absent)
            for one in threads
        ],
    ]  # fmt: skip
    if not quick:
        entrants += [
            Entrant("stable-baselines3, Subproc", "peer", "stable_baselines3",
                    {**same, "threads": 1, "processes": True}, goal, absent),
            Entrant("stable-baselines3, 64 rows", "other", "stable_baselines3", small, goal, absent),
        ]  # fmt: skip
    run_turns(entrants, rounds, quick)
    table = add_rate_table(report, f"{CHEETAH}: training steps", "memlane", entrants, STEP, "steps/s")
    report.expect(
        Expectation(f"{CHEETAH}: at least 2 times as many training steps per second as stable-baselines3",
                    ratio(best(table.contenders, "stable", "peer"), best(table.contenders, "memlane", "memlane")),
                    at_least=2)
    )  # fmt: skip


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    tasks = ["cartpole", "halfcheetah"]
    made.add_argument("--tasks", nargs="*", choices=tasks, default=tasks, help="tasks to measure (default: all)")
    options = made.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    report = Report("train", options, peers=["gymnasium", "mujoco", "stable-baselines3", "torch"])
    if "cartpole" in options.tasks:
        cart_pole(report, options.quick, rounds)
    if "halfcheetah" in options.tasks:
        cheetah(report, 0.2 if options.quick else 20.0, options.quick, rounds)
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
