"""Shared by the tests of the replay: numbered rows, and a view of everything that can be sampled."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

from memlane.ipc import Replay, ReplayBuffer, ReplayWriter

STEP = {
    "obs": ("float32", 2),
    "number": ("int64", ()),
    "reward": ("float32", ()),
    "terminated": (bool, ()),
    "truncated": (bool, ()),
}
"""A row of a stream, identified by ``number``, which is also its observation."""

PLAIN = {"x": ("int64", 2)}
"""A row of a replay without streams."""


def step(*numbers: float, terminated: Any = False, truncated: Any = False, reward: Any = 1.0) -> dict[str, Any]:
    """Return one row per number, with the number as its observation."""
    count = len(numbers)
    return {
        "obs": np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1),
        "number": np.array(numbers, np.int64),
        "reward": np.full(count, reward, np.float32),
        "terminated": np.full(count, terminated, bool),
        "truncated": np.full(count, truncated, bool),
    }


def final(*numbers: float) -> dict[str, Any]:
    return {"obs": step(*numbers)["obs"]}


def play(writer: ReplayWriter, *numbers: int, end: str | None = None) -> None:
    """Add an episode to one stream. Its final observation is the last number plus 0.5."""
    for number in numbers:
        if end is not None and number == numbers[-1]:
            writer.add(step(number, **{end: True}), final=final(number + 0.5))
        else:
            writer.add(step(number))


def add_some(replay: Replay) -> None:
    play(replay.writer(), 1, 2, 3, end="terminated")


def drawn(replay: Replay, count: int = 400, *, field: str = "number", **wish: Any) -> dict[int, dict[str, Any]]:
    """Return everything that a sampler finds, by number; rows with equal numbers must be equal."""
    sampler = replay.sampler(seed=wish.pop("seed", 1), **wish)
    batch = sampler.sample(count)
    sampler.close()
    found: dict[int, dict[str, Any]] = {}
    for place in range(count):
        row = {name: array[place].tolist() for name, array in batch.items()}
        number = row[field][0] if sampler.length > 1 else row[field]
        assert found.setdefault(number, row) == row
    return found


def contents(replay: Replay) -> bytes:
    """Return every byte that a write could change, counters included."""
    return b"".join(replay.segment[name].tobytes() for name in ("control", "stored", "streams", "tree", "rows"))


def fits(counts: np.ndarray, shares: np.ndarray) -> bool:
    """Return whether counts agree with ``shares``: chi-square, with a false alarm in about one of a million cases."""
    expected = counts.sum() * shares / shares.sum()
    degrees = len(shares) - 1
    return bool(((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees) + 12)


def limit_life(seconds: float) -> None:
    """Kill this process after so many seconds, also in native code that does not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def transitions(*numbers: float, critic: bool = False) -> dict[str, Any]:
    """Return arguments of ``ReplayBuffer.add`` for obs_dim 3, action_dim 2 and critic_dim 4 or 0."""
    column = np.array(numbers, np.float32)[:, None]
    rows: dict[str, Any] = {
        "obs": np.repeat(column, 3, axis=1),
        "actions": -np.repeat(column, 2, axis=1),
        "rewards": 10 * np.array(numbers, np.float64),
        "next_obs": np.repeat(column, 3, axis=1) + np.float32(0.5),
        "dones": np.zeros(len(numbers)),
        "truncated": np.arange(len(numbers)) % 2,
    }
    if critic:
        rows |= {"critic": np.repeat(column, 4, axis=1) + 10, "next_critic": np.repeat(column, 4, axis=1) + 10.5}
    return rows


def collect(buffer: ReplayBuffer) -> None:
    buffer.add(**transitions(1, 2))
    buffer.add(**transitions(3))
