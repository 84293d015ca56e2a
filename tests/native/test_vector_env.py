"""NativeVectorEnv: Gymnasium's arguments, methods and errors, and the memory of the arrays."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit

from memlane.core import BudgetError, StaleView, StaleViewWarning
from memlane.ipc import RolloutRingBuffer
from memlane.native import NativeEnv, NativeVectorEnv, Spec, make
from tests.support.native_envs import Making, actions_for, assert_same, copied, run
from tests.support.processes import within

pytestmark = pytest.mark.timeout(120, method="signal")

MODES = list(AutoresetMode)


@pytest.fixture
def poles(making: Making) -> NativeVectorEnv:
    """Three environments after a reset."""
    envs = making("CartPole-v1", 3)
    envs.reset(seed=1)
    return envs


# ------------------------------------------------------------------------------------------------------ the constructor


def test_attributes_are_what_the_arguments_said(making: Making) -> None:
    envs = making(
        "CartPole-v1", np.int64(3), copy=True, num_threads=2, autoreset_mode="SameStep", render_mode="rgb_array"
    )
    assert (envs.num_envs, envs.num_games, envs.num_agents, envs.num_threads) == (3, 3, 1, 2)
    assert (envs.copy, envs.render_mode, envs.closed) == (True, "rgb_array", False)
    assert envs.autoreset_mode is AutoresetMode.SAME_STEP


def test_without_arguments_it_is_one_environment_that_resets_in_its_next_step(making: Making) -> None:
    envs = making("CartPole-v1")
    assert (envs.num_envs, envs.autoreset_mode, envs.copy, envs.render_mode) == (
        1,
        AutoresetMode.NEXT_STEP,
        False,
        None,
    )


def test_it_is_a_vector_env_without_a_spec(making: Making) -> None:
    envs = making("CartPole-v1", 3)
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    assert envs.spec is None
    assert envs.unwrapped is envs


def test_the_repr_names_the_environment_and_how_many(making: Making) -> None:
    assert repr(making("CartPole-v1", 3)) == "NativeVectorEnv('CartPole-v1', num_envs=3)"


def test_spaces_are_those_of_the_spec_and_batches_of_them(making: Making) -> None:
    envs = making("mixed", 4)
    single = Dict(
        {
            "position": Box(-1e9, 1e9, (2,), np.float32),
            "count": Discrete(50),
            "a patch": Box(0, 255, (2, 3), np.uint8),
        }
    )
    action = Dict(
        {
            "push": Box(-1, 1, (2,), np.float32),
            "levers": MultiDiscrete([3, 3], start=[0, -1]),
            "gear": Discrete(5, start=1),
        }
    )
    assert (envs.single_observation_space, envs.single_action_space) == (single, action)
    assert (envs.observation_space, envs.action_space) == (batch_space(single, 4), batch_space(action, 4))


@pytest.mark.parametrize("name", ["CartPole-v1", "mixed", "team", "echo_choices"])
def test_what_it_hands_out_is_in_its_spaces(name: str, making: Making) -> None:
    envs = making(name, 4)
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    assert all(step[0] in envs.observation_space for step in run(envs, 30))


def test_rewards_and_flags_have_the_types_of_gymnasium(poles: NativeVectorEnv) -> None:
    _, rewards, terminated, truncated, infos = poles.step([0, 0, 0])
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
    assert rewards.shape == terminated.shape == truncated.shape == (3,)
    assert infos == {}


@pytest.mark.parametrize("mode", MODES)
def test_metadata_has_the_autoreset_mode(mode: AutoresetMode, making: Making) -> None:
    assert making("CartPole-v1", autoreset_mode=mode).metadata["autoreset_mode"] is mode


def test_metadata_has_the_render_modes_that_there_are(making: Making) -> None:
    assert making("mixed").metadata["render_modes"] == ["rgb_array"]
    assert making("team").metadata["render_modes"] == []


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None])
def test_a_number_of_environments_that_is_no_positive_integer_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"num_envs must be an integer of at least 1, found {wrong!r}"):
        make("CartPole-v1", num_envs=wrong)


@pytest.mark.parametrize("wrong", [2**31, 10**15])
def test_a_number_of_environments_beyond_an_int32_is_an_error_that_names_the_limit(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"num_envs must be at most 2147483647, found {wrong}"):
        make("CartPole-v1", num_envs=wrong)


def test_more_environments_than_memory_are_a_budget_error_before_any_is_taken() -> None:
    with pytest.raises(BudgetError, match=r"num_envs=1000000000 of CartPole-v1 needs \d+ bytes"):
        make("CartPole-v1", num_envs=10**9)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_a_number_of_threads_that_is_no_positive_integer_is_an_error(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"num_threads must be .*, found"):
        make("CartPole-v1", num_threads=wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", 2**31])
def test_a_limit_of_steps_that_cannot_be_is_an_error(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"max_episode_steps must be .*, found"):
        make("CartPole-v1", max_episode_steps=wrong)


def test_an_unknown_autoreset_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sometimes"):
        make("CartPole-v1", autoreset_mode="Sometimes")


def test_an_unknown_render_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="render_mode must be None or 'rgb_array', found 'human'"):
        make("CartPole-v1", render_mode="human")


def test_a_render_mode_of_an_environment_without_a_picture_is_an_error(making: Making) -> None:
    with pytest.raises(ValueError, match="render_mode"):
        making("team", render_mode="rgb_array")


def test_an_unknown_setting_is_an_error_that_names_those_that_there_are(making: Making) -> None:
    with pytest.raises(TypeError, match=r"Mixed has no setting 'wind' \(settings: gravity, luck\)"):
        making("mixed", wind=1)


def test_a_setting_out_of_its_bounds_is_an_error(making: Making) -> None:
    with pytest.raises(ValueError, match=r"Mixed: setting 'gravity' must be a number from 0\.0 to 20\.0, found 21"):
        making("mixed", gravity=21)


def test_settings_reach_the_environments(making: Making) -> None:
    heavy, light = making("mixed", 1, gravity=20), making("mixed", 1, gravity=0)
    (fallen, _), (floating, _) = heavy.reset(seed=1), light.reset(seed=1)
    action = {"push": [[0, 0]], "levers": [[0, 0]], "gear": [1]}
    before = floating["position"][0, 1]
    heavy.step(action)
    light.step(action)
    assert floating["position"][0, 1] == before
    assert fallen["position"][0, 1] == pytest.approx(before - 0.02)


def test_what_init_says_is_an_error_of_the_constructor(making: Making) -> None:
    with pytest.raises(ValueError, match="Mixed: a gravity of 13 brings bad luck"):
        making("mixed", gravity=13)


def test_environments_that_init_refused_may_be_forgotten(making: Making) -> None:
    with pytest.raises(ValueError, match="bad luck"):
        making("mixed", gravity=13)
    gc.collect()  # an exception in __del__ fails this test


# ------------------------------------------------------------------------------------------- the semantics of Gymnasium


def reference(spec: Spec, num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    """One environment per row, stepped by Gymnasium."""

    def one() -> Any:
        env = NativeEnv(spec)
        return TimeLimit(env, spec.max_episode_steps) if spec.max_episode_steps else env

    return SyncVectorEnv([one] * num_envs, autoreset_mode=mode)


COMPARED = ["CartPole-v1", "mixed", "echo_float32", "echo_choices"]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("copy", [False, True])
def test_long_runs_are_those_of_gymnasium_with_one_environment_for_each_row(
    name: str, mode: AutoresetMode, copy: bool, making: Making
) -> None:
    envs = making(name, 5, autoreset_mode=mode, copy=copy)
    theirs = reference(envs.native_spec, 5, mode)
    assert_same(envs.reset(seed=11), theirs.reset(seed=11), "reset")
    actions = actions_for(envs, 3)
    ends = 0
    for step in range(300):
        action = next(actions)
        results = envs.step(action), theirs.step(action)
        assert_same(*results, f"step {step}")
        ends += int((results[0][2] | results[0][3]).sum())
    assert ends > 20
    theirs.close()


@pytest.mark.parametrize("name", COMPARED)
def test_long_runs_with_resets_by_the_caller_are_those_of_gymnasium(name: str, making: Making) -> None:
    envs = making(name, 5, autoreset_mode=AutoresetMode.DISABLED)
    theirs = reference(envs.native_spec, 5, AutoresetMode.DISABLED)
    assert_same(envs.reset(seed=11)[0], theirs.reset(seed=11)[0], "reset")
    actions = actions_for(envs, 3)
    resets = 0
    for step in range(300):
        action = next(actions)
        results = envs.step(action), theirs.step(action)
        assert_same(*results, f"step {step}")
        ended = results[1][2] | results[1][3]
        if ended.any():
            resets += 1
            ours, other = (both.reset(options={"reset_mask": ended.copy()}) for both in (envs, theirs))
            assert_same(ours[0], other[0], f"reset after step {step}")
    assert resets > 20
    theirs.close()


def test_the_last_observations_are_also_rows_of_one_array(making: Making) -> None:
    envs = making("mixed", 5, autoreset_mode="SameStep")
    envs.reset(seed=1)
    seen = 0
    actions = actions_for(envs, 1)
    for _ in range(50):
        *_, infos = envs.step(next(actions))
        for row in np.flatnonzero(infos.get("_final_obs", np.zeros(5, bool))):
            seen += 1
            for name, rows in envs.final_observations.items():
                assert_same(rows[row], np.asarray(infos["final_obs"][row][name]))
    assert seen > 10


def test_what_was_told_of_an_end_is_not_told_again_by_a_reset_of_others(making: Making) -> None:
    envs = making("trouble", 2, autoreset_mode="SameStep")
    envs.reset(seed=1)
    *_, infos = envs.step([3, 0])
    assert infos["_final_obs"].tolist() == [True, False]
    _, infos = envs.reset(options={"reset_mask": np.array([False, True])})
    assert "final_obs" not in infos


def test_last_words_are_the_callers_own(making: Making) -> None:
    envs = making("mixed", 2, luck=1, autoreset_mode="SameStep")
    envs.reset(seed=1)
    actions = actions_for(envs, 1)
    *_, infos = envs.step(next(actions))
    kept = copied({name: infos[name] for name in ("final_obs", "final_info", "_final_obs", "_final_info")})
    envs.step(next(actions))
    assert_same({name: infos[name] for name in kept}, kept)


def test_flags_that_c_calls_true_are_true(making: Making) -> None:
    envs = making("mixed", 2, luck=1)  # the C code writes 3
    envs.reset(seed=1)
    _, _, terminated, _, _ = envs.step(next(actions_for(envs, 1)))
    assert terminated.view(np.uint8).tolist() == [1, 1]


# -------------------------------------------------------------------------------------------------- limits of episodes


def ends_after(envs: NativeVectorEnv, most: int) -> int:
    """Number of steps until the first truncation; 0 if there is none."""
    envs.reset(seed=1)
    for step in range(1, most + 1):
        _, _, _, truncated, _ = envs.step([0] * envs.num_envs)
        if truncated.any():
            return step
    return 0


def test_the_limit_is_that_of_the_environment(making: Making) -> None:
    envs = making("mixed", 2, luck=0)
    envs.reset(seed=1)
    assert [step[3].tolist() for step in run(envs, 16)] == [[False] * 2] * 14 + [[True] * 2] + [[False] * 2]


@pytest.mark.parametrize("limit", [1, 7])
def test_another_limit_of_steps_takes_its_place(limit: int, making: Making) -> None:
    assert ends_after(making("trouble", 2, max_episode_steps=limit), 10) == limit


def test_without_a_limit_episodes_go_on(making: Making) -> None:
    assert ends_after(making("trouble", 2), 2000) == 0


def test_a_limit_of_0_is_none(making: Making) -> None:
    envs = making("mixed", 2, luck=0, max_episode_steps=0)
    envs.reset(seed=1)
    assert not any((step[2] | step[3]).any() for step in run(envs, 100))


# --------------------------------------------------------------------------------------------------------------- seeds


def words_after(envs: NativeVectorEnv, seed: Any) -> list[int]:
    envs.reset(seed=seed)
    return envs.random.tolist()  # type: ignore[no-any-return]


def test_a_number_seeds_each_environment_with_the_next(making: Making) -> None:
    envs = making("CartPole-v1", 3)
    assert words_after(envs, 7) == words_after(envs, [7, 8, 9])


def test_the_same_seed_gives_the_same_run(making: Making) -> None:
    first, second = making("mixed", 3), making("mixed", 3)
    first.reset(seed=5)
    second.reset(seed=5)
    assert_same(run(first, 60), run(second, 60))


def test_the_same_seed_gives_the_same_run_again(making: Making) -> None:
    envs = making("mixed", 3)
    envs.reset(seed=5)
    before = run(envs, 40)
    envs.reset(seed=5)
    assert_same(run(envs, 40), before)


@pytest.mark.parametrize(
    "seed", [np.int64(7), np.uint8(7), [7, 8, 9], (7, 8, 9), np.array([7, 8, 9]), [np.int64(7), 8, 9]]
)
def test_a_seed_may_be_any_whole_numbers(seed: Any, making: Making) -> None:
    envs = making("CartPole-v1", 3)
    assert words_after(envs, seed) == words_after(envs, 7)


@pytest.mark.parametrize("seed", [2**31, 2**63, 2**64 - 1, 2**70 + 5, -1, -(2**40)])
def test_seeds_of_every_size_are_seeds(seed: int, making: Making) -> None:
    envs = making("CartPole-v1", 3)
    assert words_after(envs, seed) == words_after(envs, seed)
    assert len(set(words_after(envs, seed))) == 3


def test_many_seeds_give_different_words(making: Making) -> None:
    assert len(set(words_after(making("CartPole-v1", 5000), 0))) == 5000


def test_environments_without_a_seed_go_on_with_their_random_numbers(making: Making) -> None:
    envs = making("CartPole-v1", 3)
    envs.reset(seed=7)
    before = envs.random.tolist()
    after = words_after(envs, [None, 100, None])
    assert after != before
    assert words_after(envs, [7, None, 9])[1] != after[1]  # its RNG state was not set again
    envs.reset(seed=7)
    once_more = envs.random.tolist()
    assert words_after(envs, [None, 100, None])[0::2] == after[0::2]
    assert once_more == before


def test_without_any_seed_two_runs_differ(making: Making) -> None:
    assert words_after(making("CartPole-v1", 3), None) != words_after(making("CartPole-v1", 3), None)


def test_a_list_of_seeds_of_another_length_is_an_error(poles: NativeVectorEnv) -> None:
    with pytest.raises(ValueError, match=r"num_envs=3 but got length=2"):
        poles.reset(seed=[1, 2])


@pytest.mark.parametrize("seed", [1.5, "abc", {"a": 1}, [1.5, 2, 3], ["1", "2", "3"]])
def test_a_seed_that_is_no_whole_number_is_an_error_that_says_so(seed: Any, poles: NativeVectorEnv) -> None:
    with pytest.raises((TypeError, ValueError), match="seed"):
        poles.reset(seed=seed)


def test_a_refused_seed_leaves_everything_as_it_was(poles: NativeVectorEnv) -> None:
    words, state = poles.random.copy(), poles.state.copy()
    with pytest.raises(ValueError, match="length"):
        poles.reset(seed=[1, 2])
    assert_same(poles.random, words)
    assert_same(poles.state, state)


# --------------------------------------------------------------------------------------------------------------- reset


def test_a_reset_mask_resets_only_some(making: Making) -> None:
    envs = making("mixed", 4)
    envs.reset(seed=1)
    run(envs, 5)
    before, words, steps = (
        copied(envs.step(next(actions_for(envs, 2)))[0]),
        envs.random.copy(),
        envs._fields["steps"].copy(),
    )
    mask = np.array([True, False, False, True])
    after, _ = envs.reset(options={"reset_mask": mask}, seed=40)
    for name in before:
        assert_same(after[name][~mask], before[name][~mask], name)
        assert (after[name][mask] != before[name][mask]).any()
    assert_same(envs.random[~mask], words[~mask])
    assert_same(envs._fields["steps"][~mask], steps[~mask])


def test_a_reset_mask_uses_the_seeds_of_those_that_it_resets(making: Making) -> None:
    envs, whole = making("CartPole-v1", 4), making("CartPole-v1", 4)
    envs.reset(seed=1)
    seeded, _ = whole.reset(seed=40)
    mask = np.array([True, False, False, True])
    after, _ = envs.reset(seed=40, options={"reset_mask": mask})
    assert_same(after[mask], seeded[mask])


def test_a_reset_mask_need_not_lie_in_one_piece(poles: NativeVectorEnv) -> None:
    before = poles.reset(seed=1)[0].copy()
    after, _ = poles.reset(seed=9, options={"reset_mask": np.array([True, True, False, True, True, True])[::2]})
    assert (after != before).all(axis=1).tolist() == [True, False, True]


def test_infos_of_a_reset_of_some_are_theirs_alone(making: Making) -> None:
    envs = making("mixed", 3)
    theirs = reference(envs.native_spec, 3, AutoresetMode.DISABLED)
    for both in (envs, theirs):
        both.reset(seed=1)
    mask = np.array([True, False, True])
    ours, other = (both.reset(seed=9, options={"reset_mask": mask.copy()})[1] for both in (envs, theirs))
    assert ours["_energy"].tolist() == other["_energy"].tolist() == mask.tolist()
    assert_same(ours["energy"][mask], other["energy"][mask])
    theirs.close()


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True, False, True], TypeError, "must be a numpy array"),
        (np.array([True, False]), ValueError, r"must have shape `\(3,\)`, got \(2,\)"),
        (np.array([1, 0, 1]), TypeError, "dtype=np.bool_"),
        (np.zeros(3, bool), ValueError, "at least one True"),
    ],
)
def test_a_reset_mask_that_is_none_is_an_error(
    mask: Any, error: type[Exception], message: str, poles: NativeVectorEnv
) -> None:
    with pytest.raises(error, match=message):
        poles.reset(options={"reset_mask": mask})


def test_the_first_reset_must_be_of_all(making: Making) -> None:
    with pytest.raises(ValueError, match="first reset must include all environments"):
        making("CartPole-v1", 2).reset(options={"reset_mask": np.array([True, False])})


def test_an_unknown_option_is_an_error_that_names_the_one_that_there_is(poles: NativeVectorEnv) -> None:
    with pytest.raises(ValueError, match=r"CartPole-v1: unknown reset option 'low' \(known: reset_mask\)"):
        poles.reset(options={"low": -1})


def test_no_options_are_fine(poles: NativeVectorEnv) -> None:
    poles.reset(options={})


def test_a_reset_in_the_middle_begins_new_episodes_everywhere(making: Making) -> None:
    envs = making("trouble", 3, max_episode_steps=5)
    envs.reset(seed=1)
    run_to = [envs.step([0, 0, 0])[0].tolist() for _ in range(3)]
    assert run_to[-1] == [3, 3, 3]
    observations, _ = envs.reset()
    assert observations.tolist() == [0, 0, 0]
    assert [envs.step([0, 0, 0])[3].any() for _ in range(5)] == [False] * 4 + [True]


def test_a_reset_after_an_end_is_not_followed_by_another(making: Making) -> None:
    envs = making("trouble", 2)
    envs.reset(seed=1)
    envs.step([3, 0])
    envs.reset()
    observations, *_ = envs.step([0, 0])
    assert observations.tolist() == [1, 1]


def test_a_step_before_the_first_reset_is_an_error(making: Making) -> None:
    with pytest.raises(ValueError, match=r"call `reset\(\)` before `step`") as caught:
        making("CartPole-v1", 2).step([0, 0])
    assert isinstance(caught.value, ResetNeeded)


def test_with_disabled_autoreset_a_step_past_an_end_is_an_error_that_names_who_ended(making: Making) -> None:
    envs = making("trouble", 3, autoreset_mode="Disabled")
    envs.reset(seed=1)
    observations, *_ = envs.step([0, 3, 0])
    with pytest.raises(AssertionError, match=r"environment 1 has ended.*reset_mask"):
        envs.step([0, 0, 0])
    assert observations.tolist() == [1, 1, 1]  # no environment was stepped


def test_with_disabled_autoreset_a_reset_of_another_does_not_help(making: Making) -> None:
    envs = making("trouble", 3, autoreset_mode="Disabled")
    envs.reset(seed=1)
    envs.step([0, 3, 0])
    envs.reset(options={"reset_mask": np.array([True, False, False])})
    with pytest.raises(AssertionError, match="environment 1 has ended"):
        envs.step([0, 0, 0])


# --------------------------------------------------------------------------------------------------------------- close


@pytest.fixture
def closed(making: Making) -> NativeVectorEnv:
    envs = making("CartPole-v1", 2)
    envs.reset(seed=1)
    envs.close()
    return envs


@pytest.mark.parametrize(
    "call",
    [
        lambda envs: envs.reset(),
        lambda envs: envs.step([0, 0]),
        lambda envs: envs.step(np.array([0, 0])),
        lambda envs: envs.step([7, 7]),
        lambda envs: envs.send([0, 0]),
        lambda envs: envs.recv(),
        lambda envs: envs.render(),
        lambda envs: envs.step_into([0, 0], {}, 0),
        lambda envs: envs.reset_into({}),
    ],
    ids=[
        "reset",
        "step",
        "step of an array",
        "step of no actions",
        "send",
        "recv",
        "render",
        "step_into",
        "reset_into",
    ],
)
def test_a_call_after_close_is_an_error_of_gymnasium(
    call: Callable[[NativeVectorEnv], Any], closed: NativeVectorEnv
) -> None:
    with pytest.raises(ClosedEnvironmentError, match=r"after a call to `close\(\)`"):
        call(closed)


def test_a_second_close_is_harmless(closed: NativeVectorEnv) -> None:
    closed.close()
    assert closed.closed


def test_arrays_that_were_handed_out_outlive_close(making: Making) -> None:
    envs = making("CartPole-v1", 2)
    observations, _ = envs.reset(seed=1)
    kept = observations.copy()
    envs.close()
    del envs
    gc.collect()
    assert_same(observations, kept)


def test_the_environments_are_told_of_the_end_once(making: Making) -> None:
    envs = making("mixed", 2)
    envs.reset(seed=1)
    counts = envs.state.view(np.int64)[2::3]
    before = counts.tolist()
    envs.close()
    envs.close()
    assert counts.tolist() == [count + 1000 for count in before]


def test_environments_that_are_forgotten_are_told_of_the_end(spec_of: Callable[[str], Spec]) -> None:
    envs = NativeVectorEnv(spec_of("mixed"), 2)
    envs.reset(seed=1)
    counts = envs.state.view(np.int64)[2::3]
    before = counts.tolist()
    del envs
    gc.collect()
    assert counts.tolist() == [count + 1000 for count in before]


def test_environments_that_never_began_may_be_closed(making: Making) -> None:
    making("CartPole-v1", 2).close()


def test_a_property_after_close_does_not_end_the_process() -> None:
    code = (
        "from memlane.native import make; envs = make('CartPole-v1', 2); envs.reset(seed=1); envs.close()\n"
        "try: envs.num_threads\n"
        "except Exception as error: print(error)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_environments_that_were_not_closed_do_not_disturb_the_end_of_the_program() -> None:
    code = (
        "from memlane.native import make; envs = make('CartPole-v1', 300, num_threads=2); envs.reset(seed=1)\n"
        "envs.step([0] * 300); envs.send([0, 0], [1, 2]); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=within(100))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# -------------------------------------------------------------------------------------------------------------- memory


def test_without_copy_every_step_is_shown_by_the_same_arrays(making: Making) -> None:
    envs = making("mixed", 3)
    first, infos = envs.reset(seed=1)
    second, *shown, later = envs.step(next(actions_for(envs, 1)))
    third, *again, latest = envs.step(next(actions_for(envs, 1)))
    for name in first:
        assert np.shares_memory(first[name], second[name])
        assert np.shares_memory(second[name], third[name])
    for one, other in zip(shown, again, strict=True):
        assert np.shares_memory(one, other)
    for name in ("energy", "corner"):
        assert np.shares_memory(infos[name], later[name])
        assert np.shares_memory(later[name], latest[name])


def test_without_copy_nothing_that_is_handed_out_can_be_written(making: Making) -> None:
    envs = making("mixed", 3)
    observations, infos = envs.reset(seed=1)
    _, *shown, _ = envs.step(next(actions_for(envs, 1)))
    arrays = [*observations.values(), *shown, *infos.values()]
    assert [array.flags.writeable for array in arrays] == [False] * len(arrays)


def test_with_copy_nothing_that_is_handed_out_changes_later(making: Making) -> None:
    envs = making("mixed", 3, copy=True, autoreset_mode="SameStep", luck=0.5)
    handed: list[Any] = [envs.reset(seed=1)]
    kept = [copied(handed[0])]
    actions = actions_for(envs, 1)
    for _ in range(5):
        handed.append(envs.step(next(actions)))
        kept.append(copied(handed[-1]))
    assert_same(handed, kept)


def test_with_copy_what_is_handed_out_may_be_written_and_nobody_sees_it(making: Making) -> None:
    envs, control = making("mixed", 3, copy=True), making("mixed", 3, copy=True)
    envs.reset(seed=1)
    control.reset(seed=1)
    for envs_step, control_step in zip(_steps(envs), _steps(control), strict=True):
        assert_same(envs_step, control_step)
        for array in (*envs_step[0].values(), *envs_step[1:4], *envs_step[4].values()):
            array.fill(1)


def _steps(envs: NativeVectorEnv) -> Iterator[Any]:
    actions = actions_for(envs, 1)
    for _ in range(30):
        yield envs.step(next(actions))


def test_the_actions_that_are_lent_are_those_that_a_step_reads(making: Making) -> None:
    envs = making("echo_choices", 2)
    envs.reset(seed=1)
    envs.actions[...] = [[1, 5], [-1, 2]]
    observations, *_ = envs.step(envs.actions)
    assert observations[:, :2].tolist() == [[1, 5], [-1, 2]]


def test_the_lent_actions_of_several_fields_may_be_given_back(making: Making) -> None:
    envs, control = making("mixed", 2), making("mixed", 2)
    envs.reset(seed=1)
    control.reset(seed=1)
    action = next(actions_for(envs, 1))
    for name, rows in envs.actions.items():
        rows[...] = action[name]
    assert_same(copied(envs.step(envs.actions)[0]), control.step(action)[0])


def test_actions_of_the_caller_are_not_written(making: Making) -> None:
    envs = making("CartPole-v1", 4)
    envs.reset(seed=1)
    actions = np.array([0, 1, 0, 1])
    actions.flags.writeable = False
    envs.step(actions)
    assert actions.tolist() == [0, 1, 0, 1]


def test_a_step_allocates_nothing_that_stays(making: Making) -> None:
    envs = making("CartPole-v1", 64)
    envs.reset(seed=1)
    actions = np.zeros(64, np.int64)
    for _ in range(200):
        envs.step(actions)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(1000):
            envs.step(actions)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000
    assert peak - before < 2000  # a tuple and a dict at a time


@pytest.mark.parametrize("name", ["CartPole-v1", "mixed"])
def test_in_debug_mode_an_old_view_is_an_error(name: str, making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    envs = making(name, 3)
    observations, _ = envs.reset(seed=1)
    old = observations["position"] if isinstance(observations, dict) else observations
    del observations
    assert np.isfinite(np.asarray(old.copy())).all()
    with pytest.warns(StaleViewWarning, match="the observations of a step"):
        envs.step(next(actions_for(envs, 1)))
    with pytest.raises(StaleView):
        old + 1


@pytest.mark.parametrize("name", ["CartPole-v1", "mixed", "team", "echo_choices"])
def test_in_debug_mode_runs_are_the_same(name: str, making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = making(name, 3)
    plain.reset(seed=1)
    expected = [run_step[1:4] for run_step in run(plain, 40)]
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    envs = making(name, 3)
    envs.reset(seed=1)
    actions = actions_for(envs, 0)
    for theirs in expected:
        assert_same(envs.step(next(actions))[1:4], theirs)


def test_in_debug_mode_with_copies_nothing_is_ever_stale(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    envs = making("CartPole-v1", 3, copy=True)
    observations, _ = envs.reset(seed=1)
    kept = observations.copy()
    envs.step([0, 1, 0])
    assert_same(observations, kept)


# --------------------------------------------------------------------------------------------------------------- slots


def test_steps_go_into_a_slot_of_a_rollout_ring(making: Making) -> None:
    ring = RolloutRingBuffer(num_envs=3, num_steps=4, obs_dim=4, action_dim=1, num_slots=2)
    envs, control = making("CartPole-v1", 3, max_episode_steps=2), making("CartPole-v1", 3, max_episode_steps=2)
    first, _ = control.reset(seed=1)
    seen, rewards, dones, truncations = [first.copy()], [], [], []
    actions = np.array([[0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    for action in actions:
        observations, reward, terminated, truncated, _ = control.step(action)
        seen.append(observations.copy())
        rewards.append(reward.copy())
        dones.append(terminated | truncated)
        truncations.append(truncated.copy())
    try:
        slot = ring.ring.writer().claim()
        assert envs.reset_into(slot, seed=1) == {}
        for index, action in enumerate(actions):
            assert envs.step_into(action, slot, index) == {}
        slot.commit()
        with ring.ring.reader().take(timeout=1) as taken:
            assert_same(np.array(taken["obs"]), np.stack(seen[:4], 1))
            assert_same(np.array(taken["last_obs"]), seen[4])
            assert taken["rewards"].tolist() == np.stack(rewards, 1).tolist()
            assert taken["dones"].tolist() == np.stack(dones, 1).tolist()
            assert taken["truncated"].tolist() == np.stack(truncations, 1).tolist()
    finally:
        ring.cleanup()


def test_observations_of_several_fields_go_into_fields_of_their_own(making: Making) -> None:
    envs = making("mixed", 2)
    slot = {name: np.zeros((2, 2), kind) for name, kind in (("rewards", float), ("dones", bool), ("truncated", bool))}
    for name, space in envs.single_observation_space.spaces.items():  # type: ignore[attr-defined]
        slot[f"obs.{name}"] = np.zeros((2, 2, *space.shape), space.dtype)
        slot[f"last_obs.{name}"] = np.zeros((2, *space.shape), space.dtype)
    envs.reset_into(slot, seed=1)
    infos = envs.step_into(next(actions_for(envs, 1)), slot, 0)
    middle = copied(envs._observations.batch())
    envs.step_into(next(actions_for(envs, 2)), slot, 1)
    for name, rows in middle.items():
        assert_same(slot[f"obs.{name}"][:, 1], rows, name)
    assert_same(slot["last_obs.position"], np.array(envs._observations.batch()["position"]))
    assert set(infos) == {"energy", "_energy", "corner", "_corner"}


# -------------------------------------------------------------------------------------------------------------- render


def test_a_picture_has_rows_of_red_green_and_blue(poles: NativeVectorEnv) -> None:
    picture = poles.render()
    assert picture is not None
    assert (picture.shape, picture.dtype) == ((400, 600, 3), np.uint8)
    assert len(np.unique(picture)) > 2


def test_every_environment_has_its_own_picture(making: Making) -> None:
    envs = making("mixed", 3)
    envs.reset(seed=1)
    assert [envs.render(index)[0, 0, 0] for index in range(3)] == [0, 1, 2]  # type: ignore[index]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_picture_of_an_environment_that_is_not_there_is_an_error(index: int, poles: NativeVectorEnv) -> None:
    with pytest.raises(IndexError, match=r"there is no environment -?\d+, only 0 to \d+"):
        poles.render(index)


def test_a_picture_where_there_is_none_is_an_error(making: Making) -> None:
    envs = making("team", 2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="Team cannot be rendered: its spec has no render function"):
        envs.render()


def test_a_picture_before_the_first_reset_is_an_error(making: Making) -> None:
    with pytest.raises(ValueError, match=r"call `reset\(\)` before `render`"):
        making("CartPole-v1").render()


# -------------------------------------------------------------------------------------------------------------- agents


def test_every_agent_is_a_row(making: Making) -> None:
    envs = making("team", 4)
    assert (envs.num_envs, envs.num_games, envs.num_agents) == (12, 4, 3)
    observations, infos = envs.reset(seed=1)
    assert observations.tolist() == [[0, 1], [0, 2], [0, 3]] * 4
    assert infos["alive"].tolist() == [True] * 12
    assert infos["seat"].tolist() == [0, 100, 200] * 4


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("limit", [0, 4])
def test_agents_leave_a_game_and_the_last_one_ends_it(mode: AutoresetMode, limit: int, making: Making) -> None:
    envs = making("team", 4, autoreset_mode=mode, max_episode_steps=limit)
    envs.reset(seed=1)
    plans = envs.state.view(np.int32).reshape(4, 3)
    leaves, steps, alive, over = plans.copy(), np.zeros(4, int), np.ones((4, 3), bool), np.zeros(4, bool)
    actions = actions_for(envs, 5)
    games = 0
    for _ in range(200):
        action = next(actions)
        observations, rewards, terminated, truncated, infos = (copied(one) for one in envs.step(action))
        for game in range(4):
            rows = slice(3 * game, 3 * game + 3)
            here = "next" if mode is AutoresetMode.NEXT_STEP and over[game] else "step"
            if here == "next":
                over[game], steps[game], alive[game], leaves[game] = False, 0, True, plans[game]
                assert observations[rows].tolist() == [[0, 1], [0, 2], [0, 3]]
                assert not rewards[rows].any()
                assert not (terminated | truncated)[rows].any()
                assert infos["alive"][rows].all()
                continue
            steps[game] += 1
            played = alive[game].copy()
            planned = played & (leaves[game] <= steps[game])
            ended = planned & [True, False, True]
            cut = planned & [False, True, False]
            if limit and steps[game] >= limit:
                cut = played & ~ended
            alive[game] &= ~(ended | cut)
            over[game] = not alive[game].any()
            games += int(over[game])
            assert terminated[rows].tolist() == ended.tolist()
            assert truncated[rows].tolist() == cut.tolist()
            assert rewards[rows].tolist() == np.where(played, action[rows] + 1, 0).tolist()
            last = np.where(played[:, None], [[steps[game], a + 1] for a in range(3)], 0)
            if over[game] and mode is AutoresetMode.SAME_STEP:
                ends = [row for row in range(3) if infos["_final_obs"][rows][row]]
                assert ends == np.flatnonzero(ended | cut).tolist()
                for row in ends:
                    assert infos["final_obs"][3 * game + row].tolist() == last[row].tolist()
                assert observations[rows].tolist() == [[0, 1], [0, 2], [0, 3]]
                over[game], steps[game], alive[game], leaves[game] = False, 0, True, plans[game]
            else:
                assert observations[rows].tolist() == last.tolist()
                assert not infos.get("_final_obs", np.zeros(12, bool))[rows].any()
            assert infos["alive"][rows].tolist() == alive[game].tolist()
    assert games > 50


def test_seeds_and_masks_count_games(making: Making) -> None:
    envs = making("team", 2)
    envs.reset(seed=[1, 2])
    assert envs.random.shape == (2,)
    envs.step([0] * 6)
    observations, _ = envs.reset(options={"reset_mask": np.array([False, True])})
    assert observations[:, 0].tolist() == [1, 1, 1, 0, 0, 0]


def test_several_agents_cannot_be_sent_actions_one_by_one(making: Making) -> None:
    envs = making("team", 2)
    envs.reset(seed=1)
    with pytest.raises(NotImplementedError, match="one agent"):
        envs.send([0], [1])
