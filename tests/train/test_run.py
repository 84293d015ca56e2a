"""The run directory: whose it is, and what a kill at any instant of a checkpoint leaves in it."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memlane.ipc import Replay
from memlane.train import Run
from memlane.train.algorithms.dqn import DQN
from memlane.train.run import REPLAY_FILES, Metrics
from memlane.train.run_dir import RunDirError
from tests.support.processes import PATIENCE
from tests.support.training import QuietRun


def test_a_missing_tensorboard_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import fails
    Run(tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        'tensorboard is not installed, so metrics are written to metrics.csv only: pip install "memlane[cli]"'
    ]
    assert not list(tmp_path.glob("events*"))


def test_a_directory_belongs_to_one_run_until_it_is_closed(tmp_path: Path) -> None:
    run = QuietRun(tmp_path)
    with pytest.raises(RunDirError, match=rf"is in use: pid {os.getpid()} \(this process\) trains in it"):
        QuietRun(tmp_path)
    run.close()
    QuietRun(tmp_path).close()


@pytest.mark.parametrize("file", ["metrics.csv", "checkpoint.pt"])
def test_a_new_run_is_refused_where_one_is_and_changes_nothing(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(RunDirError, match="has a run already: resume it, or choose another directory"):
        Run(tmp_path, new=True, tensorboard=False)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    left = [f"{name}.0123abcd.new" for name in ("checkpoint.pt", "config.json", "metrics.csv")]
    for name in (*left, "report.html.0123abcd.new"):  # any process may be writing a report
        (tmp_path / name).touch()
    QuietRun(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html.0123abcd.new", "run.lock"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    run = QuietRun(tmp_path)
    run.save({"iteration": 1, "env_steps": 10})
    with pytest.raises(AttributeError):
        run.save({"iteration": 2, "env_steps": 20, "cannot be pickled": lambda: None})
    assert run.load()["iteration"] == 1
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "run.lock"]


def test_a_run_continues_from_an_earlier_checkpoint_if_the_last_one_says_so(tmp_path: Path) -> None:
    run = QuietRun(tmp_path)
    run.record(Metrics(1, 10, returns=[5.0]))
    earlier = run.complete({"iteration": 1, "env_steps": 10})
    run.record(Metrics(2, 20, returns=[7.0]))
    run.save({"iteration": 2, "env_steps": 20}, earlier)
    run.close()
    again = QuietRun(tmp_path)
    assert (again.load(latest=True)["iteration"], again.latest.mean_return) == (2, 6.0)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3
    assert (again.load()["iteration"], again.latest.mean_return) == (1, 5.0)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2
    again.close()


def test_a_replay_that_the_checkpoint_has_no_right_to_name_is_refused(tmp_path: Path) -> None:
    run = QuietRun(tmp_path)
    run.save({"iteration": 1, "env_steps": 10, "replay": "../elsewhere"})
    with pytest.raises(ValueError, match=r"names the replay '\.\./elsewhere', expected one of"):
        run.load()
    run.close()


# --------------------------------------------------------------------------------------------- kills in a checkpoint

STEPS, CAPACITY = 8, 20
SMALL: dict[str, Any] = {"buffer_size": CAPACITY, "learning_starts": 1, "batch_size": 1, "network": {"hidden": (4,)},
                         "priority_alpha": 0.6}  # fmt: skip


class Saver:
    """A training without collectors: each generation adds rows that carry its number, and saves."""

    def __init__(self, folder: Path) -> None:
        self.runner = DQN("CartPole-v1", None, SMALL, sim_backend="native", num_envs=1)
        self.run = self.runner.run = QuietRun(folder)
        if (folder / "checkpoint.pt").exists():
            self.runner.restore(self.run.load())
        else:
            self.runner.replay = self.runner._make_replay()
        assert self.runner.replay is not None
        self.replay = self.runner.replay
        self.writer = self.replay.writer()

    def add(self, generation: int) -> None:
        for _ in range(STEPS):
            row = {
                name: np.full((1, *field.shape), generation if name == "reward" else 0, field.dtype)
                for name, field in self.replay.layout.fields.items()
            }
            self.writer.add(row)
        self.runner.iteration, self.runner.env_steps = generation, STEPS * generation

    def save(self) -> None:
        self.run.save(self.runner.checkpoint())

    def close(self) -> None:
        self.run.close()
        self.runner.close()


def save_three_times(folder: Path, prepare: Callable[[], object], pipe: Any) -> None:
    """Save three generations; ``prepare`` is called before the third."""
    saver = Saver(folder)
    for generation in (1, 2, 3):
        saver.add(generation)
        if generation == 3:
            pipe.send("saving")
            prepare()
        saver.save()
    sys.settrace(None)
    pipe.send("saved")
    os._exit(0)  # without the end of a run: this is what a kill right after the checkpoint leaves


def run_saver(folder: Path, prepare: Callable[[], object], kill: Callable[[], object] = bool) -> int | None:
    """The exit code of a process that saves three times; ``kill`` returns when it is to be killed, if it is bool at no
    time."""
    here, there = mp.get_context("fork").Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=save_three_times, args=(folder, prepare, there))
    process.start()
    there.close()
    assert here.poll(PATIENCE)
    here.recv()
    if kill is not bool:
        kill()
        process.kill()
    process.join(PATIENCE)
    here.close()
    return process.exitcode


def require_whole_checkpoint(folder: Path) -> int:
    """The generation of the checkpoint. Its replay has the rows of that generation, and none of another one; and a run
    that goes on from there saves its own rows, and none that the killed one left."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    generation: int = checkpoint["iteration"]
    assert generation in (2, 3)
    with Replay.load(folder / checkpoint["replay"]) as replay:
        assert rewards(replay) == expected([*range(1, generation + 1)])
    saver = Saver(folder)
    saver.add(9)
    saver.save()
    with Replay.load(folder / str(saver.run.replay_file)) as replay:
        assert rewards(replay) == expected([*range(1, generation + 1), 9])
    saver.close()
    assert len([name for name in REPLAY_FILES if (folder / name).exists()]) == 1
    return generation


def expected(generations: list[int]) -> dict[int, float]:
    """The rows that a replay has, by their number, without the last, whose next observation has not come yet. A writer
    begins an episode, so the last row of the one before is missing too."""
    rows = [float(generation) for generation in generations for _ in range(STEPS)]
    known = {number + 1: value for number, value in enumerate(rows)}
    del known[len(rows)]
    if 9 in generations:
        del known[len(rows) - STEPS]
    return {number: value for number, value in known.items() if number > len(rows) - CAPACITY}


def rewards(replay: Replay) -> dict[int, float]:
    batch = replay.sampler(seed=0, extras=["key"]).sample(1000)
    return dict(zip(batch["key"].tolist(), batch["reward"].tolist(), strict=True))


def test_a_replay_that_another_process_has_open_is_left_to_it(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    for generation in (1, 2):
        saver.add(generation)
        saver.save()
    with Replay.open(tmp_path / REPLAY_FILES[0]) as opened:
        saver.add(3)
        saver.save()
        assert rewards(opened) == expected([1])
    with Replay.load(tmp_path / REPLAY_FILES[0]) as saved:
        assert rewards(saved) == expected([1, 2, 3])
    saver.close()


def die_at_operation(number: int) -> Callable[[], object]:
    """Be killed at the ``number``-th operation on files that Python makes: open, rename, remove, lock, ..."""

    def prepare() -> None:
        left = number

        def audit(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "fcntl.", "mmap.")):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)

    return prepare


def die_at_line(number: int) -> Callable[[], object]:
    """Be killed at the ``number``-th line of Python code."""

    def prepare() -> None:
        left = number

        def trace(frame: Any, event: str, argument: Any) -> Any:  # noqa: ARG001
            nonlocal left
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)

    return prepare


def test_a_kill_at_any_operation_on_files_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    generations = []
    for number in range(1000):
        folder = tmp_path / str(number)
        code = run_saver(folder, die_at_operation(number))
        generations.append(require_whole_checkpoint(folder))
        if code == 0:
            break
    assert len(generations) > 5
    assert generations == sorted(generations)
    assert set(generations) == {2, 3}


def test_a_kill_at_any_line_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    seed = int(os.environ.get("MEMLANE_KILL_SEED", random.randrange(2**31)))
    print(f"MEMLANE_KILL_SEED={seed}")
    rng = random.Random(seed)
    for number in range(20):
        folder = tmp_path / str(number)
        run_saver(folder, die_at_line(round(10 ** rng.uniform(0, 4.5))))
        require_whole_checkpoint(folder)


def test_a_kill_at_any_instant_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    seed = int(os.environ.get("MEMLANE_KILL_SEED", random.randrange(2**31)))
    print(f"MEMLANE_KILL_SEED={seed}")
    rng = random.Random(seed)

    def wait() -> None:
        limit = rng.uniform(0, 0.02)
        import time

        time.sleep(limit)

    for number in range(20):
        folder = tmp_path / str(number)
        run_saver(folder, bool, wait)
        require_whole_checkpoint(folder)
