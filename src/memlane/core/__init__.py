"""The core: segments of shared memory with a typed layout, atomic signals, and leases."""

from memlane._native import Signal, Words
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
    WaitTimeout,
)
from memlane.core.layout import SIGNAL, Field, Layout
from memlane.core.lease import Lease
from memlane.core.liveness import Life, Peer, Roster, die_with
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
    "Life",
    "MemlaneError",
    "NothingToSample",
    "Peer",
    "PeerDied",
    "Roster",
    "Rows",
    "Segment",
    "SegmentClosed",
    "SegmentError",
    "SegmentExists",
    "SegmentMissing",
    "Signal",
    "StaleView",
    "StaleViewWarning",
    "WaitTimeout",
    "Words",
    "die_with",
    "fresh_name",
    "leftovers",
    "reclaim",
]
