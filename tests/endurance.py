"""Use everything for hours, and measure what the processes keep: memory, descriptors, threads.

    python -m tests.endurance --seconds 7200 --json PATH

A lane, a replay, vector environments and a runner live as long as the program and are used in turns; others are made
and closed in each turn, and workers and collectors are killed. Memory that is not shared (RssAnon) must not grow after
the first tenth of the time, and descriptors, threads and children must be as many at the end as then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from memlane.core import Peer, Segment, WaitTimeout
from memlane.lanes import Replay, ReplayPipeline, Ring, Weights
from memlane.native import make
from memlane.vector import AsyncVectorEnv
from tests.support.failing_envs import makers
from tests.support.payloads import (
    LINKED,
    LOOSE,
    CheckedEnvs,
    Payload,
    checked_layout,
    count_misplaced,
    count_torn,
    loose_rows,
    whole,
)
from tests.support.processes import child
from tests.support.tiny_runner import Tiny
from tests.support.transports import Count

BODY = 256
WARM_UP = 0.1
"""Part of the time after which nothing may grow."""
SAMPLES = 720
"""How often the processes are measured."""
MOST_GROWTH = 2.0
"""Megabytes per hour of a process that count as flat: what fragmentation of the heap and the kernel's
counting in batches of pages change."""

Turns = Iterator[int]
"""Each turn yields how many results it has checked."""


# ----------------------------------------------------------------------------------------------------------- activities


def write_for_ever(ring: Ring) -> None:
    writer, payload, number = ring.writer(), Payload(BODY), 0
    while True:
        number += 1
        if number % 2:
            writer.put(payload.fill(number))
        else:
            with writer.claim() as slot:
                payload.fill(number)
                for name, array in payload.arrays.items():
                    slot[name] = array
                slot.commit()


def ring_turns(peers: dict[str, int]) -> Turns:
    """Slots of a writer in another process: copied, leased, and leases that are dropped."""
    out = Payload(BODY).arrays
    with Ring(checked_layout(BODY), num_slots=8, overflow="block") as ring, child(write_for_ever, ring) as writer:
        assert writer.pid is not None
        peers["writer of a ring"] = writer.pid
        reader, peer = ring.reader(), Peer.of(writer.pid)
        try:
            while True:
                for _ in range(100):
                    reader.get(out, peers=[peer])
                    assert whole(out)
                    with reader.take(peers=[peer]) as slot:
                        assert whole(slot)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)
                    reader.take(peers=[peer])  # dropped at once
                yield 200
        finally:
            writer.kill()


def weights_turns(peers: dict[str, int]) -> Turns:  # noqa: ARG001
    """Publications and reads of arrays and of torch tensors, also of those that need staging copies."""
    import torch

    arrays, out = Payload(BODY), Payload(BODY).arrays
    tensors = {"w": torch.zeros(64, 32), "b": torch.zeros(32, 3).t()}
    layout = {name: ("float32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    with Weights(checked_layout(BODY)) as plain, Weights(layout) as staged:
        for number in range(1, sys.maxsize):
            plain.publish(arrays.fill(number))
            plain.read(out)
            assert whole(out)
            tensors["w"].fill_(number)
            staged.publish(tensors)
            _, got = staged.read()
            assert float(got["w"][0, 0]) == float(tensors["w"][0, 0])
            if number % 50 == 0:
                yield 100


def replay_turns(peers: dict[str, int]) -> Turns:  # noqa: ARG001
    """Rows of streams with priorities, batches of a pipeline, and saving."""
    streams, batch = 6, 64
    with ExitStack() as stack:
        replay = stack.enter_context(
            Replay(LINKED, capacity=2000, streams=streams, observations=["obs"], alpha=0.6)  # type: ignore[arg-type]
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        writer, envs = replay.writer(list(range(streams))), CheckedEnvs(list(range(streams)))
        sampler = replay.sampler(n_step=2, gamma=1.0)
        stack.callback(sampler.close)
        pipeline = stack.enter_context(ReplayPipeline(replay.sampler(length=4), batch))
        for turn in range(sys.maxsize):
            for _ in range(100):
                rows, final = envs.step()
                writer.add(rows, final=final)
            pipeline.start()
            found = sampler.sample(batch)
            assert count_misplaced(found) == 0
            replay.update_priorities(found["key"], np.ones(batch))
            assert pipeline.consume()["obs"].shape[0] == batch
            if turn % 20 == 0:
                replay.save(folder / "saved.memlane")
                with Replay.load(folder / "saved.memlane") as loaded:
                    assert loaded.size > 0
            yield 2 * batch


def vector_turns(peers: dict[str, int]) -> Turns:
    """Steps of workers of which one is killed now and then and restarted."""
    num_envs = 8
    envs = AsyncVectorEnv(makers(num_envs), num_workers=2, on_error="restart", max_restarts=10**9)
    try:
        handles = envs._workers.handles
        peers["vector worker"] = handles[0].peer.pid
        envs.reset(seed=0)
        for turn in range(sys.maxsize):
            if turn % 10 == 9:
                os.kill(handles[1].peer.pid, signal.SIGKILL)
            for step in range(100):
                envs.step(np.full(num_envs, step % 5))
            yield 100 * num_envs
    finally:
        envs.close(terminate=True)


def runner_turns(peers: dict[str, int]) -> Turns:
    """Updates of a runner of which a collector is killed now and then."""
    runner = Tiny(Count(), collectors=2, max_restarts=10**9)
    try:
        runner.begin()
        peers["collector"] = runner.pid(0)
        for turn in range(sys.maxsize):
            runner.updates.clear()  # the only part of it that is made to grow
            if turn % 10 == 9:
                os.kill(runner.pid(1), signal.SIGKILL)
            runner.go_on(10)
            assert runner.torn == 0
            yield 10
    finally:
        runner.close()


def churn_turns(peers: dict[str, int]) -> Turns:  # noqa: ARG001
    """What is made, used and closed within one turn, what is refused, and what is dropped without being closed."""
    for turn in range(sys.maxsize):
        checked = 0
        with Ring(checked_layout(BODY), num_slots=2, name=f"endurance-{os.getpid()}") as ring:
            ring.writer().put(Payload(BODY).fill(turn))
            with Ring.attach(ring.name) as attached, attached.reader().take() as slot:
                checked += whole(slot)
            with suppress(WaitTimeout):
                ring.reader().get(Payload(BODY).arrays, timeout=0)
        with Replay(LOOSE, capacity=100) as replay:
            replay.add(loose_rows(1, turn, 100))
            batch = replay.sampler().sample(50)
            checked += 50 - count_torn(batch)
        Weights({"w": ("float32", 1000)}).publish({"w": np.ones(1000, np.float32)})  # dropped
        with suppress(ValueError):
            Segment.create({"x": ("float33", 1)})
        envs = make("CartPole-v1", num_envs=4)
        envs.reset(seed=turn)
        envs.step(np.zeros(4, np.int64))
        envs.close()
        if turn % 10 == 0:
            vector = AsyncVectorEnv(makers(2), num_workers=2)
            vector.reset(seed=turn)
            vector.step(np.zeros(2, np.int64))
            vector.close()
            runner = Tiny(Count(), collectors=1)
            runner.learn(2)
            runner.close()
        yield checked


ACTIVITIES: dict[str, Callable[[dict[str, int]], Turns]] = {
    "ring": ring_turns,
    "weights": weights_turns,
    "replay": replay_turns,
    "vector": vector_turns,
    "runner": runner_turns,
    "made and closed": churn_turns,
}


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Usage:
    """What one process keeps."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    """Memory that is not shared: RssAnon."""
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def measure(self, pid: int, seconds: float) -> None:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        self.seconds.append(seconds)
        self.megabytes.append(int(status["RssAnon"].split()[0]) / 1024)
        self.threads.append(int(status["Threads"]))
        self.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
        tasks = Path(f"/proc/{pid}/task").iterdir()
        self.children.append(sum(len((task / "children").read_text().split()) for task in tasks))

    def after_warm_up(self, seconds: float) -> Usage:
        first = next((i for i, at in enumerate(self.seconds) if at >= WARM_UP * seconds), 0)
        return Usage(*(values[first:] for values in vars(self).values()))

    def slope(self) -> float:
        """Megabytes per hour, by least squares."""
        if len(self.seconds) < 3:
            return 0.0
        return float(np.polyfit(self.seconds, self.megabytes, 1)[0]) * 3600

    def growth(self) -> list[str]:
        """What has grown, in words."""
        found = []
        if self.slope() > MOST_GROWTH and self.megabytes[-1] > self.megabytes[0] + 1:
            found.append(f"memory by {self.slope():.2f} MB per hour")
        for name in ("descriptors", "threads", "children"):
            values = getattr(self, name)
            # The number at any moment depends on what goes on; the smallest one of a tenth of the time does not.
            tenth = max(1, len(values) // 10)
            before, after = min(values[:tenth]), min(values[-tenth:])
            if after > before:
                found.append(f"{name} from {before} to {after}")
        return found


def run(seconds: float, names: list[str]) -> tuple[dict[str, Usage], dict[str, int], dict[str, int]]:
    """Return the usage by process, and the turns and the checked results by activity."""
    peers: dict[str, int] = {"this process": os.getpid()}
    usage: dict[str, Usage] = {}
    turns, checked = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    with ExitStack() as stack:
        activities = {name: ACTIVITIES[name](peers) for name in names}
        for activity in activities.values():
            stack.callback(activity.close)  # type: ignore[attr-defined]
        begin, due = time.monotonic(), 0.0
        while (now := time.monotonic() - begin) < seconds:
            for name, activity in activities.items():
                checked[name] += next(activity)
                turns[name] += 1
            if now >= due:
                due = now + seconds / SAMPLES
                gc.collect()
                for name, pid in peers.items():
                    usage.setdefault(name, Usage()).measure(pid, now)
    return usage, turns, checked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=7200.0, help="how long to go on (default: two hours)")
    parser.add_argument("--activity", action="append", choices=list(ACTIVITIES), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*WARN: ")  # each restart of a worker is one
    names_before = set(os.listdir("/dev/shm"))
    usage, turns, checked = run(options.seconds, options.activity or list(ACTIVITIES))
    print(f"{options.seconds:.0f} s; turns: {turns}; checked: {sum(checked.values()):,} {checked}")
    print(f"{'':20}{'MB':>9}{'then':>9}{'MB per hour':>14}{'descriptors':>14}{'threads':>10}{'children':>10}")
    failures = []
    for name, found in usage.items():
        late = found.after_warm_up(options.seconds)
        spans = [f"{min(values)}-{max(values)}" for values in (late.descriptors, late.threads, late.children)]
        memory = f"{late.megabytes[0]:9.1f}{late.megabytes[-1]:9.1f}{late.slope():14.2f}"
        print(f"{name:20}{memory}{spans[0]:>14}{spans[1]:>10}{spans[2]:>10}")
        failures += [f"{name}: {growth}" for growth in late.growth()]
    failures += [f"left in /dev/shm: {name}" for name in sorted(set(os.listdir("/dev/shm")) - names_before)]
    for failure in failures:
        print(failure)
    if options.json:
        measured = {name: asdict(found) for name, found in usage.items()}
        options.json.write_text(json.dumps({"turns": turns, "checked": checked, "usage": measured}) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
