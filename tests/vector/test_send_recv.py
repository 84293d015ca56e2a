"""send and recv: the environments that are ready first are served first."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.spaces import Box, Sequence, Text
from gymnasium.vector import AutoresetMode

from tests.support.vector_envs import Chance, Counter, Raiser, Shower, Sleeper, Speaker, ours

pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]

SLEEPERS = [partial(Sleeper, number) for number in range(4)]


def test_everything_that_was_sent_is_received_in_the_order_of_its_numbers() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([1, 2, 3, 4])
        observations, rewards, terminated, truncated, infos, ids = envs.recv(4)
        assert ids.tolist() == [0, 1, 2, 3]
        assert observations.tolist() == [1, 1, 1, 1]
        assert rewards.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert not terminated.any()
        assert not truncated.any()
        assert infos["number"].tolist() == [0, 1, 2, 3]
        assert (observations.dtype, rewards.dtype, terminated.dtype, ids.dtype) == (
            np.int64,
            np.float64,
            np.bool_,
            np.int64,
        )


def test_the_ready_ones_are_received_while_another_sleeps() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([58, 2, 3, 4])  # env 1 waits behind env 0, in the same worker
        _, rewards, _, _, infos, ids = envs.recv(2)
        assert ids.tolist() == [2, 3]
        assert rewards.tolist() == [3.0, 4.0]
        assert infos["number"].tolist() == [2, 3]
        assert infos["_number"].tolist() == [True, True]
        *_, infos, ids = envs.recv(2)
        assert ids.tolist() == [0, 1]
        assert infos["number"].tolist() == [0, 1]


def test_actions_go_to_the_environments_that_are_named_in_that_order() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([30, 10], [3, 1])
        _, rewards, _, _, infos, ids = envs.recv(2)
        assert ids.tolist() == [1, 3]
        assert rewards.tolist() == [10.0, 30.0]
        assert infos["number"].tolist() == [1, 3]
        assert envs.get_attr("steps") == (0, 1, 0, 1)


@pytest.mark.parametrize("dtype", ["uint8", ">i8"])
def test_numbers_of_environments_may_have_any_whole_dtype(dtype: str) -> None:
    with ours([Counter] * 3) as envs:
        envs.reset()
        envs.send([7, 8], np.array([2, 1], dtype))
        assert envs.recv(2)[-1].tolist() == [1, 2]


def test_a_send_that_was_interrupted_does_not_stop_the_next() -> None:
    with ours([Counter] * 3) as envs:
        envs.reset()
        envs._steps.requested_step.add_each(np.array([0]), 1)  # as far as the interrupted send came
        envs.send([1, 1, 1])
        assert envs.recv(3, timeout=60)[-1].tolist() == [0, 1, 2]


def test_environments_go_on_while_another_sleeps() -> None:
    with ours([partial(Sleeper, number) for number in range(2)]) as envs:
        envs.reset()
        envs.send([58, 0])
        rounds = 0
        while (received := envs.recv(1)[5].tolist()) == [1]:
            rounds += 1
            time.sleep(0.02)
            envs.send([0], [1])
        assert rounds >= 3
        rest = [] if received == [0, 1] else envs.recv(1)[5].tolist()
        assert received + rest == [0, 1]


def test_infos_are_those_of_the_last_step_only() -> None:
    with ours([partial(Speaker, lambda action, steps: {"x": steps} if action else {})] * 2, num_workers=1) as envs:
        envs.reset()
        envs.send([1, 1])
        assert envs.recv(2)[4]["x"].tolist() == [1, 1]
        envs.send([0, 1])
        infos = envs.recv(2)[4]
        assert infos["_x"].tolist() == [False, True]
        assert infos["x"].tolist() == [0, 2]
        assert envs.step([0, 0])[4] == {}


def test_infos_of_environments_that_are_not_received_yet_wait_for_them() -> None:
    with ours(SLEEPERS, num_workers=1) as envs:
        envs.reset()
        envs.send([1, 2, 53, 4])
        seen: dict[int, int] = {}
        while len(seen) < 4:
            *_, infos, ids = envs.recv(1)
            assert infos["_number"].all()
            seen |= dict(zip(ids.tolist(), infos["number"].tolist(), strict=True))
        assert seen == {0: 0, 1: 1, 2: 2, 3: 3}


def test_infos_longer_than_any_pipe_do_not_stop_environments_of_one_worker() -> None:
    with ours([partial(Speaker, lambda action, steps: {"x": np.full(300_000, steps)})] * 3, num_workers=1) as envs:  # noqa: ARG005
        envs.reset()
        envs.send([0, 0, 0])
        *_, infos, ids = envs.recv(3, timeout=60)
        assert ids.tolist() == [0, 1, 2]
        assert (infos["x"] == 1).all()


def test_the_error_of_an_environment_is_raised_by_recv() -> None:
    with ours([Counter, partial(Raiser, partial(ValueError, "bad luck"))]) as envs:
        envs.reset()
        envs.send([0, 99])
        with pytest.raises(ValueError, match="bad luck"):
            envs.recv(2, timeout=60)


def test_an_environment_that_has_an_action_cannot_get_another() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([0, 0], [1, 2])
        with pytest.raises(AlreadyPendingCallError, match=r"\[2\]"):
            envs.send([0, 0], [2, 3])
        assert envs.recv(4)[5].tolist() == [1, 2]
        assert envs.get_attr("steps") == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("ids", "error"),
    [([4], IndexError), ([-1], IndexError), ([1, 1], ValueError), ([0.5], TypeError), ([[0]], TypeError)],
    ids=str,
)
def test_ids_that_name_no_environment_are_an_error_that_leaves_nothing_pending(
    ids: Any, error: type[Exception]
) -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        with pytest.raises(error, match="env_ids"):
            envs.send(np.zeros(len(ids), np.int64), ids)
        envs.step([0] * 4)


@pytest.mark.parametrize("actions", [[1], [1, 2, 3], [[1, 2], [3, 4]]], ids=str)
def test_wrong_actions_are_an_error_before_anything_is_sent(actions: Any) -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        with pytest.raises(ValueError):
            envs.send(actions, [0, 1])
        assert envs.step([0] * 4)[0].tolist() == [1] * 4


def test_a_wait_for_no_environment_takes_what_is_ready_and_perhaps_nothing() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([58], [2])
        observations, rewards, terminated, truncated, infos, ids = envs.recv(0)
        assert (len(observations), len(rewards), len(terminated), len(truncated), infos, len(ids)) == (
            0,
            0,
            0,
            0,
            {},
            0,
        )
        assert envs.recv()[5].tolist() == [2]


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_no_duration_is_refused_whether_or_not_there_is_a_wait(
    timeout: Any, error: type[Exception]
) -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds, 0 or more"):
            envs.recv(timeout=timeout)
        envs.send([0], [2])
        time.sleep(0.1)
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds, 0 or more"):
            envs.recv(timeout=timeout)
        assert envs.recv()[5].tolist() == [2]


@pytest.mark.parametrize(("number", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_number_of_environments_to_wait_for_that_is_none_is_an_error(number: Any, error: type[Exception]) -> None:
    with ours(SLEEPERS[:2]) as envs, pytest.raises(error, match="min_envs must be"):
        envs.recv(number)


def test_sending_to_no_environment_leaves_nothing_pending() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send(np.array([], np.int64), np.array([], np.int64))
        assert envs.step([0] * 4)[0].tolist() == [1] * 4


def test_recv_without_send_is_an_error() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        with pytest.raises(NoAsyncCallError, match="send"):
            envs.recv()


def test_asking_for_more_than_was_sent_waits_for_what_was_sent() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([0, 0], [0, 3])
        assert envs.recv(100)[5].tolist() == [0, 3]


def test_a_timeout_leaves_what_was_sent_pending() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        envs.send([54, 0], [0, 3])
        with pytest.raises(TimeoutError, match="1 of 2"):
            envs.recv(2, timeout=0.15)
        assert envs.recv(2)[5].tolist() == [0, 3]


def test_a_step_follows_when_everything_is_received() -> None:
    with ours(SLEEPERS) as envs:
        envs.reset()
        for expected in (1, 3, 5):
            envs.send([0] * 4)
            with pytest.raises(AlreadyPendingCallError):
                envs.step([0] * 4)
            envs.recv(4)
            observations, _, _, _, infos = envs.step([0] * 4)
            assert observations.tolist() == [expected + 1] * 4
            assert infos["steps"].tolist() == [expected + 1] * 4


def test_the_next_step_waits_for_it_when_sends_have_piled_up_at_a_busy_worker() -> None:
    with ours(SLEEPERS, num_workers=1) as envs:
        envs.reset()
        envs.send([53], [0])
        time.sleep(0.1)
        for env in (1, 2, 3):
            envs.send([0], [env])
        assert envs.recv(4)[5].tolist() == [0, 1, 2, 3]
        assert envs.call("steps") == (1, 1, 1, 1)
        assert envs.step([0] * 4)[0].tolist() == [2] * 4
        assert envs.get_attr("steps") == (2, 2, 2, 2)


def test_batches_are_copies_also_when_step_borrows() -> None:
    with ours([Counter] * 2, copy=False) as envs:
        envs.reset()
        envs.send([0, 0])
        observations = envs.recv(2)[0]
        envs.step([0, 0])
        assert observations.tolist() == [1, 1]


def test_batches_without_shared_memory_arrive_as_well() -> None:
    with ours([partial(Shower, Text(5), ["one", "two", "three"])] * 3, shared_memory=False) as envs:
        envs.reset()
        envs.send([0, 0], [0, 2])
        assert envs.recv(2)[0] == ("two", "two")
        assert envs.step([0, 0, 0])[0] == ("three", "two", "three")


def test_ended_episodes_carry_their_final_observation() -> None:
    fns = [partial(Shower, Box(0, 9, (1,)), [np.float32([value]) for value in range(3)], length) for length in (1, 2)]
    with ours(fns, autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        envs.reset()
        envs.send([0, 0])
        observations, _, terminated, _, infos, _ = envs.recv(2)
        assert terminated.tolist() == [True, False]
        assert observations.tolist() == [[0], [1]]
        assert infos["final_obs"][0].tolist() == [1]
        assert infos["_final_obs"].tolist() == [True, False]


def test_actions_that_travel_as_messages_cannot_be_sent() -> None:
    with ours([partial(Chance, Box(0, 1, (1,)), Sequence(Box(0, 1, (1,))))] * 2) as envs:
        envs.reset()
        with pytest.raises(NotImplementedError, match="use `step`"):
            envs.send(envs.action_space.sample())
