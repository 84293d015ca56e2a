"""How fast is a vector environment in the loop that it is used in: beside a torch policy, and in whole programs?

The first tables are a loop of a policy and a step: a multilayer perceptron with two hidden layers of 64 units chooses
the actions, on torch's default threads and on one. The others are whole programs. Each turn is a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.entrants import missing
from benchmarks.harness import Contender, Expectation, Report, Table, best, parser, race, ratio
from benchmarks.programs import cleanrl_ppo, sb3_dqn, sb3_ppo, torchrl_collector, vector_env
from benchmarks.turns import Effort, main_or_turn, measured, turn_in_new_process
from benchmarks.vector_workloads import missing_for

CART_POLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
LOOPS = [(CART_POLE, 1), (CART_POLE, 8), (CART_POLE, 16), (CART_POLE, 64), (CHEETAH, 8)]
"""Environments of the tables with a policy."""
DEFAULT = "default threads"


# ------------------------------------------------------------------------------------------- in the process of a turn


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


TURNS: dict[str, Callable[[dict[str, Any]], list[float]]] = {
    function.__name__: function for function in (policy_loop, sb3_ppo, sb3_dqn, cleanrl_ppo, torchrl_collector)
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


MEMLANE, CALLER = Entry("memlane", "memlane", {}), Entry("memlane, num_workers=0", "memlane", {"num_workers": 0})
SYNC, ASYNC = Entry("gymnasium Sync", "Sync", {}), Entry("gymnasium Async", "Async", {})


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
    rows = contenders("policy_loop", workload, num_envs, [MEMLANE, CALLER, SYNC, ASYNC], effort, threads=threads)
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


@dataclass
class Program:
    """A table of a whole program. ``entries`` begins with the one that the expectation is about."""

    title: str
    turn: str
    workload: str
    num_envs: int
    entries: Sequence[Entry]
    least: float = 1.0
    request: dict[str, Any] = field(default_factory=dict)


def programs(quick: bool) -> dict[str, list[Program]]:
    """The programs by the name of their tables."""
    no_sb3, no_torchrl = missing("stable_baselines3"), missing("torchrl")
    caller = Entry("SB3VecEnv, num_workers=0", "memlane", {"num_workers": 0}, no_sb3)
    sb3 = [
        Entry("SB3VecEnv", "memlane", {}, no_sb3),
        caller,
        Entry("DummyVecEnv", "Dummy", {}, no_sb3),
        Entry("SubprocVecEnv", "Subproc", {}, no_sb3),
    ]
    few = sorted(sb3, key=lambda entry: entry is not caller)  # for few environments we recommend num_workers=0
    torchrl = [
        *(replace(entry, skip=no_torchrl) for entry in (MEMLANE, CALLER, SYNC, ASYNC)),
        Entry("torchrl SerialEnv", "SerialEnv", {}, no_torchrl),
        Entry("torchrl ParallelEnv", "ParallelEnv", {}, no_torchrl),
    ]
    sizes = [(CART_POLE, 4, 1.0)] if quick else [(CART_POLE, 8, 1.0), (CHEETAH, 8, 1.3)]
    return {
        "sb3": [
            Program(f"Stable-Baselines3's PPO, {num_envs} {workload}", "sb3_ppo", workload, num_envs, sb3, least,
                    {"n_steps": 64 if quick else 256})
            for workload, num_envs, least in sizes
        ],
        "cleanrl": [
            Program(f"PPO in one file, as CleanRL's, {num_envs} {CART_POLE}", "cleanrl_ppo", CART_POLE, num_envs,
                    [CALLER, MEMLANE, SYNC, ASYNC] if num_envs < 8 else [MEMLANE, CALLER, SYNC, ASYNC])
            for num_envs in ([4] if quick else [4, 16])
        ],
        "dqn": [
            Program(f"Stable-Baselines3's DQN, 1 {CART_POLE}", "sb3_dqn", CART_POLE, 1, few,
                    request={"steps": 200 if quick else 1000})
        ],
        "torchrl": [
            Program(f"TorchRL's collector, {num_envs} {workload}", "torchrl_collector", workload, num_envs, torchrl)
            for workload, num_envs in ([(CART_POLE, 4)] if quick else [(CART_POLE, 8), (CART_POLE, 32)])
        ],
    }  # fmt: skip


def add_program(report: Report, program: Program, effort: Effort, rounds: int) -> None:
    rows = contenders(program.turn, program.workload, program.num_envs, program.entries, effort, **program.request)
    race(rows, rounds)
    ours, least = rows[0], program.least
    report.add(Table(program.title, ours.name, rows, "an environment step of the program", rate="steps/s"))
    report.expect(Expectation(f"{program.title}: {ours.name} at least {least} times as fast as the best alternative",
                              ratio(best(rows, kind="peer"), ours), at_least=least))  # fmt: skip


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    tables = ["policy", *programs(quick=True)]
    arguments.add_argument("--tables", nargs="*", choices=tables, default=tables,
                           help="tables to measure (default: all)")  # fmt: skip
    options = arguments.parse_args()
    quick = options.quick
    effort = Effort(2, 0.05, 0.05) if quick else Effort(3, 0.5, 0.7)
    rounds = options.rounds or (2 if quick else 5)
    report = Report("real_loop", options, peers=["gymnasium", "mujoco", "torch", "stable-baselines3", "torchrl"])
    if "policy" in options.tables:
        for workload, num_envs in LOOPS[1:2] if quick else LOOPS:
            for threads in (None, 1):
                add_loop(report, workload, num_envs, threads, effort, rounds)
    for name, each in programs(quick).items():
        if name in options.tables:
            for program in each:
                add_program(report, program, effort, rounds)
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
