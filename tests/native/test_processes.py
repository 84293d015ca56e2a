"""Native environments with threads, in forked children and in worker processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from memlane.native import NativeEnv, NativeVectorEnv
from memlane.native.lowlevel import built_in, open_library
from memlane.vector import AsyncVectorEnv, WorkerDied
from tests.support.native_envs import Making, assert_same, copied, run

pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]

MANY = 300  # several ranges of 64, and one that is shorter


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", ["CartPole-v1", "mixed", "team"])
@pytest.mark.parametrize("threads", [2, 3, None])
def test_results_do_not_depend_on_the_number_of_threads(
    threads: int | None, name: str, mode: str, making: Making
) -> None:
    alone = making(name, MANY, num_threads=1, autoreset_mode=mode)
    several = making(name, MANY, num_threads=threads, autoreset_mode=mode)
    assert_same(several.reset(seed=1), alone.reset(seed=1))
    assert_same(run(several, 40), run(alone, 40))
    assert_same(several.state, alone.state)
    assert_same(several.random, alone.random)


def test_more_threads_than_environments_are_fine(making: Making) -> None:
    envs = making("CartPole-v1", 2, num_threads=8)
    envs.reset(seed=1)
    assert len(run(envs, 20)) == 20


def test_a_number_of_threads_is_kept(making: Making) -> None:
    envs = making("CartPole-v1", MANY, num_threads=3)
    envs.reset(seed=1)
    run(envs, 3)
    assert envs.num_threads == 3


def test_few_environments_are_left_to_one_thread(making: Making) -> None:
    envs = making("CartPole-v1", 4)
    envs.reset(seed=1)
    run(envs, 50)
    assert envs.num_threads == 1


def test_no_more_threads_are_chosen_than_there_are_cores(making: Making) -> None:
    envs = making("CartPole-v1", 20_000)
    envs.reset(seed=1)
    seen = set()
    for _ in range(30):
        envs.step(np.zeros(20_000, np.int64))
        seen.add(envs.num_threads)
    assert 1 <= min(seen) <= max(seen) <= len(os.sched_getaffinity(0))


# ---------------------------------------------------------------------------------------------------------------- fork


def forked(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a forked child; its exception is raised here."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send((True, work()))
        except BaseException as error:
            theirs.send((False, f"{type(error).__name__}: {error}"))

    process = context.Process(target=child)
    process.start()
    try:
        assert ours.poll(60), "the child hangs"
        good, result = ours.recv()
    finally:
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        ours.close()
        theirs.close()
    assert good, result
    return result


@pytest.mark.parametrize("threads", [1, 2, None])
def test_a_forked_child_goes_on_where_its_parent_was(threads: int | None, making: Making) -> None:
    envs, control = (making("mixed", MANY, num_threads=threads) for _ in range(2))
    for both in (envs, control):
        both.reset(seed=1)
        run(both, 5)
    assert_same(forked(lambda: run(envs, 20, seed=9)), run(control, 20, seed=9))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_forked_child_does_is_not_seen_by_its_parent(threads: int, making: Making) -> None:
    envs = making("mixed", MANY, num_threads=threads)
    envs.reset(seed=1)
    run(envs, 5)
    before = copied(envs._fields)
    forked(lambda: len(run(envs, 20)))
    assert_same(envs._fields, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_parent_goes_on_after_a_fork_as_if_there_were_none(threads: int, making: Making) -> None:
    envs, control = (making("mixed", MANY, num_threads=threads) for _ in range(2))
    for both in (envs, control):
        both.reset(seed=1)
        run(both, 5)
    forked(lambda: len(run(envs, 20)))
    assert_same(run(envs, 20, seed=9), run(control, 20, seed=9))


def test_a_forked_child_may_close_what_its_parent_uses(making: Making) -> None:
    envs = making("mixed", MANY, num_threads=2)
    envs.reset(seed=1)
    run(envs, 3)
    forked(envs.close)
    assert len(run(envs, 3)) == 3


def _exchange(envs: NativeVectorEnv) -> list[Any]:
    envs.send([0] * envs.num_envs)
    observations, *_, ids = envs.recv(envs.num_envs, timeout=60)
    return [observations.tolist(), ids.tolist()]


def test_a_forked_child_sends_and_receives_with_threads_of_its_own(making: Making) -> None:
    envs = making("trouble", 5)
    envs.reset(seed=1)
    _exchange(envs)
    assert forked(lambda: _exchange(envs)) == [[2] * 5, [0, 1, 2, 3, 4]]
    assert _exchange(envs) == [[2] * 5, [0, 1, 2, 3, 4]]


def test_a_forked_child_does_not_wait_for_what_its_parent_has_sent(making: Making) -> None:
    """The threads of the parent do not exist in the child, which must not wait for steps that never complete."""
    envs = making("trouble", 3)
    envs.reset(seed=1)
    envs.send([1, 0, 0])

    def begin_again() -> Any:
        observations, _ = envs.reset(seed=2)
        return [observations.tolist(), _exchange(envs)]

    try:
        assert forked(begin_again) == [[0] * 3, [[1] * 3, [0, 1, 2]]]
    finally:
        envs.recv(3, timeout=60)


def test_in_debug_mode_a_forked_child_must_create_its_own(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    envs = making("CartPole-v1", 2)
    del [*envs.reset(seed=1)][:]

    def step() -> str:
        try:
            envs.step([0, 0])
        except ValueError as error:
            return str(error)
        return ""

    assert "create new ones in this process" in forked(step)


# ------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_worker_processes_step_native_environments(context: str) -> None:
    envs = AsyncVectorEnv([lambda: gymnasium.make("memlane/CartPole-v1")] * 4, num_workers=2, context=context)
    control = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("memlane/CartPole-v1")] * 4)
    try:
        assert_same(envs.reset(seed=1), control.reset(seed=1))
        for step in range(60):
            actions = np.array([step, step + 1, 0, 1]) % 2
            assert_same(envs.step(actions), control.step(actions), f"step {step}")
    finally:
        envs.close()
        control.close()


def _loaded(path: Path) -> NativeEnv:
    return NativeEnv(open_library(path))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_crash_in_a_worker_is_an_error_that_names_the_signal(context: str, library_of: Callable[[str], Path]) -> None:
    envs = AsyncVectorEnv([partial(_loaded, library_of("trouble"))] * 4, num_workers=2, context=context)
    try:
        envs.reset(seed=1)
        envs.step([0, 0, 0, 0])
        with pytest.raises(WorkerDied, match="SIGSEGV") as raised:
            envs.step([0, 0, 0, 2])
        assert list(raised.value.envs) == [2, 3]
    finally:
        envs.close(terminate=True)


def test_after_a_crash_a_worker_is_replaced_when_that_is_asked_for(library_of: Callable[[str], Path]) -> None:
    envs = AsyncVectorEnv([partial(_loaded, library_of("trouble"))] * 4, num_workers=2, on_error="restart")
    try:
        envs.reset(seed=1)
        envs.step([0, 0, 0, 0])
        with pytest.warns(UserWarning, match=r"restart 1: .*SIGSEGV"):
            _, _, _, truncated, _ = envs.step([0, 0, 0, 2])
        assert truncated.tolist() == [False, False, True, True]
        observations, *_ = envs.step([0, 0, 0, 0])
        assert observations[:2].tolist() == [3, 3]
    finally:
        envs.close()


def test_a_spec_that_goes_along_to_workers_does_not_crash_them() -> None:
    spec = built_in("CartPole-v1")
    try:
        pickle.dumps(spec)
    except Exception:
        return  # an error says that it cannot
    envs = AsyncVectorEnv([lambda: NativeEnv(spec)] * 2, num_workers=1, context="spawn")
    try:
        envs.reset(seed=1)
    finally:
        envs.close(terminate=True)
