"""Worker processes as the parent sees them: ``WorkerHandle`` is one of them, ``WorkerPool`` all of them."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from memlane import _native
from memlane._native import (
    COMMAND_CLOSE,
    PROGRESS_COMMANDS_FINISHED,
    PROGRESS_CURRENT_ENV,
    PROGRESS_MESSAGES_SENT,
    PROGRESS_STEPS,
)
from memlane.core import Peer, Segment
from memlane.core.children import ensure_fork_server, exit_of, one_thread_each, without_main_module
from memlane.vector.channel import Channel
from memlane.vector.errors import WorkerDied
from memlane.vector.messages import Failure, Ready, pickle_for_worker
from memlane.vector.placement import Placement
from memlane.vector.step_segment import StepSegment
from memlane.vector.worker import Task, work

_QUIET_SECONDS = 3.0
"""A start that takes longer prints its progress, each time that this many seconds have passed."""


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
        parent_end, worker_end = context.Pipe()
        process = context.Process(target=work, name=name, args=(self.task, worker_end, Peer.current("parent")))
        process.daemon = daemon
        process.start()
        worker_end.close()
        assert process.pid is not None
        peer = Peer.of(process.pid)
        # The process last: `release` relies on all three, also if Ctrl-C comes here.
        self.peer = WorkerPeer(peer.pid, peer.start, self)
        self.channel = Channel(parent_end)
        self.channel.watch(self.peer)
        self.process = process
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
        self.channel.send(pickle_for_worker(steps))

    def map_words(self, steps: StepSegment) -> None:
        """Use this worker's words in the step segment."""
        self.steps = steps
        self._command = steps.commands[self.worker]
        self._issued_before = self._command.issued
        self._progress = steps.progress[self.worker]
        steps.progress[self.worker] = 0

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
            steps = f"after {int(progress[PROGRESS_STEPS])} steps"
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


def _format_range(envs: range) -> str:
    return f"{envs.start} to {envs.stop - 1}"


class WatchedPeers(list[WorkerPeer]):
    """Workers to watch during a wait, with their pidfds ready."""

    def __init__(self, handles: Sequence[WorkerHandle]) -> None:
        super().__init__(handle.peer for handle in handles)
        self.pidfds = [peer.fileno() for peer in self]


class WorkerPool:
    """All workers of one vector environment: starts, restarts and ends their processes."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        ranges: list[range],
        *,
        context: str | None,
        daemon: bool,
        name: str,
        autoreset_mode: AutoresetMode,
        restart_envs: bool,
        placement: Placement,
        assets: dict[str, Segment],
    ) -> None:
        self._context = mp.get_context(context or "forkserver")
        self._daemon = daemon
        self._name = name
        self._peers: WatchedPeers | None = None
        self.start_seconds = 0.0
        """How long the start of all workers took, until their environments existed."""
        self.placement = placement
        self.ranges = ranges
        """The environments of each worker."""
        from memlane.vector.local_worker import LocalWorker  # it imports this module

        def task(worker: int, envs: range, functions: bytes) -> Task:
            core = None if placement.cores is None else placement.cores[worker]
            return Task(worker, envs, functions, autoreset_mode, restart_envs, core, placement.spin, assets)

        self.local: LocalWorker | None = None
        """The worker of ``num_workers=0``, in this process."""
        if placement.num_workers == 0:
            self.local = LocalWorker(0, ranges[0], task(0, ranges[0], b""), env_fns=env_fns)
        self.handles: list[WorkerHandle] = (
            [self.local]
            if self.local is not None
            else [
                WorkerHandle(worker, envs, task(worker, envs, cloudpickle.dumps([env_fns[env] for env in envs])))
                for worker, envs in enumerate(ranges)
            ]
        )
        self.worker_of_env = np.repeat(np.arange(len(ranges)), [len(envs) for envs in ranges])
        """The worker of each environment."""

    def start(self) -> list[Ready]:
        """Start all workers at once; returns when the environments of all of them exist."""
        began = time.monotonic()
        try:
            if self.local is not None:
                self._start(self.local)
                return [self.local.receive_ready()]
            with _starting(self._context):
                for handle in self.handles:
                    self._start(handle)
            ready = self._receive_ready()
            self.start_seconds = time.monotonic() - began
            return ready
        except BaseException:
            self.kill()
            raise

    def bind(self, steps: StepSegment) -> None:
        """Send all workers the step segment, and wait until all have mapped it. One after the other, 64 workers took
        220 ms."""
        for handle in self.handles:
            handle.bind(steps)
        for handle in self.handles:
            handle.wait_until_bound()

    def restart(self, handle: WorkerHandle, steps: StepSegment, timeout: float | None) -> None:
        """Start a new process for a worker. ``WaitTimeout`` if its environments do not exist within ``timeout``."""
        handle.kill()
        handle.release()
        with _starting(self._context):
            self._start(handle)
        handle.receive_ready(timeout)
        handle.bind(steps)
        handle.wait_until_bound(timeout)

    def _start(self, handle: WorkerHandle) -> None:
        self._peers = None
        handle.start(self._context, self._daemon, f"Worker<{self._name}>-{handle.worker}")

    def _receive_ready(self) -> list[Ready]:
        began = time.monotonic()
        ready: dict[int, Ready] = {}
        while len(ready) < len(self.handles):
            connections = {handle.channel.connection: handle for handle in self.handles if handle.worker not in ready}
            sentinels = {
                handle.process.sentinel: handle for handle in connections.values() if handle.process is not None
            }
            signalled = multiprocessing.connection.wait([*connections, *sentinels], timeout=_QUIET_SECONDS)
            for source in signalled:
                handle = connections.get(source) or sentinels[source]  # type: ignore[call-overload,index]
                if handle.worker not in ready:
                    ready[handle.worker] = handle.receive_ready()
            if not signalled:
                seconds = time.monotonic() - began
                print(f"memlane: {len(ready)} of {len(self.handles)} workers ready, {seconds:.0f} s", file=sys.stderr)
        return [ready[handle.worker] for handle in self.handles]

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [peer.pid for peer in self.peers]

    @property
    def peers(self) -> WatchedPeers:
        """All workers, for a wait to watch."""
        if self._peers is None:
            self._peers = WatchedPeers([] if self.local is not None else self.handles)
        return self._peers

    def close(self, timeout: float | None) -> None:
        """Ask all workers to close their environments and exit; kill those that have not after ``timeout`` seconds."""
        for handle in self.handles:
            with contextlib.suppress(Exception):
                handle.issue(COMMAND_CLOSE, 0)
        if self.local is not None:
            self.local.run()
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in self.handles:
            if handle.process is not None:
                handle.process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all workers and release their resources."""
        for handle in self.handles:
            handle.kill()
        for handle in self.handles:
            handle.release()
            for asset in handle.task.assets.values():
                asset.close()


@contextlib.contextmanager
def _starting(context: Any) -> Iterator[None]:
    """Around the start of workers: they do not import the main script, and numeric libraries use one thread each."""
    with without_main_module(), one_thread_each():
        if context.get_start_method() == "forkserver":
            ensure_fork_server([work.__module__])
        yield
