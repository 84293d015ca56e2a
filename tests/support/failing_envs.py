"""Environments whose results can be checked and that fail on request. Light to import: every worker imports them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

PLAIN, KILL, SEGV, INVALID, EXIT, RAISE, SLEEP, SPIN, PERCENT, NAP = 0, -1, -2, -3, -4, -5, -6, -7, -8, -9
"""Actions of 0 and above are plain actions; negative ones are faults that the environment triggers."""

HEAD = 4
BODY = 60
LIMIT = 2**40


class Boom(Exception):
    """An exception of the environment's own."""


def trigger(fault: int) -> None:
    match fault:
        case _ if fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case _ if fault == SEGV:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        case _ if fault == INVALID:
            faulthandler.disable()
            ctypes.string_at(8)
        case _ if fault == EXIT:
            os._exit(3)
        case _ if fault == RAISE:
            raise Boom("boom")
        case _ if fault == PERCENT:
            raise Boom("50% of %d are broken")
        case _ if fault == SLEEP:
            time.sleep(60)
        case _ if fault == NAP:
            time.sleep(0.6)
        case _ if fault == SPIN:
            while True:
                pass


def observation(env: int, episode: int, step: int, action: int) -> NDArray[np.int64]:
    """Every number of the body depends on the head, so that a mixture of two observations is detected."""
    row = np.empty(HEAD + BODY, np.int64)
    row[:HEAD] = env, episode, step, action
    row[HEAD:] = np.arange(1, BODY + 1) * (env * 7 + episode * 1_000_003 + step * 101 + action)
    return row


def length_of(env: int, episode: int) -> int:
    """How many steps an episode has."""
    return 3 + (env * 5 + episode * 3) % 11


def reward_of(env: int, step: int, action: int) -> float:
    return env * 1000.0 + step + action / 1024


class Counting(gymnasium.Env[Any, Any]):
    """The observation says which environment, which episode, which step of it, and what the action was."""

    observation_space = spaces.Box(-LIMIT * 1024, LIMIT * 1024, (HEAD + BODY,), np.int64)
    action_space: spaces.Space[Any] = spaces.Box(-LIMIT, LIMIT, (), np.int64)

    def __init__(self, env: int, factory_fault: Path | None = None, endless: bool = False) -> None:
        if factory_fault is not None and factory_fault.exists():
            trigger(int(factory_fault.read_text()))
        self.env = env
        self.endless = endless
        self.episode = -1
        self.steps = 0
        self.mark: Any = None
        self.info_bytes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if options and "faults" in options:
            self.plan(**options)
        elif options:
            self.once(**options)
        self.episode += 1
        self.steps = 0
        return observation(self.env, self.episode, 0, -1), {}

    def step(self, action: Any) -> Any:
        action = int(action)
        if action < 0:
            trigger(action)
        self.steps += 1
        over = self.steps >= length_of(self.env, self.episode) and not self.endless
        terminated, truncated = over and self.env % 2 == 0, over and self.env % 2 == 1
        info = {"ballast": b"x" * self.info_bytes} if self.info_bytes else {}
        seen = observation(self.env, self.episode, self.steps, action)
        return seen, reward_of(self.env, self.steps, action), terminated, truncated, info

    # Methods for `call`.

    def pid(self) -> int:
        return os.getpid()

    def once(self, env: int, fault: int, path: str | None = None) -> int:
        """Trigger a fault in this environment; with a path only the first time, also across restarts."""
        if env == self.env:
            if path is not None:
                try:
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return self.env
            trigger(fault)
        return self.env

    def plan(self, faults: dict[int, int], path: str) -> int:
        """Trigger faults in several environments, each once."""
        return self.once(self.env, faults.get(self.env, PLAIN), f"{path}-{self.env}")

    def long_answer(self, env: int, fault: int, path: str) -> bytes:
        """Return more than a pipe holds, after a fault."""
        self.once(env, fault, path)
        return bytes([self.env]) * 1_000_000


class WordAction(spaces.Space[int]):
    """A space without shared memory: its values travel in messages."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> int:  # noqa: ARG002
        return 0

    def contains(self, x: Any) -> bool:
        return isinstance(x, int)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordAction)

    def __hash__(self) -> int:
        return 1


class MessageActions(Counting):
    action_space = WordAction()


def makers(count: int, kind: Callable[..., Any] = Counting, **arguments: Any) -> list[Callable[[], Any]]:
    return [partial(kind, env, **arguments) for env in range(count)]


class Ledger:
    """The expected results of every environment: no result of a survivor is lost, repeated or mixed with another."""

    def __init__(self, count: int, mode: str) -> None:
        self.mode = mode
        self.episode = [-1] * count
        self.steps = [0] * count
        self.needs_reset = [False] * count
        self.last: list[NDArray[np.int64] | None] = [None] * count
        self.restarted = 0
        self.checked = 0

    def check_reset(self, envs: list[int], observations: Any, pids_changed: set[int]) -> None:
        for row, env in enumerate(envs):
            self.episode[env] = 0 if env in pids_changed else self.episode[env] + 1
            self._begin_episode(env)
            self._equal(observations[row], env, -1)

    def forget(self, env: int) -> None:
        """The environment was restarted: its next episode is its first."""
        self.episode[env] = -1

    def check_step(self, envs: list[int], actions: list[int], results: Any, lost: set[int]) -> set[int]:
        """Check that the environments in ``lost`` were truncated and no other was restarted. Returns them."""
        observations, rewards, terminated, truncated, infos = results
        causes = infos.get("restarted", [None] * len(envs))
        hit: set[int] = set()
        for row, (env, action) in enumerate(zip(envs, actions, strict=True)):
            ends = (bool(terminated[row]), bool(truncated[row]))
            self.checked += 1
            if causes[row] is not None:
                assert env in lost, f"environment {env} was restarted without a fault: {causes[row]}"
                hit.add(env)
                self.restarted += 1
                assert (rewards[row], *ends) == (0.0, False, True)
                if self.mode == "SameStep":
                    self._final(infos, row, env)
                self.episode[env] = 0
                self._begin_episode(env)
                self.needs_reset[env] = self.mode == "NextStep"
                self._equal(observations[row], env, -1)
            elif env in lost:
                raise AssertionError(f"environment {env} was restarted and is not truncated")
            elif self.needs_reset[env]:
                self.episode[env] += 1
                self._begin_episode(env)
                assert (rewards[row], *ends) == (0.0, False, False)
                self._equal(observations[row], env, -1)
            else:
                self._step(env, action, observations[row], rewards[row], ends, infos, row)
        return hit

    def _step(self, env: int, action: int, seen: Any, reward: float, ends: Any, infos: Any, row: int) -> None:
        self.steps[env] += 1
        assert reward == reward_of(env, self.steps[env], action), f"the reward of environment {env}"
        over = self.steps[env] >= length_of(env, self.episode[env])
        assert ends == (over and env % 2 == 0, over and env % 2 == 1), f"the end of environment {env}"
        if over and self.mode == "SameStep":
            self.last[env] = observation(env, self.episode[env], self.steps[env], action)
            self._final(infos, row, env)
            self.episode[env] += 1
            self._begin_episode(env)
            self._equal(seen, env, -1)
        else:
            self.needs_reset[env] = over and self.mode == "NextStep"
            self._equal(seen, env, action)

    def _final(self, infos: Any, row: int, env: int) -> None:
        assert infos["final_obs"][row] is not None, f"environment {env} ended without a final observation"
        assert np.array_equal(infos["final_obs"][row], self.last[env]), f"the final observation of {env}"

    def _begin_episode(self, env: int) -> None:
        self.steps[env] = 0
        self.needs_reset[env] = False

    def _equal(self, seen: Any, env: int, action: int) -> None:
        expected = observation(env, self.episode[env], self.steps[env], action)
        assert np.array_equal(seen, expected), (
            f"environment {env}: found {seen[:HEAD].tolist()}, expected {expected[:HEAD].tolist()}"
        )
        self.last[env] = expected
