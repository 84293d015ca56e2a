"""WorkerPool: all workers of one vector environment. It starts, restarts and ends their processes."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from memlane._native import COMMAND_CLOSE
from memlane.core import Segment
from memlane.core.children import ensure_fork_server, one_thread_each, without_main_module
from memlane.core.process_limits import explained_start, require_startable
from memlane.vector.local_worker import LocalWorker
from memlane.vector.messages import Ready
from memlane.vector.placement import Placement
from memlane.vector.step_segment import StepSegment
from memlane.vector.worker import Task, work
from memlane.vector.worker_handle import WatchedPeers, WorkerHandle

_QUIET_SECONDS = 3.0
"""A start that takes longer prints its progress, each time that this many seconds have passed."""


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
            require_startable(len(self.handles), "workers", "num_workers")
            with explained_start("workers"), _starting(self._context):
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
        with explained_start("a worker"), _starting(self._context):
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
