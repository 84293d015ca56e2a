"""Collector errors: report an exception or a death in a collector process to the learner.

A collector runs its loop inside ``errors.reporting(worker)``; the learner watches it with ``errors.watch(worker, pid)``
and passes the result to its waits as one of ``peers``. When the collector raises, the learner's wait ends within a
second with a ``CollectorError`` that has the remote traceback; when its process dies, with a ``CollectorDied``.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from memlane.core import SIGNAL, MemlaneError, Peer, PeerDied, Segment
from memlane.core.arguments import as_count

_REPORT_BYTES = 64 * 1024
# Each collector writes its step count at every step, so each count has its own cache line. The next word on that line
# is the process that wrote it.
_WORDS_PER_LINE = 8
_STEP, _PROCESS = 0, 1
_REPORT_KINDS = {"pid": int, "step": int, "type_name": str, "message": str, "traceback": str}
_MAX_COPIES = 1000
"""Copies of a report that may be withdrawn while they are made. A collector does that once for each exception."""


class CollectorError(MemlaneError, RuntimeError):
    """A collector raised an exception. The subclass ``CollectorDied`` means that its process died instead.

    The error can be pickled.
    """

    worker: int
    """Number of the collector."""
    pid: int
    """Process id of the collector."""
    type_name: str
    """Type of the exception, with its module; for ``CollectorDied``, how the process ended."""
    remote_traceback: str
    """The traceback in the collector; empty for ``CollectorDied``."""
    step: int
    """Step count that the collector reported last."""

    def __init__(
        self, message: str, *, worker: int, pid: int, type_name: str, remote_traceback: str, step: int
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.pid = pid
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.step = step

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **self._keywords()), self.args

    def _keywords(self) -> dict[str, Any]:
        names = ("worker", "pid", "type_name", "remote_traceback", "step")
        return {name: getattr(self, name) for name in names}


class CollectorDied(CollectorError, PeerDied):
    """The process of a collector died without reporting an exception: killed, crashed or exited."""

    def __init__(
        self, message: str, *, worker: int, pid: int, type_name: str, step: int, peer: Peer | None = None
    ) -> None:
        super().__init__(message, worker=worker, pid=pid, type_name=type_name, remote_traceback="", step=step)
        self.peer = peer

    def _keywords(self) -> dict[str, Any]:
        names = ("worker", "pid", "type_name", "step", "peer")
        return {name: getattr(self, name) for name in names}


class CollectorErrors:
    """Shared memory for one error report and one step count per collector.

    The learner creates it and passes it to the collectors as a ``Process`` argument.
    """

    def __init__(self, collectors: int) -> None:
        as_count("collectors", collectors, 1)
        self._open(
            Segment.create(
                {
                    "raised": (SIGNAL, ()),
                    "reporter": ("int64", collectors),  # process of the complete report, as Peer.word; 0: none
                    "steps": ("int64", (collectors, _WORDS_PER_LINE)),
                    "length": ("int64", collectors),
                    "report": ("uint8", (collectors, _REPORT_BYTES)),
                }
            )
        )

    def _open(self, segment: Segment) -> None:
        self.segment = segment
        self.collectors = segment.layout["reporter"].shape[0]
        self._raised = segment.signal("raised")
        self._reporter = segment.words("reporter")
        self._steps = segment.words("steps")

    # ---------------------------------------------------------------------------------------- the collector's side

    @contextmanager
    def reporting(self, worker: int) -> Iterator[Reporter]:
        """Run a collector's loop: an exception that leaves the block is reported to the learner and propagates."""
        reporter = Reporter(self, self._checked(worker))
        try:
            yield reporter
        except Exception as error:
            reporter.report(error)
            raise

    # ------------------------------------------------------------------------------------------ the learner's side

    def watch(self, worker: int, pid: int) -> CollectorPeer:
        """Return the collector in process ``pid`` as a peer to pass to waits.

        A report by an earlier process of this worker is deleted; a report by this process, also one made before this
        call, is kept.
        """
        self._checked(worker)
        try:
            peer = Peer.of(pid)
        except PeerDied:
            error = self._reported(worker)
            if error is not None and error.pid == pid:
                raise error from None
            raise
        collector = CollectorPeer(self, worker, peer.pid, peer.start)
        reporter = self._reporter.load(worker)
        if reporter != collector.word:
            self._reporter.compare_and_swap(worker, reporter, 0)
        return collector

    def check(self, collectors: Iterable[CollectorPeer] = ()) -> None:
        """Raise ``CollectorError`` if a collector has reported, ``CollectorDied`` if one of ``collectors`` is dead.

        Costs one atomic load, and one system call per collector in ``collectors``, when there is no error.
        """
        if self._raised.value:
            for worker in range(self.collectors):
                if error := self._reported(worker):
                    raise error
        for collector in collectors:
            collector.check()

    def step_of(self, worker: int) -> int:
        """Return the step count that the collector reported last."""
        return self._steps.load(self._checked(worker) * _WORDS_PER_LINE + _STEP)

    def _reported(self, worker: int, waiting: str = "", word: int | None = None) -> CollectorError | None:
        """Return the error that the worker reported, if any; with ``word``, only a report by that process."""
        for _ in range(_MAX_COPIES):
            reporter = self._reporter.load(worker)
            if not reporter or (word is not None and reporter != word):
                return None
            # PAIR publish/see, partner: Reporter.report. The report is read after the word that announces it.
            # PAIR claim/unchanged, partner: Reporter.report. A report that was withdrawn during the copy is not used.
            text = self.segment["report"][worker, : int(self.segment["length"][worker])].tobytes()
            if self._reporter.unchanged(worker, reporter):
                report = _parse(text) or self._damaged(worker, reporter)
                return CollectorError(
                    f"collector {worker} (pid {report['pid']}) raised {report['type_name']}: {report['message']}, "
                    f"after step {report['step']}{_while(waiting)}\n\nIn the collector:\n{report['traceback']}",
                    worker=worker,
                    pid=report["pid"],
                    type_name=report["type_name"],
                    remote_traceback=report["traceback"],
                    step=report["step"],
                )
        return None

    def _damaged(self, worker: int, reporter: int) -> dict[str, Any]:
        """Return a report in place of one that cannot be read."""
        return {
            "pid": Peer.from_word(reporter).pid,
            "step": self.step_of(worker),
            "type_name": "an exception",
            "message": "its report cannot be read, because a process has overwritten the shared memory",
            "traceback": "(lost)",
        }

    def _died(self, collector: CollectorPeer, waiting: str) -> CollectorDied:
        worker, description = collector.worker, collector.describe_death()
        # Another process in that word: the collector died before it entered reporting().
        reported = self._steps.load(worker * _WORDS_PER_LINE + _PROCESS) == collector.word
        step = self.step_of(worker) if reported else 0
        return CollectorDied(
            f"{description}, after step {step}{_while(waiting)}",
            worker=worker,
            pid=collector.pid,
            type_name=description,
            step=step,
            peer=Peer(collector.pid, collector.start, collector.name),
        )

    def _checked(self, worker: int) -> int:
        if not 0 <= worker < self.collectors:
            raise IndexError(f"there is no collector {worker}, only 0 to {self.collectors - 1}")
        return worker

    def close(self) -> None:
        """Release the memory. Calling it again has no effect."""
        self.segment.close()

    def __enter__(self) -> CollectorErrors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Segment:
        return self.segment

    def __setstate__(self, segment: Segment) -> None:
        self._open(segment)


class Reporter:
    """A collector's handle for its step count and error report. One process at a time per worker."""

    def __init__(self, errors: CollectorErrors, worker: int) -> None:
        self._errors = errors
        self.worker = worker
        self.step(0)
        errors._steps.store(worker * _WORDS_PER_LINE + _PROCESS, Peer.current().word)

    def step(self, step: int) -> None:
        """Store the number of steps made so far, for error messages."""
        self._errors._steps.store(self.worker * _WORDS_PER_LINE + _STEP, step)

    def report(self, error: BaseException) -> None:
        """Report ``error`` to the learner."""
        errors, me = self._errors, Peer.current()
        record = {
            "pid": me.pid,
            "step": errors.step_of(self.worker),
            "type_name": _type_name(error),
            "message": _message(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        text = np.frombuffer(_fitting(record), np.uint8)
        # PAIR claim/unchanged, partner: CollectorErrors._reported. An earlier report is withdrawn before its bytes are
        # overwritten: otherwise a torn copy of both could be accepted.
        errors._reporter.compare_and_swap(self.worker, errors._reporter.load(self.worker), 0)
        errors.segment["report"][self.worker, : len(text)] = text
        errors.segment["length"][self.worker] = len(text)
        # PAIR publish/see, partner: CollectorErrors._reported. The report is stored before the word that announces it.
        errors._reporter.store(self.worker, me.word)
        errors._raised.add()


class CollectorPeer(Peer):
    """A collector process to pass to waits as one of ``peers``: its failure ends the wait with ``CollectorError``."""

    __slots__ = ("_errors", "worker")

    def __init__(self, errors: CollectorErrors, worker: int, pid: int, start: int) -> None:
        super().__init__(pid, start, f"collector {worker}")
        self._errors = errors
        self.worker = worker

    @property
    def failed(self) -> bool:
        """Whether the collector has reported an exception; its process may still be exiting."""
        return self._errors._reporter.load(self.worker) == self.word

    def check(self) -> None:
        """Raise ``CollectorError`` if the collector has reported an exception, ``CollectorDied`` if it is dead."""
        if self.failed or not self.alive:
            raise self.error("")

    def error(self, waiting: str) -> CollectorError:
        """Return the error of the collector: the reported exception, or else its death."""
        return self._errors._reported(self.worker, waiting, self.word) or self._errors._died(self, waiting)

    def __reduce__(self) -> tuple[object, ...]:
        return (CollectorPeer, (self._errors, self.worker, self.pid, self.start))


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the report in ``text``; None if it is none."""
    try:
        report = json.loads(text)
        kinds = {name: type(report[name]) for name in _REPORT_KINDS}
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return report if kinds == _REPORT_KINDS else None


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _while(waiting: str) -> str:
    return f", while this process {waiting}" if waiting else ""


def _message(error: BaseException) -> str:
    try:
        return str(error) or "(no message)"
    except Exception as failure:  # a failing __str__ must not prevent the report
        return f"(no message: its __str__ raised {_type_name(failure)})"


def _fitting(record: dict[str, Any]) -> bytes:
    """Return the record as JSON of at most ``_REPORT_BYTES``. Long texts lose their middle."""
    for limit in (_REPORT_BYTES, _REPORT_BYTES // 4, _REPORT_BYTES // 16, _REPORT_BYTES // 64):
        short = {key: _shorten(value, limit // 2) for key, value in record.items()}
        text = json.dumps(short).encode()
        if len(text) <= _REPORT_BYTES:
            return text
    raise AssertionError("three strings of 1/128 of the limit, escaped to at most twelve times their length, fit")


def _shorten(value: Any, limit: int) -> Any:
    if not isinstance(value, str) or len(value) <= limit:
        return value
    return f"{value[: limit // 2]}\n... {len(value) - limit} characters ...\n{value[-limit // 2 :]}"
