"""``num_workers=0``: the caller steps the environments, and everything else is as with workers in processes.

``test_conformance`` compares whole runs; here is what only this worker does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError

from memlane.vector import AsyncVectorEnv
from memlane.vector.worker import shared_assets
from tests.support.failing_envs import PLAIN, RAISE, Boom, makers
from tests.support.vector_envs import Counter, Raiser, ours

pytestmark = pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): ")


def _pid(env: Any) -> int:  # noqa: ARG001
    return os.getpid()


def test_no_process_is_started() -> None:
    with ours([Counter] * 3, num_workers=0) as envs:
        envs.reset(seed=0)
        assert envs.apply(_pid) == (os.getpid(),) * 3
        assert mp.active_children() == []


def test_the_placement_says_that_there_are_no_workers() -> None:
    with ours([Counter], num_workers=0) as envs:
        assert envs.num_workers == 0
        assert str(envs.placement).startswith("no workers (num_workers=0")


def test_send_and_recv_work() -> None:
    with ours([Counter] * 3, num_workers=0) as envs:
        envs.reset(seed=0)
        envs.send(np.array([0, 0]), env_ids=[0, 2])
        assert envs.recv(min_envs=2)[-1].tolist() == [0, 2]


def test_an_exception_of_an_environment_reaches_the_caller_with_its_environment_named() -> None:
    with ours([Counter, partial(Raiser, partial(KeyError, "broken"))], num_workers=0) as envs:
        envs.reset(seed=3)
        with pytest.raises(KeyError, match="broken") as caught:
            envs.step(np.array([0, 99]))
        assert "raised by environment 1" in "".join(caught.value.__notes__)
        with pytest.raises(ClosedEnvironmentError, match="environment 1 raised KeyError"):
            envs.step(np.array([0, 0]))


def test_an_environment_that_raises_is_replaced_with_on_error_restart() -> None:
    with ours(makers(2), num_workers=0, on_error="restart") as envs:
        envs.reset(seed=0)
        _, rewards, _, truncated, infos = envs.step(np.array([PLAIN, RAISE]))
        assert (rewards[1], truncated.tolist()) == (0.0, [False, True])
        assert Boom.__name__ in infos["restarted"][1]
        assert envs.restarts == 1


def test_a_factory_that_raises_closes_the_environments_that_were_built() -> None:
    closed: list[int] = []

    class Closing(Counter):
        def close(self) -> None:
            closed.append(1)

    with pytest.raises(ZeroDivisionError):
        AsyncVectorEnv([Closing, lambda: 1 / 0], num_workers=0)  # type: ignore[list-item,return-value]
    assert closed == [1]


def test_close_closes_each_environment_once() -> None:
    closed: list[int] = []

    class Closing(Counter):
        def close(self) -> None:
            closed.append(1)

    envs = AsyncVectorEnv([Closing] * 2, num_workers=0)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert closed == [1, 1]


def test_shared_assets_reach_the_environments() -> None:
    def total(env: Any) -> float:  # noqa: ARG001
        return float(shared_assets()["map"].sum())

    with ours([Counter], num_workers=0, shared_assets={"map": np.ones(5)}) as envs:
        assert envs.apply(total) == (5.0,)


def test_functions_that_build_environments_are_not_pickled() -> None:
    lock = threading.Lock()  # cannot be pickled

    def build() -> Counter:
        with lock:
            return Counter()

    with ours([build], num_workers=0) as envs:
        envs.reset(seed=0)


def test_a_step_timeout_is_refused() -> None:
    with pytest.raises(ValueError, match="step_timeout=2 needs num_workers=1 or more"):
        AsyncVectorEnv([Counter], num_workers=0, step_timeout=2)


def test_ctrl_c_within_an_environment_ends_the_call_and_later_ones_say_so() -> None:
    with ours([Counter, partial(Raiser, KeyboardInterrupt)], num_workers=0) as envs:
        envs.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, 99]))
        with pytest.raises(ClosedEnvironmentError, match="KeyboardInterrupt interrupted the environments"):
            envs.step(np.array([0, 0]))


class Interrupted(Counter):
    """Ctrl-C comes while it is reset."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        del kwargs
        raise KeyboardInterrupt


def test_ctrl_c_within_a_reset_is_reported_as_one_within_an_environment() -> None:
    with ours([Counter, Interrupted], num_workers=0) as envs:
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=0)
        with pytest.raises(ClosedEnvironmentError, match="KeyboardInterrupt interrupted the environments"):
            envs.reset(seed=0)
