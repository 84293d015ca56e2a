"""RolloutRingBuffer: the documented interface, what it keeps and drops, and how it reaches other processes."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memlane.core import (
    MemlaneError,
    Peer,
    PeerDied,
    SegmentClosed,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    StaleView,
    StaleViewWarning,
)
from memlane.core import fresh_name as fresh
from memlane.ipc import RolloutRingBuffer, rollout_layout
from tests.support import lanes as lane_support
from tests.support.processes import METHODS, PATIENCE, ask, child, output_of

SIZES = (2, 5, 3, 1)  # num_envs, num_steps, obs_dim, action_dim
FIELDS = {
    "obs": (2, 5, 3),
    "actions": (2, 5, 1),
    "log_probs": (2, 5),
    "rewards": (2, 5),
    "dones": (2, 5),
    "truncated": (2, 5),
    "last_obs": (2, 3),
}


@pytest.fixture
def buffer() -> Iterator[RolloutRingBuffer]:
    with RolloutRingBuffer(*SIZES, num_slots=3) as buffer:
        yield buffer


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def write(buffer: RolloutRingBuffer, *numbers: int) -> None:
    for number in numbers:
        lane_support.collect(buffer, 1, number)


def read(buffer: RolloutRingBuffer) -> float:
    (number,) = lane_support.learn(buffer, 1)
    return number


def read_all(buffer: RolloutRingBuffer) -> list[float]:
    return lane_support.learn(buffer, buffer.available())


# --------------------------------------------------------------------------------------------------------------- fields


def test_a_rollout_has_the_documented_fields(buffer: RolloutRingBuffer) -> None:
    assert buffer.slot_shapes == FIELDS


def test_a_critic_observation_adds_two_fields() -> None:
    with RolloutRingBuffer(*SIZES, critic_dim=7) as buffer:
        assert buffer.slot_shapes == {**FIELDS, "critic": (2, 5, 7), "last_critic": (2, 7)}


def test_what_is_written_and_read_is_float32_of_these_shapes(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    for arrays in (buffer.write_buffer, buffer.read_numpy_views()):
        assert {name: array.shape for name, array in arrays.items()} == FIELDS
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


def test_four_slots_are_the_default() -> None:
    with RolloutRingBuffer(*SIZES) as buffer:
        write(buffer, *range(9))
        assert buffer.available() == 4


@pytest.mark.parametrize("argument", ["num_envs", "num_steps", "obs_dim", "action_dim", "num_slots"])
def test_a_size_below_one_is_refused_by_name(argument: str) -> None:
    sizes = dict(zip(("num_envs", "num_steps", "obs_dim", "action_dim"), SIZES, strict=True))
    with pytest.raises(ValueError, match=f"{argument} must be 1 or more, found 0"):
        RolloutRingBuffer(**{**sizes, argument: 0})


def test_a_negative_critic_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"critic_dim must be 0 .* or more, found -1"):
        RolloutRingBuffer(*SIZES, critic_dim=-1)


def test_the_name_of_each_field_is_the_name_of_the_memory(buffer: RolloutRingBuffer) -> None:
    assert buffer.name.keys() == FIELDS.keys()
    assert set(buffer.name.values()) == {buffer.ring.name}


# -------------------------------------------------------------------------------------------------- writing and reading


def test_a_rollout_arrives_as_it_was_written(buffer: RolloutRingBuffer) -> None:
    chance = np.random.default_rng(1)
    given = {name: chance.standard_normal(shape).astype(np.float32) for name, shape in FIELDS.items()}
    for name, array in given.items():
        buffer.write_buffer[name][:] = array
    buffer.signal_write_done()
    found = buffer.read_numpy_views()
    assert all((found[name] == array).all() for name, array in given.items())
    buffer.advance_read()


def test_the_write_buffer_stays_the_same_slot_until_it_is_handed_over(buffer: RolloutRingBuffer) -> None:
    slot = buffer.write_slot
    buffer.write_buffer["obs"][:] = 3
    assert buffer.write_slot == slot
    assert (buffer.write_buffer["obs"] == 3).all()
    buffer.signal_write_done()
    assert buffer.write_slot != slot


def test_the_read_slot_stays_the_same_until_advance_read(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2)
    slot = buffer.read_slot
    assert buffer.read_slot == slot
    assert buffer.read_numpy_views()["obs"].mean() == 1
    buffer.advance_read()
    assert buffer.read_slot != slot
    assert buffer.read_numpy_views()["obs"].mean() == 2


def test_borrowed_views_cannot_be_written(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    with pytest.raises(ValueError, match="read-only"):
        buffer.read_numpy_views()["obs"][:] = 0


def test_num_slots_unread_rollouts_stay_readable_while_one_more_is_written(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2, 3)
    buffer.write_buffer["obs"][:] = -1
    assert buffer.available() == 3
    assert [read(buffer) for _ in range(3)] == [1, 2, 3]


def test_num_slots_unread_rollouts_stay_readable_beside_the_one_that_is_read(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2, 3)
    view = buffer.read_numpy_views()["obs"]
    write(buffer, 4)
    buffer.write_buffer["obs"][:] = -1
    assert (view == 1).all()
    buffer.advance_read()
    assert [read(buffer) for _ in range(3)] == [2, 3, 4]


def test_a_lapped_reader_finds_the_oldest_complete_rollout(buffer: RolloutRingBuffer) -> None:
    write(buffer, *range(1, 11))
    assert [read(buffer) for _ in range(3)] == [8, 9, 10]


def test_a_reader_that_is_lapped_while_it_reads_keeps_its_rollout(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    view = buffer.read_numpy_views()["obs"]
    write(buffer, *range(2, 50))
    assert (view == 1).all()
    buffer.advance_read()
    assert read_all(buffer) == [47, 48, 49]


def test_available_counts_what_can_be_read_and_never_more_than_num_slots(buffer: RolloutRingBuffer) -> None:
    seen = [buffer.available()]
    for number in range(6):
        write(buffer, number)
        seen.append(buffer.available())
    assert seen == [0, 1, 2, 3, 3, 3, 3]


def test_the_rollout_that_is_being_read_is_available_too(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    buffer.read_numpy_views()
    assert buffer.available() == 1
    write(buffer, 2, 3, 4)
    assert buffer.available() == 3
    buffer.advance_read()
    assert buffer.available() == 3


def test_an_empty_ring_has_nothing_available_and_no_data(buffer: RolloutRingBuffer) -> None:
    assert buffer.available() == 0
    assert buffer.wait_for_data(timeout=0) is False
    assert buffer.wait_for_data(timeout=0.01) is False


EMPTY_READS: dict[str, Callable[[RolloutRingBuffer], object]] = {
    "read_slot": lambda buffer: buffer.read_slot,
    "read_numpy_views": lambda buffer: buffer.read_numpy_views(),
    "advance_read": lambda buffer: buffer.advance_read(),
}


@pytest.mark.parametrize("use", EMPTY_READS.values(), ids=EMPTY_READS)
def test_reading_an_empty_ring_is_an_error_and_not_old_data(
    buffer: RolloutRingBuffer, use: Callable[[RolloutRingBuffer], object]
) -> None:
    write(buffer, 1)
    read(buffer)
    with pytest.raises(MemlaneError, match="the ring is empty: there is no rollout to read"):
        use(buffer)


def test_reading_an_empty_ring_into_torch_is_an_error_too(buffer: RolloutRingBuffer, torch: Any) -> None:
    with pytest.raises(MemlaneError, match="the ring is empty"):
        buffer.read_torch("cpu")
    with pytest.raises(MemlaneError, match="the ring is empty"):
        buffer.copy_read_slot_to_torch({name: torch.zeros(shape) for name, shape in FIELDS.items()})


def test_signalling_without_having_written_is_an_error(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(MemlaneError, match="nothing to signal: fill write_buffer first"):
        buffer.signal_write_done()
    assert buffer.available() == 0


def test_the_policy_version_travels_with_the_rollout(buffer: RolloutRingBuffer) -> None:
    buffer.write_buffer["obs"][:] = 0
    buffer.signal_write_done(policy_version=31)
    with buffer.ring.reader().take(timeout=1) as slot:
        assert slot.policy_version == 31


def test_overflow_can_be_block() -> None:
    with RolloutRingBuffer(*SIZES, num_slots=2, overflow="block") as buffer:
        write(buffer, 1, 2)
        reader = threading.Timer(0.05, lambda: read(pickle.loads(pickle.dumps(buffer))))
        reader.start()
        write(buffer, 3)  # waits for the reader
        reader.join()
        assert (buffer.counters()["blocked"], read_all(buffer)) == (1, [2, 3])


def test_the_counters_are_those_of_the_ring(buffer: RolloutRingBuffer) -> None:
    write(buffer, *range(5))
    read(buffer)
    counters = buffer.counters()
    assert (counters["written"], counters["read"], counters["dropped"]) == (5, 1, 2)


# -------------------------------------------------------------------------------------------------------------- waiting


def test_wait_for_data_returns_true_as_soon_as_there_is_some(buffer: RolloutRingBuffer) -> None:
    with child(lane_support.collect, buffer, 1, 5):
        assert buffer.wait_for_data(timeout=PATIENCE) is True
        assert read(buffer) == 5


def test_a_wait_whose_time_is_over_is_a_look(buffer: RolloutRingBuffer) -> None:
    """Callers compute deadline - now."""
    assert buffer.wait_for_data(-0.5) is False
    write(buffer, 1)
    assert buffer.wait_for_data(-0.5) is True


def test_wait_for_data_can_wait_for_ever(buffer: RolloutRingBuffer) -> None:
    with child(lane_support.collect, buffer, 1, 5):
        assert buffer.wait_for_data(None) is True


def test_wait_for_data_does_not_lose_data_that_it_found(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2)
    assert [buffer.wait_for_data(0) for _ in range(5)] == [True] * 5
    assert read_all(buffer) == [1, 2]


def test_wait_for_data_can_end_with_the_death_of_the_collector(buffer: RolloutRingBuffer) -> None:
    with child(lane_support.die) as process:
        collector = Peer.of(process.pid or 0, "collector")
        begin = time.monotonic()
        with pytest.raises(PeerDied, match=r"collector .* was killed by SIGKILL"):
            buffer.wait_for_data(timeout=PATIENCE, peers=[collector])
        assert time.monotonic() - begin < PATIENCE / 2


# ---------------------------------------------------------------------------------------------------------------- torch


def test_a_rollout_is_copied_into_tensors(buffer: RolloutRingBuffer, torch: Any) -> None:
    write(buffer, 4)
    destination = {name: torch.zeros(shape) for name, shape in FIELDS.items()}
    buffer.copy_read_slot_to_torch(destination)
    buffer.advance_read()
    write(buffer, *range(20))
    assert all((tensor == 4).all() for tensor in destination.values())


def test_a_rollout_is_read_into_new_tensors_of_its_own(buffer: RolloutRingBuffer, torch: Any) -> None:
    write(buffer, 4)
    tensors = buffer.read_torch("cpu")
    buffer.advance_read()
    write(buffer, *range(20))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == FIELDS
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all((tensor == 4).all() for tensor in tensors.values())


def test_tensors_that_are_not_contiguous_can_be_copied_into(buffer: RolloutRingBuffer, torch: Any) -> None:
    for name, view in buffer.write_buffer.items():
        view[:] = np.arange(view.size).reshape(view.shape) + len(name)
    buffer.signal_write_done()
    destination = {name: torch.zeros(*shape, 2)[..., 0] for name, shape in FIELDS.items()}
    buffer.copy_read_slot_to_torch(destination)
    for name, view in buffer.read_numpy_views().items():
        assert (destination[name].numpy() == view).all()


def test_debug_mode_hands_out_tensors_too(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with RolloutRingBuffer(*SIZES) as buffer:
        write(buffer, 4)
        destination = {name: torch.zeros(shape) for name, shape in FIELDS.items()}
        buffer.copy_read_slot_to_torch(destination)
        tensors = buffer.read_torch("cpu")
        buffer.advance_read()
    assert all((tensor == 4).all() for tensor in (*tensors.values(), *destination.values()))


def test_debug_mode_catches_a_view_that_outlives_advance_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", "1")
    with RolloutRingBuffer(*SIZES) as buffer:
        write(buffer, 4)
        view = buffer.read_numpy_views()["obs"]
        with pytest.warns(StaleViewWarning, match=r"obs taken at .*"):
            buffer.advance_read()
        with pytest.raises(StaleView):
            view.sum()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda _, tensors: tensors.pop("dones"), KeyError, "destination has no field 'dones'"),
        (
            lambda torch, tensors: tensors.update(obs=torch.zeros(2, 5, 4)),
            ValueError,
            "destination['obs'] must have shape (2, 5, 3), found (2, 5, 4)",
        ),
        (
            lambda torch, tensors: tensors.update(rewards=torch.zeros(2, 5, dtype=torch.float64)),
            TypeError,
            "destination['rewards'] must have dtype torch.float32, found torch.float64",
        ),
    ],
    ids=["missing field", "wrong shape", "wrong dtype"],
)
def test_a_destination_that_does_not_fit_is_refused_and_nothing_is_copied(
    buffer: RolloutRingBuffer, torch: Any, change: Callable[..., object], error: type[Exception], words: str
) -> None:
    write(buffer, 4)
    destination = {name: torch.zeros(shape) for name, shape in FIELDS.items()}
    change(torch, destination)
    with pytest.raises(error, match=re.escape(words)):
        buffer.copy_read_slot_to_torch(destination)
    assert all((tensor == 0).all() for tensor in destination.values())
    assert read(buffer) == 4


def test_fields_of_a_destination_that_the_ring_does_not_have_are_left_alone(
    buffer: RolloutRingBuffer, torch: Any
) -> None:
    write(buffer, 4)
    destination = {name: torch.zeros(shape) for name, shape in FIELDS.items()} | {"advantages": torch.ones(2, 5)}
    buffer.copy_read_slot_to_torch(destination)
    assert (destination["advantages"] == 1).all()


# ----------------------------------------------------------------------------------------------------------- travelling


@pytest.mark.parametrize("method", METHODS)
def test_the_object_goes_into_a_child_as_an_argument(method: str) -> None:
    with (
        RolloutRingBuffer(*SIZES, num_slots=4, critic_dim=2, overflow="block") as buffer,
        child(lane_support.collect, buffer, 9, method=method),
    ):
        assert lane_support.learn(buffer, 9) == list(range(9))


def test_a_child_can_be_the_learner(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2, 3)
    assert ask(lane_support.learn, buffer, 3) == [1, 2, 3]


def test_the_pickle_does_not_carry_the_slots_that_the_object_holds(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1, 2)
    buffer.read_numpy_views()
    buffer.write_buffer["obs"][:] = 9
    other = pickle.loads(pickle.dumps(buffer))
    assert (other.read_slot != buffer.read_slot, other.write_slot != buffer.write_slot) == (True, True)
    other.close()
    assert read(buffer) == 1


def test_a_forked_copy_does_not_use_the_slots_of_its_parent(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    reading, writing = buffer.read_slot, buffer.write_slot
    buffer.write_buffer["obs"][:] = 2
    assert ask(lane_support.use_inherited, buffer) not in (reading, writing)
    assert (buffer.write_buffer["obs"] == 2).all()
    for view in buffer.write_buffer.values():
        view[:] = 2
    buffer.signal_write_done()
    assert [read(buffer) for _ in range(3)] == [1, 77, 2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by", ["private names", "property"])
def test_a_child_attaches_by_name_and_takes_the_sync_primitives(method: str, by: str) -> None:
    with RolloutRingBuffer(*SIZES) as buffer:
        pair = (buffer._write_ptr, buffer._read_ptr) if by == "private names" else buffer.sync_primitives
        counts = ask(lane_support.collect_attached, SIZES, buffer.name, *pair, 3, method=method)
        assert counts == (3, 0)
        assert lane_support.learn(buffer, 3) == [0, 1, 2]
        assert [pointer.value for pointer in pair] == [3, 3]


def test_a_prefix_is_the_name_for_both_sides() -> None:
    prefix = fresh("prefix")
    with (
        RolloutRingBuffer(*SIZES, shm_name_prefix=prefix) as buffer,
        RolloutRingBuffer(*SIZES, create=False, shm_name_prefix=prefix) as other,
    ):
        other.attach_sync_primitives(*buffer.sync_primitives)
        write(buffer, 6)
        assert read(other) == 6


def test_an_unrelated_process_attaches_by_name(buffer: RolloutRingBuffer) -> None:
    output = output_of(
        """
        import sys
        from memlane.ipc import RolloutRingBuffer
        buffer = RolloutRingBuffer(2, 5, 3, 1, num_slots=3, create=False, shm_name_prefix=sys.argv[1])
        buffer.write_buffer["rewards"][:] = 8
        buffer.signal_write_done()
        print(buffer.sync_primitives)
        buffer.close()
        """,
        buffer.name["obs"],
    )
    assert output == "(<written: 1>, <read: 0>)\n"
    assert (buffer.read_numpy_views()["rewards"] == 8).all()


def test_the_sync_primitives_count_rollouts_written_and_read_since_the_start(buffer: RolloutRingBuffer) -> None:
    write_ptr, read_ptr = buffer.sync_primitives
    write(buffer, *range(7))
    read(buffer)
    read(buffer)
    assert (write_ptr.value, read_ptr.value) == (7, 2)
    assert (buffer._write_ptr.value, buffer._read_ptr.value) == (7, 2)


def test_something_that_is_no_sync_primitive_is_refused(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(TypeError, match="read_ptr must be one of the creator's sync_primitives, found int"):
        buffer.attach_sync_primitives(buffer._write_ptr, 7)


def test_counters_that_are_not_the_creators_are_refused(buffer: RolloutRingBuffer) -> None:
    """They were accepted, and never moved."""
    with pytest.raises(TypeError, match="write_ptr must be one of the creator's sync_primitives, found Synchronized"):
        buffer.attach_sync_primitives(mp.Value("i", 0), mp.Value("i", 0))


def test_attaching_needs_a_name() -> None:
    with pytest.raises(ValueError, match="create=False needs shm_name_prefix"):
        RolloutRingBuffer(*SIZES, create=False)


def test_attaching_to_nothing_is_an_error() -> None:
    with pytest.raises(SegmentMissing):
        RolloutRingBuffer(*SIZES, create=False, shm_name_prefix=fresh("nothing"))


def test_attaching_with_other_sizes_says_the_difference(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(SegmentError, match=r"expected field obs: float32\[2, 5, 4\], found obs: float32\[2, 5, 3\]"):
        RolloutRingBuffer(2, 5, 4, 1, num_slots=3, create=False, shm_name_prefix=buffer.name)


def test_attaching_with_another_number_of_slots_is_refused(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(ValueError, match="has num_slots=3, expected 4"):
        RolloutRingBuffer(*SIZES, create=False, shm_name_prefix=buffer.name)


def test_names_of_several_rings_are_refused(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(ValueError, match="shm_name_prefix must be a name or the `name` of a RolloutRingBuffer"):
        RolloutRingBuffer(*SIZES, create=False, shm_name_prefix={**buffer.name, "obs": "other"})


def test_a_prefix_that_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="shm_name_prefix must be a name or the `name` of a RolloutRingBuffer, found 5"):
        RolloutRingBuffer(*SIZES, shm_name_prefix=5)  # type: ignore[arg-type]


def test_a_prefix_that_is_in_use_is_refused(buffer: RolloutRingBuffer) -> None:
    with pytest.raises(SegmentExists):
        RolloutRingBuffer(*SIZES, shm_name_prefix=buffer.name)


# --------------------------------------------------------------------------------------------------------------- ending


def test_close_gives_back_what_the_object_holds() -> None:
    with RolloutRingBuffer(*SIZES, num_slots=1) as buffer:
        other = pickle.loads(pickle.dumps(buffer))
        other.write_buffer["obs"][:] = 5
        other.close()
        assert buffer.counters()["abandoned"] == 1
        write(buffer, 1)
        assert read(buffer) == 1


def test_close_of_an_attached_object_leaves_the_name_and_cleanup_takes_it() -> None:
    with RolloutRingBuffer(*SIZES) as buffer:
        for end in (RolloutRingBuffer.close, RolloutRingBuffer.cleanup):
            other = RolloutRingBuffer(*SIZES, create=False, shm_name_prefix=buffer.name)
            end(other)
        with pytest.raises(SegmentMissing):
            RolloutRingBuffer(*SIZES, create=False, shm_name_prefix=buffer.name)
        write(buffer, 1)
        assert read(buffer) == 1


@pytest.mark.parametrize("end", [RolloutRingBuffer.close, RolloutRingBuffer.cleanup])
def test_ending_again_is_harmless(end: Callable[[RolloutRingBuffer], None]) -> None:
    buffer = RolloutRingBuffer(*SIZES)
    write(buffer, 1, 2)
    buffer.read_numpy_views()
    buffer.write_buffer["obs"][:] = 1
    end(buffer)
    end(buffer)
    buffer.close()
    buffer.cleanup()


USES: dict[str, Callable[[RolloutRingBuffer], object]] = {
    "write_slot": lambda buffer: buffer.write_slot,
    "write_buffer": lambda buffer: buffer.write_buffer,
    "signal_write_done": lambda buffer: buffer.signal_write_done(),
    "available": lambda buffer: buffer.available(),
    "wait_for_data": lambda buffer: buffer.wait_for_data(1),
    "read_slot": lambda buffer: buffer.read_slot,
    "read_numpy_views": lambda buffer: buffer.read_numpy_views(),
    "advance_read": lambda buffer: buffer.advance_read(),
    "counters": lambda buffer: buffer.counters(),
    "value": lambda buffer: buffer._write_ptr.value,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("end", [RolloutRingBuffer.close, RolloutRingBuffer.cleanup], ids=["close", "cleanup"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_the_end_is_an_error(
    use: Callable[[RolloutRingBuffer], object], end: Callable[[RolloutRingBuffer], None]
) -> None:
    buffer = RolloutRingBuffer(*SIZES)
    write(buffer, 1)
    end(buffer)
    with pytest.raises(MemlaneError if use is USES["signal_write_done"] else SegmentClosed):
        use(buffer)


def test_no_use_after_cleanup_crashes_the_process() -> None:
    output = output_of(
        """
        from memlane.ipc import RolloutRingBuffer
        from tests.ipc.test_rollout_ring_buffer import SIZES, USES, write
        buffer = RolloutRingBuffer(*SIZES)
        write(buffer, 1, 2)
        views, mine = buffer.read_numpy_views(), buffer.write_buffer
        buffer.cleanup()
        for use in USES.values():
            try:
                use(buffer)
                print("no error")
            except Exception as error:
                pass
        mine["obs"][:] = views["obs"]
        del buffer
        print(views["obs"].sum(), mine["obs"].sum())
        """,
    )
    assert output == "30.0 30.0\n"


def test_a_collector_that_is_killed_costs_one_unfinished_rollout(buffer: RolloutRingBuffer) -> None:
    write(buffer, 1)
    with child(write_half_and_die, buffer) as process:
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    write(buffer, 2)
    assert read_all(buffer) == [1, 2]


def write_half_and_die(buffer: RolloutRingBuffer) -> None:
    buffer.write_buffer["obs"][:] = 66
    lane_support.die()


def test_the_layout_of_a_rollout_is_known_without_a_ring() -> None:
    layout = rollout_layout(*SIZES, 7)
    with RolloutRingBuffer(*SIZES, critic_dim=7) as buffer:
        assert buffer.ring.layout == layout
