"""The lanes: rollouts, weights and statistics between processes, and what stands around them."""

from memlane.ipc.collector_error import CollectorError, CollectorErrors, CollectorPeer, Reporter
from memlane.ipc.memory_budget import BudgetWarning, MemoryBudget
from memlane.ipc.ring import Reader, ReadSlot, Ring, SlotHead, Writer, WriteSlot
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer, rollout_layout
from memlane.ipc.shared_obs_stats import SharedObsNormStats
from memlane.ipc.stats import Moments, Stats, StatsCollector
from memlane.ipc.tensors import layout_of
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.ipc.weights import Weights

__all__ = [
    "BudgetWarning",
    "CollectorError",
    "CollectorErrors",
    "CollectorPeer",
    "MemoryBudget",
    "Moments",
    "ReadSlot",
    "Reader",
    "Reporter",
    "Ring",
    "RolloutRingBuffer",
    "SharedObsNormStats",
    "SharedWeightSync",
    "SlotHead",
    "Stats",
    "StatsCollector",
    "Weights",
    "WriteSlot",
    "Writer",
    "layout_of",
    "rollout_layout",
]
