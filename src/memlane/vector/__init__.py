"""Vector environments: many environments in worker processes, through shared memory.

Start with ``AsyncVectorEnv``. The adapters for other libraries are in ``memlane.vector.adapters``, and the
parts that ``AsyncVectorEnv`` is made of in ``memlane.vector.lowlevel``.
"""

from memlane.spaces import Capacity, create_shared_memory, read_from_shared_memory, write_to_shared_memory
from memlane.vector.adapters.gymnasium import as_gymnasium_async
from memlane.vector.adapters.pettingzoo import AgentsVectorEnv
from memlane.vector.adapters.torch import as_tensors
from memlane.vector.async_vector_env import AsyncVectorEnv
from memlane.vector.errors import CallTimeout, RemoteTraceback, RestartLimit, WorkerDied, WorkerError
from memlane.vector.supervisor import AsyncState
from memlane.vector.worker import shared_assets

__all__ = [
    "AgentsVectorEnv",
    "AsyncState",
    "AsyncVectorEnv",
    "CallTimeout",
    "Capacity",
    "RemoteTraceback",
    "RestartLimit",
    "WorkerDied",
    "WorkerError",
    "as_gymnasium_async",
    "as_tensors",
    "create_shared_memory",
    "read_from_shared_memory",
    "shared_assets",
    "write_to_shared_memory",
]


def __dir__() -> list[str]:
    return sorted(__all__)
