"""How long does a hand-off between two Python processes take, and how long does it take to wake a sleeper?

The first table is a round trip: 64 bytes there, 64 bytes back, bytes object in and bytes object out on both sides. The
second is one-way: from just before the waking call to just after the return of the sleeping call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Contender, Expectation, Report, Table, bare, bare_skip, machine, race, ratio
from benchmarks.two_processes import (
    CONTEXT,
    Alarm,
    Echoes,
    HandOff,
    RoundTrips,
    pair_parser,
    round_trips,
    until,
    wake_ups,
)
from memlane.core import SIGNAL, Peer, Segment, Signal

PAYLOAD_BYTES = 64


# ---------------------------------------------------------------------------------------------------------- memlane


class MemlaneHandOff:
    def __init__(self, spin_limit_ns: int | None = None, watch: bool = False) -> None:
        self.segment = Segment.create(
            {
                "there": (SIGNAL, ()),
                "back": (SIGNAL, ()),
                "question": ("uint8", PAYLOAD_BYTES),
                "answer": ("uint8", PAYLOAD_BYTES),
            }
        )
        self.spin_limit_ns = spin_limit_ns
        self.watch = watch

    def _ends(self, out: str, into: str, other_pid: int) -> tuple[Signal, Callable[[int], int]]:
        """The signal that this side advances, and the function that waits for the other."""
        mine, other = self.segment.signal(out), self.segment.signal(into)
        if self.spin_limit_ns is not None:
            other.spin_limit_ns = self.spin_limit_ns
        if self.watch:
            return mine, functools.partial(other.wait, timeout=10.0, peers=(Peer.of(other_pid),))
        return mine, other.wait

    def ping(self, other_pid: int) -> RoundTrips:
        question, answer = self.segment["question"].data, self.segment["answer"].data
        there, await_answer = self._ends("there", "back", other_pid)
        add = there.add

        def loop(count: int, payload: bytes) -> bytes:
            reply = b""
            done = there.value
            for number in range(done + 1, done + 1 + count):
                question[:] = payload
                add()
                await_answer(number)
                reply = bytes(answer)
            return reply

        return loop

    def pong(self, other_pid: int) -> Echoes:
        question, answer = self.segment["question"].data, self.segment["answer"].data
        back, await_question = self._ends("back", "there", other_pid)
        add = back.add

        def loop(count: int) -> None:
            done = back.value
            for number in range(done + 1, done + 1 + count):
                await_question(number)
                answer[:] = bytes(question)
                add()

        return loop


class MemlaneAlarm:
    def __init__(self, spin_limit_ns: int | None = None) -> None:
        self.segment = Segment.create({"bell": (SIGNAL, ())})
        self.spin_limit_ns = spin_limit_ns

    def sleeper(self) -> Callable[[int], object]:
        bell = self.segment.signal("bell")
        if self.spin_limit_ns is not None:
            bell.spin_limit_ns = self.spin_limit_ns
        return bell.wait

    def waker(self) -> Callable[[int], object]:
        return self.segment.signal("bell").store


# --------------------------------------------------------------------------------------------------- multiprocessing


class ChannelHandOff:
    """Anything with a way to send and a way to receive: pipes and queues."""

    def __init__(self, make: Callable[[], tuple[Callable[[bytes], object], Callable[[], bytes]]]) -> None:
        self.put_question, self.get_question = make()
        self.put_answer, self.get_answer = make()

    def ping(self, other_pid: int) -> RoundTrips:
        del other_pid
        put, get = self.put_question, self.get_answer

        def loop(count: int, payload: bytes) -> bytes:
            reply = b""
            for _ in range(count):
                put(payload)
                reply = get()
            return reply

        return loop

    def pong(self, other_pid: int) -> Echoes:
        del other_pid
        put, get = self.put_answer, self.get_question

        def loop(count: int) -> None:
            for _ in range(count):
                put(get())

        return loop


def pipe_of_bytes() -> tuple[Callable[[bytes], object], Callable[[], bytes]]:
    receiver, sender = CONTEXT.Pipe(duplex=False)
    return sender.send_bytes, receiver.recv_bytes


def pipe_of_objects() -> tuple[Callable[[bytes], object], Callable[[], bytes]]:
    receiver, sender = CONTEXT.Pipe(duplex=False)
    return sender.send, receiver.recv


def queue() -> tuple[Callable[[bytes], object], Callable[[], bytes]]:
    channel: mp.Queue[bytes] = CONTEXT.Queue()
    return channel.put, channel.get


def simple_queue() -> tuple[Callable[[bytes], object], Callable[[], bytes]]:
    channel: mp.SimpleQueue[bytes] = CONTEXT.SimpleQueue()
    return channel.put, channel.get


class DuplexPipeHandOff(ChannelHandOff):
    """``Pipe()`` by default: one socket pair for both ways."""

    def __init__(self) -> None:
        near, far = CONTEXT.Pipe()
        self.put_question, self.get_answer = near.send_bytes, near.recv_bytes
        self.put_answer, self.get_question = far.send_bytes, far.recv_bytes


class SemaphoreHandOff:
    def __init__(self) -> None:
        self.there, self.back = CONTEXT.Semaphore(0), CONTEXT.Semaphore(0)
        shared = memoryview(CONTEXT.RawArray(ctypes.c_ubyte, 2 * PAYLOAD_BYTES)).cast("B")
        self.question, self.answer = shared[:PAYLOAD_BYTES], shared[PAYLOAD_BYTES:]

    def ping(self, other_pid: int) -> RoundTrips:
        del other_pid
        question, answer, release, acquire = self.question, self.answer, self.there.release, self.back.acquire

        def loop(count: int, payload: bytes) -> bytes:
            reply = b""
            for _ in range(count):
                question[:] = payload
                release()
                acquire()
                reply = bytes(answer)
            return reply

        return loop

    def pong(self, other_pid: int) -> Echoes:
        del other_pid
        question, answer, release, acquire = self.question, self.answer, self.back.release, self.there.acquire

        def loop(count: int) -> None:
            for _ in range(count):
                acquire()
                answer[:] = bytes(question)
                release()

        return loop


class PipeAlarm:
    def __init__(self) -> None:
        self.receiver, self.sender = CONTEXT.Pipe(duplex=False)

    def sleeper(self) -> Callable[[int], object]:
        receive = self.receiver.recv_bytes
        return lambda _: receive()

    def waker(self) -> Callable[[int], object]:
        send = self.sender.send_bytes
        return lambda _: send(b"!")


class SemaphoreAlarm:
    def __init__(self) -> None:
        self.semaphore = CONTEXT.Semaphore(0)

    def sleeper(self) -> Callable[[int], object]:
        acquire = self.semaphore.acquire
        return lambda _: acquire()

    def waker(self) -> Callable[[int], object]:
        release = self.semaphore.release
        return lambda _: release()


# --------------------------------------------------------------------------------------------------------- iceoryx2


class IceoryxPayload(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint8 * PAYLOAD_BYTES)]


class IceoryxPorts:
    """One process's ends of the two services. Must be kept: when the node ends, so does everything else."""

    def __init__(self, service: str, out: str, into: str, *, events: bool) -> None:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        self.node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        builders = {way: self.node.service_builder(iox2.ServiceName.new(f"{service}/{way}")) for way in (out, into)}
        samples = {way: builder.publish_subscribe(IceoryxPayload).open_or_create() for way, builder in builders.items()}
        self.publisher = samples[out].publisher_builder().create()
        self.subscriber = samples[into].subscriber_builder().create()
        until(lambda: samples[out].dynamic_config.number_of_subscribers > 0)
        until(lambda: samples[into].dynamic_config.number_of_publishers > 0)
        if events:
            bells = {way: builder.event().open_or_create() for way, builder in builders.items()}
            self.notifier = bells[out].notifier_builder().create()
            self.listener = bells[into].listener_builder().create()
            until(lambda: bells[out].dynamic_config.number_of_listeners > 0)

    def sender(self) -> Callable[[bytes], None]:
        """The fastest way of the package: no ctypes object is created, no type is checked again."""
        loan, move = self.publisher.loan_uninit, ctypes.memmove

        def send(payload: bytes) -> None:
            sample = loan()
            move(sample.payload_ptr, payload, PAYLOAD_BYTES)
            sample.assume_init().send()

        return send

    def taker(self) -> Callable[[Any], bytes]:
        read = ctypes.string_at
        return lambda sample: read(sample.payload_ptr, PAYLOAD_BYTES)


class IceoryxHandOff:
    """Publish and subscribe. ``events`` sleeps in a listener until it is notified, otherwise the receiver polls."""

    def __init__(self, *, events: bool) -> None:
        self.events = events
        self.service = f"benchmark/{os.getpid()}/{time.monotonic_ns()}"

    def ping(self, other_pid: int) -> RoundTrips:
        del other_pid
        ports = IceoryxPorts(self.service, "there", "back", events=self.events)
        send, receive, take, events = ports.sender(), ports.subscriber.receive, ports.taker(), self.events

        def loop(count: int, payload: bytes) -> bytes:
            reply = b""
            for _ in range(count):
                send(payload)
                if events:
                    ports.notifier.notify()
                while (sample := receive()) is None:
                    if events:
                        ports.listener.blocking_wait()
                reply = take(sample)
            return reply

        return loop

    def pong(self, other_pid: int) -> Echoes:
        del other_pid
        ports = IceoryxPorts(self.service, "back", "there", events=self.events)
        send, receive, take, events = ports.sender(), ports.subscriber.receive, ports.taker(), self.events

        def loop(count: int) -> None:
            for _ in range(count):
                while (sample := receive()) is None:
                    if events:
                        ports.listener.blocking_wait()
                send(take(sample))
                if events:
                    ports.notifier.notify()

        return loop


class IceoryxAlarm:
    def __init__(self) -> None:
        self.service = f"benchmark/{os.getpid()}/{time.monotonic_ns()}"

    def sleeper(self) -> Callable[[int], object]:
        ports = IceoryxPorts(self.service, "back", "there", events=True)
        ports.listener.try_wait()  # a new notifier announces itself

        def sleep(_: int) -> None:
            # A listener may return nothing: it also wakes for notifications that it has reported before.
            while not ports.listener.blocking_wait():
                pass

        return sleep

    def waker(self) -> Callable[[int], object]:
        ports = IceoryxPorts(self.service, "there", "back", events=True)
        return lambda _: ports.notifier.notify()


# ------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    options = pair_parser(__doc__).parse_args()
    cores: tuple[int, int] | None = options.pin
    report = Report("signal", options, peers=["iceoryx2"])
    no_iceoryx = "" if importlib.util.find_spec("iceoryx2") else "iceoryx2 is not installed"
    trips, blocks, wakes = (200, 2, 20) if options.quick else (2000, 5, 100)
    rounds = options.rounds or (2 if options.quick else 15)
    # On one core the other process cannot run until the time slice ends, so polling takes milliseconds per turn.
    one_core = cores[0] == cores[1] if cores else machine()["cores"] < 2
    no_polling = "polling makes no sense on one core" if one_core else ""
    # The program can be pinned as a whole, but not its two processes to different cores.
    no_bare = bare_skip() or ("bare C cannot be pinned to two cores" if cores and not one_core else "")

    def trip(make: Callable[[], HandOff]) -> Callable[[], list[float]]:
        return lambda: round_trips(make, blocks, trips, cores, PAYLOAD_BYTES)

    def limit(*arguments: object) -> Callable[[], list[float]]:
        return lambda: bare(*arguments, core=cores[0] if cores else None)

    hand_offs = [
        Contender("memlane", "memlane", trip(MemlaneHandOff)),
        Contender("memlane, timeout and peer watched", "memlane", trip(lambda: MemlaneHandOff(watch=True))),
        Contender("memlane, never spins", "memlane", trip(lambda: MemlaneHandOff(spin_limit_ns=0))),
        Contender("mp.Pipe bytes, two one-way", "peer", trip(lambda: ChannelHandOff(pipe_of_bytes))),
        Contender("mp.Pipe bytes, duplex", "peer", trip(DuplexPipeHandOff)),
        Contender("mp.Pipe objects, two one-way", "peer", trip(lambda: ChannelHandOff(pipe_of_objects))),
        Contender("mp.SimpleQueue", "peer", trip(lambda: ChannelHandOff(simple_queue))),
        Contender("mp.Queue", "peer", trip(lambda: ChannelHandOff(queue))),
        Contender("mp.Semaphore and RawArray", "peer", trip(SemaphoreHandOff)),
        Contender(
            "iceoryx2, polling", "peer", trip(lambda: IceoryxHandOff(events=False)), skip=no_iceoryx or no_polling
        ),
        Contender("iceoryx2, events", "peer", trip(lambda: IceoryxHandOff(events=True)), skip=no_iceoryx),
        Contender("bare C, spinning", "limit", limit("pingpong_spin", trips * blocks), skip=no_bare or no_polling),
        Contender("bare C, futex", "limit", limit("pingpong_futex", trips * blocks), skip=no_bare),
    ]
    if cores:
        # A process that may use only one core does not spin by default.
        hand_offs.append(
            Contender("memlane, spins for 50 us", "memlane", trip(lambda: MemlaneHandOff(spin_limit_ns=50_000)))
        )
    race(hand_offs, rounds)
    table = Table("hand-off", "memlane", hand_offs, f"a round trip of {PAYLOAD_BYTES} bytes each way")
    report.add(table)
    pipes = [row for row in hand_offs if row.name.startswith("mp.Pipe")]
    report.expect(
        Expectation(
            "a round trip is at least 5 times as fast as with the best mp.Pipe",
            ratio(min(pipes, key=lambda row: row.median), table["memlane"]),
            at_least=5,
        )
    )

    def wake(make: Callable[[], Alarm]) -> Callable[[], list[float]]:
        return lambda: wake_ups(make, wakes, cores)

    alarms = [
        Contender("memlane", "memlane", wake(MemlaneAlarm)),
        Contender("memlane, never spins", "memlane", wake(lambda: MemlaneAlarm(spin_limit_ns=0))),
        Contender("mp.Pipe bytes", "peer", wake(PipeAlarm)),
        Contender("mp.Semaphore", "peer", wake(SemaphoreAlarm)),
        Contender("iceoryx2, events", "peer", wake(IceoryxAlarm), skip=no_iceoryx),
        Contender("bare C, futex", "limit", limit("wake", wakes), skip=no_bare),
    ]
    race(alarms, rounds)
    table = Table(
        "waking an idle sleeper", "memlane", alarms, "a wake-up, from the waker's call to the sleeper's return"
    )
    report.add(table)
    report.expect(
        Expectation(
            "waking a sleeper takes at most 2 times as long as in bare C",
            ratio(table["memlane"], table["bare C, futex"]),
            at_most=2,
        )
    )
    report.finish()


if __name__ == "__main__":
    main()
