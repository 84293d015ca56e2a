"""Whether the slots of a ring were taken in an order that a queue could have produced."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def find_overtaken(commit_begin: Times, commit_end: Times, take_begin: Times, take_end: Times) -> NDArray[np.intp]:
    """The slots that were taken although an older slot was unread: empty if the ring kept its order.

    Slot a is older than slot b if the commit of a had ended before that of b began. It was unread while b was taken if
    the take of a began after that of b had ended. Commits, and takes, that overlap in time may be in either order, so
    this is the condition of linearizability for a queue, for the pairs of slots that were both taken.
    """
    by_end = np.argsort(commit_end)
    # Of all slots whose commit ended before a given moment: when the last of them began to be taken.
    last_taken = np.maximum.accumulate(take_begin[by_end])
    older = np.searchsorted(commit_end[by_end], commit_begin, side="left")
    unread = np.where(older > 0, last_taken[np.maximum(older, 1) - 1], np.iinfo(np.int64).min) if len(by_end) else older
    return np.flatnonzero(unread > take_end)
