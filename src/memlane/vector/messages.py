"""Messages: what parent and workers pickle to each other because it has no fixed size.

A step needs none of them, unless environments return infos that were not declared, or observations or actions that are
not in shared memory.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from memlane.vector.errors import RemoteTraceback, WorkerError
from memlane.vector.infos import PackedInfos, unpack_floats


def pickle_for_worker(message: object) -> bytes:
    """Pickle with cloudpickle: a worker does not import the main script, so what that defines goes by value."""
    return cloudpickle.dumps(message)  # type: ignore[no-any-return]


def pickle_for_parent(message: object) -> bytes:
    """Pickle with the fast standard pickle, or with cloudpickle where that fails: for what came by value."""
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(message)  # type: ignore[no-any-return]


@dataclass
class Failure:
    """An exception of a worker, for the parent to raise."""

    worker: int
    """Index of the worker."""
    pid: int
    """Process id of the worker."""
    env: int
    """Index of the environment that raised."""
    step: int
    """Environment steps that the worker had made."""
    error: BaseException | None
    """The exception; None if it cannot be pickled."""
    type_name: str
    """Name of the exception's class."""
    text: str
    """Text of the exception."""
    trace: str
    """Traceback in the worker."""

    @classmethod
    def from_exception(cls, error: BaseException, worker: int, env: int, step: int) -> Failure:
        """Describe an exception in the worker, so that it can be pickled."""
        trace = "".join(traceback.format_exception(error))
        # Some exceptions cannot be pickled, or cannot be unpickled. That is tried here, where only the object is lost;
        # in the parent its text would be lost too.
        picklable: BaseException | None = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            if type(pickle.loads(pickle_for_parent(error))) is not type(error):
                picklable = None
        except BaseException:
            picklable = None
        return cls(worker, os.getpid(), env, step, picklable, type(error).__qualname__, _text(error), trace)

    def to_exception(self, seed: object) -> BaseException:
        """The exception that the parent raises: the original, or a ``WorkerError`` if that could not be pickled. A note
        says which environment raised it, and the traceback in the worker is its cause."""
        worker = f"worker {self.worker} (pid {self.pid})"
        where = f"environment {self.env} in {worker}, after {self.step} steps of this worker, last seed {seed}"
        error = self.error or WorkerError(f"{self.type_name}: {self.text} (the exception itself cannot be pickled)")
        if not isinstance(error, Exception):  # sys.exit() of an environment is not that of the parent
            error = interrupted(error)
        error.add_note(f"raised by {where}")
        error.__cause__ = RemoteTraceback(self.trace)
        return error


def interrupted(error: BaseException) -> WorkerError:
    """The error for an environment that called ``sys.exit``, or raised what is no ``Exception`` either."""
    if isinstance(error, SystemExit):
        return WorkerError(f"an environment called sys.exit({'' if error.code is None else repr(error.code)})")
    return WorkerError(f"an environment raised {type(error).__name__}{f': {error}' if str(error) else ''}")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no text)"


@dataclass
class Ready:
    """A worker's first message: its environments exist, and these are their properties."""

    observation_spaces: list[Any]
    """The distinct observation spaces of its environments."""
    action_spaces: list[Any]
    """The distinct action spaces of its environments."""
    space_indices: list[tuple[int, int]]
    """For each environment, the indices of its spaces in ``observation_spaces`` and ``action_spaces``."""
    metadata: dict[str, Any]
    """``metadata`` of the first environment."""
    render_mode: str | None
    """``render_mode`` of the first environment."""


@dataclass
class Message:
    """What a worker sends about a command beside the rows of the step segment. A message about
    nothing but infos of floats that are not in shared memory is a tuple (see ``infos.pack_floats``)."""

    infos: PackedInfos
    """Infos that are not declared in ``info_spec``."""
    observations: dict[str, dict[int, Any]]
    """Parts of observations that are not in shared memory, by path and environment."""
    result: Any
    """What the command returned: for ``call`` and ``apply`` a list with one result per environment."""
    failures: list[Failure]
    """Exceptions that the parent has to raise."""
    restart_causes: list[str]
    """Why environments were restarted within the worker, one text for each."""

    @classmethod
    def unpickle(cls, content: bytes) -> Message:
        """Unpickle a message, or the tuple of floats that stands for one."""
        message = cloudpickle.loads(content)
        if isinstance(message, Message):
            return message
        return cls(unpack_floats(*message), {}, None, [], [])
