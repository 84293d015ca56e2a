"""Limiter: keep the ratio of sampled to added transitions of a replay near a target."""

from __future__ import annotations

from dataclasses import dataclass

from memlane.core.arguments import as_count, is_finite_number


@dataclass(frozen=True)
class Limiter:
    """The ``limiter`` of a ``Replay``: block the side that is ahead, so that ``ratio`` samples are drawn per insert.

    Sampling blocks until ``min_size`` transitions are stored. From then on ``ReplayWriter.add`` blocks while writers
    are more than ``error_buffer`` samples ahead, and ``ReplaySampler.sample`` blocks while samplers are.

        >>> import numpy as np
        >>> from memlane.core import WaitTimeout
        >>> from memlane.lanes import Replay
        >>> with Replay({"x": ("int64", ())}, capacity=100, limiter=Limiter(ratio=2.0, min_size=10)) as replay:
        ...     _ = replay.add({"x": np.arange(3)})
        ...     try:
        ...         replay.sampler().sample(4, timeout=0.01)
        ...     except WaitTimeout:
        ...         print("fewer than min_size transitions")
        fewer than min_size transitions
    """

    ratio: float
    """Samples drawn per transition added (Reverb's ``samples_per_insert``)."""
    min_size: int = 1
    """Transitions that must be stored before the first sample."""
    error_buffer: float | None = None
    """Largest lead of either side, in samples. At least half of (rows of an ``add`` x ratio + rows of a batch);
    None: ``ratio`` times ``min_size``, and at least ``ratio`` times 1000."""

    def __post_init__(self) -> None:
        if not (is_finite_number(self.ratio) and self.ratio > 0):
            raise ValueError(f"ratio must be a number of samples per transition, above 0, found {self.ratio!r}")
        as_count("min_size", self.min_size, 1)
        if self.error_buffer is not None and not (is_finite_number(self.error_buffer) and self.error_buffer > 0):
            raise ValueError(f"error_buffer must be above 0, found {self.error_buffer!r}")

    @property
    def slack(self) -> float:
        """The ``error_buffer`` in use: the given one, or the default."""
        return float(self.error_buffer if self.error_buffer is not None else self.ratio * max(self.min_size, 1000))
