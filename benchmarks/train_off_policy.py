"""How long until an off-policy algorithm has solved its task, with how many steps, and how many gradient steps per
second?

SAC on Pendulum-v1 and DQN on CartPole-v1, against Stable-Baselines3's with rl-zoo's settings. Each turn is a new
process with a seed of its own; the clock is ``train.py``'s: it runs from the start of learning until the mean return of
the last episodes is the target.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # behind the standard library: this folder has a signal.py

import contextlib
from typing import Any

from harness import Expectation, Report, Table, best, parser, ratio, threads_text
from train import CORES, TURN_LIMIT, UNSOLVED, Clock, Entrant, StepsTable, missing, run_turns
from turns import answer_turn

# ------------------------------------------------------------------------------------------- in the process of a turn


def take_turn(request: dict[str, Any]) -> list[float]:
    clock = Clock(request["goal"])
    steps = {"memlane": memlane, "stable_baselines3": stable_baselines3}[request["trainer"]](
        clock, request["seed"], **request["settings"]
    )
    took, made, _, solved = clock.answer()
    return [took, made, took / max(steps, 1), solved]


def memlane(clock: Clock, seed: int, algo: str, env: str, backend: str, **settings: Any) -> int:
    """With the settings of its preset. How many gradient steps it made."""
    from memlane.train.algorithms import algorithm_for
    from memlane.train.presets import preset_for
    from memlane.train.run import Metrics, Run

    preset = preset_for(env, algo)
    told = {**preset.config, "seed": seed, **settings}
    with algorithm_for(algo)(env, None, told, sim_backend=backend, num_envs=preset.num_envs) as runner:
        run = runner.run = Run("run", tensorboard=False)

        def should_stop(metrics: Metrics) -> str | None:
            return "over" if clock.over(metrics.env_steps, list(run.recent)[-clock.goal["episodes"] :]) else None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / preset.max_steps  # as memlane train does
        clock.start()
        runner.learn(max_iterations=10**9, save_interval=10**9)
        config = runner.config
    return round((runner.env_steps - config.warm_up) * config.samples_per_insert / config.batch)


def stable_baselines3(clock: Clock, seed: int, algo: str, env: str, threads: int, **settings: Any) -> int:
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Over(Exception):
        pass

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            episodes = [episode["r"] for episode in self.model.ep_info_buffer]
            if clock.over(self.num_timesteps, episodes):
                raise Over

    torch.set_num_threads(threads)
    envs = make_vec_env(env, 1, seed=seed)
    model = getattr(stable_baselines3, algo.upper())(
        "MlpPolicy", envs, seed=seed, device="cpu", stats_window_size=clock.goal["episodes"], **settings
    )
    clock.start()
    with contextlib.suppress(Over):
        model.learn(settings_of_schedule(algo), Look())
    envs.close()
    return int(model._n_updates)


def settings_of_schedule(algo: str) -> int:
    """Steps that the peer is told it has; its exploration ends after a share of them."""
    return {"sac": 50_000, "dqn": 50_000}[algo]


# ------------------------------------------------------------------------------------------ in the process of the run

ZOO: dict[str, dict[str, Any]] = {
    "sac": {"learning_rate": 1e-3},  # n_envs 1, train_freq 1, gradient_steps 1, batch 256: its defaults
    "dqn": {
        "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
        "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
    },
}  # fmt: skip
"""rl-zoo's settings."""


def race_of(report: Report, algo: str, env: str, goal: dict[str, Any], quick: bool, rounds: int) -> None:
    threads = [1] if quick else sorted({1, min(CORES, 2)})
    ours = {"algo": algo, "env": env}
    entrants = [
        Entrant("memlane, native", "memlane", "memlane", {**ours, "backend": "native"}, goal, script=__file__),
        Entrant("memlane, Python", "memlane", "memlane", {**ours, "backend": "gymnasium"}, goal, script=__file__),
        *[
            Entrant(
                f"stable-baselines3, {threads_text(one)}", "peer", "stable_baselines3",
                {**ours, **ZOO[algo], "threads": one}, goal, missing("stable_baselines3"), script=__file__,
            )
            for one in threads
        ],
    ]  # fmt: skip
    run_turns(entrants, rounds, quick)
    reference, what = "memlane, Python", f"{algo.upper()}, {env} until the mean return is {goal['target']:g}"
    until = report.add(
        Table(f"{what}: time", reference, [one.contender(lambda answer, _: answer[0]) for one in entrants],
              "learning, from its start until solved")
    )  # fmt: skip
    for one in entrants:
        if one.unsolved:
            print(f"  {one.name}: {one.unsolved} of {len(one.answers)} runs never solved it; they count as "
                  f"{UNSOLVED} times as long")  # fmt: skip
    steps = report.add(
        StepsTable(f"{what}: environment steps", reference,
                   [one.contender(lambda answer, _: answer[1]) for one in entrants], "environment steps until solved")
    )  # fmt: skip
    report.add(
        Table(f"{algo.upper()}, {env}: gradient steps", reference,
              [one.contender(lambda answer, _: answer[2], penalty=False) for one in entrants],
              "one gradient step, with all that was collected for it", rate="gradient steps/s")
    )  # fmt: skip
    peer, fewest = best(until.contenders, "stable", "peer"), best(steps.contenders, "stable", "peer")
    report.expect(
        Expectation(f"{algo.upper()} solves {env} in at most half of stable-baselines3's time",
                    ratio(until[reference], peer), at_most=0.5),
        Expectation(f"{algo.upper()} solves {env} with no more steps than stable-baselines3",
                    ratio(steps[reference], fewest), at_most=1.0),
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    report = Report("train_off_policy", options, peers=["gymnasium", "stable-baselines3", "torch"])
    limits = {"max_steps": 3_000, "seconds": 20.0} if options.quick else {"max_steps": 100_000, "seconds": TURN_LIMIT}
    race_of(report, "sac", "Pendulum-v1", {"target": -200.0, "episodes": 20, **limits}, options.quick, rounds)
    race_of(report, "dqn", "CartPole-v1", {"target": 475.0, "episodes": 20, **limits}, options.quick, rounds)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        answer_turn(take_turn)
    else:
        main()
