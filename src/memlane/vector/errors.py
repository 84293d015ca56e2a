"""What a vector environment raises when a worker fails."""

from __future__ import annotations

import multiprocessing

from memlane.core import MemlaneError, Peer, PeerDied, WaitTimeout


class WorkerDied(PeerDied):
    """A worker process is dead: killed, crashed, or given up because it hung. ``envs`` are the numbers of the
    environments that it ran."""

    def __init__(self, message: str, *, peer: Peer | None = None, worker: int = -1, envs: range = range(0)) -> None:
        super().__init__(message, peer=peer)
        self.worker = worker
        self.envs = envs


class CallTimeout(WaitTimeout, multiprocessing.TimeoutError):
    """The workers did not answer in time. The call stays pending: the same ``_wait`` may be called again."""


class RestartLimit(MemlaneError, RuntimeError):
    """Environments died more often than ``max_restarts`` allows."""


class WorkerError(MemlaneError, RuntimeError):
    """An environment raised something that cannot travel between processes; the text is all there is of it."""


class RemoteTraceback(Exception):
    """Where in the worker an exception came from. Stands as the cause of the exception in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nIn the worker:\n{self.text}"
