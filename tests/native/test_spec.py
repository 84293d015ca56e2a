"""Spec: the mirrors of the C structs match the compiler's layout, and errors name what a library declares wrongly."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from memlane import _native
from memlane.core import MemlaneError
from memlane.native import NativeEnv, NativeVectorEnv, Spec, SpecError, built_in_names, load, make
from memlane.native.lowlevel import CEnvs, CField, CSetting, CSpec, built_in, open_library
from memlane.native.spec import _RESERVED_SETTINGS
from memlane.testing import check_env
from tests.support.native_envs import gcc

MIRRORS = {"memlane_spec": CSpec, "memlane_field": CField, "memlane_setting": CSetting, "memlane_envs": CEnvs}

FIELD = ".dtype = MEMLANE_FLOAT32, .low = 0, .high = 1"
CHOICE = ".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 1"

Declare = Callable[..., Spec]


@pytest.fixture
def declare(tmp_path: Path) -> Declare:
    """Compiles a library with these fields and settings, and ``extra`` that stands last in its spec; opens it."""

    def declared(
        *,
        observations: tuple[str, ...] = (FIELD,),
        actions: tuple[str, ...] = (CHOICE,),
        infos: tuple[str, ...] = (),
        settings: tuple[str, ...] = (),
        extra: str = "",
    ) -> Spec:
        arrays = {"observations": observations, "actions": actions, "infos": infos, "settings": settings}
        lines = [
            f"static const memlane_{'setting' if name == 'settings' else 'field'} {name}[] = "
            f"{{{', '.join(f'{{{one}}}' for one in several) or '{0}'}}};"
            for name, several in arrays.items()
        ]
        counts = "".join(f".{name} = {name}, .num_{name} = {len(several)}, " for name, several in arrays.items())
        (tmp_path / "declared.c").write_text(
            "#include <math.h>\n"
            '#include "memlane/env.h"\n'
            "static void run(const memlane_envs *e, int32_t b, int32_t n) { (void)e; (void)b; (void)n; }\n"
            "static void draw(const memlane_envs *e, int32_t i, uint8_t *p) { (void)e; (void)i; (void)p; }\n"
            "static const double ups[] = {1, 2, 3, 4}, downs[] = {4, 3, 2, 1};\n"
            "void (*const unused)(const memlane_envs *, int32_t, uint8_t *) = draw;\n" + "\n".join(lines) + "\n"
            "MEMLANE_EXPORT const memlane_spec memlane_env = {.abi = MEMLANE_ENV_ABI, "
            f'.spec_bytes = sizeof(memlane_spec), .name = "Declared", {counts} .reset = run, .step = run, {extra}}};\n'
        )
        return open_library(gcc(tmp_path / "declared.c", tmp_path / "declared.so", "-w", "-shared", "-fPIC"))

    return declared


def refused(declare: Declare, *parts: str, **declaration: Any) -> None:
    """It is a ``SpecError`` that names the file and all these parts."""
    with pytest.raises(SpecError) as raised:
        declare(**declaration)
    message = str(raised.value)
    assert "declared.so" in message
    assert [part for part in parts if part not in message] == [], message


# ------------------------------------------------------------------------------------------------------------- mirrors


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Where the C compiler puts every member that the mirrors have, and the sizes."""
    members = [(struct, name) for struct, mirror in MIRRORS.items() for name, *_ in mirror._fields_]
    prints = [f'printf("{s}.{m} %zu %zu\\n", offsetof({s}, {m}), sizeof((({s} *)0)->{m}));' for s, m in members]
    sizes = [f'printf("{struct} %zu\\n", sizeof({struct}));' for struct in MIRRORS]
    folder = tmp_path_factory.mktemp("places")
    (folder / "places.c").write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "memlane/env.h"\n'
        f"int main(void) {{ {' '.join(prints + sizes)} return 0; }}\n"
    )
    program = gcc(folder / "places.c", folder / "places")
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, int] = {}
    for line in lines:
        name, *numbers = line.split()
        found[name] = int(numbers[0])
        if len(numbers) == 2:
            found[f"{name} bytes"] = int(numbers[1])
    return found


@pytest.mark.parametrize("struct", MIRRORS)
def test_every_member_of_a_mirror_is_where_the_compiler_puts_it(struct: str, places: dict[str, int]) -> None:
    mirror = MIRRORS[struct]
    ours = {name: getattr(mirror, name).offset for name, *_ in mirror._fields_}
    assert ours == {name: places[f"{struct}.{name}"] for name in ours}


@pytest.mark.parametrize("struct", MIRRORS)
def test_every_member_of_a_mirror_is_as_large_as_the_compiler_makes_it(struct: str, places: dict[str, int]) -> None:
    mirror = MIRRORS[struct]
    ours = {name: getattr(mirror, name).size for name, *_ in mirror._fields_}
    assert ours == {name: places[f"{struct}.{name} bytes"] for name in ours}


@pytest.mark.parametrize("struct", MIRRORS)
def test_a_mirror_has_the_size_of_the_struct(struct: str, places: dict[str, int]) -> None:
    assert ctypes.sizeof(MIRRORS[struct]) == places[struct]


def test_the_module_was_compiled_with_the_same_sizes() -> None:
    assert _native.env_layout() == tuple(ctypes.sizeof(mirror) for mirror in (CSpec, CField, CSetting, CEnvs))


# ------------------------------------------------------------------------------------------------------- what is right


def test_a_single_field_without_a_name_is_the_whole_space(declare: Declare) -> None:
    spec = declare()
    assert spec.observation_space == Box(0, 1, (), np.float32)
    assert spec.action_space == Discrete(2)


def test_a_single_field_with_a_name_is_a_dict(declare: Declare) -> None:
    assert declare(observations=(f'.name = "eye", {FIELD}',)).observation_space == Dict({"eye": Box(0, 1, ())})


def test_several_fields_are_a_dict_by_their_names(declare: Declare) -> None:
    spec = declare(actions=(f'.name = "b", {FIELD}', f'.name = "a", {CHOICE}'))
    assert spec.action_space == Dict({"a": Discrete(2), "b": Box(0, 1, ())})
    assert [one.name for one in spec.actions] == ["b", "a"]


def test_a_discrete_field_may_begin_anywhere(declare: Declare) -> None:
    field = ".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = -3, .high = 3"
    assert declare(actions=(field,)).action_space == Discrete(7, start=-3)


def test_a_discrete_field_with_a_shape_is_multi_discrete(declare: Declare) -> None:
    field = ".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .num_dims = 2, .shape = {2, 2}, .low = 0, .highs = ups"
    assert declare(actions=(field,)).action_space == MultiDiscrete([[2, 3], [4, 5]])


def test_bounds_may_be_given_for_each_number(declare: Declare) -> None:
    field = ".dtype = MEMLANE_FLOAT64, .num_dims = 1, .shape = {4}, .low = -1, .highs = ups"
    assert declare(observations=(field,)).observation_space == Box(
        np.full(4, -1.0), np.arange(1.0, 5), dtype=np.float64
    )


NUMBERS = ["FLOAT32", "FLOAT64", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "BOOL"]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_dtype_of_the_header_is_that_of_numpy(name: str, declare: Declare) -> None:
    spec = declare(observations=(f".dtype = MEMLANE_{name}, .low = 0, .high = 1",))
    assert spec.observations[0].dtype == np.dtype(name.lower())


@pytest.mark.parametrize("name", ["INT8", "UINT8", "INT32", "UINT32"])
def test_integers_without_bounds_have_those_of_their_dtype(name: str, declare: Declare) -> None:
    low = "0" if name.startswith("U") else "-INFINITY"
    spec = declare(observations=(f".dtype = MEMLANE_{name}, .low = {low}, .high = INFINITY",))
    limits = np.iinfo(name.lower())
    space = spec.observation_space
    assert isinstance(space, Box)
    assert (space.low.item(), space.high.item()) == (limits.min, limits.max)


def test_numbers_of_the_spec_are_read(declare: Declare) -> None:
    spec = declare(
        extra=".max_episode_steps = 7, .state_bytes = 24, .reward_low = -2, .reward_high = 3, .num_agents = 4, "
        ".render = draw, .render_width = 6, .render_height = 5"
    )
    assert (spec.name, spec.max_episode_steps, spec.state_bytes, spec.num_agents) == ("Declared", 7, 24, 4)
    assert (spec.reward_range, spec.render_size) == ((-2.0, 3.0), (6, 5))


def test_no_agents_are_one(declare: Declare) -> None:
    assert declare().num_agents == 1


def test_settings_are_read(declare: Declare) -> None:
    (setting,) = declare(settings=('.name = "wind", .value = 2, .low = 1, .high = 3',)).settings
    assert (setting.name, setting.value, setting.low, setting.high) == ("wind", 2.0, 1.0, 3.0)


@pytest.mark.parametrize("name", ["a.b", "a b", "a/b", "~", "value", "reward"])
@pytest.mark.parametrize("part", ["observation", "action", "info"])
def test_a_name_may_have_any_letters(part: str, name: str, declare: Declare) -> None:
    field = {f"{part}s": (f'.name = "{name}", {CHOICE}',)}
    envs = NativeVectorEnv(declare(**field), 2)
    observations, infos = envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    named = {"observation": observations, "action": envs.actions, "info": infos}[part]
    envs.close()
    assert name in named


@pytest.mark.parametrize("name", built_in_names())
def test_a_built_in_environment_has_a_good_spec(name: str) -> None:
    assert built_in(name).name == name


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_a_spec_error_is_a_memlane_error_and_a_value_error() -> None:
    assert issubclass(SpecError, MemlaneError)
    assert issubclass(SpecError, ValueError)


def test_another_version_of_the_header_is_named(declare: Declare) -> None:
    refused(declare, "version 7 ", f"version {_native.ENV_ABI}", "memlane build", extra=".abi = 7")


def test_other_spec_bytes_are_named(declare: Declare) -> None:
    size = ctypes.sizeof(CSpec)
    refused(declare, "spec_bytes is 11", f"{size} bytes", "sizeof(memlane_spec)", extra=".spec_bytes = 11")


@pytest.mark.parametrize("name", ["0", '""'])
def test_a_missing_name_is_named(name: str, declare: Declare) -> None:
    refused(declare, "the name", "missing", extra=f".name = {name}")


def test_a_name_that_is_no_text_is_named(declare: Declare) -> None:
    refused(declare, "name", extra='.name = "\\xff\\xfe"')


@pytest.mark.parametrize("function", ["reset", "step"])
def test_a_missing_function_is_named(function: str, declare: Declare) -> None:
    refused(declare, "(Declared)", f"the spec has no function '{function}'", extra=f".{function} = 0")


def test_a_negative_limit_of_steps_is_named(declare: Declare) -> None:
    refused(declare, "max_episode_steps", "0 (no limit) or more", "-1", extra=".max_episode_steps = -1")


def test_a_negative_number_of_agents_is_named(declare: Declare) -> None:
    refused(declare, "num_agents", "0 or more", "-2", extra=".num_agents = -2")


@pytest.mark.parametrize(("low", "high"), [("1", "0"), ("NAN", "0"), ("0", "NAN")])
def test_a_range_of_rewards_that_cannot_be_is_named(low: str, high: str, declare: Declare) -> None:
    refused(
        declare,
        "reward_low must not be above reward_high",
        low.lower(),
        high.lower(),
        extra=f".reward_low = {low}, .reward_high = {high}",
    )


@pytest.mark.parametrize(("width", "height"), [(0, 0), (4, 0), (0, 4), (-4, 4), (4, -4)])
def test_a_picture_without_a_size_is_named(width: int, height: int, declare: Declare) -> None:
    extra = f".render = draw, .render_width = {width}, .render_height = {height}"
    refused(declare, "width and a height above 0", "render set", f"{width} x {height}", extra=extra)


def test_a_size_without_a_picture_is_named(declare: Declare) -> None:
    extra = ".render_width = 4, .render_height = 3"
    refused(declare, "function render", "render missing", "4 x 3", extra=extra)


@pytest.mark.parametrize("part", ["observation", "action"])
def test_no_fields_are_named(part: str, declare: Declare) -> None:
    refused(declare, f"{part}s", "at least 1", "found 0", extra=f".num_{part}s = 0")


@pytest.mark.parametrize("part", ["observation", "action", "info"])
def test_a_negative_count_of_fields_is_named(part: str, declare: Declare) -> None:
    refused(declare, f"{part}s", "at least", "found -1", extra=f".num_{part}s = -1")


@pytest.mark.parametrize("part", ["observation", "action", "info"])
def test_an_array_of_fields_that_is_null_is_named(part: str, declare: Declare) -> None:
    with pytest.raises(SpecError, match=rf"declared\.so.*{part}s") as raised:
        declare(extra=f".{part}s = 0, .num_{part}s = 1")
    assert "the count is 1, but the pointer to the fields is NULL" in str(raised.value)
    assert "at most 1024 fields" not in str(raised.value)  # the count is valid


def test_more_fields_than_there_can_be_are_named(declare: Declare) -> None:
    with pytest.raises(SpecError, match=r"declared\.so.*observations.*100000"):
        declare(extra=".num_observations = 100000")


@pytest.mark.parametrize("dtype", [0, -1, 12])
@pytest.mark.parametrize("part", ["observation", "action"])
def test_an_unknown_dtype_is_named(part: str, dtype: int, declare: Declare) -> None:
    field = {f"{part}s": (f'.name = "ear", .dtype = {dtype}',)}
    refused(declare, f"{part} 0 (ear)", f"unknown dtype {dtype}", "enum memlane_dtype", **field)


def test_an_unknown_kind_is_named(declare: Declare) -> None:
    field = f'.name = "ear", {FIELD}, .kind = 2'
    refused(declare, "observation 0 (ear)", "unknown kind 2", "enum memlane_kind", observations=(field,))


@pytest.mark.parametrize("dims", [-1, 5])
def test_too_many_dimensions_are_named(dims: int, declare: Declare) -> None:
    refused(declare, "observation 0", "0 to 4", f"found {dims}", observations=(f"{FIELD}, .num_dims = {dims}",))


@pytest.mark.parametrize(("shape", "shown"), [("{0}", "(0, 0)"), ("{3}", "(3, 0)"), ("{2, -2}", "(2, -2)")])
def test_an_extent_below_one_is_named(shape: str, shown: str, declare: Declare) -> None:
    field = f"{FIELD}, .num_dims = 2, .shape = {shape}"
    refused(declare, "observation 0", "at least 1", shown, observations=(field,))


def test_the_number_of_the_wrong_field_is_named(declare: Declare) -> None:
    fields = (f'.name = "good", {CHOICE}', '.name = "bad", .dtype = 0')
    refused(declare, "action 1 (bad)", actions=fields)


@pytest.mark.parametrize(("low", "high"), [("1", "0"), ("NAN", "1"), ("0", "NAN"), ("INFINITY", "0")])
def test_bounds_in_the_wrong_order_are_named(low: str, high: str, declare: Declare) -> None:
    field = f".dtype = MEMLANE_FLOAT32, .low = {low}, .high = {high}"
    parts = [{"NAN": "nan", "INFINITY": "inf"}.get(one, one) for one in (low, high)]
    refused(declare, "observation 0", "lower bound", "upper bound", *parts, observations=(field,))


def test_bounds_of_each_number_in_the_wrong_order_are_named(declare: Declare) -> None:
    field = ".dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {4}, .lows = downs, .highs = ups"
    refused(declare, "observation 0", "lower bound", "[4. 3. 2. 1.]", "[1. 2. 3. 4.]", observations=(field,))


@pytest.mark.parametrize(("dtype", "low", "high"), [("UINT8", "0", "256"), ("UINT8", "-1", "1"), ("INT8", "-129", "0")])
def test_a_bound_that_its_dtype_cannot_hold_is_named(dtype: str, low: str, high: str, declare: Declare) -> None:
    field = f".dtype = MEMLANE_{dtype}, .low = {low}, .high = {high}"
    refused(declare, "observation 0", dtype.lower(), observations=(field,))


@pytest.mark.parametrize("dtype", ["INT32", "FLOAT32"])
def test_a_discrete_field_of_another_type_is_named(dtype: str, declare: Declare) -> None:
    field = f".dtype = MEMLANE_{dtype}, .kind = MEMLANE_DISCRETE, .low = 0, .high = 1"
    refused(declare, "action 0", "int64", dtype.lower(), actions=(field,))


@pytest.mark.parametrize(("low", "high"), [("0", "INFINITY"), ("-INFINITY", "0")])
def test_a_discrete_field_without_bounds_is_named(low: str, high: str, declare: Declare) -> None:
    field = f".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = {low}, .high = {high}"
    refused(declare, "action 0", "needs bounds", "inf", actions=(field,))


def test_a_discrete_field_with_bounds_that_are_not_whole_is_named(declare: Declare) -> None:
    field = ".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0.5, .high = 1.5"
    refused(declare, "action 0", "0.5", "1.5", actions=(field,))


def test_a_discrete_field_with_more_choices_than_there_are_numbers_is_named(declare: Declare) -> None:
    field = ".dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 1e300"
    refused(declare, "action 0", actions=(field,))


@pytest.mark.parametrize("part", ["observation", "action"])
def test_a_field_without_a_name_among_several_is_named(part: str, declare: Declare) -> None:
    fields = {f"{part}s": (f'.name = "eye", {CHOICE}', CHOICE)}
    refused(declare, f"{part}s", "each needs a name", "['eye', '']", **fields)


@pytest.mark.parametrize("part", ["observation", "action", "info"])
def test_two_fields_of_one_name_are_named(part: str, declare: Declare) -> None:
    fields = {f"{part}s": (f'.name = "eye", {CHOICE}',) * 2}
    refused(declare, f"{part}s", "names of fields must be unique", "['eye', 'eye']", **fields)


def test_an_info_without_a_name_is_named(declare: Declare) -> None:
    refused(declare, "every info needs a name", infos=(FIELD,))


@pytest.mark.parametrize("count", [-1, 1])
def test_a_count_of_settings_that_are_not_there_is_named(count: int, declare: Declare) -> None:
    refused(declare, f"num_settings is {count}", extra=f".settings = 0, .num_settings = {count}")


def test_a_setting_without_a_name_is_named(declare: Declare) -> None:
    settings = ('.name = "wind", .high = 1', ".value = 1, .high = 2")
    refused(declare, "setting 1", "name", "missing", settings=settings)


@pytest.mark.parametrize(("value", "low", "high"), [("5", "0", "1"), ("-1", "0", "1"), ("NAN", "0", "1")])
def test_a_setting_out_of_its_bounds_is_named(value: str, low: str, high: str, declare: Declare) -> None:
    settings = (f'.name = "wind", .value = {value}, .low = {low}, .high = {high}',)
    refused(
        declare,
        "setting 'wind'",
        value.lower(),
        f"must be from {low}.0 to {high}.0, found {value.lower()}",
        settings=settings,
    )


def test_two_settings_of_one_name_are_named(declare: Declare) -> None:
    refused(declare, "wind", settings=('.name = "wind", .high = 1',) * 2)


@pytest.mark.parametrize("name", ["copy", "num_threads", "max_episode_steps", "seed", "steps"])
def test_a_setting_with_the_name_of_an_argument_is_named(name: str, declare: Declare) -> None:
    """The value would be passed to that argument of ``NativeVectorEnv`` or ``check_env`` instead."""
    refused(declare, name, settings=(f'.name = "{name}", .high = 1',))


def test_every_argument_beside_which_settings_are_passed_is_reserved() -> None:
    functions = (make, load, NativeVectorEnv.__init__, NativeEnv.__init__, check_env)
    parameters = [parameter for function in functions for parameter in signature(function).parameters.values()]
    names = {parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD}
    assert names == _RESERVED_SETTINGS


# --------------------------------------------------------------------------------------- settings that are given


def test_a_given_setting_takes_the_place_of_its_own_value(declare: Declare) -> None:
    spec = declare(settings=('.name = "wind", .value = 2, .high = 3', '.name = "rain", .value = 1, .high = 3'))
    assert spec.resolve_settings({"rain": np.float32(0.5)}) == [2.0, 0.5]


def test_an_unknown_setting_is_an_error_that_names_those_that_there_are(declare: Declare) -> None:
    spec = declare(settings=('.name = "wind", .high = 3', '.name = "rain", .high = 3'))
    with pytest.raises(TypeError, match=r"Declared has no setting 'snow' \(settings: wind, rain\)"):
        spec.resolve_settings({"snow": 1})


def test_a_misspelt_setting_is_answered_with_the_nearest_setting_or_argument(declare: Declare) -> None:
    spec = declare(settings=('.name = "wind", .high = 3', '.name = "rain", .high = 3'))
    with pytest.raises(TypeError, match=r"no setting 'wnd'; did you mean 'wind'\? \(settings: wind, rain\)"):
        NativeVectorEnv(spec, 2, wnd=1)
    with pytest.raises(
        TypeError, match=r"no setting 'num_thread'; did you mean 'num_threads'\? \(settings: wind, rain\)"
    ):
        NativeVectorEnv(spec, 2, num_thread=1)


def test_an_unknown_setting_where_there_are_none_is_an_error(declare: Declare) -> None:
    with pytest.raises(TypeError, match=r"Declared has no setting 'snow' \(settings: none\)"):
        declare().resolve_settings({"snow": 1})


@pytest.mark.parametrize("value", [-0.1, 3.5, float("nan"), float("inf"), "1", None, [1]])
def test_a_setting_that_is_no_number_in_its_bounds_is_an_error(value: Any, declare: Declare) -> None:
    spec = declare(settings=('.name = "wind", .high = 3',))
    with pytest.raises(ValueError, match=r"setting 'wind' must be a number from 0\.0 to 3\.0, found"):
        spec.resolve_settings({"wind": value})
