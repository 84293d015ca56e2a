"""The classic-control environments in C are Gymnasium's: the same state and action give the same next state, the same
observation, reward and flags, to the precision of float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from memlane.native import NativeVectorEnv, make

PI = np.pi
COUNT = 2003  # random states of each kind: not a multiple of four, so that the last ones are computed one by one
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


@dataclass(frozen=True)
class Classic:
    """An environment, and the layout of its state: ``numbers`` arrays of ``dtype`` one after the other."""

    name: str
    numbers: int
    dtype: str
    start: tuple[list[float], list[float]]  # the bounds of Gymnasium's initial states
    anywhere: tuple[
        list[float], list[float]
    ]  # bounds of all reachable states, and somewhat beyond where there is no limit
    edges: tuple[list[float], ...]  # the values of each number at which behaviour changes; all combinations are tested


CLASSICS = {
    each.name: each
    for each in (
        Classic(
            "CartPole-v1",
            4,
            "float64",
            start=([-0.05] * 4, [0.05] * 4),
            anywhere=([-2.4, -5, -0.21, -5], [2.4, 5, 0.21, 5]),
            edges=([-2.4, 0, 2.4], [-3, 0, 3], [-0.2094, 0, 0.2094, 1e5], [-4, 0, 4]),
        ),
        Classic(
            "Pendulum-v1",
            2,
            "float64",
            start=([-PI, -1], [PI, 1]),
            anywhere=([-90, -8], [90, 8]),
            edges=([-1e6, -100, -3 * PI, -PI, -PI / 2, 0, PI / 2, PI, 3 * PI, 100, 1e6], [-8, -7.99, 0, 7.99, 8]),
        ),
        Classic(
            "MountainCar-v0",
            2,
            "float64",
            start=([-0.6, 0], [-0.4, 0]),
            anywhere=([-1.2, -0.07], [0.6, 0.07]),
            edges=(
                [-1.2, -1.1999, -1.15, 0.44, 0.4999, 0.5, 0.5999, 0.6],
                [-0.07, -0.0699, -0.001, 0, 0.001, 0.0699, 0.07],
            ),
        ),
        Classic(
            "MountainCarContinuous-v0",
            2,
            "float32",
            start=([-0.6, 0], [-0.4, 0]),
            anywhere=([-1.2, -0.07], [0.6, 0.07]),
            edges=(
                [-1.2, -1.1999, -1.15, 0.44, 0.4499, 0.45, 0.5999, 0.6],
                [-0.07, -0.0699, -0.001, 0, 0.001, 0.0699, 0.07],
            ),
        ),
        Classic(
            "Acrobot-v1",
            4,
            "float64",
            start=([-0.1] * 4, [0.1] * 4),
            anywhere=([-PI, -PI, -4 * PI, -9 * PI], [PI, PI, 4 * PI, 9 * PI]),
            edges=([-PI, 0, PI, 50], [-PI, 0, PI, -50], [-4 * PI, 0, 4 * PI], [-9 * PI, 0, 9 * PI]),
        ),
    )
}
NAMES = list(CLASSICS)


def states_of(name: str, kind: str) -> NDArray[Any]:
    classic = CLASSICS[name]
    if kind == "edges":
        grid = np.meshgrid(*classic.edges, indexing="ij")
        states = np.stack([one.ravel() for one in grid], axis=1)
        return np.repeat(states, 5, axis=0).astype(classic.dtype)  # with several actions each
    rng = np.random.default_rng(7)
    low, high = classic.start if kind == "start" else classic.anywhere
    return rng.uniform(low, high, (COUNT, classic.numbers)).astype(classic.dtype)


def actions_of(name: str, count: int, seed: int = 3) -> NDArray[Any]:
    space = gymnasium.make(name).action_space
    rng = np.random.default_rng(seed)
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(space.n, size=count)
    # Some beyond the bounds, which Gymnasium clips, and some exactly on them.
    wide = rng.uniform(1.5 * space.low, 1.5 * space.high, (count, *space.shape)).astype(np.float32)
    return np.where(rng.random((count, 1)) < 0.1, np.sign(wide) * space.high, wide)


def numbers_of(envs: NativeVectorEnv, name: str) -> NDArray[Any]:
    """The states as a writable array with one row per environment."""
    classic = CLASSICS[name]
    return envs.state.view(classic.dtype).reshape(classic.numbers, -1).T


@dataclass(frozen=True)
class Outcome:
    state: NDArray[Any]
    observation: NDArray[Any]
    reward: NDArray[Any]
    terminated: NDArray[Any]


@cache
def gymnasiums(name: str, kind: str) -> Outcome:
    env: Any = gymnasium.make(name).unwrapped
    env.reset(seed=0)
    states = states_of(name, kind)
    outcomes = []
    for state, action in zip(states, actions_of(name, len(states)), strict=True):
        env.state = state.copy()
        env.steps_beyond_terminated = None  # an attribute of CartPole
        observation, reward, terminated, _, _ = env.step(action)
        outcomes.append((np.array(env.state, np.float64), observation.copy(), reward, terminated))
    return Outcome(*(np.array(part) for part in zip(*outcomes, strict=True)))


@cache
def natives(name: str, kind: str) -> Outcome:
    states = states_of(name, kind)
    envs = make(name, num_envs=len(states), copy=True)
    envs.reset(seed=0)
    numbers_of(envs, name)[:] = states
    observation, reward, terminated, _, _ = envs.step(actions_of(name, len(states)))
    state = numbers_of(envs, name).astype(np.float64)
    envs.close()
    return Outcome(state, observation, reward, terminated)


kinds = pytest.mark.parametrize("kind", ["start", "anywhere", "edges"])
names = pytest.mark.parametrize("name", NAMES)


@names
@kinds
def test_the_next_state_is_gymnasiums(name: str, kind: str) -> None:
    np.testing.assert_allclose(natives(name, kind).state, gymnasiums(name, kind).state, **CLOSE)


@names
@kinds
def test_the_next_observation_is_gymnasiums(name: str, kind: str) -> None:
    np.testing.assert_allclose(natives(name, kind).observation, gymnasiums(name, kind).observation, **CLOSE)


@names
@kinds
def test_the_reward_is_gymnasiums(name: str, kind: str) -> None:
    np.testing.assert_allclose(natives(name, kind).reward, gymnasiums(name, kind).reward, **CLOSE)


@names
@kinds
def test_the_end_of_an_episode_is_gymnasiums(name: str, kind: str) -> None:
    np.testing.assert_array_equal(natives(name, kind).terminated, gymnasiums(name, kind).terminated)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Pendulum-v1"])
def test_some_of_the_states_that_are_tried_end_their_episode_and_some_do_not(name: str) -> None:
    ended = np.concatenate([gymnasiums(name, kind).terminated for kind in ("anywhere", "edges")])
    assert 0 < ended.sum() < len(ended)


def test_a_float32_state_rounds_as_gymnasiums_does_bit_by_bit() -> None:
    name = "MountainCarContinuous-v0"
    np.testing.assert_array_equal(natives(name, "anywhere").state, gymnasiums(name, "anywhere").state)


# ------------------------------------------------------------------------------------------------------------ episodes


def swing(name: str, observation: NDArray[Any], random_action: Any) -> Any:
    """Push in the direction of motion, which reaches the goal; random actions never do."""
    if name == "Acrobot-v1":
        return np.int64(0 if observation[4] >= 0 else 2)
    if name == "MountainCar-v0":
        return np.int64(2 if observation[1] >= 0 else 0)
    return np.array([0.9 if observation[1] >= 0 else -0.9], np.float32) + random_action * np.float32(0.05)


SWINGING = ["Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]


@pytest.mark.parametrize(
    ("name", "policy"), [(name, "random") for name in NAMES] + [(name, "swing") for name in SWINGING]
)
def test_whole_episodes_are_gymnasiums_step_by_step(name: str, policy: str) -> None:
    # Acrobot is chaotic: a difference in the last bit of a double grows. After 500 random steps it is 1e-7, and may be
    # larger on another machine, so not all steps are compared.
    steps = 300 if name == "Acrobot-v1" else gymnasium.spec(name).max_episode_steps
    assert steps is not None
    count = 9  # two vectors of four and one more
    envs = make(name, num_envs=count, copy=True)
    observations = envs.reset(seed=5)[0]
    theirs = [gymnasium.make(name) for _ in range(count)]
    for env, other in enumerate(theirs):
        other.reset(seed=0)
        other.unwrapped.state = numbers_of(envs, name)[env].copy()  # type: ignore[attr-defined]
    running = np.ones(count, bool)
    for step in range(steps):
        actions = actions_of(name, count, seed=step)
        if policy == "swing":
            actions = np.array([swing(name, observations[env], actions[env]) for env in range(count)])
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        for env in np.flatnonzero(running).tolist():
            observation, reward, *flags, _ = theirs[env].step(actions[env])
            at = f"environment {env}, step {step}"
            np.testing.assert_allclose(observations[env], observation, rtol=1e-5, atol=1e-6, err_msg=at)
            assert rewards[env] == pytest.approx(reward, rel=1e-6, abs=1e-7), at
            assert [terminated[env], truncated[env]] == flags, at
            running[env] = not any(flags)
        if not running.any():
            break
    assert not running.any() or (name, policy) == ("Acrobot-v1", "random")
    envs.close()


# --------------------------------------------------------------------------------------------- spaces, starts, settings


@names
def test_the_observation_space_is_gymnasiums(name: str) -> None:
    envs = make(name)
    assert envs.single_observation_space == gymnasium.make(name).observation_space
    envs.close()


@names
def test_the_action_space_is_gymnasiums(name: str) -> None:
    envs = make(name)
    assert envs.single_action_space == gymnasium.make(name).action_space
    envs.close()


@names
def test_the_limit_of_steps_is_gymnasiums(name: str) -> None:
    envs = make(name)
    assert envs.native_spec.max_episode_steps == gymnasium.spec(name).max_episode_steps
    envs.close()


@names
def test_initial_states_lie_within_gymnasiums_bounds_and_fill_them(name: str) -> None:
    envs = make(name, num_envs=5000)
    envs.reset(seed=1)
    states = numbers_of(envs, name).astype(np.float64)
    low, high = (np.array(bound) for bound in CLASSICS[name].start)
    slack = 1e-7  # a float32 may round beyond
    assert np.all((states >= low - slack) & (states <= high + slack))
    np.testing.assert_allclose(states.min(axis=0), low, atol=2e-3 * np.max(high - low))
    np.testing.assert_allclose(states.max(axis=0), high, atol=2e-3 * np.max(high - low))
    np.testing.assert_allclose(states.mean(axis=0), (low + high) / 2, atol=0.02 * np.max(high - low))
    envs.close()


@names
def test_the_first_observation_is_what_gymnasium_sees_in_that_state(name: str) -> None:
    envs = make(name, num_envs=5)
    observations, _ = envs.reset(seed=2)
    for env, state in enumerate(numbers_of(envs, name)):
        x = state.astype(np.float64)
        expected = {
            "Pendulum-v1": [np.cos(x[0]), np.sin(x[0]), x[-1]],
            "Acrobot-v1": [np.cos(x[0]), np.sin(x[0]), np.cos(x[1 % len(x)]), np.sin(x[1 % len(x)]), *x[2:]],
        }.get(name, x)
        np.testing.assert_allclose(observations[env], expected, **CLOSE)
    envs.close()


@names
def test_observations_stay_within_their_bounds_for_thousands_of_steps(name: str) -> None:
    envs = make(name, num_envs=64)
    envs.reset(seed=3)
    for step in range(300):
        observations, _, _, _, _ = envs.step(actions_of(name, 64, seed=step % 20))
        assert observations in envs.observation_space, f"step {step}"
    envs.close()


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("Pendulum-v1", "g", 9.81),
        ("MountainCar-v0", "goal_velocity", 0.03),
        ("MountainCarContinuous-v0", "goal_velocity", 0.03),
        ("CartPole-v1", "sutton_barto_reward", True),
    ],
)
def test_a_setting_changes_what_it_changes_in_gymnasium(name: str, setting: str, value: float) -> None:
    states = np.concatenate([states_of(name, "anywhere"), states_of(name, "edges")])
    actions = actions_of(name, len(states))
    envs = make(name, num_envs=len(states), **{setting: value})
    envs.reset(seed=0)
    numbers_of(envs, name)[:] = states
    found = envs.step(actions)
    env: Any = gymnasium.make(name, **{setting: value}).unwrapped
    env.reset(seed=0)
    for row, state in enumerate(states):
        env.state, env.steps_beyond_terminated = state.copy(), None
        observation, reward, terminated, _, _ = env.step(actions[row])
        np.testing.assert_allclose(found[0][row], observation, **CLOSE)
        assert found[1][row] == pytest.approx(reward, rel=1e-6, abs=1e-7)
        assert found[2][row] == terminated
    envs.close()


@names
def test_the_picture_is_there_and_changes_with_the_state(name: str) -> None:
    envs = make(name, num_envs=2, render_mode="rgb_array")
    envs.reset(seed=1)
    before = envs.render(1)
    for step in range(20):
        envs.step(actions_of(name, 2, seed=step))
    after = envs.render(1)
    assert before is not None
    assert after is not None
    assert len(np.unique(before)) > 1
    assert np.any(before != after)
    envs.close()
