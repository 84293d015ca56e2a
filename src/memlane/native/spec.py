"""Spec: what a native environment declares, read from the C structs of ``memlane/env.h`` and checked.

The structs below mirror the header field by field; ``tests/native/test_spec.py`` compares sizes and places with what
the C compiler made of it.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from memlane import _native
from memlane.core import MemlaneError

BOX, DISCRETE = range(2)
DTYPES = ["float32", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
"""``DTYPES[number - 1]`` is the type with that number in the header."""
MAX_DIMS = 4
_HOST_INFOS = {"alive", "final_obs", "final_info"}
_ARGUMENTS = {
    "autoreset_mode", "copy", "max_episode_steps", "name", "num_envs", "num_threads", "path", "render_mode", "spec",
}  # fmt: skip
"""Of the functions that settings are given to."""


class SpecError(MemlaneError, ValueError):
    """A library declares an environment that cannot be run."""


class CField(Structure):
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
    _fields_ = (("name", c_char_p), ("value", c_double), ("low", c_double), ("high", c_double))


class CEnvs(Structure):
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
class FieldOf:
    """One array of an observation, an action or an info."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    space: Space[Any]


@dataclass(frozen=True)
class Setting:
    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spec:
    """A native environment, ready to be run. ``address`` is where its C spec lies; ``library`` keeps that in memory."""

    name: str
    address: int
    observations: tuple[FieldOf, ...]
    actions: tuple[FieldOf, ...]
    infos: tuple[FieldOf, ...]
    settings: tuple[Setting, ...]
    num_agents: int
    max_episode_steps: int
    state_bytes: int
    reward_range: tuple[float, float]
    render_size: tuple[int, int] | None
    """Width and height of its picture, if it has one."""
    library: Any = field(default=None, repr=False, compare=False)
    source: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)
    """A function and its argument, with which another process finds it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Not as it is: addresses mean nothing elsewhere."""
        if self.source is None:
            raise TypeError(f"{self.name} was made in this process and cannot be sent to another; make it there")
        function, argument = self.source
        return function, (argument,)

    @property
    def observation_space(self) -> Space[Any]:
        """Of one agent."""
        return _space(self.observations)

    @property
    def action_space(self) -> Space[Any]:
        """Of one agent."""
        return _space(self.actions)

    def settings_from(self, given: dict[str, Any]) -> list[float]:
        """A number for each setting: the one that is given, or its own."""
        known = {setting.name: setting for setting in self.settings}
        for name, value in given.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise TypeError(f"{self.name} has no setting {name!r}; it has: {names}")
            low, high = known[name].low, known[name].high
            if not isinstance(value, int | float | np.number | np.bool_) or not low <= value <= high:
                raise ValueError(
                    f"{self.name}: setting {name!r} must be a number from {low} to {high}, found {value!r}"
                )
        return [float(given.get(setting.name, setting.value)) for setting in self.settings]


def read_spec(address: int, origin: str, library: Any = None, source: tuple[Any, ...] | None = None) -> Spec:
    """The spec at an address, checked; ``origin`` is named in errors. Only the first two numbers are read before it is
    sure that the rest is there."""
    head = (c_uint32 * 2).from_address(address)
    abi, spec_bytes = head[0], head[1]
    if abi != _native.ENV_ABI:
        raise SpecError(
            f"{origin}: it was built for version {abi} of memlane/env.h, and this memlane runs version "
            f"{_native.ENV_ABI}; build it again: memlane build"
        )
    if spec_bytes != ctypes.sizeof(CSpec):
        raise SpecError(
            f"{origin}: spec_bytes is {spec_bytes}, but a spec of version {abi} has {ctypes.sizeof(CSpec)} bytes; "
            "write .spec_bytes = sizeof(memlane_spec)"
        )
    raw = CSpec.from_address(address)
    name = _text(raw.name, f"{origin}: the name")
    where = f"{origin} ({name})"
    for function in ("reset", "step"):
        if not getattr(raw, function):
            raise SpecError(f"{where}: it has no function {function!r}")
    if raw.max_episode_steps < 0:
        raise SpecError(f"{where}: max_episode_steps must be 0 (no limit) or more, found {raw.max_episode_steps}")
    if raw.num_agents < 0:
        raise SpecError(f"{where}: num_agents must be 0 or more, found {raw.num_agents}")
    if not raw.reward_low <= raw.reward_high:
        raise SpecError(f"{where}: rewards from {raw.reward_low} to {raw.reward_high} cannot be")
    if bool(raw.render) != (raw.render_width > 0 and raw.render_height > 0):
        raise SpecError(
            f"{where}: a picture needs a function render and a width and a height above 0, found render "
            f"{'given' if raw.render else 'missing'}, {raw.render_width} x {raw.render_height}"
        )
    observations = _fields(raw.observations, raw.num_observations, f"{where}: observation", least=1)
    actions = _fields(raw.actions, raw.num_actions, f"{where}: action", least=1)
    infos = _fields(raw.infos, raw.num_infos, f"{where}: info", least=0)
    for info in infos:
        if not info.name or info.name.startswith("_") or info.name in _HOST_INFOS:
            raise SpecError(
                f"{where}: every info needs a name, which does not begin with '_' and is none of "
                f"{sorted(_HOST_INFOS)}; found {info.name!r}"
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


def _fields(array: Any, count: int, where: str, least: int) -> tuple[FieldOf, ...]:
    if not least <= count <= 1024:
        raise SpecError(f"{where}s: there must be at least {least} field(s), found {count}")
    if count and not array:
        raise SpecError(f"{where}s: there are {count}, but the pointer to them is NULL")
    fields = tuple(_field(array[i], f"{where} {i}") for i in range(count))
    names = [one.name for one in fields]
    if len(fields) > 1 and not all(names):
        raise SpecError(f"{where}s: with several fields each needs a name, found {names}")
    if len(set(names)) != len(names):
        raise SpecError(f"{where}s: every field needs a name of its own, found {names}")
    return fields


def _field(raw: CField, where: str) -> FieldOf:
    name = _text(raw.name, f"{where}: the name") if raw.name else ""
    where = f"{where} ({name})" if name else where
    if not 1 <= raw.dtype <= len(DTYPES):
        raise SpecError(f"{where}: there is no dtype {raw.dtype}; see enum memlane_dtype")
    dtype = np.dtype(DTYPES[raw.dtype - 1])
    if not 0 <= raw.num_dims <= MAX_DIMS:
        raise SpecError(f"{where}: num_dims must be 0 to {MAX_DIMS}, found {raw.num_dims}")
    shape = tuple(raw.shape[: raw.num_dims])
    if any(extent < 1 for extent in shape):
        raise SpecError(f"{where}: every extent of the shape must be at least 1, found {shape}")
    low, high = _bounds(raw.low, raw.lows, shape), _bounds(raw.high, raw.highs, shape)
    if not (low <= high).all():
        raise SpecError(f"{where}: the lower bound {low} is not below the upper bound {high}")
    if raw.kind == BOX:
        return FieldOf(name, dtype, shape, Box(_in(dtype, low, where), _in(dtype, high, where), shape, dtype.type))
    if raw.kind != DISCRETE:
        raise SpecError(f"{where}: there is no kind {raw.kind}; see enum memlane_kind")
    if dtype != np.int64:
        raise SpecError(f"{where}: a discrete field must be of type int64, found {dtype}")
    for bound in (low, high):  # doubles count up to 2^53
        if not (np.abs(bound) <= 2**53).all() or (bound != np.trunc(bound)).any():
            raise SpecError(f"{where}: a discrete field needs bounds that are whole numbers, found {low} to {high}")
    first, count = low.astype(np.int64), (high - low + 1).astype(np.int64)
    space: Space[Any] = MultiDiscrete(count, start=first) if shape else Discrete(int(count), start=int(first))
    return FieldOf(name, dtype, shape, space)


def _in(dtype: np.dtype[Any], bounds: NDArray[np.float64], where: str) -> NDArray[Any]:
    """Bounds in the field's own type; no bound is the type's own."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return bounds.astype(dtype)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    finite = np.isfinite(bounds)
    if (
        (bounds[finite] < least).any()
        or (bounds[finite] > most).any()
        or (bounds[finite] != np.trunc(bounds[finite])).any()
    ):
        raise SpecError(f"{where}: bounds of {dtype} must be whole numbers from {least} to {most}, found {bounds}")
    # As Python's numbers: the largest int64 is no double.
    exact = [int(one) if np.isfinite(one) else least if one < 0 else most for one in bounds.ravel()]
    return np.array([min(max(one, least), most) for one in exact], dtype).reshape(bounds.shape)


def _bounds(all_of_them: float, each: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    if not each:
        return np.full(shape, all_of_them)
    return np.array(each[: int(np.prod(shape))], np.float64).reshape(shape)


def _settings(raw: CSpec, where: str) -> tuple[Setting, ...]:
    if raw.num_settings < 0 or (raw.num_settings and not raw.settings):
        raise SpecError(f"{where}: num_settings is {raw.num_settings}, but there are none")
    found: list[Setting] = []
    for i in range(raw.num_settings):
        one = raw.settings[i]
        setting = Setting(_text(one.name, f"{where}: setting {i}, the name"), one.value, one.low, one.high)
        if not setting.low <= setting.value <= setting.high:
            raise SpecError(f"{where}: setting {setting.name!r} is {setting.value}, not from {one.low} to {one.high}")
        if setting.name in _ARGUMENTS or setting.name in {other.name for other in found}:
            raise SpecError(
                f"{where}: setting {setting.name!r} needs a name of its own; taken are also {sorted(_ARGUMENTS)}"
            )
        found.append(setting)
    return tuple(found)


def _text(raw: bytes | None, what: str) -> str:
    if not raw:
        raise SpecError(f"{what} is missing")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{what} must be UTF-8, found {raw!r}") from None


def _space(fields: tuple[FieldOf, ...]) -> Space[Any]:
    if len(fields) == 1 and not fields[0].name:
        return fields[0].space
    return Dict({one.name: one.space for one in fields})
