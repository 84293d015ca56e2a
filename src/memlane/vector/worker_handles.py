"""Workers as the parent sees them: started together, watched, asked, and replaced when they die."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
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
from memlane.core import Peer, Segment
from memlane.core.children import ensure_fork_server, exit_of, one_thread_each, without_main_module
from memlane.vector.channel import Channel
from memlane.vector.errors import WorkerDied
from memlane.vector.messages import Failure, Ready, for_worker
from memlane.vector.step_segment import CLOSE, FINISHED, STEPS, THROUGH, TOLD, Steps
from memlane.vector.worker import Task, work

_QUIET_SECONDS = 3.0
"""A start that takes longer says how far it is."""


class WorkerPeer(Peer):
    """A worker as something to watch: its death is told with all that is known of it."""

    __slots__ = ("handle",)

    def __init__(self, pid: int, start: int, handle: Handle) -> None:
        super().__init__(pid, start, f"worker {handle.worker}")
        self.handle = handle

    def error(self, waiting: str) -> WorkerDied:
        return self.handle.died(self.handle.verdict or self.describe_death(), waiting)

    def _cause(self) -> str:
        # The fork server's children are not ours; multiprocessing asks it how they ended.
        process = self.handle.process
        if process is None or self.alive:
            return super()._cause()
        return exit_of(process) or super()._cause()


@dataclass(eq=False)
class Handle:
    """One worker: its process, its channel, and how far it is with its commands."""

    worker: int
    envs: range
    task: Task
    process: BaseProcess | None = None
    peer: WorkerPeer = field(init=False)
    channel: Channel = field(init=False)
    steps: Steps | None = None
    _command: _native.Command = field(init=False)
    _progress: NDArray[np.int64] = field(init=False)
    _given_before: int = 0
    """Commands to those in whose place this one came."""
    heard: int = 0
    """Messages."""
    verdict: str | None = None
    """Why it was killed by this process."""
    seeds: list[Any] = field(default_factory=list)
    """What the environments were last reset with."""

    def start(self, context: Any, daemon: bool, name: str) -> None:
        ours, theirs = context.Pipe()
        self.process = context.Process(target=work, name=name, args=(self.task, theirs, Peer.current("parent")))
        self.process.daemon = daemon
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        known = Peer.of(self.process.pid)
        self.peer = WorkerPeer(known.pid, known.start, self)
        self.channel = Channel(ours)
        self.channel.watch(self.peer)
        self.heard = 0
        self.verdict = None
        self.seeds = [None] * len(self.envs)

    def introduction(self, timeout: float | None = None) -> Ready:
        """What the worker says first; its exception, if making the environments raised one."""
        said = self.receive(timeout)
        if isinstance(said, Failure):
            raise said.exception(None)
        assert isinstance(said, Ready)
        return said

    def bind(self, steps: Steps) -> None:
        """Give the worker its rows; ``bound`` waits until it has them."""
        self.steps = steps
        self._command = steps.commands[self.worker]
        self._given_before = self._command.given
        self._progress = steps.progress[self.worker]
        steps.progress[self.worker] = 0
        self.send(steps)

    def bound(self, timeout: float | None = None) -> None:
        self.receive(timeout)

    def send(self, message: object, timeout: float | None = None) -> None:
        self.channel.send(for_worker(message), timeout)

    def receive(self, timeout: float | None = None) -> Any:
        return cloudpickle.loads(self.channel.receive(timeout))

    def ask(self, command: int, cell: int) -> None:
        self._command.give(cell, command)

    @property
    def pending(self) -> bool:
        """Whether it has something to do still."""
        return bool(self._progress[FINISHED] != self._command.given - self._given_before)

    @property
    def silent(self) -> bool:
        """Whether it has announced no message that was not heard."""
        return bool(self._progress[TOLD] == self.heard)

    def hear(self, timeout: float | None) -> bytes:
        """The next message that the worker has announced."""
        message = self.channel.receive(timeout)
        self.heard += 1
        return message

    def died(self, obituary: str, waiting: str = "") -> WorkerDied:
        """The error that says everything."""
        envs = f"environment {self.envs.start}" if len(self.envs) == 1 else f"environments {_words(self.envs)}"
        at, after = "", "before its first step"
        if self.steps is not None:
            progress = self._progress
            through = int(progress[THROUGH])
            if self.pending and 0 <= through < len(self.envs):
                seed = self.seeds[through]
                at = f"; it was at environment {self.envs[through]}, last seed {seed}"
            after = f"after {int(progress[STEPS])} steps"
        message = f"{obituary}, with {envs}, {after}{at}" + (f"; this process {waiting}" if waiting else "")
        return WorkerDied(message, peer=self.peer, worker=self.worker, envs=self.envs)

    def kill(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()

    def end(self) -> None:
        """Collect what is left of the process."""
        if self.process is not None:
            self.process.join()
            self.process.close()
            self.process = None
            self.channel.close()
            self.peer.close()
        if self.steps is not None:
            self.steps = None  # the handle and its peer know each other, and would keep the memory
            del self._command, self._progress


def _words(envs: range) -> str:
    return f"{envs.start} to {envs.stop - 1}"


class Peers(list[WorkerPeer]):
    """Workers to be watched, with their descriptors at hand."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        super().__init__(handle.peer for handle in handles)
        self.pidfds = [peer.fileno() for peer in self]


class Workers:
    """All workers of one vector environment."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        ranges: list[range],
        *,
        context: str | None,
        daemon: bool,
        name: str,
        autoreset_mode: AutoresetMode,
        heal: bool,
        pin: bool | None,
        assets: dict[str, Segment],
    ) -> None:
        self._context = mp.get_context(context or "forkserver")
        self._daemon = daemon
        self._name = name
        self._peers: Peers | None = None
        self.start_seconds = 0.0
        """How long it took until all had their environments."""
        cores = sorted(os.sched_getaffinity(0))
        # Only when each core gets one: of two programs with a few workers each, nobody wants all on the same few cores.
        pin = len(ranges) == len(cores) if pin is None else pin
        self.handles = [
            Handle(
                worker,
                envs,
                Task(
                    worker,
                    envs,
                    cloudpickle.dumps([env_fns[env] for env in envs]),
                    autoreset_mode,
                    heal,
                    cores[worker % len(cores)] if pin else None,
                    len(ranges) <= len(cores),
                    assets,
                ),
            )
            for worker, envs in enumerate(ranges)
        ]
        self.of_env = np.repeat(np.arange(len(ranges)), [len(envs) for envs in ranges])
        """Which worker has an environment."""

    def start(self) -> list[Ready]:
        """All at once; returns when the last has its environments."""
        began = time.monotonic()
        try:
            with _starting(self._context):
                for handle in self.handles:
                    self._start(handle)
            ready = self._introductions()
            self.start_seconds = time.monotonic() - began
            return ready
        except BaseException:
            self.kill()
            raise

    def bind(self, steps: Steps) -> None:
        """Give all of them their rows. One after the other, 64 workers took 220 ms."""
        for handle in self.handles:
            handle.bind(steps)
        for handle in self.handles:
            handle.bound()

    def restart(self, handle: Handle, steps: Steps, timeout: float | None) -> None:
        """A new process in the place of a dead one. ``WaitTimeout`` if its environments are not made in that time."""
        handle.kill()
        handle.end()
        with _starting(self._context):
            self._start(handle)
        handle.introduction(timeout)
        handle.bind(steps)
        handle.bound(timeout)

    def _start(self, handle: Handle) -> None:
        self._peers = None
        handle.start(self._context, self._daemon, f"Worker<{self._name}>-{handle.worker}")

    def _introductions(self) -> list[Ready]:
        began = time.monotonic()
        ready: dict[int, Ready] = {}
        while len(ready) < len(self.handles):
            missing = {handle.channel.connection: handle for handle in self.handles if handle.worker not in ready}
            sentinels = {handle.process.sentinel: handle for handle in missing.values() if handle.process is not None}
            found = multiprocessing.connection.wait([*missing, *sentinels], timeout=_QUIET_SECONDS)
            for each in found:
                handle = missing.get(each) or sentinels[each]  # type: ignore[call-overload,index]
                if handle.worker not in ready:
                    ready[handle.worker] = handle.introduction()
            if not found:
                seconds = time.monotonic() - began
                print(f"memlane: {len(ready)} of {len(self.handles)} workers ready, {seconds:.0f} s", file=sys.stderr)
        return [ready[handle.worker] for handle in self.handles]

    @property
    def peers(self) -> Peers:
        """All workers, to be watched by a wait. Made anew after each start."""
        if self._peers is None:
            self._peers = Peers(self.handles)
        return self._peers

    def close(self, timeout: float | None) -> None:
        """Ask every worker to end; kill those that do not."""
        for handle in self.handles:
            with contextlib.suppress(Exception):
                handle.ask(CLOSE, 0)
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in self.handles:
            if handle.process is not None:
                handle.process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for handle in self.handles:
            handle.kill()
        for handle in self.handles:
            handle.end()
            for asset in handle.task.assets.values():
                asset.close()


@contextlib.contextmanager
def _starting(context: Any) -> Iterator[None]:
    """Around the start of workers: they need nothing of the main script, and one thread each."""
    with without_main_module(), one_thread_each():
        if context.get_start_method() == "forkserver":
            ensure_fork_server([work.__module__])
        yield
