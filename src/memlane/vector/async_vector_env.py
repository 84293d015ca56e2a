"""AsyncVectorEnv: environments in worker processes, in place of ``gymnasium.vector.AsyncVectorEnv``.

The same constructor, methods, return values, exceptions and log lines. What it adds: fewer workers than environments,
everything of a step in one segment of shared memory, ``send`` and ``recv`` for stragglers, and workers that are
replaced when they die. ``steps`` says how a step travels, ``worker`` what happens at the other end, ``conductor`` who
waits for whom.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium.vector.async_vector_env
import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, CustomSpaceError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from memlane.core import Segment, WaitTimeout
from memlane.core.layout import FieldSpec
from memlane.spaces import Column, fields_of
from memlane.spaces.registered import RegisteredColumn
from memlane.vector import infos as entries
from memlane.vector.arguments import env_ids_of, reset_mask_of, seeds_of
from memlane.vector.errors import CallTimeout, WorkerDied
from memlane.vector.messages import Failure, Message, Ready
from memlane.vector.observations import Observations
from memlane.vector.rollout_slot import store_observations, store_step
from memlane.vector.step_segment import StepSegment, StepSegmentSpec, split_envs
from memlane.vector.supervisor import OnError, Supervisor
from memlane.vector.worker_handles import WorkerPool

_CLOSE_SECONDS = 5.0


class AsyncState(enum.Enum):
    """What a vector environment is waiting for."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"
    WAITING_RECV = "recv"


class AsyncVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments that run in parallel in worker processes.

    >>> import gymnasium
    >>> envs = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2)
    >>> observations, infos = envs.reset(seed=1)
    >>> observations.shape
    (4, 4)
    >>> envs.close()
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A custom ``worker`` speaks Gymnasium's pipes, so Gymnasium's own class serves it."""
        given = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        if given.pop("worker", None) is None:
            return super().__new__(cls)
        theirs = gymnasium.vector.async_vector_env.AsyncVectorEnv
        ours = given.keys() - inspect.signature(theirs).parameters.keys() - {"self"}
        if ours:
            raise TypeError(f"with a custom worker, {sorted(ours)} mean nothing: only memlane's workers know them")
        return theirs(*args, **kwargs)

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
        pin_workers: bool | None = None,
    ) -> None:
        """The first nine arguments are Gymnasium's. ``max_concurrency`` bounds how many environments run at a time:
        here that is the number of workers.

        Args:
            num_workers: Processes; each runs a contiguous range of the environments. As many as there are cores unless
                told otherwise.
            capacity: How large observations of Graph and Sequence spaces can become; see ``memlane.spaces.Capacity``.
            action_capacity: The same for actions.
            info_spec: Numeric infos that travel in shared memory, name to (dtype, shape); the others are pickled.
            shared_assets: Arrays that every worker gets read-only, without a copy: ``memlane.vector.shared_assets()``.
            on_error: "raise" what went wrong, or "restart": only the environments that it hit are made anew and reset;
                they are truncated, and ``infos["restarted"]`` says why.
            max_restarts: With "restart", as many within ``restart_window`` seconds; one more is raised.
            step_timeout: Seconds after which a worker that does not answer is killed and treated as dead.
            pin_workers: Keep each worker on a core of its own. Unless told, that is done when there are as many workers
                as cores: left alone, the kernel now and then runs two on one core and none on the other.
        """
        if not env_fns:
            raise ValueError("env_fns must have at least one function that makes an environment")
        if on_error not in ("raise", "restart"):
            raise ValueError(f"on_error must be 'raise' or 'restart', found {on_error!r}")
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.max_concurrency = _checked_concurrency(max_concurrency)
        self.num_envs = len(env_fns)
        self.on_error = on_error
        self.max_restarts = max_restarts
        self.restart_window = restart_window
        self.step_timeout = step_timeout
        # A restart ends an episode, and in this mode the end shows the last observation.
        self._restarts_need_last = on_error == "restart" and self.autoreset_mode is AutoresetMode.SAME_STEP
        self._state = AsyncState.DEFAULT
        self._told: dict[int, dict[str, Any]] = {}
        """Infos of environments that were sent an action, until ``recv`` hands them out."""

        self.num_workers = _number_of_workers(num_workers, self.max_concurrency, self.num_envs)
        assets = {name: _asset(array) for name, array in (shared_assets or {}).items()}
        self._workers = WorkerPool(
            env_fns,
            split_envs(self.num_envs, self.num_workers),
            context=context,
            daemon=daemon,
            name=type(self).__name__,
            autoreset_mode=self.autoreset_mode,
            restart_envs=on_error == "restart",
            pin=pin_workers,
            assets=assets,
        )
        ready = self._workers.start()
        try:
            self._take_spaces(ready)
            self._steps = self._make_steps(capacity, action_capacity, self._info_spec(dict(info_spec or {})))
            self._workers.bind(self._steps)
        except BaseException:
            self._workers.kill()
            raise
        segment, space = self._steps.segment, self._steps.spec.observation_space
        self._observations = Observations(self._steps.observations, space, segment.views(), segment, copy=copy)
        self._supervisor = Supervisor(
            self._workers,
            self._steps,
            on_error=on_error,
            max_restarts=max_restarts,
            restart_window=restart_window,
            step_timeout=step_timeout,
        )
        self._sent = self._supervisor.sent

    @property
    def restarts(self) -> int:
        """How many workers or environments were made anew."""
        return self._supervisor.restarts

    # ------------------------------------------------------------------------------------------------------ set-up

    def _take_spaces(self, ready: list[Ready]) -> None:
        first = ready[0]
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        observation_spaces = [said.observation_spaces[which[0]] for said in ready for which in said.space_indices]
        action_spaces = [said.action_spaces[which[1]] for said in ready for which in said.space_indices]
        self.single_action_space = action_spaces[0]
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        mode = self.observation_mode
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise TypeError(
                    f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
                )
            self.observation_space, self.single_observation_space = mode
        elif mode == "same":
            self.single_observation_space = observation_spaces[0]
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        elif mode == "different":
            self.single_observation_space = observation_spaces[0]
            self.observation_space = batch_differing_spaces(observation_spaces)
        else:
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {mode}"
            )
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

    def _info_spec(self, given: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
        return given

    def _make_steps(self, capacity: Any, action_capacity: Any, info_spec: dict[str, FieldSpec]) -> StepSegment:
        observation_space: Space[Any] | None = None
        registered: RegisteredColumn | None = None
        if self.shared_memory:
            try:
                fields_of(self.single_observation_space, 1, capacity)
                observation_space = self.single_observation_space
            except CustomSpaceError:
                registered = self._registered(capacity)
        action_space: Space[Any] | None = self.single_action_space
        try:
            fields_of(self.single_action_space, 1, action_capacity)
        except (CustomSpaceError, TypeError):
            action_space = None  # actions travel as messages
        ranges = [handle.envs for handle in self._workers.handles]
        plan = StepSegmentSpec(
            self.num_envs, ranges, observation_space, action_space, registered, capacity, action_capacity, info_spec
        )
        self._by_message: Any = None
        if observation_space is None and registered is None:
            self._by_message = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
            self._single: list[Any] = [None] * self.num_envs
            with contextlib.suppress(CustomSpaceError):  # without it, the first reset must be one of all of them
                empty = iterate(batch_space(self.single_observation_space, self.num_envs), self._by_message)
                self._single = [deepcopy(one) for one in empty]
        return StepSegment.create(plan)

    def _registered(self, capacity: Any) -> RegisteredColumn:
        try:
            return RegisteredColumn.create(self.single_observation_space, self.num_envs, capacity)
        except CustomSpaceError as error:
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                "`shared_memory=False` however this is slower."
            ) from error

    # ------------------------------------------------------------------------------------------------------- reset

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self._begin("reset_async")
        seeds = seeds_of(seed, self.num_envs)
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = reset_mask_of(options.pop("reset_mask"), self.num_envs)
        self._observations.end()
        handles = self._workers.handles
        which = [[(k, seeds[env]) for k, env in enumerate(handle.envs) if mask[env]] for handle in handles]
        self._give(AsyncState.WAITING_RESET, self._supervisor.tell, [("reset", some, options) for some in which])
        for handle, some in zip(handles, which, strict=True):
            for k, env_seed in some:
                handle.seeds[k] = env_seed

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        self._waiting("reset_wait", AsyncState.WAITING_RESET)
        infos, _ = self._gather("reset_wait", timeout)
        return self._batch(), infos

    # -------------------------------------------------------------------------------------------------------- step

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        if self._state is not AsyncState.DEFAULT or self.closed or self._supervisor.broken:
            self._begin("step_async")
        column = self._steps.actions
        if column is None:
            singles = list(iterate(self.action_space, actions))
            self._require_one_each(len(singles))
            self._observations.end()
            ranges = [handle.envs for handle in self._workers.handles]
            messages = [("step", singles[envs.start : envs.stop]) for envs in ranges]
            self._give(AsyncState.WAITING_STEP, self._supervisor.tell, messages)
        else:
            if not column.fill(actions):
                count, content = column.convert_batch(actions)
                self._require_one_each(count)
                column.store_batch(0, content)
            self._observations.end()
            self._give(AsyncState.WAITING_STEP, self._supervisor.step)

    def _require_one_each(self, actions: int | None) -> None:
        if actions != self.num_envs:
            raise ValueError(f"expected actions for {self.num_envs} environments, found {actions}")

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._state is not AsyncState.WAITING_STEP or self.closed or self._supervisor.broken:
            self._waiting("step_wait", AsyncState.WAITING_STEP)
        infos, _ = self._gather("step_wait", timeout)
        steps = self._steps
        return self._batch(), steps.rewards.copy(), steps.terminated.copy(), steps.truncated.copy(), infos

    def step_into(self, actions: Any, slot: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
        """A step straight into a slot of a rollout ring, whose arrays have a row for each environment and then one for
        each step: ``rewards``, ``dones`` and ``truncated`` at ``index``, and the observations that came of it where the
        next step begins: ``obs`` at ``index + 1``, or ``last_obs`` after the last. Nested observations go to
        ``obs.<path>``. Returns the infos."""
        self.step_async(actions)
        self._waiting("step_into", AsyncState.WAITING_STEP)
        infos, _ = self._gather("step_into", None)
        if self._restarts_need_last:
            self._keep_all()
        steps = self._steps
        store_step(slot, index, steps.rewards, steps.terminated, steps.truncated, self._rows_for_slots())
        return infos

    def reset_into(self, slot: Mapping[str, NDArray[Any]], **kwargs: Any) -> dict[str, Any]:
        """``reset``, with the observations where the first step begins; see ``step_into``."""
        self.reset_async(**kwargs)
        infos, _ = self._gather("reset_into", None)
        if self._restarts_need_last:
            self._keep_all()
        store_observations(slot, 0, self._rows_for_slots())
        return infos

    def _rows_for_slots(self) -> dict[str, NDArray[Any]]:
        if self._steps.spec.observation_space is None:
            raise NotImplementedError("observations that do not lie in shared memory cannot go into a slot")
        return self._steps.segment.views()

    # ------------------------------------------------------------------------------------------------ send and recv

    def send(self, actions: Any, env_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None) -> None:
        """Let some environments make a step: ``actions[i]`` is for ``env_ids[i]``. ``recv`` has what comes of it."""
        self._running()
        if self._state not in (AsyncState.DEFAULT, AsyncState.WAITING_RECV):
            self._begin("send")
        column = self._column("send")
        ids = env_ids_of(env_ids, self.num_envs, self._sent)
        if not len(ids):
            return
        count, content = column.convert_batch(actions)
        if count != len(ids):
            raise ValueError(f"expected actions for {len(ids)} environments, found {count}")
        self._observations.end()
        column.store_rows(ids, content)
        arrivals = Counter(self._workers.worker_of_env[ids].tolist())
        self._steps.requested_step.add_each(ids, 1)
        self._sent.update(ids.tolist())
        self._state = AsyncState.WAITING_RECV  # whoever is interrupted now may still `recv`
        self._supervisor.send(arrivals)

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any], NDArray[np.int64]]:
        """What at least ``min_envs`` of the environments that were sent an action have made of it: all that are ready,
        as copies in the order of their numbers, which come last. ``infos`` has a row for each of them, too."""
        self._waiting("recv", AsyncState.WAITING_RECV)
        min_envs = min(min_envs, len(self._sent))
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self._supervisor.quorum.arrived
            ready = self._ready()
            if len(ready) >= min_envs:
                return self._take(ready)
            try:
                self._supervisor.wait_for_more(seen, min_envs - len(ready), deadline)
            except WaitTimeout:
                raise CallTimeout(
                    f"The call to `recv` has timed out after {timeout} second(s); {len(self._ready())} of {min_envs} "
                    "environments are ready."
                ) from None

    def _ready(self) -> NDArray[np.int64]:
        steps = self._steps
        ids = np.fromiter(self._sent, np.int64, len(self._sent))
        ids.sort()
        asked, answered = np.empty_like(ids), np.empty_like(ids)
        steps.requested_step.load_into(ids, asked)
        steps.completed_step.load_into(ids, answered)
        ready: NDArray[np.int64] = ids[answered == asked]
        return ready

    def _take(self, ids: NDArray[np.int64]) -> tuple[Any, Any, Any, Any, dict[str, Any], NDArray[np.int64]]:
        mine = ids.tolist()
        owners = [self._workers.handles[worker] for worker in sorted(set(self._workers.worker_of_env[ids].tolist()))]
        while True:
            try:
                if len(mine) == len(self._sent):
                    self._supervisor.settle()
                self._supervisor.hear(owners, None)
                break
            except WorkerDied as death:  # in the middle of what it had to say
                self._supervisor.heal(death)
        failures = []
        for messages in self._supervisor.heard.values():
            for message in messages:
                self._told.update(entries.unpack(message.infos))
                failures.extend(message.failures)
                self._see(message)
        self._supervisor.heard.clear()
        self._sent.difference_update(mine)
        if not self._sent:
            self._state = AsyncState.DEFAULT
        self._raise_failures(failures, AsyncState.WAITING_RECV)
        steps = self._steps
        told = [(row, {**self._told.pop(env, {}), **self._declared_by(env)}) for row, env in enumerate(mine)]
        infos = entries.merge(len(ids), [entries.pack(told)])
        self._keep_last(mine)
        return self._some(ids), steps.rewards[ids], steps.terminated[ids], steps.truncated[ids], infos, ids

    def _declared_by(self, env: int) -> dict[str, Any]:
        return {key: column.rows[env].copy() for key, (column, told) in self._steps.infos.items() if told[env]}

    def _some(self, ids: NDArray[np.int64]) -> Any:
        if self._steps.observations is not None:
            return self._steps.observations.load_rows(ids)
        room: Any = create_empty_array(self.single_observation_space, n=len(ids))
        # Copies: what is batched as a tuple would be ours, and seen again in the batch of a reset of some others.
        singles = [deepcopy(self._single[env]) for env in ids.tolist()]
        return concatenate(self.single_observation_space, singles, room)

    def _column(self, caller: str) -> Column:
        if self._steps.actions is None:
            raise NotImplementedError(
                f"`{caller}` needs actions that lie in shared memory; {self.single_action_space} do not (use `step`)"
            )
        return self._steps.actions

    # -------------------------------------------------------------------------------------------------------- call

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self._begin("call_async")
        messages = [("call", name, args, kwargs)] * self.num_workers
        self._give(AsyncState.WAITING_CALL, self._supervisor.tell, messages)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        self._waiting("call_wait", AsyncState.WAITING_CALL)
        _, results = self._gather("call_wait", timeout)
        return tuple(result for worker in range(self.num_workers) for result in results[worker])

    def apply(self, function: Callable[[Env[Any, Any]], Any], env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """``function(env)`` in the workers, for all or some environments; what it returns, in the order of
        ``env_ids``."""
        self._begin("apply")
        ids = list(range(self.num_envs)) if env_ids is None else [int(env) for env in env_ids]
        ranges = [handle.envs for handle in self._workers.handles]
        here = [[env - envs.start for env in ids if env in envs] for envs in ranges]
        self._give(AsyncState.WAITING_CALL, self._supervisor.tell, [("apply", function, which) for which in here])
        _, results = self._gather("apply", None)
        answered: dict[int, Any] = {}
        for handle in self._workers.handles:
            answered.update(zip([env for env in ids if env in handle.envs], results[handle.worker], strict=True))
        return tuple(answered[env] for env in ids)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        self._running()
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._begin("set_attr")
        ranges = [handle.envs for handle in self._workers.handles]
        messages = [("set_attr", name, list(values[envs.start : envs.stop])) for envs in ranges]
        self._give(AsyncState.WAITING_CALL, self._supervisor.tell, messages)
        self._gather("set_attr", None)

    def render(self) -> tuple[Any, ...] | None:
        return self.call("render")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        return self.get_attr("np_random")

    # ----------------------------------------------------------------------------------------------------- waiting

    def _running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._supervisor.broken is not None:
            raise ClosedEnvironmentError(
                f"{self._supervisor.broken}; close() this `{type(self).__name__}` and make a new one, or make it with "
                "on_error='restart'"
            )

    def _begin(self, caller: str) -> None:
        self._running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{caller}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )

    def _give(self, state: AsyncState, give: Callable[..., None], *arguments: Any) -> None:
        """Give a command, and be waiting for it: also if Ctrl-C comes when it has just been given."""
        self._state = state
        try:
            give(*arguments)
        except BaseException:
            if not self._supervisor.pending:
                self._state = AsyncState.DEFAULT
            raise

    def _waiting(self, caller: str, state: AsyncState) -> None:
        self._running()
        if self._state is not state:
            before = "send" if state is AsyncState.WAITING_RECV else f"{state.value}_async"
            raise NoAsyncCallError(f"Calling `{caller}` without any prior call to `{before}`.", state.value)

    def _gather(self, caller: str, timeout: float | None) -> tuple[dict[str, Any], dict[int, Any]]:
        """Wait until all workers have done what was asked: infos, and each worker's result. A timeout leaves the call
        pending: the same ``_wait`` may be called again, and nothing of a batch that is half done is seen."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            heard = self._supervisor.finish(deadline)
        except WaitTimeout:
            raise CallTimeout(f"The call to `{caller}` has timed out after {timeout} second(s).") from None
        except Exception:
            self._state = AsyncState.DEFAULT
            raise
        state, self._state = self._state, AsyncState.DEFAULT
        if not heard and not self._steps.infos:
            return {}, {}
        said = [message for worker in sorted(heard) for message in heard[worker]]
        for message in said:
            self._see(message)
        self._raise_failures([failure for message in said for failure in message.failures], state)
        packed = [message.infos for message in said if message.infos] + self._declared()
        results = {worker: messages[-1].result for worker, messages in heard.items()}
        return entries.merge(self.num_envs, packed), results

    def _see(self, message: Message) -> None:
        """Take over the observations that travelled in a message."""
        for env, observation in message.observations.items():
            self._single[env] = observation

    def _raise_failures(self, failures: list[Failure], state: AsyncState) -> None:
        for failure in failures:
            logger.error(f"Received the following error from Worker-{failure.env} - Shutting it down")
            logger.error("%s", failure.trace)
        if failures:
            logger.error("Raising the last exception back to the main process.")
            last = failures[-1]
            if state is not AsyncState.WAITING_CALL:
                self._supervisor.broken = f"environment {last.env} raised {last.type_name}: {last.text}"
            handle = next(handle for handle in self._workers.handles if last.env in handle.envs)
            raise last.to_exception(handle.seeds[last.env - handle.envs.start])

    # --------------------------------------------------------------------------------------------------------- results

    def _batch(self) -> Any:
        if self._restarts_need_last:
            self._keep_all()
        if self._steps.observations is None:
            batch = concatenate(self.single_observation_space, self._single, self._by_message)
            return self._observations.hand_out(batch)
        return self._observations.batch()

    def _keep_all(self) -> None:
        """Keep what is handed out now: a restart may have to show it again."""
        column = self._steps.observations
        if column is None:
            self._supervisor.last_observations = deepcopy(self._single)
        elif isinstance(column, RegisteredColumn):
            self._supervisor.last_observations = column.load_each()
        else:
            self._supervisor.last_observations = list(iterate(self.observation_space, column.read(copy=True)))

    def _keep_last(self, envs: list[int]) -> None:
        column, last = self._steps.observations, self._supervisor.last_observations
        if last is not None:
            for env in envs:
                last[env] = deepcopy(self._single[env] if column is None else column.read_one(env))

    def _declared(self) -> list[entries.PackedInfos]:
        """What was declared in ``info_spec``, as the entries that messages have."""
        found: entries.PackedInfos = {}
        for key, (column, told) in self._steps.infos.items():
            kind: entries.Kind = "numbers" if column.rows.ndim == 1 else "arrays"
            here = np.flatnonzero(told)
            if len(here) == self.num_envs:
                found[key] = entries.InfoColumn(
                    range(self.num_envs), kind, column.rows
                )  # to be copied by whoever merges
            elif len(here):
                found[key] = entries.InfoColumn(entries.as_range(here.tolist()), kind, column.rows[here])
        return [found] if found else []

    # --------------------------------------------------------------------------------------------------------- closing

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: those that do not end by themselves within ``timeout`` (default: 5 s) are killed."""
        if self._state is not AsyncState.DEFAULT and not self._supervisor.broken:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
        if terminate:
            self._workers.kill()
        else:
            self._workers.close(_CLOSE_SECONDS if timeout is None else timeout)
        self._observations.end()
        self._steps.close()

    def __del__(self) -> None:
        if not self.closed and hasattr(self, "_observations"):
            self.close(terminate=True)


def _number_of_workers(num_workers: int | None, max_concurrency: int | None, num_envs: int) -> int:
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0))
    elif num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more, found {num_workers}")
    return min(num_workers, num_envs, max_concurrency or num_envs)


def _checked_concurrency(max_concurrency: Any) -> int | None:
    if max_concurrency is None:
        return None
    if not isinstance(max_concurrency, int | np.integer):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
    if max_concurrency < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
    return int(max_concurrency)


def _asset(array: NDArray[Any]) -> Segment:
    segment = Segment.create({"array": (array.dtype, array.shape)})
    segment["array"][...] = array
    return segment
