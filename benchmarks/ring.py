"""How long does it take to pass an array to another process: small, large, when the reader is asleep, and beside other
writers?

The first table is a round trip of 4 KB each way, from a numpy array to a numpy array on both sides. The second is the
writer's side of arrays of 8 MB in a row, which the reader reads in place where it can. The third is one-way: from just
before the writer's call to just after the return of the reader's sleeping call. The fourth is the time between two
slots that one reader gets from 1 to 64 writers.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Contender, Expectation, Report, Table, bare, bare_skip, duration, race, ratio
from benchmarks.two_processes import (
    CONTEXT,
    PAIR_SECONDS,
    Alarm,
    Echoes,
    HandOff,
    RoundTrips,
    in_two_processes,
    pair_parser,
    round_trips,
    until,
    wake_ups,
)
from memlane.core import WaitTimeout
from memlane.lanes.ring import Ring

SMALL_BYTES = 4096
LARGE_BYTES = 8 << 20

Send = Callable[[NDArray[np.uint8]], object]
Receive = Callable[[], NDArray[np.uint8]]


class Exchange:
    """Two one-way channels. ``make`` creates one in the parent; each end is opened in its own process."""

    def __init__(self, make: Callable[[], tuple[Callable[[], Send], Callable[[], Receive]]]) -> None:
        self.there, self.back = make(), make()

    def ping(self, other_pid: int) -> RoundTrips:
        del other_pid
        send, receive = self.there[0](), self.back[1]()

        def loop(count: int, payload: bytes) -> bytes:
            question = np.frombuffer(payload, np.uint8).copy()
            answer = question
            for _ in range(count):
                send(question)
                answer = receive()
            return answer.tobytes()

        return loop

    def pong(self, other_pid: int) -> Echoes:
        del other_pid
        send, receive = self.back[0](), self.there[1]()

        def loop(count: int) -> None:
            for _ in range(count):
                send(receive())

        return loop


# ---------------------------------------------------------------------------------------------------------- memlane


def memlane_copy(nbytes: int) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """``put`` and ``get``: one native call each."""
    ring = Ring({"payload": ("uint8", nbytes)}, num_slots=4, overflow="block")

    def sender() -> Send:
        put = ring.writer().put
        return lambda array: put({"payload": array})

    def receiver() -> Receive:
        get, out = ring.reader().get, {"payload": np.empty(nbytes, np.uint8)}

        def receive() -> NDArray[np.uint8]:
            get(out)
            return out["payload"]

        return receive

    return sender, receiver


def memlane_lease(nbytes: int, *, assign: bool = True) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """Leases. The writer's copy is the slot's, or with ``assign=False`` numpy's; the reader's is always numpy's."""
    ring = Ring({"payload": ("uint8", nbytes)}, num_slots=4, overflow="block")

    def sender() -> Send:
        claim = ring.writer().claim

        def send(array: NDArray[np.uint8]) -> None:
            slot = claim()
            slot["payload"] = array
            slot.commit()

        def send_with_numpy(array: NDArray[np.uint8]) -> None:
            slot = claim()
            slot["payload"][...] = array
            slot.commit()

        return send if assign else send_with_numpy

    def receiver() -> Receive:
        take, out = ring.reader().take, np.empty(nbytes, np.uint8)

        def receive() -> NDArray[np.uint8]:
            slot = take()
            out[...] = slot["payload"]
            slot.release()
            return out

        return receive

    return sender, receiver


# ------------------------------------------------------------------------------------------------------------ peers


def pipe_of_bytes(nbytes: int) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    far, near = CONTEXT.Pipe(duplex=False)

    def receiver() -> Receive:
        array = np.empty(nbytes, np.uint8)

        def receive() -> NDArray[np.uint8]:
            far.recv_bytes_into(memoryview(array))
            return array

        return receive

    return lambda: lambda array: near.send_bytes(memoryview(array)), receiver


def queue(nbytes: int) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """It pickles later, in its own thread: an array that the sender uses again must be copied first."""
    del nbytes
    channel: Any = CONTEXT.Queue()
    return lambda: lambda array: channel.put(array.copy()), lambda: channel.get


def torch_queue(nbytes: int) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """torch's queue copies the tensor into a shared file and sends its name; the sender must keep it until then."""
    del nbytes
    import torch
    import torch.multiprocessing as torch_mp

    torch_mp.set_sharing_strategy("file_system")
    channel: Any = torch_mp.get_context("fork").SimpleQueue()
    kept: deque[Any] = deque(maxlen=64)

    def send(array: NDArray[np.uint8]) -> None:
        kept.append(torch.from_numpy(array))
        channel.put(kept[-1])

    return lambda: send, lambda: lambda: channel.get().numpy()


def faster_fifo(nbytes: int) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """Bytes through its circular buffer, with a serialiser that does nothing: its fastest way."""
    import faster_fifo as library

    channel: Any = library.Queue(
        max_size_bytes=max(4 * nbytes, 1 << 20), loads=lambda message: message, dumps=lambda message: message
    )

    def receiver() -> Receive:
        return lambda: np.frombuffer(channel.get(timeout=60), np.uint8)

    return lambda: lambda array: channel.put(array.tobytes(), timeout=60), receiver


def iceoryx(nbytes: int, *, events: bool) -> tuple[Callable[[], Send], Callable[[], Receive]]:
    """Publish and subscribe of a slice of bytes; with ``events`` the receiver sleeps, otherwise it polls."""
    name = f"benchmark/{os.getpid()}/{time.monotonic_ns()}"

    class Payload(ctypes.Structure):
        _fields_ = [("data", ctypes.c_uint8 * nbytes)]

    def services() -> tuple[Any, Any, Any]:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        builder = node.service_builder(iox2.ServiceName.new(name))
        return node, builder.publish_subscribe(Payload).open_or_create(), builder.event().open_or_create()

    def sender() -> Send:
        node, samples, bells = services()
        publisher = samples.publisher_builder().create()
        notifier = bells.notifier_builder().create() if events else None
        ready: list[Any] = [node]  # kept: when the node ends, so does everything else

        def send(array: NDArray[np.uint8]) -> None:
            if len(ready) == 1:
                until(lambda: samples.dynamic_config.number_of_subscribers > 0)
                ready.append(True)
            sample = publisher.loan_uninit()
            ctypes.memmove(sample.payload_ptr, array.ctypes.data, nbytes)
            sample.assume_init().send()
            if notifier is not None:
                notifier.notify()

        return send

    def receiver() -> Receive:
        node, samples, bells = services()
        subscriber = samples.subscriber_builder().create()
        listener = bells.listener_builder().create() if events else None
        ports: list[Any] = [node, samples, bells]

        def receive() -> NDArray[np.uint8]:
            while (sample := subscriber.receive()) is None:
                if listener is not None and ports:
                    listener.blocking_wait()
            array = np.empty(nbytes, np.uint8)
            ctypes.memmove(array.ctypes.data, sample.payload_ptr, nbytes)
            return array

        return receive

    return sender, receiver


# ------------------------------------------------------------------------------------------------------- large blocks


def stream(make: Callable[[], tuple[Callable[[], Send], Callable[[], object]]], count: int) -> list[float]:
    """Nanoseconds between two hand-overs of 8 MB, after some to warm up. The reader reads one byte of each."""
    sender_of, reader_of = make()
    warm_up = 4

    def writer(_: int, meet: Callable[[], object]) -> list[float]:
        send, array = sender_of(), np.zeros(LARGE_BYTES, np.uint8)
        meet()
        ends = []
        for number in range(count + warm_up):
            array[0] = number
            send(array)
            ends.append(time.monotonic_ns())
        return list(map(float, np.diff(ends)[warm_up - 1 :]))

    def reader(_: int, meet: Callable[[], object]) -> None:
        read: Any = reader_of()
        meet()
        for number in range(count + warm_up):
            if read() != number % 256:
                raise AssertionError("received something else than was sent")

    values: list[float] = in_two_processes(writer, reader, None)
    return values


def reading_one_byte(make: Callable[[int], tuple[Callable[[], Send], Callable[[], Receive]]]) -> Any:
    def ends() -> tuple[Callable[[], Send], Callable[[], object]]:
        sender, receiver = make(LARGE_BYTES)

        def reader() -> Callable[[], int]:
            receive = receiver()
            return lambda: int(receive()[0])

        return sender, reader

    return ends


def memlane_in_place() -> tuple[Callable[[], Send], Callable[[], object]]:
    """The writer's copy is the only one: the reader reads the slot in place."""
    ring = Ring({"payload": ("uint8", LARGE_BYTES)}, num_slots=4, overflow="block")

    def sender() -> Send:
        put = ring.writer().put
        return lambda array: put({"payload": array})

    def reader() -> Callable[[], int]:
        take = ring.reader().take

        def read() -> int:
            with take() as slot:
                return int(slot["payload"][0])

        return read

    return sender, reader


def memcpy(count: int) -> list[float]:
    """The limit: numpy's copy of the same bytes into as many buffers in turn, in one process."""
    ring = Ring({"payload": ("uint8", LARGE_BYTES)}, num_slots=4, overflow="block")
    buffers = [np.ndarray(LARGE_BYTES, np.uint8, *ring.window(slot)) for slot in range(4)]
    array = np.zeros(LARGE_BYTES, np.uint8)
    ends = []
    for number in range(count + 5):
        array[0] = number % 256
        buffers[number % len(buffers)][:] = array
        ends.append(time.monotonic_ns())
    return list(map(float, np.diff(ends)[4:]))


# ------------------------------------------------------------------------------------------------------------- waking


class RingAlarm:
    def __init__(self) -> None:
        self.ring = Ring({"payload": ("uint8", 64)}, num_slots=4)

    def sleeper(self) -> Callable[[int], object]:
        get, out = self.ring.reader().get, {"payload": np.empty(64, np.uint8)}
        return lambda _: get(out)

    def waker(self) -> Callable[[int], object]:
        put, payload = self.ring.writer().put, {"payload": np.zeros(64, np.uint8)}
        return lambda _: put(payload)


class ChannelAlarm:
    def __init__(self, make: Callable[[int], tuple[Callable[[], Send], Callable[[], Receive]]]) -> None:
        self.sender, self.receiver = make(64)

    def sleeper(self) -> Callable[[int], object]:
        receive = self.receiver()
        return lambda _: receive()

    def waker(self) -> Callable[[int], object]:
        send, payload = self.sender(), np.zeros(64, np.uint8)
        return lambda _: send(payload)


# ------------------------------------------------------------------------------------------------------ many writers


class ManyWriters:
    """Writers that put small slots into one blocking ring as fast as they can, and one reader, this process.

    ``shares`` has one number per round: the slots of the writer that got most, divided by those of the one that got
    least. ``longest_ns`` is the longest that a put took.
    """

    def __init__(self, count: int, blocks: int, slots_per_writer: int) -> None:
        self.count = count
        self.blocks = blocks
        self.slots_per_block = max(20 * slots_per_writer, count * slots_per_writer) // blocks
        self.shares: list[float] = []
        self.longest_ns = 0

    def measure(self) -> list[float]:
        with Ring({"payload": ("uint8", 64)}, num_slots=4, overflow="block") as ring:
            longest = CONTEXT.RawArray(ctypes.c_int64, self.count)
            over = CONTEXT.RawValue(ctypes.c_bool, False)
            processes = [
                CONTEXT.Process(target=self._write, args=(ring, writer, longest, over), daemon=True)
                for writer in range(self.count)
            ]
            for process in processes:
                process.start()
            try:
                return self._read(ring, processes, over)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
                self.longest_ns = max(self.longest_ns, *longest)

    def _write(self, ring: Ring, writer: int, longest: Any, over: Any) -> None:
        put, payload, now = ring.writer(writer).put, {"payload": np.zeros(64, np.uint8)}, time.monotonic_ns
        slowest = 0
        while not over.value:
            begin = now()
            put(payload)
            slowest = max(slowest, now() - begin)
            longest[writer] = slowest

    def _read(self, ring: Ring, processes: list[Any], over: Any) -> list[float]:
        get, out = ring.reader().get, {"payload": np.empty(64, np.uint8)}
        started: set[int] = set()
        while len(started) < self.count:  # not counted: processes that start
            started.add(get(out, timeout=PAIR_SECONDS).writer)
        slots = [0] * self.count
        values = []
        for _ in range(self.blocks):
            begin = time.monotonic_ns()
            for _ in range(self.slots_per_block):
                slots[get(out).writer] += 1
            values.append((time.monotonic_ns() - begin) / self.slots_per_block)
        self.shares.append(max(slots) / max(1, min(slots)))
        over.value = True
        while any(process.is_alive() for process in processes):  # each may have one more slot to put
            with suppress(WaitTimeout):
                get(out, timeout=0.01)
        return values


# --------------------------------------------------------------------------------------------------------------- main


def missing(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def measure_small(report: Report, options: argparse.Namespace, rounds: int) -> None:
    blocks, trips = (2, 200) if options.quick else (5, 2000)

    def trip(make: Callable[[int], tuple[Callable[[], Send], Callable[[], Receive]]]) -> Callable[[], list[float]]:
        exchange: Callable[[], HandOff] = lambda: Exchange(lambda: make(SMALL_BYTES))  # noqa: E731
        return lambda: round_trips(exchange, blocks, trips, options.pin, SMALL_BYTES)

    small = [
        Contender("memlane ring, put and get", "memlane", trip(memlane_copy)),
        Contender("memlane ring, leases", "memlane", trip(memlane_lease)),
        Contender("memlane ring, leases, copied by numpy", "memlane", trip(lambda n: memlane_lease(n, assign=False))),
        Contender("mp.Pipe bytes", "peer", trip(pipe_of_bytes)),
        Contender("mp.Queue", "peer", trip(queue)),
        Contender("torch queue", "peer", trip(torch_queue), skip=missing("torch")),
        Contender("faster-fifo", "peer", trip(faster_fifo), skip=missing("faster_fifo")),
        Contender("iceoryx2, polling", "peer", trip(lambda n: iceoryx(n, events=False)), skip=missing("iceoryx2")),
        Contender("iceoryx2, events", "peer", trip(lambda n: iceoryx(n, events=True)), skip=missing("iceoryx2")),
    ]
    race(small, rounds)
    table = report.add(Table("4 KB", small[0].name, small, "a round trip of 4 KB each way"))
    peers = [row for row in small if row.kind == "peer" and row.rounds]
    report.expect(
        Expectation(
            "a round trip of 4 KB is at least 4 times as fast as with the best peer",
            ratio(min(peers, key=lambda row: row.median), table[small[0].name]) if peers else None,
            at_least=4,
        ),
        Expectation(
            "a round trip of 4 KB with leases takes at most 1.5 times as long as with put and get",
            ratio(table[small[1].name], table[small[0].name]),
            at_most=1.5,
        ),
    )


def measure_large(report: Report, options: argparse.Namespace, rounds: int) -> None:
    count = 10 if options.quick else 40
    large = [
        Contender("memlane ring, read in place", "memlane", lambda: stream(memlane_in_place, count)),
        Contender("memlane ring, copied out", "memlane", lambda: stream(reading_one_byte(memlane_copy), count)),
        Contender("mp.Pipe bytes", "peer", lambda: stream(reading_one_byte(pipe_of_bytes), count)),
        Contender("mp.Queue", "peer", lambda: stream(reading_one_byte(queue), count)),
        Contender("torch queue", "peer", lambda: stream(reading_one_byte(torch_queue), count), skip=missing("torch")),
        Contender(
            "faster-fifo", "peer", lambda: stream(reading_one_byte(faster_fifo), count), skip=missing("faster_fifo")
        ),
        Contender("memcpy", "limit", lambda: memcpy(count)),
    ]
    race(large, rounds)
    table = report.add(Table("8 MB", large[0].name, large, "a hand-over of 8 MB", operation_bytes=LARGE_BYTES))
    report.expect(
        Expectation(
            "a hand-over of 8 MB takes at most 1.1 times as long as copying 8 MB",
            ratio(table[large[0].name], table["memcpy"]),
            at_most=1.1,
        )
    )


def measure_wake_ups(report: Report, options: argparse.Namespace, rounds: int) -> None:
    count = 20 if options.quick else 100

    def wake(make: Callable[[], Alarm]) -> Callable[[], list[float]]:
        return lambda: wake_ups(make, count, options.pin)

    no_bare = bare_skip() or ("bare C cannot be pinned to two cores" if options.pin else "")
    alarms = [
        Contender("memlane ring", "memlane", wake(RingAlarm)),
        Contender("mp.Pipe bytes", "peer", wake(lambda: ChannelAlarm(pipe_of_bytes))),
        Contender("faster-fifo", "peer", wake(lambda: ChannelAlarm(faster_fifo)), skip=missing("faster_fifo")),
        Contender("bare C, futex", "limit", lambda: bare("wake", count), skip=no_bare),
    ]
    race(alarms, rounds)
    table = report.add(
        Table(
            "waking an idle reader", "memlane ring", alarms, "a wake-up, from the writer's call to the reader's return"
        )
    )
    report.expect(
        Expectation(
            "waking an idle reader takes at most 2 times as long as a futex in bare C",
            ratio(table["memlane ring"], table["bare C, futex"]),
            at_most=2,
        )
    )


def measure_writers(report: Report, options: argparse.Namespace, rounds: int) -> None:
    blocks, slots_per_writer = (2, 200) if options.quick else (5, 5000)
    crowds = {count: ManyWriters(count, blocks, slots_per_writer) for count in (1, 2, 8, 64)}
    names = {count: f"{count} writer" + "s" * (count > 1) for count in crowds}
    writers = [Contender(names[count], "memlane", crowd.measure) for count, crowd in crowds.items()]
    race(writers, rounds)
    table = report.add(
        Table(
            "writers",
            names[2],
            writers,
            "a slot of 64 bytes that one reader gets from a blocking ring of 4 slots",
            rate="slots/s",
            notes=[
                f"{names[count]}: the largest share of the slots is {statistics.median(crowd.shares):.2f} times the "
                f"smallest (median of the rounds; worst: {max(crowd.shares):.2f}); the longest put of all rounds took "
                f"{duration(crowd.longest_ns)}"
                for count, crowd in crowds.items()
            ],
        )
    )
    for count in (8, 64):
        report.expect(
            Expectation(
                f"{count} writers have at least half the throughput of 2",
                ratio(table[names[2]], table[names[count]]),
                at_least=0.5,
            ),
            Expectation(
                f"of {count} writers, the one with most slots has at most 2 times as many as the one with fewest",
                statistics.median(crowds[count].shares),
                at_most=2,
            ),
        )


TABLES: dict[str, Callable[[Report, argparse.Namespace, int], None]] = {
    "small": measure_small,
    "large": measure_large,
    "wake-ups": measure_wake_ups,
    "writers": measure_writers,
}


def main() -> None:
    arguments = pair_parser(__doc__)
    arguments.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES),
                           help="tables to measure (default: all)")  # fmt: skip
    options = arguments.parse_args()
    report = Report("ring", options, peers=["iceoryx2", "faster-fifo", "torch"])
    for name in options.tables:
        TABLES[name](report, options, options.rounds or (2 if options.quick else 11))
    report.finish()


if __name__ == "__main__":
    main()
