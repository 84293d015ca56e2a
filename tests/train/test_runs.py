"""What is told of run directories, whatever their files look like."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memlane.train.run_dir import RunLock
from memlane.train.runs import find_runs, read_run
from tests.support.training import write_run


def test_a_run_is_told_by_its_files(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", seed=7, returns=[1.0, 2.5], stopped_by="target", evaluation=3.5)
    info = read_run(run_dir)
    assert (info.env, info.algo, info.seed, info.steps, info.mean_return) == ("CartPole-v1", "appo", 7, 200, 2.5)
    assert (info.state, info.stopped_by, info.evaluation, info.target) == ("finished", "target", 3.5, 475.0)


@pytest.mark.parametrize(
    ("stopped_by", "state"),
    [("target", "finished"), ("max_steps", "finished"), ("max_seconds", "finished"), ("Ctrl-C", "stopped"),
     ("SIGTERM", "stopped"), ("SIGHUP", "stopped"), ("error", "failed"), (None, "killed")],
)  # fmt: skip
def test_the_state_is_how_a_run_has_ended(tmp_path: Path, stopped_by: str | None, state: str) -> None:
    assert read_run(write_run(tmp_path / "run", stopped_by=stopped_by)).state == state


@pytest.mark.parametrize("stopped_by", ["target", None])
def test_a_run_that_a_process_trains_is_running_whatever_its_files_say(tmp_path: Path, stopped_by: str | None) -> None:
    run_dir = write_run(tmp_path / "run", stopped_by=stopped_by)
    lock = RunLock(run_dir)
    info = read_run(run_dir)
    lock.close()
    assert info.state == "running"
    assert info.holder.startswith("pid ")
    assert read_run(run_dir).state != "running"


def test_runs_are_found_below_a_directory_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/b", "sweep/a"):
        write_run(tmp_path / name)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [str(info.path.relative_to(tmp_path)) for info in find_runs([tmp_path])] == ["a", "b", "sweep/a", "sweep/b"]
    assert find_runs([tmp_path / "none"]) == []


def test_a_run_that_is_named_twice_is_found_once(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert [info.path for info in find_runs([run_dir, tmp_path, run_dir])] == [run_dir]


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", "{"), ("config.json", "[]"), ("config.json", "{}"), ("result.json", "["), ("result.json", "3"),
     ("metrics.csv", "iteration,env_steps\nx,y\n"), ("metrics.csv", "\0\n\0\n")],
)  # fmt: skip
def test_a_damaged_run_is_in_the_list_too(tmp_path: Path, file: str, content: str) -> None:
    write_run(tmp_path / "damaged")
    (tmp_path / "damaged" / file).write_text(content)
    write_run(tmp_path / "whole")
    damaged, whole = find_runs([tmp_path])
    assert whole.state == "killed"
    if file != "metrics.csv":
        assert damaged.state == "damaged"
    json.dumps(damaged.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("content", "steps"), [("", 0), ("iteration,env_steps\n", 0), ("iteration,env_steps\n1,10\n2,2", 10)]
)
def test_only_whole_lines_of_the_metrics_count(tmp_path: Path, content: str, steps: int) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "metrics.csv").write_text(content)
    assert read_run(run_dir).steps == steps


def test_the_last_line_of_a_long_file_is_found(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", returns=[float(number) for number in range(20_000)])
    assert (read_run(run_dir).mean_return, read_run(run_dir).steps) == (19_999.0, 2_000_000)


def test_json_has_null_for_what_is_not_known(tmp_path: Path) -> None:
    values: dict[str, Any] = read_run(write_run(tmp_path / "run", returns=[math.nan])).as_json()
    assert (values["mean_return"], values["evaluation"]) == (None, None)
    assert json.loads(json.dumps(values, allow_nan=False))["path"] == str(tmp_path / "run")


def test_settings_tell_runs_apart_and_seeds_and_limits_do_not(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "a", seed=1)
    same = write_run(tmp_path / "b", seed=2, max_steps=5)
    other = write_run(tmp_path / "c", config={"network": {"hidden": [8]}})
    assert read_run(plain).settings == read_run(same).settings != read_run(other).settings
    assert read_run(other).settings["network.hidden"] == [8]


def test_a_list_of_runs_needs_no_torch() -> None:
    code = "import sys; import memlane.train.runs, memlane.train.ui.report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
