"""How long does it take to publish a policy's weights and to read them, and does a stopped reader delay the writer?

In the first two tables an operation is one publication and one read into the tensors of a state dict, in one process,
so that only the copying and the synchronisation are measured. In the others it is a read or a publication, also beside
another process. The peer is the usual hand-written code: shared tensors, a version, and a lock around both.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Contender, Expectation, Report, Table, parser, race, ratio
from memlane.ipc.weight_sync import SharedWeightSync

CONTEXT = mp.get_context("fork")


def policy(hidden: int) -> dict[str, torch.Tensor]:
    """The state dict of a policy of two hidden layers for 17 observations and 6 actions."""
    module = torch.nn.Sequential(
        torch.nn.Linear(17, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, 6),
    )
    return dict(module.state_dict())


def parameters(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


class LockedTensor:
    """One flat shared tensor, a version and a lock, filled in the fastest of the ways that we tried."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.flat = torch.zeros(parameters(state)).share_memory_()
        self.version = CONTEXT.Value("q", 0, lock=False)
        self.lock = CONTEXT.Lock()
        sizes = [tensor.numel() for tensor in state.values()]
        self.views = [
            part.view(tensor.shape) for part, tensor in zip(self.flat.split(sizes), state.values(), strict=True)
        ]

    def write_weights(self, state: dict[str, torch.Tensor]) -> None:
        with self.lock:
            torch._foreach_copy_(self.views, list(state.values()))
            self.version.value += 1

    def read_weights_into(self, state: dict[str, torch.Tensor]) -> int:
        with self.lock:
            torch._foreach_copy_(list(state.values()), self.views)
            return int(self.version.value)


class LockedTensors:
    """A shared tensor for each parameter, copied one by one under a lock."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.shared = {name: torch.zeros_like(tensor).share_memory_() for name, tensor in state.items()}
        self.version = CONTEXT.Value("q", 0, lock=False)
        self.lock = CONTEXT.Lock()

    def write_weights(self, state: dict[str, torch.Tensor]) -> None:
        with self.lock:
            for name, tensor in state.items():
                self.shared[name].copy_(tensor)
            self.version.value += 1

    def read_weights_into(self, state: dict[str, torch.Tensor]) -> int:
        with self.lock:
            for name, tensor in state.items():
                tensor.copy_(self.shared[name])
            return int(self.version.value)


def there_and_back(make: Callable[[dict[str, torch.Tensor]], Any], hidden: int, count: int) -> list[float]:
    state, out = policy(hidden), policy(hidden)
    sync = make(state)
    values = []
    for _ in range(6):
        begin = time.perf_counter_ns()
        for _ in range(count):
            sync.write_weights(state)
            sync.read_weights_into(out)
        values.append((time.perf_counter_ns() - begin) / count)
    if not all(torch.equal(state[name], out[name]) for name in state):
        raise AssertionError("the weights that were read differ from those that were written")
    return values[1:]


def beside_a_writer(make: Callable[[dict[str, torch.Tensor]], Any], hidden: int, count: int) -> list[float]:
    """The time of one read in a collector while the learner publishes as fast as possible in another process."""
    state, out = policy(hidden), policy(hidden)
    sync = make(state)
    sync.write_weights(state)
    writer = CONTEXT.Process(target=_write_forever, args=(sync, hidden), daemon=True)
    writer.start()
    values = []
    try:
        _wait_for_writer(sync)
        for _ in range(6):
            begin = time.perf_counter_ns()
            for _ in range(count):
                sync.read_weights_into(out)
            values.append((time.perf_counter_ns() - begin) / count)
    finally:
        writer.kill()
        writer.join()
    return values[1:]


def _write_forever(sync: Any, hidden: int) -> None:
    torch.set_num_threads(1)
    state = policy(hidden)
    while True:
        sync.write_weights(state)


def _wait_for_writer(sync: Any) -> None:
    version = sync.version if isinstance(sync.version, int) else sync.version.value
    deadline = time.monotonic() + 10
    while (sync.version if isinstance(sync.version, int) else sync.version.value) < version + 3:
        if time.monotonic() > deadline:
            raise TimeoutError("the writer did not start within 10 s")


def reads(hidden: int, count: int) -> list[float]:
    """The time of reads, each of a new version."""
    state, out = policy(hidden), policy(hidden)
    values = []
    with SharedWeightSync.from_state_dict(state) as sync:
        for _ in range(count):
            sync.write_weights(state)
            begin = time.perf_counter_ns()
            sync.read_weights_into(out)
            values.append(float(time.perf_counter_ns() - begin))
    return values[3:]


def copies(hidden: int, count: int) -> list[float]:
    """The limit: one copy of as many bytes, from memory that was written just before."""
    size = parameters(policy(hidden))
    source, target, fresh = torch.ones(size), torch.zeros(size), torch.ones(size)
    values = []
    for _ in range(count):
        source.copy_(fresh)
        begin = time.perf_counter_ns()
        target.copy_(source)
        values.append(float(time.perf_counter_ns() - begin))
    return values[3:]


def publishing(hidden: int, count: int, *, stopped_reader: bool) -> list[float]:
    """The time of publications while a reader reads as fast as possible, or is stopped in the middle of it."""
    state = policy(hidden)
    values = []
    with SharedWeightSync.from_state_dict(state) as sync:
        sync.write_weights(state)
        reader = CONTEXT.Process(target=_read_forever, args=(sync, hidden), daemon=True)
        reader.start()
        time.sleep(0.05)
        assert reader.pid is not None
        if stopped_reader:
            os.kill(reader.pid, signal.SIGSTOP)
        for _ in range(count):
            begin = time.perf_counter_ns()
            sync.write_weights(state)
            values.append(float(time.perf_counter_ns() - begin))
        reader.kill()
        reader.join()
    return values


def _read_forever(sync: SharedWeightSync, hidden: int) -> None:
    out = policy(hidden)
    while True:
        sync.read_weights_into(out)


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    report = Report("weights", options, peers=["torch"])
    rounds = options.rounds or (2 if options.quick else 11)
    for hidden, count in ((64, 20 if options.quick else 2000), (990, 3 if options.quick else 20)):
        size = parameters(policy(hidden))
        contenders = [
            Contender(
                "memlane", "memlane", lambda h=hidden, n=count: there_and_back(SharedWeightSync.from_state_dict, h, n)
            ),
            Contender(
                "locked shared tensor, flat", "peer", lambda h=hidden, n=count: there_and_back(LockedTensor, h, n)
            ),
            Contender("locked shared tensors", "peer", lambda h=hidden, n=count: there_and_back(LockedTensors, h, n)),
        ]
        race(contenders, rounds)
        report.add(Table(f"{size} parameters", "memlane", contenders, "a publication and a read"))
    hidden, count = 64, (50 if options.quick else 2000)
    size = parameters(policy(hidden))
    contended = [
        Contender("memlane", "memlane", lambda: beside_a_writer(SharedWeightSync.from_state_dict, hidden, count)),
        Contender("locked shared tensor, flat", "peer", lambda: beside_a_writer(LockedTensor, hidden, count)),
        Contender("locked shared tensors", "peer", lambda: beside_a_writer(LockedTensors, hidden, count)),
    ]
    race(contended, rounds)
    report.add(
        Table(f"{size} parameters, beside a writer", "memlane", contended, "a read while another process publishes")
    )
    report.expect(
        Expectation(
            f"beside a writer, {size} parameters are read at least 8 times as fast as from a locked shared tensor",
            ratio(min(contended[1:], key=lambda row: row.median), contended[0]),
            at_least=8,
        )
    )
    repeats = 20 if options.quick else 200
    large = [
        Contender("memlane read", "memlane", lambda: reads(990, repeats)),
        Contender("memcpy", "limit", lambda: copies(990, repeats)),
    ]
    race(large, rounds)
    nbytes = 4 * parameters(policy(990))
    report.add(Table("reading 1 M parameters", "memlane read", large, "a read", operation_bytes=nbytes))
    report.expect(
        Expectation(
            "a read of 1 M parameters takes at most 1.15 times as long as memcpy",
            ratio(large[0], large[1]),
            at_most=1.15,
        )
    )
    stopped = [
        Contender("reader stopped", "memlane", lambda: publishing(990, repeats, stopped_reader=True)),
        Contender("reader reading", "memlane", lambda: publishing(990, repeats, stopped_reader=False)),
    ]
    race(stopped, rounds)
    report.add(Table("publishing beside a reader", "reader stopped", stopped, "a publication of 1 M parameters"))
    report.expect(
        Expectation(
            "beside a stopped reader, a publication takes at most 1.1 times as long as beside one that reads",
            ratio(stopped[0], stopped[1]),
            at_most=1.1,
        )
    )
    report.finish()


if __name__ == "__main__":
    main()
