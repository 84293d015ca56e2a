"""Run: the directory of a training run, with its options, metrics and checkpoints.

config.json        options and versions
metrics.csv        one line per update
events.out.*       the same metrics for TensorBoard, if it is installed
checkpoint.pt      everything that is needed to resume
replay-?.memlane   the replay of an off-policy run, part of the checkpoint that names it
result.json        why the training stopped, and the evaluation of its last policy
report.html        plots
evaluation.gif     an episode of the policy, if `memlane eval --render gif` has been called
run.lock           locked by the process that trains

A checkpoint is complete when checkpoint.pt has been replaced, which is one step. The replay is saved before that, to
the one of two files that the checkpoint before does not name. So a process that is killed at any instant leaves the
checkpoint before, with its replay, or the new one, with its replay; and the disk holds two replays while a run goes on.
Both files are written to the disk before they count, so a power loss does no more than a kill.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memlane.runner.protocols import Event
from memlane.train.field_docs import document_fields
from memlane.train.files import remove_temporary, replacing
from memlane.train.run_dir import RunDirError, RunLock, has_run

_RECENT_EPISODES = 100
"""Episodes that a mean return is taken over."""


@document_fields
@dataclass
class Metrics:
    """Measurements of one update."""

    iteration: int = 0
    """Updates since the start of the training."""
    env_steps: int = 0
    """Environment steps since the start of the training."""
    returns: list[float] = field(default_factory=list)
    """Returns of the episodes that ended in the rollouts of this update."""
    lengths: list[int] = field(default_factory=list)
    """Lengths of the episodes that ended in the rollouts of this update."""
    lags: list[int] = field(default_factory=list)
    """Weight versions that the learner was ahead of each rollout."""
    version: int = 0
    """Version of the weights that this update published."""
    wait_ns: int = 0
    """Nanoseconds that the learner waited for rollouts."""
    learn_ns: int = 0
    """Nanoseconds that the learner spent on everything else."""
    counters: dict[str, int] = field(default_factory=dict)
    """Counters of all collectors since the start of the process."""
    ring_slots: int = 1
    """Slots of the ring of rollouts."""
    learning: dict[str, float] = field(default_factory=dict)
    """Metrics of the algorithm, such as its losses."""
    events: list[Event] = field(default_factory=list)
    """Collectors that were lost or joined since the update before."""
    # ``Run.record`` fills in the rest:
    seconds: float = 0.0
    """Seconds of training, including those before a resume."""
    mean_return: float = float("nan")
    """Mean return of the last 100 episodes; nan before the first one has ended."""
    steps_per_second: float = 0.0
    """Environment steps per second since the update before."""
    learner_busy: float = 0.0
    """Share of its time that the learner did not wait."""
    collectors_busy: float = 0.0
    """Share of their time that the collectors did not wait."""
    env_share: float = 0.0
    """Share of the collectors' busy time that environments took; the policy took the rest."""

    def compare(self, before: Metrics, learn_ns: int, wait_ns: int) -> None:
        """Set the rates and shares since an earlier update. ``learn_ns`` and ``wait_ns``: how long the learner was busy
        and waited since then."""
        elapsed = max(self.seconds - before.seconds, 1e-9)
        self.steps_per_second = (self.env_steps - before.env_steps) / elapsed
        self.learner_busy = learn_ns / max(learn_ns + wait_ns, 1)
        times = {key: self.counters.get(key, 0) - before.counters.get(key, 0) for key in _TIMES}
        busy = times["env_ns"] + times["policy_ns"]
        self.collectors_busy = busy / max(sum(times.values()), 1)
        self.env_share = times["env_ns"] / max(busy, 1)


REPLAY_FILES = ("replay-0.memlane", "replay-1.memlane")
"""The two files that the replay of an off-policy run is saved to in turn."""


class Run:
    """The directory of one training run, which belongs to this process until ``close``: ``RunDirError`` if another one
    trains in it. A run that the directory already has is continued, or with ``new`` refused."""

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        new: bool = False,
        tensorboard: bool = True,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._lock: RunLock | None = None
        self._pid = os.getpid()
        self._rows: csv.DictWriter[str] | None = None
        self._file: Any = None
        self._board: Any = None
        self.replay_file: str | None = None
        """Name of the file with the replay of the last checkpoint."""
        if new:
            self._refuse_run()  # before anything is written; and again when no other process can start one
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.run_dir)
        try:
            if new:
                self._refuse_run()
            for name in ("config.json", "metrics.csv", "checkpoint.pt", "result.json"):
                remove_temporary(self.run_dir / name)
            if config is not None:
                self.write_config(config)
        except BaseException:
            self._lock.close()
            raise
        self.started = time.monotonic()
        self.seconds_before = 0.0
        """Seconds of training before this process resumed it."""
        self.recent_returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self.latest = Metrics()
        """Metrics of the last update."""
        self.listeners: list[Any] = []
        """Functions that are called with the metrics of each update."""
        self.save_listeners: list[Callable[[], object]] = []
        """Functions that are called after each checkpoint."""
        if not (self.run_dir / "checkpoint.pt").exists():
            self._remove_other_replays()  # of another training, whose checkpoint was removed
        if tensorboard:
            self._board = _open_tensorboard(self.run_dir)

    def _refuse_run(self) -> None:
        if has_run(self.run_dir):
            raise RunDirError(f"{self.run_dir} has a run already: resume it, or choose another directory")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in one step."""
        self.write("config.json", json.dumps(config, indent=2, default=str))

    def record(self, metrics: Metrics) -> None:
        """Complete the metrics of an update, write them, and call the listeners."""
        self.recent_returns.extend(metrics.returns)
        metrics.seconds = self.seconds_before + time.monotonic() - self.started
        metrics.mean_return = self._mean_return()
        metrics.compare(self.latest, metrics.learn_ns, metrics.wait_ns)
        row = as_row(metrics)
        if self._rows is None:
            self._open_rows(list(row))
        assert self._rows is not None
        self._rows.writerow(row)
        self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if value == value:  # not nan
                    self._board.add_scalar(name, value, metrics.env_steps)
        self.latest = metrics
        for listener in self.listeners:
            listener(metrics)

    def _mean_return(self) -> float:
        return sum(self.recent_returns) / len(self.recent_returns) if self.recent_returns else math.nan

    def _open_rows(self, names: list[str]) -> None:
        path = self.run_dir / "metrics.csv"
        is_new = not path.exists() or not path.stat().st_size
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o666), "a", newline="")
        self._rows = csv.DictWriter(self._file, names)
        if is_new:
            self._rows.writeheader()

    def save(self, checkpoint: Mapping[str, Any], resume_from: Mapping[str, Any] | None = None) -> Path:
        """Replace checkpoint.pt in one step: a process that is killed meanwhile leaves the previous one.

        ``resume_from`` is an earlier checkpoint (from ``complete``) that a resumed run has to start from instead.
        """
        path = self.run_dir / "checkpoint.pt"
        content = self.complete(checkpoint)
        if resume_from is not None:
            content["resume_from"] = dict(resume_from)
        with replacing(path, durable=True) as file:
            torch.save(content, file)
        self.replay_file = (content if resume_from is None else resume_from).get("replay")
        for listener in self.save_listeners:
            listener()
        return path

    def complete(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Add to a checkpoint what this object needs to continue the metrics."""
        return {**checkpoint, "run": {"seconds": self.latest.seconds, "recent_returns": list(self.recent_returns)}}

    def load(self, *, latest: bool = False) -> dict[str, Any]:
        """Read the checkpoint to resume from, and continue the metrics from there. With ``latest``, read the last state
        that was saved: a deterministic run that was stopped between two checkpoints is resumed from the first of
        them."""
        path = self.run_dir / "checkpoint.pt"
        if not path.exists():
            raise FileNotFoundError(
                f"{self.run_dir} has no checkpoint.pt; a run writes one every save_interval updates and every "
                "save_seconds seconds"
            )
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        to_resume: dict[str, Any] = checkpoint.get("resume_from", checkpoint)
        self.replay_file = to_resume.get("replay")
        if self.replay_file not in (None, *REPLAY_FILES):
            raise ValueError(f"{path} names the replay {self.replay_file!r}, expected one of {REPLAY_FILES}")
        if not latest:
            checkpoint = to_resume
        state = checkpoint["run"]
        self.seconds_before = state["seconds"]
        self.recent_returns.clear()
        self.recent_returns.extend(state["recent_returns"])
        self.latest = Metrics(checkpoint["iteration"], checkpoint["env_steps"], seconds=self.seconds_before)
        self.latest.mean_return = self._mean_return()
        if not latest:
            self._drop_rows_after(checkpoint["iteration"])
            # A process that was killed while it saved may have left rows there that this run is going to make again,
            # under the same numbers and with other contents: an incremental save would keep them.
            self._remove_other_replays()
        return checkpoint

    def _remove_other_replays(self) -> None:
        for name in REPLAY_FILES:
            if name != self.replay_file:
                (self.run_dir / name).unlink(missing_ok=True)

    def _drop_rows_after(self, iteration: int) -> None:
        """Remove the updates after the checkpoint from metrics.csv: they will be made again."""
        path = self.run_dir / "metrics.csv"
        if not path.exists():
            return
        head, *lines = path.read_text().splitlines() or [""]
        if "iteration" not in head.split(","):
            raise ValueError(f"{path} is damaged: its first line must name the column iteration, found {head[:80]!r}")
        column = head.split(",").index("iteration")
        kept = [
            line
            for line in lines
            if line.count(",") == head.count(",") and _number(line.split(",")[column]) <= iteration
        ]
        _replace_file(path, "\n".join([head, *kept, ""]).encode())

    def write(self, name: str, content: str) -> Path:
        """Write a text file into the directory, in one step."""
        return _replace_file(self.run_dir / name, content.encode())

    def remove(self, name: str) -> None:
        """Remove a file from the directory, if it is there."""
        (self.run_dir / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and give the directory up."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self.replay_file is not None and os.getpid() == self._pid:  # not in a forked child
            self._remove_other_replays()  # that of the checkpoint before the last
            self.replay_file = None
        if self._lock is not None:
            self._lock.close()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # a line that was cut off
        return math.inf


_TIMES = ("env_ns", "policy_ns", "wait_ns")


def as_row(metrics: Metrics) -> dict[str, Any]:
    """The metrics of one update as a flat row of numbers."""
    lags = metrics.lags or [0]
    return {
        "iteration": metrics.iteration,
        "env_steps": metrics.env_steps,
        "seconds": round(metrics.seconds, 4),
        "mean_return": metrics.mean_return,
        "episodes": len(metrics.returns),
        "mean_length": sum(metrics.lengths) / len(metrics.lengths) if metrics.lengths else float("nan"),
        "steps_per_second": metrics.steps_per_second,
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
        "version": metrics.version,
        "learner_busy": metrics.learner_busy,
        "collectors_busy": metrics.collectors_busy,
        "env_share": metrics.env_share,
        "ring_fill": metrics.counters.get("unread", 0) / max(metrics.ring_slots, 1),
        "restarts": metrics.counters.get("restarts", 0),
        "collectors": metrics.counters.get("collectors", 0),
        **metrics.learning,
    }


def bottleneck(metrics: Metrics) -> str:
    """One sentence: what waits for what."""
    if metrics.learner_busy < 0.6 and metrics.collectors_busy > 0.8:
        what = "environments" if metrics.env_share > 0.5 else "the policy"
        return f"The learner waits for rollouts; the collectors spend most of their time in {what}."
    if metrics.collectors_busy < 0.6 and metrics.learner_busy > 0.8:
        less = "a lower samples_per_insert" if "samples_per_insert" in metrics.learning else "fewer update_epochs"
        return f"The collectors wait for the learner; {less} or a smaller network would let them run."
    if metrics.learner_busy < 0.6 and metrics.collectors_busy < 0.6:
        return "Both wait for each other in turn: a larger max_lag would let them run at the same time."
    return "Learner and collectors are both busy."


def _replace_file(path: Path, content: bytes) -> Path:
    with replacing(path) as file:
        file.write(content)
    return path


def _open_tensorboard(run_dir: Path) -> Any:
    """TensorBoard's writer; None, and a line in the log, if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logging.getLogger("memlane").warning(
            'tensorboard is not installed, so metrics are written to metrics.csv only: pip install "memlane[cli]"'
        )
        return None
    return SummaryWriter(str(run_dir))
