"""Collector errors: what went wrong in a collector, told to the learner with type, traceback, worker and last step.

A collector runs its loop inside ``errors.reporting(worker)``; the learner watches it with ``errors.watch(worker, pid)``
and passes that to its waits as one of ``peers``. An exception in the collector, or its death by a signal, then ends the
learner's wait with a ``CollectorError`` within a second, instead of a timeout a minute later.
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

_REPORT_BYTES = 64 * 1024
# A step counter is written at every step by its own process: each on a cache line of its own. Beside it, whose it is.
_WORDS_PER_LINE = 8
_STEP, _WHOSE = 0, 1


class CollectorError(MemlaneError, RuntimeError):
    """A collector raised or died. ``type_name`` is the exception's type, or the cause of death."""

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
        """The error of a learner must be able to travel, too."""
        facts = ("worker", "pid", "type_name", "remote_traceback", "step")
        return functools.partial(CollectorError, **{fact: getattr(self, fact) for fact in facts}), self.args


class CollectorErrors:
    """Room for one report of each of ``collectors``. Goes into a child as an argument."""

    def __init__(self, collectors: int) -> None:
        if collectors < 1:
            raise ValueError(f"collectors must be 1 or more, found {collectors}")
        self._open(
            Segment.create(
                {
                    "raised": (SIGNAL, ()),
                    "reporter": ("int64", collectors),  # the process whose report is complete, as Peer.word; 0: nobody
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
        """Around a collector's loop: an exception that leaves it is reported, and goes on its way."""
        reporter = Reporter(self, self._checked(worker))
        try:
            yield reporter
        except Exception as error:
            reporter.report(error)
            raise

    # ------------------------------------------------------------------------------------------ the learner's side

    def watch(self, worker: int, pid: int) -> CollectorPeer:
        """The collector in process ``pid`` as one of the ``peers`` of a wait. What an earlier process of this worker
        reported is forgotten; what this one did is not, even if it was faster than this call."""
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
        """``CollectorError`` if any collector has reported, or if one of ``collectors`` is dead. Costs next to nothing
        when all is well."""
        if self._raised.value:
            for worker in range(self.collectors):
                if error := self._reported(worker):
                    raise error
        for collector in collectors:
            if not collector.alive:
                raise collector.error("")

    def step_of(self, worker: int) -> int:
        """The last step that the collector told."""
        return self._steps.load(self._checked(worker) * _WORDS_PER_LINE + _STEP)

    def _reported(self, worker: int, waiting: str = "", word: int | None = None) -> CollectorError | None:
        """What the collector reported, if it did; with ``word``, only what that process did."""
        while reporter := self._reporter.load(worker):
            if word is not None and reporter != word:
                return None
            text = self.segment["report"][worker, : int(self.segment["length"][worker])].tobytes()
            if self._reporter.unchanged(worker, reporter):
                report: dict[str, Any] = json.loads(text)
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

    def _died(self, collector: CollectorPeer, waiting: str) -> CollectorError:
        worker, obituary = collector.worker, collector.describe_death()
        told = self._steps.load(worker * _WORDS_PER_LINE + _WHOSE) == collector.word
        step = self.step_of(worker) if told else 0  # else it died before it began to report
        return CollectorError(
            f"{obituary}, after step {step}{_while(waiting)}",
            worker=worker,
            pid=collector.pid,
            type_name=obituary,
            remote_traceback="",
            step=step,
        )

    def _checked(self, worker: int) -> int:
        if not 0 <= worker < self.collectors:
            raise IndexError(f"there is no collector {worker}; there is room for {self.collectors}")
        return worker

    def close(self) -> None:
        """Let the memory go. Again is harmless."""
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
    """The collector's hand on its own report. One process at a time may be a worker's reporter."""

    def __init__(self, errors: CollectorErrors, worker: int) -> None:
        self._errors = errors
        self.worker = worker
        self.step(0)
        errors._steps.store(worker * _WORDS_PER_LINE + _WHOSE, Peer.current().word)

    def step(self, step: int) -> None:
        """Tell how far the collector is; an error report says it."""
        self._errors._steps.store(self.worker * _WORDS_PER_LINE + _STEP, step)

    def report(self, error: BaseException) -> None:
        errors, me = self._errors, Peer.current()
        record = {
            "pid": me.pid,
            "step": errors.step_of(self.worker),
            "type_name": _type_name(error),
            "message": _message(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        text = np.frombuffer(_fitting(record), np.uint8)
        # PAIR claim/unchanged: an earlier report is withdrawn before its bytes are overwritten.
        errors._reporter.compare_and_swap(self.worker, errors._reporter.load(self.worker), 0)
        errors.segment["report"][self.worker, : len(text)] = text
        errors.segment["length"][self.worker] = len(text)
        errors._reporter.store(self.worker, me.word)
        errors._raised.add()


class CollectorPeer(Peer):
    """A collector as something to watch: its death is told as a ``CollectorError``, with what it reported before."""

    __slots__ = ("_errors", "worker")

    def __init__(self, errors: CollectorErrors, worker: int, pid: int, start: int) -> None:
        super().__init__(pid, start, f"collector {worker}")
        self._errors = errors
        self.worker = worker

    @property
    def failed(self) -> bool:
        """Whether it has reported an exception; it may be alive still, busy with its end."""
        return self._errors._reporter.load(self.worker) == self.word

    def error(self, waiting: str) -> CollectorError:
        return self._errors._reported(self.worker, waiting, self.word) or self._errors._died(self, waiting)

    def __reduce__(self) -> tuple[object, ...]:
        return (CollectorPeer, (self._errors, self.worker, self.pid, self.start))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _while(waiting: str) -> str:
    return f", while this process {waiting}" if waiting else ""


def _message(error: BaseException) -> str:
    try:
        return str(error) or "(no message)"
    except Exception as worse:  # the report must not fail where the exception's own text does
        return f"(its text cannot be made: {_type_name(worse)})"


def _fitting(record: dict[str, Any]) -> bytes:
    """The record as JSON that fits. A long traceback loses its middle: its ends say where it began and what it was."""
    for room in (_REPORT_BYTES, _REPORT_BYTES // 4, _REPORT_BYTES // 16, _REPORT_BYTES // 64):
        short = {key: _shortened(value, room // 2) for key, value in record.items()}
        text = json.dumps(short).encode()
        if len(text) <= _REPORT_BYTES:
            return text
    raise AssertionError("three strings of half a sixty-fourth of the room, quoted at worst twelve-fold, fit")


def _shortened(value: Any, most: int) -> Any:
    if not isinstance(value, str) or len(value) <= most:
        return value
    return f"{value[: most // 2]}\n... {len(value) - most} characters ...\n{value[-most // 2 :]}"
