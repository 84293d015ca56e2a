"""A tour of memlane's core in a few seconds: shared memory between processes, kills, and a check for leftovers.

Use it to see what memlane.core does before you build on it. It prints six short sections: a round trip between two
processes and its time, the error after a kill, the removal of a dead owner's segment, a stale view that is detected, a
replay buffer that two processes write, and that neither names nor processes nor memory are left.

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

NUM_ENVS, ROUND_TRIPS = 64, 20_000
LAYOUT = {
    "obs": ("float32", (NUM_ENVS, 17)),
    "actions": ("float32", (NUM_ENVS, 6)),
    "requested_step": (SIGNAL, ()),
    "completed_step": (SIGNAL, ()),
}


def step_forever(segment: Segment, parent: Peer) -> None:
    """A worker: waits for actions, writes observations in place, signals completion."""
    die_with(parent)
    requested, completed = segment.signal("requested_step"), segment.signal("completed_step")
    obs, actions = segment["obs"], segment["actions"]
    step = 0
    while True:
        step = requested.wait(step + 1, peers=[parent])
        obs[:, :6] = actions * step
        completed.store(step)


def own_a_named_segment(name: str) -> None:
    with Segment.create({"x": ("float64", 1_000_000)}, name=name):
        time.sleep(60)


def push_forever(buffer: SharedCircularBuffer, value: int) -> None:
    while True:
        buffer.push([value] * 8, value, value, [value] * 8, False)


def exchange_steps(context: mp.context.SpawnContext) -> None:
    print_title("1. A worker process steps 64 environments in shared memory")
    with Segment.create(LAYOUT) as segment:
        worker = context.Process(target=step_forever, args=(segment, Peer.current("learner")))
        worker.start()
        requested, completed = segment.signal("requested_step"), segment.signal("completed_step")
        peer = Peer.of(worker.pid or 0, "worker 0")
        segment["actions"][:] = 1
        requested.add()
        completed.wait(1, timeout=30, peers=[peer])
        start = time.perf_counter()
        for step in range(2, ROUND_TRIPS + 2):
            requested.store(step)
            completed.wait(step, timeout=30, peers=[peer])
        micros = (time.perf_counter() - start) / ROUND_TRIPS * 1e6
        assert segment["obs"][5, 5] == ROUND_TRIPS + 1
        print_line(
            f"{segment.nbytes} bytes, no name, sealed; the worker got the segment as an argument of Process(...)"
        )
        print_line(
            f"{ROUND_TRIPS} round trips of {NUM_ENVS} actions and observations: {micros:.1f} us each, no pickling"
        )

        print_title("2. The worker is killed with SIGKILL while this process waits for it")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        killed = time.perf_counter()
        try:
            completed.wait(ROUND_TRIPS + 2, timeout=30, peers=[peer])
        except PeerDied as error:
            print_line(f"after {(time.perf_counter() - killed) * 1e3:.0f} ms: PeerDied: {error}")
        worker.join()


def reclaim_a_segment(context: mp.context.SpawnContext) -> None:
    print_title("3. The owner of a named segment is killed")
    name = f"tour-{os.getpid()}"
    owner = context.Process(target=own_a_named_segment, args=(name,))
    owner.start()
    path = names.path_of(name)
    while not path.exists():
        time.sleep(0.01)
    owner.kill()
    owner.join()
    (left,) = (leftover for leftover in leftovers() if leftover.path == path)
    state = f"owner pid {left.owner.pid} ({left.owner.state.value})"
    print_line(f"left in /dev/shm: {left.path.name}, {left.nbytes} bytes, {state}")
    print_line(f"reclaimed: {[leftover.path.name for leftover in reclaim()]}")


def detect_a_stale_view() -> None:
    print_title("4. A zero-copy view is used after its lease ended (debug mode)")
    with Segment.create({"obs": ("float32", 4)}) as segment:
        segment["obs"][:] = 1
        lease = Lease(segment, debug=True, label="slot 0")
        kept = lease["obs"]
        unchecked = np.asarray(kept)  # bypasses the check, as torch or C code would
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lease.release()
        try:
            print(kept.sum())
        except StaleView as error:
            print_line(f"StaleView: {error}")
        print_line(f"code that bypasses the check reads poison, not the data of the slot's next use: {unchecked}")


def share_a_replay_buffer(context: mp.context.SpawnContext) -> None:
    print_title("5. Two processes push into a replay buffer, this one samples, and one of the writers is killed")
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
        print_line(f"{sampled} transitions sampled while they pushed: {torn} torn")


def check_for_leftovers(names_before: set[str], shmem_before: int) -> None:
    print_title("6. Nothing is left")
    left = sorted(name for name in shm_names() - names_before if "memlane" in name)
    children = [child.pid for child in mp.active_children()]
    growth = f"{(shmem_bytes() - shmem_before) / 2**20:+.1f} MiB"
    print_line(
        f"names in /dev/shm: {left or 'none'}; child processes: {children or 'none'}; shared memory used: {growth}"
    )
    assert not left, f"left in /dev/shm: {left}"
    assert not children, f"left running: {children}"


def shm_names() -> set[str]:
    return {entry.name for entry in names.directory().iterdir()}


def shmem_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def print_title(title: str) -> None:
    print(f"\n{title}")


def print_line(text: str) -> None:
    print(f"   {text}")


def main() -> None:
    start = time.perf_counter()
    names_before, shmem_before = shm_names(), shmem_bytes()
    context = mp.get_context("spawn")
    exchange_steps(context)
    reclaim_a_segment(context)
    detect_a_stale_view()
    share_a_replay_buffer(context)
    check_for_leftovers(names_before, shmem_before)
    print(f"\nThe tour took {time.perf_counter() - start:.1f} s. Its source is examples/tour.py.")


if __name__ == "__main__":
    main()
