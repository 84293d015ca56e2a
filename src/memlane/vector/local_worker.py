"""The worker of ``num_workers=0``: the caller's own process steps the environments.

For few and cheap environments no process can win: handing a step to another one and back takes longer than the step.
Everything else is as with workers in processes, because it is the same ``Worker``: checks, infos, resets, and the
replacement of an environment that raises. What needs another process is missing: a crash of an environment ends the
program, and one that hangs cannot be killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Env

from memlane._native import COMMAND_CLOSE
from memlane.vector.messages import Ready, interrupted
from memlane.vector.step_segment import StepSegment
from memlane.vector.worker import Worker, build_env, describe_envs, use_assets
from memlane.vector.worker_handle import WorkerHandle


class _QueueChannel:
    """One end of a channel within a process, with the methods of ``Channel`` that are used there."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: bytes, timeout: float | None = None) -> None:
        del timeout  # there is always room
        self._outbox.append(message)

    post = send

    def flush(self) -> None: ...

    def receive(self, timeout: float | None = None) -> bytes:
        del timeout  # a message is received when it is known to be there
        return self._inbox.popleft()

    def close(self) -> None: ...


@dataclass(eq=False)
class LocalWorker(WorkerHandle):
    """A worker without a process. ``run`` executes the commands that were issued to it."""

    env_fns: Sequence[Callable[[], Env[Any, Any]]] = ()
    """The functions that build the environments, as the caller gave them: not pickled."""
    _envs: list[Env[Any, Any]] = field(default_factory=list)
    _worker: Worker | None = None

    def start(self, context: Any, daemon: bool, name: str) -> None:
        del context, daemon, name
        use_assets(self.task.assets)
        self._envs.clear()
        try:
            for env_fn, index in zip(self.env_fns, self.envs, strict=True):
                self._envs.append(build_env(env_fn, index))
        except SystemExit as error:
            raise interrupted(error) from error
        to_worker, to_parent = deque[bytes](), deque[bytes]()
        self.channel = _QueueChannel(to_parent, to_worker)  # type: ignore[assignment]
        self._worker_end = _QueueChannel(to_worker, to_parent)
        self.seeds = [None] * len(self.envs)

    def receive_ready(self, timeout: float | None = None) -> Ready:
        del timeout
        return describe_envs(self._envs)

    def bind(self, steps: StepSegment) -> None:
        self.map_words(steps)
        channel: Any = self._worker_end
        self._worker = Worker(self.task, self.env_fns, self._envs, channel, steps, wait_for_commands=False)

    def wait_until_bound(self, timeout: float | None = None) -> None: ...

    def run(self) -> None:
        """Execute all commands that were issued."""
        assert self._worker is not None
        if self._worker.execute_commands() == COMMAND_CLOSE:
            self._close_envs()

    def release(self) -> None:
        self._close_envs()
        self._worker = None
        super().release()

    def _close_envs(self) -> None:
        while self._envs:
            self._envs.pop().close()
