"""numba_env: environments in Python, compiled to machine code, on the same host as those in C."""

# ruff: noqa: ARG001, ARG005, N805  (what functions take by name is the subject)
from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode

from memlane.native import NativeVectorEnv, Spec, SpecError
from memlane.native.lowlevel import built_in
from memlane.native.numba_env import choice, numba_env, random_bits, uniform
from memlane.testing import check_env

INCLUDE = Path(__file__).parents[2] / "cpp" / "include"
BOUNDS = np.array([4.8, np.inf, 0.41887903, np.inf])


@pytest.fixture(scope="session")
def cart_pole() -> Spec:
    # Observations are float64: the comparison is about arithmetic, not about rounding to float32.
    @numba_env(
        name="NumbaCartPole-v1",
        observation_space=Box(-BOUNDS, BOUNDS, dtype=np.float64),
        action_space=Discrete(2),
        state=[("x", "f8"), ("speed", "f8"), ("angle", "f8"), ("spin", "f8")],
        max_episode_steps=500,
        reward_range=(1, 1),
        steps_past_end=True,
    )
    class CartPole:
        def reset(state, observation, random):  # type: ignore[no-untyped-def]
            state.x = uniform(random, -0.05, 0.05)
            state.speed = uniform(random, -0.05, 0.05)
            state.angle = uniform(random, -0.05, 0.05)
            state.spin = uniform(random, -0.05, 0.05)
            observation[:] = state.x, state.speed, state.angle, state.spin

        def step(state, action, observation):  # type: ignore[no-untyped-def]
            sine, cosine = math.sin(state.angle), math.cos(state.angle)
            push = ((10.0 if action == 1 else -10.0) + 0.05 * state.spin**2 * sine) / 1.1
            turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
            drive = push - 0.05 * turn * cosine / 1.1
            state.x += 0.02 * state.speed
            state.speed += 0.02 * drive
            state.angle += 0.02 * state.spin
            state.spin += 0.02 * turn
            observation[:] = state.x, state.speed, state.angle, state.spin
            return 1.0, abs(state.x) > 2.4 or abs(state.angle) > 0.20943951023931953

    return CartPole  # type: ignore[return-value]


@pytest.fixture(scope="session")
def everything() -> Spec:
    """Every kind of space, in observations, actions and infos."""

    @numba_env(
        name="Everything-v0",
        observation_space=Dict(
            {
                "place": MultiDiscrete([5, 3], start=[1, 0]),
                "count": Discrete(100, start=-1),
                "image": Box(0, 255, (2, 3), np.uint8),
                "bits": Box(0, 1, (), np.bool_),
            }
        ),
        action_space=Dict({"move": Discrete(3, start=-1), "force": Box(-1, 1, (2,), np.float32)}),
        state=[("n", "i4"), ("board", "u1", (2, 3)), ("wide", "f8")],
        max_episode_steps=20,
        reward_range=(-10, 10),
        infos={"sum": Box(-np.inf, np.inf, (), np.float64), "pair": Box(0, 99, (2,), np.int16)},
        settings={"scale": (2.0, 0.0, 5.0), "shift": 1.0},
        render_size=(6, 4),
    )
    class Everything:
        def reset(state, observation, random, info):  # type: ignore[no-untyped-def]
            state.n = -1
            state.wide = 0.0
            for row in range(2):
                for column in range(3):
                    state.board[row, column] = choice(random, 256)
                    observation.image[row, column] = state.board[row, column]
            observation.place[0] = 1 + choice(random, 5)
            observation.place[1] = 0
            observation.count[0] = state.n
            observation.bits[0] = False
            info.sum[0] = 0.0
            info.pair[:] = 0

        def step(state, action, observation, info, settings, steps):  # type: ignore[no-untyped-def]
            state.n += 1
            state.wide += action.force[0] * settings.scale + settings.shift
            observation.place[1] = action.move + 1
            observation.count[0] = state.n
            observation.bits[0] = state.n % 2 == 0
            info.sum[0] = state.wide
            info.pair[0] = steps
            return float(action.move), False, state.n == 9

        def render(state, image):  # type: ignore[no-untyped-def]
            image[:] = 7
            image[0, 0, 0] = state.n

    return Everything  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------- the same as C


def test_a_cart_pole_does_what_the_one_in_c_does(cart_pole: Spec) -> None:
    mine, built = NativeVectorEnv(cart_pole, 64), NativeVectorEnv(built_in("CartPole-v1"), 64)
    mine.reset(seed=3), built.reset(seed=3)
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(300):
        actions = rng.integers(0, 2, 64)
        _, _, terminated, truncated, _ = mine.step(actions)
        _, _, *ends, _ = built.step(actions)
        assert (terminated.tolist(), truncated.tolist()) == (ends[0].tolist(), ends[1].tolist())
        # The C code has four arrays, one after the other; this one a record per environment.
        states = mine.state.view(np.float64).reshape(64, 4), built.state.view(np.float64).reshape(4, 64).T
        largest = max(largest, float(np.abs(states[0] - states[1]).max()))
    assert largest < 1e-9


@pytest.fixture(scope="session")
def drawn_in_c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("random")
    (directory / "draw.c").write_text(
        '#include "memlane/env.h"\n'
        "uint64_t bits(uint64_t *w) { return memlane_random(w); }\n"
        "double uniform(uint64_t *w, double l, double h) { return memlane_uniform(w, l, h); }\n"
        "int32_t choice(uint64_t *w, int32_t n) { return memlane_choice(w, n); }\n"
    )
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-I{INCLUDE}", "draw.c", "-o", "draw.so"]
    subprocess.run(command, cwd=directory, check=True)
    library = ctypes.CDLL(str(directory / "draw.so"))
    library.bits.restype, library.uniform.restype = ctypes.c_uint64, ctypes.c_double
    return library


@pytest.mark.usefixtures("cart_pole")  # numba knows these functions only after the first environment was declared
@pytest.mark.parametrize("compiled", [True, False])
def test_random_numbers_are_those_of_c_to_the_last_bit(compiled: bool, drawn_in_c: ctypes.CDLL) -> None:
    import numba

    def here(random):  # type: ignore[no-untyped-def]
        return (
            random_bits(random),
            uniform(random, -2.5, 7.25),
            choice(random, 6),
            choice(random, 2**31 - 1),
            uniform(random, 0.0, 1e-300),
        )

    function: Callable[[Any], Any] = numba.njit(here) if compiled else here
    mine, c_word = np.array([2**64 - 5], np.uint64), ctypes.c_uint64(2**64 - 5)
    c, word = drawn_in_c, ctypes.byref(c_word)
    for _ in range(1000):
        in_c = (
            c.bits(word),
            c.uniform(word, ctypes.c_double(-2.5), ctypes.c_double(7.25)),
            c.choice(word, 6),
            c.choice(word, 2**31 - 1),
            c.uniform(word, ctypes.c_double(0), ctypes.c_double(1e-300)),
        )
        assert tuple(function(mine)) == in_c
    assert int(mine[0]) == c_word.value


# -------------------------------------------------------------------------------------------------------- on the host


def test_a_cart_pole_keeps_the_rules_on_several_threads_and_in_all_autoreset_modes(cart_pole: Spec) -> None:
    assert {"threads", "autoreset", "past_end", "buffer_bounds"} <= set(check_env(cart_pole).checked)


def test_every_kind_of_space_keeps_the_rules(everything: Spec) -> None:
    assert {"threads", "infos", "render"} <= set(check_env(everything).checked)


def test_the_spaces_are_the_declared_ones(everything: Spec, cart_pole: Spec) -> None:
    assert everything.observation_space["count"] == Discrete(100, start=-1)  # type: ignore[index]
    assert everything.observation_space["place"] == MultiDiscrete([5, 3], start=[1, 0])  # type: ignore[index]
    assert everything.action_space["force"] == Box(-1, 1, (2,), np.float32)  # type: ignore[index]
    assert cart_pole.observation_space == Box(-BOUNDS, BOUNDS, dtype=np.float64)


def test_actions_settings_infos_and_steps_arrive_where_they_belong(everything: Spec) -> None:
    envs = NativeVectorEnv(everything, 2, scale=3, copy=True)
    envs.reset(seed=0)
    actions = {"move": np.array([-1, 1]), "force": np.array([[0.5, 0], [-1, 0]], np.float32)}
    envs.step(actions)
    observations, rewards, _, _, infos = envs.step(actions)
    assert rewards.tolist() == [-1, 1]
    assert infos["sum"].tolist() == [5.0, -4.0]
    assert infos["pair"].tolist() == [[1, 0], [1, 0]]
    assert observations["place"][:, 1].tolist() == [0, 2]
    assert observations["bits"].tolist() == [False, False]


def test_a_third_returned_value_cuts_the_episode_off(everything: Spec) -> None:
    envs = NativeVectorEnv(everything, 1, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    actions = {"move": np.zeros(1, np.int64), "force": np.zeros((1, 2), np.float32)}
    cut = [bool(envs.step(actions)[3][0]) for _ in range(10)]
    assert cut == [False] * 9 + [True]


def test_an_image_is_drawn(everything: Spec) -> None:
    envs = NativeVectorEnv(everything, 2)
    envs.reset(seed=0)
    image = envs.render(1)
    assert image is not None
    assert (image.shape, image[0, 0].tolist(), image[3, 5].tolist()) == ((4, 6, 3), [255, 7, 7], [7, 7, 7])


def test_environments_outlive_the_spec_that_they_were_made_of() -> None:
    envs = NativeVectorEnv(counting(lambda state, observation: (1.0, False)), 2)
    envs.reset(seed=0)
    assert envs.step([0, 1])[1].tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------------------- errors


def counting(
    step: Any, reset: Any = lambda observation: None, observation_space: Space[Any] | None = None, **kwargs: Any
) -> Spec:
    decorate = numba_env(
        name="Small-v0",
        observation_space=observation_space or Box(0, 1, (1,)),
        action_space=Discrete(2),
        **{"state": [("n", "i4")], **kwargs},
    )
    return decorate(type("Small", (), {"step": step, "reset": reset}))


def test_a_function_that_does_not_compile_is_named_with_the_reason_and_the_line() -> None:
    with pytest.raises(SpecError, match=r"'step' does not compile: .*sub\(int32, .*test_numba_env\.py.*line \d+"):
        counting(lambda state, observation: (state.n - "one", False))


def test_a_field_that_the_state_does_not_have_is_named() -> None:
    with pytest.raises(SpecError, match="'step' does not compile: the record has no field 'nothing'"):
        counting(lambda state, observation: (state.nothing, False))


def test_an_error_says_what_a_step_must_return() -> None:
    with pytest.raises(SpecError, match="'step' does not compile: it must return `reward, terminated`"):
        counting(lambda state, observation: 1.0)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"'step' has an unknown argument 'self'; leave out self.*\(arguments: state, action, "
    ):
        counting(lambda self, action: (1.0, False))


def test_a_function_that_raises_is_refused() -> None:
    def step(state, observation):  # type: ignore[no-untyped-def]
        if state.n > 3:
            raise ValueError("too many")
        return 1.0, False

    with pytest.raises(SpecError, match="'step' raises or asserts, but no Python code runs that could catch it"):
        counting(step)


def test_a_misspelt_argument_or_function_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(SpecError, match=r"'step' has an unknown argument 'stat'; did you mean 'state'\?"):
        counting(lambda stat: (1.0, False))
    decorate = numba_env(name="A", observation_space=Box(0, 1, (1,)), action_space=Discrete(2), state=[("n", "i4")])
    functions = {"reset": lambda observation: None, "step": lambda state: (1.0, False), "rendr": lambda state: None}
    with pytest.raises(
        SpecError, match=r"unknown function 'rendr'; did you mean 'render'\? \(functions: reset, step, "
    ):
        decorate(type("Misspelt", (), functions))


def test_a_class_without_a_step_is_refused() -> None:
    decorate = numba_env(name="A", observation_space=Box(0, 1), action_space=Discrete(2), state=[("n", "i4")])
    with pytest.raises(SpecError, match="the class Half has no function 'step'"):
        decorate(type("Half", (), {"reset": lambda observation: None}))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (MultiBinary(3), "must be a Box, a Discrete, a MultiDiscrete or a Dict of these, found MultiBinary"),
        (Dict({"a": Dict({"b": Discrete(2)})}), "observation 'a' must be a Box, .*found Dict"),
        (Dict({"not a name": Discrete(2)}), "the name of observation 'not a name' must be a Python identifier"),
        (Box(0, 1, (1, 1, 1, 1, 1)), "can have at most 4 dimensions, found"),
        (Box(0, 1, (2,), np.float16), "must have one of the dtypes float32, .*; found float16"),
    ],
    ids=["kind", "nested", "name", "dims", "dtype"],
)
def test_a_space_that_cannot_be_declared_is_an_error(space: Space[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        counting(lambda state: (1.0, False), observation_space=space)


def test_a_state_without_names_is_an_error() -> None:
    with pytest.raises(SpecError, match="state must be a numpy dtype with named fields of numbers, found float64"):
        counting(lambda state: (1.0, False), state=np.float64)


def test_without_numba_everything_else_can_be_imported_and_numba_env_says_what_to_install() -> None:
    code = """
import sys
import memlane.native, memlane.testing
assert "numba" not in sys.modules
from memlane.native.numba_env import numba_env
assert "numba" not in sys.modules
sys.modules["numba"] = None
from gymnasium.spaces import Box, Discrete
try:
    numba_env(name="A", observation_space=Box(0, 1), action_space=Discrete(2), state=[("n", "i4")])(object)
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    assert "numba_env needs numba" in result.stdout
    assert "pip install memlane[numba]" in result.stdout
