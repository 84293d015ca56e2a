"""The parts of ``AsyncVectorEnv``, to build other vector environments from. They may change between releases.

``WorkerPool``, ``WorkerHandle``    start, watch, restart and end worker processes
``StepSegment``, ``StepSegmentSpec``    the shared memory of a step
``Supervisor``    issues commands, waits, restarts; owns everything that is pending
``Channel``, ``Message``, ``Failure``    what is pickled between parent and worker
``StepWriter``    writes the results of a step into shared memory, in a worker
``Observations``    batches of observations: copies or leases
"""

from memlane.vector.channel import Channel
from memlane.vector.messages import Failure, Message
from memlane.vector.observations import Observations
from memlane.vector.step_segment import StepSegment, StepSegmentSpec
from memlane.vector.step_writer import StepWriter
from memlane.vector.supervisor import Supervisor
from memlane.vector.worker_handle import WorkerHandle
from memlane.vector.worker_pool import WorkerPool

__all__ = [
    "Channel",
    "Failure",
    "Message",
    "Observations",
    "StepSegment",
    "StepSegmentSpec",
    "StepWriter",
    "Supervisor",
    "WorkerHandle",
    "WorkerPool",
]
