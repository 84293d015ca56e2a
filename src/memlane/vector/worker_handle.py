"""WorkerHandle: one worker process as the parent sees it. ``WorkerPool`` has all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from memlane import _native
from memlane._native import (
    PROGRESS_COMMANDS_FINISHED,
    PROGRESS_CURRENT_ENV,
    PROGRESS_FLOAT_INFOS,
    PROGRESS_MESSAGES_SENT,
    PROGRESS_STEPS,
)
from memlane.core import Peer, PeerDied
from memlane.core.children import exit_of, start_child
from memlane.core.process_limits import require_descriptors
from memlane.vector.channel import Channel
from memlane.vector.errors import WorkerDied
from memlane.vector.float_infos import FloatForm
from memlane.vector.messages import Failure, Ready
from memlane.vector.step_segment import StepSegment
from memlane.vector.worker import Task, work


class WorkerPeer(Peer):
    """A worker process to watch during a wait. If it dies, the wait raises ``WorkerDied`` with all that is known."""

    __slots__ = ("handle",)

    def __init__(self, pid: int, start: int, handle: WorkerHandle) -> None:
        super().__init__(pid, start, f"worker {handle.worker}")
        self.handle = handle

    def error(self, waiting: str) -> WorkerDied:
        return self.handle.death_error(self.handle.kill_reason or self.describe_death(), waiting)

    def _cause(self) -> str:
        # Children of the fork server are not this process's children; multiprocessing asks the server how they ended.
        process = self.handle.process
        if process is None or self.alive:
            return super()._cause()
        return exit_of(process) or super()._cause()


@dataclass(eq=False)
class WorkerHandle:
    """One worker: its process, its channel, and its progress. A restart gives it another process."""

    worker: int
    """Index of the worker."""
    envs: range
    """Indices of its environments in the batch."""
    task: Task
    """What its process is started with."""
    process: BaseProcess | None = None
    peer: WorkerPeer = field(init=False)
    channel: Channel = field(init=False)
    steps: StepSegment | None = None
    """The step segment, from ``bind`` until the process has ended."""
    messages_read: int = 0
    """Messages of the current process that the parent has read."""
    float_infos_read: int = 0
    """Commands of the current process whose infos of floats the parent has read."""
    kill_reason: str | None = None
    """Why the parent killed the current process."""
    seeds: list[Any] = field(default_factory=list)
    """The seeds of the last reset, one for each environment."""
    _command: _native.CommandWord = field(init=False)
    _progress: NDArray[np.int64] = field(init=False)
    _issued_before: int = 0
    """Commands that were issued to earlier processes of this worker."""

    def start(self, context: Any, daemon: bool, name: str) -> None:
        """Start a process for the worker; ``receive_ready`` waits until its environments exist."""
        require_descriptors()
        with contextlib.ExitStack() as undo:  # if the limit of descriptors is reached, or Ctrl-C comes
            parent_end, worker_end = context.Pipe()
            undo.callback(parent_end.close)
            with worker_end:
                process = context.Process(target=work, name=name, args=(self.task, worker_end, Peer.current("parent")))
                process.daemon = daemon
                start_child(process)
            undo.callback(_end, process)
            assert process.pid is not None
            try:
                start = Peer.of(process.pid).start
            except PeerDied:  # it has ended already; what it sent, or its death, is reported by `receive_ready`
                start = 0
            self.peer = WorkerPeer(process.pid, start, self)
            undo.callback(self.peer.close)
            self.channel = Channel(parent_end)
            self.channel.watch(self.peer)
            self.process = process  # from here on `release` does all that
            undo.pop_all()
        self.messages_read = 0
        self.kill_reason = None
        self.seeds = [None] * len(self.envs)

    def receive_ready(self, timeout: float | None = None) -> Ready:
        """Receive the worker's first message. Raises its exception if building the environments failed."""
        message = self._receive(timeout)
        if isinstance(message, Failure):
            raise message.to_exception(None)
        assert isinstance(message, Ready)
        return message

    def bind(self, steps: StepSegment) -> None:
        """Send the worker the step segment; ``wait_until_bound`` waits until it is mapped."""
        self.map_words(steps)
        self.channel.send(steps.pickled)

    def map_words(self, steps: StepSegment) -> None:
        """Use this worker's words in the step segment."""
        self.steps = steps
        self._command = steps.command_word(self.worker)
        self._issued_before = self._command.issued
        self._progress = steps.progress[self.worker]
        steps.progress[self.worker] = 0
        steps.float_infos.forget(self.worker)
        self.float_infos_read = 0

    def wait_until_bound(self, timeout: float | None = None) -> None:
        """Wait until the worker has mapped the step segment."""
        self._receive(timeout)

    def _receive(self, timeout: float | None) -> Any:
        return cloudpickle.loads(self.channel.receive(timeout))

    def issue(self, command: int, cell: int) -> None:
        """Issue a command; the worker arrives in this cell of the quorum."""
        self._command.issue(cell, command)

    @property
    def pending(self) -> bool:
        """Whether the worker has not finished all commands."""
        return bool(self._progress[PROGRESS_COMMANDS_FINISHED] != self._command.issued - self._issued_before)

    @property
    def has_message(self) -> bool:
        """Whether the worker has sent a message that was not read."""
        return bool(self._progress[PROGRESS_MESSAGES_SENT] != self.messages_read)

    def read_float_form(self) -> FloatForm | None:
        """The form of infos of floats that the worker has written since the last call; None if there are none."""
        assert self.steps is not None
        written = int(self._progress[PROGRESS_FLOAT_INFOS])
        if written == self.float_infos_read:
            return None
        form = self.steps.float_infos.form(self.worker)
        self.float_infos_read = written
        return form

    def read_message(self, timeout: float | None) -> bytes:
        """Read the next message of the worker."""
        message = self.channel.receive(timeout)
        self.messages_read += 1
        return message

    def death_error(self, cause: str, waiting: str = "") -> WorkerDied:
        """The error for a worker that is dead: its environments, steps and seed beside the ``cause``."""
        envs = f"environment {self.envs.start}" if len(self.envs) == 1 else f"environments {_format_range(self.envs)}"
        current, steps = "", "before its first step"
        if self.steps is not None:
            progress = self._progress
            index = int(progress[PROGRESS_CURRENT_ENV])
            if self.pending and 0 <= index < len(self.envs):
                current = f"; it was at environment {self.envs[index]}, last seed {self.seeds[index]}"
            steps = f"after {max(0, int(progress[PROGRESS_STEPS]))} steps"  # a stray store leaves any number
        message = f"{cause}, with {envs}, {steps}{current}" + (f"; this process {waiting}" if waiting else "")
        return WorkerDied(message, peer=self.peer, worker=self.worker, envs=self.envs)

    def kill(self) -> None:
        """Send SIGKILL; ``release`` waits for the end of the process."""
        if self.process is not None and self.process.is_alive():
            self.process.kill()

    def release(self) -> None:
        """Wait for the end of the process and release its resources."""
        if self.process is not None:
            self.process.join()
            process, self.process = self.process, None
            process.close()
            self.channel.close()
            self.peer.close()
        if self.steps is not None:
            self.steps = None  # the handle and its peer refer to each other, and would keep the memory
            del self._command, self._progress


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()
    process.close()


def _format_range(envs: range) -> str:
    return f"{envs.start} to {envs.stop - 1}"


class WatchedPeers(list[WorkerPeer]):
    """Workers to watch during a wait, with their pidfds ready."""

    def __init__(self, handles: Sequence[WorkerHandle]) -> None:
        super().__init__(handle.peer for handle in handles)
        self.pidfds = [peer.fileno() for peer in self]
