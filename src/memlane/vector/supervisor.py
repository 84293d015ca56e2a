"""Supervisor: issues commands to the workers, waits until they are done, and restarts workers that die.

It owns everything that is pending: which call the caller has to wait for, which environments were sent an action, which
messages of workers were not handed out, and why the vector environment cannot go on. ``AsyncVectorEnv`` asks through
methods and properties. The fast path is one wait for one count; most of this file is about deaths.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import numpy as np
from gymnasium import logger
from numpy.typing import NDArray

from memlane import _native
from memlane._native import COMMAND_MESSAGE, COMMAND_SEND, COMMAND_STEP
from memlane.core import WaitTimeout
from memlane.core.children import RestartWindow
from memlane.vector.errors import RestartLimit, WorkerDied
from memlane.vector.float_infos import FloatForm
from memlane.vector.infos import PackedInfos
from memlane.vector.local_worker import LocalWorker
from memlane.vector.messages import Message, pickle_for_worker
from memlane.vector.placement import PlacementReview
from memlane.vector.step_segment import SPIN_NS, StepSegment
from memlane.vector.worker_handle import WatchedPeers, WorkerHandle
from memlane.vector.worker_pool import WorkerPool

OnError = Literal["raise", "restart"]
_POLL_SECONDS = 0.05
"""How long a wait for the next arrival lasts after a restart, when the count of arrivals may be wrong."""


class AsyncState(enum.Enum):
    """The call that a vector environment has begun and not finished."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"
    WAITING_RECV = "recv"


# Members of an enumeration take 40 ns to look up in Python 3.11, and a step needs them several times.
_DEFAULT, _WAITING_STEP = AsyncState.DEFAULT, AsyncState.WAITING_STEP


class Supervisor:
    """Issues all commands to all workers. To be called by one thread."""

    def __init__(
        self,
        pool: WorkerPool,
        steps: StepSegment,
        *,
        on_error: OnError,
        max_restarts: int,
        restart_window: float,
        step_timeout: float | None,
    ) -> None:
        self.pending_call = AsyncState.DEFAULT
        """The call that was begun and not finished. Written by this class alone."""
        self.broken: str | None = None
        """Why no more commands can be issued; None while they can. Written by this class alone."""
        self.restarts = 0
        """Workers and environments that were restarted. Written by this class alone."""
        self._pool = pool
        self._handles = pool.handles
        self._steps = steps
        self._on_error: OnError = on_error
        self._step_timeout = step_timeout
        self._restart_window = RestartWindow(max_restarts, restart_window)
        cores = [-1 if handle.task.core is None else handle.task.core for handle in self._handles]
        self._commands = _native.CommandWords([steps.command_word(worker) for worker in range(len(cores))], cores)
        if pool.placement.spin:
            for quorum in steps.quorums:
                quorum.spin_limit_ns = SPIN_NS
        self.review = PlacementReview(pool.placement, steps.spec.num_envs)
        self._num_envs = steps.spec.num_envs
        self._local = pool.local
        self._sent: set[int] = set()
        """Environments that were sent an action whose result was not received."""
        self._received: dict[int, list[Message]] = {}
        """Messages that were read and not handed out, by worker."""
        self._messages_read = 0
        """Messages that were read from the current processes of all workers."""
        self._float_forms: dict[int, FloatForm] = {}
        """The forms of infos of floats that belong to the pending call, by worker."""
        self._float_infos_read = 0
        """Commands of the current processes of all workers whose infos of floats were read."""
        self._last_messages: dict[int, tuple[Any, ...]] = {}
        """The last message to each worker, unless a step was issued after it: a restarted worker gets it again."""
        self._last_observations: list[Any] | None = None
        """The observations that were last handed out, one for each environment, where a restart needs them."""
        self._cell = 0
        """The cell of the quorum that is in use."""
        self._quorum = steps.quorums[0]
        self._expected_arrivals = 0
        """The count at which all commands are done."""
        self._count_invalid = False
        """Whether a death has made that count meaningless."""

    @property
    def sent_envs(self) -> AbstractSet[int]:
        """Environments that were sent an action whose result was not received."""
        return self._sent

    # ----------------------------------------------------------------------------------------------------- commands

    def step(self) -> None:
        """Step all environments with the actions in the step segment."""
        self.pending_call = _WAITING_STEP
        try:
            self._issue_step()
        except BaseException:
            self._cancel_unissued()
            raise

    def reset(self, seeds: Sequence[int | None], mask: NDArray[np.bool_], options: Mapping[str, Any] | None) -> None:
        """Reset the environments of ``mask``."""
        parts = [
            [(index, seeds[env]) for index, env in enumerate(handle.envs) if mask[env]] for handle in self._handles
        ]
        self.send_messages(AsyncState.WAITING_RESET, [("reset", part, options) for part in parts])
        for handle, part in zip(self._handles, parts, strict=True):
            for index, seed in part:
                handle.seeds[index] = seed

    def send_messages(self, call: AsyncState, messages: Sequence[tuple[Any, ...]]) -> None:
        """Send each worker a message to execute; ``call`` is pending then."""
        self._begin(call, self._issue_messages, messages)

    def send(self, env_ids: NDArray[np.int64]) -> None:
        """Step these environments with the actions in the step segment."""
        arrivals = Counter(self._pool.worker_of_env[env_ids].tolist())
        envs = env_ids.tolist()
        try:
            # PAIR publish/see, partner: StepLoop::step_sent. The actions are written before the request.
            self._steps.requested_step.add_each(env_ids, 1)
        finally:  # Ctrl-C from here on leaves them to `recv`
            self.pending_call = AsyncState.WAITING_RECV
            self._sent.update(envs)
        self._issue_send(arrivals)

    def _begin(self, call: AsyncState, issue: Callable[..., None], *arguments: Any) -> None:
        """Issue commands; ``call`` is pending then, also if Ctrl-C comes when they have just been issued."""
        self.pending_call = call
        try:
            issue(*arguments)
        except BaseException:
            self._cancel_unissued()
            raise

    def _cancel_unissued(self) -> None:
        """After an exception: no call is pending if no command was issued."""
        if not (self._count_invalid or self._quorum.arrived < self._expected_arrivals):
            self.pending_call = AsyncState.DEFAULT

    def _issue_step(self) -> None:
        self._last_messages.clear()
        self._expected_arrivals += self._num_envs  # first: Ctrl-C may come with the return of the next call
        if self.review.active:
            self.review.begin_step()
        due = self._commands.issue_all(self._cell, COMMAND_STEP)
        if self._local is not None:
            self._run_local(self._local)
        elif due:
            self.review.start(self._pool.pids, self._steps.busy_ns)

    def _issue_send(self, arrivals: Mapping[int, int]) -> None:
        workers, count = list(arrivals), sum(arrivals.values())
        self._last_messages.clear()  # also of the workers that get no command now
        self._expected_arrivals += count
        self._commands.issue(workers, self._cell, COMMAND_SEND)
        if self._local is not None:
            self._run_local(self._local)

    def _issue_messages(self, messages: Sequence[tuple[Any, ...]]) -> None:
        pickled = [pickle_for_worker(message) for message in messages]  # all of them before any is sent: one may fail
        try:
            for handle, message, content in zip(self._handles, messages, pickled, strict=True):
                self._last_messages[handle.worker] = message
                handle.issue(COMMAND_MESSAGE, self._cell)
                # If the worker is dead, the wait for its answer reports that.
                with contextlib.suppress(WorkerDied):
                    self._send_content(handle, content)
                self._expected_arrivals += len(handle.envs)
        except KeyboardInterrupt:
            self.broken = "Ctrl-C interrupted a call after some of the workers had been sent their message"
            raise
        if self._local is not None:
            self._run_local(self._local)

    def _run_local(self, local: LocalWorker) -> None:
        """Let the worker in this process execute what was issued, so that no wait has anything to wait for."""
        try:
            local.run()
        except BaseException as error:  # what environments raise is caught and handed over; this is Ctrl-C or sys.exit
            self.broken = f"{type(error).__name__} interrupted the environments, which run in this process"
            raise

    # ----------------------------------------------------------------------------------------------------- waiting

    def finish(self, deadline: float | None) -> dict[int, list[Message]]:
        """Wait until all workers are done with the pending call; returns their messages. ``WaitTimeout`` changes
        nothing: the call stays pending, and the next ``finish`` continues the wait."""
        try:
            while True:
                try:
                    if deadline is None and self._step_timeout is None and not self._count_invalid:
                        # As `_wait` does, in a quarter of the time.
                        self._quorum.wait(self._expected_arrivals, None, self._pool.peers)
                    else:
                        self._wait(deadline)
                    if self._steps.float_infos_written != self._float_infos_read:
                        self._read_float_forms()
                    if self._steps.messages_sent != self._messages_read:
                        self._drain_messages(self._handles, deadline)
                    break
                except WorkerDied as death:  # perhaps in the middle of a message
                    self._restart_worker(death)
        except WaitTimeout:
            raise
        except Exception:
            self.pending_call = AsyncState.DEFAULT
            self._float_forms.clear()
            raise
        self.pending_call = _DEFAULT
        if self.review.active and (advice := self.review.end_step(self._pool.pids, self._steps.busy_ns)):
            logger.warn("%s", advice)
        if not self._received:
            return {}
        received, self._received = self._received, {}
        return received

    def take_float_infos(self) -> list[PackedInfos]:
        """The infos of the call that ``finish`` has finished, as far as they are floats in shared memory."""
        if not self._float_forms:
            return []
        forms, self._float_forms = self._float_forms, {}
        return self._steps.float_infos.packed(forms)

    def _read_float_forms(self) -> None:
        for handle in self._handles:
            form = handle.read_float_form()
            if form is not None:
                self._float_forms[handle.worker] = form
        self._float_infos_read = sum(handle.float_infos_read for handle in self._handles)

    def ready_envs(self) -> NDArray[np.int64]:
        """Environments that were sent an action and are done with it, in ascending order."""
        env_ids = np.fromiter(self._sent, np.int64, len(self._sent))
        env_ids.sort()
        requested, completed = np.empty_like(env_ids), np.empty_like(env_ids)
        self._steps.requested_step.load_into(env_ids, requested)
        # PAIR publish/see, partner: StepLoop::complete_sent. The rows are read after this load.
        self._steps.completed_step.load_into(env_ids, completed)
        ready: NDArray[np.int64] = env_ids[completed == requested]
        return ready

    def wait_until_ready(self, count: int, deadline: float | None) -> NDArray[np.int64]:
        """Wait until at least ``count`` of the sent environments are done; returns all that are done."""
        while True:
            arrived = self._quorum.arrived
            ready = self.ready_envs()
            if len(ready) >= count:
                return ready
            self._wait_for_more(arrived, count - len(ready), deadline)

    def read_messages(self, env_ids: NDArray[np.int64]) -> list[Message]:
        """The messages about these environments, which are done, and perhaps about others of the same workers. They
        are kept until ``mark_received``."""
        workers = sorted(set(self._pool.worker_of_env[env_ids].tolist()))
        handles = [self._handles[worker] for worker in workers]
        while True:
            try:
                if len(env_ids) == len(self._sent):
                    self._resync()
                self._drain_messages(handles, None)
                return [message for messages in self._received.values() for message in messages]
            except WorkerDied as death:  # in the middle of a message
                self._restart_worker(death)

    def mark_received(self, env_ids: NDArray[np.int64]) -> None:
        """The caller has taken the results of these environments, and the messages."""
        self._received.clear()
        self._sent.difference_update(env_ids.tolist())
        if not self._sent:
            self.pending_call = AsyncState.DEFAULT

    def _wait_for_more(self, arrived: int, more: int, deadline: float | None) -> None:
        """Wait until ``more`` environments have arrived since the count was ``arrived``, or a worker was restarted."""
        busy = [handle for handle in self._handles if handle.pending]
        if not busy and self._quorum.arrived == arrived:  # Ctrl-C came after the request and before the command
            self._count_invalid = True
            self._commands.issue_all(self._cell, COMMAND_SEND)
            busy = self._handles
        try:
            self._wait_for_count(arrived + more, deadline, WatchedPeers(busy))
        except WorkerDied as death:
            self._restart_worker(death)

    def _resync(self) -> None:
        """Make the count of arrivals valid again, when all workers have finished their commands.

        A worker that has finished may not have arrived yet. So counting begins in the other cell of the quorum, where
        every worker arrives once: a worker that has done that has arrived in the old cell before."""
        while self._count_invalid:
            # A worker with a long message waits until the parent reads it, and does nothing else before.
            try:
                self._drain_messages(self._handles, None)
            except WorkerDied as death:
                self._restart_worker(death)
                self._wait(None)
                continue
            self._count_invalid = False
            self._cell ^= 1
            self._quorum = self._steps.quorums[self._cell]
            self._expected_arrivals = self._quorum.arrived
            last_messages = self._last_messages.copy()
            self._issue_messages([("no_op",)] * len(self._handles))
            self._last_messages = last_messages  # what a worker that dies now has to do again
            self._wait(None)

    def _wait(self, deadline: float | None) -> None:
        """Wait until all workers have finished their commands."""
        began = time.monotonic()
        while True:
            try:
                if not self._count_invalid:
                    self._wait_for_count(self._expected_arrivals, deadline, self._pool.peers)
                    return
                arrived = self._quorum.arrived
                busy = [handle for handle in self._handles if handle.pending]
                if not busy:
                    self._resync()
                    return
                self._wait_for_arrival(arrived, busy, began, deadline)
            except WorkerDied as death:
                self._restart_worker(death)
                began = time.monotonic()

    def _wait_for_arrival(self, arrived: int, busy: list[WorkerHandle], began: float, deadline: float | None) -> None:
        """Wait for the next arrival, but not for long: a busy worker may have nothing to arrive for, because the steps
        of its command were made with the command before."""
        now = time.monotonic()
        if self._step_timeout is not None and now - began > self._step_timeout:
            raise self._kill_hung(busy[0])
        if deadline is not None and now >= deadline:
            raise WaitTimeout("timed out before all workers had finished")
        with contextlib.suppress(WaitTimeout):
            self._quorum.wait(arrived + 1, _POLL_SECONDS, WatchedPeers(busy))

    def _wait_for_count(self, count: int, deadline: float | None, peers: WatchedPeers) -> None:
        """Wait until the quorum has counted ``count`` arrivals, for ``step_timeout`` seconds at most."""
        timeout, hung = self._timeout(deadline)
        try:
            self._quorum.wait(count, timeout, peers)
        except WaitTimeout:
            if not hung:
                raise
            for peer in peers:
                if peer.handle.pending:
                    raise self._kill_hung(peer.handle) from None
            # no worker is pending: the last arrival came right after the timeout

    def _drain_messages(self, handles: list[WorkerHandle], deadline: float | None) -> None:
        """Read all messages that these workers have sent."""
        unreadable: Exception | None = None
        any_read = False
        for handle in handles:
            while handle.has_message:
                content = self._read_content(handle, deadline)
                any_read = True
                try:
                    message = Message.unpickle(content)
                except Exception as error:  # raised after all messages are read, so that none is left for the next call
                    unreadable = error
                    continue
                self._received.setdefault(handle.worker, []).append(message)
                for cause in message.restart_causes:
                    self._count_restart(cause)
        if any_read:
            self._messages_read = sum(handle.messages_read for handle in self._handles)
        if unreadable is not None:
            self._received.clear()
            unreadable.add_note("while this process unpickled what a worker had returned")
            raise unreadable

    def _read_content(self, handle: WorkerHandle, deadline: float | None) -> bytes:
        timeout, hung = self._timeout(deadline)
        try:
            return handle.read_message(timeout)
        except WaitTimeout:
            if not hung:
                raise
            raise self._kill_hung(handle) from None

    def _send_content(self, handle: WorkerHandle, content: bytes) -> None:
        try:
            handle.channel.send(content, self._step_timeout)
        except WaitTimeout:
            raise self._kill_hung(handle) from None

    def _timeout(self, deadline: float | None) -> tuple[float | None, bool]:
        """How long to wait now, and whether a worker that takes longer counts as hung."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        limit = self._step_timeout
        return (left, False) if limit is None or (left is not None and left <= limit) else (limit, True)

    def _kill_hung(self, handle: WorkerHandle, missed: str | None = None) -> WorkerDied:
        """Kill a worker that hangs, and treat it as dead. ``missed`` is what it did not do in time."""
        missed = missed or f"answer within step_timeout={self._step_timeout:g} s"
        handle.kill()
        handle.kill_reason = f"{handle.peer.name} (pid {handle.peer.pid}) did not {missed} and was killed"
        return handle.death_error(handle.kill_reason)

    # ---------------------------------------------------------------------------------------------------- failures

    def mark_broken(self, reason: str) -> None:
        """Refuse all further commands."""
        self.broken = reason

    @property
    def keeps_observations(self) -> bool:
        """Whether ``keep_observations`` was called."""
        return self._last_observations is not None

    def keep_observations(self, observations: list[Any]) -> None:
        """Keep the observations that are handed out now, one for each environment, for restarts."""
        self._last_observations = observations

    def keep_observation(self, env: int, observation: Any) -> None:
        """Replace one of the observations that are kept."""
        assert self._last_observations is not None
        self._last_observations[env] = observation

    def _restart_worker(self, death: WorkerDied) -> None:
        """Restart a worker that is dead; with ``on_error="raise"``, raise its death."""
        handle = self._handles[death.worker]
        if self._on_error == "raise":
            if self.broken is None:
                logger.error("%s", str(death))
            self.broken = str(death)
            raise death
        self._count_invalid = True
        message = self._last_messages.get(handle.worker)
        limit, setting = self._restart_limit()
        while True:
            self._count_restart(str(death), death)
            try:
                self._pool.restart(handle, self._steps, limit)
                self._received.pop(handle.worker, None)
                self._messages_read = sum(other.messages_read for other in self._handles)
                self._float_forms.pop(handle.worker, None)
                self._float_infos_read = sum(other.float_infos_read for other in self._handles)
                self._restore_worker(handle, message, str(death))
                return
            except WorkerDied as next_death:
                death = next_death
            except WaitTimeout:
                death = self._kill_hung(handle, f"build its environments within {limit:g} s (see {setting})")
            except Exception as error:
                self.broken = f"worker {handle.worker} could not be restarted: {error}"
                raise
            except KeyboardInterrupt:
                self.broken = f"Ctrl-C interrupted the restart of worker {handle.worker}"
                handle.kill()  # half started, it would not answer close()
                raise

    def _restart_limit(self) -> tuple[float | None, str]:
        """How long a restarted worker may build its environments, and the setting that limits it."""
        limit, setting = self._pool.start_timeout, "start_timeout"
        if self._step_timeout is not None:
            # Building environments may take longer than a step: allow ten times as long as the first start took.
            derived = self._step_timeout + 10 * self._pool.start_seconds
            if limit is None or derived < limit:
                return derived, "step_timeout"
        return limit, setting

    def _restore_worker(self, handle: WorkerHandle, message: tuple[Any, ...] | None, cause: str) -> None:
        """Bring a new process to the point where the old one died. Environments that were to be stepped are reset and
        truncated; a message that is not a step is sent again."""
        in_step = message is None or message[0] == "step"
        stepping = [index for index, env in enumerate(handle.envs) if in_step and (not self._sent or env in self._sent)]
        last = self._last_observations and self._last_observations[handle.envs.start : handle.envs.stop]
        handle.issue(COMMAND_MESSAGE, self._cell)
        self._send_content(handle, pickle_for_worker(("take_over", cause, last, stepping)))
        while handle.pending:
            arrived = self._quorum.arrived
            if handle.pending:
                self._wait_for_count(arrived + 1, None, WatchedPeers([handle]))
        if message is not None and message[0] == "reset":
            for index, seed in message[1]:
                handle.seeds[index] = seed
        if in_step:
            message = None  # the truncation is the result of the step
            self._last_messages.pop(handle.worker, None)
        for env in handle.envs:
            self._steps.completed_step.store(env, self._steps.requested_step.load(env))
        if message is not None:
            self._last_messages[handle.worker] = message
            handle.issue(COMMAND_MESSAGE, self._cell)
            self._send_content(handle, pickle_for_worker(message))

    def _count_restart(self, cause: str, death: WorkerDied | None = None) -> None:
        self.restarts += 1
        logger.warn("%s", f"restart {self.restarts}: {cause}")
        if not self._restart_window.record():
            self.broken = (
                f"{self._restart_window.recent} restarts within {self._restart_window.seconds:g} s are more than "
                f"max_restarts={self._restart_window.max_restarts}; fix the cause or allow more. The last: {cause}"
            )
            raise RestartLimit(self.broken) from death
