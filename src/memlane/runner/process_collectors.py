"""ProcessCollectors: collectors in processes, as the learner sees them: credits, rollouts, supervision, shutdown.

A collector needs a credit for every rollout that it starts. The learner returns the credit after it has published the
weights that it learned from the rollout, so at most ``in_flight`` rollouts are started and not yet learned from. Before
the learner publishes, it also waits for rollouts that would become too old (``has_older_than``). Together they bound
the policy lag, and no rollout is discarded.

``collector_process`` is the other side: what runs in the processes, and the segment that both sides share.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from memlane.core import Layout, Peer, PeerDied, SegmentClosed, Signal, WaitTimeout
from memlane.core.arguments import check_timeout
from memlane.core.children import RestartWindow, ensure_fork_server, exit_of, start_child, without_main_module
from memlane.core.fork_guard import ForkGuard
from memlane.core.process_limits import explained_start, require_descriptors, require_startable
from memlane.lanes.ring import ReadSlot, Ring
from memlane.lanes.weights import Weights
from memlane.runner.collector_error import CollectorDied, CollectorError, CollectorErrors, CollectorPeer
from memlane.runner.collector_process import (
    COMMITTED,
    ENV_NS,
    POLICY_NS,
    STARTED,
    STEPS,
    WAIT_NS,
    ControlSegment,
    Task,
    run_collector,
)
from memlane.runner.protocols import Collect, CollectorJoined, CollectorLost, Event, check_counts

_COUNTER_NAMES = {"steps": STEPS, "wait_ns": WAIT_NS, "env_ns": ENV_NS, "policy_ns": POLICY_NS, "rollouts": COMMITTED}
_PRELOAD = ["torch", "memlane.runner.collector_process"]


def start_fork_server() -> None:
    """Start the process that collectors are forked from. It imports the modules that they need once."""
    ensure_fork_server(_PRELOAD, quiet=True)


# ------------------------------------------------------------------------------------------------------------- credits


class _Credits:
    """How many rollouts each collector may start. The only writer of the ``granted`` signals."""

    _WAKE_UP = 1 << 40
    """More credits than any run uses: ends every wait for a credit."""

    def __init__(self, granted: list[Signal], in_flight: int) -> None:
        self._granted = granted
        self._uncredited = [0] * len(granted)
        """Rollouts of each worker that the learner has taken and whose credits it has not returned."""
        for worker, signal_ in enumerate(granted):
            signal_.add(in_flight // len(granted) + (worker < in_flight % len(granted)))

    def count_taken(self, worker: int) -> None:
        """Count a rollout that the learner has taken."""
        self._uncredited[worker] += 1

    def return_credits(self, running: Collection[int]) -> None:
        """Return the credits of all rollouts that were taken since the last call."""
        for worker, count in enumerate(self._uncredited):
            if count:
                self._uncredited[worker] = 0
                self._grant(worker, count, running)

    def reassign(self, worker: int, started: int, running: Collection[int]) -> None:
        """Give the unused credits of a worker that is not restarted to those that are ``running``."""
        self._grant(worker, self._granted[worker].value - started, running)

    def _grant(self, worker: int, count: int, running: Collection[int]) -> None:
        if worker in running:
            self._granted[worker].add(count)
        elif running:  # the others collect its rollouts, in turn
            share, rest = divmod(count, len(running))
            for number, other in enumerate(sorted(running)):
                self._granted[other].add(share + (number < rest))

    def wake_all(self) -> None:
        """End the wait for a credit of every collector, after the stop signal was set."""
        for granted in self._granted:
            granted.add(self._WAKE_UP)


# ------------------------------------------------------------------------------------------------------------ rollouts


class _Inbox:
    """Rollouts on their way from the ring to the learner, in order. The only reader of the ring."""

    def __init__(self, ring: Ring, collectors: int) -> None:
        self._reader = ring.reader()
        self._pending: deque[ReadSlot] = deque()
        """Received from the ring and not taken by the learner yet."""
        self.received = [0] * collectors
        """Rollouts received from each worker since the start."""

    def receive(self, timeout: float | None, peers: Iterable[Peer]) -> None:
        """Wait for a rollout in the ring, unless one is pending."""
        if not self._pending:
            self._add(self._reader.take(timeout, peers))

    def receive_all(self) -> None:
        """Receive all rollouts that are in the ring, without waiting."""
        with contextlib.suppress(WaitTimeout):
            while True:
                self._add(self._reader.take(timeout=0))

    def _add(self, slot: ReadSlot) -> None:
        self.received[slot.writer] += 1
        self._pending.append(slot)

    def pop(self) -> ReadSlot:
        """Return the oldest pending rollout."""
        return self._pending.popleft()

    def has_older_than(self, version: int) -> bool:
        """Return whether a pending rollout was collected with ``version`` or an older one."""
        return any(slot.policy_version <= version for slot in self._pending)

    def clear(self) -> None:
        """Drop pending rollouts."""
        with contextlib.suppress(SegmentClosed):  # at interpreter exit the memory may be released already
            while self._pending:
                self._pending.popleft().release()


# --------------------------------------------------------------------------------------------------------- supervision


@dataclass(frozen=True)
class RestartPolicy:
    """What happens when the process of a collector dies."""

    max_restarts: int = 10
    """Restarts of all collectors together within ``window`` seconds. A collector that dies beyond it stays dead."""
    window: float = 60.0
    """Seconds."""
    min_collectors: int = 1
    """The run ends with an error when fewer collectors are running."""


@dataclass(eq=False)
class _Handle:
    """A running collector process."""

    process: BaseProcess
    peer: CollectorPeer | None
    """None if the process was gone before it could be watched."""
    incarnation: int


class ProcessCollectors:
    """``count`` collectors, each in its own process, and the source of their rollouts.

    For the learner's process, one thread at a time. In a forked child of it, ``close`` does nothing, and other methods
    raise ``UsedAfterFork``. A collector that raises ends ``take`` and ``check`` with its ``CollectorError``; one whose
    process dies is restarted, as ``restarts`` allows, and its next process continues its rollout numbers.
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
        restarts: RestartPolicy | None = None,
        on_event: Callable[[Event], object] = bool,
        context: str = "forkserver",
    ) -> None:
        """Create the lanes; ``start`` starts the processes.

        ``slot`` is the layout of a rollout. ``in_flight`` is the largest number of rollouts of all collectors together
        that are started and not yet learned from. ``on_event`` is called with ``CollectorJoined`` and
        ``CollectorLost``. ``context`` is the start method of the processes.
        """
        check_counts(count, in_flight)
        self._guard = ForkGuard("a set of collectors", "create another in this process")
        self.count = count
        self.restarts = restarts or RestartPolicy()
        self.on_event = on_event
        self._functions = cloudpickle.dumps((make_env, collect))
        self.ring = Ring(slot, num_slots=in_flight, overflow="block")
        self.weights = weights
        self.control = ControlSegment(count, in_flight)
        self.errors = CollectorErrors(count)
        self._credits = _Credits(self.control.granted, in_flight)
        self._inbox = _Inbox(self.ring, count)
        self._context = mp.get_context(context)
        if context == "forkserver":
            start_fork_server()
        self._handles: dict[int, _Handle] = {}
        """Collectors that are running, by worker."""
        self._early_error: CollectorError | None = None
        """The error of a collector that raised before it could be watched."""
        self._window = RestartWindow(self.restarts.max_restarts, self.restarts.window)
        self._restart_count = 0
        self._final_counters: dict[str, int] = {}
        self._stopped = False

    def start(self) -> None:
        """Start all collectors. ``StartError`` if a limit of the system allows fewer."""
        self._guard.require()
        require_startable(self.count, "collectors", "collectors")
        for worker in range(self.count):
            self._start(worker, 0)

    # ---------------------------------------------------------------------------------------------------- for learners

    def take(self, timeout: float | None = None) -> ReadSlot:
        """Take the oldest rollout; ``WaitTimeout`` after ``timeout`` seconds.

        Restarts collectors that die meanwhile; raises the ``CollectorError`` of one that raised.
        """
        check_timeout(timeout)
        self._guard.require()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.check()  # if the ring has a rollout, the wait below returns without looking at the collectors
            remaining = None if deadline is None else max(deadline - time.monotonic(), 0)
            try:
                self._inbox.receive(remaining, self._peers())
            except CollectorDied as death:
                self._handle_death(death)
                continue
            slot = self._inbox.pop()
            self._credits.count_taken(slot.writer)
            return slot

    def has_older_than(self, version: int) -> bool:
        """Return whether a rollout that was started with ``version`` or an older one has not been taken yet."""
        self._guard.require()
        return self._inbox.has_older_than(version) or any(
            self.control.started_version(worker, rollout) <= version
            for worker in self._handles
            for rollout in range(self._inbox.received[worker], self.control.num_started(worker))
        )

    def return_credits(self) -> None:
        """Let collectors start one new rollout for each one taken since the last call."""
        self._guard.require()
        self._credits.return_credits(self._handles)

    def check(self) -> None:
        """Restart dead collectors; raise the ``CollectorError`` of one that raised. Does not wait for a rollout."""
        self._guard.require()
        if self._early_error is not None:
            raise self._early_error
        for peer in self._peers():
            try:
                peer.check()
            except CollectorDied as death:
                self._handle_death(death)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running collectors, by worker."""
        return {worker: handle.process.pid or 0 for worker, handle in self._handles.items()}

    def counters(self) -> dict[str, int]:
        """Return counts since the start, summed over all collectors."""
        self._guard.require()
        if self._stopped:
            return self._final_counters
        sums = self.control.counters.sum(axis=0)
        counts = {name: int(sums[index]) for name, index in _COUNTER_NAMES.items()}
        return {**counts, "restarts": self._restart_count, "collectors": len(self._handles), "unread": self.ring.unread}

    # ------------------------------------------------------------------------------------------------------- processes

    def _start(self, worker: int, incarnation: int) -> None:
        task = Task(
            worker, incarnation, self._functions, self.ring, self.weights, self.errors, self.control,
            Peer.current("learner"),
        )  # fmt: skip
        process = self._context.Process(target=run_collector, args=(task,), name=f"memlane collector {worker}")  # type: ignore[attr-defined]
        with explained_start("a collector"), without_main_module():
            require_descriptors()
            start_child(process)
        assert process.pid is not None
        self.on_event(CollectorJoined(worker, incarnation, process.pid))
        try:
            peer = self.errors.watch(worker, process.pid)
        except CollectorError as error:  # it raised and is gone already: an error for take and check, as a later one
            self._handles[worker] = _Handle(process, None, incarnation)
            self._early_error = error
            return
        except PeerDied as death:  # it died and is gone already
            self._handles[worker] = _Handle(process, None, incarnation)
            self._replace(worker, process.pid, str(death), 0)
            return
        self._handles[worker] = _Handle(process, peer, incarnation)

    def _peers(self) -> list[CollectorPeer]:
        return [handle.peer for handle in self._handles.values() if handle.peer is not None]

    def _handle_death(self, death: CollectorDied) -> None:
        handle = self._handles.get(death.worker)
        if handle is not None and handle.process.pid == death.pid:
            self._replace(death.worker, death.pid, str(death), death.step)

    def _replace(self, worker: int, pid: int, cause: str, step: int) -> None:
        """Start a new process for a collector that died, or distribute its credits, or end the run."""
        handle = self._handles.pop(worker)
        if (ending := exit_of(handle.process)) is not None:
            cause = f"collector {worker} (pid {pid}) {ending}"
        if handle.process.exitcode == 0:
            cause += "; collect must not end its process"
        replaced = self._window.record()
        self.on_event(CollectorLost(worker, handle.incarnation, pid, cause, replaced))
        # A dead process commits nothing more: what the ring has now is all of it, whatever its counters say. Rollouts
        # that it had started beyond that are lost, and their credits are unused again.
        self._inbox.receive_all()
        received = self._inbox.received[worker]
        counters = self.control.counters[worker]
        counters[STARTED] = counters[COMMITTED] = received
        if replaced:
            self._restart_count += 1
            self._start(worker, handle.incarnation + 1)
        elif len(self._handles) < max(self.restarts.min_collectors, 1):
            raise CollectorDied(
                f"{cause}; {self._window.recent} deaths in {self.restarts.window:g} s exceed "
                f"max_restarts={self.restarts.max_restarts}, and {len(self._handles)} running collectors are fewer "
                f"than min_collectors={self.restarts.min_collectors}; find out why they die, or raise max_restarts",
                worker=worker, pid=pid, type_name=cause, step=step,
            )  # fmt: skip
        else:
            self._credits.reassign(worker, received, self._handles)

    # -------------------------------------------------------------------------------------------------------- shutdown

    def close(self) -> None:
        """Stop the collectors and release the memory: in at most 4 seconds. Calling it again has no effect, nor does
        calling it in a forked child."""
        if self._stopped or not self._guard.owned:
            return
        with contextlib.suppress(SegmentClosed):  # at interpreter exit the memory may be released already
            self._final_counters = self.counters()
            self.control.stop.store(1)
            self._credits.wake_all()
        _stop_processes([handle.process for handle in self._handles.values()])
        self._stopped = True  # only now: a close() that was interrupted can be repeated
        self._handles.clear()
        self._inbox.clear()
        self.ring.close()
        self.errors.close()
        self.control.close()


def _stop_processes(processes: list[BaseProcess]) -> None:
    """Wait 2 s for processes that were asked to stop, then send SIGKILL and wait 2 s. They do nothing on SIGTERM while
    this process lives."""
    for seconds, kill in ((2.0, False), (2.0, True)):
        if kill:
            for process in processes:
                if process.exitcode is None and process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        if all(process.exitcode is not None for process in processes):
            return
