"""The lanes: rollouts, replay, weights and statistics between processes, and what stands around them."""

from memlane.ipc.async_runner import AsyncRunner
from memlane.ipc.batch import Batch
from memlane.ipc.collector_error import CollectorError, CollectorErrors, CollectorPeer, Reporter
from memlane.ipc.memory_budget import BudgetWarning, MemoryBudget
from memlane.ipc.replay import Limiter, Replay, ReplayWriter
from memlane.ipc.replay_buffer import ReplayBuffer, transition_layout
from memlane.ipc.replay_pipelines import ReplayPipeline
from memlane.ipc.replay_sampler import ReplaySampler
from memlane.ipc.ring import Reader, ReadSlot, Ring, SlotHead, Writer, WriteSlot
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer, rollout_layout
from memlane.ipc.shared_buffer import SharedBufferBase
from memlane.ipc.shared_obs_stats import SharedObsNormStats
from memlane.ipc.stats import Moments, Stats, StatsCollector
from memlane.ipc.tensors import layout_of
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.ipc.weights import Weights

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
