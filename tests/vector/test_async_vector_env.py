"""The surface of AsyncVectorEnv: Gymnasium's arguments, methods and errors."""

from __future__ import annotations

import inspect
import multiprocessing as mp
import os
import re
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence, Space, Tuple
from gymnasium.vector import AutoresetMode

from memlane.vector import AsyncVectorEnv, Capacity, WorkerDied
from tests.support.processes import within
from tests.support.vector_envs import Chance, Counter, Raiser, Shower, Sleeper, bad_pickle, ours, reference

# By a signal: a test that hangs fails by itself and does not take the others with it.
pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]

COUNTERS: list[Callable[[], Any]] = [Counter] * 4


# ------------------------------------------------------------------------------------------------------ the constructor


def test_attributes_are_what_the_arguments_said() -> None:
    with ours(COUNTERS, copy=False, context="fork", daemon=False, autoreset_mode="SameStep", max_concurrency=3) as envs:
        assert envs.env_fns is COUNTERS
        assert (envs.shared_memory, envs.copy, envs.context, envs.daemon) == (True, False, "fork", False)
        assert envs.worker is None
        assert envs.observation_mode == "same"
        assert envs.autoreset_mode is AutoresetMode.SAME_STEP
        assert (envs.max_concurrency, envs.num_envs, envs.closed) == (3, 4, False)


def test_spaces_are_those_of_the_environments_and_batches_of_them() -> None:
    with ours(COUNTERS) as envs:
        assert envs.single_observation_space == Discrete(1000)
        assert envs.single_action_space == Discrete(100)
        assert envs.observation_space == MultiDiscrete([1000] * 4)
        assert envs.action_space == MultiDiscrete([100] * 4)


def test_metadata_is_that_of_the_environments_with_the_autoreset_mode() -> None:
    fns = [partial(Chance, Discrete(2), Discrete(2))] * 2
    with ours(fns, context="fork", autoreset_mode=AutoresetMode.DISABLED) as envs:
        assert envs.metadata == {
            "render_modes": ["ansi"],
            "colour": "blue",
            "autoreset_mode": AutoresetMode.DISABLED,
        }
        assert envs.render_mode == "ansi"


def test_the_metadata_of_the_environments_stay_as_they_are() -> None:
    with ours([partial(Chance, Discrete(2), Discrete(2))] * 2, context="fork") as envs:
        assert envs.apply(lambda env: type(env).metadata) == ({"render_modes": ["ansi"], "colour": "blue"},) * 2


def test_the_metadata_of_one_vector_environment_are_not_those_of_all() -> None:
    before = dict(AsyncVectorEnv.metadata)
    with ours([partial(Chance, Discrete(2), Discrete(2))], context="fork") as envs:
        envs.metadata["colour"] = "red"
        assert AsyncVectorEnv.metadata == before
        with ours([partial(Chance, Discrete(2), Discrete(2))], context="fork") as others:
            assert others.metadata["colour"] == "blue"


@pytest.mark.parametrize("daemon", [True, False])
def test_workers_are_daemons_or_not_as_they_were_asked_to_be(daemon: bool) -> None:
    with ours(COUNTERS[:2], context="fork", daemon=daemon) as envs:
        assert envs.apply(lambda env: mp.current_process().daemon) == (daemon, daemon)  # noqa: ARG005


def test_the_repr_is_that_of_gymnasium() -> None:
    with ours(COUNTERS) as envs:
        assert repr(envs) == "AsyncVectorEnv(num_envs=4)"


def test_it_is_a_vector_env_without_a_spec() -> None:
    with ours(COUNTERS) as envs:
        assert isinstance(envs, gymnasium.vector.VectorEnv)
        assert envs.spec is None
        assert envs.unwrapped is envs


def test_a_number_of_workers_below_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_workers must be 0 or more, found -1"):
        AsyncVectorEnv(COUNTERS, num_workers=-1)


def test_more_workers_than_environments_are_not_started() -> None:
    with ours(COUNTERS[:2], num_workers=7) as envs:
        assert envs.num_workers == 2
        assert len(mp.active_children()) == 2


@pytest.mark.parametrize("wrong", [0, -2, 1.5, "2"])
def test_a_max_concurrency_that_is_no_positive_integer_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_concurrency"):
        AsyncVectorEnv(COUNTERS, max_concurrency=wrong)


def test_max_concurrency_bounds_the_number_of_workers() -> None:
    with ours(COUNTERS, num_workers=4, max_concurrency=np.int64(1)) as envs:
        assert envs.num_workers == 1
        assert len(mp.active_children()) == 1


def test_help_and_editors_show_the_arguments_of_the_constructor() -> None:
    class Named(AsyncVectorEnv):
        def __init__(self, title: str) -> None:
            super().__init__(COUNTERS)
            self.title = title

    names = list(inspect.signature(AsyncVectorEnv).parameters)
    assert names == list(inspect.signature(AsyncVectorEnv.__init__).parameters)[1:]
    assert names[:2] == ["env_fns", "shared_memory"]
    assert list(inspect.signature(Named).parameters) == ["title"]


def test_no_environments_are_an_error() -> None:
    with pytest.raises(ValueError, match="env_fns"):
        AsyncVectorEnv([])


def test_an_unknown_autoreset_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sometimes"):
        AsyncVectorEnv(COUNTERS, autoreset_mode="Sometimes")


def test_an_unknown_on_error_is_an_error() -> None:
    with pytest.raises(ValueError, match="on_error"):
        AsyncVectorEnv(COUNTERS, on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on_error": "restarts"}, ValueError, "on_error must be 'raise' or 'restart', found 'restarts'; did you mean"),
        ({"on_error": None}, ValueError, "on_error must be 'raise' or 'restart', found None"),
        ({"context": "frok"}, ValueError, "context must be None, .*'fork'.*, found 'frok'; did you mean 'fork'?"),
        ({"observation_mode": "diferent"}, ValueError, "got diferent; did you mean 'different'?"),
        ({"autoreset_mode": "samestep"}, ValueError, "found 'samestep'; did you mean 'SameStep'?"),
        ({"num_worker": 2}, TypeError, "unknown argument 'num_worker'; did you mean 'num_workers'?"),
        ({"start_method": "fork"}, TypeError, "unknown argument 'start_method'; did you mean 'context'?"),
        ({"colour": "red"}, TypeError, "unknown argument 'colour'$"),
    ],
    ids=str,
)
def test_an_unknown_argument_or_value_is_answered_with_the_nearest_known_one(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")):
        AsyncVectorEnv(COUNTERS, **arguments)
    assert not mp.active_children()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"env_fns": Counter},
            TypeError,
            "env_fns must be a list, with one function for each environment, found one f",
        ),
        ({"env_fns": [Counter, "Acrobot"]}, TypeError, r"env_fns\[1\] must be a function that builds an environment"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an integer, 0 or more, found 1.5"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be 0 or more, found -1"),
        ({"restart_window": 0}, ValueError, "restart_window must be a number of seconds above 0, found 0"),
        ({"restart_window": float("nan")}, ValueError, "restart_window must be a number of seconds above 0, found nan"),
        ({"step_timeout": 0}, ValueError, "step_timeout must be None or a number of seconds above 0, found 0"),
        ({"step_timeout": "5"}, ValueError, "step_timeout must be None or a number of seconds above 0, found '5'"),
        (
            {"info_spec": {"speed": "f4"}},
            ValueError,
            r"info_spec\['speed'\] must be a pair \(dtype, shape\), found 'f4'",
        ),
        ({"shared_assets": {"map": [1]}}, TypeError, r"shared_assets\['map'\] must be a numpy array, found list"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_an_error_that_names_it(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AsyncVectorEnv(**{"env_fns": COUNTERS, **arguments})
    assert not mp.active_children()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Counter(), "env_fns must be a list, with one function for each environment, found an environment; "
                            "write [lambda: Counter(...)]"),
        (lambda: [Counter()], "env_fns[0] must be a function that builds an environment, found an environment; write "
                              "[lambda: Counter(...)]"),
        (lambda: [gymnasium.make("CartPole-v1")], "write [lambda: gymnasium.make('CartPole-v1')]"),
        (lambda: [Counter, dict], "env_fns[1] must return an environment, found {}"),
    ],
    ids=["an environment", "a list of environments", "of a registered one", "a function that builds something else"],
)  # fmt: skip
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_in_place_of_a_function_is_told_what_to_write(make: Any, message: str, num_workers: int) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        AsyncVectorEnv(make(), num_workers=num_workers)
    assert not mp.active_children()


def test_a_wait_for_a_dead_worker_counts_environments() -> None:
    with ours([Sleeper] * 2, num_workers=1) as envs:
        envs.reset()
        envs.step_async([650, 650])  # a minute
        os.kill(envs._workers.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="this process waited for the environments, 2 of which had not arrived"):
            envs.step_wait()


def _unmakeable() -> Any:
    raise LookupError("no simulator here")


def _dying() -> Any:
    os._exit(7)


def test_an_error_while_an_environment_is_made_is_raised_by_the_constructor() -> None:
    with pytest.raises(LookupError, match="no simulator here"):
        AsyncVectorEnv([Counter, Counter, Counter, _unmakeable], num_workers=2)
    assert not mp.active_children()


def test_a_worker_that_dies_while_environments_are_made_is_an_error_of_the_constructor() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="7"):
        AsyncVectorEnv([Counter, _dying], num_workers=2)
    assert time.monotonic() - began < within(10)
    assert not mp.active_children()


# ----------------------------------------------------------------------------------------------------- observation mode


def _shower(high: float, shape: tuple[int, ...] = (2,), dtype: Any = np.float32) -> Callable[[], Any]:
    return partial(Shower, Box(0, high, shape, dtype), [np.zeros(shape, dtype), np.ones(shape, dtype)])


def test_unequal_observation_spaces_are_an_error_unless_that_is_asked_for() -> None:
    with pytest.raises(RuntimeError, match="observation_mode='same'"):
        AsyncVectorEnv([_shower(1), _shower(2)], num_workers=1)


def test_different_observation_spaces_are_batched_as_gymnasium_does() -> None:
    fns = [_shower(1), _shower(2), _shower(3)]
    with reference(fns, observation_mode="different") as expected, ours(fns, observation_mode="different") as envs:
        assert envs.observation_space == expected.observation_space
        assert envs.single_observation_space == expected.single_observation_space
        np.testing.assert_array_equal(envs.reset()[0], np.zeros((3, 2), np.float32))


@pytest.mark.parametrize("other", [_shower(1, (3,)), _shower(1, dtype=np.float64)], ids=["shape", "dtype"])
def test_different_observation_spaces_must_have_one_shape_and_dtype(other: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="to be equal"):
        AsyncVectorEnv([_shower(1), other], observation_mode="different", num_workers=1)
    assert not mp.active_children()


@pytest.mark.parametrize("other", [_shower(1, (3,)), _shower(1, dtype=np.float64)], ids=["shape", "dtype"])
def test_observation_spaces_must_have_the_shape_and_dtype_of_the_space_that_is_given(other: Callable[[], Any]) -> None:
    single, batch = Box(0, 9, (2,), np.float32), Box(0, 9, (2, 2), np.float32)
    with pytest.raises(RuntimeError, match="share a common shape and dtype"):
        AsyncVectorEnv([_shower(1), other], observation_mode=(batch, single), num_workers=1)
    assert not mp.active_children()


def test_observation_mode_takes_a_batch_space_and_a_single_space() -> None:
    single, batch = Box(0, 9, (2,), np.float32), Box(0, 9, (2, 2), np.float32)
    with ours([_shower(1), _shower(2)], observation_mode=(batch, single)) as envs:
        assert envs.observation_space is batch
        assert envs.single_observation_space is single


def test_observation_mode_of_things_that_are_no_spaces_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="to be Spaces"):
        AsyncVectorEnv(COUNTERS, observation_mode=("a", "b"))  # type: ignore[arg-type]
    assert not mp.active_children()


def test_an_unknown_observation_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="Invalid `observation_mode`"):
        AsyncVectorEnv(COUNTERS, observation_mode="other")


def test_unequal_action_spaces_are_an_error() -> None:
    other = partial(Chance, Discrete(1000), Discrete(7))
    with pytest.raises(RuntimeError, match="action space different"):
        AsyncVectorEnv([Counter, other], num_workers=2)


# ------------------------------------------------------------------------------------------------ spaces without a size

SEQUENCE = Sequence(Discrete(5))


def test_a_sequence_in_shared_memory_without_a_capacity_is_gymnasiums_error() -> None:
    with pytest.raises(TypeError, match="dynamic shape"):
        AsyncVectorEnv([partial(Chance, SEQUENCE, Discrete(2))])
    assert not mp.active_children()


def test_a_capacity_by_path_is_for_observations_and_leaves_the_actions_alone() -> None:
    space = Dict({"path": SEQUENCE, "lives": Discrete(3)})
    values = [{"path": (1, 2), "lives": 1}, {"path": (), "lives": 2}]
    with ours([partial(Shower, space, values)] * 2, capacity={"path": Capacity(items=3)}) as envs:
        assert envs.reset()[0]["path"] == ((1, 2), (1, 2))
        assert envs.step([0, 0])[0]["path"] == ((), ())


def test_an_observation_above_its_capacity_is_an_error_that_names_it() -> None:
    with ours([partial(Shower, SEQUENCE, [(1,), (1, 2, 3)])] * 2, capacity=Capacity(items=2)) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="3 items needed, but the capacity declared is 2"):
            envs.step([0, 0])


class Custom(Space[Any]):
    """A space that neither Gymnasium nor memlane knows."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_a_custom_space_in_shared_memory_is_gymnasiums_error() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([partial(Shower, Custom(), ["a", "b"])] * 2)
    assert not mp.active_children()


def test_a_custom_space_works_without_shared_memory() -> None:
    fns = [partial(Shower, Custom(), ["a", "b", "c"])] * 3
    with reference(fns) as expected, ours(fns, shared_memory=False) as envs:
        assert envs.reset() == expected.reset() == (("a", "a", "a"), {})
        assert envs.step([0, 0, 0])[0] == expected.step([0, 0, 0])[0] == ("b", "b", "b")


# ---------------------------------------------------------------------------------------------------------------- reset


@pytest.mark.parametrize("seed", [7, np.int64(7), [7, 8, 9, 10], np.array([7, 8, 9, 10])], ids=str)
def test_a_seed_goes_to_each_environment(seed: Any) -> None:
    with ours(COUNTERS) as envs:
        envs.reset(seed=seed)
        assert envs.np_random_seed == (7, 8, 9, 10)


def test_seeds_may_be_left_out_one_by_one() -> None:
    with ours(COUNTERS) as envs:
        envs.reset(seed=1)
        envs.reset(seed=[5, None, 6, None])
        assert envs.np_random_seed == (5, 2, 6, 4)


def test_generators_are_those_of_the_environments() -> None:
    with ours(COUNTERS[:2]) as envs:
        envs.reset(seed=3)
        expected = [np.random.Generator(np.random.PCG64(seed)).random() for seed in (3, 4)]
        assert [generator.random() for generator in envs.np_random] == expected


def test_a_wrong_number_of_seeds_is_an_error_and_nothing_is_pending() -> None:
    with ours(COUNTERS) as envs:
        with pytest.raises(ValueError, match="length must match num_envs=4"):
            envs.reset(seed=[1, 2, 3])
        envs.reset(seed=1)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True, False, True, False], TypeError),
        (np.ones(3, np.bool_), ValueError),
        (np.ones((4, 1), np.bool_), ValueError),
        (np.ones(4, np.int64), TypeError),
        (np.zeros(4, np.bool_), ValueError),
    ],
    ids=["list", "length", "shape", "dtype", "nothing"],
)
def test_a_wrong_reset_mask_is_an_error_and_nothing_is_pending(mask: Any, error: type[Exception]) -> None:
    with ours(COUNTERS) as envs:
        with pytest.raises(error, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
        envs.reset()


def test_options_are_not_changed() -> None:
    options = {"reset_mask": np.array([True, False, True, True]), "level": 3}
    with ours([partial(Chance, Discrete(9), Discrete(2))] * 4) as envs:
        envs.reset()
        infos = envs.reset(options=options)[1]
    assert list(options) == ["reset_mask", "level"]
    assert infos["options"].tolist() == ["{'level': 3}", None, "{'level': 3}", "{'level': 3}"]


def test_a_reset_mask_leaves_the_other_environments_where_they_are() -> None:
    with ours(COUNTERS, autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset()
        envs.step([0] * 4)
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False, True])})
        assert observations.tolist() == [1, 0, 1, 0]
        assert envs.step([0] * 4)[0].tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("make", [reference, ours], ids=["Gymnasium", "memlane"])
def test_a_step_of_an_ended_environment_is_an_error_without_autoreset(make: Any) -> None:
    with make([partial(Counter, 1)] * 2, autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset()
        envs.step(np.array([0, 0]))
        with pytest.raises(AssertionError):
            envs.step(np.array([0, 0]))


# -------------------------------------------------------------------------------------------------------- pending calls

BEGIN: dict[str, Callable[[AsyncVectorEnv], Any]] = {
    "reset": lambda envs: envs.reset_async(),
    "step": lambda envs: envs.step_async([0, 0]),
    "call": lambda envs: envs.call_async("add", 1),
    "recv": lambda envs: envs.send([0, 0]),
}
WAIT: dict[str, Callable[..., Any]] = {
    "reset": lambda envs, **timeout: envs.reset_wait(**timeout),
    "step": lambda envs, **timeout: envs.step_wait(**timeout),
    "call": lambda envs, **timeout: envs.call_wait(**timeout),
    "recv": lambda envs, **timeout: envs.recv(2, **timeout),
}


@pytest.mark.parametrize("pending", BEGIN)
def test_nothing_begins_while_a_call_is_pending(pending: str) -> None:
    with ours(COUNTERS[:2]) as envs:
        envs.reset()
        BEGIN[pending](envs)
        others = {**BEGIN, "set_attr": lambda envs: envs.set_attr("x", 1)}
        for name, begin in others.items():
            with pytest.raises(AlreadyPendingCallError) as caught:
                begin(envs)
            assert caught.value.name == pending, name
        WAIT[pending](envs)
        envs.step([0, 0])


@pytest.mark.parametrize("awaited", WAIT)
def test_waiting_for_what_was_not_begun_is_an_error(awaited: str) -> None:
    with ours(COUNTERS[:2]) as envs:
        with pytest.raises(NoAsyncCallError) as caught:
            WAIT[awaited](envs)
        assert caught.value.name == awaited


@pytest.mark.parametrize("name", BEGIN)
def test_everything_is_an_error_after_close(name: str) -> None:
    with ours(COUNTERS[:2]) as envs:
        envs.close()
        for attempt in (BEGIN[name], WAIT[name], lambda envs: envs.set_attr("x", 1), lambda envs: envs.render()):
            with pytest.raises(ClosedEnvironmentError, match="close"):
                attempt(envs)


@pytest.mark.parametrize("kind", [TimeoutError, mp.TimeoutError], ids=["TimeoutError", "multiprocessing.TimeoutError"])
@pytest.mark.parametrize("name", ["step", "call", "recv"])
def test_a_timeout_is_what_gymnasium_raises_and_what_python_does(name: str, kind: type[Exception]) -> None:
    begin = {
        "step": lambda envs: envs.step_async([53, 0]),
        "call": lambda envs: envs.call_async("sleep", 0.3),
        "recv": lambda envs: envs.send([53, 0]),
    }
    with ours([Sleeper] * 2) as envs:
        envs.reset()
        begin[name](envs)
        try:
            with pytest.raises(kind, match=r"timed out after 0\.01"):
                WAIT[name](envs, timeout=0.01)
        finally:
            WAIT[name](envs)


class Gated(Counter):
    """A reset ends when there is a file."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        deadline = time.monotonic() + 10
        while not self.gate.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("kind", [TimeoutError, mp.TimeoutError], ids=["TimeoutError", "multiprocessing.TimeoutError"])
def test_a_reset_that_timed_out_can_be_waited_for_again(kind: type[Exception], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ours([Counter, partial(Gated, gate)], context="fork") as envs:
        gate.touch()
        envs.reset()
        envs.step([0, 0])
        gate.unlink()
        envs.reset_async()
        try:
            with pytest.raises(kind, match=r"`reset_wait` has timed out after 0\.01"):
                envs.reset_wait(timeout=0.01)
        finally:
            gate.touch()
        observations, _ = envs.reset_wait()
        assert observations.tolist() == [0, 0]
        assert envs.step([0, 0])[0].tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------- calls and attributes


def test_call_takes_positional_and_named_arguments() -> None:
    with ours(COUNTERS) as envs:
        assert envs.call("add", 1, two=2) == (3, 3, 3, 3)


def test_call_and_get_attr_give_attributes() -> None:
    with ours([partial(Counter, length) for length in (3, 4, 5)]) as envs:
        assert envs.call("length") == (3, 4, 5)
        assert envs.get_attr("length") == (3, 4, 5)


def test_set_attr_takes_one_value_for_all_or_one_for_each() -> None:
    with ours(COUNTERS[:3]) as envs:
        envs.set_attr("length", 9)
        assert envs.get_attr("length") == (9, 9, 9)
        envs.set_attr("length", [1, 2, 3])
        assert envs.get_attr("length") == (1, 2, 3)


def test_set_attr_with_a_wrong_number_of_values_is_an_error() -> None:
    with ours(COUNTERS) as envs, pytest.raises(ValueError, match="Got `2` values for 4"):
        envs.set_attr("length", (1, 2))


def test_render_gives_a_frame_of_each_environment() -> None:
    with ours([partial(Chance, Discrete(9), Discrete(2))] * 3) as envs:
        envs.reset()
        assert envs.render() == ("step 0",) * 3


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_what_has_a_method_of_its_own_is_not_called_by_name(name: str) -> None:
    with ours(COUNTERS) as envs, pytest.raises(ValueError, match=f"`{name}`"):
        envs.call(name)


def test_an_attribute_that_is_not_there_is_an_attribute_error() -> None:
    with ours(COUNTERS) as envs, pytest.raises(AttributeError, match="wings"):
        envs.get_attr("wings")


def test_the_environments_are_usable_after_a_call_that_raised() -> None:
    with ours(COUNTERS) as envs:
        envs.reset()
        with pytest.raises(KeyError, match="asked to"):
            envs.call("fail")
        assert envs.step([0] * 4)[0].tolist() == [1] * 4


def test_a_result_larger_than_any_pipe_arrives_whole() -> None:
    large = np.arange(1_000_000)
    with ours(COUNTERS[:2]) as envs:
        for result in envs.call("same", large):
            np.testing.assert_array_equal(result, large)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda envs: envs.call("same", threading.Lock()),
        lambda envs: envs.set_attr("lock", threading.Lock()),
        lambda envs: envs.reset(options={"lock": threading.Lock()}),
    ],
    ids=["call", "set_attr", "reset"],
)
def test_an_argument_that_cannot_be_pickled_is_an_error_that_leaves_the_environments_usable(attempt: Any) -> None:
    with ours(COUNTERS) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="lock"):
            attempt(envs)
        envs.step_async([0] * 4)
        assert envs.step_wait(timeout=60)[0].tolist() == [1] * 4


def test_a_result_that_cannot_be_unpickled_is_an_error_that_leaves_the_environments_usable() -> None:
    with ours(COUNTERS) as envs:
        envs.reset()
        envs.set_attr("bad", [bad_pickle] * 4)
        with pytest.raises(Exception, match="not a number"):
            envs.call("bad")
        envs.step_async([0] * 4)
        assert envs.step_wait(timeout=60)[0].tolist() == [1] * 4


# -------------------------------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (Discrete(3), [0, 1], [0, 3]),
        (Discrete(3), [0, 1], [0, -1]),
        (Discrete(3), [0, 1], [0, 1, 2]),
        (Discrete(3), [0, 1], [0]),
        (Discrete(3), [0, 1], [0.5, 1]),
        (Discrete(3), [0, 1], ["a", "b"]),
        (Discrete(3), [0, 1], None),
        (Discrete(3), [0, 1], 1),
        (Box(-1, 1, (2,)), [[0, 1], [1, 0]], [[0, 1, 2], [1, 0, 2]]),
        (Box(-1, 1, (2,)), [[0, 1], [1, 0]], [0, 1]),
        (Box(-1, 1, (2,)), [[0, 1], [1, 0]], [[0, 1], [0]]),
        (Box(0, 9, (1,), np.uint8), [[0], [1]], [[0], [256]]),
        (MultiDiscrete([2, 3]), [[0, 2], [1, 0]], [[0, 2], [2, 0]]),
        (Dict({"a": Discrete(2)}), {"a": [0, 1]}, {"b": [0, 1]}),
        (Dict({"a": Discrete(2)}), {"a": [0, 1]}, [0, 1]),
        (Tuple((Discrete(2), Discrete(3))), ([0, 1], [0, 1]), ([0, 1],)),
        (Tuple((Discrete(2), Discrete(3))), ([0, 1], [0, 1]), ([0, 1], [0, 1, 2])),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["step", "send"])
def test_wrong_actions_are_an_error_that_leaves_the_environments_usable(
    space: Space[Any], right: Any, wrong: Any, way: str
) -> None:
    with ours([partial(Chance, Discrete(5), space)] * 2, num_workers=1, check_actions="strict") as envs:
        envs.reset(seed=1)
        with pytest.raises((ValueError, TypeError, KeyError)):
            envs.step(wrong) if way == "step" else envs.send(wrong)
        if way == "step":
            envs.step_async(right)
            infos = envs.step_wait(timeout=60)[4]
        else:
            envs.send(right)
            infos = envs.recv(2, timeout=60)[4]
        assert infos["_action"].all()


def test_too_few_actions_that_travel_as_messages_are_an_error_that_leaves_the_environments_usable() -> None:
    with ours([partial(Chance, Discrete(5), Custom())] * 3, shared_memory=False) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="expected actions for 3 environments, found 1"):
            envs.step(["a"])
        assert envs.step(["a", "b", "c"])[4]["_action"].all()


def test_an_environment_may_keep_its_action() -> None:
    class Keeper(Chance):
        def step(self, action: Any) -> Any:
            self.kept = [*getattr(self, "kept", []), action]
            return super().step(action)

    with ours([partial(Keeper, Discrete(5), Box(-1, 1, (1,)))], num_workers=1) as envs:
        envs.reset(seed=1)
        envs.step([[0.25]])
        envs.step([[0.5]])
        assert [float(kept[0]) for kept in envs.get_attr("kept")[0]] == [0.25, 0.5]


# -------------------------------------------------------------------------------------------------------------- results


def test_copies_stay_what_they_were() -> None:
    with ours(COUNTERS) as envs:
        envs.reset()
        first = envs.step([1] * 4)
        envs.step([2] * 4)
        assert first[0].tolist() == [1] * 4
        assert first[1].tolist() == [1.0] * 4


def test_rewards_and_flags_are_the_callers_own_also_without_copies() -> None:
    with ours([partial(Counter, 2)] * 4, copy=False) as envs:
        envs.reset()
        _, rewards, terminated, truncated, _ = envs.step([1] * 4)
        envs.step([2] * 4)
        assert rewards.tolist() == [1.0] * 4
        assert not terminated.any()
        assert not truncated.any()
        rewards[:] = 0


# -------------------------------------------------------------------------------------------------------------- the end


def test_close_twice_is_harmless() -> None:
    with ours(COUNTERS) as envs:
        envs.close()
        envs.close()
        assert envs.closed


def test_close_ends_the_workers_and_closes_the_environments(tmp_path: Any) -> None:
    class Leaver(Counter):
        def close(self) -> None:
            (tmp_path / uuid.uuid4().hex).touch()

    with ours([Leaver] * 4) as envs:
        pass
    assert envs.closed
    assert not mp.active_children()
    assert len(list(tmp_path.iterdir())) == 4


def test_close_while_a_call_is_pending_warns_and_ends_the_workers() -> None:
    with ours(COUNTERS) as envs:
        envs.reset_async()
        with pytest.warns(UserWarning, match="pending call to `reset`"):
            envs.close(timeout=1)
    assert not mp.active_children()


def test_close_reaches_a_worker_that_has_not_yet_seen_what_was_asked_before() -> None:
    with ours(COUNTERS) as envs:
        pids = [child.pid for child in mp.active_children() if child.pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        envs.reset_async()
        began = time.monotonic()
        wake = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
        wake.start()
        with pytest.warns(UserWarning, match="pending call to `reset`"):
            envs.close()
        assert time.monotonic() - began < within(3)
        wake.join()


def test_close_does_not_wait_for_an_environment_that_hangs() -> None:
    with ours([Sleeper] * 2) as envs:
        envs.reset()
        envs.step_async([99, 0])
        began = time.monotonic()
        with pytest.warns(UserWarning, match="pending call to `step`"):
            envs.close(timeout=0.1)
        assert time.monotonic() - began < within(3)
    assert not mp.active_children()


def test_what_is_not_closed_leaves_no_process_when_it_is_forgotten() -> None:
    envs = AsyncVectorEnv(COUNTERS, num_workers=2)
    envs.reset()
    assert len(mp.active_children()) == 2
    del envs
    assert not mp.active_children()


def test_a_borrowed_batch_outlives_close() -> None:
    with ours(COUNTERS, copy=False) as envs:
        envs.reset()
        observations = envs.step([0] * 4)[0]
        envs.close()
    assert observations.shape == (4,)
    assert int(observations.sum()) == 4


def test_two_vector_environments_do_not_disturb_each_other() -> None:
    with ours(COUNTERS) as one, ours(COUNTERS) as two:
        one.reset()
        two.reset()
        one.step_async([1] * 4)
        two.step_async([2] * 4)
        assert two.step_wait()[1].tolist() == [2.0] * 4
        assert one.step_wait()[1].tolist() == [1.0] * 4


def test_an_error_of_one_environment_is_raised_with_its_index() -> None:
    fns = [Counter, Counter, partial(Raiser, partial(ValueError, "bad luck")), Counter]
    with ours(fns) as envs:
        envs.reset(seed=5)
        with pytest.raises(ValueError, match="bad luck") as caught:
            envs.step([0, 0, 99, 0])
        assert any("environment 2" in note and "seed 7" in note for note in caught.value.__notes__)
        assert "Raiser" in str(caught.value.__cause__) or "step" in str(caught.value.__cause__)


def _log_of_an_error(make: Callable[..., Any], **arguments: Any) -> list[str]:
    """What is logged when environment 2 raises."""
    envs = make([Counter, Counter, partial(Raiser, partial(ValueError, "bad luck")), Counter], **arguments)
    try:
        envs.reset()
        with warnings.catch_warnings(record=True) as logged:  # that is how Gymnasium logs
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match="bad luck"):
                envs.step(np.array([0, 0, 99, 0]))
        return [str(warning.message) for warning in logged]
    finally:
        envs.close(timeout=1)


def test_the_log_lines_of_an_error_are_those_of_gymnasium() -> None:
    expected = _log_of_an_error(gymnasium.vector.AsyncVectorEnv, context="fork")
    assert "Received the following error from Worker-2 - Shutting it down" in expected[0]
    assert "Raising the last exception back to the main process." in expected[2]
    logged = _log_of_an_error(AsyncVectorEnv, context="fork", num_workers=2)
    assert [logged[0], *logged[2:]] == [expected[0], *expected[2:]]


def test_the_traceback_in_the_log_is_that_of_the_environment_as_with_gymnasium() -> None:
    """All of it but the frames below the environment, which are another program's."""

    def frames(line: str) -> list[str]:
        return line[line.index("in step") :].splitlines()[1:]

    expected = _log_of_an_error(gymnasium.vector.AsyncVectorEnv, context="fork")[1]
    logged = _log_of_an_error(AsyncVectorEnv, context="fork", num_workers=2)[1]
    assert frames(logged) == frames(expected)
