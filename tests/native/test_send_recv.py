"""send and recv of native environments: steps that complete first are received first."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from memlane.core import WaitTimeout
from memlane.native import NativeVectorEnv, Spec
from memlane.vector import CallTimeout
from tests.support.native_envs import Making, actions_for, assert_same, copied
from tests.support.processes import within

pytestmark = pytest.mark.timeout(120, method="signal")

SLOW, LAST = 1, 3


@pytest.fixture
def envs(making: Making) -> NativeVectorEnv:
    """Four environments that count their steps; a step with action 1 takes 0.3 s."""
    made = making("trouble", 4)
    made.reset(seed=1)
    return made


def test_everything_that_was_sent_is_received_in_the_order_of_its_numbers(envs: NativeVectorEnv) -> None:
    envs.send([0, 3, 0, 0])
    observations, rewards, terminated, truncated, infos, ids = envs.recv(4)
    assert ids.tolist() == [0, 1, 2, 3]
    assert observations.tolist() == [1, 1, 1, 1]
    assert rewards.tolist() == [0, 3, 0, 0]
    assert terminated.tolist() == [False, True, False, False]
    assert not truncated.any()
    assert infos["number"].tolist() == [0, 13, 20, 30]
    assert infos["_number"].tolist() == [True] * 4


def test_what_is_received_is_of_the_types_that_a_step_has(envs: NativeVectorEnv) -> None:
    envs.send([0, 0, 0, 0])
    received = envs.recv(4)
    stepped = envs.step([0, 0, 0, 0])
    assert [one.dtype for one in received[:4]] == [one.dtype for one in stepped[:4]]
    assert received[5].dtype == np.int64


def test_what_is_received_are_copies(envs: NativeVectorEnv) -> None:
    envs.send([0, 0, 0, 0])
    received = envs.recv(4)
    kept = copied(received)
    envs.step([0, 0, 3, 0])
    assert_same(received, kept)


def test_actions_go_to_the_environments_that_are_named_in_that_order(envs: NativeVectorEnv) -> None:
    envs.send([3, 0], [3, 1])
    observations, rewards, *_, ids = envs.recv(2)
    assert (ids.tolist(), observations.tolist(), rewards.tolist()) == ([1, 3], [1, 1], [0, 3])
    assert envs.step([0, 0, 0, 0])[0].tolist() == [1, 2, 1, 0]


def test_fields_of_several_actions_go_to_the_environments_that_are_named(making: Making) -> None:
    envs = making("mixed", 3)
    envs.reset(seed=1)
    envs.send({"push": [[0.5, 0], [0, 0]], "levers": [[2, 1], [0, 0]], "gear": [4, 2]}, np.array([2, 0]))
    observations, rewards, _, _, infos, ids = envs.recv(2)
    assert ids.tolist() == [0, 2]
    assert rewards.tolist() == [2000, 0.5 + 20 + 100 + 4000]
    assert observations["a patch"].shape == (2, 2, 3)
    assert infos["corner"].shape == (2, 2)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_run_of_sends_is_that_of_steps(mode: str, making: Making) -> None:
    sent, stepped = making("mixed", 5, autoreset_mode=mode), making("mixed", 5, autoreset_mode=mode)
    sent.reset(seed=1)
    stepped.reset(seed=1)
    actions = actions_for(stepped, 1)
    for step in range(60):
        action = next(actions)
        sent.send(action)
        *received, ids = sent.recv(5)
        assert ids.tolist() == [0, 1, 2, 3, 4]
        assert_same(received, list(copied(stepped.step(action))), f"step {step}")


def test_a_slow_environment_does_not_hold_back_the_others(envs: NativeVectorEnv) -> None:
    began = time.monotonic()
    envs.send([0, SLOW, 0, 0])
    *_, ids = envs.recv(3)
    assert ids.tolist() == [0, 2, 3]
    assert time.monotonic() - began < within(0.25)
    *_, ids = envs.recv(1)
    assert ids.tolist() == [1]


def test_among_many_a_slow_environment_does_not_hold_back_the_others(making: Making) -> None:
    envs = making("trouble", 64, seconds=0.5)
    envs.reset(seed=1)
    began = time.monotonic()
    envs.send([SLOW] + [0] * 63)
    received: list[int] = []
    while len(received) < 63:
        received += envs.recv(1)[5].tolist()
    assert time.monotonic() - began < within(0.4)
    assert envs.recv(1)[5].tolist() == [0]


def test_the_others_go_on_while_one_is_slow(envs: NativeVectorEnv) -> None:
    envs.send([SLOW, 0, 0, 0])
    rounds = 0
    while 0 not in (ids := envs.recv(1)[5].tolist()) and rounds < 10_000:
        rounds += 1
        envs.send([0] * len(ids), ids)
    assert rounds > 5


def test_every_action_is_answered_once(making: Making) -> None:
    envs = making("trouble", 50)
    envs.reset(seed=1)
    rng = np.random.default_rng(1)
    away: set[int] = set()
    sent, received = np.zeros(50, int), np.zeros(50, int)
    for _ in range(300):
        free = [env for env in range(50) if env not in away]
        ids = rng.permutation(free)[: rng.integers(0, len(free) + 1)]
        envs.send([0] * len(ids), ids)
        away |= set(ids.tolist())
        sent[ids] += 1
        if away:
            observations, *_, got = envs.recv(int(rng.integers(1, len(away) + 1)))
            received[got] += 1
            assert set(got.tolist()) <= away
            assert observations.tolist() == received[got].tolist()
            away -= set(got.tolist())
    if away:
        envs.recv(len(away))
        received[list(away)] += 1
    assert sent.tolist() == received.tolist()


def test_a_wait_for_more_than_are_away_is_for_those_that_are(envs: NativeVectorEnv) -> None:
    envs.send([0, 0], [0, 2])
    assert envs.recv(100)[5].tolist() == [0, 2]


def test_a_wait_that_is_too_long_is_an_error_and_nothing_is_lost(envs: NativeVectorEnv) -> None:
    envs.send([0, SLOW, 0, 0])
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for 4 of 4") as caught:
        envs.recv(4, timeout=0.05)
    assert isinstance(caught.value, CallTimeout)  # as of AsyncVectorEnv
    assert envs.recv(4, timeout=60)[5].tolist() == [0, 1, 2, 3]


def test_a_wait_of_no_time_takes_what_is_ready(envs: NativeVectorEnv) -> None:
    envs.send([0], [2])
    time.sleep(0.1)
    assert envs.recv(1, timeout=0)[5].tolist() == [2]


def test_a_wait_for_no_environment_takes_what_is_ready_and_perhaps_nothing(envs: NativeVectorEnv) -> None:
    envs.send([SLOW], [2])
    observations, rewards, terminated, truncated, infos, ids = envs.recv(0)
    assert [len(array) for array in (observations, rewards, terminated, truncated, infos["number"], ids)] == [0] * 6
    assert envs.recv(1)[5].tolist() == [2]


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_no_duration_is_refused_whether_or_not_there_is_a_wait(
    timeout: Any, error: type[Exception], envs: NativeVectorEnv
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds, 0 or more"):
            envs.recv(timeout=timeout)
        envs.send([0], [2])
        time.sleep(0.1)
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds, 0 or more"):
            envs.recv(timeout=timeout)
        assert envs.recv()[5].tolist() == [2]


@pytest.mark.parametrize("number", [-1, 1.5, "1", None])
def test_a_number_of_environments_to_wait_for_that_is_none_is_an_error(number: Any, envs: NativeVectorEnv) -> None:
    with pytest.raises(ValueError, match="min_envs must be an integer of at least 0, found"):
        envs.recv(number)


def test_nothing_sent_is_nothing_to_wait_for(envs: NativeVectorEnv) -> None:
    with pytest.raises(NoAsyncCallError, match="without any prior call to `send`") as caught:
        envs.recv()
    assert caught.value.name == "recv"


def test_a_second_recv_of_what_was_received_is_an_error(envs: NativeVectorEnv) -> None:
    envs.send([0, 0, 0, 0])
    envs.recv(4)
    with pytest.raises(NoAsyncCallError):
        envs.recv()


def test_no_environments_may_be_sent_nothing(envs: NativeVectorEnv) -> None:
    envs.send([], [])
    envs.step([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([4], IndexError, "0 to 3, found 4"),
        ([-1], IndexError, "0 to 3, found -1"),
        ([1, 1], ValueError, "each environment once"),
        ([0.5], TypeError, "integers"),
        ([[0]], TypeError, "one dimension"),
        (["a"], TypeError, "integers"),
        (1, TypeError, "env_ids must be integers in one dimension"),
    ],
)
def test_numbers_of_environments_that_are_none_are_an_error(
    ids: Any, error: type[Exception], message: str, envs: NativeVectorEnv
) -> None:
    with pytest.raises(error, match=message):
        envs.send([0] * np.size(ids), ids)
    assert envs.step([0, 0, 0, 0])[0].tolist() == [1, 1, 1, 1]  # no environment had been sent an action


def test_an_action_for_an_environment_that_has_one_is_an_error_that_names_it(envs: NativeVectorEnv) -> None:
    envs.send([SLOW], [2])
    with pytest.raises(AlreadyPendingCallError, match=r"environments \[2\] have a pending action"):
        envs.send([0, 0], [1, 2])
    assert envs.recv(1)[5].tolist() == [2]


def test_an_action_for_an_environment_that_was_not_received_yet_is_an_error(envs: NativeVectorEnv) -> None:
    envs.send([0, 0, 0, 0])
    time.sleep(0.1)  # its step is complete, but not received
    with pytest.raises(AlreadyPendingCallError):
        envs.send([0], [2])


@pytest.mark.parametrize("call", ["step", "reset", "render", "step_into"])
def test_other_calls_must_wait_for_those_that_are_away(call: str, making: Making) -> None:
    envs = making("CartPole-v1", 2)
    envs.reset(seed=1)
    envs.send([0], [1])
    arguments = {"step": [[0, 0]], "reset": [], "render": [], "step_into": [[0, 0], {}, 0]}[call]
    with pytest.raises(
        ValueError, match="while 1 environments have pending actions from `send`; call `recv` first"
    ) as caught:
        getattr(envs, call)(*arguments)
    assert isinstance(caught.value, AlreadyPendingCallError)  # as of AsyncVectorEnv
    assert caught.value.name == "recv"
    assert envs.recv()[5].tolist() == [1]


def test_an_action_before_the_first_reset_is_an_error(making: Making) -> None:
    with pytest.raises(ValueError, match=r"call `reset\(\)` before `send`"):
        making("trouble", 2).send([0, 0])


def test_with_disabled_autoreset_an_action_for_one_that_ended_is_an_error(making: Making) -> None:
    envs = making("trouble", 3, autoreset_mode="Disabled")
    envs.reset(seed=1)
    envs.send([LAST, 0], [1, 2])
    envs.recv(2)
    with pytest.raises(AssertionError, match="environment 1 has ended"):
        envs.send([0, 0], [0, 1])
    envs.send([0, 0], [0, 2])
    assert envs.recv(2)[0].tolist() == [1, 2]


def test_in_the_next_step_one_that_ended_is_reset_and_the_others_are_stepped(envs: NativeVectorEnv) -> None:
    envs.send([LAST, 0], [0, 1])
    envs.recv(2)
    envs.send([0, 0], [0, 1])
    assert envs.recv(2)[0].tolist() == [0, 2]


def test_last_words_are_received_with_those_that_have_them(making: Making) -> None:
    envs = making("trouble", 4, autoreset_mode="SameStep")
    envs.reset(seed=1)
    envs.send([LAST, 0], [1, 3])
    observations, *_, infos, ids = envs.recv(2)
    assert (ids.tolist(), observations.tolist()) == ([1, 3], [0, 1])
    assert infos["final_obs"].tolist() == [1, None]
    assert infos["_final_obs"].tolist() == [True, False]
    assert infos["final_info"]["number"][0] == 13
    assert infos["final_info"]["_number"].tolist() == [True, False]


def test_an_interrupt_ends_a_long_wait(making: Making) -> None:
    envs = making("trouble", 2, seconds=1.5)
    envs.reset(seed=1)
    envs.send([SLOW], [0])
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        envs.recv()
    assert time.monotonic() - began < within(1)
    interrupt.join()
    assert envs.recv(1)[5].tolist() == [0]  # nothing is lost


def test_a_wait_leaves_other_threads_alone(envs: NativeVectorEnv) -> None:
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    envs.send([SLOW], [0])
    envs.recv()
    stop.set()
    thread.join()
    assert turns > 20


def test_environments_may_be_closed_while_some_are_away(making: Making) -> None:
    envs = making("trouble", 3)
    envs.reset(seed=1)
    envs.send([SLOW, 0, 0])
    envs.close()


def test_environments_may_be_forgotten_while_some_are_away(spec_of: Callable[[str], Spec]) -> None:
    envs = NativeVectorEnv(spec_of("trouble"), 3, num_threads=3)
    envs.reset(seed=1)
    envs.send([SLOW, SLOW, SLOW])
    del envs
    gc.collect()
