"""Supervisor: asks the workers, waits until they are done, and puts new ones in the place of those that die.

It knows nothing of Gymnasium: a command is a number and perhaps a message, an answer is an arrival at the quorum and
perhaps a message. The fast path is one wait for one count; everything else here is about deaths.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gymnasium import logger

from memlane import _native
from memlane._native import COMMAND_MESSAGE, COMMAND_SEND, COMMAND_STEP
from memlane.core import WaitTimeout
from memlane.core.children import RestartWindow
from memlane.vector.errors import RestartLimit, WorkerDied
from memlane.vector.messages import Message, pickle_for_worker
from memlane.vector.step_segment import StepSegment
from memlane.vector.worker_handles import WatchedPeers, WorkerHandle, WorkerPool

OnError = Literal["raise", "restart"]
_LOOK_AGAIN_SECONDS = 0.05


class Supervisor:
    """All commands to all workers go through here, from one thread."""

    def __init__(
        self,
        workers: WorkerPool,
        steps: StepSegment,
        *,
        on_error: OnError,
        max_restarts: int,
        restart_window: float,
        step_timeout: float | None,
    ) -> None:
        self.workers = workers
        self.handles = workers.handles
        self.steps = steps
        self.on_error: OnError = on_error
        self.step_timeout = step_timeout
        self.broken: str | None = None
        """Why nothing can be asked any more."""
        self.restarts = 0
        self.heard: dict[int, list[Message]] = {}
        """What workers have said since this was last emptied."""
        self.last_observations: list[Any] | None = None
        """Those that were last handed out, one for each environment, where a restart needs them."""
        self.sent: set[int] = set()
        """Environments whose steps were sent and not received yet."""
        self._window = RestartWindow(max_restarts, restart_window)
        cores = [-1 if handle.task.core is None else handle.task.core for handle in self.handles]
        self._commands = _native.CommandWords(steps.commands, cores)
        self._messages: dict[int, tuple[Any, ...]] = {}
        """What each worker was last told, unless it has been asked for a step since."""
        self._heard = 0
        """How many messages have been heard from the workers that there are now."""
        self._cell = 0
        self.quorum = steps.quorums[0]
        """Where workers arrive."""
        self._due = 0
        """The count of arrivals at which all that was asked is done."""
        self._uneven = False
        """Whether a death has made that count meaningless."""

    # ------------------------------------------------------------------------------------------------------ asking

    def step(self) -> None:
        """All environments make a step."""
        self._messages.clear()  # what came before is over
        self._due += self.steps.spec.num_envs  # before it is given: Ctrl-C may come with the return of that call
        self._commands.issue_all(self._cell, COMMAND_STEP)

    def send(self, arrivals: Mapping[int, int]) -> None:
        """Those that are ``asked`` make a step; each of these workers has so many of them."""
        workers, due = list(arrivals), sum(arrivals.values())
        self._messages.clear()  # also for those that are not asked now
        self._due += due
        self._commands.issue(workers, self._cell, COMMAND_SEND)

    def tell(self, messages: Sequence[tuple[Any, ...]]) -> None:
        """A command that is a message, to each worker."""
        pickled = [pickle_for_worker(message) for message in messages]  # all of them before any is sent: one may refuse
        try:
            for handle, message, content in zip(self.handles, messages, pickled, strict=True):
                self._messages[handle.worker] = message
                handle.issue(COMMAND_MESSAGE, self._cell)
                # To one that is dead: its death is found, and told, by whoever waits for the answer.
                with contextlib.suppress(WorkerDied):
                    self._send(handle, content)
                self._due += len(handle.envs)
        except KeyboardInterrupt:
            self.broken = "Ctrl-C came when some of the workers had been told something, and others had not"
            raise

    @property
    def pending(self) -> bool:
        """Whether something was asked that is not done."""
        return self._uneven or self.quorum.arrived < self._due

    # ----------------------------------------------------------------------------------------------------- waiting

    def finish(self, deadline: float | None) -> dict[int, list[Message]]:
        """Wait until all workers have done what was asked; what they had to say. ``WaitTimeout`` changes nothing: the
        same call goes on where it was."""
        while True:
            try:
                if deadline is None and self.step_timeout is None and not self._uneven:
                    self.quorum.wait(self._due, None, self.workers.peers)  # as `_wait` does, in a quarter of the time
                else:
                    self._wait(deadline)
                if self.steps.messages_sent != self._heard:
                    self.hear(self.handles, deadline)
                break
            except WorkerDied as death:  # perhaps in the middle of what it had to say
                self.heal(death)
        if not self.heard:
            return {}
        heard, self.heard = self.heard, {}
        return heard

    def wait_for_more(self, seen: int, more: int, deadline: float | None) -> None:
        """Wait until ``more`` environments have arrived since the count was ``seen``, or a worker was replaced."""
        busy = [handle for handle in self.handles if handle.pending]
        if not busy and self.quorum.arrived == seen:  # Ctrl-C came when a step was asked for and before the command
            self._uneven = True
            self._commands.issue_all(self._cell, COMMAND_SEND)
            busy = self.handles
        try:
            self._arrive(seen + more, deadline, WatchedPeers(busy))
        except WorkerDied as death:
            self.heal(death)

    def settle(self) -> None:
        """Everybody has finished. If the count is off, count anew in the other cell: a worker that has finished may not
        have arrived yet, so all arrive there once, and whoever has done that has arrived in the old one before."""
        while self._uneven:
            # Whoever has a long message waits for somebody to read it, and does nothing else before.
            try:
                self.hear(self.handles, None)
            except WorkerDied as death:
                self.heal(death)
                self._wait(None)
                continue
            self._uneven = False
            self._cell ^= 1
            self.quorum = self.steps.quorums[self._cell]
            self._due = self.quorum.arrived
            messages = self._messages.copy()
            self.tell([("no_op",)] * len(self.handles))
            self._messages = messages  # should one die now, that is what it is to do again
            self._wait(None)

    def _wait(self, deadline: float | None) -> None:
        began = time.monotonic()
        while True:
            try:
                if not self._uneven:
                    self._arrive(self._due, deadline, self.workers.peers)
                    return
                # The count is off: each worker is looked at.
                seen = self.quorum.arrived
                busy = [handle for handle in self.handles if handle.pending]
                if not busy:
                    self.settle()
                    return
                self._look_again(seen, busy, began, deadline)
            except WorkerDied as death:
                self.heal(death)
                began = time.monotonic()

    def _look_again(self, seen: int, busy: list[WorkerHandle], began: float, deadline: float | None) -> None:
        """Wait for the next arrival, but not for long: one of the busy may have nothing to arrive for, and only has to
        find that what was sent to it is done."""
        now = time.monotonic()
        if self.step_timeout is not None and now - began > self.step_timeout:
            raise self._gave_up(busy[0])
        if deadline is not None and now >= deadline:
            raise WaitTimeout("the time was over before all workers had finished")
        with contextlib.suppress(WaitTimeout):
            self.quorum.wait(seen + 1, _LOOK_AGAIN_SECONDS, WatchedPeers(busy))

    def _arrive(self, until: int, deadline: float | None, peers: WatchedPeers) -> None:
        """Wait for arrivals, for ``step_timeout`` at most."""
        patience, then_hung = self._patience(deadline)
        try:
            self.quorum.wait(until, patience, peers)
        except WaitTimeout:
            if not then_hung:
                raise
            for peer in peers:
                if peer.handle.pending:
                    raise self._gave_up(peer.handle) from None
            # else it came at the last moment

    def hear(self, handles: list[WorkerHandle], deadline: float | None) -> None:
        """Read the messages that workers have announced."""
        unreadable: Exception | None = None
        heard = False
        for handle in handles:
            while handle.has_message:
                content = self._hear(handle, deadline)
                heard = True
                try:
                    message = Message.unpickle(content)
                except Exception as error:  # all the others are read first: nothing is left over for the next call
                    unreadable = error
                    continue
                self.heard.setdefault(handle.worker, []).append(message)
                for cause in message.restart_causes:
                    self._count_restart(cause)
        if heard:
            self._heard = sum(handle.messages_read for handle in self.handles)
        if unreadable is not None:
            self.heard.clear()
            unreadable.add_note("while this process unpickled what a worker had returned")
            raise unreadable

    def _hear(self, handle: WorkerHandle, deadline: float | None) -> bytes:
        patience, then_hung = self._patience(deadline)
        try:
            return handle.read_message(patience)
        except WaitTimeout:
            if not then_hung:
                raise
            raise self._gave_up(handle) from None

    def _send(self, handle: WorkerHandle, content: bytes) -> None:
        try:
            handle.channel.send(content, self.step_timeout)
        except WaitTimeout:
            raise self._gave_up(handle) from None

    def _patience(self, deadline: float | None) -> tuple[float | None, bool]:
        """How long to wait now, and whether somebody who takes longer counts as hung."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        limit = self.step_timeout
        return (left, False) if limit is None or (left is not None and left <= limit) else (limit, True)

    def _gave_up(self, handle: WorkerHandle, what: str | None = None) -> WorkerDied:
        """A worker that hangs is killed, and dead like any other."""
        what = what or f"answer for step_timeout={self.step_timeout:g} s"
        handle.kill()
        who = f"{handle.peer.name} (pid {handle.peer.pid})"
        handle.kill_reason = f"{who} did not {what} and was killed"
        return handle.death_error(handle.kill_reason)

    # ----------------------------------------------------------------------------------------------------- healing

    def heal(self, death: WorkerDied) -> None:
        """A worker is dead: raise that, or put another in its place."""
        handle = self.handles[death.worker]
        if self.on_error == "raise":
            if self.broken is None:
                logger.error("%s", str(death))
            self.broken = str(death)
            raise death
        self._uneven = True
        message = self._messages.get(handle.worker)
        # To make environments may take longer than a step: as long as it took before, and then some.
        starting = self.step_timeout and self.step_timeout + 10 * self.workers.start_seconds
        while True:
            self._count_restart(str(death), death)
            try:
                self.workers.restart(handle, self.steps, starting)
                self.heard.pop(handle.worker, None)
                self._heard = sum(other.messages_read for other in self.handles)
                self._revive(handle, message, str(death))
                return
            except WorkerDied as again:
                death = again
            except WaitTimeout:
                death = self._gave_up(handle, f"make its environments within {starting:g} s (see step_timeout)")
            except Exception as error:
                self.broken = f"a new worker {handle.worker} could not be made: {error}"
                raise

    def _revive(self, handle: WorkerHandle, message: tuple[Any, ...] | None, cause: str) -> None:
        """Bring a new worker to where the old one was: its environments are reset and truncated; or, when the old one
        had been told something, it is told again."""
        stepping = message is None or message[0] == "step"
        now = [k for k, env in enumerate(handle.envs) if stepping and (not self.sent or env in self.sent)]
        last = self.last_observations and self.last_observations[handle.envs.start : handle.envs.stop]
        handle.issue(COMMAND_MESSAGE, self._cell)
        self._send(handle, pickle_for_worker(("take_over", cause, last, now)))
        while handle.pending:
            seen = self.quorum.arrived
            if handle.pending:
                self._arrive(seen + 1, None, WatchedPeers([handle]))
        if message is not None and message[0] == "reset":
            for k, seed in message[1]:
                handle.seeds[k] = seed
        if stepping:
            message = None  # made good by the truncation
            self._messages.pop(handle.worker, None)
        for env in handle.envs:
            self.steps.completed_step.store(env, self.steps.requested_step.load(env))
        if message is not None:
            self._messages[handle.worker] = message
            handle.issue(COMMAND_MESSAGE, self._cell)
            self._send(handle, pickle_for_worker(message))

    def _count_restart(self, cause: str, death: WorkerDied | None = None) -> None:
        self.restarts += 1
        logger.warn("%s", f"restart {self.restarts}: {cause}")
        if not self._window.record():
            self.broken = (
                f"{self._window.recent} restarts within {self._window.seconds:g} s are more than "
                f"max_restarts={self._window.max_restarts}; the last: {cause}"
            )
            raise RestartLimit(self.broken) from death
