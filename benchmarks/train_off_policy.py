"""How long until an off-policy algorithm has solved its task, and how many gradient steps per second are made?

SAC on Pendulum-v1 and DQN on CartPole-v1, against Stable-Baselines3's with rl-zoo's settings. Each turn is a new
process with a seed of its own. The clock runs from the start of learning until the policy, without exploration, reaches
the target as its mean return of 20 episodes. It is stopped during these evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from benchmarks import trainers
from benchmarks.entrants import CORES, Entrant, add_rate_table, add_until_tables, missing, run_turns
from benchmarks.harness import Expectation, Report, best, parser, ratio, threads_text
from benchmarks.trainers import Clock
from benchmarks.turns import main_or_turn

SECONDS = 300.0
"""Time limit of a turn."""


# ------------------------------------------------------------------------------------------- in the process of a turn


def take_turn(request: dict[str, Any]) -> list[float]:
    clock = Clock(request["goal"])
    trainer = {"memlane": memlane, "stable_baselines3": stable_baselines3}[request["trainer"]]
    trainer(clock, request["seed"], **request["settings"])
    return clock.answer()


def memlane(clock: Clock, seed: int, **settings: Any) -> None:
    def gradient_steps(runner: Any) -> int:
        return int(runner.replay.counters()["sampled"] // runner.config.batch_size)

    trainers.memlane(clock, seed, gradient_steps, **settings)


def stable_baselines3(
    clock: Clock, seed: int, algo: str, env: str, threads: int, exploration_steps: float | None = None, **settings: Any
) -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(threads)
    limit = clock.goal["max_steps"]
    if exploration_steps is not None:  # SB3 takes a fraction of the total steps
        settings["exploration_fraction"] = exploration_steps / limit
    envs = make_vec_env(env, 1, seed=seed)
    model = getattr(stable_baselines3, algo.upper())(
        "MlpPolicy", envs, seed=seed, device="cpu", stats_window_size=clock.goal["episodes"], **settings
    )
    trainers.stable_baselines3(clock, model, attrgetter("_n_updates"), limit)
    envs.close()


# ------------------------------------------------------------------------------------------ in the process of the run


@dataclass(frozen=True)
class Task:
    algo: str
    env: str
    goal: dict[str, Any]
    quick: dict[str, Any]
    """A goal that every entrant reaches after a few episodes, soon after learning starts."""
    zoo: dict[str, Any]
    """rl-zoo's settings."""
    trial_steps: int
    """Environment steps in which Stable-Baselines3 makes a few hundred gradient steps."""

    def __str__(self) -> str:
        return f"{self.algo.upper()}, {self.env}"


TASKS = {
    "sac": Task(
        "sac", "Pendulum-v1",
        {"target": -200.0, "episodes": 20, "max_steps": 50_000, "seconds": SECONDS, "evaluate_every": 500},
        {"target": -2000.0, "episodes": 5, "max_steps": 3_000, "seconds": 60.0},
        {"learning_rate": 1e-3},  # the rest are its defaults: a gradient step of 256 rows for each step, layers of 256
        trial_steps=500,
    ),
    "dqn": Task(
        "dqn", "CartPole-v1",
        {"target": 475.0, "episodes": 20, "max_steps": 100_000, "seconds": SECONDS, "evaluate_every": 1_000},
        {"target": 1.0, "episodes": 75, "max_steps": 10_000, "seconds": 60.0},
        {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
            "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_steps": 0.16 * 50_000,
            "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
        },
        trial_steps=2_000,
    ),
}  # fmt: skip


def network_of_our_preset(task: Task) -> dict[str, Any]:
    from memlane.train.presets import preset_for

    return {"policy_kwargs": {"net_arch": list(preset_for(task.env, task.algo).config["network"]["hidden"])}}


def stable_baselines3_of(task: Task, goal: dict[str, Any], threads: int) -> Entrant:
    settings = {"algo": task.algo, "env": task.env, **task.zoo, "threads": threads}
    return Entrant(f"stable-baselines3, {threads_text(threads)}", "peer", "stable_baselines3", settings, goal,
                   missing("stable_baselines3"))  # fmt: skip


def fastest(task: Task, goal: dict[str, Any], threads: Sequence[int]) -> Entrant:
    """Stable-Baselines3 with the number of threads whose gradient steps are fastest in a short trial."""
    entrants = [stable_baselines3_of(task, goal, one) for one in threads]
    trials = [one.with_goal(target=None, max_steps=task.trial_steps, seconds=10.0) for one in entrants]
    if len(entrants) == 1 or entrants[0].skip:
        return entrants[0]
    run_turns(trials, 2, quick=True)
    best_steps = [min((answer[2] for answer in one.answers), default=float("inf")) for one in trials]
    for entrant, ns in zip(entrants, best_steps, strict=True):
        print(f"  {task}: {entrant.name} makes {1e9 / ns:,.0f} gradient steps/s in a trial")
    return entrants[best_steps.index(min(best_steps))]


def race_of(report: Report, task: Task, quick: bool, rounds: int) -> None:
    goal = {**(task.quick if quick else task.goal), "env": task.env}
    ours = {"algo": task.algo, "env": task.env}
    peer = fastest(task, goal, [1] if quick else sorted({1, min(CORES, 2)}))
    entrants = [
        Entrant("memlane, native", "memlane", "memlane", {**ours, "backend": "native"}, goal),
        Entrant("memlane, Python", "memlane", "memlane", {**ours, "backend": "gymnasium"}, goal),
        peer,
    ]
    if not quick:
        same = {**peer.settings, **network_of_our_preset(task)}
        entrants.append(Entrant("stable-baselines3, our layers", "other", peer.trainer, same, goal, peer.skip))
    run_turns(entrants, rounds, quick)
    reference = "memlane, Python"
    until, steps = add_until_tables(report, f"{task} until the mean return is {goal['target']:g}", reference, entrants)
    add_rate_table(report, f"{task}: gradient steps", reference, entrants,
                   "one gradient step, with the collection for it", "gradient steps/s")  # fmt: skip
    quickest, fewest = best(until.contenders, "stable", "peer"), best(steps.contenders, "stable", "peer")
    report.expect(
        Expectation(f"{task}: solved in at most half of stable-baselines3's time",
                    ratio(until[reference], quickest), at_most=0.5),
        Expectation(f"{task}: solved with no more steps than stable-baselines3",
                    ratio(steps[reference], fewest), at_most=1.0),
    )  # fmt: skip


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument(
        "--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="tasks to measure (default: all)"
    )
    options = made.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    report = Report("train_off_policy", options, peers=["gymnasium", "stable-baselines3", "torch"])
    for name in options.tasks:
        race_of(report, TASKS[name], options.quick, rounds)
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
