"""The lanes: rollouts, replay, weights and statistics between processes, and what stands around them."""

from memlane.ipc.replay_buffer import ReplayBuffer, transition_layout
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer, rollout_layout
from memlane.ipc.shared_buffer import SharedBufferBase
from memlane.ipc.shared_obs_stats import SharedObsNormStats
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.lanes.batch import Batch
from memlane.lanes.prefetch import ReplayPipeline
from memlane.lanes.replay import Limiter, Replay, ReplayWriter
from memlane.lanes.ring import Reader, ReadSlot, Ring, SlotHead, Writer, WriteSlot
from memlane.lanes.sampler import ReplaySampler
from memlane.lanes.stats import Moments, Stats, StatsCollector
from memlane.lanes.tensors import layout_of
from memlane.lanes.weights import Weights
from memlane.runner.async_runner import AsyncRunner
from memlane.runner.collector_error import CollectorError, CollectorErrors, CollectorPeer, Reporter
from memlane.runner.memory_budget import BudgetWarning, MemoryBudget

__all__ = [
    "AsyncRunner",
    "Batch",
    "BudgetWarning",
    "CollectorError",
    "CollectorErrors",
    "CollectorPeer",
    "Limiter",
    "MemoryBudget",
    "Moments",
    "ReadSlot",
    "Reader",
    "Replay",
    "ReplayBuffer",
    "ReplayPipeline",
    "ReplaySampler",
    "ReplayWriter",
    "Reporter",
    "Ring",
    "RolloutRingBuffer",
    "SharedBufferBase",
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
    "transition_layout",
]
