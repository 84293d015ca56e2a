"""Run: a folder with what a training was told, what it measured, and what it learned.

config.json      what it was told
metrics.csv      a line for every update
events.*         the same for TensorBoard, when it is installed
checkpoint.pt    all that is needed to go on
replay.memlane   the rest of it, off-policy
result.json      how it ended, and the last policy's evaluation
report.html      plots of all that
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memlane.runner.protocols import Event

_RECENT = 100
"""Episodes that a mean return is of."""


@dataclass
class Metrics:
    """What one update leaves to be told."""

    iteration: int = 0
    env_steps: int = 0
    returns: list[float] = field(default_factory=list)
    """Of the episodes that ended in these rollouts."""
    lengths: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Of each rollout: how many versions the weights were ahead."""
    version: int = 0
    wait_ns: int = 0
    """How long the learner waited for rollouts."""
    learn_ns: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    """Of all collectors, since the start."""
    ring_slots: int = 1
    learning: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    # What the run adds:
    seconds: float = 0.0
    mean_return: float = float("nan")
    """Of the last hundred episodes."""
    steps_per_second: float = 0.0
    learner_busy: float = 0.0
    """The share of its time that the learner learned."""
    collectors_busy: float = 0.0
    """The share of their time that the collectors collected."""
    env_share: float = 0.0
    """Of what collectors did, the share that was stepping environments."""

    def compare(self, before: Metrics, learn_ns: int, wait_ns: int) -> None:
        """Speed and shares since an earlier update; the learner learned and waited so long since then."""
        took = max(self.seconds - before.seconds, 1e-9)
        self.steps_per_second = (self.env_steps - before.env_steps) / took
        self.learner_busy = learn_ns / max(learn_ns + wait_ns, 1)
        spent = {key: self.counters.get(key, 0) - before.counters.get(key, 0) for key in _TIMES}
        busy = spent["env_ns"] + spent["policy_ns"]
        self.collectors_busy = busy / max(sum(spent.values()), 1)
        self.env_share = spent["env_ns"] / max(busy, 1)


class Run:
    """The folder of one training. Goes on where it stopped when the folder is there already."""

    def __init__(
        self, folder: str | Path, config: Mapping[str, Any] | None = None, *, tensorboard: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            _write(self.folder / "config.json", json.dumps(config, indent=2, default=str).encode())
        self.begin = time.monotonic()
        self.seconds_before = 0.0
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.latest = Metrics()
        self._rows: csv.DictWriter[str] | None = None
        self._file: Any = None
        self._board = _board(self.folder) if tensorboard else None
        self.listeners: list[Any] = []
        """Called with each update's metrics."""

    def record(self, metrics: Metrics) -> None:
        """Complete the metrics, and write them down."""
        self.recent.extend(metrics.returns)
        metrics.seconds = self.seconds_before + time.monotonic() - self.begin
        metrics.mean_return = sum(self.recent) / len(self.recent) if self.recent else float("nan")
        metrics.compare(self.latest, metrics.learn_ns, metrics.wait_ns)
        row = as_row(metrics)
        if self._rows is None:
            self._open_rows(list(row))
        assert self._rows is not None
        self._rows.writerow(row)
        self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if value == value:  # not for nan
                    self._board.add_scalar(name, value, metrics.env_steps)
        self.latest = metrics
        for listener in self.listeners:
            listener(metrics)

    def _open_rows(self, names: list[str]) -> None:
        path = self.folder / "metrics.csv"
        fresh = not path.exists() or not path.stat().st_size
        self._file = path.open("a", newline="")
        self._rows = csv.DictWriter(self._file, names)
        if fresh:
            self._rows.writeheader()

    def save(self, checkpoint: Mapping[str, Any]) -> Path:
        """Replaced as a whole: whoever is killed meanwhile leaves the one before."""
        path = self.folder / "checkpoint.pt"
        almost = path.with_suffix(".new")
        extra = {"seconds": self.latest.seconds, "recent": list(self.recent)}
        torch.save({**checkpoint, "run": extra}, almost)
        os.replace(almost, path)
        return path

    def load(self) -> dict[str, Any]:
        """The checkpoint. The run goes on counting from there."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no checkpoint.pt; a run writes one every save_interval updates")
        found: dict[str, Any] = torch.load(path, weights_only=True)
        self.seconds_before = found["run"]["seconds"]
        self.recent.extend(found["run"]["recent"])
        self.latest = Metrics(found["iteration"], found["env_steps"], seconds=self.seconds_before)
        self._forget_after(found["iteration"])
        return found

    def _forget_after(self, iteration: int) -> None:
        """Updates that were made after the checkpoint will be made again."""
        path = self.folder / "metrics.csv"
        if not path.exists():
            return
        head, *lines = path.read_text().splitlines()
        place = head.split(",").index("iteration")
        kept = [
            line for line in lines if line.count(",") == head.count(",") and int(line.split(",")[place]) <= iteration
        ]
        _write(path, "\n".join([head, *kept, ""]).encode())

    def write(self, name: str, content: str) -> Path:
        return _write(self.folder / name, content.encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


_TIMES = ("env_ns", "policy_ns", "wait_ns")


def as_row(metrics: Metrics) -> dict[str, Any]:
    """The numbers of one update, flat."""
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
    """One sentence: what is waiting for what."""
    if metrics.learner_busy < 0.6 and metrics.collectors_busy > 0.8:
        what = "environments" if metrics.env_share > 0.5 else "the policy in the collectors"
        return f"The learner waits for rollouts; most of their time goes into {what}."
    if metrics.collectors_busy < 0.6 and metrics.learner_busy > 0.8:
        less = "fewer samples per insert" if "samples_per_insert" in metrics.learning else "fewer epochs"
        return f"The collectors wait for the learner; {less} or a smaller network would let them run."
    if metrics.learner_busy < 0.6 and metrics.collectors_busy < 0.6:
        return "Both wait for each other in turn: a larger max_lag would let them run at the same time."
    return "Learner and collectors are both busy."


def _write(path: Path, content: bytes) -> Path:
    almost = path.with_name(path.name + ".new")
    almost.write_bytes(content)
    os.replace(almost, path)
    return path


def _board(folder: Path) -> Any:
    """TensorBoard's writer, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
