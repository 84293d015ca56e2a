"""Spec: what a native environment declares, read from the C structs of ``memlane/env.h`` and checked.

The structs below mirror the header field by field; ``tests/native/test_spec.py`` compares their sizes and offsets with
those of the C compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from memlane import _native
from memlane.core import MemlaneError
from memlane.core.suggestions import did_you_mean

BOX, DISCRETE = range(2)
DTYPES = ["float32", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
"""``DTYPES[number - 1]`` is the dtype with that number in ``enum memlane_dtype``."""
MAX_DIMS = 4
_RESERVED_INFOS = {"alive", "final_obs", "final_info"}
"""Infos that the host adds."""
_RESERVED_SETTINGS = {
    "autoreset_mode", "copy", "env", "isolated", "max_episode_steps", "name", "num_envs", "num_threads", "path",
    "render_mode", "seed", "self", "spec", "steps", "timeout",
}  # fmt: skip
"""Arguments of the functions that also accept settings as keyword arguments: ``make``, ``load``, ``NativeVectorEnv``,
``NativeEnv`` and ``memlane.testing.check_env``."""


class SpecError(MemlaneError, ValueError):
    """The spec of a native environment is invalid, or its library cannot be loaded."""


class CField(Structure):
    """``memlane_field`` of memlane/env.h."""

    _fields_ = (
        ("name", c_char_p),
        ("dtype", c_int32),
        ("kind", c_int32),
        ("num_dims", c_int32),
        ("shape", c_int32 * MAX_DIMS),
        ("low", c_double),
        ("high", c_double),
        ("lows", POINTER(c_double)),
        ("highs", POINTER(c_double)),
    )


class CSetting(Structure):
    """``memlane_setting`` of memlane/env.h."""

    _fields_ = (("name", c_char_p), ("value", c_double), ("low", c_double), ("high", c_double))


class CEnvs(Structure):
    """``memlane_envs`` of memlane/env.h."""

    _fields_ = (
        ("num_envs", c_int32),
        ("num_agents", c_int32),
        ("state", c_void_p),
        ("random", POINTER(c_uint64)),
        ("actions", POINTER(c_void_p)),
        ("observations", POINTER(c_void_p)),
        ("rewards", POINTER(c_double)),
        ("terminated", POINTER(c_uint8)),
        ("truncated", POINTER(c_uint8)),
        ("infos", POINTER(c_void_p)),
        ("alive", POINTER(c_uint8)),
        ("settings", POINTER(c_double)),
        ("steps", POINTER(c_int32)),
    )


InitFunction = CFUNCTYPE(c_char_p, POINTER(CEnvs), c_int32, c_int32)
RangeFunction = CFUNCTYPE(None, POINTER(CEnvs), c_int32, c_int32)
RenderFunction = CFUNCTYPE(None, POINTER(CEnvs), c_int32, POINTER(c_uint8))


class CSpec(Structure):
    """``memlane_spec`` of memlane/env.h."""

    _fields_ = (
        ("abi", c_uint32),
        ("spec_bytes", c_uint32),
        ("name", c_char_p),
        ("observations", POINTER(CField)),
        ("actions", POINTER(CField)),
        ("infos", POINTER(CField)),
        ("settings", POINTER(CSetting)),
        ("num_observations", c_int32),
        ("num_actions", c_int32),
        ("num_infos", c_int32),
        ("num_settings", c_int32),
        ("num_agents", c_int32),
        ("max_episode_steps", c_int32),
        ("state_bytes", c_uint64),
        ("reward_low", c_double),
        ("reward_high", c_double),
        ("render_width", c_int32),
        ("render_height", c_int32),
        ("steps_past_end", c_int32),
        ("init", InitFunction),
        ("reset", RangeFunction),
        ("step", RangeFunction),
        ("close", RangeFunction),
        ("render", RenderFunction),
    )


@dataclass(frozen=True)
class Field:
    """One array of an observation, an action or an info, as the spec declares it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    space: Box | Discrete[Any] | MultiDiscrete[Any]


@dataclass(frozen=True)
class Setting:
    """A number that users may set: its default value and its bounds."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spec:
    """Everything that a native environment declares, checked: names, spaces, settings and limits.

    A spec of a library or of a built-in environment can be pickled: another process opens the same source again."""

    name: str
    address: int
    """Address of the ``memlane_spec`` in this process."""
    observations: tuple[Field, ...]
    actions: tuple[Field, ...]
    infos: tuple[Field, ...]
    settings: tuple[Setting, ...]
    num_agents: int
    max_episode_steps: int
    state_bytes: int
    reward_range: tuple[float, float]
    render_size: tuple[int, int] | None
    """Width and height of a rendered image in pixels; None if the environment has no render function."""
    library: Any = field(default=None, repr=False, compare=False)
    """Object that keeps the memory at ``address`` alive."""
    source: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)
    """A function and its argument that create this spec again in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle ``source``: the address is valid in this process only."""
        if self.source is None:
            raise TypeError(
                f"the spec of {self.name} was created in this process and cannot be pickled; create it in the other "
                "process"
            )
        function, argument = self.source
        return function, (argument,)

    @property
    def observation_space(self) -> Space[Any]:
        """Observation space of one agent."""
        return _space(self.observations)

    @property
    def action_space(self) -> Space[Any]:
        """Action space of one agent."""
        return _space(self.actions)

    def resolve_settings(self, values: dict[str, Any], arguments: Sequence[str] = ()) -> list[float]:
        """Return the value of each setting, in the order of the spec: from ``values``, or its default.

        ``arguments``: names that an unknown setting may be a misspelling of, beside the settings."""
        known = {setting.name: setting for setting in self.settings}
        for name, value in values.items():
            if name not in known:
                raise TypeError(
                    f"{self.name} has no setting {name!r}{did_you_mean(name, [*known, *arguments])} "
                    f"(settings: {', '.join(known) or 'none'})"
                )
            low, high = known[name].low, known[name].high
            if not isinstance(value, int | float | np.number | np.bool_) or not low <= value <= high:
                raise ValueError(
                    f"{self.name}: setting {name!r} must be a number from {low} to {high}, found {value!r}"
                )
        return [float(values.get(setting.name, setting.value)) for setting in self.settings]


def read_spec(address: int, origin: str, library: Any = None, source: tuple[Any, ...] | None = None) -> Spec:
    """Read and check the ``memlane_spec`` at ``address``; errors name ``origin``.

    The first two numbers (version and size) are checked before anything else is read."""
    head = (c_uint32 * 2).from_address(address)
    abi, spec_bytes = head[0], head[1]
    if abi != _native.ENV_ABI:
        raise SpecError(
            f"{origin}: built for version {abi} of memlane/env.h, but this memlane runs version {_native.ENV_ABI}; "
            "build it again with `memlane build`"
        )
    if spec_bytes != ctypes.sizeof(CSpec):
        raise SpecError(
            f"{origin}: spec_bytes is {spec_bytes}, but memlane_spec of version {abi} has {ctypes.sizeof(CSpec)} "
            "bytes; write .spec_bytes = sizeof(memlane_spec)"
        )
    raw = CSpec.from_address(address)
    name = _text(raw.name, f"{origin}: the name")
    where = f"{origin} ({name})"
    for function in ("reset", "step"):
        if not getattr(raw, function):
            raise SpecError(f"{where}: the spec has no function {function!r}; set .{function} = ...")
    if raw.max_episode_steps < 0:
        raise SpecError(f"{where}: max_episode_steps must be 0 (no limit) or more, found {raw.max_episode_steps}")
    if raw.num_agents < 0:
        raise SpecError(f"{where}: num_agents must be 0 or more, found {raw.num_agents}")
    if not raw.reward_low <= raw.reward_high:
        raise SpecError(
            f"{where}: reward_low must not be above reward_high, found {raw.reward_low} and {raw.reward_high}"
        )
    if bool(raw.render) != (raw.render_width > 0 and raw.render_height > 0):
        raise SpecError(
            f"{where}: rendering needs a function render and a width and a height above 0, found render "
            f"{'set' if raw.render else 'missing'}, {raw.render_width} x {raw.render_height}"
        )
    observations = _fields(raw.observations, raw.num_observations, f"{where}: observation", minimum=1)
    actions = _fields(raw.actions, raw.num_actions, f"{where}: action", minimum=1)
    infos = _fields(raw.infos, raw.num_infos, f"{where}: info", minimum=0)
    for info in infos:
        if not info.name or info.name.startswith("_") or info.name in _RESERVED_INFOS:
            raise SpecError(
                f"{where}: every info needs a name that does not begin with '_' and is not one of "
                f"{sorted(_RESERVED_INFOS)}; found {info.name!r}"
            )
    return Spec(
        name,
        address,
        observations,
        actions,
        infos,
        _settings(raw, where),
        max(raw.num_agents, 1),
        raw.max_episode_steps,
        raw.state_bytes,
        (raw.reward_low, raw.reward_high),
        (raw.render_width, raw.render_height) if raw.render else None,
        library,
        source,
    )


def _fields(array: Any, count: int, where: str, minimum: int) -> tuple[Field, ...]:
    if not minimum <= count <= 1024:
        raise SpecError(f"{where}s: expected at least {minimum} and at most 1024 fields, found {count}")
    if count and not array:
        raise SpecError(f"{where}s: the count is {count}, but the pointer to the fields is NULL")
    fields = tuple(_field(array[i], f"{where} {i}") for i in range(count))
    names = [each.name for each in fields]
    if len(fields) > 1 and not all(names):
        raise SpecError(f"{where}s: with several fields each needs a name, found {names}")
    if len(set(names)) != len(names):
        raise SpecError(f"{where}s: names of fields must be unique, found {names}")
    return fields


def _field(raw: CField, where: str) -> Field:
    name = _text(raw.name, f"{where}: the name") if raw.name else ""
    where = f"{where} ({name})" if name else where
    if not 1 <= raw.dtype <= len(DTYPES):
        raise SpecError(f"{where}: unknown dtype {raw.dtype}; see enum memlane_dtype")
    dtype = np.dtype(DTYPES[raw.dtype - 1])
    if not 0 <= raw.num_dims <= MAX_DIMS:
        raise SpecError(f"{where}: num_dims must be 0 to {MAX_DIMS}, found {raw.num_dims}")
    shape = tuple(raw.shape[: raw.num_dims])
    if any(extent < 1 for extent in shape):
        raise SpecError(f"{where}: every dimension of the shape must be at least 1, found {shape}")
    low, high = _bounds(raw.low, raw.lows, shape), _bounds(raw.high, raw.highs, shape)
    if not (low <= high).all():
        raise SpecError(f"{where}: the lower bound {low} must not be above the upper bound {high}")
    if raw.kind == BOX:
        return Field(name, dtype, shape, Box(_cast(dtype, low, where), _cast(dtype, high, where), shape, dtype.type))
    if raw.kind != DISCRETE:
        raise SpecError(f"{where}: unknown kind {raw.kind}; see enum memlane_kind")
    if dtype != np.int64:
        raise SpecError(f"{where}: a discrete field must have the dtype int64, found {dtype}")
    for bound in (low, high):  # doubles represent integers exactly up to 2^53
        if not (np.abs(bound) <= 2**53).all() or (bound != np.trunc(bound)).any():
            raise SpecError(f"{where}: a discrete field needs bounds that are finite integers, found {low} to {high}")
    first, count = low.astype(np.int64), (high - low + 1).astype(np.int64)
    if shape:
        return Field(name, dtype, shape, MultiDiscrete(count, start=first))
    return Field(name, dtype, shape, Discrete(int(count), start=int(first)))


def _cast(dtype: np.dtype[Any], bounds: NDArray[np.float64], where: str) -> NDArray[Any]:
    """Bounds in the dtype of the field; infinite bounds become the limits of an integer dtype."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return bounds.astype(dtype)
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    finite = bounds[np.isfinite(bounds)]
    if (finite < lowest).any() or (finite > highest).any() or (finite != np.trunc(finite)).any():
        raise SpecError(f"{where}: bounds of {dtype} must be integers from {lowest} to {highest}, found {bounds}")
    # In Python integers: the largest int64 is not a double.
    exact = [int(bound) if np.isfinite(bound) else lowest if bound < 0 else highest for bound in bounds.ravel()]
    return np.array([min(max(bound, lowest), highest) for bound in exact], dtype).reshape(bounds.shape)


def _bounds(common: float, per_element: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    if not per_element:
        return np.full(shape, common)
    return np.array(per_element[: int(np.prod(shape))], np.float64).reshape(shape)


def _settings(raw: CSpec, where: str) -> tuple[Setting, ...]:
    if raw.num_settings < 0:
        raise SpecError(f"{where}: num_settings is {raw.num_settings}, expected 0 or more")
    if raw.num_settings and not raw.settings:
        raise SpecError(f"{where}: num_settings is {raw.num_settings}, but the pointer to the settings is NULL")
    settings: list[Setting] = []
    for i in range(raw.num_settings):
        member = raw.settings[i]
        name = _text(member.name, f"{where}: setting {i}, the name")
        setting = Setting(name, member.value, member.low, member.high)
        if not setting.low <= setting.value <= setting.high:
            raise SpecError(
                f"{where}: the value of setting {name!r} must be from {setting.low} to {setting.high}, found "
                f"{setting.value}"
            )
        if name in _RESERVED_SETTINGS:
            raise SpecError(
                f"{where}: setting {name!r} has the name of an argument of memlane, and could not be passed beside it; "
                f"rename it (reserved: {', '.join(sorted(_RESERVED_SETTINGS))})"
            )
        if name in {other.name for other in settings}:
            raise SpecError(f"{where}: two settings are called {name!r}; names must be unique")
        settings.append(setting)
    return tuple(settings)


def space_bounds(space: Box | Discrete[Any] | MultiDiscrete[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The smallest and the largest value of each element of a space, both included."""
    if isinstance(space, Box):
        return space.low, space.high
    count = space.n if isinstance(space, Discrete) else space.nvec
    return np.asarray(space.start), np.asarray(space.start + count - 1)


def _text(raw: bytes | None, what: str) -> str:
    if not raw:
        raise SpecError(f"{what} is missing")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{what} must be UTF-8, found {raw!r}") from None


def _space(fields: tuple[Field, ...]) -> Space[Any]:
    if len(fields) == 1 and not fields[0].name:
        return fields[0].space
    return Dict({each.name: each.space for each in fields})
