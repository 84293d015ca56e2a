"""Run storms in turns, each with a seed of its own, and print what they found, as a table and as JSON.

    python -m tests.chaos --seconds 60            one minute
    python -m tests.chaos --storm ring --seed 7   one storm again, with its seed

A seed repeats the settings of a storm and its plans. Where a fault hits depends on the machine's scheduling too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, fields
from pathlib import Path

from memlane import _native
from memlane.core import SIGNAL, Segment
from tests.chaos.storm import Counts
from tests.chaos.storms import STORMS
from tests.support.kills import Template

ROUND = 3.0
"""Seconds of one storm."""
PID_NAMESPACE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
COLUMNS = [field.name for field in fields(Counts) if field.name != "failures"]


def main() -> int:
    options = parse()
    if not hasattr(_native, "arm_fault"):
        print("memlane's extension has no fault points: run `make chaos`, or build with -DMEMLANE_FAULTS=ON")
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    names = options.storm or list(STORMS)
    print(f"first seed {seed}", flush=True)
    namespaces = options.pid_namespaces and can_unshare()
    if not namespaces:
        print("all processes are in one pid namespace")
    totals = {name: Counts() for name in names}
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/dev/shm"))
    os.environ["MEMLANE_SHM_DIR"] = str(folder)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # for the interpreters that are started from here
    warnings.filterwarnings("ignore", ".*WARN: ")  # each restart of a worker is one
    begin, rounds = time.monotonic(), 0
    try:
        templates = [Template(folder)]
        if namespaces:
            templates.append(Template(folder, prefix=PID_NAMESPACE))
        warm_up()
        while rounds == 0 or time.monotonic() - begin < options.seconds:
            name = names[rounds % len(names)]
            round_seed = seed + rounds // len(names)
            # Every other time, half of the processes live in a pid namespace of their own.
            homes = templates[: 1 + round_seed % 2]
            counts = one_round(name, homes, round_seed, options.round, folder)
            totals[name] += counts
            rounds += 1
            if counts.faults():
                print(f"{name}: {asdict(counts)}\n    repeat: {repeat_command(name, round_seed, options)}", flush=True)
                if options.stop_at_first:
                    break
        for template in templates:
            template.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(totals, seed, time.monotonic() - begin, rounds, options.json)
    return 1 if any(counts.faults() for counts in totals.values()) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Storms of faults with checked results.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default: 60)")
    parser.add_argument("--round", type=float, default=ROUND, help=f"seconds of one storm (default: {ROUND:g})")
    parser.add_argument("--seed", type=int, help="seed of the first round (default: random)")
    parser.add_argument("--storm", action="append", choices=list(STORMS), help="only this storm; may be repeated")
    parser.add_argument("--stop-at-first", action="store_true", help="end after the first storm that found something")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument(
        "--pid-namespaces", action=argparse.BooleanOptionalAction, default=True,
        help="in storms with an odd seed, half of the processes live in a pid namespace of their own (default: yes)",
    )  # fmt: skip
    return parser.parse_args()


def one_round(name: str, templates: list[Template], seed: int, seconds: float, folder: Path) -> Counts:
    """One storm, and what it left: names in the directory, descriptors here."""
    descriptors = open_descriptors()
    try:
        counts = STORMS[name](templates, random.Random(f"{name} {seed}"), seconds, folder)
    except Exception as error:
        for template in templates:
            template.kill_all()
        counts = Counts(failures=[f"{type(error).__name__}: {error}"])
    counts.leaks += len(list(folder.iterdir())) + max(0, open_descriptors() - descriptors)
    return counts


def warm_up() -> None:
    """What memlane keeps open for good, such as its fork server, is open before descriptors are counted."""
    from memlane.vector import AsyncVectorEnv
    from tests.support.failing_envs import makers

    AsyncVectorEnv(makers(1)).close()
    Segment.create({"x": (SIGNAL, ())}).close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def repeat_command(name: str, seed: int, options: argparse.Namespace) -> str:
    command = f"{sys.executable} -m tests.chaos --storm {name} --seed {seed} --round {options.round:g} --seconds 0"
    return command + ("" if options.pid_namespaces else " --no-pid-namespaces")


def can_unshare() -> bool:
    try:
        return subprocess.run([*PID_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def report(totals: dict[str, Counts], seed: int, seconds: float, rounds: int, file: Path | None) -> None:
    print(f"{rounds} storms in {seconds:.0f} s, first seed {seed}")
    print(f"{'':10}" + "".join(f"{name.replace('_', ' '):>14}" for name in COLUMNS))
    everything = Counts()
    for name, counts in totals.items():
        everything += counts
        print(row(name, counts))
    print(row("all", everything))
    result = {"seed": seed, "seconds": round(seconds, 1), "rounds": rounds}
    text = json.dumps({**result, "all": asdict(everything), **{name: asdict(each) for name, each in totals.items()}})
    if file is not None:
        file.write_text(text + "\n")
    else:
        print(text)


def row(name: str, counts: Counts) -> str:
    values = [getattr(counts, column) for column in COLUMNS]
    return f"{name:10}" + "".join(f"{value:14.2f}" if isinstance(value, float) else f"{value:14,}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
