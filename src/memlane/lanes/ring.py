"""Ring: slots of any layout that writers fill and readers take, each slot once, oldest first.

``cpp/src/lanes/ring.hpp`` has the protocol between writers and readers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Literal

from memlane import _native
from memlane._native import ReadSlot as ReadSlot
from memlane._native import SlotHead as SlotHead
from memlane._native import WriteSlot as WriteSlot
from memlane.core import Layout, Peer, Segment
from memlane.core.arguments import as_count
from memlane.core.layout import FieldSpec
from memlane.core.lease import Watch, debug_mode
from memlane.core.segment import Window
from memlane.core.suggestions import did_you_mean
from memlane.lanes.lane import Lane, as_layout, require_settings
from memlane.lanes.tensors import Tensor, TensorParts

Overflow = Literal["drop_oldest", "block"]
_OVERFLOWS: tuple[Overflow, ...] = ("drop_oldest", "block")

# With drop_oldest, num_slots slots stay readable while one more is being written and one more is being read.
_SPARE_SLOTS = 2


class Ring(Lane):
    """Slots in shared memory that writer processes fill and reader processes take, each slot once, oldest first.

    ``layout`` is what one slot contains: a ``Layout``, or ``{name: (dtype, shape)}``. ``overflow`` is what happens to a
    writer while ``num_slots`` slots are unread: ``"drop_oldest"`` discards the oldest unread slot and counts it,
    ``"block"`` waits for a reader. Writers that wait get slots in the order of their arrival; a writer that need not
    wait may overtake them a few times in a row.

    Any number of writers and readers, in any process or thread that has the ring: pass the ring as a ``Process``
    argument, or create it with ``name`` and call ``Ring.attach(name)``. ``ring.writer()`` claims and commits slots,
    ``ring.reader()`` takes and releases them. A slot that is being written or read is owned by one process and is never
    overwritten.

        >>> with Ring({"obs": ("float32", (2, 3))}, num_slots=2) as ring:
        ...     with ring.writer().claim() as slot:
        ...         slot["obs"] = 7
        ...         slot.commit(policy_version=3)
        ...     with ring.reader().take(timeout=1) as slot:
        ...         print(slot.sequence, slot.policy_version, slot["obs"].sum())
        1 3 42.0

    A lease that is dropped without ``release`` gives its slot back when its last array is gone, with a
    ``ResourceWarning``: a claimed slot is abandoned, a taken one is offered to the readers again.

    When a process dies: a slot that it had claimed becomes free and is never read; a slot that it had taken is offered
    to the readers again. The memory stays until the last process closes the ring. A wait that names the dead process
    in ``peers`` ends with ``PeerDied``.
    """

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
        """Return the layout of the ring's segment without creating it, for a ``MemoryBudget``."""
        if overflow not in _OVERFLOWS:
            hint = did_you_mean(overflow, _OVERFLOWS) if isinstance(overflow, str) else ""
            raise ValueError(f"overflow must be one of {list(_OVERFLOWS)}, found {overflow!r}{hint}")
        slots = as_count("num_slots", num_slots, 1) + (_SPARE_SLOTS if overflow == "drop_oldest" else 0)
        return Layout(
            {
                **cls._describe(layout, 2),
                "control": (f"V{_native.RING_CONTROL_BYTES}", ()),
                # Bytes, not records: a numpy record is limited to 2 GiB.
                "slots": ("uint8", (slots, _native.SLOT_HEAD_BYTES + layout.nbytes)),
            }
        )

    @classmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        require_settings(settings, 2)
        num_slots, overflow = settings
        return cls.segment_layout(layout, num_slots, _OVERFLOWS[overflow])

    def _bind(self, settings: list[int]) -> None:
        self.num_slots = settings[0]
        self.overflow: Overflow = _OVERFLOWS[settings[1]]
        slots = self.segment.layout["slots"]
        mapping, base = self.segment.window(0, self.segment.layout.nbytes, writeable=True)
        self.native = _native.Ring(
            mapping,
            base + self.segment.layout["control"].offset,
            base + slots.offset,
            slots.shape[0],
            slots.shape[1],
            self.num_slots,
            self.overflow == "block",
            f"ring of {self.segment.label}",
            self.layout,
            # Not a method of this object, which the native one would keep alive for ever.
            functools.partial(_watch, self.segment, self.layout) if debug_mode() else None,
        )

    # ------------------------------------------------------------------------------------------------------- roles

    def writer(self, writer: int = 0) -> Writer:
        """Return a handle that fills slots. ``writer`` is the number that its slots carry as ``slot.writer``."""
        return Writer(self, writer)

    def reader(self) -> Reader:
        """Return a handle that takes slots."""
        return Reader(self)

    def window(self, slot: int) -> Window:
        """Return the window of a slot's fields."""
        return self.segment.window(_payload_offset(self.segment, slot), self.layout.nbytes, writeable=False)

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def unread(self) -> int:
        """Number of committed slots that no reader has taken; at most ``num_slots``."""
        return self.native.unread()

    def counters(self) -> dict[str, int]:
        """Return counts since the ring was created.

        ``written``, ``read``: slots committed, and slots released by their reader. ``dropped``: unread slots discarded
        by overflow. ``abandoned``: slots whose writer gave up or died. ``returned``: slots whose reader died or
        dropped its lease, offered again. ``blocked``, ``waited``: times that a writer or a reader had to wait. Any
        process may call it at any time.
        """
        return self.native.counters()


class Writer(_native.RingWriter):
    """A writer's handle on a ring. Threads may share it."""

    __slots__ = ("_layout", "_parts")

    def __init__(self, ring: Ring, writer: int) -> None:
        super().__init__(ring.native, writer)
        self._layout = ring.layout
        self._parts: TensorParts | None = None

    def put(
        self,
        tensors: Mapping[str, Tensor],
        *,
        policy_version: int = 0,
        rows: int = 0,
        timeout: float | None = None,
        peers: Iterable[Peer] = (),
    ) -> None:
        """Claim a slot, copy ``tensors`` into it and commit it, in one native call.

        The fastest way for arrays that exist already. Names, dtypes and shapes must be those of the layout.
        """
        if not self._put(self._parts, tensors, policy_version, rows, timeout, peers):
            parts = TensorParts(self._layout, tensors, "tensors", writeable=False)
            parts.before_publish()
            self._put_parts(parts, policy_version, rows, timeout, peers)
            self._parts = None if parts.staging else parts


class Reader(_native.RingReader):
    """A reader's handle on a ring. Threads may share it."""

    __slots__ = ("_layout", "_parts")

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring.native)
        self._layout = ring.layout
        self._parts: TensorParts | None = None

    def get(self, out: Mapping[str, Tensor], *, timeout: float | None = None, peers: Iterable[Peer] = ()) -> SlotHead:
        """Take the oldest unread slot, copy it into ``out`` and release it, in one native call.

        Returns the slot's head: sequence number, policy version, writer, rows and times.
        """
        head = self._get(self._parts, out, timeout, peers)
        if head is None:
            parts = TensorParts(self._layout, out, "out", writeable=True)
            head = self._get_parts(parts, timeout, peers)
            parts.after_read()
            self._parts = None if parts.staging else parts
        return head


def _payload_offset(segment: Segment, slot: int) -> int:
    """Return where the fields of a slot begin, in bytes from the segment's first field."""
    slots = segment.layout["slots"]
    return slots.offset + slot * slots.shape[1] + _native.SLOT_HEAD_BYTES


def _watch(segment: Segment, layout: Layout, slot: int, writeable: bool, label: str) -> Watch:
    """Return the debug mode of a lease of a slot."""
    alias = segment.alias(_payload_offset(segment, slot), layout.nbytes, writeable=writeable)
    return Watch(alias, layout, writeable, label)
