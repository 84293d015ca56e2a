"""Kills, stops and exceptions at random instants, in vector environments that run long and restart their workers.

A second thread injects faults into the workers while the main thread steps, resets, sends and receives. Every number
that comes back is compared with the expected one (``Ledger``): a restarted worker truncates all its environments, once,
and changes nothing else.

`make soak` runs the same with thousands of faults. MEMLANE_KILL_SEED repeats a run, as far as timing can be repeated.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlane.core import Peer
from memlane.vector import AsyncVectorEnv
from tests.support.failing_envs import RAISE, Ledger, makers
from tests.support.kills import kill_seed, scales
from tests.support.processes import within

pytestmark = pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): ")

WORKERS, ENVS = 4, 8
FAULTS = 70
"""Faults in each of the three modes: 210 in all."""
PATIENCE = 60.0
LONGEST_PAUSE = 0.06
"""Seconds between two faults: about as long as a few steps and a restart."""


def peers_of(envs: AsyncVectorEnv) -> list[Peer]:
    return [Peer.from_word(handle.peer.word) for handle in envs._workers.handles]


class FaultInjector(threading.Thread):
    """Kills and stops workers at random instants, and asks the main thread for exceptions."""

    def __init__(self, envs: AsyncVectorEnv, faults: int, seed: str) -> None:
        super().__init__(daemon=True)
        self._envs = envs
        self._faults = faults
        self._random = random.Random(seed)
        self.killed: set[Peer] = set()
        self.injected: Counter[str] = Counter()
        self.to_raise: deque[str] = deque()
        """One entry for each exception that the main thread is to cause."""
        self.over = threading.Event()

    def run(self) -> None:
        for _ in range(self._faults):
            if self.over.wait(self._random.uniform(0, LONGEST_PAUSE)):
                return
            kind = self._random.choice(["kill", "stop", "raise"])
            if kind == "raise":
                self.to_raise.append(kind)
                continue
            peer = self._living()
            if kind == "kill":
                self.killed.add(peer)
                os.kill(peer.pid, signal.SIGKILL)
            else:
                os.kill(peer.pid, signal.SIGSTOP)
                time.sleep(self._random.uniform(0, 0.03))
                if peer.alive:
                    os.kill(peer.pid, signal.SIGCONT)
            self.injected[kind] += 1

    def _living(self) -> Peer:
        """A random worker that is alive: not one that was just killed and is not restarted yet."""
        while True:
            peer = self._random.choice(peers_of(self._envs))
            if peer.alive:
                return peer
            time.sleep(0.001)


class CheckedRun:
    """Uses one vector environment while faults are injected, and checks every result."""

    def __init__(self, envs: AsyncVectorEnv, injector: FaultInjector, mode: str, seed: str) -> None:
        self.envs = envs
        self.injector = injector
        self.ledger = Ledger(ENVS, mode)
        self.random = random.Random(seed)
        self.pending_truncation: set[int] = set()
        """Environments that were restarted and have not been truncated yet."""
        self.peers = peers_of(envs)
        self.all_peers = set(self.peers)
        self.done: Counter[str] = Counter()

    def _restarted(self) -> set[int]:
        """The environments whose worker was restarted since the last call; the injector has killed these workers."""
        before, self.peers = self.peers, peers_of(self.envs)
        self.all_peers.update(self.peers)
        changed = [worker for worker, peer in enumerate(before) if peer != self.peers[worker]]
        assert all(self.may_have_died(before[worker]) for worker in changed), "restarted a living worker"
        return {env for worker in changed for env in self.envs._workers.handles[worker].envs}

    def may_have_died(self, worker: Peer) -> bool:
        return worker in self.injector.killed

    def reset(self, mask: Any = None) -> None:
        options = None if mask is None else {"reset_mask": mask}
        which = list(range(ENVS)) if mask is None else np.flatnonzero(mask).tolist()
        observations, _ = self.envs.reset(seed=self.random.randrange(1000), options=options)
        restarted = self._restarted()
        self.ledger.check_reset(which, observations[which], (restarted | self.pending_truncation) & set(which))
        self.pending_truncation = (self.pending_truncation | restarted) - set(which)
        self.done["reset"] += 1

    def actions(self) -> tuple[dict[int, int], set[int]]:
        chosen = {env: self.random.randrange(1000) for env in range(ENVS)}
        raised: set[int] = set()
        if self.injector.to_raise:
            env = self.random.randrange(ENVS)
            if not self.ledger.needs_reset[env]:
                self.injector.injected[self.injector.to_raise.popleft()] += 1
                chosen[env] = RAISE
                raised = {env}
        return chosen, raised

    def check(self, mine: list[int], chosen: dict[int, int], results: Any, raised: set[int]) -> Any:
        self.pending_truncation |= self._restarted()
        lost = (self.pending_truncation | raised) & set(mine)
        self.pending_truncation -= self.ledger.check_step(mine, [chosen[env] for env in mine], results, lost)
        return np.logical_or(results[2], results[3])

    def step(self) -> None:
        chosen, raised = self.actions()
        results = self.envs.step(np.array(list(chosen.values())))
        over = self.check(list(range(ENVS)), chosen, results, raised)
        self.done["step"] += 1
        self._reset_those(over)

    def send_and_receive(self) -> None:
        chosen, raised = self.actions()
        self.envs.send(np.array(list(chosen.values())))
        left = set(range(ENVS))
        over = np.zeros(ENVS, np.bool_)
        while left:
            *results, ids = self.envs.recv(min_envs=self.random.randint(1, len(left)), timeout=PATIENCE)
            mine = ids.tolist()
            assert set(mine) <= left
            over[mine] = self.check(mine, chosen, results, raised)
            left -= set(mine)
        self.done["recv"] += 1
        self._reset_those(over)

    def _reset_those(self, over: Any) -> None:
        if self.ledger.mode == "Disabled" and over.any():
            self.reset(over)

    def turn(self) -> None:
        draw = self.random.random()
        if draw < 0.05:
            self.reset()
        elif draw < 0.4:
            self.send_and_receive()
        else:
            self.step()

    def run(self) -> None:
        self.reset()
        self.injector.start()
        while self.injector.is_alive() or self.injector.to_raise:
            self.turn()
        self.injector.join()
        for _ in range(20):  # without faults again
            self.step()


@pytest.fixture(params=scales(soak=20, method="signal"))
def scale(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def no_descriptor_lost() -> Iterator[None]:
    envs = AsyncVectorEnv(makers(1))  # starts the fork server, which keeps some open
    envs.close()
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors left open"


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.usefixtures("no_descriptor_lost")
def test_faults_in_some_workers_change_nothing_in_the_others(mode: str, scale: int) -> None:
    seed = kill_seed()
    envs = AsyncVectorEnv(
        makers(ENVS), num_workers=WORKERS, on_error="restart", max_restarts=10**9, autoreset_mode=mode
    )
    injector = FaultInjector(envs, FAULTS * scale, f"injector {mode} {seed}")
    run = CheckedRun(envs, injector, mode, f"run {mode} {seed}")
    try:
        run.run()
        begin = time.monotonic()
        envs.close()
        assert time.monotonic() - begin < within(2)
    finally:
        injector.over.set()
        print(f"{dict(injector.injected)} faults, {dict(run.done)} calls, {run.ledger.checked} results checked")
        envs.close(terminate=True)
    assert injector.injected.total() == FAULTS * scale
    # How many of each is random.
    assert min(injector.injected[kind] for kind in ("kill", "stop", "raise")) > 0
    left = [peer for peer in run.all_peers | injector.killed if peer.alive]
    assert not left, f"workers were left running: {left}"
