"""NativeVectorEnv: many environments of a C library in this process, as a Gymnasium vector environment.

Everything that a step leaves lies in arrays that the C code writes into and Python shows: nothing is copied unless
asked for, and nothing is allocated. An array that was handed out changes with the next step; ``copy=True`` hands out
copies, and with ``MEMLANE_DEBUG=1`` the use of an old view is an error.
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
from memlane.core import Layout, Segment, WaitTimeout
from memlane.core.layout import FieldSpec
from memlane.core.lease import debug_mode
from memlane.native.spec import FieldOf, Spec
from memlane.spaces.paths import ROOT_NAME, escape_key
from memlane.vector.arguments import env_ids_of, reset_mask_of, seeds_of
from memlane.vector.observations import Observations, part_column, read_only
from memlane.vector.rollout_slot import store_observations, store_step

_MODES = {AutoresetMode.NEXT_STEP: 0, AutoresetMode.SAME_STEP: 1, AutoresetMode.DISABLED: 2}


class NativeVectorEnv(VectorEnv[Any, Any, Any]):
    """``num_envs`` environments of ``spec``.

    >>> from memlane.native import make
    >>> envs = make("CartPole-v1", num_envs=3)
    >>> observations, infos = envs.reset(seed=1)
    >>> later, rewards, terminated, truncated, infos = envs.step([0, 1, 1])
    >>> later is observations  # the same memory, with new content; copy=True hands out copies
    True
    >>> envs.close()

    With several agents there is a row for each: row ``i * num_agents + a`` is agent ``a`` of game ``i``, ``num_envs``
    is the number of rows, ``num_games`` that of games, and ``infos["alive"]`` says who is in the game.
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
        """``num_envs`` counts environments; with several agents, games.

        ``num_threads``: None lets the host choose from what a step takes. ``max_episode_steps``: None is the
        environment's own limit, 0 none. ``settings`` are the environment's."""
        num_envs = whole("num_envs", num_envs, 1)
        threads = 0 if num_threads is None else whole("num_threads", num_threads, 1, "None (as many as pay) or ")
        limit = spec.max_episode_steps
        if max_episode_steps is not None:
            limit = whole("max_episode_steps", max_episode_steps, 0, "None (its own), 0 (no limit) or ")
        check_render_mode(spec, render_mode)
        self.spec_of_env = spec
        self.num_games, self.num_agents = num_envs, spec.num_agents
        self.num_envs = self.num_games * spec.num_agents
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.render_mode = render_mode
        self.metadata = {
            "autoreset_mode": self.autoreset_mode,
            "render_modes": ["rgb_array"] if spec.render_size else [],
        }
        self.single_observation_space, self.single_action_space = spec.observation_space, spec.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.copy = copy

        layout = Layout(_fields(spec, self.num_games))
        self._segment: Segment | None = None
        if debug_mode() and not copy:
            # Leases need memory that can be mapped twice.
            self._segment = Segment.create(layout)
            self._fields = self._segment.views()
        else:
            # Private: a forked child goes on with environments of its own.
            self._fields = layout.views(_zeros(layout.nbytes))
        self._pid = os.getpid()
        self._host = _native.EnvHost(
            spec.address,
            self.num_games,
            _MODES[self.autoreset_mode],
            limit,
            spec.settings_from(settings),
            _arrays(spec, self._fields),
            threads,
            spec.library,
        )
        if (wrong := self._host.init()) is not None:
            raise ValueError(f"{spec.name}: {wrong}")
        observations = part_column("observation", self.single_observation_space, self._fields)
        self._final = part_column("final_observation", self.single_observation_space, self._fields)
        self._actions = part_column("action", self.single_action_space, self._fields)
        self._observations = Observations(
            observations, self.single_observation_space, self._fields, self._segment, copy=copy
        )
        self._lent = self._observations.batch() if self._observations.same else None
        shown = [self._fields[name] for name in ("rewards", "terminated", "truncated")]
        self._rewards, self._terminated, self._truncated = (read_only(array) for array in shown)
        everybody = np.ones(self.num_envs, np.bool_)
        self._info_views: dict[str, NDArray[Any]] = {}
        for one in spec.infos:
            self._info_views[one.name] = read_only(self._fields[_field_name("info", one)])
            self._info_views[f"_{one.name}"] = read_only(everybody)
        if spec.num_agents > 1:
            self._info_views["alive"] = read_only(self._fields["alive"])
        self._ended = read_only(self._fields["ended"])
        self._has_begun = False
        self._away: set[int] = set()

    # ----------------------------------------------------------------------------------------------------------- arrays

    @property
    def state(self) -> NDArray[np.uint8]:
        """The raw state of all environments, as their C code lays it out. Writeable, at your own risk."""
        return self._fields["state"]

    @property
    def random(self) -> NDArray[np.uint64]:
        """The random word of each environment."""
        return self._fields["random"]

    @property
    def actions(self) -> Any:
        """Where actions lie. Written here and given to ``step``, they are not copied; otherwise they are."""
        assert self._actions is not None
        return self._actions.read(copy=False)

    @property
    def final_observations(self) -> Any:
        """With ``SAME_STEP``, the last observation of each environment's last episode: rows of one array, where
        ``infos["final_obs"]`` has one object for each."""
        assert self._final is not None
        return self._final.read(copy=False)

    @property
    def num_threads(self) -> int:
        """How many threads the next step uses."""
        if self.closed:
            self._running("num_threads")
        return self._host.threads

    # --------------------------------------------------------------------------------------------------- reset and step

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A whole number seeds environment ``i`` with ``seed + i``. ``options["reset_mask"]``: only some."""
        mask = None
        for name, value in (options or {}).items():
            if name != "reset_mask":
                raise ValueError(f"{self.spec_of_env.name}: there is no option {name!r}; there is: reset_mask")
            mask = np.ascontiguousarray(reset_mask_of(value, self.num_games))
        self._running("reset")
        seeds = seeds_of(seed, self.num_games)
        if mask is not None and not self._has_begun:
            raise ValueError("the first reset must be of all environments; leave out options['reset_mask']")
        self._observations.end()
        self._seed(seeds, mask)
        self._host.reset(mask)
        self._has_begun = True
        infos = self._infos(of_step=False)
        if mask is not None:  # the others tell nothing
            told = np.repeat(mask, self.num_agents)
            infos |= {f"_{one.name}": told.copy() for one in self.spec_of_env.infos}
        return self._batch(), infos

    def _seed(self, seeds: list[int | None], mask: NDArray[np.bool_] | None) -> None:
        """Where there is a seed, the random word becomes one that depends on nothing else."""
        if not self._has_begun:  # whoever gives no seed gets one that nobody can guess
            seeds = [secrets.randbits(64) if seed is None else seed for seed in seeds]
        which = [env for env, seed in enumerate(seeds) if seed is not None and (mask is None or mask[env])]
        self._fields["random"][which] = _words([seeds[env] for env in which])

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        self._advance(actions)
        if self._lent is not None:
            infos = self._infos() if self._told else {}
            return self._lent, self._rewards, self._terminated, self._truncated, infos
        rewards, terminated, truncated = self._rewards, self._terminated, self._truncated
        if self.copy:
            rewards, terminated, truncated = rewards.copy(), terminated.copy(), truncated.copy()
        return self._batch(), rewards, terminated, truncated, self._infos()

    def _advance(self, actions: Any) -> None:
        if self._away or self.closed or not self._has_begun or self._segment is not None:
            self._running("step")
        ended = -1
        if self._segment is None and actions is not None:
            ended = self._host.step(actions)
        if ended < 0:
            ended = self._advance_carefully(actions, ended)
        self._told = bool(self._info_views) or (ended and self.autoreset_mode is AutoresetMode.SAME_STEP)

    _told: bool | int = False

    def _advance_carefully(self, actions: Any, refused: int) -> int:
        """What the host did not take as it is: checked, converted or an error that says what is wrong."""
        if actions is None:
            raise TypeError(f"expected actions for {self.num_envs} environments, found None")
        if refused == -1:
            assert self._actions is not None
            count, content = self._actions.convert_batch(actions)
            if count != self.num_envs:
                raise ValueError(f"expected actions for {self.num_envs} environments, found {count}")
            if self.autoreset_mode is not AutoresetMode.DISABLED or not self._ended.any():
                self._observations.end()
            self._actions.store_batch(0, content)
            refused = self._host.step_stored()
        if refused == -2:
            env = int(np.flatnonzero(self._ended)[0])
            raise AssertionError(
                f"environment {env} has ended, and with AutoresetMode.DISABLED it is the caller who resets it: "
                "reset(options={'reset_mask': mask})"
            )
        return refused

    def _running(self, caller: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._away and not self._forgets_parent():
            raise ValueError(
                f"`{caller}` must wait: {len(self._away)} environments were sent actions; `recv` them first"
            )
        if caller != "reset" and not self._has_begun:
            raise ValueError(f"`{caller}` needs `reset()` first")
        if self._segment is not None and os.getpid() != self._pid:
            raise ValueError(
                "in debug mode environments share their memory with the process that made them; make new ones here"
            )

    def _forgets_parent(self) -> bool:
        """Whether this is a forked child, in which nothing is under way: the threads stayed with the parent."""
        if os.getpid() == self._pid:
            return False
        self._pid = os.getpid()
        self._away.clear()
        return True

    def _batch(self) -> Any:
        return self._observations.batch() if self._lent is None else self._lent

    # ------------------------------------------------------------------------------------------------------------ infos

    def _infos(self, of_step: bool = True) -> dict[str, Any]:
        infos = dict(self._info_views)
        if self.copy:
            infos = {name: array.copy() for name, array in infos.items()}
        if of_step and self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended.any():
            infos.update(self._last_words())
        return infos

    def _last_words(self) -> dict[str, Any]:
        """As Gymnasium tells of episodes that ended in a step that also reset them."""
        ended = np.repeat(self._ended, self.num_agents) & (self._terminated | self._truncated)
        assert self._final is not None
        final = np.full(self.num_envs, None, object)
        for row in np.flatnonzero(ended).tolist():
            final[row] = self._final.read_row(row)
        last: dict[str, Any] = {}
        for one in self.spec_of_env.infos:
            last[one.name] = self._fields[_field_name("final_info", one)].copy()
            last[one.name][~ended] = 0  # of those that did not end it has what an earlier episode left
            last[f"_{one.name}"] = ended.copy()
        return {"final_obs": final, "_final_obs": ended, "final_info": last, "_final_info": ended.copy()}

    # ---------------------------------------------------------------------------------------------------------- a ring

    def step_into(self, actions: Any, slot: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
        """A step straight into a slot of a rollout ring: see ``memlane.vector.AsyncVectorEnv.step_into``."""
        self._advance(actions)
        store_step(slot, index, self._rewards, self._terminated, self._truncated, self._fields)
        return self._infos()

    def reset_into(self, slot: Mapping[str, NDArray[Any]], **kwargs: Any) -> dict[str, Any]:
        """``reset``, with the observations where the first step begins; see ``step_into``."""
        _, infos = self.reset(**kwargs)
        store_observations(slot, 0, self._fields)
        return infos

    # ---------------------------------------------------------------------------------------------------- send and recv

    def send(self, actions: Any, env_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None) -> None:
        """Let some environments make a step, on threads of their own: ``actions[i]`` is for ``env_ids[i]``. ``recv``
        has what comes of it."""
        if self.num_agents > 1:
            raise NotImplementedError("send is for environments with one agent; use step")
        if self.closed or not self._has_begun:
            self._running("send")
        self._forgets_parent()
        ids = env_ids_of(env_ids, self.num_envs, self._away)
        if not len(ids):
            return
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended[ids].any():
            env = int(ids[np.flatnonzero(self._ended[ids])[0]])
            raise AssertionError(f"environment {env} has ended: reset(options={{'reset_mask': mask}}) it first")
        assert self._actions is not None
        count, content = self._actions.convert_batch(actions)
        if count != len(ids):
            raise ValueError(f"expected actions for {len(ids)} environments, found {count}")
        self._observations.end()
        if self._actions.rows is not None:
            self._actions.rows[ids] = content
        else:
            for env, action in zip(
                ids.tolist(), iterate(batch_space(self.single_action_space, len(ids)), actions), strict=True
            ):
                self._actions.write(env, action)
        self._away.update(ids.tolist())
        self._host.send(ids.tolist())

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any], NDArray[np.int64]]:
        """What at least ``min_envs`` of those that were sent an action have made of it: all that are ready, as copies
        in the order of their numbers, which come last."""
        if self.closed:
            self._running("recv")
        if not self._away or self._forgets_parent():
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "send")
        ready = self._host.receive(min(max(min_envs, 1), len(self._away)), timeout)
        if ready is None:
            raise WaitTimeout(
                f"waited {timeout:g} s for {min_envs} of {len(self._away)} environments that were sent actions"
            )
        self._away.difference_update(ready)
        ids = np.array(ready, np.int64)
        column = self._observations.column
        assert column is not None
        infos: dict[str, Any] = {name: array[ids] for name, array in self._info_views.items()}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended[ids].any():
            infos.update({name: _taken(value, ids) for name, value in self._last_words().items()})
        observations = _taken(column.read(copy=False), ids)
        return observations, self._rewards[ids], self._terminated[ids], self._truncated[ids], infos, ids

    # ----------------------------------------------------------------------------------------------------------- others

    def render(self, index: int = 0) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The picture of one environment, as rows of red, green and blue."""
        self._running("render")
        size = self.spec_of_env.render_size
        if size is None:
            raise ValueError(f"{self.spec_of_env.name} has no picture")
        width, height = size
        picture = np.zeros((height, width, 3), np.uint8)
        self._host.render(index, picture)
        return picture

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
        with contextlib.suppress(Exception):  # half made, or the interpreter is half gone
            self.close()

    def __repr__(self) -> str:
        return f"NativeVectorEnv({self.spec_of_env.name!r}, num_envs={self.num_games})"


def _fields(spec: Spec, games: int) -> dict[str, FieldSpec]:
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
    for part, several in _parts(spec).items():
        for one in several:
            fields[_field_name(part, one)] = (one.dtype, (rows, *one.shape))
    return fields


def _parts(spec: Spec) -> dict[str, tuple[FieldOf, ...]]:
    return {
        "action": spec.actions,
        "observation": spec.observations,
        "final_observation": spec.observations,
        "info": spec.infos,
        "final_info": spec.infos,
    }


def _arrays(spec: Spec, fields: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """As the host wants them: one array each, or one for each field of the spec."""
    arrays: dict[str, Any] = {name: array for name, array in fields.items() if "." not in name}
    for part, several in _parts(spec).items():
        arrays[f"{part}s"] = [fields[_field_name(part, one)] for one in several]
    return arrays


def _field_name(part: str, one: FieldOf) -> str:
    """As ``memlane.spaces`` calls it: what is not part of a dict is the ``value``."""
    return f"{part}.{escape_key(one.name) if one.name else ROOT_NAME}"


def whole(name: str, value: Any, least: int, also: str = "") -> int:
    """A whole number that fits into 32 bits, as C counts."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not least <= number < 2**31:
        raise ValueError(f"{name} must be {also}a whole number of at least {least}, found {value!r}")
    return number


def check_render_mode(spec: Spec, render_mode: str | None) -> None:
    if render_mode is not None and (render_mode != "rgb_array" or spec.render_size is None):
        possible = "None" if spec.render_size is None else "None or 'rgb_array'"
        raise ValueError(f"{spec.name}: render_mode must be {possible}, found {render_mode!r}")


def _taken(value: Any, ids: NDArray[np.int64]) -> Any:
    if isinstance(value, dict):
        return {name: _taken(one, ids) for name, one in value.items()}
    return value[ids]


def _zeros(nbytes: int) -> memoryview:
    """Aligned to cache lines, which is what a layout expects of the memory that it is placed in."""
    block = np.zeros(nbytes + 64, np.uint8)
    return memoryview(block[-block.ctypes.data % 64 :])  # type: ignore[arg-type]


def _words(seeds: list[Any]) -> NDArray[np.uint64]:
    """Random words from seeds: neighbouring seeds give words that have nothing in common (SplitMix64's finish)."""
    z = np.array([(seed + 1) & (1 << 64) - 1 for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
