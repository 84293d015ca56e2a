"""Kills, stops and exceptions at random instants, in vector environments that run long and restart their workers.

Another thread hits the workers while this one steps, resets, sends and receives. Every number that comes back is
compared with what it must be (``Ledger``): a worker that was replaced truncates all its environments, once, and nothing
else changes.

`make soak` runs the same with thousands of hits. A run can be repeated with MEMLANE_KILL_SEED, as far as timing can.
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

pytestmark = pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): ")

WORKERS, ENVS = 4, 8
HITS = 70
"""In each of the three modes: 210 in all."""
SOAK = 20
"""Times as many."""
PATIENCE = 15.0
LONGEST_PAUSE = 0.06
"""Seconds between two hits: about as long as a few steps and a restart."""


def peers_of(envs: AsyncVectorEnv) -> list[Peer]:
    return [Peer.from_word(handle.peer.word) for handle in envs._workers.handles]


class Hunter(threading.Thread):
    """Hits the workers at random instants."""

    def __init__(self, envs: AsyncVectorEnv, hits: int, seed: str) -> None:
        super().__init__(daemon=True)
        self._envs = envs
        self._hits = hits
        self._chance = random.Random(seed)
        self.killed: set[Peer] = set()
        self.books: Counter[str] = Counter()
        self.to_raise: deque[str] = deque()
        """An entry for each environment that the other thread is to let raise."""
        self.over = threading.Event()

    def run(self) -> None:
        for _ in range(self._hits):
            if self.over.wait(self._chance.uniform(0, LONGEST_PAUSE)):
                return
            kind = self._chance.choice(["kill", "stop", "raise"])
            if kind == "raise":
                self.to_raise.append(kind)
                continue
            peer = self._living()
            if kind == "kill":
                self.killed.add(peer)
                os.kill(peer.pid, signal.SIGKILL)
            else:
                os.kill(peer.pid, signal.SIGSTOP)
                time.sleep(self._chance.uniform(0, 0.03))
                if peer.alive:
                    os.kill(peer.pid, signal.SIGCONT)
            self.books[kind] += 1

    def _living(self) -> Peer:
        """One of the workers; not one that was hit just now and is not replaced yet."""
        while True:
            peer = self._chance.choice(peers_of(self._envs))
            if peer.alive:
                return peer
            time.sleep(0.001)


class Life:
    """One vector environment under fire, and what must come of everything that it is asked."""

    def __init__(self, envs: AsyncVectorEnv, hunter: Hunter, mode: str, seed: str) -> None:
        self.envs = envs
        self.hunter = hunter
        self.ledger = Ledger(ENVS, mode)
        self.chance = random.Random(seed)
        self.pending_truncation: set[int] = set()
        """Environments that were restarted and have not been truncated yet."""
        self.peers = peers_of(envs)
        self.all_peers = set(self.peers)
        self.done: Counter[str] = Counter()

    def _look(self) -> set[int]:
        """The environments whose worker was replaced since the last look; all of them were killed by the hunter."""
        before, self.peers = self.peers, peers_of(self.envs)
        self.all_peers.update(self.peers)
        changed = [worker for worker, peer in enumerate(before) if peer != self.peers[worker]]
        assert {before[worker] for worker in changed} <= self.hunter.killed, (
            "a worker was restarted that was not killed"
        )
        return {env for worker in changed for env in self.envs._workers.handles[worker].envs}

    def reset(self, mask: Any = None) -> None:
        options = None if mask is None else {"reset_mask": mask}
        which = list(range(ENVS)) if mask is None else np.flatnonzero(mask).tolist()
        observations, _ = self.envs.reset(seed=self.chance.randrange(1000), options=options)
        restarted = self._look()
        self.ledger.check_reset(which, observations[which], (restarted | self.pending_truncation) & set(which))
        self.pending_truncation = (self.pending_truncation | restarted) - set(which)
        self.done["reset"] += 1

    def actions(self) -> tuple[dict[int, int], set[int]]:
        chosen = {env: self.chance.randrange(1000) for env in range(ENVS)}
        raised: set[int] = set()
        if self.hunter.to_raise:
            env = self.chance.randrange(ENVS)
            if not self.ledger.needs_reset[env]:
                self.hunter.books[self.hunter.to_raise.popleft()] += 1
                chosen[env] = RAISE
                raised = {env}
        return chosen, raised

    def check(self, mine: list[int], chosen: dict[int, int], results: Any, raised: set[int]) -> Any:
        self.pending_truncation |= self._look()
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
            *results, ids = self.envs.recv(min_envs=self.chance.randint(1, len(left)), timeout=PATIENCE)
            mine = ids.tolist()
            assert set(mine) <= left
            over[mine] = self.check(mine, chosen, results, raised)
            left -= set(mine)
        self.done["recv"] += 1
        self._reset_those(over)

    def _reset_those(self, over: Any) -> None:
        if self.ledger.mode == "Disabled" and over.any():
            self.reset(over)

    def live(self) -> None:
        self.reset()
        self.hunter.start()
        while self.hunter.is_alive() or self.hunter.to_raise:
            dice = self.chance.random()
            if dice < 0.05:
                self.reset()
            elif dice < 0.4:
                self.send_and_receive()
            else:
                self.step()
        self.hunter.join()
        for _ in range(20):  # and on it goes
            self.step()


@pytest.fixture(
    params=[
        pytest.param(1, id="short"),
        pytest.param(SOAK, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(900, method="signal")]),
    ],
)
def dose(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def seed() -> int:
    chosen = int(os.environ.get("MEMLANE_KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"MEMLANE_KILL_SEED={chosen}")
    return chosen


@pytest.fixture
def no_descriptor_lost() -> Iterator[None]:
    envs = AsyncVectorEnv(makers(1))  # starts the fork server, which keeps some
    envs.close()
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors were lost"


@pytest.mark.timeout(60, method="signal")
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.usefixtures("no_descriptor_lost")
def test_whatever_hits_the_workers_the_survivors_lose_nothing(mode: str, dose: int, seed: int) -> None:
    envs = AsyncVectorEnv(
        makers(ENVS), num_workers=WORKERS, on_error="restart", max_restarts=10**9, autoreset_mode=mode
    )
    hunter = Hunter(envs, HITS * dose, f"hunter {mode} {seed}")
    life = Life(envs, hunter, mode, f"life {mode} {seed}")
    try:
        life.live()
        begin = time.monotonic()
        envs.close()
        assert time.monotonic() - begin < 2
    finally:
        hunter.over.set()
        print(f"{dict(hunter.books)} hits, {dict(life.done)} done, {life.ledger.checked} results checked")
        envs.close(terminate=True)
    assert hunter.books.total() == HITS * dose
    # Some of each; how many is chance, and on a busy machine an exception comes too late more often than a signal.
    assert min(hunter.books[kind] for kind in ("kill", "stop", "raise")) > 0
    left = [peer for peer in life.all_peers | hunter.killed if peer.alive]
    assert not left, f"workers were left running: {left}"
