"""AsyncVectorEnv: environments in worker processes, a drop-in replacement for ``gymnasium.vector.AsyncVectorEnv``.

It has the same constructor, methods, return values, exceptions and log lines. It adds: fewer workers than environments,
one segment of shared memory for everything of a step, ``send`` and ``recv`` for slow environments, and workers that are
restarted when they die. ``step_segment`` describes the shared memory, ``worker`` the other end, and ``supervisor`` owns
everything that is pending.
"""

from __future__ import annotations

import inspect
import multiprocessing as mp
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import gymnasium.vector.async_vector_env
import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, CustomSpaceError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate
from numpy.typing import NDArray

from memlane.core import Segment, WaitTimeout
from memlane.core.arguments import as_count, check_timeout
from memlane.core.fork_guard import ForkGuard
from memlane.core.layout import FieldSpec
from memlane.core.suggestions import did_you_mean, excerpt
from memlane.spaces import fields_of
from memlane.spaces.objects import split_fields
from memlane.spaces.registered import RegisteredColumn
from memlane.vector.actions import has_forms
from memlane.vector.arguments import (
    check_seconds,
    env_ids_of,
    require_batch,
    require_choice,
    require_one_each,
    reset_mask_of,
    seeds_of,
)
from memlane.vector.errors import CallTimeout
from memlane.vector.infos import InfoColumn, Kind, PackedInfos, as_range, merge, pack, unpack
from memlane.vector.messages import Failure, Message, Ready
from memlane.vector.observations import Observations
from memlane.vector.placement import Placement, choose_placement
from memlane.vector.rollout_slot import store_observations, store_step
from memlane.vector.step_segment import StepSegment, StepSegmentSpec, split_envs
from memlane.vector.supervisor import AsyncState, OnError, Supervisor
from memlane.vector.worker_pool import WorkerPool

_DEFAULT, _WAITING_STEP = AsyncState.DEFAULT, AsyncState.WAITING_STEP  # quicker to find, see ``supervisor``
_CLOSE_SECONDS = 5.0
"""How long ``close`` waits for workers to exit before it kills them."""
CheckActions = Literal["env", "strict"]
_SYNONYMS = {"start_method": "context", "num_processes": "num_workers", "n_workers": "num_workers"}
"""Arguments of other libraries' vector environments."""


class AsyncVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments that run in parallel in worker processes, with everything of a step in shared memory.

    A drop-in replacement for ``gymnasium.vector.AsyncVectorEnv``:

    >>> import gymnasium
    >>> envs = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2)
    >>> observations, infos = envs.reset(seed=1)
    >>> observations, rewards, terminated, truncated, infos = envs.step([0, 1, 0, 1])
    >>> observations.shape, rewards.tolist()
    ((4, 4), [1.0, 1.0, 1.0, 1.0])

    ``send`` and ``recv`` do not wait for the slowest environment:

    >>> envs.send([0, 1, 0, 1])
    >>> observations, rewards, terminated, truncated, infos, env_ids = envs.recv(min_envs=2)
    >>> len(env_ids) >= 2
    True
    >>> while len(env_ids) < 4:  # the results of the others
    ...     env_ids = [*env_ids, *envs.recv()[-1]]
    >>> envs.close()

    **Who may call.** One thread of the process that made it. In a forked child of it, ``close`` does nothing, and other
    methods raise ``UsedAfterFork``. Between an ``_async``
    method and its ``_wait``, or between ``send`` and the last ``recv``, other calls raise ``AlreadyPendingCallError``.

    **What a batch is.** With ``copy=True`` (the default) every batch of observations is the caller's own. With
    ``copy=False`` it is a read-only view of the shared memory, on loan until the next ``reset``, ``step`` or ``send``;
    with ``MEMLANE_DEBUG=1`` a use after that raises ``StaleView``. Rewards, flags, infos and the results of ``recv``
    are always copies.

    **When a worker dies**, the call that waits for it ends within a second. With ``on_error="raise"`` it raises
    ``WorkerDied``, which names the worker, its environments and the signal, and counts its steps; every later call
    raises ``ClosedEnvironmentError``. With ``on_error="restart"`` the worker is restarted and the call returns: the
    episodes of its environments are truncated with reward 0, ``infos["restarted"]`` has the cause, and the other
    environments lose nothing. The same holds for an environment that raises (restarted alone, within its worker) and
    for a worker that hangs longer than ``step_timeout`` (killed). More than ``max_restarts`` within ``restart_window``
    seconds raise ``RestartLimit``. When this process dies, its workers end within a second.
    """

    __signature__: ClassVar[inspect.Signature]
    """What ``help`` and editors show. Without it they would show the arguments of ``__new__``, which are any."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature_of(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance; with a custom ``worker``, which needs Gymnasium's pipes, one of Gymnasium's class."""
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in kwargs.keys() - parameters.keys():
                hint = did_you_mean(name, parameters.keys() - {"self"}, _SYNONYMS)
                raise TypeError(f"AsyncVectorEnv got an unknown argument {name!r}{hint}")
        arguments = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        if arguments.pop("worker", None) is None:
            return super().__new__(cls)
        gymnasium_class = gymnasium.vector.async_vector_env.AsyncVectorEnv
        unknown = arguments.keys() - inspect.signature(gymnasium_class).parameters.keys() - {"self"}
        if unknown:
            raise TypeError(
                f"a custom worker cannot be combined with {sorted(unknown)}: only memlane's workers use them"
            )
        return gymnasium_class(*args, **kwargs)

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | None = None,
        capacity: Any = None,
        action_capacity: Any = None,
        info_spec: Mapping[str, FieldSpec] | None = None,
        shared_assets: Mapping[str, NDArray[Any]] | None = None,
        on_error: OnError = "raise",
        max_restarts: int = 10,
        restart_window: float = 60.0,
        step_timeout: float | None = None,
        start_timeout: float | None = 600.0,
        pin_workers: bool | None = None,
        check_actions: CheckActions = "env",
    ) -> None:
        """The first nine arguments are Gymnasium's.

        Args:
            env_fns: Functions that build the environments, one for each; lambdas work with every ``context``.
            shared_memory: Whether observations are in shared memory; otherwise they are pickled. A custom space
                inside of a Dict or Tuple is pickled in any case, unless it is registered.
            copy: Whether batches of observations are copies, or views on loan until the next step.
            context: How workers are started: "forkserver" (default), "fork" or "spawn".
            daemon: Whether workers are daemonic; a daemonic worker cannot have child processes.
            worker: A custom worker function; Gymnasium's own class is returned for it.
            observation_mode: "same", "different", or a tuple of batch and single observation space.
            autoreset_mode: When ended episodes are reset: "NextStep", "SameStep" or "Disabled".
            max_concurrency: The largest number of environments that run at the same time: here, of workers.
            num_workers: Worker processes; each runs a contiguous range of the environments. Default: one per core. With
                0, this process steps the environments: faster for a few cheap ones, but a crash ends the program.
            capacity: The largest observations of Graph and Sequence spaces; see ``memlane.spaces.Capacity``.
            action_capacity: The largest actions of Graph and Sequence spaces.
            info_spec: Numeric infos that go through shared memory: key to (dtype, shape). Other infos are pickled,
                except those that consist of floats.
            shared_assets: Arrays that all workers share read-only, as ``memlane.vector.shared_assets()``.
            on_error: What happens when a worker dies or an environment raises: "raise" the error, or "restart" the
                worker or the environment and truncate the episode.
            max_restarts: Restarts that are allowed within ``restart_window``.
            restart_window: Seconds over which restarts are counted.
            step_timeout: Seconds after which a worker that does not answer is killed and counts as dead; None: never.
            start_timeout: Seconds within which each worker has to build its environments, at the start (``StartError``)
                and at a restart; None: no limit. Without effect if ``num_workers`` is 0.
            pin_workers: Whether each worker is pinned to one core. Default: when there are as many workers as cores;
                without it the kernel now and then runs two on one core and none on the other.
            check_actions: Who checks actions: "env", the environments alone, which get them in the form, dtype and
                precision in which they were given, as with Gymnasium; or "strict": before anything is stepped they are
                checked against the action space and cast to its dtype, and what does not fit is an error.
        """
        self._guard = ForkGuard(f"this `{type(self).__name__}`", "make another in this process")
        _check_env_fns(env_fns)
        require_choice("on_error", on_error, ("raise", "restart"))
        require_choice("check_actions", check_actions, ("env", "strict"))
        if context is not None:
            require_choice("context", context, mp.get_all_start_methods(), "None, ")
        if not isinstance(autoreset_mode, AutoresetMode):
            require_choice("autoreset_mode", autoreset_mode, [mode.value for mode in AutoresetMode])
        _check_observation_mode(observation_mode)
        as_count("max_restarts", max_restarts, 0)
        check_seconds("restart_window", restart_window)
        check_seconds("step_timeout", step_timeout, optional=True)
        check_seconds("start_timeout", start_timeout, optional=True)
        info_spec = _check_info_spec(info_spec or {})
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.max_concurrency = _check_concurrency(max_concurrency)
        self.num_envs = len(env_fns)
        self.on_error = on_error
        self.max_restarts = max_restarts
        self.restart_window = restart_window
        self.step_timeout = step_timeout
        self.start_timeout = start_timeout
        self.check_actions = check_actions
        # A restart ends an episode, and in this mode the end has to show the last observation.
        self._keeps_observations = on_error == "restart" and self.autoreset_mode is AutoresetMode.SAME_STEP
        self._unreceived_infos: dict[int, dict[str, Any]] = {}
        """Infos of environments that were sent an action, until ``recv`` returns them."""

        if num_workers == 0 and step_timeout is not None:
            raise ValueError(
                f"step_timeout={step_timeout:g} needs num_workers=1 or more: with 0 the environments run in "
                "this process, where none that hangs can be killed"
            )
        placement = choose_placement(self.num_envs, num_workers, self.max_concurrency, pin_workers)
        self.num_workers = placement.num_workers
        assets = {name: _create_asset(name, array) for name, array in (shared_assets or {}).items()}
        self._workers = WorkerPool(
            env_fns,
            split_envs(self.num_envs, max(self.num_workers, 1)),
            context=context,
            daemon=daemon,
            name=type(self).__name__,
            autoreset_mode=self.autoreset_mode,
            restart_envs=on_error == "restart",
            placement=placement,
            assets=assets,
            start_timeout=start_timeout,
        )
        ready = self._workers.start()
        try:
            self._set_spaces(ready)
            self._steps = self._create_steps(capacity, action_capacity, self._complete_info_spec(info_spec))
            self._workers.bind(self._steps)
        except BaseException:
            self._workers.kill()
            raise
        writer = self._steps.actions if check_actions == "strict" else self._steps.shared_actions
        self._try_write_actions: Callable[[Any], bool] = _refuse if writer is None else writer.try_write_all
        """Writes a batch that has the dtype and shape of the action space."""
        steps, segment = self._steps, self._steps.segment
        self._observations = Observations(
            steps.observations,
            steps.spec.observation_space,
            segment.views(),
            segment,
            copy=copy,
            objects=steps.objects,
        )
        self._supervisor = Supervisor(
            self._workers,
            self._steps,
            on_error=on_error,
            max_restarts=max_restarts,
            restart_window=restart_window,
            step_timeout=step_timeout,
        )

    @property
    def placement(self) -> Placement:
        """How many workers there are, where they run, and why, including the changes made since they started."""
        return self._supervisor.review.placement

    @property
    def restarts(self) -> int:
        """Workers and environments that were restarted."""
        return self._supervisor.restarts

    # ------------------------------------------------------------------------------------------------------ set-up

    def _set_spaces(self, ready: list[Ready]) -> None:
        first = ready[0]
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        observation_spaces = [part.observation_spaces[obs] for part in ready for obs, _ in part.space_indices]
        action_spaces = [part.action_spaces[action] for part in ready for _, action in part.space_indices]
        self.single_action_space = action_spaces[0]
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        mode = self.observation_mode
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
        elif mode == "same":
            self.single_observation_space = observation_spaces[0]
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        else:
            self.single_observation_space = observation_spaces[0]
            self.observation_space = batch_differing_spaces(observation_spaces)
        for env, space in enumerate(observation_spaces):
            if mode == "same" and space != self.single_observation_space:
                raise RuntimeError(
                    "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation "
                    "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead. "
                    f"Environment {env} has {space}, environment 0 has {observation_spaces[0]}."
                )
            if mode != "same" and not is_space_dtype_shape_equiv(space, self.single_observation_space):
                raise RuntimeError(
                    "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
                    "observation spaces do not share a common shape and dtype. "
                    f"Environment {env} has {space}, expected {self.single_observation_space}."
                )
        for env, space in enumerate(action_spaces):
            if space != self.single_action_space:
                raise RuntimeError(
                    f"Some environments have an action space different from `{self.single_action_space}`. In order to "
                    f"batch actions, the action spaces from all environments must be equal. Environment {env} has "
                    f"{space}."
                )

    def _complete_info_spec(self, info_spec: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
        """Called when the spaces are known, for subclasses that declare more infos."""
        return info_spec

    def _create_steps(self, capacity: Any, action_capacity: Any, info_spec: dict[str, FieldSpec]) -> StepSegment:
        registered, objects = self._place_observations(capacity)
        action_space: Space[Any] | None = self.single_action_space
        try:
            fields_of(self.single_action_space, 1, action_capacity, "action")
        except (CustomSpaceError, TypeError):
            action_space = None  # actions travel in messages
        steps = StepSegment.create(
            StepSegmentSpec(
                self.num_envs,
                self._workers.ranges,
                self.single_observation_space if registered is None else None,
                action_space,
                registered,
                objects,
                capacity,
                action_capacity,
                info_spec,
                self.check_actions == "env" and action_space is not None and has_forms(action_space),
            )
        )
        for column in steps.objects.values():
            column.fill_with_zeros()
        return steps

    def _place_observations(self, capacity: Any) -> tuple[RegisteredColumn | None, dict[str, Space[Any]]]:
        """Where observations are that are not fields of the step segment: the column of a registered space, and the
        parts that travel in messages, by path."""
        space = self.single_observation_space
        if not self.shared_memory:
            return None, {"": space}
        try:
            fields_of(space, 1, capacity, "observation")
            return None, {}
        except CustomSpaceError:
            try:
                return RegisteredColumn.create(space, self.num_envs, capacity), {}
            except CustomSpaceError as error:
                _, objects = split_fields(space, 1, capacity)
                if "" not in objects:
                    return None, objects
                raise ValueError(
                    "Using `AsyncVectorEnv(..., shared_memory=True)` caused an error, you can disable this feature "
                    "with `shared_memory=False` however this is slower."
                ) from error

    # ------------------------------------------------------------------------------------------------------- reset

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``. An integer ``seed`` seeds environment ``i``
        with ``seed + i``."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin a ``reset``; ``reset_wait`` returns its results."""
        self._require_idle("reset_async")
        seeds = seeds_of(seed, self.num_envs)
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = reset_mask_of(options.pop("reset_mask"), self.num_envs)
        self._observations.end()
        self._supervisor.reset(seeds, mask, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for a ``reset_async``. ``CallTimeout`` after ``timeout`` seconds leaves it pending."""
        self._require_pending("reset_wait", AsyncState.WAITING_RESET)
        infos, _ = self._finish("reset_wait", timeout)
        return self._batch(), infos

    # -------------------------------------------------------------------------------------------------------- step

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments; ``actions[i]`` is for environment i."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a ``step``; ``step_wait`` returns its results."""
        supervisor = self._supervisor
        if supervisor.pending_call is not _DEFAULT or self.closed or supervisor.broken or not self._guard.owned:
            self._require_idle("step_async")
        if self._try_write_actions(actions) or self._write_actions(actions):
            self._observations.end()
            supervisor.step()
        else:
            self._send_actions(self._single_actions(actions))

    def _write_actions(self, actions: Any) -> bool:
        """Write actions that do not have the dtype and shape of the space; False if they have to travel in messages."""
        require_batch(actions, self.num_envs)
        column, shared = self._steps.actions, self._steps.shared_actions
        if self.check_actions == "strict" and column is not None:
            count, content = column.convert_batch(actions)
            require_one_each(count, self.num_envs)
            column.store_batch(0, content)
            return True
        if shared is None or (batch := shared.encode(actions)) is None:
            return False
        require_one_each(batch[0], self.num_envs)
        shared.store(None, batch[1])
        return True

    def _single_actions(self, actions: Any) -> list[Any]:
        """The action of each environment, as Gymnasium takes it from a batch."""
        try:
            return list(iterate(self.action_space, actions))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            text = f"expected actions in the form of {self.action_space}, found {excerpt(actions)}: {error}"
            raise type(error)(text) from error

    def _send_actions(self, actions: list[Any]) -> None:
        """Begin a step with actions that travel in messages."""
        require_one_each(len(actions), self.num_envs)
        self._observations.end()
        messages = [("step", actions[envs.start : envs.stop]) for envs in self._workers.ranges]
        self._supervisor.send_messages(AsyncState.WAITING_STEP, messages)

    def step_each_async(self, actions: Sequence[Any]) -> None:
        """Begin a ``step`` with a sequence of actions, one for each environment. It differs from ``step_async`` for
        Dict and Tuple spaces, where a batch is a dict or tuple of arrays."""
        self._require_idle("step_each_async")
        require_batch(actions, self.num_envs)
        column = self._steps.actions
        if self.check_actions == "env" or column is None:
            self._send_actions(list(actions))
            return
        require_one_each(len(actions), self.num_envs)
        for env, content in enumerate([column.convert(action) for action in actions]):
            column.store(env, content)
        self._observations.end()
        self._supervisor.step()

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for a ``step_async``. ``CallTimeout`` after ``timeout`` seconds leaves it pending: call ``step_wait``
        again."""
        supervisor = self._supervisor
        if supervisor.pending_call is not _WAITING_STEP or self.closed or supervisor.broken or not self._guard.owned:
            self._require_pending("step_wait", _WAITING_STEP)
        infos, _ = self._finish("step_wait", timeout)
        steps = self._steps
        return self._batch(), steps.rewards.copy(), steps.terminated.copy(), steps.truncated.copy(), infos

    def step_into(self, actions: Any, slot: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
        """Step all environments and write the results into a slot of a rollout ring; returns the infos.

        The slot's arrays have the shape (environments, steps, ...). ``rewards``, ``dones`` and ``truncated`` are
        written at ``index``; the observations after the step go to ``obs`` at ``index + 1``, or to ``last_obs`` after
        the last step. Nested observations go to ``obs.<path>``."""
        self.step_async(actions)
        self._require_pending("step_into", AsyncState.WAITING_STEP)
        infos, _ = self._finish("step_into", None)
        if self._keeps_observations:
            self._keep_observations()
        steps = self._steps
        store_step(slot, index, steps.rewards, steps.terminated, steps.truncated, self._rows_for_slot())
        return infos

    def reset_into(self, slot: Mapping[str, NDArray[Any]], **kwargs: Any) -> dict[str, Any]:
        """``reset``, with the observations written to ``obs`` of the slot's first step; see ``step_into``."""
        self.reset_async(**kwargs)
        infos, _ = self._finish("reset_into", None)
        if self._keeps_observations:
            self._keep_observations()
        store_observations(slot, 0, self._rows_for_slot())
        return infos

    def _rows_for_slot(self) -> dict[str, NDArray[Any]]:
        if self._steps.spec.observation_space is None or self._steps.objects:
            raise NotImplementedError(
                "step_into and reset_into need observations in arrays of shared memory, found "
                f"shared_memory={self.shared_memory} and {self.single_observation_space}; use step and reset"
            )
        return self._steps.segment.views()

    # ------------------------------------------------------------------------------------------------ send and recv

    def send(self, actions: Any, env_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None) -> None:
        """Begin a step of some environments: ``actions[i]`` is for ``env_ids[i]``. ``recv`` returns the results.

        Actions in a form that shared memory has no room for, such as lists of lists, are checked and cast as with
        ``check_actions="strict"``."""
        self._require_running()
        if self._supervisor.pending_call not in (AsyncState.DEFAULT, AsyncState.WAITING_RECV):
            self._require_idle("send")
        column = self._steps.actions
        if column is None:
            raise NotImplementedError(
                f"`send` needs actions in shared memory, and {self.single_action_space} cannot be stored there; use "
                "`step`, or declare action_capacity for a Graph or Sequence space"
            )
        ids = env_ids_of(env_ids, self.num_envs, self._supervisor.sent_envs)
        if not len(ids):
            return
        require_batch(actions, len(ids))
        shared = self._steps.shared_actions
        batch = None if shared is None else shared.encode(actions)
        count, content = column.convert_batch(actions) if batch is None else batch
        require_one_each(count, len(ids))
        self._observations.end()
        if shared is not None and batch is not None:
            shared.store(ids, content)
        else:
            column.store_rows(ids, content)
            if shared is not None:
                shared.mark_own_form(ids)
        self._supervisor.send(ids)

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any], NDArray[np.int64]]:
        """Wait for at least ``min_envs`` of the environments that were sent an action, and return the results of all
        that are done: observations, rewards, terminated, truncated, infos and the indices of the environments, in
        ascending order. Row i of everything, infos included, belongs to ``env_ids[i]``; all of it is copies. With
        ``min_envs=0`` it does not wait, and there may be no results. ``CallTimeout`` after ``timeout`` seconds leaves
        all of them pending: call ``recv`` again."""
        check_timeout(timeout)
        min_envs = as_count("min_envs", min_envs, 0)
        self._require_pending("recv", AsyncState.WAITING_RECV)
        min_envs = min(min_envs, len(self._supervisor.sent_envs))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            env_ids = self._supervisor.wait_until_ready(min_envs, deadline)
        except WaitTimeout:
            raise CallTimeout(
                f"The call to `recv` has timed out after {timeout} second(s); {len(self._supervisor.ready_envs())} of "
                f"{min_envs} environments are ready."
            ) from None
        return self._receive(env_ids)

    def _receive(self, env_ids: NDArray[np.int64]) -> tuple[Any, Any, Any, Any, dict[str, Any], NDArray[np.int64]]:
        failures = []
        for message in self._supervisor.read_messages(env_ids):
            self._unreceived_infos.update(unpack(message.infos))
            failures.extend(message.failures)
            self._store_observations(message)
        self._supervisor.mark_received(env_ids)
        self._raise_failures(failures, AsyncState.WAITING_RECV)
        envs = env_ids.tolist()
        env_infos = [
            (row, {**self._unreceived_infos.pop(env, {}), **self._declared_info(env)}) for row, env in enumerate(envs)
        ]
        infos = merge(len(envs), [pack(env_infos)])
        if self._supervisor.keeps_observations:
            for env in envs:
                self._supervisor.keep_observation(env, self._steps.observations.read_row(env))
        steps = self._steps
        observations = steps.observations.load_rows(env_ids)
        return observations, steps.rewards[env_ids], steps.terminated[env_ids], steps.truncated[env_ids], infos, env_ids

    def _declared_info(self, env: int) -> dict[str, Any]:
        return {key: column.rows[env].copy() for key, (column, present) in self._steps.infos.items() if present[env]}

    # -------------------------------------------------------------------------------------------------------- call

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of all environments, or read an attribute; returns one result for each."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a ``call``; ``call_wait`` returns its results."""
        self._require_idle("call_async")
        self._supervisor.send_messages(
            AsyncState.WAITING_CALL, [("call", name, args, kwargs)] * len(self._workers.ranges)
        )

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for a ``call_async``. ``CallTimeout`` after ``timeout`` seconds leaves it pending."""
        self._require_pending("call_wait", AsyncState.WAITING_CALL)
        _, results = self._finish("call_wait", timeout)
        return tuple(result for worker in range(len(self._workers.ranges)) for result in results[worker])

    def apply(self, function: Callable[[Env[Any, Any]], Any], env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Call ``function(env)`` in the workers, for all environments or those of ``env_ids``; returns the results in
        the order of ``env_ids``."""
        self._require_idle("apply")
        ids = list(range(self.num_envs)) if env_ids is None else [int(env) for env in env_ids]
        if unknown := [env for env in ids if not 0 <= env < self.num_envs]:
            raise IndexError(f"env_ids must be from 0 to {self.num_envs - 1}, found {unknown[0]}")
        indices = [[env - envs.start for env in ids if env in envs] for envs in self._workers.ranges]
        self._supervisor.send_messages(AsyncState.WAITING_CALL, [("apply", function, part) for part in indices])
        _, results = self._finish("apply", None)
        result_of: dict[int, Any] = {}
        for worker, envs in enumerate(self._workers.ranges):
            result_of.update(zip([env for env in ids if env in envs], results[worker], strict=True))
        return tuple(result_of[env] for env in ids)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of all environments."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of all environments: a list or tuple has one value for each, another value is for all."""
        self._require_running()
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._require_idle("set_attr")
        messages = [("set_attr", name, list(values[envs.start : envs.stop])) for envs in self._workers.ranges]
        self._supervisor.send_messages(AsyncState.WAITING_CALL, messages)
        self._finish("set_attr", None)

    def render(self) -> tuple[Any, ...] | None:
        """The frames of all environments."""
        return self.call("render")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the environments' random generators."""
        return self.get_attr("np_random")

    # ----------------------------------------------------------------------------------------------- pending calls

    def _require_running(self) -> None:
        self._guard.require()
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._supervisor.broken is not None:
            hint = " (on_error='restart' replaces workers and envs that fail)" if self.on_error == "raise" else ""
            raise ClosedEnvironmentError(
                f"{self._supervisor.broken}; close() this `{type(self).__name__}` and make a new one{hint}"
            )

    def _require_idle(self, caller: str) -> None:
        self._require_running()
        pending = self._supervisor.pending_call
        if pending is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{caller}` while waiting for a pending call to `{pending.value}` to complete.", pending.value
            )

    def _require_pending(self, caller: str, call: AsyncState) -> None:
        self._require_running()
        if self._supervisor.pending_call is not call:
            before = "send" if call is AsyncState.WAITING_RECV else f"{call.value}_async"
            raise NoAsyncCallError(f"Calling `{caller}` without any prior call to `{before}`.", call.value)

    def _finish(self, caller: str, timeout: float | None) -> tuple[dict[str, Any], dict[int, Any]]:
        """Wait until all workers are done with the pending call; returns infos, and the result of each worker. After a
        timeout the call is still pending, and the same ``_wait`` may be called again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        call = self._supervisor.pending_call
        try:
            received = self._supervisor.finish(deadline)
        except WaitTimeout:
            raise CallTimeout(f"The call to `{caller}` has timed out after {timeout} second(s).") from None
        floats = self._supervisor.take_float_infos()
        if not (received or floats or self._steps.infos):
            return {}, {}
        messages = [message for worker in sorted(received) for message in received[worker]]
        for message in messages:
            self._store_observations(message)
        self._raise_failures([failure for message in messages for failure in message.failures], call)
        packed = [message.infos for message in messages if message.infos] + floats + self._declared_infos()
        results = {worker: messages[-1].result for worker, messages in received.items()}
        return self._merge_infos(packed), results

    def _merge_infos(self, packed: list[PackedInfos]) -> Any:
        """The infos as ``step`` and ``reset`` return them; not called if there are none. For adapters to libraries
        that have another form."""
        return merge(self.num_envs, packed)

    def _store_observations(self, message: Message) -> None:
        for path, values in message.observations.items():
            self._steps.objects[path].values.update(values)

    def _raise_failures(self, failures: list[Failure], call: AsyncState) -> None:
        """Log all failures and raise the last, as Gymnasium does."""
        for failure in failures:
            logger.error(f"Received the following error from Worker-{failure.env} - Shutting it down")
            logger.error("%s", failure.trace)
        if failures:
            logger.error("Raising the last exception back to the main process.")
            last = failures[-1]
            if call is not AsyncState.WAITING_CALL:
                self._supervisor.mark_broken(f"environment {last.env} raised {last.type_name}: {last.text}")
            handle = self._workers.handles[self._workers.worker_of_env[last.env]]
            raise last.to_exception(handle.seeds[last.env - handle.envs.start])

    # --------------------------------------------------------------------------------------------------------- results

    def _batch(self) -> Any:
        """The observations of all environments, as the caller gets them."""
        if self._keeps_observations:
            self._keep_observations()
        return self._observations.batch()

    def _keep_observations(self) -> None:
        """Keep copies of the observations that are handed out now: a restart may have to show them again."""
        self._supervisor.keep_observations(self._steps.observations.read_each())

    def _declared_infos(self) -> list[PackedInfos]:
        """The infos that are declared in ``info_spec``, packed as those in messages are."""
        packed: PackedInfos = {}
        for key, (column, present) in self._steps.infos.items():
            kind: Kind = "numbers" if column.rows.ndim == 1 else "arrays"
            envs = np.flatnonzero(present)
            if len(envs) == self.num_envs:
                packed[key] = InfoColumn(range(self.num_envs), kind, column.rows)  # `merge` copies them
            elif len(envs):
                packed[key] = InfoColumn(as_range(envs.tolist()), kind, column.rows[envs])
        return [packed] if packed else []

    # --------------------------------------------------------------------------------------------------------- closing

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers. Those that have not exited after ``timeout`` seconds (default: 5) are killed; with
        ``terminate`` all are killed at once. Does nothing in a forked child."""
        if not self._guard.owned:
            return
        pending = self._supervisor.pending_call
        if pending is not AsyncState.DEFAULT and not self._supervisor.broken:
            logger.warn(f"Calling `close` while waiting for a pending call to `{pending.value}` to complete.")
        if terminate:
            self._workers.kill()
        else:
            self._workers.close(_CLOSE_SECONDS if timeout is None else timeout)
        self._observations.end()
        self._steps.close()

    def __del__(self) -> None:
        if not self.closed and hasattr(self, "_supervisor"):
            self.close(terminate=True)


def _signature_of(vector_env: type[AsyncVectorEnv]) -> inspect.Signature:
    signature = inspect.signature(vector_env.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


AsyncVectorEnv.__signature__ = _signature_of(AsyncVectorEnv)


def _check_env_fns(env_fns: Any) -> None:
    if callable(env_fns) or isinstance(env_fns, Env):
        raise TypeError(f"env_fns must be a list, with one function for each environment, found {_one_env(env_fns)}")
    if isinstance(env_fns, str) or not hasattr(env_fns, "__len__"):
        raise TypeError(f"env_fns must be a list of functions that build environments, found {env_fns!r}")
    if not len(env_fns):
        raise ValueError("env_fns must have at least one function that builds an environment")
    for env, env_fn in enumerate(env_fns):
        if isinstance(env_fn, Env):
            raise TypeError(
                f"env_fns[{env}] must be a function that builds an environment, found {_one_env(env_fn)}: it has to be "
                "built in its worker"
            )
        if not callable(env_fn):
            raise TypeError(
                f"env_fns[{env}] must be a function that builds an environment, such as lambda: gymnasium.make(...), "
                f"found {env_fn!r}"
            )


def _one_env(env: Any) -> str:
    """An environment, or a function that builds one, that was passed in place of a list, and what to write instead."""
    if not isinstance(env, Env):
        return "one function; write [function] * 4 for four environments"
    name = env.spec.id if env.spec is not None else None
    build = f"lambda: gymnasium.make({name!r})" if name is not None else f"lambda: {type(env.unwrapped).__name__}(...)"
    return f"an environment; write [{build}]"


def _check_info_spec(info_spec: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
    for key, spec in info_spec.items():
        if not isinstance(spec, tuple | list) or len(spec) != 2:
            raise ValueError(f"info_spec[{key!r}] must be a pair (dtype, shape), found {spec!r}")
    return dict(info_spec)


def _check_concurrency(max_concurrency: Any) -> int | None:
    if max_concurrency is None:
        return None
    if not isinstance(max_concurrency, int | np.integer):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
    if max_concurrency < 1:
        raise ValueError(f"`max_concurrency` must be a positive integer or None, got {max_concurrency}.")
    return int(max_concurrency)


def _check_observation_mode(mode: Any) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif mode not in ("same", "different"):
        hint = did_you_mean(mode, ("same", "different")) if isinstance(mode, str) else ""
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of batch and single observation "
            f"space, actual got {mode}{hint}"
        )


def _refuse(actions: Any) -> bool:  # noqa: ARG001
    return False


def _create_asset(name: str, array: NDArray[Any]) -> Segment:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"shared_assets[{name!r}] must be a numpy array, found {type(array).__name__}")
    segment = Segment.create({"array": (array.dtype, array.shape)})
    segment["array"][...] = array
    return segment
