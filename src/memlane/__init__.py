"""memlane moves reinforcement-learning data between processes through shared memory."""

from memlane import core

__all__ = ["core"]
