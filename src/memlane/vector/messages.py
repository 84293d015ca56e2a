"""Messages: what goes between parent and worker as pickles, because it has no place in shared memory.

Nothing here is on the path of a step, unless environments return infos that were not declared.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from memlane.vector.errors import RemoteTraceback, WorkerError
from memlane.vector.infos import Entries, of_floats


def for_worker(message: object) -> bytes:
    """What the main script defined goes by value: a worker does not import that script."""
    return cloudpickle.dumps(message)  # type: ignore[no-any-return]


def for_parent(message: object) -> bytes:
    """Plain pickle where it works, which is fast; cloudpickle for what came by value."""
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(message)  # type: ignore[no-any-return]


@dataclass
class Failure:
    """An exception on its way to the parent."""

    worker: int
    pid: int
    env: int
    step: int
    error: BaseException | None
    """None when it cannot travel."""
    type_name: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException, worker: int, env: int, step: int) -> Failure:
        trace = "".join(traceback.format_exception(error))
        # An exception can refuse to be pickled, or to be made again from its pickle: found here, where only the object
        # is lost and not its text, and not in the parent.
        travels: BaseException | None = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            if type(pickle.loads(for_parent(error))) is not type(error):
                travels = None
        except BaseException:
            travels = None
        return cls(worker, os.getpid(), env, step, travels, type(error).__qualname__, _text(error), trace)

    def exception(self, seed: object) -> BaseException:
        """What the parent raises: the original, or a ``WorkerError`` in its place, with where it came from."""
        worker = f"worker {self.worker} (pid {self.pid})"
        where = f"environment {self.env} in {worker}, after {self.step} steps, last seed {seed}"
        error = self.error or WorkerError(f"{self.type_name}: {self.text} (the exception itself cannot be pickled)")
        error.add_note(f"raised by {where}")
        error.__cause__ = RemoteTraceback(self.trace)
        return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no text)"


@dataclass
class Ready:
    """A worker's first message: its environments exist, and this is what they are like."""

    observation_spaces: list[Any]
    """The different ones."""
    action_spaces: list[Any]
    which: list[tuple[int, int]]
    """For each environment, which of them."""
    metadata: dict[str, Any]
    render_mode: str | None


@dataclass
class Message:
    """What a worker has to say about a command, beside what lies in the steps. Infos that are nothing but floats travel
    alone, as a tuple (see ``infos.pack_floats``)."""

    infos: Entries
    observed: dict[int, Any]
    """Observations that do not lie in shared memory, by environment."""
    result: Any
    failures: list[Failure]
    remade: list[str]
    """Why environments were made anew in the worker, one for each."""

    @classmethod
    def read(cls, content: bytes) -> Message:
        said = cloudpickle.loads(content)
        if isinstance(said, Message):
            return said
        return cls(of_floats(*said), {}, None, [], [])
