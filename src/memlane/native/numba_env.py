"""numba_env: a native environment written in Python, compiled by numba, run by the same host as those in C.

Each function handles one environment and is compiled to machine code: a step runs no Python and needs no GIL. Only this
module needs numba (``pip install memlane[numba]``), and imports it when an environment is declared.
"""

from __future__ import annotations

import ctypes
import dis
import inspect
import keyword
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from memlane import _native
from memlane.core.suggestions import did_you_mean
from memlane.native.spec import (
    BOX,
    DISCRETE,
    DTYPES,
    MAX_DIMS,
    CEnvs,
    CField,
    CSetting,
    CSpec,
    RangeFunction,
    RenderFunction,
    Spec,
    SpecError,
    read_spec,
    space_bounds,
)

__all__ = ["choice", "numba_env", "random_bits", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# ------------------------------------------------------------------------------------------------------- random numbers


def random_bits(random: NDArray[np.uint64]) -> int:
    """Draw 64 random bits, as ``memlane_random`` of memlane/env.h does. ``random``: the argument of your functions."""
    z = (int(random[0]) + _GOLDEN) & _MASK
    random[0] = z
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


def uniform(random: NDArray[np.uint64], low: float, high: float) -> float:
    """Draw a float from ``[low, high)``, as ``memlane_uniform`` does."""
    return low + (high - low) * ((random_bits(random) >> 11) * 2.0**-53)


def choice(random: NDArray[np.uint64], count: int) -> int:
    """Draw an integer from 0 to ``count - 1``, as ``memlane_choice`` does."""
    return (random_bits(random) >> 32) * count >> 32


@cache
def _numba() -> tuple[Any, Any]:
    """Import numba and register the functions of this module with it. Returns numba, and an intrinsic that makes an
    address a pointer."""
    try:
        import numba
        from numba import extending, types
        from numba.core import cgutils, errors
    except ImportError as error:
        raise ImportError(
            f"numba_env needs numba, which cannot be imported ({error}); install it: pip install memlane[numba]"
        ) from None

    golden, first, second = np.uint64(_GOLDEN), np.uint64(_FIRST), np.uint64(_SECOND)
    n30, n27, n31, n11, n32 = (np.uint64(shift) for shift in (30, 27, 31, 11, 32))

    # All constants are uint64: in numba, uint64 combined with int64 is a float.
    @extending.overload(random_bits)
    def _(random: Any) -> Any:  # noqa: ARG001
        def bits(random: Any) -> Any:
            word = np.uint64(random[0] + golden)
            random[0] = word
            z = np.uint64((word ^ (word >> n30)) * first)
            z = np.uint64((z ^ (z >> n27)) * second)
            return z ^ (z >> n31)

        return bits

    @extending.overload(uniform)
    def _(random: Any, low: Any, high: Any) -> Any:  # noqa: ARG001
        def draw(random: Any, low: Any, high: Any) -> Any:
            return low + (high - low) * (np.float64(random_bits(random) >> n11) * 2.0**-53)

        return draw

    @extending.overload(choice)
    def _(random: Any, count: Any) -> Any:  # noqa: ARG001
        def draw(random: Any, count: Any) -> Any:
            return np.int64(((random_bits(random) >> n32) * np.uint64(count)) >> n32)

        return draw

    @extending.overload(_store)
    def _(result: Any, rewards: Any, terminated: Any, truncated: Any, i: Any) -> Any:  # noqa: ARG001
        if isinstance(result, types.BaseTuple) and len(result) == 2:

            def two(result: Any, rewards: Any, terminated: Any, truncated: Any, i: Any) -> None:  # noqa: ARG001
                rewards[i] = result[0]
                terminated[i] = bool(result[1])

            return two
        if isinstance(result, types.BaseTuple) and len(result) == 3:

            def three(result: Any, rewards: Any, terminated: Any, truncated: Any, i: Any) -> None:
                rewards[i] = result[0]
                terminated[i] = bool(result[1])
                truncated[i] = bool(result[2])

            return three
        raise errors.TypingError(
            f"it must return `reward, terminated` or `reward, terminated, truncated`, but returns {result}"
        )

    @extending.intrinsic
    def at(_: Any, address: Any) -> Any:
        def code(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), code

    return numba, at


def _store(result: Any, rewards: Any, terminated: Any, truncated: Any, i: int) -> None:
    """Store the result of ``step``. Exists only compiled: see the overload in ``_numba``."""
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------- declarations


@dataclass
class _Library:
    """Keeps alive what a spec points to."""

    spec: CSpec
    arrays: list[Any]
    functions: dict[str, Any]


@dataclass(frozen=True)
class _Fields:
    """The fields of the observation, the action or the infos. ``names`` is empty for a single field without a name."""

    part: str
    names: tuple[str, ...]
    spaces: tuple[Any, ...]

    @classmethod
    def of(cls, part: str, space: Any, where: str) -> _Fields:
        if not isinstance(space, Dict | Mapping):
            _check_space(space, f"{where}: {part}")
            return cls(part, (), (space,))
        spaces = dict(space.items())
        for name, member in spaces.items():
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
                raise SpecError(
                    f"{where}: the name of {part} {name!r} must be a Python identifier that does not begin with _: "
                    f"functions read it as {part}.name"
                )
            _check_space(member, f"{where}: {part} {name!r}")
        if not spaces and part != "info":
            raise SpecError(f"{where}: {part} has no fields")
        return cls(part, tuple(spaces), tuple(spaces.values()))


def _check_space(space: Any, where: str) -> None:
    if not isinstance(space, Box | Discrete | MultiDiscrete):
        raise SpecError(f"{where} must be a Box, a Discrete, a MultiDiscrete or a Dict of these, found {space!r}")
    if len(space.shape or ()) > MAX_DIMS:
        raise SpecError(f"{where} can have at most {MAX_DIMS} dimensions, found the shape {space.shape}")
    if isinstance(space, Box) and str(space.dtype) not in DTYPES:
        raise SpecError(f"{where} must have one of the dtypes {', '.join(DTYPES)}; found {space.dtype}")
    if not isinstance(space, Box) and space.dtype != np.int64:
        raise SpecError(f"{where} is discrete and must have the dtype int64, found {space.dtype}")


def _c_fields(fields: _Fields, arrays: list[Any]) -> Any:
    """The fields as an array of C structs; everything that it points to is appended to ``arrays``."""
    array = (CField * max(len(fields.spaces), 1))()
    for i, space in enumerate(fields.spaces):
        member = array[i]
        member.name = fields.names[i].encode() if fields.names else None
        member.dtype = DTYPES.index(str(space.dtype)) + 1
        member.kind = BOX if isinstance(space, Box) else DISCRETE
        shape = space.shape or ()
        member.num_dims = len(shape)
        member.shape[: len(shape)] = shape
        # As arrays of doubles that own their memory: the C struct points to it.
        low, high = (np.array(bound, np.float64, ndmin=1) for bound in space_bounds(space))
        member.low, member.high = float(low.min()), float(high.max())
        if len(np.unique(low)) > 1 or len(np.unique(high)) > 1:
            member.lows, member.highs = (bound.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for bound in (low, high))
            arrays += [low, high]
    arrays.append(array)
    return array


def _state_dtype(state: Any, where: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(state)
    except TypeError as error:
        raise SpecError(f"{where}: state must be a numpy dtype with named fields: {error}") from None
    if not dtype.names or dtype.hasobject:
        raise SpecError(f"{where}: state must be a numpy dtype with named fields of numbers, found {dtype}")
    assert dtype.fields is not None
    # Each number at its natural alignment.
    return np.dtype([(name, dtype.fields[name][0]) for name in dtype.names], align=True)


def _settings(declared: Mapping[str, Any], where: str) -> dict[str, tuple[float, float, float]]:
    settings = {}
    for name, value in declared.items():
        numbers = tuple(value) if isinstance(value, Sequence) else (value, -np.inf, np.inf)
        if not name.isidentifier() or len(numbers) != 3 or not all(np.isreal(number) for number in numbers):
            raise SpecError(f"{where}: setting {name!r} must be a number or (value, low, high), found {value!r}")
        settings[name] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
    return settings


# ------------------------------------------------------------------------------------------------------- the functions

_ARGUMENTS = {
    "reset": ("state", "observation", "random", "info", "settings"),
    "step": ("state", "action", "observation", "random", "info", "settings", "steps"),
    "render": ("state", "image", "settings"),
}
"""The functions of an environment, and the arguments that each may have."""


def numba_env(
    *,
    name: str,
    observation_space: Space[Any],
    action_space: Space[Any],
    state: Any,
    max_episode_steps: int = 0,
    reward_range: tuple[float, float] = (-np.inf, np.inf),
    infos: Mapping[str, Space[Any]] | None = None,
    settings: Mapping[str, float | tuple[float, float, float]] | None = None,
    render_size: tuple[int, int] | None = None,
    steps_past_end: bool = False,
) -> Callable[[type], Spec]:
    """Decorate a class with the functions ``reset`` and ``step``; it becomes a ``Spec``.

    ``NativeVectorEnv``, ``NativeEnv`` and ``check_env`` accept the spec::

        @numba_env(name="Walk-v0", observation_space=Box(-9, 9, (1,)), action_space=Discrete(2), state=[("x", "f8")])
        class Walk:
            def reset(state, observation, random):
                state.x = uniform(random, -1.0, 1.0)
                observation[0] = state.x

            def step(state, action, observation):
                state.x += 0.1 if action == 1 else -0.1
                observation[0] = state.x
                return 1.0, abs(state.x) > 2

        envs = NativeVectorEnv(Walk, num_envs=1024)

    A function receives the arguments that it names:

    - ``state``: a record with the fields of the dtype ``state``, zeros before the first reset.
    - ``observation``: an array to write; for a Dict, ``observation.name`` is the array of each member. A scalar is an
      array of one element: ``observation[0]``.
    - ``action``: a number for Discrete, otherwise an array.
    - ``random``: RNG state for ``uniform``, ``choice`` and ``random_bits`` of this module; use no other generator.
    - ``info``: like a Dict observation, with the members of ``infos``.
    - ``settings``: a record with the value of each setting.
    - ``steps``: the number of steps in the episode so far.
    - ``image`` (``render`` only): an array of shape (height, width, 3) to write.

    ``settings={"gravity": 9.8}``, or with bounds ``{"gravity": (9.8, 0, 100)}``. ``step`` returns ``reward,
    terminated`` or ``reward, terminated, truncated``. The functions are compiled immediately. Functions that they call
    must be compiled too (``numba.njit``), and none may raise: no Python code runs that could catch it.
    """

    def make(functions: type) -> Spec:
        numba, at = _numba()
        where = f"numba_env {name!r}"
        observation = _Fields.of("observation", observation_space, where)
        action = _Fields.of("action", action_space, where)
        info = _Fields.of("info", infos or {}, where)
        values = _settings(settings or {}, where)
        compiler = _Compiler(
            numba, at, where, _state_dtype(state, where), observation, action, info, tuple(values), render_size
        )
        compiled = {}
        for function in _ARGUMENTS:
            if (python := vars(functions).get(function)) is not None:
                compiled[function] = compiler.compile(function, python)
            elif function != "render":
                raise SpecError(f"{where}: the class {functions.__name__} has no function {function!r}; define it")
        for key, value in vars(functions).items():
            if isinstance(value, FunctionType) and key not in _ARGUMENTS:
                raise SpecError(
                    f"{where}: unknown function {key!r}{did_you_mean(key, _ARGUMENTS)} (functions: "
                    f"{', '.join(_ARGUMENTS)})"
                )

        spec, arrays = CSpec(), list[Any]()
        spec.abi, spec.spec_bytes, spec.name = _native.ENV_ABI, ctypes.sizeof(CSpec), name.encode()
        for part, fields in (("observations", observation), ("actions", action), ("infos", info)):
            setattr(spec, part, _c_fields(fields, arrays))
            setattr(spec, f"num_{part}", len(fields.spaces))
        c_settings = [CSetting(key.encode(), *numbers) for key, numbers in values.items()]
        spec.settings = (CSetting * max(len(c_settings), 1))(*c_settings)
        spec.num_settings = len(c_settings)
        spec.max_episode_steps = max_episode_steps
        spec.state_bytes = compiler.state.itemsize
        spec.reward_low, spec.reward_high = reward_range
        spec.steps_past_end = steps_past_end
        if render_size is not None:
            spec.render_width, spec.render_height = render_size
        for function, pointer in compiled.items():
            kind = RenderFunction if function == "render" else RangeFunction
            setattr(spec, function, kind(pointer.address))
        return read_spec(ctypes.addressof(spec), where, _Library(spec, arrays, compiled))

    return make


@dataclass
class _Compiler:
    """Writes a loop over environments around each function, and compiles both."""

    numba: Any
    at: Any
    where: str
    state: np.dtype[Any]
    observation: _Fields
    action: _Fields
    info: _Fields
    settings: tuple[str, ...]
    render_size: tuple[int, int] | None

    def compile(self, function: str, python: Any) -> Any:
        python = python.__func__ if isinstance(python, staticmethod) else python
        arguments = self._arguments(function, python)
        numba = self.numba
        names: dict[str, Any] = {
            "np": np,
            "carray": numba.carray,
            "at": self.at,
            "store": _store,
            "user": numba.njit(error_model="numpy")(python),
            "state_dtype": self.state,
            "settings_dtype": np.dtype([(name, np.float64) for name in self.settings]),
        }
        exec("\n".join(self._source(function, arguments, names)), names)
        types = numba.types
        last = types.CPointer(types.uint8) if function == "render" else types.int32
        signature = types.void(types.CPointer(types.uint64), types.int32, last)
        try:
            return numba.cfunc(signature, nopython=True, error_model="numpy")(names["loop"])
        except Exception as error:  # numba's own errors, and a KeyError for an unknown field of a record
            raise SpecError(f"{self.where}: function {function!r} does not compile: {_summary(error)}") from error

    def _arguments(self, function: str, python: Any) -> list[str]:
        """The names of the arguments of a function, checked."""
        if not isinstance(python, FunctionType):
            raise SpecError(f"{self.where}: {function!r} must be a plain function, found {type(python).__name__}")
        names, known = list(inspect.signature(python).parameters), _ARGUMENTS[function]
        hint = "; leave out self: it is a plain function of one environment" if names[:1] == ["self"] else ""
        for name in names:
            if name not in known:
                raise SpecError(
                    f"{self.where}: function {function!r} has an unknown argument {name!r}"
                    f"{hint or did_you_mean(name, known)} (arguments: {', '.join(known)})"
                )
        for name, declared in (("info", self.info.names), ("settings", self.settings)):
            if name in names and not declared:
                option = "infos" if name == "info" else name
                raise SpecError(
                    f"{self.where}: function {function!r} has the argument {name!r}, but none are declared: pass "
                    f"{option}={{...}} to numba_env"
                )
        if any(instruction.opname == "RAISE_VARARGS" for instruction in dis.get_instructions(python)):
            raise SpecError(
                f"{self.where}: function {function!r} raises or asserts, but no Python code runs that could catch it; "
                "end the episode instead"
            )
        return names

    def _source(self, function: str, arguments: list[str], names: dict[str, Any]) -> list[str]:
        """The loop as lines of Python. It reads ``memlane_envs`` as a table of 8-byte words."""
        head = [
            f"table = carray(envs, {ctypes.sizeof(CEnvs) // 8})",
            # The lower half of the first word is num_envs, the upper half num_agents.
            "n = np.int64(table[0] & np.uint64(0xFFFFFFFF))",
            f"states = carray(at({_word('state')}), n, state_dtype)",
        ]
        values = {"state": "states[i]", "random": "randoms[i : i + 1]", "steps": "counts[i]", "settings": "numbers[0]"}
        if "random" in arguments:
            head.append(f"randoms = carray(at({_word('random')}), n, np.uint64)")
        if "steps" in arguments:
            head.append(f"counts = carray(at({_word('steps')}), n, np.int32)")
        if "settings" in arguments:
            head.append(f"numbers = carray(at({_word('settings')}), 1, settings_dtype)")
        for fields in (self.action, self.observation, self.info):
            if fields.part in arguments:
                head += self._arrays(fields, names)
                values[fields.part] = self._row(fields, names)
        if function == "render":
            width, height = self.render_size or (0, 0)
            values["image"] = f"carray(rgb, ({height}, {width}, 3))"
            call = f"user({', '.join(values[name] for name in arguments)})"
            return ["def loop(envs, i, rgb):", *(f"    {line}" for line in [*head, call])]
        call = f"user({', '.join(values[name] for name in arguments)})"
        if function == "step":
            outputs = (("rewards", "float64"), ("terminated", "uint8"), ("truncated", "uint8"))
            head += [f"{name} = carray(at({_word(name)}), n, np.{dtype})" for name, dtype in outputs]
            call = f"store({call}, rewards, terminated, truncated, i)"
        return ["def loop(envs, begin, end):", *(f"    {line}" for line in [*head, "for i in range(begin, end):"])] + [
            f"        {call}"
        ]

    def _arrays(self, fields: _Fields, names: dict[str, Any]) -> list[str]:
        part = fields.part
        lines = [f"{part}_table = carray(at({_word(f'{part}s')}), {len(fields.spaces)}, np.uint64)"]
        for i, space in enumerate(fields.spaces):
            names[f"{part}_{i}_dtype"] = space.dtype
            shape = ", ".join(["n", *(str(extent) for extent in space.shape or ())])
            lines.append(f"{part}_{i} = carray(at({part}_table[{i}]), ({shape},), {part}_{i}_dtype)")
        return lines

    def _row(self, fields: _Fields, names: dict[str, Any]) -> str:
        """The expression for the row of environment i. A scalar to be written is an array of one element."""
        rows = [
            f"{fields.part}_{i}[{'i : i + 1' if not space.shape and fields is not self.action else 'i'}]"
            for i, space in enumerate(fields.spaces)
        ]
        if not fields.names:
            return rows[0]
        names[f"{fields.part}_tuple"] = namedtuple(f"{fields.part}_tuple", fields.names)
        return f"{fields.part}_tuple({', '.join(rows)})"


def _word(name: str) -> str:
    """The expression for a pointer of memlane_envs."""
    return f"table[{getattr(CEnvs, name).offset // 8}]"


def _summary(error: BaseException) -> str:
    """The sentence of numba's long message that says what is wrong, and the line it refers to."""
    if isinstance(error, KeyError):
        return f"the record has no field {error}"
    lines = [line.strip() for line in str(error).splitlines()]
    noise = ("Failed in", "During:", "File ", "raised from", "- Resolution", "There are", "Overload", "Rejected")
    relevant = [line for line in lines if line and not line.startswith(noise) and not set(line) <= set("-^=~ <>")]
    location = next((line for line in lines if line.startswith("File ") and "<string>" not in line), "")
    ours = [line.partition("TypingError: ")[2] for line in relevant if "it must return" in line]
    if ours:
        reason = ours[0]
    else:  # a line that ends with a colon continues in the next one
        reason = " ".join(relevant[: 2 if relevant[0].endswith(":") else 1]) if relevant else str(error)
    return f"{reason} ({location.rstrip(':')})" if location else reason
