"""Ring: slots of any layout, each taken once, oldest first; overflow, roles, and how waits end."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from memlane import _native
from memlane.core import (
    SIGNAL,
    Layout,
    Lease,
    MemlaneError,
    Peer,
    PeerDied,
    Segment,
    SegmentClosed,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    StaleView,
    StaleViewWarning,
    WaitTimeout,
    fresh_name,
)
from memlane.ipc import ReadSlot, Ring, SlotHead, Weights, WriteSlot
from tests.support import lanes as lane_support
from tests.support.lanes import timed_out
from tests.support.payloads import CHECKED, Payload, fill, whole
from tests.support.processes import (
    METHODS,
    PATIENCE,
    PROMISE,
    ask,
    child,
    dead_peer,
    output_of,
    state_of,
    wait_for,
    within,
)

SMALL = {"x": ("int64", 2)}


@pytest.fixture(params=["drop_oldest", "block"])
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    with Ring(SMALL, num_slots=3, overflow=request.param) as ring:
        yield ring


@pytest.fixture
def dropping() -> Iterator[Ring]:
    with Ring(SMALL, num_slots=3, overflow="drop_oldest") as ring:
        yield ring


@pytest.fixture
def blocking() -> Iterator[Ring]:
    with Ring(SMALL, num_slots=3, overflow="block") as ring:
        yield ring


@pytest.fixture
def checked() -> Iterator[Ring]:
    with Ring(CHECKED, num_slots=3) as ring:
        yield ring


@pytest.fixture
def board() -> Iterator[Segment]:
    with Segment.create({"bell": (SIGNAL, ()), "go": (SIGNAL, ()), "ok": (bool, ())}) as board:
        yield board


def write(ring: Ring, *numbers: int) -> None:
    for number in numbers:
        with ring.writer().claim(timeout=1) as slot:
            slot["x"][:] = number
            slot.commit()


def read(ring: Ring) -> int:
    with ring.reader().take(timeout=1) as slot:
        return int(slot["x"][0])


def read_all(ring: Ring) -> list[int]:
    numbers = []
    while not timed_out(lambda: numbers.append(read_now(ring))):
        pass
    return numbers


def read_now(ring: Ring) -> int:
    with ring.reader().take(timeout=0) as slot:
        return int(slot["x"][0])


# --------------------------------------------------------------------------------------------------------- what travels


def test_a_slot_arrives_as_it_was_written(ring: Ring) -> None:
    with ring.writer().claim() as slot:
        slot["x"][:] = [7, 8]
        slot.commit()
    with ring.reader().take(timeout=1) as slot:
        assert slot["x"].tolist() == [7, 8]


def test_slots_are_taken_oldest_first_and_each_once(ring: Ring) -> None:
    write(ring, 1, 2, 3)
    assert read_all(ring) == [1, 2, 3]


def test_a_slot_says_who_wrote_it_when_and_with_which_policy(ring: Ring) -> None:
    before = time.time_ns()
    with ring.writer(writer=12).claim() as slot:
        slot["x"][:] = 0
        slot.commit(policy_version=2**40, rows=17)
    after = time.time_ns()
    with ring.reader().take(timeout=1) as slot:
        head = slot.head
    assert (head.writer, head.policy_version, head.rows, head.sequence) == (12, 2**40, 17, 1)
    assert head.process == Peer.current().word
    assert before <= head.claimed_ns <= head.committed_ns <= after


def test_a_slot_gives_the_most_used_of_that_by_name(ring: Ring) -> None:
    with ring.writer(writer=12).claim() as slot:
        slot.commit(policy_version=5, rows=17)
    with ring.reader().take(timeout=1) as slot:
        assert (slot.sequence, slot.policy_version, slot.writer, slot.rows) == (1, 5, 12, 17)


def test_the_process_in_a_slot_is_the_one_that_wrote_it(checked: Ring) -> None:
    with child(lane_support.put_some, checked, [1]) as process:
        writer = Peer.of(process.pid or 0)
        with checked.reader().take(timeout=PATIENCE) as slot:
            assert slot.head.process == writer.word


def test_sequence_numbers_count_the_commits_from_one(ring: Ring) -> None:
    sequences = []
    for number in range(7):
        write(ring, number)
        with ring.reader().take(timeout=1) as slot:
            sequences.append(slot.sequence)
    assert sequences == [1, 2, 3, 4, 5, 6, 7]


LAYOUTS: dict[str, dict[str, Any]] = {
    "dict observations": {
        "obs/image": ("uint8", (3, 5, 84, 84, 3)),
        "obs/joints": ("float32", (3, 5, 7)),
        "obs/goal/position": ("float64", (3, 5, 2)),
    },
    "discrete actions": {"obs": ("float32", (4, 8)), "actions": ("int64", (4,)), "mask": (bool, (4, 6))},
    "pixels": {"frames": ("uint8", (2, 4, 84, 84))},
    "recurrent state": {"hidden": ("float16", (2, 6, 32)), "cell": ("float16", (2, 6, 32)), "start": ("int32", 6)},
    "scalars and nothing": {"step": ("uint16", ()), "none": ("float32", (0, 3)), "z": ("complex64", (2,))},
    "records": {"transition": ([("obs", "f4", (3,)), ("action", "i8"), ("done", "?")], (4, 2))},
}


@pytest.mark.parametrize("fields", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_goes_to_another_process_and_back_bit_for_bit(fields: dict[str, Any]) -> None:
    chance = np.random.default_rng(5)
    layout = Layout(fields)
    given = {
        field.name: np.frombuffer(chance.bytes(field.nbytes), np.uint8).view(field.dtype).reshape(field.shape)
        if field.dtype.kind != "b"
        else chance.random(field.shape) < 0.5
        for field in layout
    }
    with Ring(layout, num_slots=2) as there, Ring(layout, num_slots=2) as back:
        with there.writer().claim() as slot:
            for name, array in given.items():
                slot[name][...] = array
            slot.commit(policy_version=3, rows=4)
        with child(lane_support.echo_slot, there, back), back.reader().take(timeout=PATIENCE) as slot:
            assert (slot.policy_version, slot.rows, slot.writer) == (3, 4, 5)
            for name, array in given.items():
                assert slot[name].shape == array.shape
                assert slot[name].tobytes() == array.tobytes()


def test_a_slot_is_one_block_of_bytes_that_can_be_sent_as_it_is(checked: Ring) -> None:
    checked.writer().put(Payload().fill(6))
    with checked.reader().take(timeout=1) as slot:
        block = checked.segment["slots"][slot.index].tobytes()
    received = checked.layout.views(block, _native.SLOT_HEAD_BYTES)
    assert (int(received["number"]), whole(received)) == (6, True)


def test_all_fields_of_a_slot_lie_in_its_block(checked: Ring) -> None:
    slots = checked.segment["slots"]
    with checked.writer().claim() as slot:
        begin = slots[slot.index].__array_interface__["data"][0]
        for view in slot.values():
            address = view.__array_interface__["data"][0]
            assert begin < address <= address + view.nbytes <= begin + slots.shape[1]


# ---------------------------------------------------------------------------------------------------------- put and get


def test_what_is_put_is_got(checked: Ring) -> None:
    checked.writer(writer=4).put(Payload().fill(11, 4), policy_version=8, rows=3)
    out = Payload().arrays
    head = checked.reader().get(out, timeout=1)
    assert (int(out["number"]), whole(out)) == (11, True)
    assert isinstance(head, SlotHead)
    assert (head.sequence, head.policy_version, head.writer, head.rows) == (1, 8, 4, 3)


def test_the_same_arrays_can_be_put_and_got_again_with_new_content(checked: Ring) -> None:
    payload, out = Payload(), Payload().arrays
    writer, reader = checked.writer(), checked.reader()
    for number in range(5):
        writer.put(payload.fill(number))
        reader.get(out, timeout=1)
        assert (int(out["number"]), whole(out)) == (number, True)


def test_arrays_that_are_not_contiguous_can_be_put_and_got() -> None:
    given, out = np.arange(12.0).reshape(3, 4).T, np.zeros((3, 4)).T
    with Ring({"x": ("float64", (4, 3))}) as ring:
        writer, reader = ring.writer(), ring.reader()
        for factor in (1, 10):
            given *= factor
            writer.put({"x": given})
            reader.get({"x": out}, timeout=1)
            assert (out == given).all()


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({}, KeyError, "missing ['x'], unknown []"),
        ({"x": np.zeros(2, np.int64), "y": np.zeros(1)}, KeyError, "missing [], unknown ['y']"),
        ({"X": np.zeros(2, np.int64)}, KeyError, "missing ['x'], unknown ['X']; did you mean 'x'?"),
        ({"x": np.zeros(3, np.int64)}, ValueError, "['x'] must have shape [2], found [3]"),
        ({"x": np.zeros(2, np.int32)}, TypeError, "['x'] must have dtype int64, found int32"),
        ({"x": [1, 2]}, TypeError, "'x' must be a numpy array or a torch tensor, found list"),
    ],
)
def test_put_and_get_say_what_does_not_fit(
    ring: Ring, tensors: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        ring.writer().put(tensors)
    write(ring, 1)
    with pytest.raises(error, match=re.escape(words)):
        ring.reader().get(tensors, timeout=1)
    assert read_all(ring) == [1]


def test_get_refuses_to_write_into_what_is_read_only(ring: Ring) -> None:
    out = np.zeros(2, np.int64)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"'x'.* is read-only"):
        ring.reader().get({"x": out}, timeout=0)


def test_put_waits_for_a_slot_and_get_for_data_no_longer_than_told(blocking: Ring) -> None:
    tensors = {"x": np.zeros(2, np.int64)}
    with pytest.raises(WaitTimeout, match="slot to read"):
        blocking.reader().get(tensors, timeout=0.01)
    for _ in range(3):
        blocking.writer().put(tensors, timeout=0.01)
    with pytest.raises(WaitTimeout, match="slot to write"):
        blocking.writer().put(tensors, timeout=0.01)


# ------------------------------------------------------------------------------------------------------------- overflow


def test_num_slots_stay_readable_while_one_more_is_written_and_one_is_read(dropping: Ring) -> None:
    write(dropping, 0, 1, 2)
    reading = dropping.reader().take(timeout=1)
    write(dropping, 3)
    assert dropping.unread == 3
    with dropping.writer().claim(timeout=1) as slot:
        slot["x"][:] = -1
        assert dropping.unread == 3
        assert dropping.counters()["dropped"] == 0
    assert int(reading["x"][0]) == 0
    reading.release()
    assert read_all(dropping) == [1, 2, 3]


def test_a_ring_of_one_slot_keeps_one_unread_while_another_is_written_and_read() -> None:
    with Ring(SMALL, num_slots=1) as ring:
        write(ring, 1)
        reading = ring.reader().take(timeout=1)
        write(ring, 2)
        with ring.writer().claim(timeout=1):
            assert ring.unread == 1
        reading.release()
        assert read_all(ring) == [2]


def test_drop_oldest_drops_the_oldest_unread_and_counts_it(dropping: Ring) -> None:
    write(dropping, 1, 2, 3, 4, 5)
    assert dropping.counters()["dropped"] == 2
    assert read_all(dropping) == [3, 4, 5]


def test_drop_oldest_never_lets_a_writer_wait_for_a_reader(dropping: Ring) -> None:
    reading = dropping.reader()
    write(dropping, *range(10))
    held = reading.take(timeout=1)
    write(dropping, *range(10, 1000))
    assert dropping.counters()["blocked"] == 0
    held.release()


def test_a_slot_that_is_read_is_never_overwritten(dropping: Ring) -> None:
    write(dropping, 42)
    with dropping.reader().take(timeout=1) as slot:
        write(dropping, *range(100))
        assert slot["x"].tolist() == [42, 42]


def test_a_slot_that_is_written_is_never_given_to_anybody_else(dropping: Ring) -> None:
    with dropping.writer().claim() as mine:
        mine["x"][:] = 42
        write(dropping, *range(100))
        assert mine["x"].tolist() == [42, 42]
        mine.commit()
    assert read_all(dropping) == [98, 99, 42]


def test_unread_never_exceeds_num_slots(ring: Ring) -> None:
    seen = []
    for number in range(20):
        if not timed_out(lambda: ring.writer().put({"x": np.zeros(2, np.int64)}, timeout=0)):
            seen.append(ring.unread)
        if number % 5 == 4:
            read(ring)
    assert max(seen) == 3


def test_block_refuses_a_slot_when_all_are_unread(blocking: Ring) -> None:
    write(blocking, 1, 2, 3)
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for a slot to write in the ring of .*; unread slots: 3"):
        blocking.writer().claim(timeout=0.05)
    assert read_all(blocking) == [1, 2, 3]


def test_block_counts_the_writers_that_had_to_wait(blocking: Ring) -> None:
    write(blocking, 1, 2, 3)
    assert blocking.counters()["blocked"] == 0
    assert timed_out(blocking.writer().claim, timeout=0.01)
    assert blocking.counters()["blocked"] == 1


def test_block_loses_nothing_and_lets_the_writer_go_on_when_a_slot_is_free() -> None:
    with Ring(CHECKED, num_slots=2, overflow="block") as ring:
        with child(lane_support.put_some, ring, list(range(50))):
            assert lane_support.take_all(ring, 50) == list(range(50))
        counters = ring.counters()
    assert (counters["written"], counters["read"], counters["dropped"]) == (50, 50, 0)


# -------------------------------------------------------------------------------------------------------------- waiting


def test_a_reader_waits_for_a_slot_that_another_process_writes(checked: Ring) -> None:
    with child(lane_support.put_some, checked, [3], 0, 0.0), checked.reader().take(timeout=PATIENCE) as slot:
        assert (int(slot["number"]), whole(slot)) == (3, True)


def test_taking_from_an_empty_ring_is_an_error_and_not_old_data(ring: Ring) -> None:
    write(ring, 1)
    read(ring)
    with pytest.raises(WaitTimeout, match=r"waited 0 s for a slot to read in the ring .*; slots written so far: 1"):
        ring.reader().take(timeout=0)


def test_readers_that_waited_are_counted_and_those_that_only_looked_are_not(ring: Ring) -> None:
    assert timed_out(ring.reader().take, timeout=0)
    assert ring.counters()["waited"] == 0
    assert timed_out(ring.reader().take, timeout=0.001)
    assert ring.counters()["waited"] == 1


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused_whether_or_not_there_is_a_wait(ring: Ring, timeout: float) -> None:
    writer, reader, tensors = ring.writer(), ring.reader(), {"x": np.zeros(2, np.int64)}
    calls: list[Callable[[], object]] = [
        lambda: writer.claim(timeout=timeout),
        lambda: writer.put(tensors, timeout=timeout),
        lambda: reader.take(timeout=timeout),
        lambda: reader.get(tensors, timeout=timeout),
    ]
    for unread in range(4):  # first a reader would have to wait, at the end a writer
        before = ring.counters()
        for call in calls:
            with pytest.raises(ValueError, match=r"timeout must be None .* or a number of seconds"):
                call()
        assert (ring.unread, ring.counters()) == (unread, before)
        if unread < 3:
            writer.put(tensors, timeout=0)


@pytest.mark.parametrize("nothing", [None, [1, 2]])
def test_put_and_get_of_something_else_than_a_dict_is_an_error_and_repeats_nothing(ring: Ring, nothing: Any) -> None:
    """A handle keeps the tensors of its last call."""
    writer, reader, tensors = ring.writer(), ring.reader(), {"x": np.ones(2, np.int64)}
    writer.put(tensors)
    writer.put(tensors)
    with pytest.raises(TypeError, match="tensors must be a dict of arrays or tensors, found"):
        writer.put(nothing)
    reader.get(tensors)
    with pytest.raises(TypeError, match="out must be a dict of arrays or tensors, found"):
        reader.get(nothing)
    assert (ring.counters()["written"], ring.counters()["read"]) == (2, 1)


@pytest.mark.parametrize("num_slots", [2.5, "2", None])
def test_a_number_of_slots_that_is_not_an_integer_is_an_error_that_names_it(num_slots: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"num_slots must be an integer, 1 or more, found {num_slots!r}")):
        Ring({"x": ("int64", 2)}, num_slots=num_slots)


def test_the_death_of_a_peer_ends_a_readers_wait_within_a_second(ring: Ring, board: Segment) -> None:
    with child(lane_support.wait_until_interrupted, ring, board) as process:
        board.signal("bell").wait(1, timeout=PATIENCE)
        peer = Peer.of(process.pid or 0, "the collector")
        killer = threading.Timer(0.1, process.kill)
        killer.start()
        with pytest.raises(
            PeerDied, match=r"the collector \(pid \d+\) was killed by SIGKILL .* slot to read"
        ) as caught:
            ring.reader().take(timeout=PATIENCE, peers=[peer])
        killer.join()
        assert caught.value.peer is peer


def test_the_death_of_a_peer_ends_a_blocked_writers_wait(blocking: Ring) -> None:
    write(blocking, 1, 2, 3)
    peer = dead_peer("the learner")
    begin = time.monotonic()
    with pytest.raises(PeerDied, match=r"the learner .* while this process waited for a slot to write"):
        blocking.writer().claim(timeout=PATIENCE, peers=[peer])
    assert time.monotonic() - begin < within(PROMISE)


def test_what_a_peer_wrote_with_its_last_breath_is_taken_before_its_death_is_told(checked: Ring) -> None:
    with child(lane_support.put_and_die, checked, 8) as process:
        peer = Peer.of(process.pid or 0)
        process.join(PATIENCE)
        with checked.reader().take(timeout=PATIENCE, peers=[peer]) as slot:
            assert (int(slot["number"]), whole(slot)) == (8, True)
        with pytest.raises(PeerDied):
            checked.reader().take(timeout=PATIENCE, peers=[peer])


def test_control_c_ends_a_wait(ring: Ring, board: Segment) -> None:
    with child(lane_support.wait_until_interrupted, ring, board) as process:
        board.signal("bell").wait(1, timeout=PATIENCE)
        time.sleep(0.05)
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(PATIENCE)
    assert bool(board["ok"])


def test_closing_the_ring_ends_the_waits_of_other_threads() -> None:
    ring = Ring(SMALL)
    outcomes: list[str] = []
    thread = threading.Thread(target=lambda: outcomes.append(lane_support.outcome_of(ring.reader().take)))
    thread.start()
    time.sleep(0.05)
    ring.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert outcomes[0].startswith("SegmentClosed: ring of anonymous segment was used after its segment was closed")


def test_a_wait_lets_other_threads_work() -> None:
    with Ring(SMALL) as ring:
        thread = threading.Timer(0.05, write, (ring, 1))
        thread.start()
        assert read(ring) == 1
        thread.join()


# ---------------------------------------------------------------------------------------------------------------- roles


def test_a_slot_that_is_given_up_is_never_seen_and_is_counted(ring: Ring) -> None:
    with pytest.raises(ZeroDivisionError), ring.writer().claim() as slot:
        slot["x"][:] = 1 // 0
    assert timed_out(ring.reader().take, timeout=0)
    assert (ring.counters()["abandoned"], ring.counters()["written"]) == (1, 0)


def test_a_slot_that_is_given_up_can_be_claimed_again(blocking: Ring) -> None:
    slots = [blocking.writer().claim(timeout=0) for _ in range(3)]
    assert timed_out(blocking.writer().claim, timeout=0)
    slots[1].release()
    slots.append(blocking.writer().claim(timeout=0))
    assert slots[3].index == slots[1].index
    for slot in slots:
        slot.release()


def test_commit_after_the_slot_was_given_up_is_an_error_and_not_a_silent_loss(ring: Ring) -> None:
    with ring.writer().claim() as slot:
        pass
    with pytest.raises(StaleView, match="was committed or abandoned before"):
        slot.commit()
    assert ring.counters()["written"] == 0


def test_a_slot_can_be_committed_once(ring: Ring) -> None:
    slot = ring.writer().claim()
    slot.commit()
    with pytest.raises(StaleView, match="was committed or abandoned before"):
        slot.commit()
    assert ring.counters()["written"] == 1


def test_releasing_again_is_harmless(ring: Ring) -> None:
    write(ring, 1, 2)
    slot = ring.reader().take(timeout=1)
    slot.release()
    slot.release()
    assert (ring.counters()["read"], read_all(ring)) == (1, [2])


def test_a_reader_cannot_write_into_a_slot(ring: Ring) -> None:
    write(ring, 1)
    with ring.reader().take(timeout=1) as slot, pytest.raises(ValueError, match="read-only"):
        slot["x"][:] = 9


@pytest.mark.parametrize("role", ["claim", "take"])
def test_a_field_of_a_slot_cannot_be_taken_after_its_end(ring: Ring, role: str) -> None:
    write(ring, 1)
    slot = ring.writer().claim() if role == "claim" else ring.reader().take(timeout=1)
    slot.release()
    with pytest.raises(StaleView, match=r"the lease of slot \d of the ring of .* has ended"):
        slot["x"]


def lend(ring: Ring, role: str, slot: int = 0) -> WriteSlot | ReadSlot:
    """Return the next lease of this slot; leases of other slots end at once."""
    while True:
        lease: WriteSlot | ReadSlot
        if role == "claim":
            lease = ring.writer().claim()
        else:
            write(ring, 1)
            lease = ring.reader().take(timeout=1)
        if lease.index == slot:
            return lease
        lease.commit() if isinstance(lease, WriteSlot) else lease.release()
        if role == "claim":
            ring.reader().take(timeout=1).release()


@pytest.mark.parametrize("role", ["claim", "take"])
def test_an_array_that_outlives_its_lease_is_not_lent_again(ring: Ring, role: str) -> None:
    first = lend(ring, role)
    held = first["x"]
    first.release()
    second = lend(ring, role)
    assert second["x"] is not held
    assert (first.views_in_use(), second.views_in_use()) == (["x"], [])
    kept = second["x"][1:]
    del held
    assert (first.views_in_use(), second.views_in_use()) == ([], ["x"])
    del kept
    assert second.views_in_use() == []
    second.release()


@pytest.mark.parametrize("role", ["claim", "take"])
@pytest.mark.parametrize("change", ["shape", "dtype", "flags"])
def test_an_array_that_was_changed_in_place_is_not_lent_again(ring: Ring, role: str, change: str) -> None:
    first = lend(ring, role)
    before = first["x"].shape, first["x"].dtype, first["x"].flags.writeable
    match change:
        case "shape":
            first["x"].shape = (*before[0], 1)
        case "dtype":
            first["x"].dtype = np.dtype("uint8")
        case "flags":
            first["x"].setflags(write=False)
    first.release()
    second = lend(ring, role)
    assert (second["x"].shape, second["x"].dtype, second["x"].flags.writeable) == before
    second.release()


@pytest.mark.parametrize("role", ["claim", "take"])
def test_a_lease_that_was_dropped_keeps_its_slot_while_an_array_of_it_is_held(ring: Ring, role: str) -> None:
    first = lend(ring, role)
    held, index = first["x"], first.index
    with pytest.warns(ResourceWarning):
        del first
    for _ in range(10):
        write(ring, 1)
        with ring.reader().take(timeout=1) as slot:
            assert slot.index != index
    del held
    second = lend(ring, role, index)
    assert second.views_in_use() == []
    second.release()


def test_slots_are_leases_and_mappings(ring: Ring) -> None:
    with ring.writer().claim() as slot:
        assert isinstance(slot, Lease)
        assert isinstance(slot, Mapping)
        assert (list(slot), len(slot), "x" in slot, "y" in slot, slot.get("y", 5)) == (["x"], 1, True, False, 5)
        match slot:
            case {"x": array}:
                assert array is slot["x"]
        del array
        slot["x"][:] = 4
        slot.commit()
    with ring.reader().take(timeout=1) as slot:
        assert [(name, int(array[0])) for name, array in slot.items()] == [("x", 4)]
        assert [int(array[0]) for array in slot.values()] == [4]


def test_in_debug_mode_a_view_that_outlives_its_slot_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with Ring(SMALL) as ring:
        write(ring, 5)
        slot = ring.reader().take(timeout=1)
        view = slot["x"]
        with pytest.warns(StaleViewWarning, match="x taken at .*test_ring.py"):
            slot.release()
        with pytest.raises(StaleView, match="was used after the lease ended"):
            view.sum()


def test_in_debug_mode_a_late_store_cannot_reach_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with Ring(SMALL) as ring:
        slot = ring.writer().claim()
        plain = slot["x"].view(np.ndarray)
        plain[:] = 5
        with pytest.warns(StaleViewWarning):
            slot.commit()
        plain[:] = 6
        assert read(ring) == 5


def test_another_process_cannot_commit_a_slot_that_is_not_its_own(ring: Ring) -> None:
    slot = ring.writer().claim()
    answer = ask(lane_support.commit_parents_slot, slot)
    assert re.match(r"MemlaneError: cannot commit slot \d of the ring .*: this process does not hold it", answer)
    slot.commit()
    assert ring.counters()["written"] == 1


@pytest.mark.parametrize("deed", ["commit", "abandon", "release"])
def test_a_slot_that_nobody_holds_cannot_be_handed_over(ring: Ring, deed: str) -> None:
    arguments: tuple[int, ...] = (0, 0, 0, 0) if deed == "commit" else (0,)
    with pytest.raises(MemlaneError, match="this process does not hold it"):
        getattr(ring.native, deed)(*arguments)


@pytest.mark.parametrize("slot", [-1, 5, 2**40])
def test_a_slot_that_does_not_exist_is_an_index_error(dropping: Ring, slot: int) -> None:
    with pytest.raises(IndexError, match=rf"has 5 slots, there is no slot {slot}"):
        dropping.native.release(slot)


def test_several_readers_share_the_slots_and_each_gets_its_own(ring: Ring) -> None:
    write(ring, 1, 2, 3)
    taken = [ring.reader().take(timeout=1) for _ in range(3)]
    assert sorted(int(slot["x"][0]) for slot in taken) == [1, 2, 3]
    assert len({slot.index for slot in taken}) == 3
    for slot in taken:
        slot.release()


def test_several_writers_fill_slots_at_the_same_time(ring: Ring) -> None:
    slots = [ring.writer(number).claim(timeout=1) for number in range(3)]
    for number, slot in enumerate(slots):
        slot["x"][:] = number
    for slot in reversed(slots):
        slot.commit()
    assert read_all(ring) == [2, 1, 0]


# --------------------------------------------------------------------------------------------------------------- deaths


def die_in_child(function: Callable[..., None], *args: object) -> None:
    with child(function, *args) as process:
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL


def test_a_writer_killed_with_a_slot_costs_nothing_but_that_slot() -> None:
    with Ring(CHECKED, num_slots=2, overflow="block") as ring:
        ring.writer().put(Payload().fill(1))
        die_in_child(lane_support.claim_and_die, ring)
        begin = time.monotonic()
        ring.writer().put(Payload().fill(2), timeout=PATIENCE)
        assert time.monotonic() - begin < within(PROMISE)
        assert lane_support.take_all(ring, 2) == [1, 2]
        assert ring.counters()["abandoned"] == 1


def test_the_slot_of_a_killed_reader_is_offered_again(checked: Ring) -> None:
    checked.writer().put(Payload().fill(1))
    die_in_child(lane_support.take_and_die, checked)
    begin = time.monotonic()
    assert lane_support.take_all(checked, 1) == [1]
    assert time.monotonic() - begin < within(PROMISE)
    assert (checked.counters()["returned"], checked.counters()["read"]) == (1, 1)


def test_the_slot_of_a_killed_reader_comes_before_younger_ones_once_it_is_found(checked: Ring) -> None:
    checked.writer().put(Payload().fill(1))
    die_in_child(lane_support.take_and_die, checked)
    assert checked.native.reap() == 1
    checked.writer().put(Payload().fill(2))
    assert lane_support.take_all(checked, 2) == [1, 2]


def test_writers_killed_with_slots_do_not_make_a_ring_that_drops_smaller() -> None:
    with Ring(CHECKED, num_slots=2) as ring:
        for _ in range(2):
            die_in_child(lane_support.claim_and_die, ring)
        payload, reader = Payload(), ring.reader()

        def keeps_num_slots() -> bool:
            """Whether num_slots stay readable while one more is written and one is read."""
            for number in range(3):
                ring.writer().put(payload.fill(number))
            with reader.take(timeout=1):
                ring.writer().put(payload.fill(3))
                with ring.writer().claim(timeout=1):
                    return ring.unread == 2

        assert wait_for(keeps_num_slots, within(PROMISE))


def test_a_reader_that_only_looks_finds_the_slot_of_a_killed_reader_too(checked: Ring) -> None:
    checked.writer().put(Payload().fill(1))
    die_in_child(lane_support.take_and_die, checked)
    assert wait_for(lambda: not timed_out(lambda: checked.reader().take(timeout=0).release()), within(PROMISE))


def test_a_writer_that_only_looks_finds_the_slot_of_a_killed_writer_too() -> None:
    with Ring(CHECKED, num_slots=1, overflow="block") as ring:
        die_in_child(lane_support.claim_and_die, ring)
        assert wait_for(lambda: not timed_out(lambda: ring.writer().claim(timeout=0).release()), within(PROMISE))


def test_reap_leaves_the_slots_of_the_living_alone(checked: Ring, board: Segment) -> None:
    checked.writer().put(Payload().fill(1))
    with child(lane_support.take_one_and_wait, checked, board):
        board.signal("bell").wait(1, timeout=PATIENCE)
        with checked.writer().claim():
            assert checked.native.reap() == 0
        board.signal("go").store(1)
    assert bool(board["ok"])


def test_reap_leaves_the_slots_of_the_stopped_alone(checked: Ring, board: Segment) -> None:
    checked.writer().put(Payload().fill(1))
    with child(lane_support.take_one_and_wait, checked, board) as process:
        board.signal("bell").wait(1, timeout=PATIENCE)
        os.kill(process.pid or 0, signal.SIGSTOP)
        assert wait_for(lambda: state_of(process.pid) == "T")
        assert checked.native.reap() == 0
        os.kill(process.pid or 0, signal.SIGCONT)
        board.signal("go").store(1)
    assert bool(board["ok"])


# ----------------------------------------------------------------------------------------------- travelling and finding


@pytest.mark.parametrize("method", METHODS)
def test_a_ring_goes_into_a_child_as_an_argument(method: str) -> None:
    with (
        Ring(CHECKED, num_slots=2, overflow="block") as ring,
        child(lane_support.put_some, ring, [1, 2, 3], 6, method=method),
    ):
        assert lane_support.take_all(ring, 3) == [1, 2, 3]


def test_a_pickled_ring_is_the_same_ring(dropping: Ring) -> None:
    with pickle.loads(pickle.dumps(dropping)) as other:
        assert (other.num_slots, other.overflow, other.layout) == (3, "drop_oldest", dropping.layout)
        write(dropping, 4)
        assert read(other) == 4


def test_an_unrelated_process_attaches_by_name() -> None:
    name = fresh_name("ring")
    with Ring(SMALL, num_slots=2, name=name, overflow="block") as ring:
        assert ring.name == name
        output_of(
            """
            import sys
            from memlane.ipc import Ring
            with Ring.attach(sys.argv[1], layout={"x": ("int64", 2)}) as ring, ring.writer(3).claim() as slot:
                slot["x"][:] = ring.num_slots, 5
                assert ring.overflow == "block"
                slot.commit()
            """,
            name,
        )
        with ring.reader().take(timeout=1) as slot:
            assert (slot["x"].tolist(), slot.writer) == ([2, 5], 3)


def test_the_name_is_gone_when_the_owner_closes() -> None:
    ring = Ring(SMALL, name=fresh_name("ring"))
    name = ring.name or ""
    ring.close()
    with pytest.raises(SegmentMissing):
        Ring.attach(name)


def test_a_name_belongs_to_one_ring() -> None:
    with Ring(SMALL, name=fresh_name("ring")) as ring, pytest.raises(SegmentExists):
        Ring(SMALL, name=ring.name)


def test_attaching_with_another_layout_says_the_difference() -> None:
    with (
        Ring(SMALL, name=fresh_name("ring")) as ring,
        pytest.raises(
            SegmentError, match=r"the layout of ring '.*' differs: expected field x: int32\[2\], found x: int64\[2\]"
        ),
    ):
        Ring.attach(ring.name or "", layout={"x": ("int32", 2)})


def test_attaching_to_another_kind_of_lane_is_refused() -> None:
    with (
        Weights(SMALL, name=fresh_name("weights")) as weights,
        pytest.raises(SegmentError, match="is not a ring lane"),
    ):
        Ring.attach(weights.name or "")


def test_attaching_to_a_segment_that_is_no_lane_is_refused() -> None:
    with (
        Segment.create(SMALL, name=fresh_name("plain")) as segment,
        pytest.raises(SegmentError, match=r"is not a ring lane: .*'description'"),
    ):
        Ring.attach(segment.name or "")


@pytest.mark.parametrize("setting", [0, 1], ids=["num_slots", "overflow"])
def test_a_ring_whose_settings_were_tampered_with_is_refused(setting: int) -> None:
    with Ring(SMALL, name=fresh_name("ring")) as ring:
        ring.segment["settings"][setting] += 1
        with pytest.raises(SegmentError, match="is not a ring lane"):
            Ring.attach(ring.name or "")


# ---------------------------------------------------------------------------------------------------- making and ending


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_ring_has_at_least_one_slot(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots must be 1 or more, found {num_slots}"):
        Ring(SMALL, num_slots=num_slots)


def test_an_overflow_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"overflow must be one of \['drop_oldest', 'block'\], found 'drop'"):
        Ring(SMALL, overflow="drop")  # type: ignore[arg-type]


def test_what_a_ring_takes_is_known_before_it_is_made() -> None:
    layout = Layout(CHECKED)
    promised = Ring.segment_layout(layout, 5, "block").nbytes
    with Ring(layout, num_slots=5, overflow="block") as ring:
        assert ring.segment.layout.nbytes == promised


def test_a_slot_can_be_larger_than_2_gib() -> None:
    layout = Layout({"frames": ("uint8", 3 * 2**30)})
    assert Ring.segment_layout(layout, 2, "block").nbytes > 6 * 2**30


USES: dict[str, Callable[[Ring], object]] = {
    "claim": lambda ring: ring.writer().claim(timeout=0),
    "take": lambda ring: ring.reader().take(timeout=0),
    "put": lambda ring: ring.writer().put({"x": np.zeros(2, np.int64)}),
    "get": lambda ring: ring.reader().get({"x": np.zeros(2, np.int64)}, timeout=0),
    "unread": lambda ring: ring.unread,
    "counters": lambda ring: ring.counters(),
    "reap": lambda ring: ring.native.reap(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_close_is_an_error(use: Callable[[Ring], object]) -> None:
    ring = Ring(SMALL)
    write(ring, 1)
    ring.close()
    with pytest.raises(SegmentClosed):
        use(ring)


def test_slots_that_are_held_when_the_ring_is_closed_can_still_be_looked_at_and_end_with_an_error() -> None:
    ring = Ring(SMALL)
    write(ring, 1)
    taken, claimed = ring.reader().take(timeout=1), ring.writer().claim()
    view = taken["x"]
    ring.close()
    assert view.tolist() == [1, 1]
    with pytest.raises(SegmentClosed):
        taken["x"]
    with pytest.raises(SegmentClosed):
        taken.release()
    with pytest.raises(SegmentClosed):
        claimed.commit()


def test_closing_again_is_harmless() -> None:
    ring = Ring(SMALL)
    ring.close()
    ring.close()


def test_no_use_after_close_crashes_the_process() -> None:
    output = output_of(
        """
        import numpy as np
        from memlane.ipc import Ring
        from tests.lanes.test_ring import USES, write
        ring = Ring({"x": ("int64", 2)})
        write(ring, 1)
        slot, claimed = ring.reader().take(), ring.writer().claim()
        view, mine = slot["x"], claimed["x"]
        ring.close()
        for use in [*USES.values(), lambda ring: slot["x"], lambda ring: slot.release(), lambda ring: claimed.commit()]:
            try:
                use(ring)
            except Exception as error:
                print(type(error).__name__, end=" ")
        mine[:] = view
        del ring, slot, claimed
        print(view.sum(), mine.sum())
        """,
    )
    assert output.split() == ["SegmentClosed"] * (len(USES) + 3) + ["2", "2"]


# ------------------------------------------------------------------------------------------------------------- counters


def test_the_counters_tell_where_every_slot_went(ring: Ring) -> None:
    for number in range(9):
        timed_out(lambda number=number: write_now(ring, number))
    held = ring.reader().take(timeout=1)
    read(ring)
    counters = ring.counters()
    assert counters["written"] == counters["read"] + counters["dropped"] + ring.unread + 1
    held.release()


def write_now(ring: Ring, number: int) -> None:
    with ring.writer().claim(timeout=0) as slot:
        slot["x"][:] = number
        slot.commit()


def test_anybody_can_read_the_counters(checked: Ring) -> None:
    checked.writer().put(Payload().fill(1))
    with pickle.loads(pickle.dumps(checked)) as other:
        assert other.counters() == checked.counters()


def test_the_checksum_of_the_tests_sees_every_torn_payload() -> None:
    """The payload of the race tests is only as good as this."""
    payload = Payload()
    arrays = {name: array.copy() for name, array in payload.fill(3, 1).items()}
    assert whole(arrays)
    for name in arrays:
        torn = {other: array.copy() for other, array in arrays.items()}
        torn[name].reshape(-1)[-1:] += 1
        assert not whole(torn), name
    fill(arrays, 4, 1)
    arrays["body"][512:] = payload.arrays["body"][512:]
    assert not whole(arrays)


def test_a_slots_head_can_be_compared_kept_in_a_set_and_pickled() -> None:
    with Ring({"x": ("uint8", ())}) as ring:
        ring.writer(7).put({"x": np.zeros((), np.uint8)}, policy_version=3, rows=2)
        head = ring.reader().get({"x": np.zeros((), np.uint8)}, timeout=1)
    assert pickle.loads(pickle.dumps(head)) == head
    assert head in {head}
    assert head != 3
    assert repr(head).startswith("SlotHead(sequence=1, policy_version=3, writer=7, ")
