"""InProcess: collectors as threads of the learner's process, for tests and notebooks. The same protocols without shared
memory; a collector's rollout is handed over as it is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memlane.core import Layout, StaleView, WaitTimeout
from memlane.lanes.weights import Weights
from memlane.runner.protocols import Collect, Stopped

_STOP_SECONDS = 2.0


class _Rollout(Mapping[str, Any]):
    """Both sides' view of one rollout: arrays, and what was said of them."""

    def __init__(self, layout: Layout, owner: InProcess, writer: int) -> None:
        self._arrays = {field.name: np.zeros(field.shape, field.dtype) for field in layout}
        self._owner = owner
        self.writer = writer
        self.policy_version = self.rows = 0
        self._committed = False

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        if self._committed:
            raise StaleView("the rollout was committed before")
        self.policy_version, self.rows, self._committed = policy_version, rows, True
        self._owner._commit(self)

    def release(self) -> None:
        """Nothing to give back: the garbage collector sees to it."""

    def __enter__(self) -> _Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            self._owner._give_up(self)


class _Sink:
    def __init__(self, owner: InProcess, worker: int) -> None:
        self._owner = owner
        self._worker = worker

    def open(self) -> _Rollout:
        return self._owner._begin(self._worker)


class _Subscriber:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._own = threading.local()

    def read(self, out: Mapping[str, Any]) -> int:
        # A handle of its own for each thread: one remembers what it read last.
        if not hasattr(self._own, "weights"):
            self._own.weights = Weights.from_segment(self._weights.segment)
        weights: Weights = self._own.weights
        return weights.read(out)[0]


class _Context:
    def __init__(self, owner: InProcess, worker: int) -> None:
        self._owner = owner
        self.worker = worker
        self.incarnation = 0

    @property
    def rollout(self) -> int:
        return self._owner._committed[self.worker]

    def tell(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        told = self._owner._told
        told["steps"] += steps
        told["env_ns"] += env_ns
        told["policy_ns"] += policy_ns


class InProcess:
    """``count`` collectors, each on a thread. Also the source of their rollouts."""

    def __init__(
        self,
        count: int,
        make_env: Callable[[int], Any],
        collect: Collect,
        *,
        slot: Layout,
        weights: Weights,
        under_way: int,
    ) -> None:
        if count < 1:
            raise ValueError(f"there must be at least 1 collector, found {count}")
        if under_way < count:
            raise ValueError(f"each of {count} collectors needs a rollout under way, found {under_way} for all")
        self.count = count
        self._layout = slot
        self._weights = weights
        self._changed = threading.Condition()
        self._credits = [under_way // count + (worker < under_way % count) for worker in range(count)]
        self._spent = [0] * count
        self._begun: list[tuple[int, int]] = []
        """Worker and version of every rollout that was begun and not taken."""
        self._committed = [0] * count
        self._ready: deque[_Rollout] = deque()
        self._error: BaseException | None = None
        self._left: BaseException | None = None
        """One that returned; what it has committed is still to be had."""
        self._stopped = False
        self._told = {"steps": 0, "wait_ns": 0, "env_ns": 0, "policy_ns": 0}
        self._threads = [
            threading.Thread(
                target=self._run, args=(worker, make_env, collect), daemon=True, name=f"collector {worker}"
            )
            for worker in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, worker: int, make_env: Callable[[int], Any], collect: Collect) -> None:
        try:
            env = make_env(worker)
            try:
                collect(env, _Subscriber(self._weights), _Sink(self, worker), _Context(self, worker))
                with self._changed:
                    self._left = RuntimeError(f"collector {worker} returned before the run ended")
                    self._changed.notify_all()
            finally:
                env.close()
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _begin(self, worker: int) -> _Rollout:
        begin = time.monotonic_ns()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._credits[worker] > 0)
            if self._stopped:
                raise Stopped("the run has ended")
            self._credits[worker] -= 1
            self._begun.append((worker, self._weights.version))
            self._told["wait_ns"] += time.monotonic_ns() - begin
        return _Rollout(self._layout, self, worker)

    def _give_up(self, rollout: _Rollout) -> None:
        with self._changed:
            self._credits[rollout.writer] += 1
            self._forget(rollout.writer, last=True)

    def _forget(self, worker: int, *, last: bool = False) -> None:
        places = [place for place, (owner, _) in enumerate(self._begun) if owner == worker]
        del self._begun[places[-1 if last else 0]]

    def owes(self, version: int) -> bool:
        """Whether a rollout that was begun with this version or an older one is still to come."""
        with self._changed:
            return any(begun <= version for _, begun in self._begun)

    def _commit(self, rollout: _Rollout) -> None:
        with self._changed:
            self._committed[rollout.writer] += 1
            self._ready.append(rollout)
            self._changed.notify_all()

    def take(self, timeout: float | None = None) -> _Rollout:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self._error or self._left, timeout):
                raise WaitTimeout(f"waited {timeout:g} s for a rollout")
            if self._error is not None:
                raise self._error
            if not self._ready and self._left is not None:
                raise self._left
            rollout = self._ready.popleft()
            self._forget(rollout.writer)
            self._spent[rollout.writer] += 1
            return rollout

    def pay_back(self) -> None:
        with self._changed:
            for worker, many in enumerate(self._spent):
                self._credits[worker] += many
            self._spent = [0] * self.count
            self._changed.notify_all()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def pids(self) -> dict[int, int]:
        return {}

    def counters(self) -> dict[str, int]:
        rollouts = sum(self._committed)
        return {**self._told, "rollouts": rollouts, "restarts": 0, "collectors": self.count, "unread": len(self._ready)}

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0))
