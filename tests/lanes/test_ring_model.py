"""The ring against a model in plain Python: several writers and readers, random operations, deaths among them.

The model is a list and some numbers. After every step the ring must agree with it: who holds what, what is unread and
in which order, what every slot contains, and every counter.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memlane.core import WaitTimeout
from memlane.lanes.ring import Overflow, ReadSlot, Ring, WriteSlot
from tests.support import lane_lives
from tests.support.kills import Template

NO_TIME = 1e-6  # seconds; enough to look twice, not to wait
SPARE = 2  # slots beyond num_slots that a ring that drops has
MOST_HELD = 8

ROLES = st.integers(0, 2)
SEVERAL = st.lists(ROLES, min_size=1, max_size=5)
WHICH = st.integers(0, MOST_HELD - 1)
VERSIONS = st.integers(0, 2**62)

TEMPLATE: Template


@pytest.fixture(scope="module", autouse=True)
def template() -> Iterator[None]:
    global TEMPLATE
    TEMPLATE = Template()
    yield
    TEMPLATE.close()


@dataclass
class Unread:
    sequence: int
    number: int
    writer: int
    policy_version: int


@dataclass
class Model:
    """What a ring is supposed to be."""

    num_slots: int
    drops: bool
    free: int = 0
    unread: list[Unread] = field(default_factory=list)
    sequence: int = 0
    written: int = 0
    read: int = 0
    dropped: int = 0
    abandoned: int = 0
    returned: int = 0
    blocked: int = 0
    waited: int = 0

    def __post_init__(self) -> None:
        self.free = self.num_slots + (SPARE if self.drops else 0)

    def claim(self) -> bool:
        if self.free:
            self.free -= 1
        elif self.drops and self.unread:
            del self.unread[0]
            self.dropped += 1
        else:
            self.blocked += 1
            return False
        return True

    def commit(self, number: int, writer: int, policy_version: int) -> None:
        self.sequence += 1
        self.written += 1
        self.unread.append(Unread(self.sequence, number, writer, policy_version))
        while self.drops and len(self.unread) > self.num_slots:
            del self.unread[0]
            self.dropped += 1
            self.free += 1

    def abandon(self) -> None:
        self.abandoned += 1
        self.free += 1

    def take(self) -> Unread | None:
        return self.unread.pop(0) if self.unread else None

    def release(self) -> None:
        self.read += 1
        self.free += 1

    def give_back(self, unread: Unread) -> None:
        self.returned += 1
        self.unread = sorted([*self.unread, unread], key=lambda entry: entry.sequence)


@dataclass
class Writing:
    slot: WriteSlot
    number: int
    writer: int


@dataclass
class Reading:
    slot: ReadSlot
    unread: Unread


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rings: list[Ring] = []
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.number = 0

    @initialize(num_slots=st.integers(1, 4), overflow=st.sampled_from(["drop_oldest", "block"]))
    def make(self, num_slots: int, overflow: Overflow) -> None:
        ring = Ring({"x": ("int64", 40)}, num_slots=num_slots, overflow=overflow)
        # Each role has an object and a mapping of its own, as in another process.
        self.rings = [ring, *(pickle.loads(pickle.dumps(ring)) for _ in range(2))]
        self.model = Model(num_slots, overflow == "drop_oldest")

    def teardown(self) -> None:
        for held in (*self.writing, *self.reading):
            held.slot.release()
        for ring in self.rings:
            ring.close()

    # ------------------------------------------------------------------------------------------------------- writers

    @rule(writer=ROLES)
    def claim(self, writer: int) -> None:
        if len(self.writing) == MOST_HELD:
            return
        if not self.model.claim():
            with pytest.raises(WaitTimeout):
                self.rings[writer].writer(writer).claim(timeout=NO_TIME)
            return
        slot = self.rings[writer].writer(writer).claim(timeout=NO_TIME)
        self.number += 1
        slot["x"][:] = self.number
        self.writing.append(Writing(slot, self.number, writer))

    @rule(which=WHICH, policy_version=VERSIONS)
    def commit(self, which: int, policy_version: int) -> None:
        if self.writing:
            writing = self.writing.pop(which % len(self.writing))
            writing.slot.commit(policy_version=policy_version, rows=writing.number)
            self.model.commit(writing.number, writing.writer, policy_version)

    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        if self.writing:
            self.writing.pop(which % len(self.writing)).slot.release()
            self.model.abandon()

    @rule(writers=SEVERAL, policy_version=VERSIONS)
    def put(self, writers: list[int], policy_version: int) -> None:
        for writer in writers:
            self.number += 1
            tensors = {"x": np.full(40, self.number)}
            role = self.rings[writer].writer(writer)
            if self.model.claim():
                role.put(tensors, policy_version=policy_version, rows=self.number, timeout=NO_TIME)
                self.model.commit(self.number, writer, policy_version)
            else:
                with pytest.raises(WaitTimeout):
                    role.put(tensors, timeout=NO_TIME)

    # ------------------------------------------------------------------------------------------------------- readers

    @rule(reader=ROLES)
    def take(self, reader: int) -> None:
        if len(self.reading) == MOST_HELD:
            return
        expected = self.model.take()
        if expected is None:
            self.model.waited += 1
            with pytest.raises(WaitTimeout):
                self.rings[reader].reader().take(timeout=NO_TIME)
            return
        slot = self.rings[reader].reader().take(timeout=NO_TIME)
        assert Unread(slot.sequence, slot.rows, slot.writer, slot.policy_version) == expected
        self.reading.append(Reading(slot, expected))

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        if self.reading:
            self.reading.pop(which % len(self.reading)).slot.release()
            self.model.release()

    @rule(readers=SEVERAL)
    def get(self, readers: list[int]) -> None:
        for reader in readers:
            out = {"x": np.zeros(40, np.int64)}
            expected = self.model.take()
            if expected is None:
                self.model.waited += 1
                with pytest.raises(WaitTimeout):
                    self.rings[reader].reader().get(out, timeout=NO_TIME)
                continue
            head = self.rings[reader].reader().get(out, timeout=NO_TIME)
            assert Unread(head.sequence, head.rows, head.writer, head.policy_version) == expected
            assert (out["x"] == expected.number).all()
            self.model.release()

    @rule(reader=ROLES)
    def look(self, reader: int) -> None:
        """A reader that does not wait is not counted as one that waited."""
        if not self.model.unread:
            with pytest.raises(WaitTimeout):
                self.rings[reader].reader().take(timeout=0)

    # -------------------------------------------------------------------------------------------------------- deaths

    @rule()
    def a_writer_dies_with_a_slot(self) -> None:
        if self.model.free or (self.model.drops and self.model.unread):
            self.die(lane_lives.claim_and_die)
            assert self.model.claim()
            assert self.rings[0].native.reap() == 1
            self.model.abandon()

    @rule()
    def a_reader_dies_with_a_slot(self) -> None:
        unread = self.model.take()
        if unread is not None:
            self.die(lane_lives.take_and_die)
            assert self.rings[0].native.reap() == 1
            self.model.give_back(unread)

    def die(self, life: Callable[..., object]) -> None:
        pid = TEMPLATE.fork(life, self.rings[0])
        assert TEMPLATE.reap(pid) == -signal.SIGKILL

    @rule()
    def nobody_is_dead(self) -> None:
        assert self.rings[1].native.reap() == 0

    # ------------------------------------------------------------------------------------------------ must agree

    @invariant()
    def every_counter_agrees(self) -> None:
        if not self.rings:
            return
        model = self.model
        names = ("written", "read", "dropped", "abandoned", "returned", "blocked", "waited")
        expected = {name: getattr(model, name) for name in names}
        for ring in self.rings:
            assert ring.counters() == expected
            assert ring.unread == min(len(model.unread), model.num_slots)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not self.rings:
            return
        counters = self.rings[0].counters()
        kept = len(self.model.unread) + len(self.reading)
        assert counters["written"] == counters["read"] + counters["dropped"] + kept

    @invariant()
    def what_is_held_is_nobody_elses(self) -> None:
        indices = [held.slot.index for held in (*self.writing, *self.reading)]
        assert len(set(indices)) == len(indices)
        for writing in self.writing:
            assert (writing.slot["x"] == writing.number).all()
        for reading in self.reading:
            assert (reading.slot["x"] == reading.unread.number).all()


# Without the phase that explains a failure: its hundreds of runs with real deaths take minutes.
PHASES = (Phase.reuse, Phase.generate, Phase.shrink)
UNHURRIED = settings(deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])


class TestRingAgreesWithItsModel(RingMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(UNHURRIED, max_examples=100, stateful_step_count=50)


@pytest.mark.soak
@pytest.mark.timeout(900)
class TestRingAgreesWithItsModelForLong(RingMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(UNHURRIED, max_examples=2000, stateful_step_count=100)
