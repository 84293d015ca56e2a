"""Vector environments: many environments in worker processes, through shared memory."""

from memlane.spaces import Capacity, create_shared_memory, read_from_shared_memory, write_to_shared_memory
from memlane.vector.async_vector_env import AsyncState, AsyncVectorEnv
from memlane.vector.errors import RemoteTraceback, RestartLimit, WorkerDied, WorkerError
from memlane.vector.worker import shared_assets

__all__ = [
    "AsyncState",
    "AsyncVectorEnv",
    "Capacity",
    "RemoteTraceback",
    "RestartLimit",
    "WorkerDied",
    "WorkerError",
    "create_shared_memory",
    "read_from_shared_memory",
    "shared_assets",
    "write_to_shared_memory",
]
