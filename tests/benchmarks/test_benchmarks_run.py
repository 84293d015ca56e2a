"""Each benchmark runs, measures every library that is installed, and records it. The numbers are not checked."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import entrants

from tests.support.processes import within

ROOT = Path(__file__).parents[2]
# On one core, contenders that poll are left out: they would wait for time slices.
POLLERS_RUN = len(os.sched_getaffinity(0)) > 1
MISSING = [
    name
    for name, available in {
        "bare C": POLLERS_RUN and os.access(ROOT / "build" / "native" / "bare", os.X_OK),
        "iceoryx2": POLLERS_RUN and importlib.util.find_spec("iceoryx2") is not None,
        "faster-fifo": importlib.util.find_spec("faster_fifo") is not None,
    }.items()
    if not available
]
HAS_ATARI = all(importlib.util.find_spec(module) is not None for module in ("ale_py", "cv2"))
HAS_TORCHRL = importlib.util.find_spec("torchrl") is not None
HAS_MUJOCO = importlib.util.find_spec("mujoco") is not None
# Each turn imports what it measures: with all libraries it would take minutes.
ARGUMENTS = {"vector_envs": ["--peers", "gymnasium"], "real_loop": ["--tables", "dqn", "torchrl"]}


# One benchmark in CI, to test the harness; the others take seconds to minutes.
SLOW = ("rows", "ring", "weights", "replay", "vector_envs", "native_envs", "atari", "real_loop")


@pytest.fixture(scope="module", params=["signal", *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """A quick run: the name of the benchmark, its output, and its JSON."""
    path = tmp_path_factory.mktemp(request.param) / "values.json"
    arguments = ["--quick", "--json", str(path), *ARGUMENTS.get(request.param, [])]
    output = run_benchmark(request.param, *arguments, seconds=110)
    return request.param, output, json.loads(path.read_text())


def run_benchmark(name: str, *arguments: str, seconds: float) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=within(seconds), check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


EXPECTED = {
    "signal": {
        "hand-off": ["memlane", "mp.Pipe", "mp.Queue", "mp.SimpleQueue", "mp.Semaphore", "iceoryx2", "bare C"],
        "waking an idle sleeper": ["memlane", "mp.Pipe", "mp.Semaphore", "iceoryx2", "bare C"],
    },
    "replay": {
        "sample 4096 of 50,000 rows, obs 17, act 6": ["memlane", "SB3", "limit: np.take", "bare C"],
        "sample 4096 of 50,000 rows, obs 48, act 12": ["memlane", "SB3", "limit: np.take", "bare C"],
        "add one row, obs 17, act 6": ["memlane", "SB3"],
        "sample 256 of 50,000 rows by priority and update them, obs 17, act 6": ["memlane"],
        "sample 4096 of 50,000 rows by priority and update them, obs 17, act 6": ["memlane"],
        "learn from 4096 of 50,000 rows by priority, obs 17, act 6": ["memlane", "limit"],
        "sample 64 of 2,000 transitions of 4 x 84 x 84 pixels, with the next ones": ["memlane", "SB3"],
    },
    "rows": {
        "packed rows of 168 bytes, batch 256": ["memlane", "np.take", "table[indices]", "bare C"],
        "packed rows of 168 bytes, batch 4096": ["memlane", "np.take", "table[indices]", "bare C"],
        "images of 84 x 84 bytes, batch 256": ["memlane", "np.take", "table[indices]", "bare C"],
        "images of 84 x 84 bytes, batch 4096": ["memlane", "np.take", "table[indices]", "bare C"],
        "five fields in separate arrays, batch 4096": ["memlane", "np.take", "field[indices]"],
        "five fields out of packed rows, batch 4096": ["memlane", "np.take", "table[field]"],
        "packed rows into the table, batch 4096": ["memlane", "np.put", "table[indices]"],
    },
    "ring": {
        "4 KB": ["memlane", "mp.Pipe", "mp.Queue", "torch queue", "faster-fifo", "iceoryx2"],
        "8 MB": ["memlane", "mp.Pipe", "mp.Queue", "torch queue", "faster-fifo", "memcpy"],
        "waking an idle reader": ["memlane", "mp.Pipe", "faster-fifo", "bare C"],
    },
    "weights": {
        "5702 parameters": ["memlane", "locked shared tensor"],
        "1004856 parameters": ["memlane", "locked shared tensor"],
        "5702 parameters, beside a writer": ["memlane", "locked shared tensor"],
        "reading 1 M parameters": ["memlane", "memcpy"],
        "publishing beside a reader": ["reader"],
    },
    "vector_envs": {
        "noop, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "CartPole-v1, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "pixels, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "dict, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "HalfCheetah-v5, 4 environments": (
            ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"] if HAS_MUJOCO else []
        ),
        "sleeps, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "short-sleeps, 4 environments": ["memlane", "gymnasium Sync", "gymnasium Async", "plain loops"],
        "4 CartPole-v1 by number of workers": ["memlane", "gymnasium Async"],
        "starting 4 CartPole-v1": ["memlane", "gymnasium Async", "gymnasium Sync"],
        "making 4 CartPole-v1": ["memlane", "gymnasium Async", "gymnasium Sync"],
    },
    "atari": {"4 ALE/Breakout-v5": ["memlane", "gymnasium Sync", "gymnasium Async", "ale-py"] if HAS_ATARI else []},
    "real_loop": {
        "Stable-Baselines3's DQN, 1 CartPole-v1": ["SB3VecEnv", "DummyVecEnv", "SubprocVecEnv"],
        "TorchRL's collector, 4 CartPole-v1": (
            ["memlane", "gymnasium Sync", "gymnasium Async", "torchrl SerialEnv", "torchrl ParallelEnv"]
            if HAS_TORCHRL
            else []
        ),
    },
    "native_envs": {
        "64 CartPole-v1": ["memlane", "gymnasium's NumPy", "bare C"],
        "64 Pendulum-v1": ["memlane", "bare C"],
    },
}


def test_every_table_has_a_measured_row_for_every_installed_library(run: tuple[str, str, dict[str, Any]]) -> None:
    name, _, record = run
    tables = {table["title"]: table["rows"] for table in record["tables"]}
    assert list(tables) == list(EXPECTED[name])
    for title, contenders in EXPECTED[name].items():
        for contender in contenders:
            rows = [row for row in tables[title] if row["name"].startswith(contender)]
            assert rows, f"no row {contender} in {title!r}"
            for row in rows:
                assert row["skipped"] == "" or contender in MISSING, f"{row['name']} in {title!r}: {row['skipped']}"


def test_every_measured_row_keeps_the_values_that_its_median_comes_from(run: tuple[str, str, dict[str, Any]]) -> None:
    for table in run[2]["tables"]:
        for row in table["rows"]:
            values = sorted(value for block in row["rounds_ns"] for value in block)
            if row["skipped"]:
                assert values == []
                continue
            assert len(row["rounds_ns"]) == 2, f"{row['name']} had {len(row['rounds_ns'])} turns of 2"
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            assert values[0] > 0
            assert math.isclose(row["median_ns"], middle, rel_tol=0.01, abs_tol=0.1)


def test_every_expectation_is_printed_with_its_outcome(run: tuple[str, str, dict[str, Any]]) -> None:
    name, printed, record = run
    assert record["expectations"] or name == "atari"  # which is for orientation
    for expectation in record["expectations"]:
        assert expectation["outcome"] in ("held", "missed", "not measured")
        (line,) = [line for line in printed.splitlines() if f"  {expectation['text']}" in line]
        assert expectation["outcome"].upper() in line
        measured = expectation["measured"]
        assert (measured is None) == (expectation["outcome"] == "not measured")
        if measured is not None:
            too_low = expectation["at_least"] is not None and measured < expectation["at_least"]
            too_high = expectation["at_most"] is not None and measured > expectation["at_most"]
            assert (expectation["outcome"] == "missed") == (too_low or too_high)


def test_the_record_names_machine_and_versions(run: tuple[str, str, dict[str, Any]]) -> None:
    record = run[2]
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["processor"]
    assert record["versions"]["memlane"]
    assert record["versions"]["numpy"]


# Every turn imports torch: one turn each, and of train.py only what needs no MuJoCo.
TRAININGS = {"train": ["--tasks", "cartpole"], "train_off_policy": []}


@pytest.mark.soak
@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_measured_in_time_and_in_environment_steps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    path = tmp_path / "values.json"
    run_benchmark(name, "--quick", *TRAININGS[name], "--json", str(path), seconds=290)
    record = json.loads(path.read_text())
    assert not any(table["notes"] for table in record["tables"]), "every run must reach the goals of a quick run"
    tasks = [record["tables"][begin : begin + 4] for begin in range(0, len(record["tables"]), 4)]
    for tables in tasks:
        time, process, steps, step = ({row["name"]: row for row in table["rows"]} for table in tables)
        assert list(time) == ["memlane, native", "memlane, Python", "stable-baselines3, 1 thread"]
        for name in time:
            assert all(table[name]["skipped"] == "" for table in (time, process, steps, step))
            assert 0 < time[name]["median_ns"] < process[name]["median_ns"]
            assert 0 < step[name]["median_ns"] < 1e9
            assert steps[name]["median_ns"] == int(steps[name]["median_ns"]) > 0
    assert len(record["expectations"]) == 4
    assert all(expectation["outcome"] in ("held", "missed") for expectation in record["expectations"])


def test_a_run_that_never_solved_its_task_is_named_and_counts_ten_times() -> None:
    turns = [[3e9, 500, 6e6, True], [4e9, 900, 5e6, False]]
    entrant = entrants.Entrant("library", "peer", "trainer", {}, {}, answers=turns, processes=[5e9, 6e9])
    added: list[Any] = []
    report: Any = SimpleNamespace(add=added.append)
    until, steps = entrants.add_until_tables(report, "task", "library", [entrant])
    assert until["library"].rounds == [[3e9], [4e10]]
    assert steps["library"].rounds == [[500], [9000]]
    for table in added:
        assert "library: 1 of 2 runs never solved it; they count as 10 times what they used" in table.text()
        assert table.record()["notes"]
