"""Harness: a few environments on buffers with guard zones, and direct calls of their C functions.

The host (``_native.EnvHost``) can run on the same buffers, so that its calls are guarded as well.
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
from memlane.native.lowlevel import CEnvs, CSpec, Field
from memlane.testing.report import Failure

GUARD_BYTES = 4096
_LARGEST_GUARD = 1 << 20
# Random bytes, so that a write of zeros, ones or a repeated byte is detected.
_NOISE = np.random.default_rng(0).integers(1, 255, _LARGEST_GUARD, np.uint8)


class InitRejected(Exception):
    """``init`` returned an error message."""


class FailureLog:
    """Passes failures on, the first one of each rule and field: later ones are mostly the same mistake."""

    def __init__(self, report: Callable[[Failure], None], set_current_call: Callable[[str], None]) -> None:
        self._report, self._seen = report, set[tuple[str, str]]()
        self.set_current_call = set_current_call
        """Called with a description of each call before it is made, so that a crash can be located."""

    def add(self, failure: Failure) -> None:
        key = failure.rule, failure.field
        if key not in self._seen:
            self._seen.add(key)
            self._report(failure)


class GuardedBuffer:
    """One array between two guard zones."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], env_bytes: int) -> None:
        """``env_bytes``: bytes per environment. Guards are larger: an index off by one environment is a common bug."""
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

    def check_guards(self) -> str | None:
        """Describe what was written outside the array, and restore the guards. None: nothing was."""
        # As bytes: all guards are compared after every call, and this is four times as fast as comparing arrays.
        if self._before.tobytes() == self._untouched == self._behind.tobytes():
            return None
        noise = _NOISE[: len(self._before)]
        before, behind = (np.flatnonzero(zone != noise) for zone in (self._before, self._behind))
        self._before[:] = self._behind[:] = noise
        if len(behind):
            return f"{len(behind)} bytes changed after the end of the buffer, the first at offset {behind[0]} from it"
        offset = len(noise) - before[-1]
        return f"{len(before)} bytes changed before the start of the buffer, the last at offset -{offset} from it"


class Harness:
    """``num_envs`` environments on guarded buffers. After each call, invalid writes are added to ``failures``."""

    def __init__(self, spec: Spec, num_envs: int, settings: list[float], failures: FailureLog) -> None:
        self.spec, self.num_envs, self.failures = spec, num_envs, failures
        self.num_agents = spec.num_agents
        self.raw = CSpec.from_address(spec.address)
        self.settings = settings
        self.step = -1
        rows = num_envs * spec.num_agents
        self.buffers: dict[str, GuardedBuffer] = {}

        def allocate(name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            env_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize // num_envs
            self.buffers[name] = GuardedBuffer(dtype, shape, env_bytes)
            return self.buffers[name].array

        def allocate_all(part: str, fields: tuple[Field, ...]) -> list[NDArray[Any]]:
            names = [field_name(part, i, field) for i, field in enumerate(fields)]
            return [
                allocate(name, field.dtype, (rows, *field.shape)) for name, field in zip(names, fields, strict=True)
            ]

        self.state = allocate("state", np.uint8, (max(num_envs * spec.state_bytes, 1),))
        self.random = allocate("random", np.uint64, (num_envs,))
        self.steps = allocate("steps", np.int32, (num_envs,))
        self.ended = allocate("ended", np.uint8, (num_envs,))
        self.rewards = allocate("rewards", np.float64, (rows,))
        self.terminated = allocate("terminated", np.uint8, (rows,))
        self.truncated = allocate("truncated", np.uint8, (rows,))
        self.alive = allocate("alive", np.uint8, (rows,))
        self.actions = allocate_all("actions", spec.actions)
        self.observations = allocate_all("observations", spec.observations)
        self.infos = allocate_all("infos", spec.infos)
        self.final_observations = allocate_all("final observations", spec.observations)
        self.final_infos = allocate_all("final infos", spec.infos)
        self._settings_array = allocate("settings", np.float64, (max(len(settings), 1),))
        self._settings_array[: len(settings)] = settings
        tables = {}
        for part, arrays in (("actions", self.actions), ("observations", self.observations), ("infos", self.infos)):
            tables[part] = allocate(f"the pointers to {part}", np.uintp, (max(len(arrays), 1),))
            tables[part][: len(arrays)] = [array.ctypes.data for array in arrays]
        self.envs = CEnvs(
            num_envs=num_envs,
            num_agents=spec.num_agents,
            state=self.state.ctypes.data,
            **{name: _pointer(name, array) for name, array in tables.items()},
            **{name: _pointer(name, getattr(self, name)) for name in ("random", "rewards", "terminated", "truncated")},
            **{name: _pointer(name, getattr(self, name)) for name in ("alive", "steps")},
            settings=_pointer("settings", self._settings_array),
        )
        self._envs_bytes = bytes(self.envs)

    # ---------------------------------------------------------------------------------------------------------- arrays

    def per_row(self) -> dict[str, NDArray[Any]]:
        """The arrays of ``memlane_envs`` with one row per environment (or per agent)."""
        names = ["random", "steps", "rewards", "terminated", "truncated", "alive"]
        names += [name for part in ("actions", "observations", "infos") for name in self.names(part)]
        return {name: self.buffers[name].array for name in names}

    def names(self, part: str) -> list[str]:
        fields = {"actions": self.spec.actions, "observations": self.spec.observations, "infos": self.spec.infos}[part]
        return [field_name(part, i, field) for i, field in enumerate(fields)]

    def by_env(self, array: NDArray[Any]) -> NDArray[Any]:
        """A view with one row per environment."""
        return array.reshape(self.num_envs, -1)

    def copy(self) -> dict[str, NDArray[Any]]:
        return {name: buffer.array.copy() for name, buffer in self.buffers.items()}

    def restore(self, copy: dict[str, NDArray[Any]]) -> None:
        for name, array in copy.items():
            self.buffers[name].array[...] = array

    # ------------------------------------------------------------------------------------------------------------ calls

    @contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Around every call: announce it, in case it crashes, and check the guards after it."""
        self.failures.set_current_call(f"{call}, {'before the first step' if self.step < 0 else f'step {self.step}'}")
        yield
        for name, buffer in self.buffers.items():
            if (found := buffer.check_guards()) is not None:
                self._fail("buffer_bounds", call, name, "no byte outside the buffer changed", found, _FIX_INDEX)
        if bytes(self.envs) != self._envs_bytes:
            ctypes.memmove(ctypes.byref(self.envs), self._envs_bytes, len(self._envs_bytes))
            fix = "do not write to the struct *envs itself"
            self._fail("read_only", call, "memlane_envs", "the struct is unchanged", "it was written", fix)

    def call(self, function: str, begin: int, end: int) -> Any:
        """Call the C function ``init``, ``reset``, ``step`` or ``close``, and check that its inputs are unchanged."""
        call = f"{function}({begin}, {end})"
        inputs = {"settings": self._settings_array.copy()}
        if function in ("reset", "step"):
            inputs |= {name: self.buffers[name].array.copy() for name in (*self.names("actions"), "steps")}
        if function == "step":
            inputs["alive"] = self.alive.copy()
        with self.guarded(call):
            result = getattr(self.raw, function)(ctypes.byref(self.envs), begin, end)
        for name, before in inputs.items():
            array = self.buffers[name].array
            if (env := self._first_change(array, before)) is not None:
                array[...] = before
                fix = "do not write to it in step: terminated removes an agent" if name == "alive" else "only read it"
                self._fail("read_only", call, name, "unchanged", "it was written", fix, env)
        return result

    def init(self) -> None:
        if not self.raw.init:
            return
        message = self.call("init", 0, self.num_envs)
        if message is not None:
            raise InitRejected(message.decode(errors="replace"))

    def close(self) -> None:
        if self.raw.close:
            self.call("close", 0, self.num_envs)

    def host(self, mode: int, limit: int, num_threads: int) -> _native.EnvHost:
        """Create the host of memlane on these buffers. It has its own pointers to fields and its own settings."""
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
        """The first environment whose row differs; 0 for the settings, which have no rows."""
        if array.tobytes() == before.tobytes():
            return None
        if array is self._settings_array:
            return 0
        changed = (bits(self.by_env(array)) != bits(self.by_env(before))).any(1)
        return int(np.flatnonzero(changed)[0])

    def _fail(
        self, rule: str, call: str, field: str, expected: str, found: str, fix: str, env: int | None = None
    ) -> None:
        self.failures.add(Failure(rule, expected, found, fix, call, field, env, self.step))


_FIX_INDEX = (
    "check the index: the elements of environment i begin at i * (elements per row); with several agents at "
    "i * num_agents * (elements per row); the state has state_bytes per environment"
)


def field_name(part: str, index: int, field: Field) -> str:
    return f"{part}[{index}]" + (f" ({field.name})" if field.name else "")


def bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each row, for comparison: NaN equals itself, and -0.0 differs from 0.0."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(len(array), -1)


def _pointer(name: str, array: NDArray[Any]) -> Any:
    """A pointer of the type that the member of the struct has."""
    types: dict[str, Any] = {member: kind for member, kind, *_ in CEnvs._fields_}
    return ctypes.cast(array.ctypes.data, types[name])
