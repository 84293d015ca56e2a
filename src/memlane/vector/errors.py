"""Errors of vector environments: workers that fail, waits that take too long, and calls in the wrong order."""

from __future__ import annotations

import multiprocessing

from gymnasium.error import AlreadyPendingCallError, ResetNeeded

from memlane.core import MemlaneError, Peer, PeerDied, WaitTimeout


class WorkerDied(PeerDied):
    """A worker process is dead: it was killed, crashed, or hung and was killed by memlane.

    Attributes:
        worker: Index of the worker.
        envs: Indices of its environments.
    """

    def __init__(self, message: str, *, peer: Peer | None = None, worker: int = -1, envs: range = range(0)) -> None:
        super().__init__(message, peer=peer)
        self.worker = worker
        self.envs = envs


class CallTimeout(WaitTimeout, multiprocessing.TimeoutError):
    """The environments were not done in time. The call stays pending: call the same ``_wait`` or ``recv`` again."""


class CallPending(AlreadyPendingCallError, ValueError):
    """Gymnasium's ``AlreadyPendingCallError``, which is also a ``ValueError``: call ``recv`` first."""


class NotReset(ResetNeeded, ValueError):
    """Gymnasium's ``ResetNeeded``, which is also a ``ValueError``: call ``reset`` first."""


class RestartLimit(MemlaneError, RuntimeError):
    """Workers or environments failed more often than ``max_restarts`` allows within ``restart_window`` seconds."""


class WorkerError(MemlaneError, RuntimeError):
    """Raised in place of an environment's exception that cannot be pickled, or that would end this process: a
    ``sys.exit`` while environments are built. Has its type and text."""


class RemoteTraceback(Exception):
    """The traceback in the worker of an exception that the parent raises; the ``__cause__`` of that exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nIn the worker:\n{self.text}"


def episode_ended(env: int) -> AssertionError:
    """The error of a step without autoreset of an environment whose episode has ended."""
    return AssertionError(
        f"the episode of environment {env} has ended; with AutoresetMode.DISABLED the caller has to reset it before "
        "its next step: reset(options={'reset_mask': mask})"
    )
