"""Functions that child processes run in the tests of the lanes.

Light to import, because every spawned child imports it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlane.core import Segment, WaitTimeout
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.lanes.ring import Ring
from memlane.lanes.stats import Stats
from memlane.lanes.weights import Weights
from memlane.runner.collector_error import CollectorErrors
from tests.support.payloads import Payload, fill, whole


def second_mapping(segment: Segment, field: str) -> NDArray[np.int64]:
    """The words of a field, mapped again as another process would."""
    place = segment.layout[field]
    mapping, offset = segment.alias(place.offset, place.nbytes, writeable=True)
    return np.frombuffer(mapping, np.int64, place.nbytes // 8, offset)


# --------------------------------------------------------------------------------------------- functions for children


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_of_segv() -> None:
    """Make an invalid memory access, without pytest's report of it."""
    faulthandler.disable()
    ctypes.string_at(8)


def claim_and_die(ring: Ring, claims: int = 1) -> None:
    slots = [ring.writer(9).claim(timeout=5) for _ in range(claims)]
    for slot in slots:
        fill(slot, -1)
    die()


def take_and_die(ring: Ring) -> None:
    _slot = ring.reader().take(timeout=5)
    die()


def put_and_die(ring: Ring, number: int) -> None:
    ring.writer(9).put(Payload().fill(number, 9))
    die()


def put_some(ring: Ring, numbers: list[int], writer: int = 0, pause: float = 0.0) -> None:
    payload = Payload()
    role = ring.writer(writer)
    for number in numbers:
        role.put(payload.fill(number, writer), policy_version=number * 10, rows=number, timeout=20)
        time.sleep(pause)


def take_all(ring: Ring, count: int, hold: float = 0.0) -> list[int]:
    """Take ``count`` slots and return their numbers; -1 for a slot with a wrong checksum."""
    numbers = []
    for _ in range(count):
        with ring.reader().take(timeout=20) as slot:
            time.sleep(hold)
            numbers.append(int(slot["number"]) if whole(slot) else -1)
    return numbers


def take_one_and_wait(ring: Ring, board: Segment) -> None:
    """Hold a slot until the signal ``go``."""
    with ring.reader().take(timeout=20) as slot:
        board.signal("bell").store(1)
        board.signal("go").wait(1, timeout=20)
        board["ok"][...] = whole(slot)


def echo_slot(ring: Ring, answer: Ring) -> None:
    """Copy one slot into a slot of another ring, field by field."""
    with ring.reader().take(timeout=20) as slot, answer.writer(5).claim(timeout=20) as copy:
        for name in slot:
            copy[name][...] = slot[name]
        copy.commit(policy_version=slot.policy_version, rows=slot.rows)


def outcome_of(function: Callable[[], object]) -> str:
    """Return the result or the exception of a call as text, which can be pickled."""
    try:
        return f"returned {function()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def commit_parents_slot(slot: Any) -> str:
    return outcome_of(slot.commit)


def wait_until_interrupted(ring: Ring, board: Segment) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for background jobs
    board.signal("bell").store(1)
    try:
        ring.reader().take(timeout=20)
    except KeyboardInterrupt:
        board["ok"][...] = True


# -------------------------------------------------------------------------------------------------------- rollout rings


def collect(buffer: RolloutRingBuffer, rollouts: int, first: int = 0) -> None:
    for number in range(first, first + rollouts):
        for field in buffer.slot_shapes:
            buffer.write_buffer[field][:] = number  # keeps no view
        buffer.signal_write_done(policy_version=number)


def learn(buffer: RolloutRingBuffer, rollouts: int) -> list[float]:
    means = []
    for _ in range(rollouts):
        assert buffer.wait_for_data(20)
        views = buffer.read_numpy_views()
        (mean,) = {float(view.mean()) for view in views.values()}
        means.append(mean)
        buffer.advance_read()
    return means


def collect_attached(
    sizes: tuple[int, ...], name: Any, write_ptr: Any, read_ptr: Any, rollouts: int
) -> tuple[int, int]:
    """Attach by name, then attach the sync primitives, as collectors of that protocol do."""
    buffer = RolloutRingBuffer(*sizes, create=False, shm_name_prefix=name)
    buffer.attach_sync_primitives(write_ptr, read_ptr)
    collect(buffer, rollouts)
    counts = write_ptr.value, read_ptr.value
    buffer.close()
    return counts


def use_inherited(buffer: RolloutRingBuffer) -> int:
    """Write a rollout with an object that was forked while it held slots, and close it."""
    for view in buffer.write_buffer.values():
        view[:] = 77
    slot = buffer.write_slot
    buffer.signal_write_done()
    buffer.close()
    return slot


# -------------------------------------------------------------------------------------------------------------- weights


def read_weights(weights: Weights) -> tuple[int, dict[str, Any]]:
    version, arrays = weights.read()
    return version, dict(arrays)


def read_sync(sync: SharedWeightSync, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[int, dict[str, Any]]:
    state = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
    return sync.read_weights_into(state), state


def write_with_lock(name: str, lock: Any, value: float) -> int:
    """Attach with the given lock and hold it while writing, as children of a locking protocol do."""
    sync = SharedWeightSync({"w": (3,)}, create=False, shm_name=name, lock=lock)
    with lock:
        sync.write_weights({"w": np.full(3, value, np.float32)})
    assert lock.acquire()
    lock.release()
    version = sync.version
    sync.close()
    return version


def publish_after_go(weights: Weights, board: Segment, versions: int) -> None:
    board.signal("go").wait(1, timeout=20)
    payload = Payload()
    for number in range(versions):
        weights.publish(payload.fill(number))


# ----------------------------------------------------------------------------------------------------------- statistics


def count_vectors(stats: Stats, batches: list[NDArray[Any]]) -> int:
    collector = stats.collector()
    for batch in batches:
        collector.add(batch)
    return collector.place


def count_and_die(stats: Stats, batches: list[NDArray[Any]]) -> None:
    count_vectors(stats, batches)
    die()


def get_stats_twice(stats: Any) -> Any:
    return [stats.get(), stats.get()]


def get_stats(stats: Any) -> Any:
    return stats.get()


# ----------------------------------------------------------------------------------------------------- collector errors


class Stubborn(Exception):
    """An exception that cannot be pickled: it needs two arguments and holds a function."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")
        self.hook = lambda: None


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raise_in_collector(errors: CollectorErrors, worker: int, kind: str, ring: Ring | None = None) -> None:
    with errors.reporting(worker) as reporter:
        for step in range(1, 43):
            reporter.step(step)
        if ring is not None:
            put_some(ring, [1, 2])
        match kind:
            case "key":
                {}["missing key"]
            case "stubborn":
                raise Stubborn("it failed", "it must")
            case "speechless":
                raise Speechless
            case "long":
                raise ValueError("\N{SNAKE}" * 10**6)
            case "empty":
                raise RuntimeError
            case "chained":
                try:
                    int("x")
                except ValueError as error:
                    raise RuntimeError("outer trouble") from error
            case "kill":
                die()
            case "segv":
                die_of_segv()
            case "exit":
                os._exit(3)
            case "wait":
                time.sleep(60)


def raise_quietly(errors: CollectorErrors, worker: int, kind: str, ring: Ring | None = None) -> None:
    """Like ``raise_in_collector``, without a traceback on the terminal and with exit code 0."""
    try:
        raise_in_collector(errors, worker, kind, ring)
    except Exception:
        os._exit(0)


def report_and_linger(errors: CollectorErrors, worker: int, seconds: float) -> None:
    """Report an exception and exit late, as with an environment that closes slowly."""
    try:
        raise_in_collector(errors, worker, "key")
    except KeyError:
        time.sleep(seconds)
        os._exit(0)


def timed_out(function: Callable[..., object], *args: object, **kwargs: object) -> bool:
    try:
        function(*args, **kwargs)
    except WaitTimeout:
        return True
    return False
