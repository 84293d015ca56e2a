"""Collectors: processes that fill a ring with rollouts, as the learner sees them: started, paced, watched, replaced.

Pacing is by credits. A collector needs one for every rollout that it begins. The learner hands them out again once it
has published what it learned from a rollout, so that never more than ``under_way`` rollouts are between the two. And
before it learns on, it waits for those that would become too old (``owes``). Both together bound how many versions the
policy is ahead of the data, and nothing has to be thrown away.

    field         written by    when
    stop          the learner   once
    granted[w]    the learner   a signal: how many rollouts worker w may have begun since the start
    versions[w]   worker w      the version of the weights when it began its n-th rollout, at place n modulo the length
    told[w]       worker w      all the time: see ``BEGUN`` and those after it

    If worker w dies, the learner takes what it has committed and sets ``told[w]`` to that: its successor goes on there.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from memlane.core import SIGNAL, Layout, Peer, PeerDied, Segment, SegmentClosed, WaitTimeout, die_with
from memlane.core.children import RestartWindow, ensure_fork_server, exit_of, without_main_module
from memlane.lanes.ring import ReadSlot, Ring, WriteSlot
from memlane.lanes.weights import Weights
from memlane.runner.collector_error import CollectorError, CollectorErrors, CollectorPeer, Reporter
from memlane.runner.protocols import Collect, CollectorJoined, CollectorLost, Event, Stopped

BEGUN, COMMITTED, STEPS, WAIT_NS, ENV_NS, POLICY_NS = range(6)
_LINE = 8  # words in a cache line: what different processes write does not share one
_ALL_OF_THEM = 1 << 40
"""More credits than anybody uses: it wakes whoever waits for one."""
_STOP_SECONDS, _TERM_SECONDS, _KILL_SECONDS = 2.0, 1.0, 1.0
"""How long a collector has to end by itself, after SIGTERM, and after SIGKILL."""
_PRELOAD = ["torch", "memlane.runner.process_collectors"]


def start_fork_server() -> None:
    """The process that collectors are forked from; it imports what they need once."""
    ensure_fork_server(_PRELOAD, quiet=True)


@dataclass(frozen=True)
class Restarts:
    """What happens when a collector dies."""

    most: int = 10
    """In ``window`` seconds; one that dies more often stays away."""
    window: float = 60.0
    min_collectors: int = 1
    """With fewer, the run ends."""


class Control:
    """The segment that the learner and its collectors speak through."""

    def __init__(self, collectors: int, under_way: int) -> None:
        self._open(
            Segment.create(
                {
                    "stop": (SIGNAL, ()),
                    "granted": (SIGNAL, (collectors,)),
                    # One more than a worker can have begun and not given away.
                    "versions": ("int64", (collectors, under_way + 1)),
                    "told": ("int64", (collectors, _LINE)),
                }
            )
        )

    def _open(self, segment: Segment) -> None:
        self.segment = segment
        self.stop = segment.signal("stop")
        self.told = segment["told"]
        self.versions = segment["versions"]
        self.granted = [segment.signal("granted", worker) for worker in range(len(self.told))]

    def __getstate__(self) -> Segment:
        return self.segment

    def __setstate__(self, segment: Segment) -> None:
        self._open(segment)


# ------------------------------------------------------------------------------------------------- in the collector


class Sink:
    """Where a collector puts its rollouts."""

    def __init__(self, ring: Ring, weights: Weights, control: Control, worker: int, learner: Peer) -> None:
        self._weights = weights
        self._versions = control.versions[worker]
        self._writer = ring.writer(worker)
        self._control = control
        self._told = control.told[worker]
        self._granted = control.granted[worker]
        self._learner = (learner,)

    def open(self) -> CountedSlot:
        told, begin = self._told, time.monotonic_ns()
        self._granted.wait(int(told[BEGUN]) + 1, peers=self._learner)
        if self._control.stop.value:
            raise Stopped("the run has ended")
        slot = CountedSlot(self._writer.claim(peers=self._learner), told)
        told[WAIT_NS] += time.monotonic_ns() - begin
        # Before it counts as begun: whoever sees that it has sees a version that is not newer than the one to be used.
        number = int(told[BEGUN])
        self._versions[number % len(self._versions)] = self._weights.version
        told[BEGUN] = number + 1
        return slot


class CountedSlot(Mapping[str, Any]):
    """A claimed slot that is counted when it is committed."""

    def __init__(self, slot: WriteSlot, told: Any) -> None:
        self._slot = slot
        self._told = told
        self._committed = False

    def __getitem__(self, name: str) -> Any:
        return self._slot[name]

    def __iter__(self) -> Any:
        return iter(self._slot)

    def __len__(self) -> int:
        return len(self._slot)

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        self._slot.commit(policy_version=policy_version, rows=rows)
        self._committed = True
        self._told[COMMITTED] += 1

    def __enter__(self) -> CountedSlot:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed and not self._slot.released:
            self._told[BEGUN] -= 1  # it never was, so the credit is still there
        self._slot.release()


class Subscriber:
    """The learner's weights, as a collector reads them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def read(self, out: Mapping[str, Any]) -> int:
        return self._weights.read(out)[0]


class Context:
    def __init__(self, control: Control, worker: int, incarnation: int, reporter: Reporter) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._told = control.told[worker]
        self._reporter = reporter

    @property
    def rollout(self) -> int:
        return int(self._told[COMMITTED])

    def tell(self, *, steps: int = 0, env_ns: int = 0, policy_ns: int = 0) -> None:
        told = self._told
        told[STEPS] += steps
        told[ENV_NS] += env_ns
        told[POLICY_NS] += policy_ns
        self._reporter.step(int(told[STEPS]))


@dataclass(frozen=True)
class Task:
    """All that a collector's process is given. ``content`` is (make_env, collect), pickled so that lambdas and classes
    of a script survive."""

    worker: int
    incarnation: int
    content: bytes
    ring: Ring
    weights: Weights
    errors: CollectorErrors
    control: Control
    learner: Peer


def _run(task: Task) -> None:
    """A collector's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's, who then says stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(task.learner)
    if "torch" in sys.modules:
        # One thread each: several in each of many processes only get in each other's way.
        sys.modules["torch"].set_num_threads(1)
    # PeerDied: the learner is gone, and so will we be.
    with contextlib.suppress(Stopped, PeerDied), task.errors.reporting(task.worker) as reporter:
        make_env, collect = cloudpickle.loads(task.content)
        env = make_env(task.worker)
        try:
            context = Context(task.control, task.worker, task.incarnation, reporter)
            sink = Sink(task.ring, task.weights, task.control, task.worker, task.learner)
            with contextlib.suppress(Stopped):
                collect(env, Subscriber(task.weights), sink, context)
        finally:
            env.close()


# --------------------------------------------------------------------------------------------------- in the learner


@dataclass(eq=False)
class _Handle:
    process: BaseProcess
    peer: CollectorPeer | None
    incarnation: int


class Collectors:
    """``count`` collectors in processes of their own. Also the source of their rollouts."""

    def __init__(
        self,
        count: int,
        make_env: Callable[[int], Any],
        collect: Collect,
        *,
        slot: Layout,
        weights: Weights,
        under_way: int,
        restarts: Restarts | None = None,
        on_event: Callable[[Event], object] = bool,
        context: str = "forkserver",
    ) -> None:
        """``under_way`` is how many rollouts there may be from their first step until they have been learned from, of
        all collectors together; each needs one. ``on_event`` hears of collectors that are lost and that join."""
        if count < 1:
            raise ValueError(f"there must be at least 1 collector, found {count}")
        if under_way < count:
            raise ValueError(f"each of {count} collectors needs a rollout under way, found {under_way} for all")
        self.count = count
        self.restarts = restarts or Restarts()
        self.on_event = on_event
        self._content = cloudpickle.dumps((make_env, collect))
        self.ring = Ring(slot, num_slots=under_way, overflow="block")
        self.weights = weights
        self.control = Control(count, under_way)
        self.errors = CollectorErrors(count)
        self._reader = self.ring.reader()
        self._context = mp.get_context(context)
        if context == "forkserver":
            start_fork_server()
        self._handles: dict[int, _Handle] = {}
        self._taken = [0] * count
        self._spent = [0] * count
        """Rollouts that were taken and have not been paid back."""
        self._kept: deque[ReadSlot] = deque()
        """Taken from the ring when somebody died; handed out before those that are still there."""
        self._last_counters: dict[str, int] = {}
        self._window = RestartWindow(self.restarts.most, self.restarts.window)
        self.total_restarts = 0
        self._stopped = False
        for worker in range(count):
            self.control.granted[worker].add(under_way // count + (worker < under_way % count))

    def start(self) -> None:
        for worker in range(self.count):
            self._start(worker, 0)

    def _start(self, worker: int, incarnation: int) -> None:
        task = Task(
            worker, incarnation, self._content, self.ring, self.weights, self.errors, self.control,
            Peer.current("learner"),
        )  # fmt: skip
        process = self._context.Process(target=_run, args=(task,), name=f"memlane collector {worker}")  # type: ignore[attr-defined]
        with without_main_module():
            process.start()
        assert process.pid is not None
        self.on_event(CollectorJoined(worker, incarnation, process.pid))
        try:
            peer = self.errors.watch(worker, process.pid)
        except CollectorError:
            raise  # it has raised already
        except PeerDied as death:  # and is gone already
            self._handles[worker] = _Handle(process, None, incarnation)
            self._replace(worker, process.pid, str(death), 0)
            return
        self._handles[worker] = _Handle(process, peer, incarnation)

    # ------------------------------------------------------------------------------------------------------ rollouts

    def take(self, timeout: float | None = None) -> ReadSlot:
        """The oldest rollout that nobody has taken. Meanwhile the dead are replaced; a collector that raised ends the
        wait with its own error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.check()  # a rollout that is there ends the wait before anybody looks at the peers
        while not self._kept:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            try:
                self._keep(self._reader.take(left, self._peers()))
            except CollectorError as error:
                self._lost(error)
        slot = self._kept.popleft()
        self._spent[slot.writer] += 1
        return slot

    def _keep(self, slot: ReadSlot) -> None:
        self._taken[slot.writer] += 1
        self._kept.append(slot)

    def _peers(self) -> list[CollectorPeer]:
        return [handle.peer for handle in self._handles.values() if handle.peer is not None]

    def owes(self, version: int) -> bool:
        """Whether a rollout that was begun with this version or an older one is still to come."""
        if any(slot.policy_version <= version for slot in self._kept):
            return True
        versions, told = self.control.versions, self.control.told
        for worker in self._handles:
            for number in range(self._taken[worker], int(told[worker][BEGUN])):
                if versions[worker][number % versions.shape[1]] <= version:
                    return True
        return False

    def pay_back(self) -> None:
        """What was learned from the rollouts taken so far is published: as many new ones may begin."""
        for worker, many in enumerate(self._spent):
            if many:
                self._spent[worker] = 0
                self._grant(worker, many)

    def _grant(self, worker: int, many: int) -> None:
        if worker in self._handles:
            self.control.granted[worker].add(many)
            return
        for number in range(many):  # it stays away: the others make its rollouts, in turn
            living = sorted(self._handles)
            self.control.granted[living[number % len(living)]].add(1)

    def check(self) -> None:
        """Replace the dead, without waiting for a rollout; ``CollectorError`` if one raised."""
        for peer in self._peers():
            if peer.failed or not peer.alive:
                self._lost(peer.error(""))

    def _lost(self, error: CollectorError) -> None:
        worker = error.worker
        handle = self._handles.get(worker)
        if handle is None or handle.process.pid != error.pid:
            return
        if error.remote_traceback:  # it raised: it would again
            raise error
        self._replace(worker, error.pid, str(error), error.step)

    def _replace(self, worker: int, pid: int, cause: str, step: int) -> None:
        """The process of a collector is gone: another one takes its place, if that does not happen too often."""
        handle = self._handles.pop(worker)
        if (ended := exit_of(handle.process)) is not None:
            cause = f"collector {worker} (pid {pid}) {ended}"
        replaced = self._window.record()
        self.on_event(CollectorLost(worker, handle.incarnation, pid, cause, replaced))
        # The dead commit nothing more: what can be taken now is all there is of it, whatever it came to count. What it
        # had begun beyond that is lost, and its successor may begin it anew.
        with contextlib.suppress(WaitTimeout):
            while True:
                self._keep(self._reader.take(timeout=0))
        told = self.control.told[worker]
        told[BEGUN] = told[COMMITTED] = self._taken[worker]
        if replaced:
            self.total_restarts += 1
            self._start(worker, handle.incarnation + 1)
            return
        if len(self._handles) < max(self.restarts.min_collectors, 1):
            raise CollectorError(
                f"{cause}; {self._window.recent} deaths in {self.restarts.window:g} s are more than the "
                f"{self.restarts.most} that are replaced, and {len(self._handles)} collectors are left of at least "
                f"{self.restarts.min_collectors} that the run needs",
                worker=worker, pid=pid, type_name=cause, remote_traceback="", step=step,
            )  # fmt: skip
        unused = self.control.granted[worker].value - int(told[BEGUN])
        self._grant(worker, unused)

    # --------------------------------------------------------------------------------------------------------- facts

    @property
    def pids(self) -> dict[int, int]:
        return {worker: handle.process.pid or 0 for worker, handle in self._handles.items()}

    def counters(self) -> dict[str, int]:
        """Sums over all collectors since the start."""
        if self._stopped:
            return self._last_counters
        told = self.control.told.sum(axis=0)
        names = {"steps": STEPS, "wait_ns": WAIT_NS, "env_ns": ENV_NS, "policy_ns": POLICY_NS, "rollouts": COMMITTED}
        counts = {name: int(told[place]) for name, place in names.items()}
        return {**counts, "restarts": self.total_restarts, "collectors": len(self._handles), "unread": self.ring.unread}

    # ---------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Stop: by word, then with SIGTERM, then with SIGKILL, each with its own limit. Again is harmless."""
        if self._stopped:
            return
        with contextlib.suppress(SegmentClosed):  # at the interpreter's end the memory may be gone before us
            self._last_counters = self.counters()
            self.control.stop.store(1)
            for granted in self.control.granted:
                granted.add(_ALL_OF_THEM)
        processes = [handle.process for handle in self._handles.values()]
        for seconds, signum in (
            (_STOP_SECONDS, None),
            (_TERM_SECONDS, signal.SIGTERM),
            (_KILL_SECONDS, signal.SIGKILL),
        ):
            if signum is not None:
                for process in processes:
                    if process.exitcode is None and process.pid is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process.pid, signum)
            deadline = time.monotonic() + seconds
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0))
            if all(process.exitcode is not None for process in processes):
                break
        # Only now: a close that was interrupted can be done again.
        self._stopped = True
        self._handles.clear()
        self._kept.clear()
        self.ring.close()
        self.errors.close()
        self.control.segment.close()
