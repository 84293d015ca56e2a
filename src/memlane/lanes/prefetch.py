"""Replay pipelines: sample the next batch, and copy it to the device, while the learner computes."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memlane.core import MemlaneError, WaitTimeout
from memlane.core.arguments import as_count, check_timeout
from memlane.lanes.batch import Batch, tensors
from memlane.lanes.sampler import ReplaySampler

if TYPE_CHECKING:
    import torch


class Transfer(Protocol):
    """How a sampled batch becomes tensors on a device."""

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory to sample into."""

    def send(self, batch: Batch) -> Any:
        """Start the copy to the device. The result is passed to ``arrive``."""

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        """Return the tensors, ordered after the copy on the calling thread's CUDA stream."""


class CpuTransfer:
    """Transfer to the CPU: the tensors are views of the staging memory."""

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def send(self, batch: Batch) -> Any:
        """Return the tensors: there is nothing to copy."""
        return batch.torch()

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        return sent  # type: ignore[no-any-return]


class CudaTransfer:
    """Transfer to a CUDA device: one asynchronous copy per batch from pinned memory, on a separate CUDA stream.

    Not tested on a GPU yet; written against torch's documented interface.
    """

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise MemlaneError(
                f"device {device!r} needs CUDA, which torch {torch.__version__} does not find here; use device='cpu'"
            )
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned memory."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def send(self, batch: Batch) -> Any:
        """Start the copy of a batch to the device."""
        import torch

        with torch.cuda.stream(self._stream):
            moved = tensors(batch.dtype, batch.shape, batch.block, self.device, non_blocking=True)
            event = self._stream.record_event()
        return moved, event

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        """Wait for the copy and return the tensors."""
        import torch

        moved, event = sent
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        event.synchronize()  # the staging memory is about to be reused
        for tensor in moved.values():
            tensor.record_stream(stream)  # keeps the allocator from reusing its memory while this stream uses it
        return moved  # type: ignore[no-any-return]


def transfer_to(device: str) -> Transfer:
    """Return the transfer for ``device``: ``"cpu"``, ``"cuda"`` or ``"cuda:<n>"``."""
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return CpuTransfer()
    if kind == "cuda":
        return CudaTransfer(str(device))
    raise ValueError(
        f"device must be 'cpu', 'cuda' or 'cuda:<n>', found {device!r}; for others, pass a Transfer as transfer="
    )


class ReplayPipeline:
    """Samples batches ahead of the learner, in a native thread that does not need the GIL.

    ``start`` requests a batch, ``ready`` polls, ``wait`` waits for it, ``consume`` returns it as torch tensors on
    ``device``. Up to ``ahead`` batches may be started at a time; one more is in use by the learner. ``transfer``
    replaces the copy to the device: ``CpuTransfer`` returns tensors over the staging memory, ``CudaTransfer`` copies
    from pinned memory on a separate CUDA stream. ``beta`` is the importance exponent of a prioritised replay and may be
    set at any time.

    For one thread of the process that created it, which must not use the sampler otherwise. In a forked child,
    ``close`` does nothing, and other methods raise ``UsedAfterFork``.

        >>> import numpy as np
        >>> from memlane.lanes import Replay
        >>> with Replay({"x": ("float32", 4)}, capacity=100) as replay:
        ...     _ = replay.add({"x": np.ones((50, 4), np.float32)})
        ...     with ReplayPipeline(replay.sampler(seed=0), batch_size=8) as pipeline:
        ...         pipeline.start()
        ...         for _ in range(3):
        ...             batch = pipeline.consume()  # valid until the next consume()
        ...             pipeline.start()
        ...     print(tuple(batch["x"].shape))
        (8, 4)

    An error while sampling, such as ``NothingToSample``, is raised by ``wait`` or ``consume``; the pipeline stays
    usable. A writer that dies does not stop the pipeline.
    """

    def __init__(
        self,
        sampler: ReplaySampler,
        batch_size: int,
        *,
        device: str = "cpu",
        ahead: int = 1,
        beta: float = 1.0,
        transfer: Transfer | None = None,
    ) -> None:
        as_count("ahead", ahead, 1)
        self.sampler = sampler
        self.batch_size = as_count("batch_size", batch_size, 1)
        self.ahead = ahead
        self.beta = beta
        self._transfer = transfer or transfer_to(device)
        nbytes = sampler.dtype.itemsize * batch_size * sampler.length
        self._free = deque(sampler.batch(batch_size, self._transfer.staging(nbytes)) for _ in range(ahead + 1))
        self._requested: deque[Batch] = deque()
        self._sent: deque[tuple[Batch, Any]] = deque()
        self._held: Batch | None = None
        self._closed = False
        self.waited = 0.0
        """Total seconds that ``wait`` and ``consume`` spent waiting: sampling time not hidden by the computation."""

    def start(self) -> None:
        """Request one more batch."""
        self._require_open()
        if self.started >= self.ahead:
            raise MemlaneError(
                f"the pipeline has {self.started} started batches, as many as ahead={self.ahead} allows; consume one "
                "first, or create it with a larger ahead"
            )
        self.sampler.require_open()
        self.sampler.native.start(self._free[0].block, self.beta, self.sampler.threads)
        self._requested.append(self._free.popleft())

    @property
    def started(self) -> int:
        """Number of batches requested and not consumed."""
        return len(self._requested) + len(self._sent)

    def ready(self) -> bool:
        """Return whether ``consume`` would return without waiting."""
        return bool(self._sent) or (bool(self._requested) and self.sampler.native.ready())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the batch that was started first: at most ``timeout`` seconds (``WaitTimeout``)."""
        check_timeout(timeout)
        self._require_open()
        if self._sent:
            return
        if not self._requested:
            raise MemlaneError("no batch was started; call start() before wait() or consume()")
        begin = time.perf_counter()
        try:
            self._send(timeout)
        finally:
            self.waited += time.perf_counter() - begin

    def consume(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """Return the batch that was started first. Waits at most ``timeout`` seconds (``WaitTimeout``).

        On the CPU the tensors are views of memory that is reused after the next ``consume``: clone what must be kept.
        """
        self.wait(timeout)
        batch, sent = self._sent.popleft()
        if self._held is not None:
            self._free.append(self._held)
        self._held = batch
        # If the next batch is sampled already, start its copy to the device while the learner uses this one.
        if self._requested and self.sampler.native.ready():
            self._send(None)
        return self._transfer.arrive(sent)

    def _send(self, timeout: float | None) -> None:
        try:
            sampled = self.sampler.native.take(timeout)
        except BaseException:
            # After a sampling error the request is over; after Ctrl-C it is still pending.
            while len(self._requested) > self.sampler.native.started():
                self._free.append(self._requested.popleft())
            raise
        self._require_open()  # another thread may have closed it
        if not sampled:
            raise WaitTimeout(f"waited {timeout:g} s for a batch of {self.batch_size} rows to be drawn")
        batch = self._requested.popleft()
        try:
            self._sent.append((batch, self._transfer.send(batch)))
        except BaseException:
            self._free.append(batch)
            raise

    def close(self) -> None:
        """Stop the thread and drop pending batches. Calling it again has no effect."""
        if not self._closed:
            self._closed = True
            self.sampler.native.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        self.sampler.guard.require()
        if self._closed:
            raise MemlaneError("the pipeline was used after close(); create another")
