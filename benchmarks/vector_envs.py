"""How many environment steps per second does a vector environment make, compared with plain loops?

Each turn of a contender is a new process: it creates the vector environment, resets it, warms up, and measures a few
blocks. The actions are drawn before the clock starts. Steps and resets of each environment are counted: most libraries
reset instead of a step, and for those that reset within a step the resets are added.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Contender, Expectation, Kind, Report, Table, best, parser, race, ratio
from benchmarks.turns import Effort, in_new_process, main_or_turn, measured, turn_in_new_process
from benchmarks.vector_workloads import (
    MAKE,
    SLEEPS,
    Mixed,
    Sleeps,
    draw_actions,
    env_fns,
    make,
    missing_for,
    plain_loops,
)

CORES = len(os.sched_getaffinity(0))
SLEEPERS = 64
"""Environments of the sleeping workloads, each in its own worker where a library allows it."""
WORKERS = (1, 2, 4, 8, 16, 32, 64)
HALF_CHEETAH_INFOS = ["x_position", "x_velocity", "reward_forward", "reward_ctrl"]
LIBRARIES = {
    "memlane": ["memlane.vector"],
    "gymnasium": ["gymnasium"],
    "stable-baselines3": ["stable_baselines3"],
    "tianshou": ["tianshou"],
    "pufferlib": ["pufferlib", "gym", "psutil"],
    "torchrl": ["torchrl"],
    "envpool": ["envpool"],
}
"""The modules that each library needs."""


# ------------------------------------------------------------------------------- in the process of a turn: contenders


@dataclass
class Work:
    workload: str
    num_envs: int

    @property
    def env_fns(self) -> list[Callable[[], Any]]:
        return env_fns(self.workload, self.num_envs)

    def actions(self, num_envs: int | None = None) -> list[Any]:
        return draw_actions(self.workload, num_envs or self.num_envs)


@dataclass
class Driver:
    """A vector environment after its reset. ``advance`` makes one call and returns its number of steps and resets."""

    advance: Callable[[], int]
    close: Callable[[], object]


def memlane(work: Work, workers: int, infos: Sequence[str] = (), **settings: Any) -> Driver:
    """Step all environments. ``infos`` are declared, so that they are not pickled."""
    from memlane.vector import AsyncVectorEnv

    info_spec = dict.fromkeys(infos, ("float64", ()))
    env = AsyncVectorEnv(work.env_fns, num_workers=workers, info_spec=info_spec or None, **settings)
    env.reset(seed=0)
    return _stepping(env, work)


def memlane_first_ready(work: Work, workers: int, min_envs: int) -> Driver:
    """Send the next actions to the environments that are ready, without waiting for the slowest."""
    from memlane.vector import AsyncVectorEnv

    env = AsyncVectorEnv(work.env_fns, num_workers=workers)
    env.reset(seed=0)
    actions = cycle(work.actions())
    env.send(next(actions), np.arange(work.num_envs))

    def advance() -> int:
        *_, env_ids = env.recv(min_envs)
        env.send(next(actions)[env_ids], env_ids)
        return len(env_ids)

    return Driver(advance, env.close)


def gymnasium_sync(work: Work) -> Driver:
    from gymnasium.vector import SyncVectorEnv

    env = SyncVectorEnv(work.env_fns, copy=False)
    env.reset(seed=0)
    return _stepping(env, work)


def gymnasium_async(work: Work) -> Driver:
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv(work.env_fns, shared_memory=True, copy=False)
    env.reset(seed=0)
    return _stepping(env, work)


def _stepping(env: Any, work: Work) -> Driver:
    """Step in gymnasium's way: an environment resets instead of a step."""
    actions, step, num_envs = cycle(work.actions()), env.step, work.num_envs

    def advance() -> int:
        step(next(actions))
        return num_envs

    return Driver(advance, env.close)


def stable_baselines3(work: Work, *, processes: bool) -> Driver:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    # fork: its default would import torch once per environment.
    env = SubprocVecEnv(work.env_fns, start_method="fork") if processes else DummyVecEnv(work.env_fns)
    env.reset()
    actions, step, num_envs = cycle(work.actions()), env.step, work.num_envs

    def advance() -> int:
        _, _, dones, _ = step(next(actions))
        return num_envs + int(np.count_nonzero(dones))

    return Driver(advance, env.close)


def tianshou(work: Work) -> Driver:
    from tianshou.env import ShmemVectorEnv

    # It requires the type that gymnasium's Dict used for its spaces before version 1.
    Mixed.observation_space.spaces = OrderedDict(Mixed.observation_space.spaces)
    env = ShmemVectorEnv(work.env_fns)
    env.reset()
    actions, step, num_envs = cycle(work.actions()), env.step, work.num_envs

    def advance() -> int:
        # It does not reset automatically.
        _, _, terminated, truncated, _ = step(next(actions))
        (done,) = np.nonzero(terminated | truncated)
        if len(done):
            env.reset(done)
        return num_envs + len(done)

    return Driver(advance, env.close)


def tianshou_first_ready(work: Work, wait_num: int) -> Driver:
    from tianshou.env import ShmemVectorEnv

    env = ShmemVectorEnv(work.env_fns, wait_num=wait_num)
    env.reset()
    actions = cycle(work.actions())
    ready = np.arange(work.num_envs)

    def advance() -> int:
        nonlocal ready
        *_, infos = env.step(next(actions)[ready], ready)
        ready = np.array([info["env_id"] for info in infos])
        return len(ready)

    return Driver(advance, env.close)


def pufferlib(work: Work, backend: str, batches: int = 1, **settings: Any) -> Driver:
    """Step all environments. With ``batches`` above 1, some workers step while the caller has the results of others."""
    import pufferlib.vector
    from pufferlib.emulation import GymnasiumPufferEnv

    def creator(buf: Any = None, seed: int = 0) -> Any:
        return GymnasiumPufferEnv(env=make(work.workload, seed), buf=buf, seed=seed)

    batch = work.num_envs // batches
    if backend == "Multiprocessing":
        # Without overwork=True it refuses more workers than cores.
        settings |= {"batch_size": batch, "overwork": True}
    env = pufferlib.vector.make(creator, backend=getattr(pufferlib.vector, backend), num_envs=work.num_envs, **settings)
    env.async_reset(0)
    env.recv()
    dtype = env.single_action_space.dtype if env.single_action_space.shape else np.int32
    actions = cycle([action.astype(dtype) for action in work.actions(batch)])
    send, receive = env.send, env.recv

    def advance() -> int:
        send(next(actions))
        receive()
        return batch

    return Driver(advance, env.close)


def torchrl(work: Work, workers: int) -> Driver:
    """With fewer workers than environments, each has a ``SerialEnv``."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv

    torch.set_num_threads(1)
    share = work.num_envs // workers

    def wrapped(index: int) -> Callable[[], Any]:
        return lambda: GymWrapper(make(work.workload, index), categorical_action_encoding=True)

    def serial(worker: int) -> Callable[[], Any]:
        return lambda: SerialEnv(share, [wrapped(worker * share + index) for index in range(share)])

    one_each = share == 1
    makers = [wrapped(worker) if one_each else serial(worker) for worker in range(workers)]
    env = ParallelEnv(workers, makers, mp_start_method="fork")
    shape = (workers,) if one_each else (workers, share)
    actions = cycle([torch.from_numpy(action.reshape(*shape, *action.shape[1:])) for action in work.actions()])
    now = env.reset()

    def advance() -> int:
        nonlocal now
        now["action"] = next(actions)
        then, now = env.step_and_maybe_reset(now)
        return work.num_envs + int(then["next", "done"].sum())

    return Driver(advance, env.close)


def envpool(work: Work, threads: int) -> Driver:
    import envpool

    env = envpool.make_gymnasium(work.workload, num_envs=work.num_envs, num_threads=threads)
    env.reset()
    dtype = env.action_space.dtype
    actions, step = cycle([action.astype(dtype) for action in work.actions()]), env.step

    def advance() -> int:
        step(next(actions))
        return work.num_envs

    return Driver(advance, env.close)


def slowest_sleep(work: Work) -> Driver:
    """The limit of waiting for all environments: the longest of their sleeps, in one process."""
    sleepers = [Sleeps(SLEEPS[work.workload], seed) for seed in range(work.num_envs)]

    def advance() -> int:
        time.sleep(max(sleeper.draw() for sleeper in sleepers))
        return work.num_envs

    return Driver(advance, lambda: None)


BUILDERS: dict[str, Callable[..., Driver]] = {
    function.__name__: function
    for function in (memlane, memlane_first_ready, gymnasium_sync, gymnasium_async, stable_baselines3, tianshou,
                tianshou_first_ready, pufferlib, torchrl, envpool, slowest_sleep)
}  # fmt: skip


def take_turn(request: dict[str, Any]) -> list[float]:
    """Nanoseconds per step, for each block after some time to warm up."""
    seconds = [request["warm_up"], *[request["seconds"]] * request["blocks"]]
    work = Work(request["workload"], request["num_envs"])
    if request["builder"] == "plain_loops":
        return plain_loops(work.workload, work.num_envs, seconds=seconds, **request["settings"])[1:]
    driver = BUILDERS[request["builder"]](work, **request["settings"])
    return measured(driver.advance, driver.close, seconds)


# ------------------------------------------------------------------------------------------ in the process of the run


@dataclass
class Entry:
    """A contender without a workload."""

    name: str
    builder: str
    settings: dict[str, Any]
    kind: Kind = "peer"
    library: str = ""
    skip: str = ""


def turn(entry: Entry, work: Work, effort: Effort) -> list[float]:
    request = {"builder": entry.builder, "settings": entry.settings} | vars(work) | vars(effort)
    return turn_in_new_process(__file__, request)


def contenders(entries: Sequence[Entry], work: Work, effort: Effort) -> list[Contender]:
    def measure(entry: Entry) -> Callable[[], list[float]]:
        return lambda: turn(entry, work, effort)

    no_workload = missing_for(work.workload)
    return [Contender(entry.name, entry.kind, measure(entry), skip=no_workload or entry.skip) for entry in entries]


def missing(library: str) -> str:
    """Why a library cannot be measured; empty if it can."""
    for module in LIBRARIES[library]:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing
            spec = None
        if not spec:
            return f"{module} is not installed"
    return ""


def entries_for(work: Work, options: Any) -> list[Entry]:
    """All libraries at the best settings that we know for this number of environments and cores."""
    sleeps = work.workload in SLEEPS
    # One worker per core with the same number of environments each; one worker per environment if they sleep.
    cores = max(count for count in range(1, CORES + 1) if work.num_envs % count == 0)
    workers = work.num_envs if sleeps else cores
    few = max(1, work.num_envs // 8)
    parallel = {"backend": "Multiprocessing"}
    halves = "" if cores % 2 == 0 else "needs an even number of workers"
    entries = [
        Entry(f"memlane, {_workers(workers)}", "memlane", {"workers": workers}, "memlane", "memlane"),
        Entry(f"memlane, {_workers(workers)}, copy=False", "memlane", {"workers": workers, "copy": False}, "memlane",
              "memlane"),
        Entry("gymnasium Sync, copy=False", "gymnasium_sync", {}, library="gymnasium"),
        Entry("gymnasium Async, copy=False", "gymnasium_async", {}, library="gymnasium"),
        Entry("stable-baselines3 Dummy", "stable_baselines3", {"processes": False}, library="stable-baselines3"),
        Entry("stable-baselines3 Subproc, fork", "stable_baselines3", {"processes": True}, library="stable-baselines3"),
        Entry("tianshou Shmem", "tianshou", {}, library="tianshou"),
        Entry("pufferlib Serial", "pufferlib", {"backend": "Serial"}, library="pufferlib"),
        Entry(f"pufferlib, {_workers(cores)}", "pufferlib", parallel | {"num_workers": cores}, library="pufferlib"),
        Entry(f"pufferlib, {_workers(cores)}, half batches", "pufferlib",
              parallel | {"num_workers": cores, "batches": 2}, library="pufferlib", skip=halves),
        Entry(f"pufferlib, {_workers(cores)}, half batches, zero_copy=False", "pufferlib",
              parallel | {"num_workers": cores, "batches": 2, "zero_copy": False}, library="pufferlib", skip=halves),
    ]  # fmt: skip
    if work.workload == "HalfCheetah-v5":
        entries.append(Entry(f"memlane, {_workers(workers)}, infos declared", "memlane",
                          {"workers": workers, "infos": HALF_CHEETAH_INFOS}, "memlane", "memlane"))  # fmt: skip
    if cores > 1:
        # A core for the caller can be better where steps are short; with pufferlib also because its caller spins.
        one_less = max(count for count in range(1, cores) if work.num_envs % count == 0)
        entries += [
            Entry(f"pufferlib, {_workers(one_less)}", "pufferlib", parallel | {"num_workers": one_less},
                  library="pufferlib"),
            Entry(f"memlane, {_workers(one_less)}, copy=False", "memlane", {"workers": one_less, "copy": False},
                  "memlane", "memlane"),
        ]  # fmt: skip
    if sleeps:
        entries += [
            Entry(f"memlane, {_workers(workers)}, recv({few})", "memlane_first_ready",
                  {"workers": workers, "min_envs": few}, "memlane", "memlane"),
            Entry(f"tianshou Shmem, wait_num={few}", "tianshou_first_ready", {"wait_num": few}, library="tianshou"),
            Entry(f"pufferlib, {_workers(workers)}", "pufferlib", parallel | {"num_workers": workers},
                  library="pufferlib"),
            Entry("the slowest sleep alone", "slowest_sleep", {}, "limit"),
        ]  # fmt: skip
    kind_of_worker = "" if workers == work.num_envs else f" of Serial({work.num_envs // workers})"
    entries.append(Entry(f"torchrl Parallel({workers}){kind_of_worker}", "torchrl", {"workers": workers},
                      library="torchrl"))  # fmt: skip
    if work.workload in ("CartPole-v1", "HalfCheetah-v5"):
        entries.append(Entry(f"envpool, its own C++ environments, {cores} threads", "envpool", {"threads": cores},
                             "other", "envpool"))  # fmt: skip
    entries.append(Entry(_loops(workers), "plain_loops", {"processes": workers}, "limit"))
    return _requested(entries, options)


def _requested(entries: list[Entry], options: Any) -> list[Entry]:
    """Only the requested libraries; those that are missing are marked."""
    kept = [entry for entry in entries if not entry.library or entry.library in ("memlane", *options.peers)]
    names = [entry.name for entry in kept]
    kept = [entry for index, entry in enumerate(kept) if entry.name not in names[:index]]
    for entry in kept:
        entry.skip = (missing(entry.library) if entry.library else "") or entry.skip
    return kept


def _workers(count: int) -> str:
    return f"{count} worker" + ("s" if count > 1 else "")


def _loops(count: int) -> str:
    return f"plain loops, {count} process" + ("es" if count > 1 else "")


# ------------------------------------------------------------------------------------------------------------- tables


def reference(contenders: Sequence[Contender]) -> str:
    """The first contender that was measured: memlane, unless it is missing."""
    return next((row.name for row in contenders if row.rounds), contenders[0].name)


def expect_steps(report: Report, work: Work, table: Table) -> None:
    """Add the expectations for a workload and a number of environments. Where a text does not say otherwise, memlane
    has its defaults, with copies; against contenders without copies its best row counts."""
    where = f"{work.workload} with {work.num_envs} environments"
    rows = table.contenders
    default = rows[0]
    stepping = [row for row in rows if "recv(" not in row.name and "wait_num" not in row.name]
    limit = best(rows, kind="limit")
    if work.workload in ("CartPole-v1", "HalfCheetah-v5"):
        for num_envs, share in ((64, 0.65), (256, 0.75)):
            if work.num_envs == num_envs:
                report.expect(Expectation(f"{where}: at least {share:.0%} of the speed of {_limit_name(limit)}",
                                          ratio(limit, default), at_least=share))  # fmt: skip
    least = {"CartPole-v1": 15, "noop": 50}.get(work.workload)
    if least and work.num_envs == 64:
        report.expect(Expectation(f"{where}: at least {least} times as fast as gymnasium Async",
                                  ratio(best(rows, "gymnasium Async"), default), at_least=least))  # fmt: skip
    ours = best(stepping, "memlane")
    report.expect(
        Expectation(f"{where}: faster than gymnasium Sync", ratio(best(rows, "gymnasium Sync"), ours), at_least=1),
        Expectation(f"{where}: faster than pufferlib's best", ratio(best(rows, "pufferlib"), ours), at_least=1),
    )
    if work.workload in SLEEPS:
        peer = best(stepping, kind="peer")
        slowest = best(rows, "the slowest sleep")
        report.expect(
            Expectation(f"{where}: with send and recv at least 3 times as fast as the best peer with step",
                        ratio(peer, best([row for row in rows if "recv(" in row.name])), at_least=3),
            Expectation(f"{where}: with step at least 3 times as fast as the best peer with step", ratio(peer, ours),
                        at_least=3),
            Expectation(f"{where}: step adds at most a third of what the best peer adds to the slowest sleep",
                        _added(ours, peer, slowest), at_most=1 / 3),
        )  # fmt: skip


def _added(ours: Contender | None, peer: Contender | None, limit: Contender | None) -> float | None:
    """Our time as a share of a peer's, without the limit that both have to wait for."""
    if not (ours and peer and limit):
        return None
    return (ours.median - limit.median) / (peer.median - limit.median)


def _limit_name(limit: Contender | None) -> str:
    return limit.name if limit else "plain loops"


def add_workers_table(report: Report, options: Any, effort: Effort, rounds: int, num_envs: int) -> None:
    """More workers than cores must not cost much: a common default is one worker per environment."""
    work = Work("CartPole-v1", num_envs)
    counts = [count for count in WORKERS if count <= num_envs]
    parallel = {"backend": "Multiprocessing"}
    entries = [
        Entry(f"memlane, {_workers(count)}", "memlane", {"workers": count}, "memlane", "memlane") for count in counts
    ]
    entries += [
        Entry(f"pufferlib, {_workers(count)}", "pufferlib", parallel | {"num_workers": count}, library="pufferlib")
        for count in counts
        if count <= 4 * CORES
    ]
    entries.append(Entry("gymnasium Async, copy=False", "gymnasium_async", {}, library="gymnasium"))
    rows = contenders(_requested(entries, options), work, effort)
    race(rows, rounds)
    table = Table(f"{num_envs} CartPole-v1 by number of workers", reference(rows), rows, "one step", rate="steps/s")
    report.add(table)
    ours = [row for row in rows if row.kind == "memlane" and row.rounds]
    worst = max(ours, key=lambda row: row.median, default=None)
    report.expect(
        Expectation(
            f"{num_envs} CartPole-v1: no number of workers takes more than 3 times as long as the best number",
            ratio(worst, best(ours)),
            at_most=3,
        ),
        Expectation(
            f"{num_envs} CartPole-v1: every number of workers is faster than gymnasium Async",
            ratio(best(rows, "gymnasium Async"), worst),
            at_least=1,
        ),
    )


START = """
import time
from functools import partial
import gymnasium
{imports}
imported = time.monotonic_ns()
env = {make}
env.reset(seed=0)
ready = time.monotonic_ns()
env.close()
with open("ready", "w") as file:
    file.write(f"{{imported}} {{ready}}")
"""


def start_up(code: str, *, with_imports: bool) -> list[float]:
    """Nanoseconds until all environments are reset, from the start of a new Python or from after its imports. Closing
    does not count."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic_ns()
        in_new_process([sys.executable, "-c", code], folder)
        imported, ready = map(int, Path(folder, "ready").read_text().split())
        return [float(ready - (begin if with_imports else imported))]


def add_start_tables(report: Report, options: Any, rounds: int, num_envs: int) -> None:
    # As pip does for every package that it installs; memlane may run from its sources.
    if spec := importlib.util.find_spec("memlane"):
        for folder in spec.submodule_search_locations or []:
            compileall.compile_dir(folder, quiet=1)
    fns = f'[partial(gymnasium.make, "CartPole-v1")] * {num_envs}'
    workers = min(CORES, num_envs)
    no_memlane, no_gymnasium = missing("memlane"), "" if "gymnasium" in options.peers else "not requested"
    import_ours = "from memlane.vector import AsyncVectorEnv"

    def add_table(title: str, operation: str, with_imports: bool) -> Sequence[Contender]:
        def starter(make: str, imports: str = "") -> Callable[[], list[float]]:
            return lambda: start_up(START.format(imports=imports, make=make), with_imports=with_imports)

        def ours(name: str, arguments: str) -> Contender:
            return Contender(
                f"memlane, {name}", "memlane", starter(f"AsyncVectorEnv({fns}, {arguments})", import_ours), no_memlane
            )

        def theirs(name: str, kind: Kind) -> Contender:
            return Contender(
                f"gymnasium {name}", kind, starter(f"gymnasium.vector.{name}VectorEnv({fns})"), no_gymnasium
            )

        rows = [
            ours(_workers(workers), f"num_workers={workers}"),
            ours(f"{_workers(workers)}, forked", f"num_workers={workers}, context='fork'"),
            ours(_workers(num_envs), f"num_workers={num_envs}"),
            theirs("Async", "peer"),
            theirs("Sync", "limit"),
        ]
        race(rows, rounds)
        report.add(Table(title, reference(rows), rows, operation))
        return rows

    add_table(f"starting {num_envs} CartPole-v1", "a new Python process until the first reset", with_imports=True)
    rows = add_table(
        f"making {num_envs} CartPole-v1", "all that follows the imports, until the first reset", with_imports=False
    )
    report.expect(
        Expectation(
            f"{num_envs} CartPole-v1 are created in less than a third of the time of gymnasium Async",
            ratio(rows[0], rows[3]),
            at_most=1 / 3,
        )
    )
    report.expect(
        Expectation(
            "the same with Gymnasium's start method, fork (memlane's default is a fork server)",
            ratio(rows[1], rows[3]),
            at_most=1 / 3,
        )
    )


# --------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--workload", nargs="*", choices=list(MAKE), default=list(MAKE), help="environments to step (default: all)"
    )
    arguments.add_argument("--num-envs", nargs="*", type=int, help="number of environments (default: 8 64 256)")
    arguments.add_argument("--peers", nargs="*", choices=list(LIBRARIES), default=list(LIBRARIES),
                           help="libraries to compare with memlane (default: all)")  # fmt: skip
    arguments.add_argument("--tables", nargs="*", choices=["steps", "workers", "start"],
                           default=["steps", "workers", "start"], help="tables to measure (default: all)")  # fmt: skip
    options = arguments.parse_args()
    effort = Effort(2, 0.02, 0.02) if options.quick else Effort(3, 0.4, 0.4)
    rounds = options.rounds or (2 if options.quick else 5)
    sizes = options.num_envs or ([4] if options.quick else [8, 64, 256])
    default_envs = max(sizes) if options.quick else 64
    packages = ["gymnasium", "torch", "mujoco", *(name for name in LIBRARIES if name not in ("memlane", "gymnasium"))]
    report = Report("vector_envs", options, peers=packages)

    if "steps" in options.tables:
        for workload in options.workload:
            for num_envs in [min(SLEEPERS, default_envs)] if workload in SLEEPS else sizes:
                work = Work(workload, num_envs)
                rows = contenders(entries_for(work, options), work, effort)
                race(rows, rounds)
                title = f"{workload}, {num_envs} environments"
                table = report.add(Table(title, reference(rows), rows, "one environment step", rate="steps/s"))
                expect_steps(report, work, table)
    if "workers" in options.tables:
        add_workers_table(report, options, effort, rounds, default_envs)
    if "start" in options.tables:
        add_start_tables(report, options, rounds, default_envs)
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
