"""Actions of native environments: every accepted form, and the errors for all others."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane.native import NativeVectorEnv
from tests.support.native_envs import Making, assert_same, copied

pytestmark = pytest.mark.timeout(120, method="signal")

# With many environments a step releases the GIL and actions are copied first; with few they are read in place.
COUNTS = [3, 5000]


def taken(envs: NativeVectorEnv) -> list[Any]:
    """The actions that the environments of `echo.c` saw, and how often each was stepped."""
    return [envs._observations.batch()[:, :2].tolist(), set(envs._observations.batch()[:, 2].tolist())]


# --------------------------------------------------------------------------------------------------- what is an action

ONES = [0, 1, 1]
FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: ONES,
    "tuple": lambda: tuple(ONES),
    "list of numpy numbers": lambda: [np.int32(one) for one in ONES],
    "range": lambda: range(2),
    "int64": lambda: np.array(ONES),
    "int32": lambda: np.array(ONES, np.int32),
    "int8": lambda: np.array(ONES, np.int8),
    "uint64": lambda: np.array(ONES, np.uint64),
    "bool": lambda: np.array(ONES, bool),
    "whole floats": lambda: np.array(ONES, np.float64),
    "long long": lambda: np.array(ONES, np.longlong),
    "another byte order": lambda: np.array(ONES, ">i8"),
    "every other": lambda: np.array([0, 7, 1, 7, 1, 7])[::2],
    "backwards": lambda: np.array(ONES[::-1])[::-1],
    "a column": lambda: np.array([[one, 9] for one in ONES])[:, 0],
    "not aligned": lambda: np.frombuffer(b"x" + np.array(ONES).tobytes(), np.int64, offset=1),
    "read-only": lambda: np.frombuffer(np.array(ONES).tobytes(), np.int64),
    "array.array": lambda: array.array("q", ONES),
    "memoryview": lambda: memoryview(np.array(ONES)),
}


@pytest.mark.parametrize("form", FORMS)
def test_choices_may_come_in_every_form_that_has_them(form: str, making: Making) -> None:
    actions = FORMS[form]()
    envs, control = making("CartPole-v1", len(actions)), making("CartPole-v1", len(actions))
    envs.reset(seed=1)
    control.reset(seed=1)
    control.step(np.array([int(one) for one in actions]))
    envs.step(actions)
    assert_same(envs.state, control.state)


@pytest.mark.parametrize("kind", ["int64", "int32", "float32"])
def test_a_tensor_is_an_action(kind: str, making: Making) -> None:
    torch = pytest.importorskip("torch")
    name, numbers = ("echo_float32", [[0.5, 4], [-1, 2]]) if kind == "float32" else ("echo_choices", [[0, 4], [-1, 2]])
    envs = making(name, 2)
    envs.reset(seed=1)
    envs.step(torch.tensor(numbers, dtype=getattr(torch, kind)))
    assert taken(envs) == [numbers, {1.0}]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int32, np.uint8])
@pytest.mark.parametrize("name", ["echo_float32", "echo_float64"])
def test_a_box_of_floats_takes_every_number(name: str, kind: type[Any], making: Making) -> None:
    envs = making(name, 2)
    envs.reset(seed=1)
    envs.step(np.array([[1, 4], [0, 2]], kind))
    assert taken(envs) == [[[1, 4], [0, 2]], {1.0}]


def test_a_box_of_floats_takes_numbers_that_lose_digits(making: Making) -> None:
    envs = making("echo_float32", 2)
    envs.reset(seed=1)
    envs.step([[0.1, 0.2], [0.3, 0.4]])
    assert taken(envs)[0] == np.array([[0.1, 0.2], [0.3, 0.4]], np.float32).astype(float).tolist()


def test_a_box_takes_numbers_beyond_its_bounds_as_gymnasium_does(making: Making) -> None:
    envs = making("echo_float32", 2)
    envs.reset(seed=1)
    envs.step(np.array([[-100, 0], [100, np.inf]], np.float32))
    assert taken(envs) == [[[-100, 0], [100, np.inf]], {1.0}]


@pytest.mark.parametrize("kind", [np.int16, np.int64, np.uint8, np.float64])
def test_a_box_of_small_integers_takes_whole_numbers_that_fit(kind: type[Any], making: Making) -> None:
    envs = making("echo_int16", 2)
    envs.reset(seed=1)
    envs.step(np.array([[1, 4], [0, 2]], kind))
    assert taken(envs) == [[[1, 4], [0, 2]], {1.0}]


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_may_lie_in_any_order(order: Any, making: Making) -> None:
    envs = making("echo_choices", 3)
    envs.reset(seed=1)
    envs.step(np.array([[1, 5], [-1, 2], [0, 3]], order=order))
    assert taken(envs)[0] == [[1, 5], [-1, 2], [0, 3]]


@pytest.mark.parametrize("count", COUNTS)
def test_each_environment_gets_its_own_action(count: int, making: Making) -> None:
    envs = making("echo_float64", count)
    envs.reset(seed=1)
    actions = np.random.default_rng(1).normal(size=(count, 2))
    for _ in range(3):  # the first step is measured, later ones keep the GIL or release it
        envs.step(actions)
        assert taken(envs)[0] == actions.tolist()
        actions = -actions


def test_several_fields_each_get_their_own(making: Making) -> None:
    envs = making("mixed", 2)
    envs.reset(seed=1)
    action = {"gear": np.array([2, 5], np.int32), "levers": [[2, -1], [0, 1]], "push": np.array([[0.5, 0], [0.25, 0]])}
    _, rewards, *_ = envs.step(action)
    assert rewards.tolist() == [0.5 + 20 - 100 + 2000, 0.25 + 0 + 100 + 5000]


def test_a_single_field_with_a_name_is_given_by_name(making: Making) -> None:
    envs = making("echo_named", 2)
    envs.reset(seed=1)
    envs.step({"go": [[1, 2], [3, 4]]})
    assert taken(envs)[0] == [[1, 2], [3, 4]]


# -------------------------------------------------------------------------------------------------------- what is none

REFUSED: dict[str, tuple[str, Any, str]] = {
    "nothing": ("CartPole-v1", None, "None|object"),
    "too few": ("CartPole-v1", [0, 1], "3 environments, found 2"),
    "too many": ("CartPole-v1", np.array([0, 1, 0, 1]), "3 environments, found 4"),
    "none": ("CartPole-v1", [], "3 environments, found 0"),
    "one number": ("CartPole-v1", 1, "3 environments, found 1"),
    "a dimension too many": ("CartPole-v1", np.zeros((3, 1), int), r"expected shape .*found \(3, 1\)"),
    "too large": ("CartPole-v1", [0, 1, 2], "expected 0 to 1, found 2"),
    "too large, an array": ("CartPole-v1", np.array([0, 1, 2]), "expected 0 to 1, found 2"),
    "too small": ("CartPole-v1", np.array([0, -1, 1]), "expected 0 to 1, found -1"),
    "much too large": ("CartPole-v1", np.array([0, 2**63 - 1, 1]), f"expected 0 to 1, found {2**63 - 1}"),
    "larger than int64": ("CartPole-v1", np.array([0, 2**63 + 1, 1], np.uint64), f"int64.* found {2**63 + 1}"),
    "larger than anything": ("CartPole-v1", [0, 2**70, 1], f"expected .*{2**70}"),
    "a fraction": ("CartPole-v1", [0, 0.5, 1], r"expected dtype int64, found 0\.5"),
    "not a number": ("CartPole-v1", [0, np.nan, 1], "expected dtype int64, found nan"),
    "texts": ("CartPole-v1", ["a", "b", "c"], "expected dtype int64, found <U1"),
    "one text": ("CartPole-v1", "abc", "expected"),
    "objects": ("CartPole-v1", np.array([0, None, 1], object), "expected dtype int64, found object"),
    "ragged": ("CartPole-v1", [[0], [1, 2], 0], "expected .*found"),
    "a dict for one field": ("CartPole-v1", {"action": [0, 1, 0]}, "expected .*found"),
    "one of several too large": ("echo_choices", [[0, 3], [2, 3], [0, 3]], "expected -1 to 1, found 2"),
    "one of several too large, an array": ("echo_choices", np.array([[0, 3], [0, 6], [0, 3]]), "2 to 5, found 6"),
    "one of several too small, an array": ("echo_choices", np.array([[0, 1], [0, 2], [0, 3]]), "2 to 5, found 1"),
    "rows too short": ("echo_choices", [[0], [1], [0]], r"expected shape .*2.*found \(3, 1\)"),
    "rows turned around": ("echo_float32", np.zeros((2, 3), np.float32), r"expected shape .*found \(2, 3\)"),
    "flat rows": ("echo_float32", np.zeros(6, np.float32), r"expected shape .*found \(6,\)"),
    "a float that is too large": ("echo_float32", [[1e300, 0]] * 3, "float32.*1e\\+300"),
    "no whole number": ("echo_int16", [[0, 0.5]] * 3, r"int16, found 0\.5"),
    "a number that does not fit": ("echo_int16", [[0, 70000]] * 3, "-32768 to 32767, found 70000"),
    "texts for floats": ("echo_float32", [["a", "b"]] * 3, "float32, found <U1"),
    "bare, of one field with a name": ("echo_named", np.zeros((3, 2), np.float32), "expected a dict with the keys.*go"),
    "bare list, of one field with a name": ("echo_named", [[0, 0]] * 3, "expected a dict with the keys.*go"),
    "another name": ("echo_named", {"stop": [[0, 0]] * 3}, "go"),
}
GOOD = {"push": [[0, 0]] * 3, "levers": [[0, 0]] * 3, "gear": [1] * 3}
REFUSED |= {
    "not a dict": ("mixed", [0, 0, 0], "expected a dict with the keys .*'push'.*found"),
    "a field out of its bounds": ("mixed", {**GOOD, "gear": [9] * 3}, "'action.gear'.*expected 1 to 5, found 9"),
    "without a field": ("mixed", {"push": GOOD["push"], "levers": GOOD["levers"]}, "expected the keys.*'gear'"),
    "a field too many": ("mixed", {**GOOD, "brake": [0] * 3}, "expected the keys.*'brake'"),
    "fields of different lengths": ("mixed", {**GOOD, "gear": [1, 1]}, "expected .*the same number of values.*found"),
    "all fields too short": ("mixed", {name: one[:2] for name, one in GOOD.items()}, "3 environments, found 2"),
    "a field of another shape": ("mixed", {**GOOD, "push": [[0, 0, 0]] * 3}, r"'action.push'.*found \(3, 3\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_action_is_refused_with_what_was_expected_and_found(what: str, making: Making) -> None:
    name, actions, message = REFUSED[what]
    envs = making(name, 3)
    envs.reset(seed=1)
    with pytest.raises((ValueError, TypeError, KeyError), match=message):
        envs.step(actions)


@pytest.mark.parametrize("what", REFUSED)
def test_after_a_refusal_nothing_was_stepped(what: str, making: Making) -> None:
    name, actions, _ = REFUSED[what]
    envs, control = making(name, 3), making(name, 3)
    envs.reset(seed=1)
    control.reset(seed=1)
    before = copied(envs._fields)
    with pytest.raises(Exception):  # noqa: B017  which one is said elsewhere
        envs.step(actions)
    after = envs._fields
    assert_same({one: after[one] for one in after if not one.startswith("action")},
                {one: before[one] for one in before if not one.startswith("action")})  # fmt: skip
    envs.action_space.seed(1)
    good = envs.action_space.sample()
    assert_same(copied(envs.step(good)), copied(control.step(good)))


@pytest.mark.parametrize("what", ["too few", "too large", "a fraction"])
def test_what_is_no_action_is_refused_by_send_as_well(what: str, making: Making) -> None:
    name, actions, message = REFUSED[what]
    envs = making(name, 3)
    envs.reset(seed=1)
    before = copied(envs._fields)
    with pytest.raises((ValueError, TypeError), match=message):
        envs.send(actions)
    assert_same(envs._fields, before)
    envs.step([0, 0, 0])  # no environment is in flight


def test_a_refused_step_does_not_end_what_was_lent_in_debug_mode(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    envs = making("CartPole-v1", 3)
    observations, _ = envs.reset(seed=1)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        envs.step([0, 0, 7])
    assert np.isfinite(observations.copy()).all()
    del observations
