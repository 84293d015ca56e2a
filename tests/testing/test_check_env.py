"""memlane.testing: for every rule a small environment in C violates it, and the error names the rule."""

from __future__ import annotations

import ctypes
import doctest
import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from memlane.native import built_in_names
from memlane.native.lowlevel import open_library
from memlane.testing import RULES, EnvCheckFailed, check_env
from tests.support.native_envs import gcc

GOOD = r"""
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <unistd.h>
#include "memlane/env.h"

#ifndef AGENTS
#define AGENTS 1
#endif

struct game { double x, goal; int32_t n; };
double shared;
static double *table;
static struct game *game_of(const memlane_envs *envs, int32_t i) { return (struct game *)envs->state + i; }

static void show(const memlane_envs *envs, int32_t i) {
    struct game *game = game_of(envs, i);
    for (int32_t row = i * AGENTS; row < (i + 1) * AGENTS; ++row) {
        float *seen = (float *)envs->observations[0] + 2 * row;
        seen[0] = (float)game->x;
        seen[1] = (float)game->goal;
        ((int32_t *)envs->infos[0])[row] = game->n;
    }
}

static const char *init(const memlane_envs *envs, int32_t begin, int32_t end) {
    (void)envs, (void)begin, (void)end, (void)table, (void)shared;
    if (envs->settings[0] > 5) return "too heavy";
    /* INIT */
    return NULL;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        struct game *game = game_of(envs, i);
        game->x = memlane_uniform(&envs->random[i], -1, 1);
        game->goal = memlane_uniform(&envs->random[i], -1, 1);
        game->n = 0;
        show(envs, i);
        /* RESET */
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        struct game *game = game_of(envs, i);
        const int32_t last = envs->num_envs - 1, row = i * AGENTS;
        (void)last;
        game->x += ((const int64_t *)envs->actions[0])[row] == 1 ? 0.1 : -0.1;
        game->x += memlane_uniform(&envs->random[i], -0.01, 0.01);
        game->n += 1;
        for (int agent = 0; agent < AGENTS; ++agent) {
            envs->rewards[row + agent] = -fabs(game->x - game->goal) / 10;
            envs->terminated[row + agent] = game->n >= 12 - 4 * agent;
        }
        show(envs, i);
        /* STEP */
    }
}

static void finish(const memlane_envs *envs, int32_t begin, int32_t end) {
    (void)envs, (void)begin, (void)end;
    /* CLOSE */
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    for (int k = 0; k < 4 * 3 * 3; ++k) rgb[k] = (uint8_t)(100 + k + game_of(envs, i)->n);
    /* RENDER */
}

static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .low = -4, .high = 4},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 1}};
static const memlane_field infos[] = {{.name = "n", .dtype = MEMLANE_INT32}};
static const memlane_setting settings[] = {{.name = "mass", .value = 1, .low = 0, .high = 9}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI, .spec_bytes = sizeof(memlane_spec), .name = "Small-v0",
    .observations = observations, .num_observations = 1, .actions = actions, .num_actions = 1,
    .infos = infos, .num_infos = 1, .settings = settings, .num_settings = 1, .num_agents = AGENTS,
    .max_episode_steps = 10, .state_bytes = sizeof(struct game), .reward_low = -1, .reward_high = 0,
    /* SPEC */
    .init = init, .reset = reset, .step = step, .close = finish,
    .render_width = 4, .render_height = 3, .render = render,
};
"""


def build(directory: Path, *changes: tuple[str, str], agents: int = 1) -> Path:
    """The good environment with some of its text replaced."""
    source = GOOD
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    file = directory / "small.c"
    file.write_text(source)
    return gcc(file, directory / "small.so", "-O0", "-shared", "-fPIC", f"-DAGENTS={agents}", "-Wall", "-Werror")


def broken(directory: Path, *changes: tuple[str, str], agents: int = 1, **kwargs: Any) -> EnvCheckFailed:
    with pytest.raises(EnvCheckFailed) as caught:
        check_env(build(directory, *changes, agents=agents), **{"steps": 40, **kwargs})
    return caught.value


STEP, RESET = "/* STEP */", "/* RESET */"
PAST_END = ("/* SPEC */", ".steps_past_end = 1,")
# A rule, what breaks it, and the field that must be named ("" where there is none).
BROKEN = {
    "init_refuses_its_own_defaults": ("init", "", [("/* INIT */", 'return "never";')]),
    "step_crashes": ("no_crash", "", [(STEP, "if (game->n == 5) *(volatile int *)0 = 1;")]),
    "step_writes_a_state_behind_the_last": ("buffer_bounds", "state", [(STEP, "if (i == last) game[1].x = 1;")]),
    "step_writes_a_state_before_the_first": ("buffer_bounds", "state", [(STEP, "if (i == 0) game[-1].x = 1;")]),
    "step_writes_an_observation_too_many": (
        "buffer_bounds",
        "observations[0]",
        [(STEP, "if (i == last) ((float *)envs->observations[0])[2 * i + 2] = 1;")],
    ),
    "step_writes_a_reward_too_many": ("buffer_bounds", "rewards", [(STEP, "if (i == last) envs->rewards[i + 1] = 0;")]),
    "step_writes_an_end_too_many": (
        "buffer_bounds",
        "terminated",
        [(STEP, "if (i == last) envs->terminated[i + 1] = 1;")],
    ),
    "step_cuts_one_too_many_off": (
        "buffer_bounds",
        "truncated",
        [(STEP, "if (i == last) envs->truncated[i + 1] = 1;")],
    ),
    "step_writes_an_info_too_many": (
        "buffer_bounds",
        "infos[0] (n)",
        [(STEP, "if (i == last) ((int32_t *)envs->infos[0])[i + 1] = 7;")],
    ),
    "reset_draws_from_a_word_behind_the_last": (
        "buffer_bounds",
        "random",
        [(RESET, "if (i == envs->num_envs - 1) memlane_random(&envs->random[i + 1]);")],
    ),
    "step_writes_the_actions": ("read_only", "actions[0]", [(STEP, "((int64_t *)envs->actions[0])[i] = 5;")]),
    "step_counts_the_steps": ("read_only", "steps", [(STEP, "((int32_t *)envs->steps)[i] += 1;")]),
    "step_writes_the_settings": ("read_only", "settings", [(STEP, "((double *)envs->settings)[0] += 1;")]),
    "step_takes_agents_out_of_the_game": ("read_only", "alive", [(STEP, "envs->alive[i] = 0;")]),
    "reset_writes_rewards": ("reset", "rewards", [(RESET, "envs->rewards[i] = -0.25;")]),
    "reset_writes_ends": ("reset", "terminated", [(RESET, "envs->terminated[i] = 1;")]),
    "an_observation_is_not_a_number": (
        "observations",
        "observations[0]",
        [(STEP, "if (game->n == 7) ((float *)envs->observations[0])[2 * i] = NAN;")],
    ),
    "a_last_observation_is_out_of_bounds": (
        "observations",
        "observations[0]",
        [(STEP, "if (envs->terminated[i]) ((float *)envs->observations[0])[2 * i + 1] = 5;"), ("= 10,", "= 0,")],
    ),
    "a_reward_is_out_of_range": ("rewards", "rewards", [(STEP, "if (game->n == 3) envs->rewards[i] = 2;")]),
    "an_end_is_neither_0_nor_1": (
        "flags",
        "terminated",
        [("game->n >= 12 - 4 * agent;", "(uint8_t)(2 * (game->n >= 7));")],
    ),
    "step_writes_an_observation_of_another": (
        "ranges",
        "observations[0]",
        [(STEP, "if (i == 2 && last > 6) ((float *)envs->observations[0])[2 * 6] = 1;")],
    ),
    "step_writes_the_reward_of_another": (
        "ranges",
        "rewards",
        [(STEP, "if (i == 2 && last > 6) envs->rewards[6] = -0.5;")],
    ),
    "step_writes_the_state_of_another": (
        "ranges",
        "state",
        [(STEP, "if (i == 2 && last > 6) game_of(envs, 6)->goal = 0.25;")],
    ),
    "step_runs_up_to_end_inclusive": (
        "ranges",
        "observations[0]",
        [(STEP, "if (i + 1 == end && i < last) show(envs, i + 1);")],
    ),
    "step_remembers_in_a_static_variable": (
        "determinism",
        "rewards",
        [(STEP, "shared += 0.001; game->x += shared;"), ("-4, .high = 4", "-INFINITY, .high = INFINITY")],
    ),
    "reset_forgets_a_number_of_the_state": ("clean_reset", "", [("        game->n = 0;\n", "")]),
    "reset_forgets_a_part_of_the_observation": (
        "clean_reset",
        "observations[0]",
        [("seen[1] = (float)game->goal;", "if (game->n) seen[1] = (float)game->goal;")],
    ),
    "reset_forgets_an_info": (
        "infos",
        "infos[0] (n)",
        [("((int32_t *)envs->infos[0])[row] =", "if (game->n) ((int32_t *)envs->infos[0])[row] =")],
    ),
    "reset_looks_at_the_word_of_another": (
        "random",
        "observations[0]",
        [(RESET, "uint64_t word = envs->random[0]; game->goal = memlane_uniform(&word, -1, 1); show(envs, i);")],
    ),
    "an_environment_knows_its_number": (
        "num_envs",
        "observations[0]",
        [(RESET, "game->x += i * 1e-3; show(envs, i);")],
    ),
    "an_environment_knows_how_many_there_are": (
        "num_envs",
        "observations[0]",
        [(RESET, "game->x += envs->num_envs * 1e-3; show(envs, i);")],
    ),
    "a_step_past_the_end_draws_a_random_number": ("autoreset", "", [PAST_END]),
    "results_depend_on_the_thread": (
        "threads",
        "observations[0]",
        [(STEP, "if (gettid() != getpid()) { game->x += 0.001; show(envs, i); }")],
    ),
    "a_step_past_the_end_crashes": (
        "past_end",
        "",
        [PAST_END, (STEP, "if (game->n == 14) *(volatile int *)0 = 1;")],
    ),
    "a_step_past_the_end_harms_another": (
        "past_end",
        "observations[0]",
        [
            PAST_END,
            ("= 10,", "= 0,"),
            ("game->n >= 12 - 4 * agent;", "game->n >= (i % 2 ? 12 : 20);"),
            (STEP, "if (game->n > 13 && i > begin) ((float *)envs->observations[0])[2 * i - 2] = 3;"),
        ],
    ),
    "render_draws_outside_its_image": ("render", "the image", [("/* RENDER */", "rgb[4 * 3 * 3] = 1;")]),
    "render_changes_the_state": ("render", "state", [("/* RENDER */", "game_of(envs, i)->n += 1;")]),
    "close_ends_what_others_still_use": (
        "close",
        "observations[0]",
        [
            ("/* INIT */", "table = realloc(table, sizeof *table); *table = 0.01;"),
            ("/* CLOSE */", "*table = 0.02;"),
            (STEP, "game->x += *table; show(envs, i);"),
        ],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case: str, tmp_path: Path) -> None:
    rule, field, changes = BROKEN[case]
    failures = [failure for failure in broken(tmp_path, *changes).failures if failure.rule == rule]
    assert any(failure.field == field or not field for failure in failures), failures


def test_each_rule_is_broken_by_some_environment() -> None:
    assert set(RULES) - {rule for rule, _, _ in BROKEN.values()} == {"agents"}


def test_a_game_that_begins_without_agents_is_named(tmp_path: Path) -> None:
    cleared = (RESET, "for (int a = 0; a < AGENTS; ++a) envs->alive[i * AGENTS + a] = 0;")
    assert "agents" in broken(tmp_path, cleared, agents=2).rules


def test_a_write_behind_the_rows_of_several_agents_is_named(tmp_path: Path) -> None:
    off = (STEP, "if (i == last) envs->rewards[(i + 1) * AGENTS] = -0.5;")
    assert broken(tmp_path, off, agents=3).rules == ("buffer_bounds",)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_an_environment_that_keeps_the_rules_passes(agents: int, tmp_path: Path) -> None:
    report = check_env(build(tmp_path, agents=agents))
    assert (set(report.checked), set(report.skipped)) == (set(RULES) - {"past_end"}, {"past_end"})


@pytest.mark.parametrize("name", built_in_names())
def test_environments_that_come_with_memlane_keep_the_rules(name: str) -> None:
    assert check_env(name).name == name


def test_rules_broken_independently_are_all_listed(tmp_path: Path) -> None:
    reward = (STEP, "envs->rewards[i] = 7; ((int64_t *)envs->actions[0])[i] = 5;")
    error = broken(tmp_path, reward, ("/* RENDER */", "game_of(envs, i)->n += 1;"))
    assert set(error.rules) == {"read_only", "rewards", "render"}


def test_a_failure_says_what_was_expected_what_came_where_and_what_to_do(tmp_path: Path) -> None:
    error = broken(tmp_path, (STEP, "if (i == 4 && game->n == 3) envs->rewards[i] = 2;"))
    assert str(error) == (
        "Small-v0 violates 1 rule: rewards\n\n"
        "rewards: rewards are finite and within reward_low to reward_high\n"
        "  expected  a number from -1.0 to 0.0\n"
        "  found     2.0\n"
        "  where     in step(0, 8), environment 4, step 2, field rewards\n"
        "  fix       correct the reward, or declare its range in reward_low and reward_high\n\n"
        "past_end: not checked, because the environment does not declare steps_past_end"
    )


def test_a_crash_has_a_place(tmp_path: Path) -> None:
    error = broken(tmp_path, (STEP, "if (game->n == 5) *(volatile int *)0 = 1;"))
    assert "the process was killed by SIGSEGV" in str(error)
    assert "in step(0, 8), step 4" in str(error)


def test_a_function_that_does_not_return_is_named(tmp_path: Path) -> None:
    error = broken(tmp_path, (RESET, "while (!*(volatile uint8_t *)&envs->terminated[i]) {}"), timeout=0.5)
    assert "no return within 0.5 s" in str(error)


def test_what_builds_on_a_broken_rule_is_not_checked(tmp_path: Path) -> None:
    error = broken(tmp_path, (STEP, "shared += 1; envs->rewards[i] = -fmod(shared, 1000) / 1000;"))
    assert error.rules == ("determinism",)
    assert error.report.skipped["threads"] == "because it depends on the rule determinism, which is violated"


def test_settings_are_handed_on(tmp_path: Path) -> None:
    assert "init returned: too heavy" in str(broken(tmp_path, mass=6))


def test_a_spec_can_be_checked_in_this_process(tmp_path: Path) -> None:
    """For debuggers, which must see the crash in their own process."""
    library = build(tmp_path, ("/* INIT */", "shared = getpid();"))
    check_env(open_library(library), isolated=False, steps=10)
    assert ctypes.c_double.in_dll(ctypes.CDLL(str(library)), "shared").value == os.getpid()


def test_names_and_paths_that_are_not_there_are_an_error() -> None:
    with pytest.raises(LookupError, match=r"unknown native environment 'Nothing-v0', and there is no file"):
        check_env("Nothing-v0")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be 1 or more, found 0"),
        ({"steps": 1.5}, TypeError, "steps must be an integer, 1 or more, found 1.5"),
        ({"seed": -1}, ValueError, "seed must be 0 or more, found -1"),
        ({"timeout": -1}, ValueError, "timeout must be a finite number of seconds above 0, found -1"),
        ({"timeout": None}, ValueError, "timeout must be a finite number of seconds above 0, found None"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_an_error_that_names_it(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_env("CartPole-v1", **arguments)


def test_misspelt_names_settings_and_arguments_are_answered_with_the_nearest_one() -> None:
    expected = (
        r"'CartPol-v1', and there is no file of that name; did you mean 'CartPole-v1'\? \(built-in environments: "
    )
    with pytest.raises(LookupError, match=expected):
        check_env("CartPol-v1")
    with pytest.raises(TypeError, match="no setting 'sutton_barto_rewards'; did you mean 'sutton_barto_reward'"):
        check_env("CartPole-v1", sutton_barto_rewards=1)
    with pytest.raises(TypeError, match="no setting 'time_out'; did you mean 'timeout'"):
        check_env("CartPole-v1", time_out=1)


def test_the_examples_in_the_documentation_run() -> None:
    result = doctest.testmod(importlib.import_module("memlane.testing.check"))
    assert (result.attempted > 0, result.failed) == (True, 0)
