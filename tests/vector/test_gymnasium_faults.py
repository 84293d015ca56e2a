"""What gymnasium.vector.AsyncVectorEnv gets wrong, one test each."""

from __future__ import annotations

import multiprocessing as mp
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.spaces import Box, Dict, Discrete, OneOf, Text
from gymnasium.vector import AutoresetMode

from memlane.core import StaleView, StaleViewWarning
from memlane.vector import WorkerError
from tests.support.processes import within
from tests.support.vector_envs import Counter, NoPickle, NoUnpickle, Raiser, Shower, Sleeper, Speaker, ours

pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]


# --------------------------------------------------------------------------------------------------------- observations


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "borrow"])
def test_texts_are_not_frozen_at_their_first_value(copy: bool) -> None:
    with ours([partial(Shower, Text(5), ["one", "two", "three"])] * 2, copy=copy) as envs:
        assert envs.reset()[0] == ("one", "one")
        assert envs.step([0, 0])[0] == ("two", "two")
        assert envs.step([0, 0])[0] == ("three", "three")


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "borrow"])
def test_choices_are_not_frozen_at_their_first_value(copy: bool) -> None:
    space = OneOf((Discrete(9), Text(5)))
    with ours([partial(Shower, space, [(0, 4), (1, "two"), (0, 5)])] * 2, copy=copy) as envs:
        assert envs.reset()[0] == ((0, 4), (0, 4))
        assert envs.step([0, 0])[0] == ((1, "two"), (1, "two"))
        assert envs.step([0, 0])[0] == ((0, 5), (0, 5))


def test_texts_inside_a_dict_are_not_frozen_at_their_first_value() -> None:
    space = Dict({"note": Text(5)})
    with ours([partial(Shower, space, [{"note": "one"}, {"note": "two"}])] * 2) as envs:
        assert envs.reset()[0]["note"] == ("one", "one")
        assert envs.step([0, 0])[0]["note"] == ("two", "two")


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "messages"])
def test_a_batch_is_whole_after_a_step_wait_that_timed_out(shared_memory: bool) -> None:
    with ours([Sleeper] * 4, shared_memory=shared_memory) as envs:
        envs.reset()
        envs.step_async([1, 2, 54, 4])
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.05)
        observations, rewards, _, _, infos = envs.step_wait()
        assert observations.tolist() == [1, 1, 1, 1]
        assert rewards.tolist() == [1.0, 2.0, 54.0, 4.0]
        assert infos["_steps"].all()
        observations, rewards, *_ = envs.step([5, 6, 7, 8])
        assert observations.tolist() == [2, 2, 2, 2]
        assert rewards.tolist() == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "messages"])
def test_a_reset_after_the_end_does_not_swallow_the_next_action(shared_memory: bool) -> None:
    with ours([partial(Counter, 2)] * 2, shared_memory=shared_memory) as envs:
        envs.reset()
        envs.step([1, 1])
        assert envs.step([2, 2])[2].all()
        envs.reset()
        observations, rewards, *_ = envs.step([7, 8])
        assert observations.tolist() == [1, 1]
        assert rewards.tolist() == [7.0, 8.0]


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "messages"])
def test_final_obs_is_not_the_reset_observation_when_an_environment_reuses_its_buffer(shared_memory: bool) -> None:
    values = [np.float32([0, 0]), np.float32([1, 1]), np.float32([2, 2])]
    fns = [partial(Shower, Box(0, 9, (2,)), values, 2)] * 2
    with ours(fns, autoreset_mode=AutoresetMode.SAME_STEP, shared_memory=shared_memory) as envs:
        envs.reset()
        envs.step([0, 0])
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations.tolist() == [[0, 0], [0, 0]]
        assert [final.tolist() for final in infos["final_obs"]] == [[2, 2], [2, 2]]


def test_a_borrowed_batch_cannot_be_written() -> None:
    space = Dict({"a": Box(0, 9, (2,)), "b": Discrete(3)})
    values = [{"a": np.float32([0, 0]), "b": 1}, {"a": np.float32([1, 1]), "b": 2}]
    with ours([partial(Shower, space, values)] * 2, copy=False) as envs:
        observations, _ = envs.reset()
        for array in observations.values():
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_a_borrowed_batch_shows_the_next_step() -> None:
    with ours([Counter] * 2, copy=False) as envs:
        observations, _ = envs.reset()
        envs.step([0, 0])
        assert observations.tolist() == [1, 1]


def test_in_debug_mode_a_borrowed_batch_is_an_error_after_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with ours([Counter] * 2, copy=False) as envs:
        observations, _ = envs.reset()
        assert observations.tolist() == [0, 0]
        with pytest.warns(StaleViewWarning):
            envs.step([0, 0])
        with pytest.raises(StaleView):
            observations + 1


# ---------------------------------------------------------------------------------------------------------------- infos


def _one_and_more(action: int, steps: int) -> dict[str, Any]:  # noqa: ARG001
    return {"x": 1 if action == 0 else 1.75}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_info_of_one_environment_is_not_cut_to_the_dtype_of_another(workers: int) -> None:
    with ours([partial(Speaker, _one_and_more)] * 2, num_workers=workers) as envs:
        envs.reset()
        assert envs.step([0, 1])[4]["x"].tolist() == [1, 1.75]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "text"),
    [(partial(NoPickle, "deep trouble"), "deep trouble"), (partial(NoUnpickle, "this", "that"), "this and that")],
    ids=["pickle", "unpickle"],
)
def test_an_exception_that_cannot_travel_arrives_as_its_text(error: Any, text: str) -> None:
    with ours([Counter, partial(Raiser, error)]) as envs:
        envs.reset()
        began = time.monotonic()
        with pytest.raises(WorkerError, match=text) as caught:
            envs.step([0, 99])
        assert time.monotonic() - began < within(5)
        assert error.func.__name__ in str(caught.value)
        assert "in step" in str(caught.value.__cause__)


@pytest.mark.parametrize("call", ["step", "reset", "call", "set_attr", "send"])
def test_after_the_error_of_a_worker_the_next_call_says_so_and_close_works(call: str) -> None:
    with ours([Counter, partial(Raiser, partial(ValueError, "bad luck"))]) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="bad luck"):
            envs.step([0, 99])
        attempts = {
            "step": lambda: envs.step([0, 0]),
            "reset": lambda: envs.reset(),
            "call": lambda: envs.call("steps"),
            "set_attr": lambda: envs.set_attr("steps", 1),
            "send": lambda: envs.send([0, 0]),
        }
        with pytest.raises(ClosedEnvironmentError, match="environment 1 raised ValueError: bad luck"):
            attempts[call]()
        envs.close()
    assert not mp.active_children()


def test_of_two_errors_the_last_is_raised_and_nothing_hangs() -> None:
    with ours([partial(Raiser, partial(ValueError, text)) for text in ("one", "two", "three")]) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="three"):
            envs.step([99, 99, 99])


def test_an_error_in_reset_is_raised_as_it_is() -> None:
    class Unstartable(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
            raise OSError("no display")

    with ours([Counter, Unstartable]) as envs, pytest.raises(OSError, match="no display"):
        envs.reset()


# ------------------------------------------------------------------------------------------------------------- start-up


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_closures_and_local_classes_work_in_every_context(context: str) -> None:
    lengths = [3, 4]

    class Local(Counter):
        pass

    with ours([lambda length=length: Local(length) for length in lengths], context=context) as envs:
        assert envs.get_attr("length") == (3, 4)


SCRIPT = """
import dataclasses
import sys

import gymnasium
from gymnasium.spaces import Discrete

import memlane.vector


@dataclasses.dataclass
class Task:
    level: int


class Trouble(Exception):
    pass


class Env(gymnasium.Env):
    observation_space = Discrete(10)
    action_space = Discrete(3)
    task = Task(0)

    def reset(self, *, seed=None, options=None):
        if options is not None:
            self.task = options["task"]
        return self.task.level, {}

    def step(self, action):
        if action == 2:
            raise Trouble("on purpose")
        return int(action), 1.0, False, False, {"task": self.task}


envs = memlane.vector.AsyncVectorEnv([lambda: Env()] * 2, num_workers=2, context=sys.argv[1])
"""
SCRIPTS = {
    "steps": "envs.reset()\nprint(envs.step([0, 1])[0].tolist())\nenvs.close()",
    "options of its own class": "print(envs.reset(options={'task': Task(5)})[0].tolist())\nenvs.close()",
    "attributes of its own class": "envs.set_attr('task', Task(6))\nprint(envs.reset()[0].tolist())\nenvs.close()",
    "infos of its own class": (
        "envs.reset()\nprint([type(task) is Task for task in envs.step([0, 1])[4]['task']])\nenvs.close()"
    ),
    "errors of its own class": (
        "envs.reset()\ntry:\n    envs.step([0, 2])\nexcept Trouble as error:\n    print(error)\nenvs.close()"
    ),
    "no close": "envs.reset()\nprint('reset')",
}
PRINTED = {
    "steps": "[0, 1]",
    "options of its own class": "[5, 5]",
    "attributes of its own class": "[6, 6]",
    "infos of its own class": "[True, True]",
    "errors of its own class": "on purpose",
    "no close": "reset",
}


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_a_main_guard_works(name: str, context: str, tmp_path: Any) -> None:
    if context != "forkserver" and name in ("infos of its own class", "no close"):
        pytest.skip("one context is enough")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, script, context], capture_output=True, text=True, timeout=within(100), check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, PRINTED[name]), done.stderr[-2000:]
