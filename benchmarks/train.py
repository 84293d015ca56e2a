"""How long until a policy is trained, and how many training steps per second are made?

Each turn is a new process with a seed of its own. The clock runs from the start of learning until the mean return of
the last 100 episodes is 475, looked at after each rollout: memlane's collectors start within it, nobody's imports do.
The whole process has a table of its own.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # behind the standard library: this folder has a signal.py

import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness import Contender, Expectation, Kind, Report, Table, best, parser, race, ratio, threads_text
from turns import answer_turn, turn_in_new_process

CORES = len(os.sched_getaffinity(0))
CART_POLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
TURN_LIMIT = 90.0
"""Seconds after which a turn gives up: several times what the slowest needs, unless its threads get in each other's
way. ``turns`` ends the process of a turn later."""
UNSOLVED = 10
"""A run that never solved its task counts as so many times what it used: the median stays what it is, and no file has
infinite numbers in it. Algorithm configuration calls it PAR10."""


# ------------------------------------------------------------------------------------------- in the process of a turn


@dataclass
class Clock:
    """Looked at after every rollout, by everybody: is it over?"""

    goal: dict[str, Any]
    begin: float = 0.0
    first: tuple[float, int] | None = None
    """When the first rollout was in, and how many steps that were: training steps per second are counted from there."""
    last: tuple[float, int] = (0.0, 0)
    solved: bool = False

    def start(self) -> None:
        self.begin = time.monotonic()

    def over(self, env_steps: int, returns: Sequence[float]) -> bool:
        """``returns`` are those of the last episodes, as many as the goal says at most."""
        self.last = now, _ = time.monotonic() - self.begin, env_steps
        self.first = self.first or self.last
        goal, target = self.goal, self.goal["target"]
        if target is not None and len(returns) >= goal["episodes"]:
            self.solved = statistics.fmean(returns) >= target
        return self.solved or env_steps >= goal["max_steps"] or now - self.first[0] >= goal["seconds"]

    def answer(self) -> list[float]:
        """Nanoseconds, environment steps, nanoseconds of one training step, and whether it was solved."""
        assert self.first is not None
        (early, few), (late, many) = self.first, self.last
        return [late * 1e9, many, (late - early) * 1e9 / max(many - few, 1), self.solved]


def take_turn(request: dict[str, Any]) -> list[float]:
    clock = Clock(request["goal"])
    TRAINERS[request["trainer"]](clock, request["seed"], **request["settings"])
    return clock.answer()


def memlane(clock: Clock, seed: int, env: str, backend: str, **settings: Any) -> None:
    """With the settings of its preset."""
    from memlane.train.appo import APPO
    from memlane.train.presets import preset_for
    from memlane.train.run import Metrics, Run

    preset = preset_for(env)
    told = {**preset.config, "seed": seed, **settings}
    with APPO(env, None, told, sim_backend=backend, num_envs=preset.num_envs) as runner:
        run = runner.run = Run("run", tensorboard=False)
        assert run.recent.maxlen is not None
        assert run.recent.maxlen >= clock.goal["episodes"]

        def should_stop(metrics: Metrics) -> str | None:
            return "over" if clock.over(metrics.env_steps, list(run.recent)[-clock.goal["episodes"] :]) else None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / preset.max_steps  # as memlane train does
        clock.start()
        runner.learn(max_iterations=10**9, save_interval=10**9)


def stable_baselines3(
    clock: Clock, seed: int, env: str, num_envs: int, threads: int, schedule_steps: int, processes: bool = False,
    normalize: bool = False, **settings: Any,
) -> None:  # fmt: skip
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    class Over(Exception):
        pass

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            episodes = [episode["r"] for episode in self.model.ep_info_buffer]
            if clock.over(self.num_timesteps, episodes):
                raise Over  # a callback can only stop in the middle of a rollout

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
    clock.start()
    with contextlib.suppress(Over):
        model.learn(schedule_steps, Look())
    envs.close()


TRAINERS: dict[str, Callable[..., None]] = {"memlane": memlane, "stable_baselines3": stable_baselines3}


# ------------------------------------------------------------------------------------------ in the process of the run

ZOO_CART_POLE = {
    "env": CART_POLE, "num_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98,
    "gae_lambda": 0.8, "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2,
}  # fmt: skip
"""rl-zoo's settings for PPO."""


def settings_of_our_preset(env: str) -> dict[str, Any]:
    """memlane's, in Stable-Baselines3's words: as many steps, epochs, rows and layers, observations normalised."""
    from memlane.train.presets import preset_for

    preset = preset_for(env)
    config = preset.config
    return {
        "env": env, "num_envs": preset.num_envs, "n_steps": config["steps"], "batch_size": config["minibatch"],
        "n_epochs": config["epochs"], "learning_rate": config["learning_rate"], "clip_range": 0.2, "normalize": True,
        "schedule_steps": preset.max_steps, "policy_kwargs": {"net_arch": list(config["network"]["hidden"])},
    }  # fmt: skip


@dataclass
class Entrant:
    """Somebody whose turns are measured in several ways; there is a contender for each."""

    name: str
    kind: Kind
    trainer: str
    settings: dict[str, Any]
    goal: dict[str, Any]
    skip: str = ""
    script: str = __file__
    """Whose process makes its turns."""
    answers: list[list[float]] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)
    """How long each turn's whole process took."""

    def measure(self) -> list[float]:
        request = {"trainer": self.trainer, "settings": self.settings, "goal": self.goal, "seed": len(self.answers)}
        begin = time.monotonic_ns()
        answer = turn_in_new_process(self.script, request)
        self.processes.append(time.monotonic_ns() - begin)
        self.answers.append(answer)
        return answer[:1]

    @property
    def unsolved(self) -> int:
        return sum(not solved for *_, solved in self.answers)

    def contender(self, value: Callable[[list[float], float], float], penalty: bool = True) -> Contender:
        """A row: a value of each turn, from its answer and the time of its process."""
        rounds = [
            [value(answer, whole) * (UNSOLVED if penalty and not answer[3] else 1)]
            for answer, whole in zip(self.answers, self.processes, strict=True)
        ]
        return Contender(self.name, self.kind, list, self.skip, rounds)


def run_turns(entrants: Sequence[Entrant], rounds: int, quick: bool) -> None:
    if not quick:  # once before: whoever is first would compile everybody's modules, in the table of whole processes
        for entrant in {one.trainer: one for one in entrants if not one.skip}.values():
            replace(entrant, goal={**entrant.goal, "max_steps": 1}, answers=[], processes=[]).measure()
    racing = [Contender(one.name, one.kind, one.measure, one.skip) for one in entrants]
    race(racing, rounds)
    for entrant, contender in zip(entrants, racing, strict=True):
        entrant.skip = contender.skip
        if entrant.skip:
            entrant.answers.clear()
            entrant.processes.clear()


class StepsTable(Table):
    """Counts environment steps instead of nanoseconds."""

    def text(self) -> str:
        reference, width = self[self.reference].median, max(len(one.name) for one in self.contenders)
        head = f"{'':{width}}  {'median':>9}  {'middle half':>20}  {'ratio':>6}"
        lines = [self.title, f"{self.operation}; ratio: steps / steps of {self.reference!r}", "-" * len(head), head]
        lines.append("-" * len(head))
        for one in sorted(self.contenders, key=lambda one: (bool(one.skip), one.median)):
            if one.skip:
                lines.append(f"  {one.name}: not measured, {one.skip}")
                continue
            low, high = one.middle_half
            half = f"{low:,.0f} .. {high:,.0f}"
            lines.append(f"{one.name:{width}}  {one.median:9,.0f}  {half:>20}  {one.median / reference:6.2f}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        return {**super().record(), "unit": "environment steps, in the place of nanoseconds"}


def missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


def cart_pole(report: Report, quick: bool, rounds: int) -> None:
    if quick:
        goal = {"target": 30.0, "episodes": 20, "max_steps": 20_000, "seconds": 20.0}
    else:
        goal = {"target": 475.0, "episodes": 100, "max_steps": 500_000, "seconds": TURN_LIMIT}
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
    until = report.add(
        Table(f"{what}: time", reference, [one.contender(lambda answer, _: answer[0]) for one in entrants],
              "learning, from its start until solved")
    )  # fmt: skip
    for one in entrants:
        if one.unsolved:
            print(f"  {one.name}: {one.unsolved} of {len(one.answers)} runs never solved it; they count as "
                  f"{UNSOLVED} times as long")  # fmt: skip
    report.add(
        Table(f"{what}: whole process", reference, [one.contender(lambda _, whole: whole) for one in entrants],
              "a new Python, imports and end included")
    )  # fmt: skip
    steps = report.add(
        StepsTable(f"{what}: environment steps", reference,
                   [one.contender(lambda answer, _: answer[1]) for one in entrants], "environment steps until solved")
    )  # fmt: skip
    report.add(
        Table(f"{CART_POLE}: training steps", reference,
              [one.contender(lambda answer, _: answer[2], penalty=False) for one in entrants],
              "one environment step, collected and learned from", rate="steps/s")
    )  # fmt: skip
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
    table = report.add(
        Table(f"{CHEETAH}: training steps", "memlane",
              [one.contender(lambda answer, _: answer[2], penalty=False) for one in entrants],
              "one environment step, collected and learned from", rate="steps/s")
    )  # fmt: skip
    report.expect(
        Expectation(f"{CHEETAH}: at least 2 times as many training steps per second as stable-baselines3",
                    ratio(best(table.contenders, "stable", "peer"), best(table.contenders, "memlane", "memlane")),
                    at_least=2)
    )  # fmt: skip


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--tasks", nargs="*", choices=["cartpole", "halfcheetah"], default=["cartpole", "halfcheetah"])
    options = made.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    report = Report("train", options, peers=["gymnasium", "mujoco", "stable-baselines3", "torch"])
    if "cartpole" in options.tasks:
        cart_pole(report, options.quick, rounds)
    if "halfcheetah" in options.tasks:
        cheetah(report, 0.2 if options.quick else 20.0, options.quick, rounds)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        answer_turn(take_turn)
    else:
        main()
