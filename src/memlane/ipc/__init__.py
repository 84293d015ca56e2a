"""IPC primitives for multi-process RL training: rollouts, replay, weights, statistics, and the runner around them.

The presets of this package (``RolloutRingBuffer``, ``ReplayBuffer``, ``SharedWeightSync``, ``SharedObsNormStats``) are
thin layers over the lanes of ``memlane.lanes``, which take any layout; ``AsyncRunner`` is from ``memlane.runner``.
"""

from memlane.ipc.replay_buffer import ReplayBuffer, transition_layout
from memlane.ipc.rollout_ring_buffer import RolloutRingBuffer, rollout_layout
from memlane.ipc.shared_buffer import SharedBufferBase
from memlane.ipc.shared_obs_stats import SharedObsNormStats
from memlane.ipc.weight_sync import SharedWeightSync
from memlane.lanes import (
    Batch,
    Limiter,
    Moments,
    Reader,
    ReadSlot,
    Replay,
    ReplayPipeline,
    ReplaySampler,
    ReplayWriter,
    Ring,
    SlotHead,
    Stats,
    StatsCollector,
    Weights,
    Writer,
    WriteSlot,
    layout_of,
)
from memlane.runner import (
    AsyncRunner,
    BudgetWarning,
    Collect,
    CollectorDied,
    CollectorError,
    CollectorErrors,
    CollectorJoined,
    CollectorLost,
    CollectorPeer,
    MemoryBudget,
    Reporter,
    Stopped,
)

__all__ = [
    "AsyncRunner",
    "Batch",
    "BudgetWarning",
    "Collect",
    "CollectorDied",
    "CollectorError",
    "CollectorErrors",
    "CollectorJoined",
    "CollectorLost",
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
    "Stopped",
    "Weights",
    "WriteSlot",
    "Writer",
    "layout_of",
    "rollout_layout",
    "transition_layout",
]


def __dir__() -> list[str]:
    return sorted(__all__)
