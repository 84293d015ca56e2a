"""Replay pipelines: the next batch is drawn, and on its way to the device, while the learner computes.

A ``ReplayPipeline`` has four moves: ``start`` asks for a batch, ``ready`` looks, ``wait`` waits, ``consume`` takes it.
The work is done by a native thread of this process, which never needs the GIL: it draws while Python computes. Where
the batch goes is a ``Transfer``: ``CpuTransfer`` hands out tensors over the staging memory itself; ``CudaTransfer``
copies from pinned memory on a stream of its own.

    >>> from memlane.lanes.replay import Replay
    >>> import numpy as np
    >>> with Replay({"x": ("float32", 4)}, capacity=100) as replay:
    ...     _ = replay.add({"x": np.ones((50, 4), np.float32)})
    ...     with ReplayPipeline(replay.sampler(seed=0), batch_size=8) as pipeline:
    ...         pipeline.start()
    ...         for _ in range(3):
    ...             batch = pipeline.consume()  # stays as it is until the next consume()
    ...             pipeline.start()
    ...     print(tuple(batch["x"].shape))
    (8, 4)
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memlane.core import MemlaneError, WaitTimeout
from memlane.lanes.batch import Batch, tensors
from memlane.lanes.sampler import ReplaySampler

if TYPE_CHECKING:
    import torch


class Transfer(Protocol):
    """How a drawn batch becomes tensors on a device."""

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory to draw into."""

    def send(self, batch: Batch) -> Any:
        """Begin the way to the device. What it returns goes to ``arrive``."""

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        """The tensors, in order with what the calling thread computes."""


class CpuTransfer:
    """The device is the CPU: the tensors are views of the staging memory."""

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def send(self, batch: Batch) -> Any:
        return batch.torch()

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        return sent  # type: ignore[no-any-return]


class CudaTransfer:
    """Staging is pinned memory, and one copy for each batch runs on a stream of its own beside the computation.

    Written against torch's public interface; it has not been run: no machine that this was made on had a GPU.
    """

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise MemlaneError(f"device {device!r} needs CUDA, which torch {torch.__version__} does not find here")
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def send(self, batch: Batch) -> Any:
        import torch

        with torch.cuda.stream(self._stream):
            moved = tensors(batch.dtype, batch.shape, batch.block, self.device, non_blocking=True)
            event = self._stream.record_event()
        return moved, event

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        import torch

        moved, event = sent
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        event.synchronize()  # the staging memory is drawn into again
        for tensor in moved.values():
            tensor.record_stream(stream)  # so that its memory is not given away while this stream uses it
        return moved  # type: ignore[no-any-return]


def transfer_to(device: str) -> Transfer:
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return CpuTransfer()
    if kind == "cuda":
        return CudaTransfer(str(device))
    raise ValueError(f"a pipeline goes to 'cpu' or 'cuda', found device {device!r}; pass a Transfer of your own")


class ReplayPipeline:
    """Draws batches ahead. ``ahead`` of them can be started at a time; one more is the learner's."""

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
        if ahead < 1:
            raise ValueError(f"ahead must be 1 or more, found {ahead}")
        self.sampler = sampler
        self.batch_size = batch_size
        self.ahead = ahead
        self.beta = beta
        self._transfer = transfer or transfer_to(device)
        nbytes = sampler.dtype.itemsize * batch_size * sampler.length
        self._free = deque(sampler.batch(batch_size, self._transfer.staging(nbytes)) for _ in range(ahead + 1))
        self._asked: deque[Batch] = deque()
        self._sent: deque[tuple[Batch, Any]] = deque()
        self._held: Batch | None = None
        self._closed = False
        self.waited = 0.0
        """Seconds that ``wait`` and ``consume`` had to wait in all: what was not hidden behind the computation."""

    def start(self) -> None:
        """Ask for one more batch."""
        self._require_open()
        if self.started >= self.ahead:
            raise MemlaneError(
                f"{self.ahead} batches are started already; consume one first, or make it with more ahead"
            )
        self.sampler.require_open()
        self.sampler.native.start(self._free[0].block, self.beta, self.sampler.threads)
        self._asked.append(self._free.popleft())

    @property
    def started(self) -> int:
        """Batches that were asked for and not consumed."""
        return len(self._asked) + len(self._sent)

    def ready(self) -> bool:
        """Whether ``consume`` would not have to wait."""
        return bool(self._sent) or (bool(self._asked) and self.sampler.native.ready())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the batch that was started first: until ``timeout`` (``WaitTimeout``)."""
        self._require_open()
        if self._sent:
            return
        if not self._asked:
            raise MemlaneError("no batch was started; call start() before wait() or consume()")
        begin = time.perf_counter()
        try:
            self._send(timeout)
        finally:
            self.waited += time.perf_counter() - begin

    def consume(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The batch that was started first. On the CPU its tensors are views that the pipeline draws into again after
        the next ``consume``: clone what must stay."""
        self.wait(timeout)
        batch, sent = self._sent.popleft()
        if self._held is not None:
            self._free.append(self._held)
        self._held = batch
        # What is drawn already goes on its way to the device while this one is learned from.
        if self._asked and self.sampler.native.ready():
            self._send(None)
        return self._transfer.arrive(sent)

    def _send(self, timeout: float | None) -> None:
        try:
            drawn = self.sampler.native.take(timeout)
        except BaseException:
            # Over for the drawer, if it failed; Ctrl-C leaves it as it is.
            while len(self._asked) > self.sampler.native.started():
                self._free.append(self._asked.popleft())
            raise
        self._require_open()  # another thread may have closed it
        if not drawn:
            if not self.sampler.native.started():
                raise MemlaneError("the batch was started by the process that forked this one; start() one here")
            raise WaitTimeout(f"waited {timeout} s for a batch of {self.batch_size} rows to be drawn")
        batch = self._asked.popleft()
        try:
            self._sent.append((batch, self._transfer.send(batch)))
        except BaseException:
            self._free.append(batch)
            raise

    def close(self) -> None:
        """End the thread; what was started is not drawn any more. Again is harmless."""
        if not self._closed:
            self._closed = True
            self.sampler.native.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise MemlaneError("the pipeline was used after close()")
