"""Replay pipelines: the next batch is drawn, and on its way to the device, while the learner computes.

A ``ReplayPipeline`` has four moves: ``start`` asks for a batch, ``ready`` looks, ``wait`` waits, ``consume`` takes it.
The work is done by a thread of this process, in native code that does not hold the GIL. Where the batch goes is a
``Transfer``: ``CpuTransfer`` hands out tensors over the staging memory itself; ``CudaTransfer`` copies from pinned
memory on a stream of its own.

    >>> from memlane.ipc.replay import Replay
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

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memlane.core import MemlaneError, WaitTimeout
from memlane.ipc.batch import Batch, tensors
from memlane.ipc.replay_sampler import ReplaySampler

if TYPE_CHECKING:
    import torch

# How long the thread waits for a limiter before it looks whether it is to end.
_SLICE = 0.2


class Transfer(Protocol):
    """How a drawn batch becomes tensors on a device."""

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory to draw into."""

    def send(self, batch: Batch) -> Any:
        """Begin the way to the device; called by the pipeline's thread. What it returns goes to ``arrive``."""

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
        # The staging memory is drawn into again only when the copy is over.
        event.synchronize()
        return moved, event

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        import torch

        moved, event = sent
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
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
        self._done: deque[tuple[Batch, Any] | BaseException] = deque()
        self._changed = threading.Condition()
        self._asked = 0
        self._held: Batch | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.waited = 0.0
        """Seconds that ``consume`` had to wait in all: what was not hidden behind the computation."""

    # -------------------------------------------------------------------------------------------------------- moves

    def start(self) -> None:
        """Ask for one more batch."""
        with self._changed:
            self._require_open()
            if self._asked + len(self._done) >= self.ahead:
                raise MemlaneError(
                    f"{self.ahead} batches are started already; consume one first, or make it with more ahead"
                )
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="memlane-replay-pipeline", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def started(self) -> int:
        """Batches that were asked for and not consumed."""
        with self._changed:
            return self._asked + len(self._done)

    def ready(self) -> bool:
        """Whether ``consume`` would not have to wait."""
        with self._changed:
            return bool(self._done)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the batch that was started first: until ``timeout`` (``WaitTimeout``)."""
        begin = time.perf_counter()
        with self._changed:
            self._require_open()
            if not self._asked and not self._done:
                raise MemlaneError("no batch was started; call start() before wait() or consume()")
            if not self._changed.wait_for(lambda: self._done or self._closing, timeout):
                raise WaitTimeout(f"waited {timeout:g} s for a batch of {self.batch_size} rows to be drawn")
            self._require_open()
        self.waited += time.perf_counter() - begin

    def consume(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The batch that was started first. On the CPU its tensors are views that the pipeline draws into again after
        the next ``consume``: clone what must stay."""
        self.wait(timeout)
        with self._changed:
            found = self._done.popleft()
            if isinstance(found, BaseException):
                raise found
            batch, sent = found
            if self._held is not None:
                self._free.append(self._held)
                self._changed.notify_all()
            self._held = batch
        return self._transfer.arrive(sent)

    def close(self) -> None:
        """End the thread. Again is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closing:
            raise MemlaneError("the pipeline was used after close()")

    # ------------------------------------------------------------------------------------------------------- thread

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            result: tuple[Batch, Any] | BaseException
            try:
                drawn = self._draw(batch)
                if not drawn:
                    return
                result = (batch, self._transfer.send(batch))
            except BaseException as error:  # the learner's to see, whatever it is
                result = error
            with self._changed:
                if isinstance(result, BaseException):
                    self._free.append(batch)
                self._asked -= 1
                self._done.append(result)
                self._changed.notify_all()

    def _next(self) -> Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._asked and self._free))
            return None if self._closing else self._free.popleft()

    def _draw(self, batch: Batch) -> bool:
        """False if the pipeline is closed meanwhile."""
        while not self._closing:
            with contextlib.suppress(WaitTimeout):
                self.sampler.sample(self.batch_size, out=batch, beta=self.beta, timeout=_SLICE)
                return True
        return False
