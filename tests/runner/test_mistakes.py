"""Mistakes in algorithms over AsyncRunner: each is answered at once, in words that say what to do."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest

from memlane.core import MemlaneError, StartError
from memlane.lanes import Weights
from memlane.runner.collector_error import CollectorError
from tests.support.processes import PATIENCE, ask
from tests.support.tiny_runner import Tiny
from tests.support.transports import SLOT

AT_ONCE = 30.0
"""Seconds in which a mistake has to be reported on a busy machine; ``rollout_timeout`` is 600."""


@pytest.fixture(params=[False, True], ids=["processes", "threads"])
def in_process(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def first_error(collect: Any, in_process: bool) -> BaseException:
    """What the first update of a runner with this ``collect`` raises, and soon."""
    began = time.monotonic()
    with Tiny(collect, in_process=in_process) as runner, pytest.raises(Exception) as caught:
        runner.learn(1)
    assert time.monotonic() - began < AT_ONCE
    return caught.value


def forget_commit(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    while True:
        with sink.open():
            pass


def test_a_collector_that_never_commits_is_an_error_that_says_where_commit_belongs(in_process: bool) -> None:
    text = str(first_error(forget_commit, in_process))
    assert "collector 0 left 20 slots in a row without commit, so that the learner gets no rollout" in text
    assert "call slot.commit(policy_version=version, rows=rows) inside of `with sink.open() as slot:`" in text


def commit_now_and_then(env: Any, weights: Any, sink: Any, context: Any) -> None:  # noqa: ARG001
    for number in range(10**9):
        with sink.open() as slot:
            if number % 15 == 14:
                slot["number"][...] = number
                slot.commit(policy_version=1)


def test_a_collector_that_discards_most_rollouts_may_do_so(in_process: bool) -> None:
    with Tiny(commit_now_and_then, in_process=in_process, max_lag=5) as runner:
        runner.begin()
        for _ in range(4):
            with runner.rollouts(PATIENCE):
                pass
            runner.publish_next()


def return_at_once(env: Any, weights: Any, sink: Any, context: Any) -> None:
    pass


def test_a_collect_that_returns_is_an_error_that_says_how_long_to_loop(in_process: bool) -> None:
    error = first_error(return_at_once, in_process)
    assert "collect must not return before sink.open() raises Stopped" in str(error)
    assert isinstance(error, RuntimeError if in_process else CollectorError)


class BadClose:
    def close(self) -> None:
        raise OSError("the window is gone")


def raise_in_collect(*_: Any) -> None:
    raise ValueError("the real error")


class ClosesBadly(Tiny):
    def begin(self) -> None:
        self.open(lambda _: BadClose(), self.collect, rollout=SLOT, weights={"w": np.zeros(1)})


def test_an_env_that_fails_to_close_does_not_replace_the_real_error(in_process: bool) -> None:
    with ClosesBadly(raise_in_collect, in_process=in_process) as runner, pytest.raises(Exception) as caught:
        runner.learn(1)
    if in_process:
        text = f"{caught.value} {caught.value.__notes__}"
    else:
        text = str(caught.value)
    assert "the real error" in text
    assert "after that, env.close() raised OSError: the window is gone" in text


def test_a_misspelt_setting_is_a_warning_where_any_key_may_be_the_algorithms() -> None:
    with pytest.warns(UserWarning, match=r"rl_cfg has 'max_lagg', which the runner does not read; .* 'max_lag'\?"):
        Tiny(max_lagg=3).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tiny(learning_rate=0.1, gamma=0.99).close()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {"policy": {"w": np.zeros(1)}},
            "'policy' must be a numpy array or a torch tensor, found dict; flatten nested dicts",
        ),
        ({"w": ("float32", (3,))}, "found tuple; pass the tensors themselves, not their dtypes and shapes"),
    ],
)
def test_weights_that_are_no_tensors_are_an_error_that_says_what_to_pass(weights: Any, words: str) -> None:
    with Tiny() as runner, pytest.raises(TypeError, match=words):
        runner.open(lambda _: None, return_at_once, rollout=SLOT, weights=weights)


def test_weights_that_were_never_published_cannot_be_read_into_new_arrays() -> None:
    with Weights({"w": ("float32", 3)}) as weights:
        with pytest.raises(MemlaneError, match=r"nothing was published yet in the weights .*wait_for\(1\)"):
            weights.read()
        out = {"w": np.ones(3, np.float32)}
        assert weights.read(out)[0] == 0
        assert out["w"].tolist() == [1, 1, 1]


def open_in_a_daemon() -> str:
    import multiprocessing as mp

    mp.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    try:
        with Tiny() as runner:
            runner.begin()
    except StartError as error:
        return str(error)
    return "it started"


def test_a_daemonic_process_is_told_that_it_can_have_no_collectors() -> None:
    assert "daemonic" in ask(open_in_a_daemon)
