"""The worker: a process that builds some environments, and steps them when it is told to.

Every environment is built, stepped and closed by one thread. The loop ends when it is told to, or with the parent:
a worker whose parent dies is gone within a second, whatever its environments do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
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
from memlane.core import Peer, Segment
from memlane.core.children import THREAD_LIMITS
from memlane.core.liveness import die_with
from memlane.spaces import Column
from memlane.vector import infos as entries
from memlane.vector.channel import Channel
from memlane.vector.messages import Failure, Message, Ready, for_parent
from memlane.vector.step_segment import CLOSE, SEND, STEP, STEPS, THROUGH, TOLD, Steps
from memlane.vector.step_writer import StepWriter

Actions = Sequence[Any] | NDArray[Any]
"""One for each environment."""

_SPIN_NS = 200_000
"""How long a worker spins before it sleeps. Its core has nothing else to do, and to wake one that is halted
took up to 140 us on a virtual machine: 64 CartPoles in two workers took 310 us a step; 330 with 50 us of spinning."""


@dataclass
class Task:
    """What a worker is told at its birth."""

    worker: int
    envs: range
    env_fns: bytes
    """Pickled with cloudpickle: lambdas and functions of a notebook are welcome."""
    autoreset_mode: AutoresetMode
    heal: bool
    """Whether an environment that raises is made anew here."""
    core: int | None
    spins: bool
    """Whether it may spin before it sleeps: not when there are more workers than cores."""
    assets: dict[str, Segment] = field(default_factory=dict)


def work(task: Task, connection: Connection, parent: Peer) -> None:
    """The worker's main function."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides what it means
    if task.core is not None:
        os.sched_setaffinity(0, {task.core})
    for name in THREAD_LIMITS:  # for what is imported from here on; a dozen workers with a dozen threads each is a jam
        os.environ.setdefault(name, "1")
    _assets.update({name: _read_only(segment) for name, segment in task.assets.items()})
    channel = Channel(connection)
    envs: list[Env[Any, Any]] = []
    try:
        try:
            make: Sequence[Callable[[], Env[Any, Any]]] = cloudpickle.loads(task.env_fns)
            envs.extend(build() for build in make)
            channel.send(for_parent(_introduce(envs)))
        except BaseException as error:
            channel.send(for_parent(Failure.of(error, task.worker, task.envs.start + len(envs), 0)))
            return
        steps: Steps | None = cloudpickle.loads(channel.receive())
        if steps is None:  # the parent did not like what we are
            return
        Worker(task, make, envs, channel, steps).loop()
    except EOFError:
        pass  # the parent has gone without a word
    finally:
        with contextlib.ExitStack() as closing:  # all of them, even if one raises
            for env in envs:
                closing.callback(env.close)


_assets: dict[str, Any] = {}


def shared_assets() -> dict[str, Any]:
    """In a worker: the arrays that were given as ``shared_assets=``, mapped read-only."""
    return _assets


def _read_only(segment: Segment) -> Any:
    """Mapped so that nobody in this process can write, and only so."""
    field = segment.layout["array"]
    mapping, at = segment.alias(field.offset, field.nbytes, writeable=False)
    segment.close()
    return np.ndarray(field.shape, field.dtype, memoryview(mapping), at)


def _introduce(envs: list[Env[Any, Any]]) -> Ready:
    observation_spaces: list[Space[Any]] = []
    action_spaces: list[Space[Any]] = []
    which = [
        (_place(observation_spaces, env.observation_space), _place(action_spaces, env.action_space)) for env in envs
    ]
    return Ready(observation_spaces, action_spaces, which, dict(envs[0].metadata), envs[0].render_mode)


def _place(known: list[Space[Any]], space: Space[Any]) -> int:
    for place, other in enumerate(known):
        if other is space or other == space:
            return place
    known.append(space)
    return len(known) - 1


_ENDED = (
    "environment {} has ended, and with AutoresetMode.DISABLED it is the caller who resets it: "
    "reset(options={{'reset_mask': mask}})"
)


class Worker:
    """The loop and what it needs from command to command. Steps are made by ``rounds``, in native code; what it leaves
    to Python is what is not plain: exceptions, ends of episodes in most modes, messages."""

    def __init__(
        self,
        task: Task,
        make: Sequence[Callable[[], Env[Any, Any]]],
        envs: list[Env[Any, Any]],
        channel: Channel,
        steps: Steps,
    ) -> None:
        self.worker = task.worker
        self.first = task.envs.start
        self.heal = task.heal
        self.mode = task.autoreset_mode
        self.make = make
        self.envs = envs
        self.channel = channel
        self.steps = steps
        self.progress = steps.progress[task.worker]
        self.outcomes = StepWriter(steps, task.worker)
        self.by_message = steps.observations is None
        self.observed: dict[int, Any] = {}
        self.due = [False] * len(envs)
        """Which have ended and are to be reset: at their next step, or by the user."""
        self.owed: dict[int, tuple[str, Any]] = {}
        """Those that were made anew outside of a step, with the cause and the last observation handed out: their next
        step tells it."""
        self.remade: list[str] = []
        self.last: dict[int, Any] = {}
        """The last observations, where they are not in shared memory and may be needed as final ones."""
        self.keeps_last = self.heal and self.by_message and self.mode is AutoresetMode.SAME_STEP
        self.infos: list[tuple[int, dict[str, Any]]] = []
        self.failures: list[Failure] = []
        self.declared = [(key, column, told) for key, (column, told) in steps.infos.items()]
        steps.go[task.worker].spin_limit_ns = _SPIN_NS if task.spins else 0
        self.rounds = _native.StepLoop(
            steps.commands[task.worker],
            self.outcomes.native,
            steps.quorums,
            steps.asked,
            steps.answered,
            *_takers(steps.actions, task.envs),
            self.envs,
            self.due,
            self.owed,
            self.infos,
            self.first,
            resets=self.mode is AutoresetMode.NEXT_STEP,
        )

    def loop(self) -> None:
        self._tell(None)  # bound: the parent may begin
        while True:
            order = self.rounds.next()
            if order == CLOSE:
                return
            if order == SEND:
                self._send()
            elif order == STEP:
                self._step_on()
                self._finish(len(self.envs))
            else:
                content = self.channel.receive()
                try:
                    name, *arguments = cloudpickle.loads(content)
                except Exception as error:
                    self.failures.append(self._failure(error, 0))
                    self._finish(len(self.envs))
                    continue
                self._finish(len(self.envs), self._obey(name, arguments))

    # ------------------------------------------------------------------------------------------------------- steps

    def _step_on(self) -> None:
        while (special := self.rounds.special()) is not None:
            k, returned, raised = special
            try:
                if raised is not None:
                    raise raised  # caught below: should a new environment fail too, both are told
                if self.due[k]:
                    self._step_due(k)
                else:
                    self._take(k, returned)
            except Exception as error:
                self._fail(k, error)

    def _step_due(self, k: int) -> None:
        """The k-th environment has ended, and is not one that a reset in the place of the step is right for."""
        if k in self.owed:
            self._truncate(k, *self.owed[k])
        else:  # the caller's mistake: nothing here is to be healed
            self.failures.append(self._failure(AssertionError(_ENDED.format(self.first + k)), k))

    def _take(self, k: int, returned: Any) -> None:
        """What a step of the k-th environment has returned."""
        observation, reward, terminated, truncated, info = returned
        if terminated or truncated:
            if self.mode is not AutoresetMode.SAME_STEP:
                self.due[k] = True
            else:
                # Copies: environments that reuse their buffers overwrite them in reset().
                final = {"final_info": dict(info), "final_obs": deepcopy(observation)}
                observation, info = self.envs[k].reset()
                info = {**final, **info}
        self._put(k, observation, reward, terminated, truncated, info)

    def _put(self, k: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if self.by_message:
            self._observe(k, observation)
        self.outcomes.put(k, observation, reward, terminated, truncated)
        if info or self.declared:
            self._note(k, info)

    def _send(self) -> None:
        """Those that were sent, from one on that needs a closer look."""
        while True:
            self._step_on()
            self._announce(self._message())
            self.rounds.answer()
            if self.rounds.step_sent():
                break
        self.channel.flush()
        self.rounds.finish(0)

    def _note(self, k: int, info: dict[str, Any]) -> None:
        if self.declared:
            info = dict(info)
            for key, column, told in self.declared:
                told[self.first + k] = key in info
                if key in info:
                    column.write(self.first + k, info.pop(key))
        if info:
            self.infos.append((self.first + k, info))

    def _observe(self, k: int, observation: Any) -> None:
        self.observed[self.first + k] = observation
        if self.keeps_last:
            self.last[k] = deepcopy(observation)

    def _last(self, k: int) -> Any:
        """The last observation of the k-th environment, in the only mode that shows it: reading it back may be the
        work of a function that a user registered, and can fail."""
        if self.mode is not AutoresetMode.SAME_STEP:
            return None
        column = self.steps.observations
        return self.last.get(k) if column is None else deepcopy(column.read_row(self.first + k))

    def _fail(self, k: int, error: Exception, reset: dict[str, Any] | None = None) -> None:
        failure = self._failure(error, k)
        if self.heal:
            try:
                self._remake(k, failure, reset)
                return
            except Exception as worse:
                failure = self._failure(worse, k)
        self.failures.append(failure)

    def _failure(self, error: BaseException, k: int) -> Failure:
        return Failure.of(error, self.worker, self.first + k, int(self.progress[STEPS]))

    def _remake(self, k: int, failure: Failure, reset: dict[str, Any] | None) -> None:
        """The environment raised: a new one takes its place, and its episode ends here."""
        with contextlib.suppress(Exception):  # it is broken; what it has to say about its end does not matter
            self.envs[k].close()
        self.envs[k] = self.make[k]()
        cause = f"{failure.type_name}: {failure.text}"
        self.remade.append(cause)
        if reset is None:
            self._truncate(k, cause, self._last(k))
        else:
            observation, info = self.envs[k].reset(**reset)
            self._begin(k, observation, {**info, "restarted": cause})

    def _begin(self, k: int, observation: Any, info: dict[str, Any]) -> None:
        """The k-th environment has been reset because it was asked to be."""
        self.due[k] = False
        self.owed.pop(k, None)
        if self.by_message:
            self._observe(k, observation)
        self.outcomes.put_observation(k, observation)
        self._note(k, info)

    def _truncate(self, k: int, cause: str, last: Any) -> None:
        """The k-th environment has been made anew: what was its episode ends as one that was cut off."""
        observation, info = self.envs[k].reset()
        self.owed.pop(k, None)
        self.due[k] = self.mode is not AutoresetMode.SAME_STEP
        if self.mode is AutoresetMode.SAME_STEP:
            info = {"final_info": {}, "final_obs": last, **info}
        self._put(k, observation, 0.0, False, True, {**info, "restarted": cause})

    # ---------------------------------------------------------------------------------------------------- messages

    def _obey(self, name: str, arguments: list[Any]) -> Any:
        match name:
            case "reset":
                seeds, options = arguments
                for _, _, told in self.declared:
                    told[self.first : self.first + len(self.envs)] = False
                for k, seed in seeds:
                    self.progress[THROUGH] = k
                    try:
                        self._begin(k, *self.envs[k].reset(seed=seed, options=options))
                    except Exception as error:
                        self._fail(k, error, {"seed": seed, "options": options})
                return None
            case "revive":
                cause, last, now = arguments
                for k in range(len(self.envs)):
                    self.progress[THROUGH] = k
                    self.due[k], self.owed[k] = True, (cause, last[k] if last is not None else None)
                    if k in now:
                        try:
                            self._truncate(k, *self.owed[k])
                        except Exception as error:
                            self._fail(k, error)
                return None
            case "nothing":
                return None
            case "step":
                self.rounds.start(arguments[0])
                self._step_on()
                return None
            case "call":
                method, args, kwargs = arguments
                return self._each(lambda env: _call(env, method, args, kwargs))
            case "apply":
                function, which = arguments
                return self._each(function, which)
            case "set_attr":
                attribute, values = arguments
                remaining = iter(values)
                self._each(lambda env: env.set_wrapper_attr(attribute, next(remaining)))
                return None
        raise AssertionError(name)

    def _each(self, do: Callable[[Env[Any, Any]], Any], which: Iterable[int] | None = None) -> list[Any]:
        results: list[Any] = []
        for k in range(len(self.envs)) if which is None else which:
            self.progress[THROUGH] = k
            try:
                results.append(do(self.envs[k]))
            except Exception as error:
                results.append(None)
                self.failures.append(self._failure(error, k))
        return results

    def _finish(self, arrivals: int, result: Any = None) -> None:
        self._announce(self._message(result))
        self.rounds.finish(arrivals)
        self.channel.flush()

    def _announce(self, message: bytes | None) -> None:
        """A message goes as far as it goes without waiting: the parent finds it there when it wakes. What is left of a
        long one goes when everybody has arrived, which is when the parent reads."""
        if message is not None:
            self.progress[TOLD] += 1
            self.channel.post(message)

    def _message(self, result: Any = None) -> bytes | None:
        if not (self.remade or self.failures or self.observed or result is not None):
            if not self.infos:
                return None
            if (floats := entries.pack_floats(self.infos)) is not None:
                self.infos.clear()
                return for_parent(floats)
        packed = entries.pack(self.infos) if self.infos else {}
        try:
            message = for_parent(Message(packed, self.observed, result, self.failures, self.remade))
        except Exception as error:
            failure = self._failure(error, 0)
            message = for_parent(Message({}, {}, None, [*self.failures, failure], self.remade))
        self.infos.clear()
        self.observed, self.failures, self.remade = {}, [], []
        return message

    def _tell(self, message: Any) -> None:
        self.channel.send(for_parent(message))


def _takers(actions: Column | None, envs: range) -> tuple[Callable[[], Actions], Callable[[int], Any]]:
    """How to take the actions of all of these environments, and that of the k-th: as copies, which may be kept."""
    if actions is None:  # they come as messages
        return list, int
    if actions.rows is not None:
        rows = actions.rows[envs.start : envs.stop]
        return rows.copy, rows.__getitem__ if rows.ndim == 1 else lambda k: rows[k].copy()

    def read(begin: int, end: int, space: Space[Any]) -> list[Any]:
        return list(iterate(space, actions.read(begin, end, copy=True)))

    all_, one = batch_space(actions.space, len(envs)), batch_space(actions.space, 1)
    return partial(read, envs.start, envs.stop, all_), lambda k: read(envs[k], envs[k] + 1, one)[0]


def _call(env: Env[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in ("reset", "step", "close", "_setattr", "_check_spaces"):
        raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute
