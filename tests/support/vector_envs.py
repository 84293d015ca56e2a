"""Shared by the tests of vector environments: environments that report their arguments, runs, and comparisons."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Space, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import strategies as st

from memlane.vector import AsyncVectorEnv

SPACES: dict[str, Space[Any]] = {
    "Box float32": Box(-1, 1, (3,)),
    "Box float64": Box(-np.inf, np.inf, (2, 2), np.float64),
    "Box float16": Box(-1, 1, (5,), np.float16),
    "Box uint8": Box(0, 255, (2, 3, 3), np.uint8),
    "Box bool": Box(0, 1, (4,), np.bool_),
    "Box int16": Box(-300, 300, (3,), np.int16),
    "Box of no dimensions": Box(-1, 1, ()),
    "Discrete": Discrete(6),
    "Discrete from -3": Discrete(5, start=-3),
    "MultiDiscrete": MultiDiscrete([2, 3, 4], start=[-1, 0, 5]),
    "MultiBinary": MultiBinary((2, 3)),
    "Text": Text(6, min_length=0, charset="aé漢😀 "),
    "OneOf": OneOf((Discrete(3), Box(-1, 1, (2,)), Text(5, min_length=0))),
    "Dict": Dict({"pos": Box(-1, 1, (2,)), "cam": Dict({"rgb": Box(0, 255, (2, 2, 3), np.uint8)})}),
    "Dict with Text and OneOf": Dict({"note": Text(4), "either": OneOf((Discrete(3), MultiBinary(2)))}),
    "Tuple": Tuple((Discrete(3), Tuple((Box(-1, 1, (2,), np.float64), MultiBinary(4))))),
}
EVERYTHING = Dict(dict(SPACES))
"""All of them at once."""
ACTIONS = Dict(
    {name: SPACES[name] for name in ("Box float64", "Discrete from -3", "MultiDiscrete", "MultiBinary", "Tuple")}
)


class Mission(Space[str]):
    """Texts such as MiniGrid's missions. Neither Gymnasium nor memlane knows the space."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002
        return f"fetch key {self.np_random.integers(1000)}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mission)

    __hash__ = None  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------- environments


class Chance(gymnasium.Env[Any, Any]):
    """Random observations, short random episodes, infos of every kind, with the arguments of reset and step."""

    metadata = {"render_modes": ["ansi"], "colour": "blue"}  # noqa: RUF012

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], infos: bool = True) -> None:
        self.observation_space = deepcopy(observation_space)
        self.action_space = deepcopy(action_space)
        self.render_mode = "ansi"
        self._infos = infos
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {"options": repr(options), "seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        end, reward = self.np_random.uniform(), self.np_random.normal()
        info = {"action": repr(action), **self._some_infos()} if self._infos else {}
        return self.observation_space.sample(), reward, bool(end < 0.1), bool(end > 0.9), info

    def _some_infos(self) -> dict[str, Any]:
        draw = self.np_random
        infos: dict[str, Any] = {
            "int": self._steps,
            "float": float(draw.normal()),
            "bool": bool(draw.integers(2)),
            "float32": np.float32(draw.normal()),
            "uint8": np.uint8(draw.integers(255)),
            "numpy bool": np.bool_(draw.integers(2)),
            "array": draw.normal(size=(2, 3)).astype(np.float16),
            "array of no dimensions": np.array(draw.normal()),
            "string": str(draw.integers(1000)),
            "list": [1, 2, self._steps],
            "None": None,
            "dict": {"x": int(draw.integers(9)), "deeper": {"y": float(draw.normal()), "z": "z"}},
            "empty dict": {},
        }
        return {key: value for key, value in infos.items() if draw.integers(2)}

    def render(self) -> str:  # type: ignore[override]
        return f"step {self._steps}"


class Counter(gymnasium.Env[Any, Any]):
    """Its observation is how many steps its episode has, its reward the action."""

    observation_space: Space[Any] = Discrete(1000)
    action_space: Space[Any] = Discrete(100)

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.steps = 0
        self.taken: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.taken.append(int(action))
        return self.steps, float(action), self.steps >= self.length, False, {}

    def add(self, one: Any, two: Any = 0) -> Any:
        return one + two

    def same(self, value: Any) -> Any:
        return value

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise KeyError("asked to")


class Sleeper(Counter):
    """Action 50 + x sleeps x tenths of a second; its info says which environment it is and how many steps it has."""

    def __init__(self, number: int = 0, length: int = 1000) -> None:
        super().__init__(length)
        self.number = number

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(max(0, int(action) - 50) / 10)
        result = super().step(action)
        return *result[:4], {"number": self.number, "steps": self.steps}


class Speaker(Counter):
    """Returns as info what ``say`` makes of an action and the number of steps."""

    def __init__(self, say: Callable[[int, int], dict[str, Any]], length: int = 1000) -> None:
        super().__init__(length)
        self.say = say

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        return *result[:4], self.say(int(action), self.steps)


class Shower(Counter):
    """Shows ``values[steps]``, always the same object if it is an array: environments reuse their buffers."""

    def __init__(self, space: Space[Any], values: Sequence[Any], length: int = 1000) -> None:
        super().__init__(length)
        self.observation_space = space
        self.values = values
        self.buffer = np.array(values[0]) if isinstance(values[0], np.ndarray) else None

    def _shown(self) -> Any:
        value = self.values[self.steps % len(self.values)]
        if self.buffer is None:
            return value
        self.buffer[...] = value
        return self.buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return self._shown(), *rest  # type: ignore[return-value]


def described(action: Any) -> Any:
    """All of an action that an environment can see: its type, dtype, shape and every bit."""
    if isinstance(action, dict):
        return {key: described(part) for key, part in action.items()}
    if isinstance(action, (tuple, list)):
        return type(action).__name__, [described(part) for part in action]
    if isinstance(action, (np.ndarray, np.generic)) and not action.dtype.hasobject:
        return type(action).__name__, action.dtype.str, action.shape, action.tobytes()
    return type(action).__name__, repr(action)


class Recorder(gymnasium.Env[Any, Any]):
    """Its info is its action."""

    observation_space: Space[Any] = Discrete(2)

    def __init__(self, action_space: Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(action, np.ndarray):
            seen = described(action)
            action[...] = 0  # its own copy: neither the caller nor another environment may see this
            return 0, 0.0, False, False, {"seen": (seen,)}
        return 0, 0.0, False, False, {"seen": (described(action),)}


class Typed(gymnasium.Env[Any, Any]):
    """Infos of many types, a reward that float32 cannot hold, and episodes of three steps."""

    observation_space = Box(-9, 9, (2,))
    action_space: Space[Any] = Discrete(3)

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self._seen(), {"seed": seed, "number": np.int16(self.number)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        info: dict[str, Any] = {
            "int": self.steps,
            "float": 0.1,
            "bool": True,
            "None": None,
            "float32": np.float32(0.1),
            "float64": np.float64(0.1),
            "numpy bool": np.bool_(True),
            "array": np.arange(self.steps),
            "nested": {"float16": np.float16(0.1), "list": [1, "two"]},
            "mixed": [1, 1.5, None][self.number % 3],
            "action": (described(action),),
        }
        if self.number == 1:
            info["episode"] = {"r": 1.5, "l": 3}
        return self._seen(), 1 / 3, self.steps == 3 and self.number == 0, self.steps == 3, info

    def _seen(self) -> Any:
        return np.array([self.steps, self.number], np.float32)

    def twice(self, value: int) -> int:
        return 2 * value + self.number


class NoPickle(Exception):
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickles of me")


class NoUnpickle(Exception):
    """Can be pickled but not unpickled: its constructor needs two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Raiser(Counter):
    """Raises ``error()`` when the action is 99."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.error = error

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 99:
            raise self.error()
        return super().step(action)


class BadPickle:
    """Can be pickled in a worker and not unpickled in the parent."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def bad_pickle() -> BadPickle:
    return BadPickle()


# --------------------------------------------------------------------------------------------------------------- making


@contextlib.contextmanager
def ours(env_fns: Sequence[Callable[[], Any]], **arguments: Any) -> Iterator[AsyncVectorEnv]:
    """memlane's vector environment, closed at the end of a test, also if the test fails while a call is pending."""
    envs = AsyncVectorEnv(env_fns, **{"num_workers": 2, **arguments})
    try:
        yield envs
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            envs.close(timeout=1)


@contextlib.contextmanager
def reference(env_fns: Sequence[Callable[[], Any]], **arguments: Any) -> Iterator[SyncVectorEnv]:
    envs = SyncVectorEnv(env_fns, **arguments)
    try:
        yield envs
    finally:
        envs.close()


def chances(
    observation_space: Space[Any], action_space: Space[Any], count: int, *, infos: bool = True
) -> list[Callable[[], Chance]]:
    return [partial(Chance, observation_space, action_space, infos)] * count


def actions_for(envs: VectorEnv[Any, Any, Any], steps: int) -> list[Any]:
    envs.action_space.seed(5)
    return [envs.action_space.sample() for _ in range(steps)]


def trajectory(envs: VectorEnv[Any, Any, Any], actions: Sequence[Any], mode: AutoresetMode) -> Iterator[Any]:
    """What comes back from a reset and from each of ``actions``, as copies."""
    yield deepcopy(envs.reset(seed=11, options={"one": 1}))
    for action in actions:
        result = deepcopy(envs.step(action))
        yield result
        ended = result[2] | result[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            yield deepcopy(envs.reset(options={"reset_mask": ended}))


# ------------------------------------------------------------------------------------------------------------ comparing


def assert_same_run(
    env_fns: Sequence[Callable[[], Any]], steps: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **arguments: Any
) -> None:
    """Assert that a run through our vector environment returns what it returns through Gymnasium's SyncVectorEnv."""
    with reference(env_fns, autoreset_mode=mode) as expected, ours(env_fns, autoreset_mode=mode, **arguments) as envs:
        assert envs.observation_space == expected.observation_space
        assert envs.action_space == expected.action_space
        actions = actions_for(expected, steps)
        pairs = zip(trajectory(expected, actions, mode), trajectory(envs, actions, mode), strict=True)
        for number, (theirs, mine) in enumerate(pairs):
            found = difference(theirs, mine)
            assert found is None, f"result {number}: {found}"


def difference(one: Any, two: Any, path: str = "") -> str | None:
    """Where two values differ in form, type, dtype or content; None if nowhere. The order of keys does not matter."""
    if isinstance(one, Mapping):
        if not isinstance(two, Mapping) or set(one) != set(two):
            return f"{path}: {one!r} is not {two!r}"
        parts = [(one[key], two[key], f"{path}[{key!r}]") for key in one]
    elif isinstance(one, (tuple, list)) or (isinstance(one, np.ndarray) and one.dtype == object):
        if type(one) is not type(two) or len(one) != len(two):
            return f"{path}: {one!r} is not {two!r}"
        parts = [(left, right, f"{path}[{index}]") for index, (left, right) in enumerate(zip(one, two, strict=True))]
    elif isinstance(one, np.ndarray):
        if not isinstance(two, np.ndarray) or one.dtype != two.dtype or one.shape != two.shape:
            return f"{path}: {one!r} is not {two!r}"
        return None if np.array_equal(one, two, equal_nan=one.dtype.kind == "f") else f"{path}: {one!r} is not {two!r}"
    else:
        return None if type(one) is type(two) and one == two else f"{path}: {one!r} is not {two!r}"
    return next((found for part in parts if (found := difference(*part)) is not None), None)


# -------------------------------------------------------------------------------------------------------- random spaces

_leaves = st.sampled_from(
    [space for name, space in SPACES.items() if name.startswith(("Box", "Disc", "Multi", "Text"))]
)
_keys = st.text(alphabet="ab.~", min_size=1, max_size=3)


def _nested(inner: st.SearchStrategy[Space[Any]]) -> st.SearchStrategy[Space[Any]]:
    return (
        st.dictionaries(_keys, inner, min_size=1, max_size=3).map(Dict)
        | st.lists(inner, min_size=1, max_size=3).map(Tuple)
        | st.lists(inner, min_size=1, max_size=3).map(OneOf)
    )


random_spaces: st.SearchStrategy[Space[Any]] = st.recursive(_leaves, _nested, max_leaves=6)
