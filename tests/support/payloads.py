"""Payloads that check themselves: a reader can tell a complete payload from a torn, mixed or misplaced one.

Light to import, because a spawned child imports it again.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

# ------------------------------------------------------------------------------------ one payload: a slot, a weight set


def checked_layout(body: int) -> dict[str, Any]:
    """The layout of a payload of ``body`` integers that carries its own checksum."""
    return {"number": ("int64", ()), "writer": ("int64", ()), "body": ("int64", body), "sum": ("uint32", ())}


CHECKED = checked_layout(1024)
"""8 KB."""


class Payload:
    """The arrays of one payload. Reuses its memory, as a collector would."""

    def __init__(self, body: int = 1024) -> None:
        self.arrays: dict[str, NDArray[Any]] = {
            name: np.zeros(shape, dtype) for name, (dtype, shape) in checked_layout(body).items()
        }

    def fill(self, number: int, writer: int = 0) -> dict[str, NDArray[Any]]:
        fill(self.arrays, number, writer)
        return self.arrays


@functools.cache
def _ramp(length: int) -> NDArray[np.int64]:
    return np.arange(length)


def fill(arrays: Any, number: int, writer: int = 0) -> None:
    """Write a payload. Every integer of the body depends on ``number``, so that a mixture of two payloads shows."""
    arrays["number"][...] = number
    arrays["writer"][...] = writer
    body = arrays["body"]
    np.multiply(_ramp(len(body)), number + 1, out=body)
    arrays["sum"][...] = checksum(arrays)


def checksum(arrays: Any) -> int:
    return zlib.crc32(arrays["body"], int(arrays["number"]) * 31 + int(arrays["writer"]) & 0xFFFFFFFF)


def whole(arrays: Any) -> bool:
    """Whether a payload is complete and unmixed."""
    return checksum(arrays) == int(arrays["sum"])


# ----------------------------------------------------------------------------------------------------- rows of a replay

BODY = 48

LOOSE: dict[str, Any] = {"writer": ("int64", ()), "number": ("int64", ()), "body": ("int64", BODY)}
"""An independent row. Its body follows from its writer and its number."""

LINKED: dict[str, Any] = {
    "obs": ("int64", (BODY,)),
    "reward": ("float32", ()),
    "terminated": (bool, ()),
    "truncated": (bool, ()),
}
"""A row of a stream. Its observation begins with stream, episode and step; the rest follows from them."""

_FACTORS = np.arange(1, BODY + 1)


def _body_of(writer: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    return _FACTORS * (number * 31 + writer + 1)[:, None]


def loose_rows(writer: int, first: int, count: int) -> dict[str, NDArray[Any]]:
    numbers = np.arange(first, first + count)
    writers = np.full(count, writer)
    return {"writer": writers, "number": numbers, "body": _body_of(writers, numbers)}


def count_torn(rows: Any) -> int:
    """How many independent rows are incomplete or mixed."""
    return int((rows["body"] != _body_of(rows["writer"], rows["number"])).any(axis=1).sum())


def _observation(
    streams: NDArray[np.int64], episodes: NDArray[np.int64], steps: NDArray[np.int64]
) -> NDArray[np.int64]:
    obs = _FACTORS * (streams * 10_007 + episodes * 101 + steps)[:, None]
    obs[:, 0], obs[:, 1], obs[:, 2] = streams, episodes, steps
    return obs


def _length_of(episodes: NDArray[np.int64]) -> NDArray[np.int64]:
    return 1 + episodes * 7 % 11


def count_misplaced(batch: Any) -> int:
    """How many rows of a batch (n_step=2, gamma=1) are torn, or are not what two steps of one episode lead to.

    Even episodes terminate, odd ones are truncated; both have a final observation.
    """
    obs, next_obs = batch["obs"], batch["next_obs"]
    streams, episodes, steps = obs[:, 0], obs[:, 1], obs[:, 2]
    to = next_obs[:, 2]
    ended = to == _length_of(episodes)
    wrong = (obs != _observation(streams, episodes, steps)).any(axis=1)
    wrong |= (next_obs != _observation(streams, episodes, to)).any(axis=1)
    wrong |= (to <= steps) | (to > steps + 2) | (to > _length_of(episodes))
    wrong |= batch["terminated"] != (ended & (episodes % 2 == 0))
    wrong |= batch["truncated"] != (ended & (episodes % 2 == 1))
    wrong |= batch["reward"] != np.where(to == steps + 2, 2 * steps + 1, steps)
    return int(wrong.sum())


def count_misstacked(batch: Any) -> int:
    """How many rows of a batch with stacked observations (n_step=1) are torn, or have frames of other steps.

    Before the start of an episode its first observation is repeated.
    """
    wrong = np.zeros(len(batch["obs"]), np.bool_)
    streams, episodes, steps = (batch["obs"][:, -1, column] for column in range(3))
    last = np.where(batch["next_obs"][:, -1, 2] > steps, batch["next_obs"][:, -1, 2], -1)
    wrong |= last != steps + 1
    frames = batch["obs"].shape[1]
    for frame in range(frames):
        back = frames - 1 - frame
        for stacked, at in ((batch["obs"], steps), (batch["next_obs"], steps + 1)):
            expected = _observation(streams, episodes, np.maximum(at - back, 0))
            wrong |= (stacked[:, frame] != expected).any(axis=1)
    return int(wrong.sum())


def count_broken(batch: Any) -> int:
    """How many sequences of a batch (n_step=1) are torn, not the steps of one episode, or not padded with zeros."""
    obs, valid = batch["obs"], batch["valid"]
    streams, episodes, steps = (obs[:, 0, column] for column in range(3))
    wrong = ~valid[:, 0] | (valid[:, 1:] & ~valid[:, :-1]).any(axis=1)
    for at in range(obs.shape[1]):
        expected = np.where(valid[:, at, None], _observation(streams, episodes, steps + at), 0)
        wrong |= (obs[:, at] != expected).any(axis=1)
    return int(wrong.sum())


class CheckedEnvs:
    """Environments whose every row follows from its stream, episode and step."""

    def __init__(self, streams: list[int], first_episode: int = 0) -> None:
        self.streams = np.array(streams)
        self.episodes = first_episode + self.streams
        self.steps = np.zeros_like(self.streams)

    def step(self) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """The rows of one step, and the final observations."""
        obs = _observation(self.streams, self.episodes, self.steps)
        reward = self.steps.astype(np.float32)
        self.steps += 1
        ended = self.steps == _length_of(self.episodes)
        final = {"obs": _observation(self.streams, self.episodes, self.steps)}
        rows = {
            "obs": obs,
            "reward": reward,
            "terminated": ended & (self.episodes % 2 == 0),
            "truncated": ended & (self.episodes % 2 == 1),
        }
        self.episodes = self.episodes + ended
        self.steps[ended] = 0
        return rows, final
