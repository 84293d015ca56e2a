"""Lanes between containers: processes of different pid and time namespaces that share memory.

Neither side sees the pids of the other, and a pid of one is another process on the other side.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from memlane.core import SIGNAL, MemlaneError, Segment, WaitTimeout, fresh_name
from memlane.lanes import Replay, Ring, Stats, Weights
from tests.support.namespaces import PID, TIME, Inside, inside, output_inside
from tests.support.processes import PATIENCE, PROMISE, child, sleep_forever, wait_for, within

LAYOUT = {"x": ("int64", 8)}
LONG_ENOUGH = 0.35
"""Seconds in which a wait looks for dead holders three times."""


def values(number: int) -> dict[str, np.ndarray]:
    return {"x": np.full(8, number)}


def noticed(attempt: Callable[[], object]) -> None:
    """``attempt`` succeeds within the time in which a death is noticed."""
    begin = time.monotonic()
    attempt()
    assert time.monotonic() - begin < within(PROMISE)


# ----------------------------------------------------------------------------------------------------------------- ring

CLAIM = """
    import sys
    from memlane.lanes import Ring
    ring = Ring.attach(sys.argv[1])
    slot = ring.writer(7).claim(timeout=60)
    print("holds", flush=True)
    sys.stdin.readline()
    slot["x"][:] = 5
    slot.commit()
    print("committed", flush=True)
"""
TAKE = """
    import sys
    from memlane.lanes import Ring
    ring = Ring.attach(sys.argv[1])
    slot = ring.reader().take(timeout=60)
    print("holds", flush=True)
    sys.stdin.readline()
    print(slot["x"].tolist(), flush=True)
    slot.release()
"""


@pytest.fixture
def ring() -> Ring:
    return Ring(LAYOUT, num_slots=1, overflow="block", name=fresh_name("ring"))


def test_a_slot_that_is_written_in_another_pid_namespace_is_not_taken_away(ring: Ring) -> None:
    with ring, inside(PID, CLAIM, ring.name) as writer:
        assert writer.says() == "holds"
        with pytest.raises(WaitTimeout):
            ring.writer().claim(timeout=LONG_ENOUGH)
        writer.tell()
        assert writer.says() == "committed"
        with ring.reader().take(timeout=PATIENCE) as slot:
            assert (slot["x"].tolist(), slot.writer) == ([5] * 8, 7)
        writer.ends_well()
        assert ring.counters()["abandoned"] == 0


def test_a_slot_that_is_read_in_another_pid_namespace_is_not_offered_again(ring: Ring) -> None:
    with ring, inside(PID, TAKE, ring.name) as reader:
        ring.writer().put(values(3))
        assert reader.says() == "holds"
        for attempt in (ring.reader().take, ring.writer().claim):
            with pytest.raises(WaitTimeout):
                attempt(timeout=LONG_ENOUGH)
        reader.tell()
        assert reader.says() == str([3] * 8)
        reader.ends_well()
        ring.writer().claim(timeout=0).release()
        assert (ring.counters()["read"], ring.counters()["returned"]) == (1, 0)


@pytest.mark.parametrize("holder", [CLAIM, TAKE], ids=["claimed", "taken"])
def test_a_slot_of_a_process_killed_in_another_pid_namespace_comes_back_in_a_second(ring: Ring, holder: str) -> None:
    with ring, inside(PID, holder, ring.name) as process:
        if holder == TAKE:
            ring.writer().put(values(3))
        assert process.says() == "holds"
        process.kill()
        if holder == TAKE:
            noticed(lambda: ring.reader().take(timeout=PATIENCE).release())
        else:
            noticed(lambda: ring.writer().claim(timeout=PATIENCE).release())


def test_a_process_in_another_pid_namespace_leaves_the_slots_of_this_one_alone(ring: Ring) -> None:
    claim_here = """
        import sys
        from memlane.core import WaitTimeout
        from memlane.lanes import Ring
        ring = Ring.attach(sys.argv[1])
        try:
            ring.writer().claim(timeout=float(sys.argv[2]))
        except WaitTimeout:
            print("waited in vain")
    """
    with ring, ring.writer().claim() as slot:
        assert output_inside(PID, claim_here, ring.name, LONG_ENOUGH) == "waited in vain"
        slot["x"] = 1
        slot.commit()


def test_rings_pass_every_slot_between_two_pid_namespaces(ring: Ring) -> None:
    echo = """
        import sys
        import numpy as np
        from memlane.lanes import Ring
        there, back = Ring.attach(sys.argv[1]), Ring.attach(sys.argv[2])
        reader, writer, out = there.reader(), back.writer(), {"x": np.zeros(8, np.int64)}
        for _ in range(int(sys.argv[3])):
            reader.get(out, timeout=60)
            writer.put(out, timeout=60)
    """
    rounds, out = 300, values(0)
    with ring, Ring(LAYOUT, num_slots=2, overflow="block", name=fresh_name("back")) as back:
        with inside(PID, echo, ring.name, back.name, rounds) as process:
            writer, reader = ring.writer(), back.reader()
            for number in range(rounds):
                writer.put(values(number), timeout=PATIENCE)
                reader.get(out, timeout=PATIENCE)
                assert out["x"].tolist() == [number] * 8
            process.ends_well()
        for each in (ring, back):
            counters = each.counters()
            assert (counters["read"], counters["abandoned"], counters["returned"]) == (rounds, 0, 0)


# ------------------------------------------------------------------------------------------- weights, replay and stats

PUBLISH = """
    import sys
    import numpy as np
    from memlane.lanes import Weights
    weights = Weights.attach(sys.argv[1])
    tensors = {"w": np.full(weights.layout["w"].shape, 7, np.int64)}
    print("runs", flush=True)
    while True:
        weights.publish(tensors)
"""
ADD = """
    import sys
    import numpy as np
    from memlane.lanes import Replay
    replay = Replay.attach(sys.argv[1])
    rows = {"x": np.full(replay.layout["x"].shape, 7, np.int64)}
    print("runs", flush=True)
    while True:
        replay.add(rows)
"""


def stop_when(process: Inside, is_inside: Callable[[], bool]) -> None:
    """Stop the process at a moment at which ``is_inside`` holds."""

    def stopped() -> bool:
        process.signal(signal.SIGSTOP)
        if is_inside():
            return True
        process.signal(signal.SIGCONT)
        return False

    assert process.says() == "runs"
    assert wait_for(stopped)


def test_weights_that_are_published_in_another_pid_namespace_keep_their_buffer_until_the_writer_is_killed() -> None:
    size = 1 << 21  # 16 MB: the writer is stopped while it copies
    with Weights({"w": ("int64", size)}, buffers=2, name=fresh_name("weights")) as weights:
        mine = {"w": np.full(size, 3, np.int64)}

        def is_filling() -> bool:
            control = np.frombuffer(weights.segment["control"].tobytes(), np.int64)
            latest, states = int(control[0]), control[8:16]
            return latest > 0 and bool(states[1 - (latest & 0xFF)] > 0)

        with inside(PID, PUBLISH, weights.name) as writer:
            stop_when(writer, is_filling)
            with pytest.raises(MemlaneError, match="being filled by a live writer"):
                weights.publish(mine)
            before = weights.version
            writer.signal(signal.SIGCONT)
            assert wait_for(lambda: weights.version > before)
            assert (weights.read()[1]["w"] == 7).all()
            writer.kill()
            noticed(lambda: weights.publish(mine))
        assert (weights.read()[1]["w"] == 3).all()


def test_a_row_that_is_written_in_another_pid_namespace_stays_with_its_writer_until_that_is_killed() -> None:
    size = 1 << 20  # 8 MB
    with Replay({"x": ("int64", size)}, capacity=3, name=fresh_name("replay")) as replay:

        def held() -> list[int]:
            states = replay.segment["rows"][:, :8].copy().view(np.int64)[:, 0]
            return np.flatnonzero(states & 3 == 1).tolist()

        with inside(PID, ADD, replay.name) as writer:
            stop_when(writer, lambda: len(held()) == 1)
            slots = held()
            before = replay.counters()
            for _ in range(4):
                replay.add({"x": np.full(size, 3, np.int64)})
            counters = replay.counters()
            assert held() == slots
            assert counters["avoided"] > before["avoided"]
            assert counters["abandoned"] == before["abandoned"]
            writer.kill()
            for _ in range(4):
                replay.add({"x": np.full(size, 4, np.int64)})
            assert held() == []
            assert replay.counters()["abandoned"] == before["abandoned"] + 1
        batch = replay.sampler(seed=0).sample(20)
        assert (batch["x"] == 4).all()


COLLECT = """
    import sys
    from memlane.lanes import Stats
    collector = Stats.attach(sys.argv[1]).collector()
    collector.add([[2.0], [4.0]])
    print(collector.place, flush=True)
    sys.stdin.readline()
    collector.add([[6.0]])
    print("added", flush=True)
    sys.stdin.readline()
"""


def test_collectors_of_statistics_in_two_pid_namespaces_have_two_places() -> None:
    with Stats(1, places=2, name=fresh_name("stats")) as stats, inside(PID, COLLECT, stats.name) as process:
        assert process.says() == "0"
        here = stats.collector()
        assert here.place == 1
        here.add([[8.0]])
        process.tell()
        assert process.says() == "added"
        assert (stats.merged().count, stats.merged().mean.tolist()) == (4, [5.0])
        process.kill()
        noticed(lambda: stats.collector().add([[10.0]]))
        assert (stats.merged().count, stats.at(0).count) == (5, 4)


def test_samplers_in_two_pid_namespaces_have_two_places() -> None:
    sample = """
        import sys
        from memlane.lanes import Replay
        sampler = Replay.attach(sys.argv[1]).sampler(seed=0)
        print(sampler.place, flush=True)
        sys.stdin.readline()
    """
    with Replay(LAYOUT, capacity=4, name=fresh_name("replay")) as replay, inside(PID, sample, replay.name) as process:
        assert process.says() == "0"
        assert replay.sampler().place == 1
        process.kill()
        assert replay.sampler().place == 0


# ----------------------------------------------------------------------------------------------------- time namespaces


def claim_both_spare_slots(ring: Ring, held: Segment) -> None:
    slots = [ring.writer().claim(), ring.writer().claim()]
    held.signal("held").add()
    sleep_forever()
    del slots


def test_a_writer_whose_clock_is_a_day_ahead_keeps_no_process_from_reclaiming_slots() -> None:
    overflow = """
        import sys
        import numpy as np
        from memlane.lanes import Ring
        ring = Ring.attach(sys.argv[1])
        for _ in range(20):
            ring.writer().put({"x": np.zeros(8, np.int64)})
        print("wrote", flush=True)
        sys.stdin.readline()
    """
    with (
        Ring(LAYOUT, num_slots=2, name=fresh_name("ring")) as ring,
        Segment.create({"held": (SIGNAL, ())}) as held,
        inside(TIME, overflow, ring.name) as ahead,
    ):
        assert ahead.says() == "wrote"
        with child(claim_both_spare_slots, ring, held) as victim:
            held.signal("held").wait(1, timeout=PATIENCE)
            victim.kill()
        for _ in range(20):
            ring.writer().put(values(1))
        assert ring.counters()["abandoned"] == 2
