"""The worker process: it builds a range of the environments and steps them when the parent issues a command.

One thread builds, steps and closes every environment. The loop ends with the command ``COMMAND_CLOSE`` or with the
parent: a worker whose parent dies ends within a second, even if an environment hangs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from memlane import _native
from memlane._native import (
    COMMAND_CLOSE,
    COMMAND_SEND,
    COMMAND_STEP,
    PROGRESS_CURRENT_ENV,
    PROGRESS_MESSAGES_SENT,
    PROGRESS_STEPS,
)
from memlane.core import Peer, Segment
from memlane.core.children import THREAD_LIMITS
from memlane.core.liveness import die_with, leave_signals_to
from memlane.core.suggestions import excerpt
from memlane.vector.channel import Channel
from memlane.vector.errors import episode_ended
from memlane.vector.infos import pack, pack_floats
from memlane.vector.messages import Failure, Message, Ready, pickle_for_parent
from memlane.vector.step_segment import SPIN_NS, StepSegment
from memlane.vector.step_writer import StepWriter

Actions = Sequence[Any] | NDArray[Any]
"""One action for each environment of a worker."""


@dataclass
class Task:
    """What a worker is started with."""

    worker: int
    """Index of the worker."""
    envs: range
    """Indices of its environments in the batch."""
    env_fns: bytes
    """Functions that build the environments, pickled with cloudpickle: lambdas and functions of a notebook work."""
    autoreset_mode: AutoresetMode
    """When an environment whose episode has ended is reset."""
    restart_envs: bool
    """Whether the worker replaces an environment that raises."""
    core: int | None
    """The core that the worker is pinned to."""
    spin: bool
    """Whether it spins before it sleeps: not when there are more workers than cores."""
    assets: dict[str, Segment] = field(default_factory=dict)
    """The arrays of ``shared_assets``."""


def work(task: Task, connection: Connection, parent: Peer) -> None:
    """The worker's main function."""
    die_with(parent)
    leave_signals_to(parent)
    if task.core is not None:
        os.sched_setaffinity(0, {task.core})
    # For libraries that are loaded from here on: with a thread per core in each worker, the threads would share cores.
    for name in THREAD_LIMITS:
        os.environ.setdefault(name, "1")
    use_assets(task.assets)
    channel = Channel(connection)
    envs: list[Env[Any, Any]] = []
    try:
        try:
            env_fns: Sequence[Callable[[], Env[Any, Any]]] = cloudpickle.loads(task.env_fns)
            envs.extend(map(build_env, env_fns, task.envs))
            channel.send(pickle_for_parent(describe_envs(envs)))
        except BaseException as error:
            failure = Failure.from_exception(error, task.worker, task.envs.start + len(envs), 0)
            channel.send(pickle_for_parent(failure))
            return
        steps: StepSegment | None = cloudpickle.loads(channel.receive())
        if steps is None:  # the parent has refused the environments
            return
        worker = Worker(task, env_fns, envs, channel, steps)
        channel.send(pickle_for_parent(None))  # the step segment is mapped: the parent may issue commands
        worker.execute_commands()
    except EOFError:
        pass  # the parent has closed the channel
    finally:
        with contextlib.ExitStack() as closing:  # all of them, even if one raises
            for env in envs:
                closing.callback(env.close)


_assets: dict[str, Any] = {}


def shared_assets() -> dict[str, Any]:
    """The arrays that were given as ``shared_assets=``, mapped read-only. To be called in a worker, by an
    environment."""
    return _assets


def use_assets(assets: dict[str, Segment]) -> None:
    """Make these arrays the ``shared_assets`` of this process."""
    _assets.update({name: _map_read_only(segment) for name, segment in assets.items()})


def _map_read_only(segment: Segment) -> Any:
    """Map an asset so that this process cannot write to it, not even through another mapping."""
    field = segment.layout["array"]
    mapping, offset = segment.alias(field.offset, field.nbytes, writeable=False)
    segment.close()
    return np.ndarray(field.shape, field.dtype, memoryview(mapping), offset)


def build_env(env_fn: Callable[[], Env[Any, Any]], index: int) -> Env[Any, Any]:
    """Call the function that builds environment ``index``, and check that it does."""
    env = env_fn()
    if not hasattr(env, "observation_space"):
        raise TypeError(f"env_fns[{index}] must return an environment, found {excerpt(env)}")
    return env


def describe_envs(envs: list[Env[Any, Any]]) -> Ready:
    observation_spaces: list[Space[Any]] = []
    action_spaces: list[Space[Any]] = []
    space_indices = [
        (_index_of(env.observation_space, observation_spaces), _index_of(env.action_space, action_spaces))
        for env in envs
    ]
    return Ready(observation_spaces, action_spaces, space_indices, dict(envs[0].metadata), envs[0].render_mode)


def _index_of(space: Space[Any], distinct: list[Space[Any]]) -> int:
    """The index of an equal space in ``distinct``, to which the space is added if there is none."""
    for index, other in enumerate(distinct):
        if other is space or other == space:
            return index
    distinct.append(space)
    return len(distinct) - 1


class Worker:
    """The environments of one worker and the execution of commands.

    ``StepLoop`` makes the steps in native code and owns each environment's state (running, needs a reset, pending
    truncation) and the infos of the current command. What is left for this class is the exceptional: exceptions, ends
    of episodes without NEXT_STEP, values that need a conversion, and messages. Environments are counted from 0 here
    (``index``); ``first_env + index`` is their index in the batch.
    """

    def __init__(
        self,
        task: Task,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        envs: list[Env[Any, Any]],
        channel: Channel,
        steps: StepSegment,
        *,
        wait_for_commands: bool = True,
    ) -> None:
        self.worker = task.worker
        self.first_env = task.envs.start
        self.restart_envs = task.restart_envs
        self.mode = task.autoreset_mode
        self.env_fns = env_fns
        self.envs = envs
        self.channel = channel
        self.steps = steps
        self.progress = steps.progress[task.worker]
        self.writer = StepWriter(steps, task.worker)
        self.declared_infos = list(steps.infos.items())
        self.pending_truncations: dict[int, tuple[str, Any]] = {}
        """For environments that were restarted outside of a step: the cause, and the last observation that the caller
        has seen. Their next step reports both."""
        self.restart_causes: list[str] = []
        """For the next message: why environments were replaced."""
        self.failures: list[Failure] = []
        """For the next message: exceptions that the parent raises."""
        self.keeps_objects = self.restart_envs and self.mode is AutoresetMode.SAME_STEP
        """Whether parts of observations that were sent are kept, because ``final_obs`` may need them."""
        self.step_loop = _native.StepLoop(
            steps.command_word(task.worker, SPIN_NS if task.spin else 0),
            self.writer.native,
            steps.quorums,
            steps.requested_step,
            steps.completed_step,
            *_action_readers(steps, task.envs),
            steps.action_formats,
            self.envs,
            self.first_env,
            autoreset=self.mode is AutoresetMode.NEXT_STEP,
            wait_for_commands=wait_for_commands,
        )

    def execute_commands(self) -> int | None:
        """Execute commands until ``COMMAND_CLOSE``, which is returned; without ``wait_for_commands``, those that were
        issued."""
        while True:
            command = self.step_loop.next_command()
            if command is None or command == COMMAND_CLOSE:
                return command
            if command == COMMAND_SEND:
                self._finish_sent()
            elif command == COMMAND_STEP:
                self._finish_step()
                self._finish_command()
            else:
                content = self.channel.receive()
                try:
                    name, *arguments = cloudpickle.loads(content)
                except Exception as error:
                    self.failures.append(self._failure(error, 0))
                    self._finish_command()
                    continue
                self._finish_command(self._execute(name, arguments))

    # ------------------------------------------------------------------------------------------------------- steps

    def _finish_step(self) -> None:
        """Run the step to its end and handle the environments that the step loop hands back."""
        while (step := self.step_loop.next_exception()) is not None:
            index, returned = step.index, step.returned
            try:
                if returned is not None:
                    self._store_step(index, returned)
                elif step.raised is not None:
                    raise step.raised  # so that the traceback shows this one too if the new environment fails
                elif step.pending_truncation:
                    self._truncate(index, *self.pending_truncations[index])
                elif step.needs_reset:  # a mistake of the caller: a restart would not help
                    self.failures.append(self._failure(episode_ended(self.first_env + index), index))
                else:
                    self._store_step(index, None)
            except Exception as error:
                self._handle_error(index, error)

    def _finish_sent(self) -> None:
        """Continue a ``send`` from the environment at which the step loop stopped."""
        while True:
            self._finish_step()
            # Not shared: the parent may not have read the floats of the previous ``send`` yet.
            self._send_message(self._pack_message(share_floats=False))
            self.step_loop.complete_sent()
            if self.step_loop.step_sent():
                break
        self.channel.flush()
        self.step_loop.finish(0)

    def _store_step(self, index: int, returned: Any) -> None:
        """Store what an environment's ``step`` returned, and reset the environment in the mode SAME_STEP."""
        observation, reward, terminated, truncated, info = _unpack(
            returned, "step", "observation, reward, terminated, truncated, info"
        )
        terminated, truncated = _as_flag(terminated, "terminated"), _as_flag(truncated, "truncated")
        if terminated or truncated:
            if self.mode is not AutoresetMode.SAME_STEP:
                self.step_loop.mark_needs_reset(index)
            else:
                # Copies: environments that reuse their buffers overwrite them in reset().
                final = {"final_info": dict(info), "final_obs": deepcopy(observation)}
                observation, info = self._reset_env(index)
                info = {**final, **info}
        self._write_step(index, observation, reward, terminated, truncated, info)

    def _reset_env(self, index: int, **kwargs: Any) -> Any:
        return _unpack(self.envs[index].reset(**kwargs), "reset", "observation, info")

    def _write_step(
        self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> None:
        self.writer.write_step(index, observation, reward, terminated, truncated)
        if info or self.declared_infos:
            self._store_info(index, info)

    def _store_info(self, index: int, info: dict[str, Any]) -> None:
        if self.declared_infos:
            info = dict(info)
            for key, (column, present) in self.declared_infos:
                present[self.first_env + index] = key in info
                if key in info:
                    column.write(self.first_env + index, info.pop(key))
        if info:
            self.step_loop.add_info(index, info)

    def _last_observation(self, index: int) -> Any:
        """The environment's last observation, in the only mode that shows it: a function that a user registered may
        have to read it back, and can fail."""
        if self.mode is not AutoresetMode.SAME_STEP:
            return None
        return self.steps.observations.read_row(self.first_env + index)

    # ---------------------------------------------------------------------------------------------------- failures

    def _handle_error(self, index: int, error: Exception, reset: dict[str, Any] | None = None) -> None:
        """Replace an environment that raised, or report its exception. ``reset`` has the arguments if it raised in a
        reset that the caller asked for."""
        failure = self._failure(error, index)
        if self.restart_envs:
            try:
                self._replace_env(index, failure, reset)
                return
            except Exception as second:
                failure = self._failure(second, index)
        self.failures.append(failure)

    def _failure(self, error: BaseException, index: int) -> Failure:
        return Failure.from_exception(error, self.worker, self.first_env + index, int(self.progress[PROGRESS_STEPS]))

    def _replace_env(self, index: int, failure: Failure, reset: dict[str, Any] | None) -> None:
        """Replace an environment that raised by a new one; its episode ends as truncated."""
        with contextlib.suppress(Exception):  # it has failed already: an error in its close() adds nothing
            self.envs[index].close()
        self.envs[index] = self.env_fns[index]()
        cause = f"{failure.type_name}: {failure.text}"
        self.restart_causes.append(cause)
        if reset is None:
            self._truncate(index, cause, self._last_observation(index))
        else:
            observation, info = self._reset_env(index, **reset)
            self._store_reset(index, observation, {**info, "restarted": cause})

    def _store_reset(self, index: int, observation: Any, info: dict[str, Any]) -> None:
        """Store the results of a reset that the caller asked for."""
        self.step_loop.mark_running(index)
        self.pending_truncations.pop(index, None)
        self.writer.write_observation(index, observation)
        self._store_info(index, info)

    def _truncate(self, index: int, cause: str, last_observation: Any) -> None:
        """Reset an environment that was restarted and report the old episode as truncated."""
        observation, info = self._reset_env(index)
        self.pending_truncations.pop(index, None)
        if self.mode is AutoresetMode.SAME_STEP:
            self.step_loop.mark_running(index)
            info = {"final_info": {}, "final_obs": last_observation, **info}
        else:
            self.step_loop.mark_needs_reset(index)
        self._write_step(index, observation, 0.0, False, True, {**info, "restarted": cause})

    # ---------------------------------------------------------------------------------------------------- messages

    def _execute(self, name: str, arguments: list[Any]) -> Any:
        """Execute a message of the parent and return its result."""
        match name:
            case "reset":
                seeds, options = arguments
                for _, (_, present) in self.declared_infos:
                    present[self.first_env : self.first_env + len(self.envs)] = False
                for index, seed in seeds:
                    self.progress[PROGRESS_CURRENT_ENV] = index
                    try:
                        self._store_reset(index, *self._reset_env(index, seed=seed, options=options))
                    except Exception as error:
                        self._handle_error(index, error, {"seed": seed, "options": options})
                return None
            case "take_over":
                # This worker replaces one that died. Environments that were in the middle of a step are truncated now,
                # the others in their next step.
                cause, last_observations, stepping = arguments
                for index in range(len(self.envs)):
                    self.progress[PROGRESS_CURRENT_ENV] = index
                    last = last_observations[index] if last_observations is not None else None
                    self.pending_truncations[index] = (cause, last)
                    self.step_loop.mark_pending_truncation(index)
                    if index in stepping:
                        try:
                            self._truncate(index, cause, last)
                        except Exception as error:
                            self._handle_error(index, error)
                return None
            case "no_op":
                return None
            case "step":
                self.step_loop.start(arguments[0])
                self._finish_step()
                return None
            case "call":
                method, args, kwargs = arguments
                return self._for_each_env(lambda env: _call(env, method, args, kwargs))
            case "apply":
                function, indices = arguments
                return self._for_each_env(function, indices)
            case "set_attr":
                attribute, values = arguments
                remaining = iter(values)
                self._for_each_env(lambda env: env.set_wrapper_attr(attribute, next(remaining)))
                return None
        raise AssertionError(name)

    def _for_each_env(
        self, function: Callable[[Env[Any, Any]], Any], indices: Iterable[int] | None = None
    ) -> list[Any]:
        results: list[Any] = []
        for index in range(len(self.envs)) if indices is None else indices:
            self.progress[PROGRESS_CURRENT_ENV] = index
            try:
                results.append(function(self.envs[index]))
            except Exception as error:
                results.append(None)
                self.failures.append(self._failure(error, index))
        return results

    def _finish_command(self, result: Any = None) -> None:
        self._send_message(self._pack_message(result))
        self.step_loop.finish(len(self.envs))
        self.channel.flush()

    def _send_message(self, message: bytes | None) -> None:
        """Send as much of a message as the pipe takes without waiting, so that the parent finds it when it wakes. The
        rest of a long one is flushed after all workers have arrived, which is when the parent reads."""
        if message is not None:
            self.progress[PROGRESS_MESSAGES_SENT] += 1
            self.channel.post(message)

    def _pack_message(self, result: Any = None, *, share_floats: bool = True) -> bytes | None:
        """Pickle what the parent has to know about the command besides the rows; None if there is nothing."""
        infos = self.step_loop.take_infos()
        observations = self._take_objects()
        if not (self.restart_causes or self.failures or observations or result is not None):
            if not infos:
                return None
            if (floats := pack_floats(infos)) is not None:
                shared = share_floats and self.steps.float_infos.write(self.worker, *floats)
                return None if shared else pickle_for_parent(floats)
        try:
            message = pickle_for_parent(Message(pack(infos), observations, result, self.failures, self.restart_causes))
        except Exception as error:
            failure = self._failure(error, 0)
            message = pickle_for_parent(Message({}, {}, None, [*self.failures, failure], self.restart_causes))
        self.failures, self.restart_causes = [], []
        return message

    def _take_objects(self) -> dict[str, dict[int, Any]]:
        """The parts of observations that the next message carries."""
        taken = {path: column.take_written() for path, column in self.steps.objects.items() if column.written}
        if self.keeps_objects:
            for path, written in taken.items():
                # Copies: environments that reuse their buffers overwrite them in the next step.
                self.steps.objects[path].values.update(deepcopy(written))
        return taken


def _action_readers(
    steps: StepSegment, envs: range
) -> tuple[Callable[[], Actions], Callable[[int], Any], Callable[[int, int], Actions]]:
    """Functions that read the actions of all of these environments, the action of one of them, and those of a range of
    them in another form than the space's. They return copies, which environments may keep."""
    if steps.actions is None:  # actions come in messages, so none of these is called
        return list, int, range
    read = partial(steps.actions.read, copy=True) if steps.shared_actions is None else steps.shared_actions.read
    rows = steps.actions.rows
    if rows is not None:
        rows = rows[envs.start : envs.stop]
        one = rows.__getitem__ if rows.ndim == 1 else lambda index: rows[index].copy()
        return rows.copy, one, lambda begin, end: read(envs.start + begin, envs.start + end)
    batches = {count: batch_space(steps.actions.space, count) for count in (1, len(envs))}

    def read_each(begin: int, end: int) -> list[Any]:
        return list(iterate(batches[end - begin], read(envs.start + begin, envs.start + end)))

    return partial(read_each, 0, len(envs)), lambda index: read_each(index, index + 1)[0], read_each


_ONLY_OBSERVATION = "; return observation, {}"
_FOUR_VALUES = (
    ": an environment for Gym before 0.26 returns done instead of terminated and truncated; return both, or wrap it "
    "with shimmy.GymV21CompatibilityV0"
)


def _unpack(returned: Any, method: str, names: str) -> tuple[Any, ...]:
    """Unpack what a method of an environment returned."""
    expected = f"{method}() must return {names}"
    if isinstance(returned, np.ndarray | Mapping | str):  # an observation alone would be unpacked into its rows
        raise TypeError(
            f"{expected}; found one value, {excerpt(returned)}{_ONLY_OBSERVATION if method == 'reset' else ''}"
        )
    try:
        values = tuple(returned)
    except TypeError:
        raise TypeError(f"{expected}; found {returned!r}") from None
    if len(values) != names.count(",") + 1:
        hint = _FOUR_VALUES if method == "step" and len(values) == 4 else ""
        raise ValueError(f"{expected}; found {len(values)} values{hint}")
    if not isinstance(values[-1], Mapping):
        raise TypeError(f"{expected}; info must be a dict, found {values[-1]!r}")
    return values


def _as_flag(value: Any, name: str) -> bool:
    try:
        if isinstance(value, str | bytes):  # "no" is true
            raise TypeError
        return bool(value)
    except (TypeError, ValueError) as error:  # an array of several flags, for example
        raise type(error)(f"step() must return {name} as True or False, found {value!r}") from None


def _call(env: Env[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in ("reset", "step", "close", "_setattr", "_check_spaces"):
        raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute
