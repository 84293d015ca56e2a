"""ReplayBuffer: a replay whose rows are float32 transitions of an off-policy actor-critic, next observations included.

The preset face of ``replay.Replay``. Collectors call ``add``, in as many processes as you like, and the learner
``sample``.

    >>> import numpy as np
    >>> buffer = ReplayBuffer(capacity=1000, obs_dim=3, action_dim=1, device="cpu")
    >>> step = np.ones((4, 3), np.float32)
    >>> buffer.add(step, np.ones((4, 1), np.float32), np.ones(4), 2 * step, dones=np.zeros(4), truncated=np.zeros(4))
    >>> buffer.ptr[0], buffer.size[0], sorted(buffer.sample(2))
    (4, 4, ['actions', 'dones', 'next_obs', 'obs', 'rewards', 'truncated'])
    >>> buffer.close()
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane.core import Layout
from memlane.core.layout import FieldSpec
from memlane.ipc.shared_buffer import SharedBufferBase
from memlane.lanes.replay import Replay
from memlane.lanes.sampler import ReplaySampler


def transition_layout(obs_dim: int, action_dim: int, critic_dim: int = 0) -> Layout:
    """The fields of one row."""
    for label, size, least in (("obs_dim", obs_dim, 1), ("action_dim", action_dim, 1), ("critic_dim", critic_dim, 0)):
        if size < least:
            raise ValueError(f"{label} must be {least} or more, found {size}")
    fields: dict[str, FieldSpec] = {
        "obs": ("float32", obs_dim),
        "actions": ("float32", action_dim),
        "rewards": ("float32", ()),
        "next_obs": ("float32", obs_dim),
        # Numbers, not flags: a learner multiplies by (1 - dones), which torch refuses for booleans.
        "dones": ("float32", ()),
        "truncated": ("float32", ()),
    }
    if critic_dim:
        fields |= {"critic": ("float32", critic_dim), "next_critic": ("float32", critic_dim)}
    return Layout(fields)


class ReplayBuffer(SharedBufferBase):
    """Storage is always packed rows on the CPU, and nothing is kept on the device: ``defer_gpu`` and
    ``packed_cpu_storage`` are accepted and change nothing. ``seed`` makes ``sample`` repeatable."""

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        device: str,
        defer_gpu: bool = False,
        critic_dim: int = 0,
        packed_cpu_storage: bool = False,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(Replay(transition_layout(obs_dim, action_dim, critic_dim), capacity), device)
        self.defer_gpu = defer_gpu
        self.packed_cpu_storage = packed_cpu_storage
        self._open(seed)

    def _open(self, seed: int | None) -> None:
        self._writer = self.replay.writer()
        self._seed = seed
        self._sampler: ReplaySampler | None = None

    @property
    def critic_dim(self) -> int:
        return self.replay.layout["critic"].shape[0] if "critic" in self.replay.layout else 0

    def add(
        self,
        obs: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        next_obs: ArrayLike,
        dones: ArrayLike,
        truncated: ArrayLike,
        terminal_mask: ArrayLike | None = None,
        terminal_next_obs: ArrayLike | None = None,
        critic: ArrayLike | None = None,
        next_critic: ArrayLike | None = None,
        terminal_next_critic: ArrayLike | None = None,
    ) -> None:
        """Add a batch. ``dones`` is terminated or truncated; ``truncated`` tells the two apart.

        Where ``terminal_mask`` is set, ``next_obs`` is the observation after a reset; the one before it is taken from
        ``terminal_next_obs`` (and ``terminal_next_critic``), which has a row for every row, or one for every set one.
        That happens before a row can be seen. Whatever does not fit is an error before anything is written.
        """
        rows: dict[str, ArrayLike] = {
            "obs": _numbers(obs),
            "actions": _numbers(actions),
            "rewards": _column(rewards, "rewards"),
            "next_obs": _numbers(next_obs),
            "dones": _column(dones, "dones"),
            "truncated": _column(truncated, "truncated"),
        }
        if self.critic_dim:
            if critic is None or next_critic is None:
                raise ValueError(f"the buffer has critic_dim={self.critic_dim}: critic and next_critic must be given")
            rows |= {"critic": _numbers(critic), "next_critic": _numbers(next_critic)}
        elif not (critic is None and next_critic is None and terminal_next_critic is None):
            raise ValueError("the buffer has critic_dim=0: make it with critic_dim=..., or leave the critic out")
        if terminal_mask is not None:
            mask = _flags(terminal_mask, len(_numbers(obs)))
            rows["next_obs"] = _replaced(rows["next_obs"], mask, terminal_next_obs, "terminal_next_obs")
            if self.critic_dim:
                rows["next_critic"] = _replaced(rows["next_critic"], mask, terminal_next_critic, "terminal_next_critic")
        elif terminal_next_obs is not None or terminal_next_critic is not None:
            raise ValueError("terminal observations need a terminal_mask, which says whose they are")
        self._writer.add(rows)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """``batch_size`` rows, drawn alike, as tensors on ``device``: a new copy each time. Torch's random state has no
        part in it: ``seed=`` makes draws repeatable, ``torch.manual_seed`` does not."""
        if self._sampler is None:
            self._sampler = self.replay.sampler(seed=self._seed)
        return self._sampler.sample(batch_size).torch(self.device)

    def __reduce__(self) -> tuple[object, ...]:
        # Without the seed: two processes that draw the same rows learn half as much.
        return _attached, (self.replay, self.device, self.defer_gpu, self.packed_cpu_storage)


def _attached(replay: Replay, device: str, defer_gpu: bool, packed_cpu_storage: bool) -> ReplayBuffer:
    buffer: ReplayBuffer = ReplayBuffer.__new__(ReplayBuffer)
    SharedBufferBase.__init__(buffer, replay, device)
    buffer.defer_gpu = defer_gpu
    buffer.packed_cpu_storage = packed_cpu_storage
    buffer._open(None)
    return buffer


def _numbers(given: ArrayLike) -> NDArray[Any]:
    """As an array; tensors of any device too."""
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    return np.asarray(given)


def _column(given: ArrayLike, label: str) -> NDArray[Any]:
    """One number for each row: shape [rows] or [rows, 1], flags too."""
    array = _numbers(given)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{label} must be numbers, found {array.dtype}")
    # Floats as they are: whoever stores them looks whether they fit.
    return np.ascontiguousarray(array, None if array.dtype.kind == "f" else np.float32)


def _flags(given: ArrayLike, rows: int) -> NDArray[np.bool_]:
    mask = _numbers(given)
    if mask.ndim == 2 and mask.shape[1] == 1:
        mask = mask[:, 0]
    if mask.shape != (rows,):
        raise ValueError(f"terminal_mask must have shape [{rows}], found {list(mask.shape)}")
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        raise ValueError(f"terminal_mask must be true or false for each row, found {mask.dtype} with other values")
    return mask.astype(bool)


def _replaced(given: ArrayLike, mask: NDArray[np.bool_], terminal: ArrayLike | None, label: str) -> NDArray[Any]:
    if not mask.any():
        return _numbers(given)
    if terminal is None:
        raise ValueError(f"terminal_mask is set for {int(mask.sum())} rows: {label} must be given")
    rows, last = _numbers(given), _numbers(terminal)
    if last.shape == rows.shape:
        last = last[mask]
    if last.shape != (int(mask.sum()), *rows.shape[1:]):
        raise ValueError(
            f"{label} must have shape {list(rows.shape)}, or {[int(mask.sum()), *rows.shape[1:]]} for the set rows "
            f"alone, found {list(last.shape)}"
        )
    rows = np.array(rows, np.result_type(rows, last), copy=True)
    rows[mask] = last
    return rows
