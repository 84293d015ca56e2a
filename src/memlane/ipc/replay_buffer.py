"""Packed shared-memory replay buffer for off-policy RL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane.core import Layout
from memlane.core.arguments import as_count
from memlane.core.layout import FieldSpec
from memlane.core.tensor_memory import require_memory
from memlane.ipc.shared_buffer import SharedBufferBase
from memlane.lanes.replay import Replay
from memlane.lanes.sampler import ReplaySampler


def transition_layout(obs_dim: int, action_dim: int, critic_dim: int = 0) -> Layout:
    """Return the fields of one row of a ``ReplayBuffer``."""
    for label, size, least in (("obs_dim", obs_dim, 1), ("action_dim", action_dim, 1), ("critic_dim", critic_dim, 0)):
        as_count(label, size, least)
    fields: dict[str, FieldSpec] = {
        "obs": ("float32", obs_dim),
        "actions": ("float32", action_dim),
        "rewards": ("float32", ()),
        "next_obs": ("float32", obs_dim),
        # float32, not bool: a learner computes 1 - dones, which torch refuses for booleans.
        "dones": ("float32", ()),
        "truncated": ("float32", ()),
    }
    if critic_dim:
        fields |= {"critic": ("float32", critic_dim), "next_critic": ("float32", critic_dim)}
    return Layout(fields)


class ReplayBuffer(SharedBufferBase):
    """A ``Replay`` whose rows are float32 transitions of an actor-critic, next observations included.

    Any number of processes may call ``add``; the learner calls ``sample``, one thread at a time. Pass the buffer to
    other processes as a ``Process`` argument.

        >>> import numpy as np
        >>> buffer = ReplayBuffer(capacity=1000, obs_dim=3, action_dim=1, device="cpu")
        >>> obs = np.ones((4, 3), np.float32)
        >>> buffer.add(obs, np.ones((4, 1), np.float32), np.ones(4), 2 * obs, dones=np.zeros(4), truncated=np.zeros(4))
        >>> buffer.ptr[0], buffer.size[0], sorted(buffer.sample(2))
        (4, 4, ['actions', 'dones', 'next_obs', 'obs', 'rewards', 'truncated'])
        >>> buffer.close()

    Rows are always stored packed on the CPU and copied to ``device`` by ``sample``: ``defer_gpu`` and
    ``packed_cpu_storage`` are accepted and have no effect. ``seed`` makes ``sample`` repeatable. When a collector dies,
    its unfinished rows are never sampled, and nothing blocks.
    """

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
        """Size of the critic observation; 0 without one."""
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
        """Add a batch of transitions. ``dones`` is ``terminated | truncated``.

        Where ``terminal_mask`` is true, ``next_obs`` is the observation after a reset, and the last observation of the
        episode is stored instead: ``terminal_next_obs`` (and ``terminal_next_critic``) has it, with a row for every
        transition or only for those in the mask. Of more transitions than the capacity, the newest stay. Everything is
        checked before anything is written.
        """
        rows: dict[str, NDArray[Any]] = {
            "obs": _as_array(obs, "obs"),
            "actions": _as_array(actions, "actions"),
            "rewards": _column(rewards, "rewards"),
            "next_obs": _as_array(next_obs, "next_obs"),
            "dones": _column(dones, "dones"),
            "truncated": _column(truncated, "truncated"),
        }
        if self.critic_dim:
            if critic is None or next_critic is None:
                raise ValueError(f"the buffer has critic_dim={self.critic_dim}: critic and next_critic must be given")
            rows |= {"critic": _as_array(critic, "critic"), "next_critic": _as_array(next_critic, "next_critic")}
        elif not (critic is None and next_critic is None and terminal_next_critic is None):
            raise ValueError("the buffer has critic_dim=0: create it with critic_dim=..., or leave the critic out")
        if terminal_mask is not None:
            mask = _as_mask(terminal_mask, len(rows["obs"]))
            rows["next_obs"] = _replace_rows(rows["next_obs"], mask, terminal_next_obs, "terminal_next_obs")
            if self.critic_dim:
                rows["next_critic"] = _replace_rows(
                    rows["next_critic"], mask, terminal_next_critic, "terminal_next_critic"
                )
        elif terminal_next_obs is not None or terminal_next_critic is not None:
            raise ValueError("terminal observations need a terminal_mask, which marks their rows")
        self._writer.add_all(rows)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Sample ``batch_size`` rows uniformly and return copies as tensors on ``device``.

        ``seed=`` of the buffer makes samples repeatable; ``torch.manual_seed`` has no effect.
        """
        if self._sampler is None:
            self._sampler = self.replay.sampler(seed=self._seed)
        elif not self._sampler.guard.owned:  # in a forked child, which must not sample the same rows as its parent
            self._sampler = self.replay.sampler()
        return self._sampler.sample(batch_size).torch(self.device)

    def __reduce__(self) -> tuple[object, ...]:
        # Without the seed: processes must not all sample the same rows.
        return _from_replay, (self.replay, self.device, self.defer_gpu, self.packed_cpu_storage)


def _from_replay(replay: Replay, device: str, defer_gpu: bool, packed_cpu_storage: bool) -> ReplayBuffer:
    buffer: ReplayBuffer = ReplayBuffer.__new__(ReplayBuffer)
    SharedBufferBase.__init__(buffer, replay, device)
    buffer.defer_gpu = defer_gpu
    buffer.packed_cpu_storage = packed_cpu_storage
    buffer._open(None)
    return buffer


def _as_array(values: ArrayLike, label: str) -> NDArray[Any]:
    """Return ``values`` as a numpy array; they may be a torch tensor on any device."""
    if hasattr(values, "detach"):
        require_memory(label, values)
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _column(values: ArrayLike, label: str) -> NDArray[Any]:
    """Return one number per row from values of shape [rows] or [rows, 1]; booleans become 0 and 1."""
    array = _as_array(values, label)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{label} must be numbers, found {array.dtype}")
    # Floats keep their dtype: the writer checks whether they fit into float32.
    return np.ascontiguousarray(array, None if array.dtype.kind == "f" else np.float32)


def _as_mask(values: ArrayLike, rows: int) -> NDArray[np.bool_]:
    mask = _as_array(values, "terminal_mask")
    if mask.ndim == 2 and mask.shape[1] == 1:
        mask = mask[:, 0]
    if mask.shape != (rows,):
        raise ValueError(f"terminal_mask must have shape [{rows}], found {list(mask.shape)}")
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        raise ValueError(f"terminal_mask must be true or false for each row, found {mask.dtype} with other values")
    return mask.astype(bool)


def _replace_rows(rows: NDArray[Any], mask: NDArray[np.bool_], terminal: ArrayLike | None, label: str) -> NDArray[Any]:
    """Return ``rows`` with those in the mask replaced by those of ``terminal``."""
    if not mask.any():
        return rows
    if terminal is None:
        raise ValueError(f"terminal_mask is set for {int(mask.sum())} rows: {label} must be given")
    last = _as_array(terminal, label)
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
