"""Threads that share a handle: nothing is lost, duplicated or torn while calls wait or copy without the GIL."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memlane import Replay, Ring, Weights
from memlane.lanes import Stats

LARGE = 32 * 1024
"""Elements of int64: 256 KiB, which are copied without the GIL."""
SMALL = 8
"""Elements that are copied with the GIL: only a wait releases it."""
THREADS = 3
SECONDS = 1.0


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any]) -> list[Any]:
    """Call ``work`` with the number of the thread in each of ``THREADS`` threads; return or raise what they do."""
    results: list[Any] = [None] * THREADS
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def the_one_value(array: np.ndarray[Any, Any]) -> int:
    value = int(array[0])
    assert (array == value).all(), f"torn: {np.unique(array).tolist()}"
    return value


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_threads_that_share_a_writer_put_each_array_once(size: int) -> None:
    with Ring({"x": ("int64", size)}, num_slots=2, overflow="block") as ring:
        writer, reader = ring.writer(), ring.reader()
        done = threading.Event()
        seen: list[int] = []

        def read() -> None:
            out = {"x": np.zeros(size, np.int64)}
            while not done.is_set() or ring.unread:
                try:
                    reader.get(out, timeout=0.05)
                except TimeoutError:
                    continue
                seen.append(the_one_value(out["x"]))

        consumer = threading.Thread(target=read)
        consumer.start()

        def write(thread: int) -> list[int]:
            end, numbers = time.monotonic() + SECONDS, []
            while time.monotonic() < end:
                numbers.append(thread + THREADS * len(numbers))
                writer.put({"x": np.full(size, numbers[-1])})
            return numbers

        written = together(write)
        done.set()
        consumer.join()
    assert sorted(seen) == sorted(number for numbers in written for number in numbers)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_threads_that_share_a_reader_get_each_slot_once(size: int) -> None:
    with Ring({"x": ("int64", size)}, num_slots=3, overflow="block") as ring:
        writer, reader = ring.writer(), ring.reader()
        done = threading.Event()

        def write() -> int:
            end, count = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                writer.put({"x": np.full(size, count)})
                count += 1
            done.set()
            return count

        def read() -> list[int]:
            seen = []
            while not done.is_set() or ring.unread:
                out = {"x": np.zeros(size, np.int64)}
                try:
                    head = reader.get(out, timeout=0.05)
                except TimeoutError:
                    continue
                seen.append(the_one_value(out["x"]))
                assert head.sequence == seen[-1] + 1
            return seen

        first, *others = together(lambda thread: write() if thread == 0 else read())
    assert sorted(number for numbers in others for number in numbers) == list(range(first))


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "through staging copies"])
def test_threads_that_share_weights_publish_and_read_whole_versions(size: int, step: int) -> None:
    with Weights({"a": ("int64", size), "b": ("int64", ())}, buffers=THREADS + 2) as weights:
        weights.publish({"a": np.full(size, -1), "b": np.array(-1)})

        def work(thread: int) -> int:
            tensors = {"a": np.zeros(size * step, np.int64)[::step], "b": np.array(0)}
            out = {"a": np.zeros(size * step, np.int64)[::step], "b": np.array(0)}
            end, count = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                count += 1
                tensors["a"][:] = tensors["b"][...] = count * THREADS + thread
                weights.publish(tensors)
                version, _ = weights.read(out)
                assert version > 0
                assert the_one_value(out["a"]) == out["b"]
            return count

        published = sum(together(work))
        assert weights.version == published + 1


def test_threads_that_share_a_collector_of_statistics_count_each_vector_once() -> None:
    with Stats(SMALL) as stats:
        collector = stats.collector()

        def work(thread: int) -> int:
            end, count = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                collector.add(np.full(SMALL, thread))
                count += 1
            return count

        counts = together(work)
        moments = stats.merged()
    assert moments.count == sum(counts)
    assert np.allclose(moments.mean * moments.count, sum(thread * count for thread, count in enumerate(counts)))


@pytest.mark.parametrize("size", [SMALL, LARGE // 4], ids=["with the GIL", "without the GIL"])
def test_threads_that_share_a_replay_add_each_row_once_and_sample_whole_rows(size: int) -> None:
    most = 100  # rows of a thread
    with Replay({"x": ("int64", size)}, THREADS * most + 1) as replay:
        replay.add({"x": np.full(size, -1)})

        def work(thread: int) -> list[int]:
            sampler = replay.sampler()
            end, numbers = time.monotonic() + SECONDS, []
            while time.monotonic() < end and len(numbers) < most:
                numbers.append(thread + THREADS * len(numbers))
                assert replay.add({"x": np.full(size, numbers[-1])}) == 1
                for row in sampler.sample(4)["x"]:
                    the_one_value(row)
            sampler.close()
            return numbers

        added = [number for numbers in together(work) for number in numbers]
        assert len(replay) == replay.added == len(added) + 1
        with contextlib.closing(replay.sampler(seed=0)) as sampler:
            # So many draws miss a row once in 10^8 times.
            stored = {the_one_value(row) for _ in range(25) for row in sampler.sample(len(replay))["x"]}
        assert stored == {-1, *added}


# The object remembers which version its last tensors have; that of one thread's must not be taken for another's.
def test_a_thread_never_gets_an_older_version_than_the_one_reported() -> None:
    with Weights({"x": ("int64", LARGE)}) as weights:

        def work(thread: int) -> None:
            end = time.monotonic() + SECONDS
            out = {"x": np.zeros(LARGE, np.int64)}
            while time.monotonic() < end:
                if thread == 0:
                    weights.publish({"x": np.full(LARGE, weights.version + 1)})
                    time.sleep(0.001)
                elif (version := weights.read(out)[0]) > 0:
                    assert the_one_value(out["x"]) == version

        together(work)
