"""Ring: slots of any layout that writers fill and readers take, each once, oldest first.

A slot that is being written or read belongs to one process and cannot be overwritten; ``native/src/ring.hpp`` says how.
Roles are objects: ``ring.writer()`` claims and commits, ``ring.reader()`` takes and releases. Any number of each, in
any process that has the ring (pass it as a ``Process`` argument, or attach by name).

When a writer comes and all slots hold unread data, ``overflow`` decides: ``"drop_oldest"`` throws the oldest unread
slot away and counts it, ``"block"`` makes the writer wait for a reader.

    >>> with Ring({"obs": ("float32", (2, 3))}, num_slots=2) as ring:
    ...     with ring.writer().claim() as slot:
    ...         slot["obs"][:] = 7
    ...         slot.commit(policy_version=3)
    ...     with ring.reader().take(timeout=1) as slot:
    ...         print(slot.sequence, slot.policy_version, slot["obs"].sum())
    1 3 42.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from memlane import _native
from memlane._native import SlotHead as SlotHead
from memlane.core import Layout, Lease, Peer, StaleView
from memlane.core.layout import FieldSpec
from memlane.core.lease import debug_mode
from memlane.core.segment import Window
from memlane.lanes.lane import Lane, as_layout
from memlane.lanes.tensors import Tensor, TensorParts

Overflow = Literal["drop_oldest", "block"]
_OVERFLOWS: tuple[Overflow, ...] = ("drop_oldest", "block")

# With drop_oldest, num_slots stay readable while one more is being written and one is being read.
_SPARE_SLOTS = 2


class Ring(Lane):
    """A ring in a segment of its own: anonymous, or under ``name`` for unrelated processes."""

    def __init__(
        self,
        layout: Layout | Mapping[str, FieldSpec],
        *,
        num_slots: int = 4,
        overflow: Overflow = "drop_oldest",
        name: str | None = None,
    ) -> None:
        slot = as_layout(layout)
        segment_layout = self.segment_layout(slot, num_slots, overflow)
        self._create(slot, segment_layout, name, [num_slots, _OVERFLOWS.index(overflow)])

    @classmethod
    def segment_layout(cls, layout: Layout, num_slots: int, overflow: Overflow = "drop_oldest") -> Layout:
        """What a ring takes from the machine, before it is made."""
        if num_slots < 1:
            raise ValueError(f"num_slots must be 1 or more, found {num_slots}")
        if overflow not in _OVERFLOWS:
            raise ValueError(f"overflow must be one of {list(_OVERFLOWS)}, found {overflow!r}")
        slots = num_slots + (_SPARE_SLOTS if overflow == "drop_oldest" else 0)
        return Layout(
            {
                **cls._describe(layout, 2),
                "control": (f"V{_native.RING_CONTROL_BYTES}", ()),
                # Bytes, not records: numpy's records end at 2 GiB.
                "slots": ("uint8", (slots, _native.SLOT_HEAD_BYTES + layout.nbytes)),
            }
        )

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        num_slots, overflow = settings
        return cls.segment_layout(layout, num_slots, _OVERFLOWS[overflow])

    def _bind(self, settings: list[int]) -> None:
        self.num_slots = settings[0]
        self.overflow: Overflow = _OVERFLOWS[settings[1]]
        slots = self.segment.layout["slots"]
        self._first_payload = slots.offset + _native.SLOT_HEAD_BYTES
        self._stride = slots.shape[1]
        mapping, base = self.segment.window(0, self.segment.layout.nbytes, writeable=True)
        self.native = _native.Ring(
            mapping,
            base + self.segment.layout["control"].offset,
            base + slots.offset,
            slots.shape[0],
            self._stride,
            self.num_slots,
            self.overflow == "block",
            f"ring of {self.segment.label}",
        )
        # Looked up once, because every claim and every take needs them: together they are a third of its time.
        self._debug = debug_mode()
        self._windows = [(mapping, base + self._first_payload + slot * self._stride) for slot in range(slots.shape[0])]
        self.slot_labels = [f"slot {slot} of the {self.native.label}" for slot in range(slots.shape[0])]

    # ------------------------------------------------------------------------------------------------------- roles

    def writer(self, writer: int = 0) -> Writer:
        """The role that fills slots. ``writer`` is what it calls itself in the slots."""
        return Writer(self, writer)

    def reader(self) -> Reader:
        """The role that takes slots."""
        return Reader(self)

    def windows(self, slot: int, *, writeable: bool) -> tuple[Window, Window | None]:
        """Where a slot's fields are seen, and in debug mode where one lease alone sees them."""
        if not self._debug:
            return self._windows[slot], None
        offset = self._first_payload + slot * self._stride
        return self._windows[slot], self.segment.alias(offset, self.layout.nbytes, writeable=writeable)

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def unread(self) -> int:
        """Complete slots that no reader has taken; never more than ``num_slots``."""
        return self.native.unread()

    def counters(self) -> dict[str, int]:
        """Since the ring was made: slots ``written``, ``read``, ``dropped`` (unread, by overflow), ``abandoned``
        (claimed by a writer that gave up or died) and ``returned`` (taken by a reader that died, and offered again);
        times that a writer was ``blocked`` and that a reader ``waited``. Anybody may look, at no cost to the others."""
        return self.native.counters()


class Writer:
    """Claims slots and commits them."""

    __slots__ = ("_parts", "_put", "_ring", "writer")

    def __init__(self, ring: Ring, writer: int) -> None:
        self._ring = ring
        self._put = ring.native.put
        self.writer = writer
        self._parts: TensorParts | None = None

    def claim(self, timeout: float | None = None, peers: Iterable[Peer] = ()) -> WriteSlot:
        """A slot to fill in place. Waits while all are taken (with ``overflow="block"``, while all are unread): until
        ``timeout`` (``WaitTimeout``) or the death of one of ``peers`` (``PeerDied``)."""
        return WriteSlot(self._ring, self._ring.native.claim(timeout, peers), self.writer)

    def put(
        self,
        tensors: Mapping[str, Tensor],
        *,
        policy_version: int = 0,
        rows: int = 0,
        timeout: float | None = None,
        peers: Iterable[Peer] = (),
    ) -> None:
        """Claim a slot, copy these into it and commit it, in one native call: the fastest way for what exists already.
        Names, dtypes and shapes must be the layout's."""
        if not self._put(self._parts, tensors, policy_version, self.writer, rows, timeout, peers):
            parts = TensorParts(self._ring.layout, tensors, "tensors", writeable=False)
            parts.before_publish()
            put = self._put(parts, None, policy_version, self.writer, rows, timeout, peers)
            assert put
            self._parts = None if parts.twins else parts


class Reader:
    """Takes slots and releases them."""

    __slots__ = ("_get", "_parts", "_ring")

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._get = ring.native.get
        self._parts: TensorParts | None = None

    def take(self, timeout: float | None = None, peers: Iterable[Peer] = ()) -> ReadSlot:
        """The oldest unread slot, to be read in place. Waits until there is one, until ``timeout`` (``WaitTimeout``) or
        the death of one of ``peers`` (``PeerDied``)."""
        return ReadSlot(self._ring, self._ring.native.take(timeout, peers))

    def get(self, out: Mapping[str, Tensor], *, timeout: float | None = None, peers: Iterable[Peer] = ()) -> SlotHead:
        """Take the oldest unread slot, copy it into ``out`` and release it, in one native call. Returns what its writer
        said of it."""
        head = self._get(self._parts, out, timeout, peers)
        if head is None:
            parts = TensorParts(self._ring.layout, out, "out", writeable=True)
            head = self._get(parts, None, timeout, peers)
            assert head is not None
            parts.after_read()
            self._parts = None if parts.twins else parts
        return head


class WriteSlot(Lease):
    """A claimed slot. ``commit`` hands it over; a release without commit (an exception in a ``with``) gives it up."""

    __slots__ = ("_commit", "_native", "index", "writer")

    def __init__(self, ring: Ring, index: int, writer: int) -> None:
        self._native = ring.native
        self.index = index
        self.writer = writer
        self._commit: tuple[int, int] | None = None
        self._begin(*ring.windows(index, writeable=True), ring.layout, True, ring.slot_labels[index])

    def commit(self, *, policy_version: int = 0, rows: int = 0) -> None:
        """The slot is complete: readers may have it. The views of it end here."""
        if self.released:
            raise StaleView(f"{self.label} was committed or given up before")
        self._commit = policy_version, rows
        self.release()

    def _after_release(self) -> None:
        if self._commit is None:
            self._native.abandon(self.index)
        else:
            self._native.commit(self.index, self._commit[0], self.writer, self._commit[1])


class ReadSlot(Lease):
    """A taken slot, read-only, with what its writer said of it."""

    __slots__ = ("_native", "head", "index")

    def __init__(self, ring: Ring, index: int) -> None:
        self._native = ring.native
        self.index = index
        self.head = ring.native.head(index)
        self._begin(*ring.windows(index, writeable=False), ring.layout, False, ring.slot_labels[index])

    @property
    def sequence(self) -> int:
        return self.head.sequence

    @property
    def policy_version(self) -> int:
        return self.head.policy_version

    @property
    def writer(self) -> int:
        return self.head.writer

    @property
    def rows(self) -> int:
        return self.head.rows

    def _after_release(self) -> None:
        self._native.release(self.index)
