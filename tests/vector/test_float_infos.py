"""Infos that consist of floats: in shared memory without a declaration, and the same as those in messages."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane.core import SegmentError
from memlane.vector.float_infos import FloatInfos
from tests.support.vector_envs import Counter, difference, ours, reference

MAKERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "floats of Python": lambda env, step: {"x": env + step / 8, "y": -float(step)},
    "float64": lambda env, step: {"x": np.float64(env * 10 + step)},
    "float32 among others": lambda env, step: {"x": np.float32(step) / 3, "y": float(env), "z": np.float64(step)},
    "not in every step": lambda env, step: {"x": float(env)} if step % 2 else {},
    "other keys from step to step": lambda env, step: {f"x{step % 3}": float(env)},
    "other types from step to step": lambda env, step: {"x": float(env) if step % 2 else np.float32(env)},
    "not of every environment": lambda env, step: {"x": float(step)} if env != 1 else {},
    "other keys in one environment": lambda env, step: {"x": float(step)} if env else {"y": float(step)},
    "text now and then": lambda env, step: {"x": float(env), **({"note": "third"} if step % 3 == 2 else {})},
    "special values": lambda env, step: {"x": [np.inf, -np.inf, np.nan, -0.0, 5e-324][(env + step) % 5]},
    "sixteen keys": lambda env, step: {f"key {i}": float(env * i + step) for i in range(16)},
    "seventeen keys": lambda env, step: {f"key {i}": float(env * i + step) for i in range(17)},
    "long keys": lambda env, step: {f"{i}" * 300: float(env * i + step) for i in range(4)},
}


class Measuring(Counter):
    """The environment with this number, with the infos of a maker."""

    def __init__(self, maker: str, number: int) -> None:
        super().__init__()
        self.maker = MAKERS[maker]
        self.number = number

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(**kwargs)
        return observation, self.maker(self.number, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, self.maker(self.number, self.steps)


def functions(maker: str, count: int = 4) -> list[Callable[[], Measuring]]:
    return [lambda number=number: Measuring(maker, number) for number in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("maker", MAKERS)
def test_infos_of_floats_are_those_of_gymnasium(maker: str, num_workers: int) -> None:
    with ours(functions(maker), num_workers=num_workers) as envs, reference(functions(maker)) as expected:
        assert not difference(envs.reset(seed=0), expected.reset(seed=0))
        for _ in range(7):
            actions = np.zeros(4, np.int64)
            assert not difference(envs.step(actions), expected.step(actions))


def test_no_message_is_sent_for_them() -> None:
    with ours(functions("float32 among others"), num_workers=2) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros(4, np.int64))
        assert envs._steps.messages_sent == 0
        assert envs._steps.float_infos_written == 2 * 4


def test_arrays_of_infos_are_the_callers_own() -> None:
    with ours(functions("floats of Python"), num_workers=2) as envs:
        envs.reset(seed=0)
        _, _, _, _, first = envs.step(np.zeros(4, np.int64))
        kept = first["x"].copy()
        _, _, _, _, second = envs.step(np.zeros(4, np.int64))
        assert first["x"].tolist() == kept.tolist() != second["x"].tolist()
        first["x"][:] = 7


def test_they_do_not_reappear_in_a_step_without_infos() -> None:
    with ours(functions("not in every step"), num_workers=2) as envs:
        envs.reset(seed=0)
        for step in range(1, 6):
            envs.step_async(np.zeros(4, np.int64))
            infos = envs.step_wait(timeout=60)[-1]
            assert set(infos) == ({"x", "_x"} if step % 2 else set())


def test_send_and_recv_return_them_too() -> None:
    with ours(functions("floats of Python"), num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        envs.send(np.zeros(4, np.int64))
        received = 0
        while received < 4:
            *_, infos, env_ids = envs.recv()
            received += len(env_ids)
            assert infos["x"].tolist() == [env + 2 / 8 for env in env_ids]
        assert envs.step(np.zeros(4, np.int64))[-1]["x"].tolist() == [env + 3 / 8 for env in range(4)]


@pytest.mark.filterwarnings("ignore:.*WARN: ")
def test_after_the_death_of_a_worker_its_new_process_writes_them_again() -> None:
    with ours(functions("floats of Python"), num_workers=2, on_error="restart") as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        os.kill(envs._workers.pids[1], signal.SIGKILL)
        infos = envs.step(np.zeros(4, np.int64))[-1]
        assert infos["_restarted"].tolist() == [False, False, True, True]
        assert infos["x"][:2].tolist() == [2 / 8, 1 + 2 / 8]
        envs.reset(seed=0)
        before = envs._steps.messages_sent
        assert envs.step(np.zeros(4, np.int64))[-1]["x"].tolist() == [env + 1 / 8 for env in range(4)]
        assert envs._steps.messages_sent == before


FORM = ["x", "y"], "pf", 0, 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"null",
        b"[" * 1000,
        b'[["x"],"p",0]',
        b'["xy","pf",0,4]',
        b'[["x","y"],"pq",0,4]',
        b'[["x","y"],["p","f"],0,4]',
        b'[["x","x"],"pf",0,4]',
        b'[["x","y"],"p",0,4]',
        b'[[1,2],"pf",0,4]',
        b'[["x","y"],"pf",-1,4]',
        b'[["x","y"],"pf",1,4]',
        b'[["x","y"],"pf",0,4.0]',
        b'[["x","y"],"pf",0,1e400]',
        b"\xff\xfe",
        pickle.dumps(FORM),
    ],
    ids=repr,
)
def test_a_form_that_no_worker_writes_is_an_error_that_says_whose_it_is(content: bytes) -> None:
    forms = np.zeros((2, 1024), np.uint8)
    infos = FloatInfos(np.zeros((16, 4)), forms, np.zeros((2, 8), np.int64))
    forms[1, : len(content)] = np.frombuffer(content, np.uint8)
    with pytest.raises(SegmentError, match="the infos of worker 1 are damaged"):
        infos.form(1)


def test_keys_of_any_characters_arrive() -> None:
    keys = ("\0", "\ud800", "ä\N{SNAKE}", '"\\', "")
    forms, progress = np.zeros((1, 1024), np.uint8), np.zeros((1, 8), np.int64)
    writer, reader = (FloatInfos(np.zeros((16, 1)), forms, progress) for _ in range(2))
    assert writer.write(0, keys, "ppppp", 0, np.arange(5.0).tobytes())
    assert writer.write(0, keys[:1], "p", 0, np.zeros(1).tobytes())  # a shorter one behind a longer one
    assert reader.form(0).keys == keys[:1]
    assert writer.write(0, keys, "ppppp", 0, np.arange(5.0).tobytes())
    assert reader.form(0).keys == keys
