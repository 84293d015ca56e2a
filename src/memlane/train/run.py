"""Run: the directory of a training run, with its options, metrics and checkpoints.

config.json      options and versions
metrics.csv      one line per update
events.out.*     the same metrics for TensorBoard, if it is installed
checkpoint.pt    everything that is needed to resume
replay.memlane   the replay, part of the checkpoint of an off-policy run
result.json      why the training stopped, and the evaluation of its last policy
report.html      plots
evaluation.gif   an episode of the policy, if `memlane eval --render gif` has been called
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memlane.runner.protocols import Event
from memlane.train.field_docs import document_fields
from memlane.train.files import replacing

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


class Run:
    """The directory of one training run. A run that the directory already has is continued."""

    def __init__(
        self, run_dir: str | Path, config: Mapping[str, Any] | None = None, *, tensorboard: bool = True
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if config is not None:
            self.write_config(config)
        self.started = time.monotonic()
        self.seconds_before = 0.0
        """Seconds of training before this process resumed it."""
        self.recent_returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self.latest = Metrics()
        """Metrics of the last update."""
        self.listeners: list[Any] = []
        """Functions that are called with the metrics of each update."""
        self._rows: csv.DictWriter[str] | None = None
        self._file: Any = None
        self._board = _open_tensorboard(self.run_dir) if tensorboard else None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in one step."""
        self.write("config.json", json.dumps(config, indent=2, default=str))

    def record(self, metrics: Metrics) -> None:
        """Complete the metrics of an update, write them, and call the listeners."""
        self.recent_returns.extend(metrics.returns)
        metrics.seconds = self.seconds_before + time.monotonic() - self.started
        if self.recent_returns:
            metrics.mean_return = sum(self.recent_returns) / len(self.recent_returns)
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

    def _open_rows(self, names: list[str]) -> None:
        path = self.run_dir / "metrics.csv"
        is_new = not path.exists() or not path.stat().st_size
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o666), "a", newline="")
        self._rows = csv.DictWriter(self._file, names)
        if is_new:
            self._rows.writeheader()

    def save(self, checkpoint: Mapping[str, Any]) -> Path:
        """Replace checkpoint.pt in one step: a process that is killed meanwhile leaves the previous one."""
        path = self.run_dir / "checkpoint.pt"
        extra = {"seconds": self.latest.seconds, "recent_returns": list(self.recent_returns)}
        with replacing(path) as file:
            torch.save({**checkpoint, "run": extra}, file)
        return path

    def load(self) -> dict[str, Any]:
        """Read the checkpoint, and continue the metrics from there."""
        path = self.run_dir / "checkpoint.pt"
        if not path.exists():
            raise FileNotFoundError(
                f"{self.run_dir} has no checkpoint.pt; a run writes one every save_interval updates"
            )
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        self.seconds_before = checkpoint["run"]["seconds"]
        self.recent_returns.extend(checkpoint["run"]["recent_returns"])
        self.latest = Metrics(checkpoint["iteration"], checkpoint["env_steps"], seconds=self.seconds_before)
        self._drop_rows_after(checkpoint["iteration"])
        return checkpoint

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

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


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
