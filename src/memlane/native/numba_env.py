"""numba_env: a native environment written in Python, compiled by numba, run by the same host as those in C.

The functions see one environment at a time and are compiled to machine code: no Python runs in a step, no GIL is
held. numba is asked for only here (``pip install memlane[numba]``), when an environment is made.
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
)

__all__ = ["choice", "numba_env", "random_bits", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# ------------------------------------------------------------------------------------------------------- random numbers


def random_bits(random: NDArray[np.uint64]) -> int:
    """64 random bits, as ``memlane_random`` of memlane/env.h draws them. ``random``: what your functions are given."""
    z = (int(random[0]) + _GOLDEN) & _MASK
    random[0] = z
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


def uniform(random: NDArray[np.uint64], low: float, high: float) -> float:
    """At least ``low``, less than ``high``: ``memlane_uniform``."""
    return low + (high - low) * ((random_bits(random) >> 11) * 2.0**-53)


def choice(random: NDArray[np.uint64], count: int) -> int:
    """A whole number from 0 up to ``count - 1``: ``memlane_choice``."""
    return (random_bits(random) >> 32) * count >> 32


@cache
def _numba() -> tuple[Any, Any]:
    """numba, which then knows the functions of this module; and a function that makes a pointer of an address."""
    try:
        import numba
        from numba import extending, types
        from numba.core import cgutils, errors
    except ImportError as error:
        raise ImportError(
            f"numba_env needs numba, which cannot be imported ({error}): pip install memlane[numba]"
        ) from None

    golden, first, second = np.uint64(_GOLDEN), np.uint64(_FIRST), np.uint64(_SECOND)
    n30, n27, n31, n11, n32 = (np.uint64(shift) for shift in (30, 27, 31, 11, 32))

    # All constants are uint64: numba makes a float of uint64 and int64 together.
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
            f"it must return `reward, terminated` or `reward, terminated, truncated`, and returns {result}"
        )

    @extending.intrinsic
    def at(_: Any, address: Any) -> Any:
        def code(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), code

    return numba, at


def _store(result: Any, rewards: Any, terminated: Any, truncated: Any, i: int) -> None:
    """Only compiled."""
    raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- what is declared


@dataclass
class _Library:
    """Keeps in memory what a spec points to."""

    spec: CSpec
    parts: list[Any]
    functions: dict[str, Any]


@dataclass(frozen=True)
class _Fields:
    """Of observations, actions or infos. ``names`` is empty when there is one, without a name."""

    part: str
    names: tuple[str, ...]
    spaces: tuple[Space[Any], ...]

    @classmethod
    def of(cls, part: str, space: Any, where: str) -> _Fields:
        if not isinstance(space, Dict | Mapping):
            return cls(part, (), (_declared(space, f"{where}: {part}"),))
        spaces = dict(space.items())
        for name, one in spaces.items():
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
                raise SpecError(
                    f"{where}: {part} {name!r} must have a name that can be written as {part}.name, without _ in front"
                )
            _declared(one, f"{where}: {part} {name!r}")
        if not spaces and part != "info":
            raise SpecError(f"{where}: {part} has no fields")
        return cls(part, tuple(spaces), tuple(spaces.values()))


def _declared(space: Any, where: str) -> Space[Any]:
    if not isinstance(space, Box | Discrete | MultiDiscrete):
        raise SpecError(
            f"{where} is {space!r}, which cannot be declared; it must be a Box, a Discrete, a MultiDiscrete or a Dict "
            "of these"
        )
    if len(space.shape or ()) > MAX_DIMS:
        raise SpecError(f"{where} has the shape {space.shape}; there can be {MAX_DIMS} dimensions")
    if isinstance(space, Box) and str(space.dtype) not in DTYPES:
        raise SpecError(f"{where} is of type {space.dtype}; there are: {', '.join(DTYPES)}")
    if not isinstance(space, Box) and space.dtype != np.int64:
        raise SpecError(f"{where} is of type {space.dtype}; whole numbers to choose from are int64")
    return space


def _c_fields(fields: _Fields, parts: list[Any]) -> Any:
    array = (CField * max(len(fields.spaces), 1))()
    for i, space in enumerate(fields.spaces):
        one = array[i]
        one.name = fields.names[i].encode() if fields.names else None
        one.dtype = DTYPES.index(str(space.dtype)) + 1
        one.kind = BOX if isinstance(space, Box) else DISCRETE
        shape = space.shape or ()
        one.num_dims = len(shape)
        one.shape[: len(shape)] = shape
        low, high = _bounds(space)
        one.low, one.high = float(low.min()), float(high.max())
        if len(np.unique(low)) > 1 or len(np.unique(high)) > 1:
            one.lows, one.highs = (bound.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for bound in (low, high))
            parts += [low, high]
    parts.append(array)
    return array


def _bounds(space: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if isinstance(space, Box):
        low, high = space.low, space.high
    else:
        count = space.n if isinstance(space, Discrete) else space.nvec
        low, high = space.start, space.start + count - 1
    return tuple(np.array(bound, np.float64, ndmin=1) for bound in (low, high))  # type: ignore[return-value]


def _state_dtype(state: Any, where: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(state)
    except TypeError as error:
        raise SpecError(f"{where}: state must be a numpy dtype with named fields: {error}") from None
    if not dtype.names or dtype.hasobject:
        raise SpecError(f"{where}: state must be a numpy dtype with named fields of numbers, found {dtype}")
    assert dtype.fields is not None
    # Every number where the processor likes it.
    return np.dtype([(name, dtype.fields[name][0]) for name in dtype.names], align=True)


def _settings(given: Mapping[str, Any], where: str) -> dict[str, tuple[float, float, float]]:
    settings = {}
    for name, value in given.items():
        numbers = tuple(value) if isinstance(value, Sequence) else (value, -np.inf, np.inf)
        if not name.isidentifier() or len(numbers) != 3 or not all(np.isreal(number) for number in numbers):
            raise SpecError(f"{where}: setting {name!r} must be a number or (number, low, high), found {value!r}")
        settings[name] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
    return settings


# ------------------------------------------------------------------------------------------------------- the functions

_GIVEN = {
    "reset": ("state", "observation", "random", "info", "settings"),
    "step": ("state", "action", "observation", "random", "info", "settings", "steps"),
    "render": ("state", "picture", "settings"),
}


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
    """A class with the functions ``reset`` and ``step`` becomes a ``Spec``, for ``NativeVectorEnv`` and ``check_env``.

    ::

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

    A function takes what it needs, by name. ``state``: a record with the fields of the dtype, all 0 in the beginning.
    ``observation``: an array to be written; for a Dict, ``observation.name`` for each. A number alone is an array of
    one element: ``observation[0]``. ``action``: a number for Discrete, otherwise an array. ``random``: for ``uniform``,
    ``choice`` and ``random_bits`` of this module; draw from nothing else. ``info``: as a Dict observation.
    ``settings``: a record of numbers. ``steps``: how many the episode has had. ``picture`` (for ``render``): height,
    width, 3.

    ``settings={"gravity": 9.8}``, or with bounds, ``{"gravity": (9.8, 0, 100)}``. The functions are compiled at once;
    what they call must be compiled too (``numba.njit``), and none may raise: nobody is there to catch it.
    """

    def make(functions: type) -> Spec:
        numba, at = _numba()
        where = f"numba_env {name!r}"
        observation = _Fields.of("observation", observation_space, where)
        action = _Fields.of("action", action_space, where)
        info = _Fields.of("info", infos or {}, where)
        numbers = _settings(settings or {}, where)
        maker = _Maker(
            numba, at, where, _state_dtype(state, where), observation, action, info, tuple(numbers), render_size
        )
        compiled = {}
        for function in _GIVEN:
            if (found := vars(functions).get(function)) is not None:
                compiled[function] = maker.compiled(function, found)
            elif function != "render":
                raise SpecError(f"{where}: the class {functions.__name__} has no function {function!r}")
        unknown = [
            key for key, value in vars(functions).items() if isinstance(value, FunctionType) and key not in _GIVEN
        ]
        if unknown:
            raise SpecError(f"{where}: there is no use for {', '.join(unknown)}; there are: {', '.join(_GIVEN)}")

        spec, parts = CSpec(), list[Any]()
        spec.abi, spec.spec_bytes, spec.name = _native.ENV_ABI, ctypes.sizeof(CSpec), name.encode()
        for part, fields in (("observations", observation), ("actions", action), ("infos", info)):
            setattr(spec, part, _c_fields(fields, parts))
            setattr(spec, f"num_{part}", len(fields.spaces))
        declared = [CSetting(key.encode(), *number) for key, number in numbers.items()]
        spec.settings = (CSetting * max(len(declared), 1))(*declared)
        spec.num_settings = len(declared)
        spec.max_episode_steps = max_episode_steps
        spec.state_bytes = maker.state.itemsize
        spec.reward_low, spec.reward_high = reward_range
        spec.steps_past_end = steps_past_end
        if render_size is not None:
            spec.render_width, spec.render_height = render_size
        for function, one in compiled.items():
            kind = RenderFunction if function == "render" else RangeFunction
            setattr(spec, function, kind(one.address))
        return read_spec(ctypes.addressof(spec), where, _Library(spec, parts, compiled))

    return make


@dataclass
class _Maker:
    """Writes the loop over environments around each function, and compiles both."""

    numba: Any
    at: Any
    where: str
    state: np.dtype[Any]
    observation: _Fields
    action: _Fields
    info: _Fields
    settings: tuple[str, ...]
    render_size: tuple[int, int] | None

    def compiled(self, function: str, found: Any) -> Any:
        found = found.__func__ if isinstance(found, staticmethod) else found
        taken = self._taken(function, found)
        numba = self.numba
        names: dict[str, Any] = {
            "np": np,
            "carray": numba.carray,
            "at": self.at,
            "store": _store,
            "user": numba.njit(error_model="numpy")(found),
            "state_dtype": self.state,
            "settings_dtype": np.dtype([(name, np.float64) for name in self.settings]),
        }
        exec("\n".join(self._source(function, taken, names)), names)
        types = numba.types
        last = types.CPointer(types.uint8) if function == "render" else types.int32
        signature = types.void(types.CPointer(types.uint64), types.int32, last)
        try:
            return numba.cfunc(signature, nopython=True, error_model="numpy")(names["loop"])
        except Exception as error:  # numba has its own, and lets a KeyError through for a field that is not there
            raise SpecError(f"{self.where}: function {function!r} does not compile: {_short(error)}") from error

    def _taken(self, function: str, found: Any) -> list[str]:
        if not isinstance(found, FunctionType):
            raise SpecError(f"{self.where}: {function!r} must be a plain function, found {type(found).__name__}")
        taken, known = list(inspect.signature(found).parameters), _GIVEN[function]
        hint = "; there is no self: it is a function of one environment" if taken[:1] == ["self"] else ""
        for name in taken:
            if name not in known:
                raise SpecError(
                    f"{self.where}: function {function!r} takes {name!r}, but can take: {', '.join(known)}{hint}"
                )
        for name, there in (("info", self.info.names), ("settings", self.settings)):
            if name in taken and not there:
                raise SpecError(f"{self.where}: function {function!r} takes {name!r}, but none are declared")
        if any(one.opname == "RAISE_VARARGS" for one in dis.get_instructions(found)):
            raise SpecError(
                f"{self.where}: function {function!r} raises or asserts, and nobody is there to catch it: it runs "
                "without Python; end the episode instead"
            )
        return taken

    def _source(self, function: str, taken: list[str], names: dict[str, Any]) -> list[str]:
        """As Python text. ``envs`` is read as a table of words of 8 bytes."""
        head = [
            f"table = carray(envs, {ctypes.sizeof(CEnvs) // 8})",
            # The lower half of the first word; the upper is the number of agents.
            "n = np.int64(table[0] & np.uint64(0xFFFFFFFF))",
            f"states = carray(at({_word('state')}), n, state_dtype)",
        ]
        given = {"state": "states[i]", "random": "randoms[i : i + 1]", "steps": "counts[i]", "settings": "numbers[0]"}
        if "random" in taken:
            head.append(f"randoms = carray(at({_word('random')}), n, np.uint64)")
        if "steps" in taken:
            head.append(f"counts = carray(at({_word('steps')}), n, np.int32)")
        if "settings" in taken:
            head.append(f"numbers = carray(at({_word('settings')}), 1, settings_dtype)")
        for fields in (self.action, self.observation, self.info):
            if fields.part in taken:
                head += self._arrays(fields, names)
                given[fields.part] = self._row(fields, names)
        if function == "render":
            width, height = self.render_size or (0, 0)
            given["picture"] = f"carray(rgb, ({height}, {width}, 3))"
            call = f"user({', '.join(given[name] for name in taken)})"
            return ["def loop(envs, i, rgb):", *(f"    {line}" for line in [*head, call])]
        call = f"user({', '.join(given[name] for name in taken)})"
        if function == "step":
            written = (("rewards", "float64"), ("terminated", "uint8"), ("truncated", "uint8"))
            head += [f"{name} = carray(at({_word(name)}), n, np.{dtype})" for name, dtype in written]
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
        """Environment i's: arrays as they are; a number alone is an array of one to be written, itself to be read."""
        rows = [
            f"{fields.part}_{i}[{'i : i + 1' if not space.shape and fields is not self.action else 'i'}]"
            for i, space in enumerate(fields.spaces)
        ]
        if not fields.names:
            return rows[0]
        names[f"{fields.part}_tuple"] = namedtuple(f"{fields.part}_tuple", fields.names)
        return f"{fields.part}_tuple({', '.join(rows)})"


def _word(name: str) -> str:
    """Where a pointer of memlane_envs is found."""
    return f"table[{getattr(CEnvs, name).offset // 8}]"


def _short(error: BaseException) -> str:
    """The sentence in a page of numba's words that says what is wrong, and the line it is about."""
    if isinstance(error, KeyError):
        return f"there is no field {error} in the record"
    lines = [line.strip() for line in str(error).splitlines()]
    noise = ("Failed in", "During:", "File ", "raised from", "- Resolution", "There are", "Overload", "Rejected")
    said = [line for line in lines if line and not line.startswith(noise) and not set(line) <= set("-^=~ <>")]
    place = next((line for line in lines if line.startswith("File ") and "<string>" not in line), "")
    ours = [line.partition("TypingError: ")[2] for line in said if "it must return" in line]
    # What ends with a colon goes on in the next line: the function that there is not, and what it was called with.
    reason = ours[0] if ours else " ".join(said[: 2 if said[0].endswith(":") else 1]) if said else str(error)
    return f"{reason} ({place.rstrip(':')})" if place else reason
