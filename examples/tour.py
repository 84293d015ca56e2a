"""A tour of memlane's core: real processes, real kills, and the proof that nothing is left behind.

python examples/tour.py
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import warnings
from pathlib import Path

import numpy as np

from memlane import SharedCircularBuffer
from memlane.core import SIGNAL, Lease, Peer, PeerDied, Segment, StaleView, die_with, leftovers, names, reclaim

ENVS, ROUNDS = 64, 20_000
LAYOUT = {
    "obs": ("float32", (ENVS, 17)),
    "actions": ("float32", (ENVS, 6)),
    "asked": (SIGNAL, ()),
    "answered": (SIGNAL, ()),
}


def step_forever(segment: Segment, parent: Peer) -> None:
    """A worker: waits for actions, writes observations in place, signals."""
    die_with(parent)
    asked, answered = segment.signal("asked"), segment.signal("answered")
    obs, actions = segment["obs"], segment["actions"]
    step = 0
    while True:
        step = asked.wait(step + 1, peers=[parent])
        obs[:, :6] = actions * step
        answered.store(step)


def own_a_name_and_wait(name: str) -> None:
    with Segment.create({"x": ("float64", 1_000_000)}, name=name):
        time.sleep(60)


def push_forever(buffer: SharedCircularBuffer, value: int) -> None:
    while True:
        buffer.push([value] * 8, value, value, [value] * 8, False)


def hand_over(context: mp.context.SpawnContext) -> None:
    chapter("1. A worker process steps 64 environments in shared memory")
    with Segment.create(LAYOUT) as segment:
        worker = context.Process(target=step_forever, args=(segment, Peer.current("learner")))
        worker.start()
        asked, answered = segment.signal("asked"), segment.signal("answered")
        peer = Peer.of(worker.pid or 0, "worker 0")
        segment["actions"][:] = 1
        asked.add()
        answered.wait(1, timeout=30, peers=[peer])
        began = time.perf_counter()
        for step in range(2, ROUNDS + 2):
            asked.store(step)
            answered.wait(step, timeout=30, peers=[peer])
        micros = (time.perf_counter() - began) / ROUNDS * 1e6
        assert segment["obs"][5, 5] == ROUNDS + 1
        say(f"{segment.nbytes} bytes, no name, sealed, handed over by passing the object to Process(...)")
        say(f"{ROUNDS} round trips of {ENVS} observations and actions: {micros:.1f} us each, nothing pickled")

        chapter("2. The worker is killed with SIGKILL while we wait for it")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        killed = time.perf_counter()
        try:
            answered.wait(ROUNDS + 2, timeout=30, peers=[peer])
        except PeerDied as error:
            say(f"after {(time.perf_counter() - killed) * 1e3:.0f} ms: PeerDied: {error}")
        worker.join()


def reclaim_the_dead(context: mp.context.SpawnContext) -> None:
    chapter("3. The owner of a named segment is killed")
    name = f"tour-{os.getpid()}"
    owner = context.Process(target=own_a_name_and_wait, args=(name,))
    owner.start()
    path = names.path_of(name)
    while not path.exists():
        time.sleep(0.01)
    owner.kill()
    owner.join()
    (left,) = (leftover for leftover in leftovers() if leftover.path == path)
    owner = f"owner pid {left.owner.pid} ({left.owner.state.value})"
    say(f"left in /dev/shm: {left.path.name}, {left.nbytes} bytes, {owner}")
    say(f"reclaimed: {[leftover.path.name for leftover in reclaim()]}")


def catch_a_stale_view() -> None:
    chapter("4. A zero-copy view is kept too long (debug mode)")
    with Segment.create({"obs": ("float32", 4)}) as segment:
        segment["obs"][:] = 1
        lease = Lease(segment, debug=True, label="slot 0")
        kept = lease["obs"]
        around = np.asarray(kept)  # goes around the check, as torch or C code would
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lease.release()
        try:
            print(kept.sum())
        except StaleView as error:
            say(f"StaleView: {error}")
        say(f"and who goes around the check reads poison, not somebody else's numbers: {around}")


def share_a_replay_buffer(context: mp.context.SpawnContext) -> None:
    chapter("5. Two processes push into one replay buffer, a third samples, one pusher is killed")
    with SharedCircularBuffer(capacity=1000, state_dim=8) as buffer:
        writers = [context.Process(target=push_forever, args=(buffer, value)) for value in (1, 2)]
        for writer in writers:
            writer.start()
        deadline = time.monotonic() + 30
        while len(buffer) < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        writers[0].kill()
        sampled = torn = 0
        for _ in range(300):
            batch = buffer.sample(64)
            for state, action, reward in zip(batch["states"], batch["actions"], batch["rewards"], strict=True):
                sampled += 1
                torn += not (state == [action] * 8 and reward == action)
        writers[1].kill()
        for writer in writers:
            writer.join()
        say(f"{sampled} transitions sampled while they pushed: {torn} torn")


def prove_that_nothing_is_left(names_before: set[str], shmem_before: int) -> None:
    chapter("6. What is left")
    ours = sorted(name for name in names_now() - names_before if "memlane" in name)
    children = [child.pid for child in mp.active_children()]
    grown = (shmem_bytes() - shmem_before) / 2**20
    say(f"names in /dev/shm: {ours or 'none'}; child processes: {children or 'none'}; shared memory: {grown:+.1f} MiB")
    assert not ours, f"left in /dev/shm: {ours}"
    assert not children, f"left running: {children}"


def names_now() -> set[str]:
    return {entry.name for entry in names.directory().iterdir()}


def shmem_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def chapter(title: str) -> None:
    print(f"\n{title}")


def say(text: str) -> None:
    print(f"   {text}")


def main() -> None:
    began = time.perf_counter()
    names_before, shmem_before = names_now(), shmem_bytes()
    context = mp.get_context("spawn")
    hand_over(context)
    reclaim_the_dead(context)
    catch_a_stale_view()
    share_a_replay_buffer(context)
    prove_that_nothing_is_left(names_before, shmem_before)
    print(f"\nThe tour took {time.perf_counter() - began:.1f} s. Its source: examples/tour.py")


if __name__ == "__main__":
    main()
