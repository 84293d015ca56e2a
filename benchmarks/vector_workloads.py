"""The environments of ``vector_envs.py``, and the limit: the same environments in plain loops."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SLEEPS = {"sleeps": 0.001, "short-sleeps": 0.0001}
"""Workloads that sleep, and their mean seconds per step."""
ANSWER_SECONDS = 60

Env = gymnasium.Env[Any, Any]


class Noop(Env):
    """A constant observation: what is measured is the vector environment itself."""

    observation_space: Any = spaces.Box(-1, 1, (4,), np.float32)
    action_space: Any = spaces.Discrete(2)
    observation: Any = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del seed, options
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self.observation, 1.0, False, False, {}


class Pixels(Noop):
    """A new frame in each step, as large as Atari's stack of four."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del seed, options
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self._frame(), 1.0, False, False, {}

    def _frame(self) -> NDArray[np.uint8]:
        self.count = (self.count + 1) % 256
        return np.full((84, 84, 4), self.count, np.uint8)


class Mixed(Noop):
    """A dict of new arrays of several types and of discrete values in each step."""

    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-1, 1, (3,), np.float64),
            "velocity": spaces.Box(-1, 1, (3,), np.float32),
            "lidar": spaces.Box(0, 1, (64,), np.float32),
            "camera": spaces.Box(0, 255, (16, 16), np.uint8),
            "goal": spaces.Discrete(8),
            "holding": spaces.Discrete(2),
        }
    )
    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del seed, options
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self._observation(), 1.0, False, False, {}

    def _observation(self) -> dict[str, Any]:
        self.count = (self.count + 1) % 256
        return {
            "position": np.zeros(3),
            "velocity": np.zeros(3, np.float32),
            "lidar": np.zeros(64, np.float32),
            "camera": np.full((16, 16), self.count, np.uint8),
            # Arrays, because tianshou drops numpy scalars silently.
            "goal": np.array(self.count % 8),
            "holding": np.array(self.count % 2),
        }


class Sleeps(Noop):
    """Sleeps in each step for an exponentially distributed time, like a simulator on another machine or a GPU."""

    def __init__(self, mean: float, seed: int) -> None:
        self._mean = mean
        self._random = random.Random(seed)

    def draw(self) -> float:
        return self._random.expovariate(1 / self._mean)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        time.sleep(self.draw())
        return self.observation, 1.0, False, False, {}


MAKE: dict[str, Callable[[int], Env]] = {
    "noop": lambda _: Noop(),
    "CartPole-v1": lambda _: gymnasium.make("CartPole-v1"),
    "pixels": lambda _: Pixels(),
    "dict": lambda _: Mixed(),
    "HalfCheetah-v5": lambda _: gymnasium.make("HalfCheetah-v5"),
    **{name: partial(Sleeps, mean) for name, mean in SLEEPS.items()},
}


def make(workload: str, index: int = 0) -> Env:
    return MAKE[workload](index)


def env_fns(workload: str, num_envs: int) -> list[Callable[[], Env]]:
    """One function per environment. They can be pickled, which some start methods need."""
    return [partial(make, workload, index) for index in range(num_envs)]


def missing_for(workload: str) -> str:
    """Why a workload cannot run here; empty if it can."""
    needed = "mujoco" if workload == "HalfCheetah-v5" else "gymnasium"
    return "" if importlib.util.find_spec(needed) else f"{needed} is not installed"


def draw_actions(workload: str, num_envs: int, count: int = 64) -> list[NDArray[Any]]:
    """``count`` batches of actions, drawn before the clock starts."""
    env = make(workload)
    random_ = np.random.default_rng(0)
    if isinstance(env.action_space, spaces.Discrete):
        drawn: NDArray[Any] = random_.integers(0, env.action_space.n, (count, num_envs))
    else:
        shape, dtype = env.action_space.shape, env.action_space.dtype
        drawn = random_.uniform(-1, 1, (count, num_envs, *shape)).astype(dtype)  # type: ignore[misc]
    env.close()
    return list(drawn)


# -------------------------------------------------------------------------------------------------------- the limit


def plain_loops(workload: str, num_envs: int, processes: int, seconds: list[float]) -> list[float]:
    """The limit: ``processes`` processes, each with a plain loop over its share of the environments, which sends no
    results. Returns nanoseconds per step of all processes together, for each block of ``seconds``."""
    context = mp.get_context("fork")
    ends: list[Connection] = []
    workers = []
    for index in range(processes):
        near, far = context.Pipe()
        share = range(index * num_envs // processes, (index + 1) * num_envs // processes)
        worker = context.Process(target=_loop, args=(workload, share, far), daemon=True)
        worker.start()
        far.close()
        ends.append(near)
        workers.append(worker)
    for end in ends:
        _answer(end)
    values = []
    for block_seconds in seconds:
        begin = time.monotonic_ns()
        for end in ends:
            end.send(begin + int(block_seconds * 1e9))
        answers = [_answer(end) for end in ends]
        values.append((max(at for _, at in answers) - begin) / sum(steps for steps, _ in answers))
    for end in ends:
        end.send(None)
    for worker in workers:
        worker.join()
    return values


def _answer(end: Connection) -> Any:
    if not end.poll(ANSWER_SECONDS):
        raise TimeoutError("a plain loop did not answer")
    return end.recv()


def _loop(workload: str, share: range, end: Connection) -> None:
    envs = [make(workload, index) for index in share]
    for index, env in zip(share, envs, strict=True):
        env.reset(seed=index)
    # As environments get them from a vector environment: numpy scalars, or rows of an array.
    batches = [list(batch) for batch in draw_actions(workload, len(envs))]
    done = [False] * len(envs)
    now, number = time.monotonic_ns, 0
    end.send(None)
    while (deadline := end.recv()) is not None:
        steps = 0
        while not steps or now() < deadline:  # on a busy machine the request can arrive after its deadline
            actions = batches[number % len(batches)]
            for index, env in enumerate(envs):
                if done[index]:
                    # Instead of a step, as in gymnasium's vector environments.
                    env.reset()
                    done[index] = False
                else:
                    _, _, terminated, truncated, _ = env.step(actions[index])
                    done[index] = terminated or truncated
            steps += len(envs)
            number += 1
        end.send((steps, now()))
