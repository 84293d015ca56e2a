"""Run the fuzz targets: ``python -m tests.fuzz --seconds 10`` or ``--runs 1000000``, each of them in its own process.

The native targets (``cpp/fuzz``) are run by libFuzzer, which keeps inputs that reach new code in ``build/fuzz/corpus``.
The Python targets change real files and messages: input ``i`` of seed ``s`` is always the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import faulthandler
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
NATIVE = ("signal", "ring", "weights", "replay", "scribbler")
PYTHON = {
    "segments": "tests.fuzz.files:Segments",
    "lanes": "tests.fuzz.files:Lanes",
    "replays": "tests.fuzz.files:Replays",
    "strangers": "tests.fuzz.strangers:Strangers",
    "messages": "tests.fuzz.messages:Messages",
    "runs": "tests.fuzz.runs:Runs",
}
_STALLED = 60.0
"""Seconds after which an input counts as one that does not end."""
_MAX_INPUT_BYTES = 256
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where the Python targets have their files: in memory, because each input writes some and a save is synced."""


@dataclass
class Outcome:
    """What a target did."""

    target: str
    inputs: int
    seconds: float
    slowest: float
    """Seconds that the slowest call took; of a native target, the slowest input."""
    failure: str = ""
    """How to repeat it, and the report; empty if there was none."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--seconds", type=float, help="seconds for each target")
    limit.add_argument("--runs", type=int, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--first", type=int, default=0, help="number of the first input of a Python target")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help=f"of {', '.join([*NATIVE, *PYTHON])}")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        run_here(arguments)
        return 0
    targets = arguments.only or [*NATIVE, *PYTHON]
    if unknown := [target for target in targets if target not in (*NATIVE, *PYTHON) and ":" not in target]:
        parser.error(f"there is no target {', '.join(unknown)}; the targets are {', '.join([*NATIVE, *PYTHON])}")
    missing = [target for target in targets if target in NATIVE and not binary(target).exists()]
    if missing:
        print(f"skipped, because they are not built (they need clang): {', '.join(missing)}")
    print(f"seed {arguments.seed}, {len(os.sched_getaffinity(0))} targets at a time", flush=True)
    print(f"{'target':12}{'inputs':>12}{'seconds':>10}{'inputs/s':>11}{'slowest':>10}", flush=True)
    failed = []
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [
            pool.submit(run_native if target in NATIVE else run_python, target, arguments)
            for target in targets
            if target not in missing
        ]
        for run in concurrent.futures.as_completed(runs):
            outcome = run.result()
            rate = outcome.inputs / max(outcome.seconds, 1e-9)
            line = (
                f"{outcome.target:12}{outcome.inputs:12,}{outcome.seconds:10.1f}{rate:11,.0f}{outcome.slowest:9.2f} s"
            )
            print(line + ("  FAILED" if outcome.failure else ""), flush=True)
            if outcome.failure:
                failed.append(outcome)
    for outcome in failed:
        print(f"\n{outcome.target}: {outcome.failure}")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------------------- native targets


def binary(target: str) -> Path:
    return BUILD / "cpp" / "fuzz" / f"fuzz_{target}"


def run_native(target: str, arguments: argparse.Namespace) -> Outcome:
    corpus, failures = BUILD / "corpus" / target, BUILD / "failures"
    for folder in (corpus, failures):
        folder.mkdir(parents=True, exist_ok=True)
    limit = f"-runs={arguments.runs}" if arguments.runs else f"-max_total_time={max(1, round(arguments.seconds))}"
    command = [
        str(binary(target)), limit, f"-seed={arguments.seed or 1}", f"-max_len={_MAX_INPUT_BYTES}",
        f"-timeout={round(_STALLED)}", "-rss_limit_mb=4096", "-print_final_stats=1", "-reload=0",
        f"-artifact_prefix={failures}/{target}-", str(corpus), str(ROOT / "cpp" / "fuzz" / "corpus" / target),
    ]  # fmt: skip
    begin = time.monotonic()
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace")
    statistics = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
    outcome = Outcome(
        target,
        int(statistics.get("number_of_executed_units", 0)),
        time.monotonic() - begin,
        float(statistics.get("slowest_unit_time_sec", 0)),
    )
    if done.returncode:
        kept = re.findall(r"Test unit written to (\S+)", done.stderr)
        outcome.failure = f"repeat it with\n  {shlex.join([command[0], *kept])}\n{done.stderr[-6000:]}"
    return outcome


# ------------------------------------------------------------------------------------------------------- Python targets


def run_python(target: str, arguments: argparse.Namespace) -> Outcome:
    """Run a target in a new process. The number of the current input lies in a file, so that it survives a crash."""
    with tempfile.TemporaryDirectory(prefix="tests-fuzz-", dir=_FOLDER) as folder:
        counter = Path(folder) / "counter"
        counter.write_bytes(bytes(8))
        limit = ["--runs", str(arguments.runs)] if arguments.runs else ["--seconds", str(arguments.seconds)]
        common = ["--seed", str(arguments.seed), "--only", target]
        command = [sys.executable, "-m", "tests.fuzz", "--here", *common, "--first", str(arguments.first), *limit]
        environment = {**os.environ, "MEMLANE_FUZZ_FOLDER": folder}
        begin = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output, report = "", ""
        at, since = -1, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, report = process.communicate(timeout=1)
                break
            if (now := int.from_bytes(counter.read_bytes(), "little")) != at:
                at, since = now, time.monotonic()
            elif time.monotonic() - since > _STALLED:
                process.send_signal(signal.SIGABRT)  # faulthandler prints where it is
                since = time.monotonic()
        seconds = time.monotonic() - begin
        current = int.from_bytes(counter.read_bytes(), "little")
        if process.returncode == 0:
            return Outcome(target, **json.loads(output.splitlines()[-1]))
        repeat = [*command[:3], *common, "--first", str(current), "--runs", "1"]
        how = f"exit code {process.returncode} at input {current}; repeat it with\n  {shlex.join(repeat)}\n"
        return Outcome(target, current - arguments.first, seconds, 0, how + report[-6000:])


def run_here(arguments: argparse.Namespace) -> None:
    """Run one Python target in this process, in the folder that the parent has made, and print what it did."""
    faulthandler.enable()
    from tests.fuzz import call

    (name,) = arguments.only
    folder = Path(os.environ["MEMLANE_FUZZ_FOLDER"])
    target = load(name, folder)
    begin, number = time.monotonic(), arguments.first
    with (folder / "counter").open("r+b") as counter:
        while (
            number < arguments.first + arguments.runs
            if arguments.runs
            else time.monotonic() - begin < arguments.seconds
        ):
            os.pwrite(counter.fileno(), number.to_bytes(8, "little"), 0)
            target.try_one(random.Random(f"{arguments.seed}/{number}"))
            number += 1
    seconds = time.monotonic() - begin
    print(json.dumps({"inputs": number - arguments.first, "seconds": seconds, "slowest": call.slowest}))


def load(name: str, folder: Path) -> Any:
    """Make a Python target by its name, or by module and class."""
    module, _, kind = PYTHON.get(name, name).partition(":")
    __import__(module)
    return getattr(sys.modules[module], kind)(folder)


if __name__ == "__main__":
    sys.exit(main())
