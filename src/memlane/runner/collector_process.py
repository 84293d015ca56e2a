"""Collector process: what runs in the process of a collector, and the memory that it shares with the learner.

The control segment, one per run:

    field         written by    content
    stop          the learner   1 when the run has ended
    granted[w]    the learner   a signal: number of rollouts that worker w may have started since the run began
    versions[w]   worker w      weights version at the start of its n-th rollout, at index n modulo the length
    counters[w]   worker w      STARTED, COMMITTED, ... (below). When worker w is dead, the learner sets STARTED and
                                COMMITTED to the number of rollouts that it received; the next process continues there
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from numpy.typing import NDArray

from memlane.core import SIGNAL, Peer, PeerDied, Segment, die_with
from memlane.core.liveness import leave_signals_to
from memlane.lanes.ring import Ring, WriteSlot
from memlane.lanes.weights import Weights
from memlane.runner.collect_checks import DiscardedSlots, closing, returned_early
from memlane.runner.collector_error import CollectorErrors, Reporter
from memlane.runner.protocols import Stopped

STARTED, COMMITTED, STEPS, WAIT_NS, ENV_NS, POLICY_NS = range(6)
"""Indices of a worker's counters: rollouts started and committed, environment steps, nanoseconds."""
_WORDS_PER_LINE = 8
"""64-bit words in a cache line: words that different processes write do not share a line."""


class ControlSegment:
    """The signals and counters between the learner and its collectors; the module docstring has the fields."""

    def __init__(self, collectors: int, in_flight: int) -> None:
        self._open(
            Segment.create(
                {
                    "stop": (SIGNAL, ()),
                    "granted": (SIGNAL, (collectors,)),
                    # A worker has at most in_flight rollouts that the learner has not taken; one entry more is spare.
                    "versions": ("int64", (collectors, in_flight + 1)),
                    "counters": ("int64", (collectors, _WORDS_PER_LINE)),
                }
            )
        )

    def _open(self, segment: Segment) -> None:
        self.segment = segment
        self.stop = segment.signal("stop")
        self.counters = segment["counters"]
        self._counter_words = segment.words("counters")
        self._version_words = segment.words("versions")
        self._num_versions = segment.layout["versions"].shape[1]
        self.granted = [segment.signal("granted", worker) for worker in range(len(self.counters))]

    def count_started(self, worker: int, version: int) -> None:
        """Count one more rollout of a worker as started, with the latest weights version at its start."""
        number = int(self.counters[worker, STARTED])
        self._version_words.store(self._version_index(worker, number), version)
        # PAIR publish/see, partner: num_started. The version is stored before the rollout is counted: a learner that
        # sees the count sees a version that is not newer than the one that the collector will read.
        self._counter_words.store(worker * _WORDS_PER_LINE + STARTED, number + 1)

    def num_started(self, worker: int) -> int:
        """Return how many rollouts a worker has started."""
        # PAIR publish/see, partner: count_started. Versions are loaded after the count.
        return self._counter_words.load(worker * _WORDS_PER_LINE + STARTED)

    def started_version(self, worker: int, rollout: int) -> int:
        """Return the weights version at the start of a worker's rollout that the learner has not taken yet."""
        return self._version_words.load(self._version_index(worker, rollout))

    def _version_index(self, worker: int, rollout: int) -> int:
        return worker * self._num_versions + rollout % self._num_versions

    def close(self) -> None:
        """Release the memory."""
        self.segment.close()

    def __getstate__(self) -> Segment:
        return self.segment

    def __setstate__(self, segment: Segment) -> None:
        self._open(segment)


class RingSink:
    """The ``RolloutSink`` of a collector process: slots of the ring, one credit each."""

    def __init__(self, ring: Ring, weights: Weights, control: ControlSegment, worker: int, learner: Peer) -> None:
        self._weights = weights
        self._worker = worker
        self._writer = ring.writer(worker)
        self._control = control
        self._counters = control.counters[worker]
        self._granted = control.granted[worker]
        self._learner = (learner,)
        self._discarded = DiscardedSlots(worker)

    def open(self) -> CountedSlot:
        """Wait for a credit and return a slot; ``Stopped`` when the run has ended."""
        counters, begin = self._counters, time.monotonic_ns()
        self._granted.wait(int(counters[STARTED]) + 1, peers=self._learner)
        if self._control.stop.value:
            raise Stopped("the run has ended")
        slot = CountedSlot(self._writer.claim(peers=self._learner), counters, self._discarded)
        counters[WAIT_NS] += time.monotonic_ns() - begin
        self._control.count_started(self._worker, self._weights.version)
        return slot


class CountedSlot(Mapping[str, Any]):
    """A claimed slot of the ring whose commit is counted."""

    def __init__(self, slot: WriteSlot, counters: NDArray[Any], discarded: DiscardedSlots) -> None:
        self._slot = slot
        self._counters = counters
        self._discarded = discarded
        self._committed = False

    def __getitem__(self, name: str) -> Any:
        return self._slot[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot)

    def __len__(self) -> int:
        return len(self._slot)

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        """Hand the rollout to the learner."""
        self._slot.commit(policy_version=policy_version, rows=rows)
        self._committed = True
        self._counters[COMMITTED] += 1
        self._discarded.committed()

    def __enter__(self) -> CountedSlot:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._committed and not self._slot.released:
            self._counters[STARTED] -= 1  # an abandoned rollout keeps its credit
        self._slot.release()
        if not self._committed and exception[0] is None:
            self._discarded.discarded()


class WeightsReader:
    """The ``WeightSubscriber`` of a collector process."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def read(self, out: Mapping[str, Any]) -> int:
        """Copy the latest weights into ``out`` and return their version."""
        return self._weights.read(out)[0]


class ProcessContext:
    """The ``CollectorContext`` of a collector process."""

    def __init__(self, control: ControlSegment, worker: int, incarnation: int, reporter: Reporter) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._counters = control.counters[worker]
        self._reporter = reporter

    @property
    def rollout(self) -> int:
        """Rollouts that this worker has committed, those of earlier incarnations included."""
        return int(self._counters[COMMITTED])

    def report(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        """Add to the runner's counters."""
        counters = self._counters
        counters[STEPS] += steps
        counters[ENV_NS] += env_ns
        counters[POLICY_NS] += policy_ns
        self._reporter.step(int(counters[STEPS]))


@dataclass(frozen=True)
class Task:
    """The argument of a collector process."""

    worker: int
    incarnation: int
    functions: bytes
    """``(make_env, collect)``, pickled with cloudpickle so that lambdas and classes of the main script work."""
    ring: Ring
    weights: Weights
    errors: CollectorErrors
    control: ControlSegment
    learner: Peer


def run_collector(task: Task) -> None:
    """Run a collector: the target of its process."""
    leave_signals_to(task.learner)  # it finishes its update, and then stops the collectors
    die_with(task.learner)
    if "torch" in sys.modules:
        # One thread per process: with several in each of many processes, threads compete for the cores.
        sys.modules["torch"].set_num_threads(1)
    # PeerDied: the learner is dead, and die_with() is about to end this process.
    with contextlib.suppress(Stopped, PeerDied), task.errors.reporting(task.worker) as reporter:
        make_env, collect = cloudpickle.loads(task.functions)
        env = make_env(task.worker)
        with closing(env):
            context = ProcessContext(task.control, task.worker, task.incarnation, reporter)
            sink = RingSink(task.ring, task.weights, task.control, task.worker, task.learner)
            with contextlib.suppress(Stopped):
                collect(env, WeightsReader(task.weights), sink, context)
                if not task.control.stop.value:
                    raise returned_early(task.worker)
