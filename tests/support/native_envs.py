"""Helpers of the tests of native environments: compile C, compare results, run random actions."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memlane.native import NativeVectorEnv

ENVS = Path(__file__).parents[1] / "native" / "envs"
INCLUDE = Path(__file__).parents[2] / "cpp" / "include"

# Variants of `echo.c`, whose action is two numbers: one per dtype that the host reads without conversion.
ECHOES = {
    "echo_float32": ["-DTYPE=float", "-DACTION=.dtype=MEMLANE_FLOAT32"],
    "echo_float64": ["-DTYPE=double", "-DACTION=.dtype=MEMLANE_FLOAT64"],
    "echo_int16": ["-DTYPE=int16_t", "-DACTION=.dtype=MEMLANE_INT16"],
    "echo_choices": ["-DTYPE=int64_t", "-DACTION=.dtype=MEMLANE_INT64, .kind=MEMLANE_DISCRETE"],
    "echo_named": ["-DTYPE=float", '-DACTION=.name="go", .dtype=MEMLANE_FLOAT32'],
}
OWN = ["mixed", "team", "trouble", *ECHOES]

Making = Callable[..., NativeVectorEnv]


def gcc(source: Path, target: Path, *arguments: str) -> Path:
    subprocess.run(["gcc", *arguments, f"-I{INCLUDE}", str(source), "-o", str(target), "-lm"], check=True)
    return target


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Assert that two results are equal bit by bit: arrays, dicts, tuples or lists of them."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for name in theirs:
            assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs), where
        for part, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{part}]")
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{row}]")
    else:
        one, other = np.asarray(ours), np.asarray(theirs)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert one.tobytes() == other.tobytes(), f"{where}: {ours} is not {theirs}"


def copied(value: Any) -> Any:
    """A copy that the environments do not overwrite."""
    return copy.deepcopy(value)


def actions_for(envs: NativeVectorEnv, seed: int) -> Iterator[Any]:
    """Random actions, the same for the same seed."""
    envs.action_space.seed(seed)
    while True:
        yield envs.action_space.sample()


def run(envs: NativeVectorEnv, steps: int, seed: int = 0) -> list[Any]:
    """The results of some random steps."""
    actions = actions_for(envs, seed)
    return [copied(envs.step(next(actions))) for _ in range(steps)]
