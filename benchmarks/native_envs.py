"""How many steps per second do environments in C make when they are stepped from Python, compared with bare C?

Each turn of a contender is a new process: it creates the environments, resets them, warms up, and measures a few
blocks. Actions are drawn before the clock starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.harness import BARE, Contender, Expectation, Report, Table, best, parser, race, ratio, threads_text
from benchmarks.turns import Effort, main_or_turn, measured, turn_in_new_process

CORES = len(os.sched_getaffinity(0))
BARE_ENVS = BARE.with_name("bare_envs")
ENVS = ["CartPole-v1", "Pendulum-v1"]
NUMPY = {"CartPole-v1": "gymnasium's NumPy"}
"""Gymnasium's own NumPy vector environments."""


# ------------------------------------------------------------------------------------------- in the process of a turn


def take_turn(request: dict[str, Any]) -> list[float]:
    env, num_envs = BUILDERS[request["builder"]](request["env"], request["num_envs"], **request["settings"])
    space = env.single_action_space if hasattr(env, "single_action_space") else env.action_space
    draw = np.random.default_rng(0)
    if hasattr(space, "n"):
        drawn = draw.integers(0, space.n, (64, num_envs))
    else:
        drawn = draw.uniform(space.low, space.high, (64, num_envs, *space.shape))
    actions, step = cycle(list(drawn.astype(space.dtype))), env.step

    def advance() -> int:
        step(next(actions))
        return num_envs

    return measured(advance, env.close, [request["warm_up"], *[request["seconds"]] * request["blocks"]])


def memlane(name: str, num_envs: int, **settings: Any) -> tuple[Any, int]:
    import memlane.native

    env = memlane.native.make(name, num_envs=num_envs, **settings)
    env.reset(seed=0)
    return env, num_envs


def gymnasium_numpy(name: str, num_envs: int) -> tuple[Any, int]:
    import gymnasium

    env = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="vector_entry_point")
    env.reset(seed=0)
    return env, num_envs


def envpool(name: str, num_envs: int, threads: int) -> tuple[Any, int]:
    import envpool

    env = envpool.make_gymnasium(name, num_envs=num_envs, num_threads=threads)
    env.reset()
    return env, num_envs


BUILDERS: dict[str, Callable[..., tuple[Any, int]]] = {
    "memlane": memlane,
    "gymnasium_numpy": gymnasium_numpy,
    "envpool": envpool,
}


# ------------------------------------------------------------------------------------------ in the process of the run


def bare_loops(name: str, num_envs: int, threads: int, effort: Effort) -> list[float]:
    command = [str(BARE_ENVS), name, str(num_envs), str(threads), str(effort.seconds), str(effort.blocks + 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [float(line) for line in done.stdout.split()][1:]


def contenders(name: str, num_envs: int, effort: Effort) -> list[Contender]:
    def in_turn(builder: str, **settings: Any) -> Callable[[], list[float]]:
        request = {"builder": builder, "env": name, "num_envs": num_envs, "settings": settings} | vars(effort)
        return lambda: turn_in_new_process(__file__, request)

    def bare(threads: int) -> Callable[[], list[float]]:
        return lambda: bare_loops(name, num_envs, threads, effort)

    threads = sorted({1, CORES})
    no_bare = "" if os.access(BARE_ENVS, os.X_OK) else "build/native/bare_envs is not built (make build/native/.built)"
    no_envpool = "" if importlib.util.find_spec("envpool") else "envpool is not installed"
    rows = [
        Contender("memlane", "memlane", in_turn("memlane")),
        *[
            Contender(f"memlane, {threads_text(count)}", "memlane", in_turn("memlane", num_threads=count))
            for count in threads
        ],
        Contender("memlane, copy=True", "memlane", in_turn("memlane", copy=True)),
        *[
            Contender(f"envpool, {threads_text(count)}", "peer", in_turn("envpool", threads=count), no_envpool)
            for count in threads
        ],
        *[Contender(f"bare C, {threads_text(count)}", "limit", bare(count), no_bare) for count in threads],
    ]
    if name in NUMPY:
        rows.append(Contender(NUMPY[name], "peer", in_turn("gymnasium_numpy")))
    return rows


def expect(report: Report, name: str, num_envs: int, table: Table) -> None:
    where = f"{num_envs} {name}"
    rows = table.contenders
    ours, one_thread = table["memlane"], table["memlane, 1 thread"]
    if num_envs == 64:
        report.expect(
            Expectation(f"{where}: the automatic choice of threads is at least as fast as one thread, within 5 %",
                        ratio(one_thread, ours), at_least=0.95),
        )  # fmt: skip
    if num_envs >= 1024:
        for threads in sorted({1, CORES}):
            report.expect(
                Expectation(f"{where}: at least 80% of the bare C loop, {threads_text(threads)}",
                            ratio(best(rows, f"bare C, {threads_text(threads)}", "limit"),
                                  table[f"memlane, {threads_text(threads)}"]), at_least=0.8),
            )  # fmt: skip
    if num_envs == 1024:
        if name in NUMPY:
            report.expect(Expectation(f"{where}: at least 10 times as fast as {NUMPY[name]} vector environment",
                                      ratio(best(rows, NUMPY[name], "peer"), ours), at_least=10))  # fmt: skip
        report.expect(Expectation(f"{where}: at least 50 times as fast as envpool's best",
                                  ratio(best(rows, "envpool", "peer"), ours), at_least=50))  # fmt: skip


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--envs", nargs="*", choices=ENVS, default=ENVS, help="environments (default: all)")
    arguments.add_argument("--num-envs", nargs="*", type=int, help="environments in a batch (default: 64 1024 4096)")
    options = arguments.parse_args()
    effort = Effort(2, 0.02, 0.02) if options.quick else Effort(5, 0.2, 0.3)
    rounds = options.rounds or (2 if options.quick else 7)
    report = Report("native_envs", options, peers=["gymnasium", "envpool"])
    for name in options.envs:
        for num_envs in options.num_envs or ([64] if options.quick else [64, 1024, 4096]):
            rows = contenders(name, num_envs, effort)
            race(rows, rounds)
            table = Table(f"{num_envs} {name}", "memlane", rows, "one environment step", rate="steps/s")
            expect(report, name, num_envs, report.add(table))
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
