"""memlane moves reinforcement-learning data between processes through shared memory."""

from memlane import core
from memlane._registration import register_envs
from memlane.lessons import SharedCircularBuffer, shared_memory_rl_pipeline, zero_copy_env_simulation

__all__ = ["SharedCircularBuffer", "core", "shared_memory_rl_pipeline", "zero_copy_env_simulation"]

register_envs()
del register_envs
