"""Bench: the buffers of a few environments with guard zones around each, and the C functions called on them directly.

The host (``_native.EnvHost``) can be put on the same buffers, so that what it does is guarded as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane.native import Spec
from memlane.native.spec import CEnvs, CSpec, FieldOf
from memlane.testing.report import Failure

NEXT_STEP, SAME_STEP, DISABLED = range(3)
GUARD_BYTES = 4096
_LARGEST_GUARD = 1 << 20
# Noise, so that a write of zeros, ones or a repeated byte is seen.
_NOISE = np.random.default_rng(0).integers(1, 255, _LARGEST_GUARD, np.uint8)


class Refused(Exception):
    """``init`` had something to say."""


class Findings:
    """Failures as they are found. The same rule and field fails once: what follows is mostly the same mistake."""

    def __init__(self, tell: Callable[[Failure], None], mark: Callable[[str], None]) -> None:
        self._tell, self._seen = tell, set[tuple[str, str]]()
        self.mark = mark
        """Told what is called next, so that a crash has a place."""

    def add(self, failure: Failure) -> None:
        key = failure.rule, failure.field
        if key not in self._seen:
            self._seen.add(key)
            self._tell(failure)


class Buffer:
    """One array between two guard zones."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], env_bytes: int) -> None:
        """``env_bytes``: what one environment has of it. The guards are larger: a usual slip is one environment off."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        guard = min(max(GUARD_BYTES, 2 * env_bytes), _LARGEST_GUARD)
        block = np.zeros(nbytes + 2 * guard + 64, np.uint8)
        begin = guard + -(block.ctypes.data + guard) % 64
        self.array: NDArray[Any] = block[begin : begin + nbytes].view(dtype).reshape(shape)
        self._before = block[begin - guard : begin]
        self._behind = block[begin + nbytes : begin + nbytes + guard]
        self._before[:] = self._behind[:] = _NOISE[:guard]
        self._untouched = self._before.tobytes()

    def harm(self) -> str | None:
        """What was written outside, in words; the guards are mended."""
        # As bytes: after every call all guards are compared, and this is four times as fast as arrays.
        if self._before.tobytes() == self._untouched == self._behind.tobytes():
            return None
        noise = _NOISE[: len(self._before)]
        before, behind = (np.flatnonzero(zone != noise) for zone in (self._before, self._behind))
        self._before[:] = self._behind[:] = noise
        if len(behind):
            return f"{len(behind)} bytes changed behind its end, the first {behind[0]} bytes after it"
        return f"{len(before)} bytes changed before its begin, the last {len(noise) - before[-1]} bytes before it"


class Bench:
    """``num_envs`` environments. One call after the other; ``findings`` hears of writes that are nobody's."""

    def __init__(self, spec: Spec, num_envs: int, settings: list[float], findings: Findings) -> None:
        self.spec, self.num_envs, self.findings = spec, num_envs, findings
        self.num_agents = spec.num_agents
        self.raw = CSpec.from_address(spec.address)
        self.settings = settings
        self.step = -1
        rows = num_envs * spec.num_agents
        self.buffers: dict[str, Buffer] = {}

        def put(name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            env_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize // num_envs
            self.buffers[name] = Buffer(dtype, shape, env_bytes)
            return self.buffers[name].array

        def put_all(part: str, fields: tuple[FieldOf, ...]) -> list[NDArray[Any]]:
            return [put(field_name(part, i, one), one.dtype, (rows, *one.shape)) for i, one in enumerate(fields)]

        self.state = put("state", np.uint8, (max(num_envs * spec.state_bytes, 1),))
        self.random = put("random", np.uint64, (num_envs,))
        self.steps = put("steps", np.int32, (num_envs,))
        self.ended = put("ended", np.uint8, (num_envs,))
        self.rewards = put("rewards", np.float64, (rows,))
        self.terminated = put("terminated", np.uint8, (rows,))
        self.truncated = put("truncated", np.uint8, (rows,))
        self.alive = put("alive", np.uint8, (rows,))
        self.actions = put_all("actions", spec.actions)
        self.observations = put_all("observations", spec.observations)
        self.infos = put_all("infos", spec.infos)
        self.final_observations = put_all("last observations", spec.observations)
        self.final_infos = put_all("last infos", spec.infos)
        self._numbers = put("settings", np.float64, (max(len(settings), 1),))
        self._numbers[: len(settings)] = settings
        tables = {}
        for part, arrays in (("actions", self.actions), ("observations", self.observations), ("infos", self.infos)):
            tables[part] = put(f"the table of {part}", np.uintp, (max(len(arrays), 1),))
            tables[part][: len(arrays)] = [array.ctypes.data for array in arrays]
        self.envs = CEnvs(
            num_envs=num_envs,
            num_agents=spec.num_agents,
            state=self.state.ctypes.data,
            **{name: _as(name, array) for name, array in tables.items()},
            **{name: _as(name, getattr(self, name)) for name in ("random", "rewards", "terminated", "truncated")},
            **{name: _as(name, getattr(self, name)) for name in ("alive", "steps")},
            settings=_as("settings", self._numbers),
        )
        self._envs_bytes = bytes(self.envs)

    # -------------------------------------------------------------------------------------------------------- its parts

    def per_row(self) -> dict[str, NDArray[Any]]:
        """Everything that the environment may know of with one row (or several, with agents) for each environment."""
        names = ["random", "steps", "rewards", "terminated", "truncated", "alive"]
        names += [name for part in ("actions", "observations", "infos") for name in self.names(part)]
        return {name: self.buffers[name].array for name in names}

    def names(self, part: str) -> list[str]:
        fields = {"actions": self.spec.actions, "observations": self.spec.observations, "infos": self.spec.infos}[part]
        return [field_name(part, i, one) for i, one in enumerate(fields)]

    def by_env(self, array: NDArray[Any]) -> NDArray[Any]:
        """A view with one row for each environment."""
        return array.reshape(self.num_envs, -1)

    def copy(self) -> dict[str, NDArray[Any]]:
        return {name: buffer.array.copy() for name, buffer in self.buffers.items()}

    def restore(self, copy: dict[str, NDArray[Any]]) -> None:
        for name, array in copy.items():
            self.buffers[name].array[...] = array

    # ------------------------------------------------------------------------------------------------------------ calls

    @contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Around every call: it has a name if it crashes, and guards are looked at after it."""
        self.findings.mark(f"{call}, {'before the first step' if self.step < 0 else f'step {self.step}'}")
        yield
        for name, buffer in self.buffers.items():
            if (harm := buffer.harm()) is not None:
                self._fail("guards", call, name, "no byte outside changed", harm, _CURES["guards"])
        if bytes(self.envs) != self._envs_bytes:
            ctypes.memmove(ctypes.byref(self.envs), self._envs_bytes, len(self._envs_bytes))
            self._fail(
                "given", call, "memlane_envs", "the struct itself as it was", "it was changed", "leave *envs as it is"
            )

    def call(self, function: str, begin: int, end: int) -> Any:
        """Of the C functions ``init``, ``reset``, ``step`` and ``close``."""
        call = f"{function}({begin}, {end})"
        held = {"settings": self._numbers.copy()}
        if function in ("reset", "step"):
            held |= {name: self.buffers[name].array.copy() for name in (*self.names("actions"), "steps")}
        if function == "step":
            held["alive"] = self.alive.copy()
        with self.guarded(call):
            result = getattr(self.raw, function)(ctypes.byref(self.envs), begin, end)
        for name, before in held.items():
            array = self.buffers[name].array
            if (env := self._first_change(array, before)) is not None:
                array[...] = before
                whose = "the host counts who is in the game" if name == "alive" else f"{name} is for reading"
                self._fail("given", call, name, "unchanged", "it was written", f"write nothing there: {whose}", env)
        return result

    def init(self) -> None:
        if not self.raw.init:
            return
        said = self.call("init", 0, self.num_envs)
        if said is not None:
            raise Refused(said.decode(errors="replace"))

    def close(self) -> None:
        if self.raw.close:
            self.call("close", 0, self.num_envs)

    def host(self, mode: int, limit: int, num_threads: int) -> _native.EnvHost:
        """The real host on these buffers. It makes its own table of fields and of settings."""
        arrays: dict[str, Any] = {
            "state": self.state,
            "random": self.random,
            "steps": self.steps,
            "ended": self.ended,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "alive": self.alive,
            "actions": self.actions,
            "observations": self.observations,
            "final_observations": self.final_observations,
            "infos": self.infos,
            "final_infos": self.final_infos,
        }
        spec = self.spec
        return _native.EnvHost(
            spec.address, self.num_envs, mode, limit, self.settings, arrays, num_threads, spec.library
        )

    def _first_change(self, array: NDArray[Any], before: NDArray[Any]) -> int | None:
        """The first environment whose row differs; 0 for what has no rows."""
        if array.tobytes() == before.tobytes():
            return None
        if array is self._numbers:
            return 0
        changed = (bits(self.by_env(array)) != bits(self.by_env(before))).any(1)
        return int(np.flatnonzero(changed)[0])

    def _fail(
        self, rule: str, call: str, field: str, expected: str, found: str, do: str, env: int | None = None
    ) -> None:
        self.findings.add(Failure(rule, expected, found, do, call, field, env, self.step))


_CURES = {
    "guards": "look at the index: environment i has its elements from i * (elements of one row); with several agents, "
    "from i * num_agents * (elements of one row); the state has state_bytes for each environment"
}


def field_name(part: str, index: int, field: FieldOf) -> str:
    return f"{part}[{index}]" + (f" ({field.name})" if field.name else "")


def bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each row: NaN equals itself, and -0.0 is not 0.0."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(len(array), -1)


def _as(name: str, array: NDArray[Any]) -> Any:
    """A pointer of the type that the struct wants."""
    kinds: dict[str, Any] = {field: kind for field, kind, *_ in CEnvs._fields_}
    return ctypes.cast(array.ctypes.data, kinds[name])
