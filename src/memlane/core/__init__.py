"""Shared memory with named, typed fields; signals to wait on; leases; and the detection of dead processes.

Start with ``Segment`` (the memory), ``Signal`` (a counter to wait for) and ``Peer`` (a process to watch). The building
blocks of lanes are in ``memlane.core.lowlevel``.
"""

from memlane._native import Signal
from memlane.core import lowlevel as lowlevel
from memlane.core.errors import (
    BudgetError,
    LayoutError,
    MemlaneError,
    NothingToSample,
    PeerDied,
    SegmentClosed,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    StaleView,
    StaleViewWarning,
    StartError,
    UsedAfterFork,
    WaitTimeout,
)
from memlane.core.layout import SIGNAL, Field, Layout
from memlane.core.lease import Lease
from memlane.core.liveness import Peer, die_with
from memlane.core.names import Leftover, fresh_name, leftovers, reclaim
from memlane.core.rows import Rows
from memlane.core.segment import Segment

__all__ = [
    "SIGNAL",
    "BudgetError",
    "Field",
    "Layout",
    "LayoutError",
    "Lease",
    "Leftover",
    "MemlaneError",
    "NothingToSample",
    "Peer",
    "PeerDied",
    "Rows",
    "Segment",
    "SegmentClosed",
    "SegmentError",
    "SegmentExists",
    "SegmentMissing",
    "Signal",
    "StaleView",
    "StaleViewWarning",
    "StartError",
    "UsedAfterFork",
    "WaitTimeout",
    "die_with",
    "fresh_name",
    "leftovers",
    "reclaim",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "lowlevel"])
