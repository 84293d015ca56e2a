"""ThreadCollectors: collectors as threads of the learner's process, for tests and notebooks.

The same protocols as ``process_collectors`` without shared memory: a rollout is handed over as an object.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from memlane.core import Layout, StaleView, WaitTimeout
from memlane.core.arguments import check_timeout
from memlane.core.fork_guard import ForkGuard
from memlane.lanes.weights import Weights
from memlane.runner.collect_checks import DiscardedSlots, closing, returned_early
from memlane.runner.protocols import Collect, Stopped, check_counts

_STOP_SECONDS = 2.0


class _Rollout(Mapping[str, Any]):
    """A rollout: an ``OpenSlot`` for the collector, then a ``TakenSlot`` for the learner."""

    def __init__(self, layout: Layout, collectors: ThreadCollectors, writer: int, discarded: DiscardedSlots) -> None:
        self._arrays = {field.name: np.zeros(field.shape, field.dtype) for field in layout}
        self._collectors = collectors
        self.writer = writer
        self.policy_version = self.rows = 0
        self._committed = False
        self._discarded = discarded

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        """Hand the rollout to the learner."""
        if self._committed:
            raise StaleView("the rollout was committed before; open another slot")
        self.policy_version, self.rows, self._committed = policy_version, rows, True
        self._collectors._commit(self)
        self._discarded.committed()

    def release(self) -> None:
        """Do nothing: the garbage collector frees the arrays."""

    def __enter__(self) -> _Rollout:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._committed:
            self._collectors._abandon(self)
            if exception[0] is None:
                self._discarded.discarded()


class _ThreadSink:
    """The ``RolloutSink`` of one thread."""

    def __init__(self, collectors: ThreadCollectors, worker: int) -> None:
        self._collectors = collectors
        self._worker = worker
        self._discarded = DiscardedSlots(worker)

    def open(self) -> _Rollout:
        return self._collectors._start_rollout(self._worker, self._discarded)


class _ThreadWeightsReader:
    """The ``WeightSubscriber`` of one thread, with a separate ``Weights``, which remembers what it read last."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._local = threading.local()

    def read(self, out: Mapping[str, Any]) -> int:
        if not hasattr(self._local, "weights"):
            self._local.weights = Weights.from_segment(self._weights.segment)
        weights: Weights = self._local.weights
        return weights.read(out)[0]


class _ThreadContext:
    """The ``CollectorContext`` of one thread."""

    def __init__(self, collectors: ThreadCollectors, worker: int) -> None:
        self._collectors = collectors
        self.worker = worker
        self.incarnation = 0

    @property
    def rollout(self) -> int:
        return self._collectors._committed[self.worker]

    def report(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        counters = self._collectors._counters
        counters["steps"] += steps
        counters["env_ns"] += env_ns
        counters["policy_ns"] += policy_ns


class ThreadCollectors:
    """``count`` collectors, each on a thread, and the source of their rollouts.

    For one learner thread. An exception in a collector is raised by ``take`` and ``check`` as it is.
    """

    def __init__(
        self,
        count: int,
        make_env: Callable[[int], Any],
        collect: Collect,
        *,
        slot: Layout,
        weights: Weights,
        in_flight: int,
    ) -> None:
        """Create the threads; ``start`` starts them. The arguments are those of ``ProcessCollectors``."""
        check_counts(count, in_flight)
        self._guard = ForkGuard("a set of collector threads", "create another in this process")
        self.count = count
        self._layout = slot
        self._weights = weights
        self._changed = threading.Condition()
        """Guards all state below."""
        self._credits = [in_flight // count + (worker < in_flight % count) for worker in range(count)]
        self._uncredited = [0] * count
        """Rollouts of each worker that the learner has taken and whose credits it has not returned."""
        self._started: list[tuple[int, int]] = []
        """Worker and weights version of every rollout that was started and not taken, in order."""
        self._committed = [0] * count
        self._ready: deque[_Rollout] = deque()
        self._error: BaseException | None = None
        """Exception of a collector."""
        self._stopped = False
        self._counters = {"steps": 0, "wait_ns": 0, "env_ns": 0, "policy_ns": 0}
        self._threads = [
            threading.Thread(
                target=self._run, args=(worker, make_env, collect), daemon=True, name=f"collector {worker}"
            )
            for worker in range(count)
        ]

    def start(self) -> None:
        """Start all collectors."""
        self._guard.require()
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------- for collectors

    def _run(self, worker: int, make_env: Callable[[int], Any], collect: Collect) -> None:
        try:
            env = make_env(worker)
            with closing(env):
                weights = _ThreadWeightsReader(self._weights)
                collect(env, weights, _ThreadSink(self, worker), _ThreadContext(self, worker))
                if not self._stopped:
                    raise returned_early(worker)
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _start_rollout(self, worker: int, discarded: DiscardedSlots) -> _Rollout:
        begin = time.monotonic_ns()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._credits[worker] > 0)
            if self._stopped:
                raise Stopped("the run has ended")
            self._credits[worker] -= 1
            self._started.append((worker, self._weights.version))
            self._counters["wait_ns"] += time.monotonic_ns() - begin
        return _Rollout(self._layout, self, worker, discarded)

    def _commit(self, rollout: _Rollout) -> None:
        with self._changed:
            self._committed[rollout.writer] += 1
            self._ready.append(rollout)
            self._changed.notify_all()

    def _abandon(self, rollout: _Rollout) -> None:
        with self._changed:
            self._credits[rollout.writer] += 1
            self._remove_started(rollout.writer, newest=True)

    def _remove_started(self, worker: int, *, newest: bool = False) -> None:
        indices = [index for index, (owner, _) in enumerate(self._started) if owner == worker]
        del self._started[indices[-1 if newest else 0]]

    # ---------------------------------------------------------------------------------------------------- for learners

    def take(self, timeout: float | None = None) -> _Rollout:
        """Take the oldest rollout; ``WaitTimeout`` after ``timeout`` seconds."""
        check_timeout(timeout)
        self._guard.require()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self._error, timeout):
                raise WaitTimeout(f"waited {timeout:g} s for a rollout")
            if self._error is not None:
                raise self._error
            rollout = self._ready.popleft()
            self._remove_started(rollout.writer)
            self._uncredited[rollout.writer] += 1
            return rollout

    def has_older_than(self, version: int) -> bool:
        """Return whether a rollout that was started with ``version`` or an older one has not been taken yet."""
        self._guard.require()
        with self._changed:
            return any(started <= version for _, started in self._started)

    def return_credits(self) -> None:
        """Let collectors start one new rollout for each one taken since the last call."""
        self._guard.require()
        with self._changed:
            for worker, count in enumerate(self._uncredited):
                self._credits[worker] += count
            self._uncredited = [0] * self.count
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the exception of a collector that raised."""
        self._guard.require()
        if self._error is not None:
            raise self._error

    @property
    def pids(self) -> dict[int, int]:
        """Empty: threads are not processes."""
        return {}

    def counters(self) -> dict[str, int]:
        """Return counts since the start, summed over all collectors."""
        self._guard.require()
        return {
            **self._counters,
            "rollouts": sum(self._committed),
            "restarts": 0,
            "collectors": self.count,
            "unread": len(self._ready),
        }

    def close(self) -> None:
        """Stop the collectors; wait for them at most 2 seconds. Calling it again has no effect, nor does calling it in
        a forked child, which has no copy of the threads."""
        if not self._guard.owned:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0))
