"""Replay pipelines: sample the next batch while the learner computes."""

from memlane.lanes.prefetch import CpuTransfer, CudaTransfer, ReplayPipeline, Transfer, transfer_to

__all__ = ["CpuTransfer", "CudaTransfer", "ReplayPipeline", "Transfer", "transfer_to"]
