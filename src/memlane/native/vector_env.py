"""NativeVectorEnv: environments of a C library, stepped in this process, as a Gymnasium vector environment.

The C code writes into arrays that Python returns: a step copies and allocates no results, unless ``copy=True``.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from memlane import _native
from memlane.core import Layout, Segment
from memlane.core.arguments import check_timeout
from memlane.core.layout import FieldSpec
from memlane.core.lease import debug_mode
from memlane.core.memory import memory_limits, require
from memlane.core.suggestions import did_you_mean
from memlane.native.spec import Field, Spec
from memlane.spaces.paths import ROOT_NAME, escape_key
from memlane.vector.arguments import (
    env_ids_of,
    require_batch,
    require_choice,
    require_one_each,
    reset_mask_of,
    seeds_of,
)
from memlane.vector.errors import CallPending, CallTimeout, NotReset, episode_ended
from memlane.vector.observations import Observations, part_column, read_only
from memlane.vector.rollout_slot import store_observations, store_step

_NEEDS_CONVERSION, _NEEDS_RESET = _native.STEP_NEEDS_CONVERSION, _native.STEP_NEEDS_RESET
_HOST_MODES = {
    AutoresetMode.NEXT_STEP: _native.AUTORESET_NEXT_STEP,
    AutoresetMode.SAME_STEP: _native.AUTORESET_SAME_STEP,
    AutoresetMode.DISABLED: _native.AUTORESET_DISABLED,
}


class NativeVectorEnv(VectorEnv[Any, Any, Any]):
    """``num_envs`` environments of ``spec``, stepped by C code in this process.

    ``memlane.native.make`` and ``memlane.native.load`` create one. The interface is that of Gymnasium's ``VectorEnv``;
    ``send`` and ``recv`` step a part of the environments at a time.

    One thread at a time may call its methods. A step may use several threads inside (``num_threads``) and releases the
    GIL when it takes longer than 50 us.

    >>> from memlane.native import make
    >>> envs = make("CartPole-v1", num_envs=3)
    >>> observations, infos = envs.reset(seed=1)
    >>> observations.shape
    (3, 4)
    >>> next_observations, rewards, terminated, truncated, infos = envs.step([0, 1, 1])
    >>> rewards
    array([1., 1., 1.])
    >>> next_observations is observations  # copy=False: the same array with new content
    True
    >>> envs.close()

    ``copy=False`` (the default): the returned arrays are read-only views of the memory that the C code writes. The next
    ``step`` or ``reset`` overwrites them, so copy what you keep. ``copy=True``: every call returns new arrays. With
    ``MEMLANE_DEBUG=1``, observations of an earlier step raise ``StaleView`` when they are used.

    Errors: invalid actions raise ``ValueError`` or ``TypeError`` before any environment is stepped. Settings that the
    environment's ``init`` rejects raise ``ValueError`` with its message. C functions cannot raise, and a crash in one
    ends this process: ``memlane.testing.check_env`` finds most causes, and ``memlane.vector.AsyncVectorEnv`` runs
    environments in worker processes that can be restarted. A forked child has its own copy of the environments; steps
    that its parent sent and did not receive do not exist there.

    With several agents there is one row per agent: row ``i * num_agents + a`` is agent ``a`` of game ``i``.
    ``num_envs`` counts rows, ``num_games`` counts games, and ``infos["alive"]`` is True for agents still in the game.
    """

    def __init__(
        self,
        spec: Spec,
        num_envs: int = 1,
        *,
        num_threads: int | None = None,
        copy: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **settings: float,
    ) -> None:
        """Create ``num_envs`` environments (with several agents: games).

        ``num_threads``: threads per step; None chooses from the measured duration of a step. ``copy``: return copies
        instead of views. ``autoreset_mode``: when ended episodes are reset: "NextStep", "SameStep" or "Disabled".
        ``max_episode_steps``: None uses the limit of the spec, 0 means no limit. ``render_mode``: None or "rgb_array".
        ``settings``: values for settings that the spec declares."""
        num_envs = check_int("num_envs", num_envs, 1)
        threads = 0 if num_threads is None else check_int("num_threads", num_threads, 1, "None (automatic) or ")
        limit = spec.max_episode_steps
        if max_episode_steps is not None:
            limit = check_int("max_episode_steps", max_episode_steps, 0, "None (the spec's limit) or ")
        check_render_mode(spec, render_mode)
        if not isinstance(autoreset_mode, AutoresetMode):
            require_choice("autoreset_mode", autoreset_mode, [mode.value for mode in AutoresetMode])
        self.native_spec = spec
        self.num_games, self.num_agents = num_envs, spec.num_agents
        self.num_envs = self.num_games * spec.num_agents
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.render_mode = render_mode
        self.metadata = {
            "autoreset_mode": self.autoreset_mode,
            "render_modes": ["rgb_array"] if spec.render_size else [],
        }
        self.single_observation_space, self.single_action_space = spec.observation_space, spec.action_space
        layout = Layout(_layout_fields(spec, self.num_games))
        _require_memory(spec, self.num_games, layout)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.copy = copy

        self._segment: Segment | None = None
        if debug_mode() and not copy:
            # Leases need memory that can be mapped a second time.
            self._segment = Segment.create(layout)
            self._fields = self._segment.views()
        else:
            # Private memory: a forked child continues with its own copy of the environments.
            self._fields = {
                field.name: np.ndarray(field.shape, field.dtype, _aligned_zeros(field.nbytes)) for field in layout
            }
        self._pid = os.getpid()
        self._host = _native.EnvHost(
            spec.address,
            self.num_games,
            _HOST_MODES[self.autoreset_mode],
            limit,
            spec.resolve_settings(settings, arguments=_ARGUMENTS),
            _host_arrays(spec, self._fields),
            threads,
            spec.library,
        )
        if (problem := self._host.init()) is not None:
            raise ValueError(f"{spec.name}: {problem}")
        observations = part_column("observation", self.single_observation_space, self._fields)
        self._final = part_column("final_observation", self.single_observation_space, self._fields)
        self._actions = part_column("action", self.single_action_space, self._fields)
        self._observations = Observations(
            observations, self.single_observation_space, self._fields, self._segment, copy=copy
        )
        # The one batch that every step returns, if it is always the same object.
        self._constant_batch = self._observations.batch() if self._observations.same else None
        self._rewards = read_only(self._fields["rewards"])
        self._terminated = read_only(self._fields["terminated"])
        self._truncated = read_only(self._fields["truncated"])
        all_present = np.ones(self.num_envs, np.bool_)
        self._info_views: dict[str, NDArray[Any]] = {}
        for info in spec.infos:
            self._info_views[info.name] = read_only(self._fields[_field_name("info", info)])
            self._info_views[f"_{info.name}"] = read_only(all_present)
        if spec.num_agents > 1:
            self._info_views["alive"] = read_only(self._fields["alive"])
        self._ended = read_only(self._fields["ended"])
        self._was_reset = False
        self._in_flight: set[int] = set()

    # ----------------------------------------------------------------------------------------------------------- arrays

    @property
    def state(self) -> NDArray[np.uint8]:
        """State of all environments as raw bytes in the layout of the C code. Writable, unchecked."""
        return self._fields["state"]

    @property
    def random(self) -> NDArray[np.uint64]:
        """RNG state of each environment (``random`` in memlane/env.h)."""
        return self._fields["random"]

    @property
    def actions(self) -> Any:
        """Array that the C code reads actions from. ``step(envs.actions)`` avoids the copy of the actions."""
        assert self._actions is not None
        return self._actions.read(copy=False)

    @property
    def final_observations(self) -> Any:
        """Final observation of each environment's latest finished episode, in one batch (``SAME_STEP`` only).

        ``infos["final_obs"]`` has the same rows as an array of objects."""
        assert self._final is not None
        return self._final.read(copy=False)

    @property
    def num_threads(self) -> int:
        """Number of threads that the next step uses."""
        if self.closed:
            self._check_ready("num_threads")
        return self._host.threads

    # --------------------------------------------------------------------------------------------------- reset and step

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments, or where ``options["reset_mask"]`` is True.

        An integer ``seed`` seeds environment ``i`` with ``seed + i``."""
        mask = None
        for name, value in (options or {}).items():
            if name != "reset_mask":
                raise ValueError(
                    f"{self.native_spec.name}: unknown reset option {name!r}{did_you_mean(name, ['reset_mask'])} "
                    "(known: reset_mask)"
                )
            mask = np.ascontiguousarray(reset_mask_of(value, self.num_games))
        self._check_ready("reset")
        seeds = seeds_of(seed, self.num_games)
        if mask is not None and not self._was_reset:
            raise ValueError("the first reset must include all environments; leave out options['reset_mask']")
        self._observations.end()
        self._seed(seeds, mask)
        self._host.reset(mask)
        self._was_reset = True
        infos = self._infos(after_step=False)
        if mask is not None:  # only environments that were reset have infos
            present = np.repeat(mask, self.num_agents)
            infos |= {f"_{info.name}": present.copy() for info in self.native_spec.infos}
        return self._batch(), infos

    def _seed(self, seeds: list[int | None], mask: NDArray[np.bool_] | None) -> None:
        """Set the RNG state of each environment that has a seed; it depends on the seed alone."""
        if not self._was_reset:  # without a seed the first reset uses entropy of the operating system
            seeds = [secrets.randbits(64) if seed is None else seed for seed in seeds]
        seeded = [env for env, seed in enumerate(seeds) if seed is not None and (mask is None or mask[env])]
        self._fields["random"][seeded] = _rng_states([seeds[env] for env in seeded])

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments; ``actions[i]`` is for row i. An array of the action space's dtype is not converted."""
        self._step_host(actions)
        if self._constant_batch is not None:
            infos = self._infos() if self._has_infos else {}
            return self._constant_batch, self._rewards, self._terminated, self._truncated, infos
        rewards, terminated, truncated = self._rewards, self._terminated, self._truncated
        if self.copy:
            rewards, terminated, truncated = rewards.copy(), terminated.copy(), truncated.copy()
        return self._batch(), rewards, terminated, truncated, self._infos()

    def _step_host(self, actions: Any) -> None:
        if self._in_flight or self.closed or not self._was_reset or self._segment is not None:
            self._check_ready("step")
        if self._segment is None and actions is not None:
            ended = self._host.step(actions)
        else:
            ended = _NEEDS_CONVERSION
        if ended < 0:
            ended = self._step_host_slowly(actions, ended)
        self._has_infos = bool(self._info_views) or (ended and self.autoreset_mode is AutoresetMode.SAME_STEP)

    _has_infos: bool | int = False
    """Whether the last step has infos to return."""

    def _step_host_slowly(self, actions: Any, status: int) -> int:
        """Convert actions that the host does not accept as they are, or raise an error that says what is wrong."""
        if status == _NEEDS_CONVERSION:
            require_batch(actions, self.num_envs)
            assert self._actions is not None
            count, content = self._actions.convert_batch(actions)
            require_one_each(count, self.num_envs)
            if self.autoreset_mode is not AutoresetMode.DISABLED or not self._ended.any():
                self._observations.end()
            self._actions.store_batch(0, content)
            status = self._host.step_stored()
        if status == _NEEDS_RESET:
            raise episode_ended(int(np.flatnonzero(self._ended)[0]))
        return status

    def _check_action(self, action: Any) -> None:
        """Raise ``ValueError`` or ``TypeError`` if ``action`` is not the action of one environment."""
        assert self._actions is not None
        self._actions.convert(action)

    def _check_ready(self, caller: str) -> None:
        """Raise if the method ``caller`` cannot be called now."""
        if self.closed:
            raise closed_error(self)
        if self._in_flight and not self._forget_parent():
            raise CallPending(
                f"cannot call `{caller}` while {len(self._in_flight)} environments have pending actions from `send`; "
                "call `recv` first",
                "recv",
            )
        if caller != "reset" and not self._was_reset:
            raise NotReset(f"call `reset()` before `{caller}`")
        if self._segment is not None and os.getpid() != self._pid:
            raise ValueError(
                f"with MEMLANE_DEBUG=1 environments share memory with the process that created them (pid {self._pid}); "
                "create new ones in this process"
            )

    def _forget_parent(self) -> bool:
        """In a forked child, drop the parent's pending steps: its threads do not exist here. True in such a child."""
        if os.getpid() == self._pid:
            return False
        self._pid = os.getpid()
        self._in_flight.clear()
        return True

    def _batch(self) -> Any:
        return self._observations.batch() if self._constant_batch is None else self._constant_batch

    # ------------------------------------------------------------------------------------------------------------ infos

    def _infos(self, after_step: bool = True) -> dict[str, Any]:
        infos = dict(self._info_views)
        if self.copy:
            infos = {name: array.copy() for name, array in infos.items()}
        if after_step and self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended.any():
            infos.update(self._final_infos())
        return infos

    def _final_infos(self) -> dict[str, Any]:
        """Gymnasium's infos for episodes that ended in a step that also reset them."""
        ended = np.repeat(self._ended, self.num_agents) & (self._terminated | self._truncated)
        assert self._final is not None
        final = np.full(self.num_envs, None, object)
        for row in np.flatnonzero(ended).tolist():
            final[row] = self._final.read_row(row)
        final_info: dict[str, Any] = {}
        for info in self.native_spec.infos:
            final_info[info.name] = self._fields[_field_name("final_info", info)].copy()
            final_info[info.name][~ended] = 0  # the other rows still hold values of earlier episodes
            final_info[f"_{info.name}"] = ended.copy()
        return {"final_obs": final, "_final_obs": ended, "final_info": final_info, "_final_info": ended.copy()}

    # ---------------------------------------------------------------------------------------------------- rollout slots

    def step_into(self, actions: Any, slot: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
        """Step, and write the results at step ``index`` of a rollout slot; see ``AsyncVectorEnv.step_into``."""
        self._step_host(actions)
        store_step(slot, index, self._rewards, self._terminated, self._truncated, self._fields)
        return self._infos()

    def reset_into(self, slot: Mapping[str, NDArray[Any]], **kwargs: Any) -> dict[str, Any]:
        """Reset, and write the observations at the first step of a rollout slot; see ``step_into``."""
        _, infos = self.reset(**kwargs)
        store_observations(slot, 0, self._fields)
        return infos

    # ---------------------------------------------------------------------------------------------------- send and recv

    def send(self, actions: Any, env_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None) -> None:
        """Start a step of the environments ``env_ids`` (None: all) on background threads; ``recv`` returns the results.

        ``actions[i]`` is the action of ``env_ids[i]``. An environment can have one pending action."""
        if self.num_agents > 1:
            raise NotImplementedError(
                f"send supports environments with one agent, {self.native_spec.name} has {self.num_agents}; use step"
            )
        if self.closed or not self._was_reset:
            self._check_ready("send")
        self._forget_parent()
        ids = env_ids_of(env_ids, self.num_envs, self._in_flight)
        if not len(ids):
            return
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended[ids].any():
            raise episode_ended(int(ids[np.flatnonzero(self._ended[ids])[0]]))
        require_batch(actions, len(ids))
        assert self._actions is not None
        count, content = self._actions.convert_batch(actions)
        require_one_each(count, len(ids))
        self._observations.end()
        if self._actions.rows is not None:
            self._actions.rows[ids] = content
        else:
            for env, action in zip(
                ids.tolist(), iterate(batch_space(self.single_action_space, len(ids)), actions), strict=True
            ):
                self._actions.write(env, action)
        self._in_flight.update(ids.tolist())
        self._host.send(ids.tolist())

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any], NDArray[np.int64]]:
        """Wait until at least ``min_envs`` steps started by ``send`` are complete, and return all complete ones.

        The result is that of ``step`` followed by the environment ids, in ascending order; all arrays are copies. With
        ``min_envs=0`` it does not wait, and there may be no results. Raises ``CallTimeout`` after ``timeout`` seconds
        (None: no limit); the steps stay pending: call it again."""
        check_timeout(timeout)
        min_envs = check_int("min_envs", min_envs, 0)
        if self.closed:
            self._check_ready("recv")
        if not self._in_flight or self._forget_parent():
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        ready = self._host.receive(min(min_envs, len(self._in_flight)), timeout)
        if ready is None:
            raise CallTimeout(
                f"waited {timeout:g} s for {min_envs} of {len(self._in_flight)} environments with pending actions; "
                "they stay pending: call `recv` again"
            )
        self._in_flight.difference_update(ready)
        ids = np.array(ready, np.int64)
        column = self._observations.column
        assert column is not None
        infos: dict[str, Any] = {name: array[ids] for name, array in self._info_views.items()}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended[ids].any():
            infos.update({name: _take_rows(value, ids) for name, value in self._final_infos().items()})
        observations = _take_rows(column.read(copy=False), ids)
        return observations, self._rewards[ids], self._terminated[ids], self._truncated[ids], infos, ids

    # ----------------------------------------------------------------------------------------------------------- others

    def render(self, index: int = 0) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """Return an RGB image of environment ``index``, of shape (height, width, 3)."""
        self._check_ready("render")
        size = self.native_spec.render_size
        if size is None:
            raise ValueError(f"{self.native_spec.name} cannot be rendered: its spec has no render function")
        width, height = size
        image = np.zeros((height, width, 3), np.uint8)
        self._host.render(index, image)
        return image

    def close_extras(self, **kwargs: Any) -> None:
        del kwargs
        host = getattr(self, "_host", None)
        if host is not None:
            self._observations.end()
            host.close()
        if getattr(self, "_segment", None) is not None:
            assert self._segment is not None
            self._segment.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # __init__ failed, or the interpreter is shutting down
            self.close()

    def __repr__(self) -> str:
        return f"NativeVectorEnv({self.native_spec.name!r}, num_envs={self.num_games})"


def _require_memory(spec: Spec, num_envs: int, layout: Layout) -> None:
    """Raise ``BudgetError`` if there is not enough memory for the arrays and for the bounds of the batched spaces."""
    if layout.nbytes > _SMALL_BYTES:  # reading the limits takes as long as making a few environments
        require(3 * layout.nbytes, f"num_envs={num_envs} of {spec.name}", memory_limits())


_SMALL_BYTES = 1 << 24
_ARGUMENTS = ("num_envs", "num_threads", "copy", "autoreset_mode", "max_episode_steps", "render_mode")
"""Arguments of ``NativeVectorEnv`` that a user may have meant by an unknown setting."""


def _layout_fields(spec: Spec, games: int) -> dict[str, FieldSpec]:
    rows = games * spec.num_agents
    fields: dict[str, FieldSpec] = {
        "state": ("uint8", (max(games * spec.state_bytes, 1),)),
        "random": ("uint64", (games,)),
        "steps": ("int32", (games,)),
        "ended": ("bool", (games,)),
        "rewards": ("float64", (rows,)),
        "terminated": ("bool", (rows,)),
        "truncated": ("bool", (rows,)),
        "alive": ("bool", (rows,)),
    }
    for group, members in _field_groups(spec).items():
        for field in members:
            fields[_field_name(group, field)] = (field.dtype, (rows, *field.shape))
    return fields


def _field_groups(spec: Spec) -> dict[str, tuple[Field, ...]]:
    return {
        "action": spec.actions,
        "observation": spec.observations,
        "final_observation": spec.observations,
        "info": spec.infos,
        "final_info": spec.infos,
    }


def _host_arrays(spec: Spec, fields: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The arguments of ``_native.EnvHost``: one array per name, or a list with one per field of the spec."""
    arrays: dict[str, Any] = {name: array for name, array in fields.items() if "." not in name}
    for group, members in _field_groups(spec).items():
        arrays[f"{group}s"] = [fields[_field_name(group, field)] for field in members]
    return arrays


def _field_name(group: str, field: Field) -> str:
    """The column name that ``memlane.spaces`` uses: a field without a name is the ``value``."""
    return f"{group}.{escape_key(field.name) if field.name else ROOT_NAME}"


def check_int(name: str, value: Any, minimum: int, alternatives: str = "") -> int:
    """Return ``value`` as an int that fits a C ``int32_t``, or raise an error that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number >= 2**31:
        raise ValueError(f"{name} must be at most {2**31 - 1}, found {number}")
    if number < minimum:
        raise ValueError(f"{name} must be {alternatives}an integer of at least {minimum}, found {value!r}")
    return number


def closed_error(env: object) -> ClosedEnvironmentError:
    """Gymnasium's error for a call of a closed environment."""
    return ClosedEnvironmentError(f"Trying to operate on `{type(env).__name__}`, after a call to `close()`.")


def check_render_mode(spec: Spec, render_mode: str | None) -> None:
    if render_mode is not None and (render_mode != "rgb_array" or spec.render_size is None):
        expected = "None" if spec.render_size is None else "None or 'rgb_array'"
        raise ValueError(f"{spec.name}: render_mode must be {expected}, found {render_mode!r}")


def _take_rows(value: Any, ids: NDArray[np.int64]) -> Any:
    if isinstance(value, dict):
        return {name: _take_rows(member, ids) for name, member in value.items()}
    return value[ids]


def _aligned_zeros(nbytes: int) -> memoryview:
    """Zeroed memory aligned to a cache line, with unused memory behind it.

    Hardware prefetchers run past the end of an array. If the next array is there, the thread with the last environments
    takes cache lines away from the thread with the first ones."""
    block = np.zeros(nbytes + 64 + _GAP_BYTES, np.uint8)
    return memoryview(block[-block.ctypes.data % 64 :])  # type: ignore[arg-type]


_GAP_BYTES = 1024
"""1024 Pendulums on two threads take 4.2 us per step with a gap of 512 to 4096 bytes and 4.6 us without, where a cache
line takes 0.25 us from core to core; 1024 CartPoles gain nothing."""


def _rng_states(seeds: list[Any]) -> NDArray[np.uint64]:
    """RNG states from seeds, mixed so that neighbouring seeds give unrelated states (finaliser of SplitMix64)."""
    z = np.array([(seed + 1) & (1 << 64) - 1 for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
