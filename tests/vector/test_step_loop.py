"""StepLoop: what an environment may return or raise, and what the caller gets, in ``step`` and ``send``/``recv``."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv

from memlane.vector import AsyncVectorEnv, WorkerDied
from tests.support.vector_envs import difference, ours, reference

# By a signal: a test that hangs fails by itself and does not take the others with it.
pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]

ENVS = 3
ROWS = np.arange(8, dtype=np.float32)


class Scripted(gymnasium.Env[Any, Any]):
    """Returns from a step what a function of the step count returns."""

    observation_space = Box(-1000, 1000, (4,), np.float32)
    action_space = Discrete(10)

    def __init__(self, say: Callable[[int], Any]) -> None:
        self._say = say
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        del action
        self._steps += 1
        return self._say(self._steps)


def step(envs: VectorEnv[Any, Any, Any]) -> Any:
    return envs.step(np.arange(envs.num_envs))


def send(envs: AsyncVectorEnv) -> Any:
    envs.send(np.arange(envs.num_envs))
    return envs.recv(envs.num_envs)[:5]


WAYS = pytest.mark.parametrize("way", [step, send])


@WAYS
@pytest.mark.parametrize(
    "say",
    [
        lambda n: (ROWS[:4] + n, float(n), False, False, {}),
        lambda n: [ROWS[:4] + n, n, False, False, {"n": n}],
        lambda n: (ROWS[:4] + n, np.float32(n), np.False_, np.bool_(n == 2), {}),
        lambda n: (ROWS[::2], np.int64(n), 0, 0, {"n": n}),
        lambda n: (ROWS[:4].astype(">f4"), True, False, n == 3, {}),
        lambda n: (ROWS[:4], np.array(n, np.float64), False, False, {"n": np.arange(n)}),
        lambda n: (ROWS[:4], 1.0, False, False, OrderedDict(n=n) if n % 2 else {}),
    ],
    ids=["plain", "a list", "numpy's flags", "every second number", "big-endian", "an array", "a dict's subclass"],
)
def test_valid_results_are_the_same_as_in_process(way: Callable[..., Any], say: Callable[[int], Any]) -> None:
    fns = [lambda: Scripted(say)] * ENVS
    with ours(fns) as with_workers, reference(fns) as in_process:
        with_workers.reset(seed=0)
        in_process.reset(seed=0)
        for _ in range(5):
            assert not difference(way(with_workers), step(in_process))


@WAYS
@pytest.mark.parametrize(
    ("say", "error", "message"),
    [
        (lambda _: None, TypeError, "step() must return observation, reward, terminated, truncated, info; found None"),
        (lambda _: (ROWS[:4], 1.0, False, {}), ValueError, "found 4 values: an environment for Gym before 0.26"),
        (lambda _: ROWS[:4], TypeError, "found one value, array("),
        (lambda _: (ROWS[:4].astype(complex), 1.0, False, False, {}), TypeError, "expected dtype float32, found"),
        (lambda _: (ROWS[:5], 1.0, False, False, {}), ValueError, "at 'observation': expected shape (4,), found (5,)"),
        (lambda _: (None, 1.0, False, False, {}), ValueError, "at 'observation': expected shape (4,), found None"),
        (lambda _: (ROWS[:4], "much", False, False, {}), ValueError, "a reward must be a number, found 'much'"),
        (lambda _: (ROWS[:4], "1", False, False, {}), ValueError, "a reward must be a number, found '1'"),
        (lambda _: (ROWS[:4], None, False, False, {}), TypeError, "a reward must be a number, found None"),
        (lambda _: (ROWS[:4], 1.0, np.zeros(2), False, {}), ValueError, "terminated as True or False, found array("),
        (lambda _: (ROWS[:4], 1.0, "no", False, {}), TypeError, "terminated as True or False, found 'no'"),
        (lambda _: (ROWS[:4], 1.0, False, "", {}), TypeError, "truncated as True or False, found ''"),
        (lambda _: (ROWS[:4], 1.0, False, False, [1]), TypeError, "info must be a dict, found [1]"),
        (lambda _: (ROWS[:4], 1.0, False, False, None), TypeError, "info must be a dict, found None"),
        (lambda _: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
    ids=["nothing", "four values", "an observation alone", "complex numbers", "a wrong shape", "no observation",
         "a word for a reward", "a number in words", "no reward", "two flags", "a word for a flag", "an empty word",
         "a list for an info", "no info", "an exception"],
)  # fmt: skip
def test_an_invalid_result_is_an_error_of_its_environment(
    way: Callable[..., Any], say: Callable[[int], Any], error: type[Exception], message: str
) -> None:
    def good() -> Scripted:
        return Scripted(lambda n: (ROWS[:4], float(n), False, False, {}))

    with ours([good, lambda: Scripted(say), good]) as envs:
        envs.reset(seed=0)
        with pytest.raises(error, match=re.escape(message)) as raised:
            way(envs)
        assert "environment 1" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_reset_without_an_info_is_named(num_workers: int) -> None:
    class Short(Scripted):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=seed, options=options)[0]

    with (
        ours([lambda: Short(lambda _: None)], num_workers=num_workers) as envs,
        pytest.raises(TypeError, match=r"must return observation, info; found one value, array\(.*; return observa"),
    ):
        envs.reset(seed=0)


@WAYS
def test_a_reset_after_an_end_may_return_any_pair(way: Callable[..., Any]) -> None:
    class Ends(Scripted):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return list(super().reset(seed=seed, options=options))

    with ours([lambda: Ends(lambda _: (ROWS[:4], 1.0, True, False, {}))] * ENVS) as envs:
        envs.reset(seed=0)
        assert way(envs)[2].all()
        assert not way(envs)[0].any()


@WAYS
def test_the_traceback_of_an_exception_has_the_line_that_raised_it(way: Callable[..., Any]) -> None:
    with ours([lambda: Scripted(lambda n: n / 0)] * ENVS) as envs:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError) as raised:
            way(envs)
        assert "return self._say(self._steps)" in str(raised.value.__cause__)


@WAYS
def test_an_environment_that_ends_its_process_is_a_dead_worker(way: Callable[..., Any]) -> None:
    with ours([lambda: Scripted(lambda _: sys.exit(7))] * ENVS) as envs:
        envs.reset(seed=0)
        with pytest.raises(WorkerDied, match="exited with code 7"):
            way(envs)


def test_infos_of_one_command_do_not_come_again_with_the_next() -> None:
    with ours([lambda: Scripted(lambda n: (ROWS[:4], 1.0, False, False, {"n": n} if n == 1 else {}))] * ENVS) as envs:
        envs.reset(seed=0)
        assert "n" in step(envs)[4]
        assert step(envs)[4] == {}
        assert send(envs)[4] == {}


@WAYS
def test_when_a_new_environment_fails_as_well_both_errors_are_reported(way: Callable[..., Any], tmp_path: Path) -> None:
    made = tmp_path / "made"

    def make() -> Scripted:
        if made.exists():
            raise OSError("the port is in use")
        made.touch()
        return Scripted(lambda n: n / 0)

    with ours([make], on_error="restart") as envs:
        envs.reset(seed=0)
        with pytest.raises(OSError, match="in use") as raised:
            way(envs)
        assert "ZeroDivisionError" in str(raised.value.__cause__)


@WAYS
@pytest.mark.parametrize(
    ("begin", "error"),
    [(lambda: 1 / 0, ZeroDivisionError), (lambda: ROWS[:4], ValueError), (lambda: (ROWS[:5], {}), ValueError)],
    ids=["an exception", "no info", "a wrong shape"],
)
def test_an_invalid_result_of_a_reset_after_an_end_is_an_error_of_its_environment(
    way: Callable[..., Any], begin: Callable[[], Any], error: type[Exception]
) -> None:
    class Ends(Scripted):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return begin() if self._steps else super().reset(seed=seed, options=options)

    with ours([lambda: Ends(lambda _: (ROWS[:4], 1.0, True, False, {}))] * ENVS) as envs:
        envs.reset(seed=0)
        assert way(envs)[2].all()
        with pytest.raises(error) as raised:
            way(envs)
        assert "environment 2" in "".join(raised.value.__notes__)
