"""NativeEnv: one native environment, also from Gymnasium's registry."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from memlane.native import NativeEnv, NativeVectorEnv, Spec, built_in_names
from memlane.native.lowlevel import built_in
from tests.support.native_envs import assert_same, copied

pytestmark = pytest.mark.timeout(120, method="signal")

SINGLE = [name for name in built_in_names() if built_in(name).num_agents == 1]
GAMES = [name for name in built_in_names() if built_in(name).num_agents > 1]


@pytest.fixture
def pole() -> Iterator[NativeEnv]:
    env = NativeEnv("CartPole-v1")
    yield env
    env.close()


def program(code: str) -> str:
    """The output of a separate process."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------ the environment

# Warnings of the checker that are matters of taste.
OPINIONS = ["probably too low", "probably too high", "not having a spec", "normalized", "flattened"]


@pytest.mark.parametrize("name", SINGLE)
def test_the_checker_of_gymnasium_has_nothing_against_it(name: str) -> None:
    env = gymnasium.make(f"memlane/{name}", render_mode="rgb_array" if built_in(name).render_size else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_env(env.unwrapped, skip_render_check=built_in(name).render_size is None)
    env.close()
    assert [str(one.message) for one in said if not any(word in str(one.message) for word in OPINIONS)] == []


def test_the_checker_has_nothing_against_an_environment_of_several_fields(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("mixed"), render_mode="rgb_array")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_env(env)
    env.close()
    assert [str(one.message) for one in said if not any(word in str(one.message) for word in OPINIONS)] == []


def test_it_is_one_row_of_many(pole: NativeEnv) -> None:
    envs = NativeVectorEnv(built_in("CartPole-v1"), 4)
    rows, _ = envs.reset(seed=10)
    observation, _ = pole.reset(seed=12)
    assert_same(observation, rows[2])
    for _ in range(5):
        rows, rewards, terminated, truncated, _ = envs.step([1, 1, 1, 1])
        step = pole.step(1)
        assert_same(step[0], rows[2])
        assert step[1:] == (rewards[2], terminated[2], truncated[2], {})
    envs.close()


def test_rewards_and_flags_are_numbers_of_python(pole: NativeEnv) -> None:
    pole.reset(seed=1)
    _, reward, terminated, truncated, infos = pole.step(1)
    assert [type(one) for one in (reward, terminated, truncated, infos)] == [float, bool, bool, dict]


def test_observations_are_the_callers_own(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("mixed"))
    first = env.reset(seed=1)
    kept = copied(first)
    env.action_space.seed(1)
    second = env.step(env.action_space.sample())
    kept_too = copied(second)
    env.step(env.action_space.sample())
    assert_same(first, kept)
    assert_same(second[0], kept_too[0])
    assert_same(second[4], kept_too[4])
    env.close()


def test_infos_are_those_of_one_environment(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("mixed"))
    _, infos = env.reset(seed=1)
    assert set(infos) == {"energy", "corner"}
    assert infos["corner"].shape == (2,)
    assert np.ndim(infos["energy"]) == 0
    env.close()


def test_settings_reach_it() -> None:
    env = NativeEnv("CartPole-v1", sutton_barto_reward=True)
    env.reset(seed=1)
    assert env.step(1)[1] == 0
    env.close()


def test_it_has_no_limit_of_its_own(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("mixed"), luck=0)
    env.reset(seed=1)
    env.action_space.seed(1)
    assert not any(env.step(env.action_space.sample())[3] for _ in range(100))
    env.close()


def test_without_a_seed_two_environments_differ(pole: NativeEnv) -> None:
    other = NativeEnv("CartPole-v1")
    assert pole.reset()[0].tolist() != other.reset()[0].tolist()
    other.close()


def test_a_reset_without_a_seed_goes_on_with_the_random_numbers_of_the_last(pole: NativeEnv) -> None:
    pole.reset(seed=1)
    first = pole.reset()[0]
    assert first.tolist() != pole.reset()[0].tolist()
    pole.reset(seed=1)
    assert pole.reset()[0].tolist() == first.tolist()


def test_a_negative_seed_is_the_error_of_gymnasium(pole: NativeEnv) -> None:
    with pytest.raises(gymnasium.error.Error, match=r"non-negative|greater or equal to zero"):
        pole.reset(seed=-1)


def test_an_option_is_an_error_that_names_it(pole: NativeEnv) -> None:
    with pytest.raises(ValueError, match=r"CartPole-v1 has no reset options, found \{'low': 1\}"):
        pole.reset(options={"low": 1})


@pytest.mark.parametrize("action", [2, -1, 0.5, [0, 1], "left", None])
def test_what_is_no_action_is_an_error_and_nothing_is_stepped(action: Any, pole: NativeEnv) -> None:
    pole.reset(seed=1)
    before = pole._envs.state.copy()
    with pytest.raises((ValueError, TypeError), match="expected"):
        pole.step(action)
    assert_same(pole._envs.state, before)


def test_a_step_before_the_first_reset_is_an_error(pole: NativeEnv) -> None:
    with pytest.raises(ValueError, match="reset"):
        pole.step(0)


@pytest.mark.parametrize(
    ("name", "action", "message"),
    [
        ("Pendulum-v1", 0.5, r"at 'action': expected shape \(1,\), found \(\)$"),
        ("Pendulum-v1", [[0.5]], r"at 'action': expected shape \(1,\), found \(1, 1\)$"),
        ("CartPole-v1", [1], r"at 'action': expected shape \(\), found \(1,\)$"),
        ("CartPole-v1", 2, "at 'action': expected 0 to 1, found 2$"),
        ("CartPole-v1", None, r"at 'action': expected shape \(\), found None$|expected dtype int64, found object"),
    ],
)
def test_the_error_of_an_action_is_about_one_environment(name: str, action: Any, message: str) -> None:
    env = NativeEnv(name)
    env.reset(seed=1)
    with pytest.raises((ValueError, TypeError), match=message):
        env.step(action)
    env.close()


@pytest.mark.parametrize("call", [lambda env: env.step(0), lambda env: env.reset(), lambda env: env.render()])
def test_a_call_after_close_is_an_error_that_names_this_class(
    call: Callable[[NativeEnv], Any], pole: NativeEnv
) -> None:
    pole.close()
    with pytest.raises(ClosedEnvironmentError, match=r"operate on `NativeEnv`, after a call to `close\(\)`"):
        call(pole)


@pytest.mark.parametrize("argument", ["num_envs", "copy", "num_threads", "max_episode_steps", "autoreset_mode"])
def test_arguments_of_vector_environments_are_unknown_settings(argument: str) -> None:
    with pytest.raises(TypeError, match=f"CartPole-v1 has no setting '{argument}'"):
        NativeEnv("CartPole-v1", **{argument: 1})


def test_a_step_past_the_end_is_an_error(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("trouble"))
    env.reset(seed=1)
    assert env.step(3)[2]
    with pytest.raises(AssertionError, match=r"the episode has ended: call reset\(\)"):
        env.step(0)
    env.close()


def test_an_environment_of_several_agents_is_an_error_that_says_what_to_do(spec_of: Callable[[str], Spec]) -> None:
    with pytest.raises(ValueError, match=r"Team has 3 agents, NativeEnv supports one; use memlane\.native\.make"):
        NativeEnv(spec_of("team"))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(LookupError, match="Nothing-v1"):
        NativeEnv("Nothing-v1")


def test_a_second_close_is_harmless(pole: NativeEnv) -> None:
    pole.close()
    pole.close()


# --------------------------------------------------------------------------------------------------------------- render


@pytest.mark.parametrize("name", [name for name in SINGLE if built_in(name).render_size])
def test_a_picture_has_rows_of_red_green_and_blue(name: str) -> None:
    env = gymnasium.make(f"memlane/{name}", render_mode="rgb_array")
    env.reset(seed=1)
    picture: Any = env.render()
    width, height = built_in(name).render_size or (0, 0)
    assert (picture.shape, picture.dtype) == ((height, width, 3), np.uint8)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 1
    env.close()


def test_an_unknown_render_mode_is_an_error_that_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="render_mode must be None or 'rgb_array', found 'human'"):
        NativeEnv("CartPole-v1", render_mode="human")


def test_a_render_mode_of_an_environment_without_a_picture_is_an_error(spec_of: Callable[[str], Spec]) -> None:
    with pytest.raises(ValueError, match="render_mode must be None, found 'rgb_array'"):
        NativeEnv(spec_of("trouble"), render_mode="rgb_array")


def test_an_environment_without_a_picture_says_so_in_its_metadata(spec_of: Callable[[str], Spec]) -> None:
    env = NativeEnv(spec_of("trouble"))
    assert env.metadata["render_modes"] == []
    env.close()


# ------------------------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", SINGLE)
def test_gymnasium_makes_it_by_name(name: str) -> None:
    env = gymnasium.make(f"memlane/{name}")
    assert isinstance(env.unwrapped, NativeEnv)
    env.reset(seed=1)
    env.action_space.seed(1)
    observation, *_ = env.step(env.action_space.sample())
    assert observation in env.observation_space
    env.close()


@pytest.mark.parametrize("name", built_in_names())
def test_gymnasium_makes_many_by_name(name: str) -> None:
    envs = gymnasium.make_vec(f"memlane/{name}", num_envs=3)
    assert isinstance(envs, NativeVectorEnv)
    assert envs.num_games == 3
    assert envs.spec is not None
    assert envs.spec.id == f"memlane/{name}"
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    envs.close()


@pytest.mark.parametrize("name", GAMES)
def test_gymnasium_does_not_make_one_of_several_agents(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"agents, NativeEnv supports one; use memlane\.native\.make, which has a row per agent"
    ):
        gymnasium.make(f"memlane/{name}")


def test_arguments_of_make_vec_reach_the_environments() -> None:
    envs = gymnasium.make_vec("memlane/CartPole-v1", num_envs=2, copy=True, autoreset_mode="SameStep", num_threads=1)
    assert isinstance(envs, NativeVectorEnv)
    assert (envs.copy, envs.autoreset_mode, envs.num_threads) == (True, AutoresetMode.SAME_STEP, 1)
    envs.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gymnasium_may_step_them_one_by_one(mode: str) -> None:
    envs = gymnasium.make_vec("memlane/CartPole-v1", num_envs=2, vectorization_mode=mode)
    native = gymnasium.make_vec("memlane/CartPole-v1", num_envs=2)
    assert_same(envs.reset(seed=1), native.reset(seed=1))
    for _ in range(30):
        assert_same(envs.step(np.array([0, 1])), native.step(np.array([0, 1])))
    envs.close()
    native.close()


def limits(env: Any) -> list[TimeLimit[Any, Any]]:
    found = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            found.append(env)
        env = env.env
    return found


def test_an_episode_has_one_limit_of_steps() -> None:
    env = gymnasium.make("memlane/CartPole-v1")
    (limit,) = limits(env)
    assert limit._max_episode_steps == built_in("CartPole-v1").max_episode_steps == 500
    env.close()


def steps_of_an_episode(env: Any, action: Any) -> int:
    env.reset(seed=1)
    for step in range(1, 1000):
        _, _, terminated, truncated, _ = env.step(action)
        if np.any(terminated) or np.any(truncated):
            return step
    return 0


def test_another_limit_of_steps_takes_the_place_of_its_own() -> None:
    env = gymnasium.make("memlane/CartPole-v1", max_episode_steps=4)
    assert steps_of_an_episode(env, 0) == 4
    env.close()


def test_another_limit_of_steps_of_many_takes_the_place_of_their_own() -> None:
    envs = gymnasium.make_vec("memlane/CartPole-v1", num_envs=2, max_episode_steps=4)
    assert steps_of_an_episode(envs, [0, 0]) == 4
    envs.close()


# ------------------------------------------------------------------------------------------------------------- imports


FIRST_STEP = """
    env = gymnasium.make("memlane/CartPole-v1")
    env.reset(seed=1)
    print(env.step(1)[1])
    env.close()
    envs = gymnasium.make_vec("memlane/CartPole-v1", num_envs=2)
    envs.reset(seed=1)
    print(envs.step([0, 1])[1].tolist())
    envs.close()
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import memlane, gymnasium",
        "import gymnasium, memlane",
        "import memlane, gymnasium.vector; import gymnasium",
        "import memlane; from gymnasium import make; import gymnasium",
        "import memlane.native; import gymnasium",
        "import importlib, memlane; gymnasium = importlib.import_module('gymnasium')",
        "import memlane.core, gymnasium",
    ],
)
def test_gymnasium_knows_them_whatever_is_imported_first(imports: str) -> None:
    assert program(f"{imports}\n{textwrap.dedent(FIRST_STEP)}").split("\n") == ["1.0", "[1.0, 1.0]"]


def test_all_are_registered_once() -> None:
    code = """
        import memlane, gymnasium
        from memlane.native import built_in_names
        known = sorted(name for name in gymnasium.registry if name.startswith("memlane/"))
        print(known == [f"memlane/{name}" for name in built_in_names()])
    """
    assert program(code) == "True"


def test_importing_memlane_does_not_import_gymnasium() -> None:
    assert program("import sys, memlane; print([name for name in sys.modules if name.startswith('gymnasium')])") == "[]"


def test_whoever_waits_for_gymnasium_leaves_when_it_has_come() -> None:
    code = """
        import sys, memlane
        before = len(sys.meta_path)
        import gymnasium
        print(before - len(sys.meta_path))
    """
    assert program(code) == "1"


def test_gymnasium_that_is_not_there_is_the_usual_error() -> None:
    code = """
        import sys, memlane
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            print(error)
    """
    assert program(code) == "No module named 'gymnasium'"
