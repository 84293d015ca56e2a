"""WorkerPool: all workers of one vector environment. It starts, restarts and ends their processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from memlane._native import COMMAND_CLOSE
from memlane.core import Segment, StartError
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
_started: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
"""Pools whose workers may run."""
_MAX_NAMED = 4
"""Workers that an error names; of more, it has the number."""


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
        start_timeout: float | None,
    ) -> None:
        self._context = mp.get_context(context or "forkserver")
        self._daemon = daemon
        self._name = name
        self._peers: WatchedPeers | None = None
        self.start_timeout = start_timeout
        """Seconds within which a worker has to build its environments; None: no limit."""
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
        _kill_at_exit(os.getpid())
        _started.add(self)
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
            seconds = time.monotonic() - began
            if self.start_timeout is not None and seconds >= self.start_timeout:
                raise self._start_timed_out([handle for handle in self.handles if handle.worker not in ready])
            connections = {handle.channel.connection: handle for handle in self.handles if handle.worker not in ready}
            sentinels = {
                handle.process.sentinel: handle for handle in connections.values() if handle.process is not None
            }
            left = _QUIET_SECONDS if self.start_timeout is None else min(_QUIET_SECONDS, self.start_timeout - seconds)
            signalled = multiprocessing.connection.wait([*connections, *sentinels], timeout=left)
            for source in signalled:
                handle = connections.get(source) or sentinels[source]  # type: ignore[call-overload,index]
                if handle.worker not in ready:
                    ready[handle.worker] = handle.receive_ready()
            if not signalled and (seconds := time.monotonic() - began) >= _QUIET_SECONDS:
                print(f"memlane: {len(ready)} of {len(self.handles)} workers ready, {seconds:.0f} s", file=sys.stderr)
        return [ready[handle.worker] for handle in self.handles]

    def _start_timed_out(self, late: list[WorkerHandle]) -> StartError:
        names = ", ".join(
            f"{handle.worker} (pid {handle.peer.pid}, environments {handle.envs.start} to {handle.envs.stop - 1})"
            for handle in late[:_MAX_NAMED]
        )
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return StartError(
            f"{len(late)} of {len(self.handles)} workers did not build their environments within "
            f"start_timeout={self.start_timeout:g} s and were killed: {names}{more}; a function of env_fns hangs, or "
            "needs longer: raise start_timeout, or pass None for no limit"
        )

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


@functools.cache
def _kill_at_exit(pid: int) -> None:  # noqa: ARG001
    """Kill workers that were not closed when this process, ``pid``, ends. multiprocessing would send them SIGTERM and
    wait for their end, but they leave that signal to this process."""
    multiprocessing.util.Finalize(None, _kill_started, exitpriority=0)


def _kill_started() -> None:
    for pool in list(_started):
        for handle in pool.handles:
            handle.kill()


@contextlib.contextmanager
def _starting(context: Any) -> Iterator[None]:
    """Around the start of workers: they do not import the main script, and numeric libraries use one thread each."""
    with without_main_module(), one_thread_each():
        if context.get_start_method() == "forkserver":
            ensure_fork_server([work.__module__])
        yield
