"""The runner: collectors, as processes or threads, beside a learner that supervises them."""

from memlane.runner.async_runner import AsyncRunner
from memlane.runner.collector_error import CollectorDied, CollectorError, CollectorErrors, CollectorPeer, Reporter
from memlane.runner.memory_budget import BudgetWarning, MemoryBudget
from memlane.runner.protocols import (
    Collect,
    CollectorContext,
    CollectorJoined,
    CollectorLost,
    OpenSlot,
    RolloutSink,
    Slot,
    Stopped,
    TakenSlot,
    WeightSubscriber,
)

__all__ = [
    "AsyncRunner",
    "BudgetWarning",
    "Collect",
    "CollectorContext",
    "CollectorDied",
    "CollectorError",
    "CollectorErrors",
    "CollectorJoined",
    "CollectorLost",
    "CollectorPeer",
    "MemoryBudget",
    "OpenSlot",
    "Reporter",
    "RolloutSink",
    "Slot",
    "Stopped",
    "TakenSlot",
    "WeightSubscriber",
]


def __dir__() -> list[str]:
    return sorted(__all__)
