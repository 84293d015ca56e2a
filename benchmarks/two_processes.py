"""What benchmarks of two processes share: starting them, round trips between them, and waking a sleeper."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from benchmarks.harness import parser

REST_NS = 200_000
"""Time that a sleeper sleeps before it is woken: longer than any spin, and as long as in bare C."""
PAIR_SECONDS = 100
"""Time limit of two processes."""

# A forked child has everything loaded. The start method makes no difference to any contender afterwards.
CONTEXT = mp.get_context("fork")

RoundTrips = Callable[[int, bytes], bytes]
"""Makes a number of round trips with a payload; returns the last answer."""
Echoes = Callable[[int], None]


class HandOff(Protocol):
    """Created in the parent before the two processes start. Each method is called in its own process."""

    def ping(self, other_pid: int) -> RoundTrips: ...
    def pong(self, other_pid: int) -> Echoes: ...


class Alarm(Protocol):
    """Created in the parent. The functions get the number of the wake-up, from 1."""

    def sleeper(self) -> Callable[[int], object]: ...
    def waker(self) -> Callable[[int], object]: ...


Side = Callable[[int, Callable[[], object]], Any]
"""Runs in its own process; gets the other's pid, and a function that returns when both sides have called it."""


def in_two_processes(first: Side, second: Side, cores: tuple[int, int] | None) -> Any:
    """Run the two sides in two new processes and return the result of the first. They are new each time, because the
    kernel's placement of two processes matters much and does not change."""
    pids = CONTEXT.RawArray(ctypes.c_int, 2)
    barrier = CONTEXT.Barrier(2, timeout=30)
    ends: list[Connection] = []
    processes = []
    for index, side in enumerate((first, second)):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        core = cores[index] if cores else None
        process = CONTEXT.Process(target=_run_side, args=(index, side, core, pids, barrier, sender), daemon=True)
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + PAIR_SECONDS
        while len(results) < 2:
            open_ends = [end for index, end in enumerate(ends) if index not in results]
            ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the two processes did not finish in {PAIR_SECONDS} s")
            for end in ready:
                index = ends.index(end)  # type: ignore[arg-type]
                try:
                    succeeded, result = ends[index].recv()
                except EOFError:
                    raise RuntimeError(f"process {index + 1} ended without a result") from None
                if not succeeded:
                    raise RuntimeError(result)
                results[index] = result
        return results[0]
    finally:
        for process, end in zip(processes, ends, strict=True):
            process.join(timeout=5 if sys.exc_info()[0] is None else 0)
            if process.is_alive():
                process.kill()
            process.join()
            end.close()


def _run_side(index: int, side: Side, core: int | None, pids: Any, barrier: Any, sender: Connection) -> None:
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        pids[index] = os.getpid()
        barrier.wait()
        sender.send((True, side(pids[1 - index], barrier.wait)))
    except BaseException as error:
        sender.send((False, f"{type(error).__name__}: {error}"))


def round_trips(
    make: Callable[[], HandOff], blocks: int, trips: int, cores: tuple[int, int] | None, payload_bytes: int
) -> list[float]:
    """Nanoseconds per round trip, one value for each block of ``trips`` after a warm-up block."""
    contender = make()

    def ping(other_pid: int, meet: Callable[[], object]) -> list[float]:
        loop = contender.ping(other_pid)
        meet()
        values = []
        for _ in range(blocks + 1):
            payload = os.urandom(payload_bytes)
            begin = time.monotonic_ns()
            reply = loop(trips, payload)
            values.append((time.monotonic_ns() - begin) / trips)
            if reply != payload:
                raise AssertionError("the answer differs from the question")
        return values[1:]

    def pong(other_pid: int, meet: Callable[[], object]) -> None:
        loop = contender.pong(other_pid)
        meet()
        for _ in range(blocks + 1):
            loop(trips)

    values: list[float] = in_two_processes(ping, pong, cores)
    return values


def wake_ups(make: Callable[[], Alarm], count: int, cores: tuple[int, int] | None) -> list[float]:
    """Nanoseconds from the waker's call to the sleeper's return, for each of ``count`` wake-ups."""
    contender = make()
    warm_up = 5
    # Both processes read the same clock (CLOCK_MONOTONIC); a time of 0 means not yet.
    shared = memoryview(CONTEXT.RawArray(ctypes.c_int64, 2 * (count + warm_up))).cast("B").cast("q")
    called, woken = shared[: count + warm_up], shared[count + warm_up :]
    now = time.monotonic_ns

    def waker(sleeper_pid: int, meet: Callable[[], object]) -> list[float]:
        wake = contender.waker()
        meet()
        for index in range(count + warm_up):
            while not ((index == 0 or woken[index - 1]) and _is_asleep(sleeper_pid)):
                time.sleep(0)
            # Busy, as in bare C: a waker that slept would be measured with a cold core.
            rested = now() + REST_NS
            while now() < rested:
                pass
            called[index] = now()
            wake(index + 1)
        until(lambda: woken[count + warm_up - 1] != 0)
        return [float(end - begin) for begin, end in zip(called, woken, strict=True)][warm_up:]

    def sleeper(_: int, meet: Callable[[], object]) -> None:
        sleep = contender.sleeper()
        meet()
        for index in range(count + warm_up):
            sleep(index + 1)
            woken[index] = now()
            if not called[index]:
                raise AssertionError("woke before it was called")

    values: list[float] = in_two_processes(waker, sleeper, cores)
    return values


def _is_asleep(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2].startswith(b"S")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the other side did not connect within 10 s")
        time.sleep(0.001)


def pair_parser(description: str) -> argparse.ArgumentParser:
    arguments = parser(description.splitlines()[0])
    arguments.add_argument("--pin", nargs="?", const="", metavar="CORE,CORE", type=_two_cores,
                           help="pin the two processes to two cores (no value: the first two available)")  # fmt: skip
    return arguments


def _two_cores(text: str) -> tuple[int, int]:
    if text:
        first, second = map(int, text.split(","))
        return first, second
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[min(1, len(allowed) - 1)]
