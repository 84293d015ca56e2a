"""Lanes: data structures in shared memory for rollouts, replay, weights and statistics.

``Ring`` hands each slot from a writer to one reader; ``Replay`` stores transitions that samplers draw; ``Weights``
holds the latest version of named tensors; ``Stats`` merges the running mean and variance of several collectors. Pass a
lane to another process as a ``Process`` argument, or create it with ``name`` and attach to it by that name.
"""

from memlane.lanes.batch import Batch
from memlane.lanes.limiter import Limiter
from memlane.lanes.prefetch import CpuTransfer, CudaTransfer, ReplayPipeline, Transfer
from memlane.lanes.replay import Replay
from memlane.lanes.replay_writer import ReplayWriter
from memlane.lanes.ring import Reader, ReadSlot, Ring, SlotHead, Writer, WriteSlot
from memlane.lanes.sampler import ReplaySampler
from memlane.lanes.stats import Moments, Stats, StatsCollector
from memlane.lanes.tensors import layout_of
from memlane.lanes.weights import Weights

__all__ = [
    "Batch",
    "CpuTransfer",
    "CudaTransfer",
    "Limiter",
    "Moments",
    "ReadSlot",
    "Reader",
    "Replay",
    "ReplayPipeline",
    "ReplaySampler",
    "ReplayWriter",
    "Ring",
    "SlotHead",
    "Stats",
    "StatsCollector",
    "Transfer",
    "Weights",
    "WriteSlot",
    "Writer",
    "layout_of",
]


def __dir__() -> list[str]:
    return sorted(__all__)
