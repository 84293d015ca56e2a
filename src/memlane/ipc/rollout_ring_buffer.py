"""Shared rollout IPC ring buffer for APPO and asynchronous PPO."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from memlane.core import Layout, MemlaneError, Peer, WaitTimeout, fresh_name
from memlane.core.arguments import as_count
from memlane.core.layout import FieldSpec
from memlane.lanes.ring import Overflow, ReadSlot, Ring, WriteSlot

if TYPE_CHECKING:
    import torch


class RolloutRingBuffer:
    """A ``Ring`` whose slots are float32 rollouts of an actor-critic, of shape (num_envs, num_steps, ...).

    One object has both roles. A collector fills ``write_buffer`` and calls ``signal_write_done``; the learner calls
    ``wait_for_data``, reads (``read_numpy_views``, ``read_torch``, ``copy_read_slot_to_torch``) and calls
    ``advance_read``. Each process uses it from one thread at a time. Pass the object to a child process as an argument;
    an unrelated process attaches with ``create=False`` and the creator's ``name`` as ``shm_name_prefix``.

        >>> with RolloutRingBuffer(num_envs=2, num_steps=3, obs_dim=4, action_dim=1) as ring:
        ...     for array in ring.write_buffer.values():
        ...         array[:] = 1
        ...     ring.signal_write_done(policy_version=7)
        ...     ring.wait_for_data(timeout=5)
        ...     print(ring.available(), float(ring.read_numpy_views()["obs"].sum()))
        ...     ring.advance_read()
        True
        1 24.0

    The slot being written and the slot being read are never overwritten; ``num_slots`` unread rollouts are kept besides
    them, and the oldest is dropped and counted when another one comes (``overflow="block"``: the collector waits). When
    a collector dies, its unfinished rollout is never read; when the learner dies, the rollout that it was reading can
    be read again. Pass ``peers`` to ``wait_for_data`` to get ``PeerDied`` at once instead of False after the timeout.
    """

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_dim: int,
        action_dim: int,
        *,
        critic_dim: int = 0,
        num_slots: int = 4,
        create: bool = True,
        shm_name_prefix: str | Mapping[str, str] | None = None,
        overflow: Overflow = "drop_oldest",
    ) -> None:
        layout = rollout_layout(num_envs, num_steps, obs_dim, action_dim, critic_dim)
        name = _segment_name(shm_name_prefix)
        if create:
            ring = Ring(layout, num_slots=num_slots, overflow=overflow, name=name or fresh_name("rollouts"))
        elif name is None:
            raise ValueError("create=False needs shm_name_prefix: the creator's `name`, or the prefix it was given")
        else:
            ring = Ring.attach(name, layout=layout)
            if ring.num_slots != num_slots:
                ring.close()
                raise ValueError(f"the ring {name!r} has num_slots={ring.num_slots}, expected {num_slots}")
        self._open(ring)

    def _open(self, ring: Ring) -> None:
        self.ring = ring
        self._drop_slots()
        self._write_ptr, self._read_ptr = Counter(ring, "written"), Counter(ring, "read")
        _buffers.add(self)

    def _drop_slots(self) -> None:
        self._writing: WriteSlot | None = None
        self._write_buffer: dict[str, NDArray[Any]] = {}
        self._reading: ReadSlot | None = None

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def name(self) -> dict[str, str]:
        """The name of the shared memory of each field: the same for all."""
        return dict.fromkeys(self.slot_shapes, self.ring.name or "")

    @property
    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of a rollout."""
        return {field.name: field.shape for field in self.ring.layout}

    @property
    def sync_primitives(self) -> tuple[Counter, Counter]:
        """The counters of rollouts written and read, as ``attach_sync_primitives`` expects them."""
        return self._write_ptr, self._read_ptr

    def attach_sync_primitives(self, write_ptr: Any, read_ptr: Any) -> None:
        """Check the arguments and do nothing else: the counters are part of the ring.

        Exists for callers that pass the counters to the other process separately.
        """
        for role, pointer in (("write_ptr", write_ptr), ("read_ptr", read_ptr)):
            if not isinstance(pointer, Counter):
                raise TypeError(
                    f"{role} must be one of the creator's sync_primitives, found {type(pointer).__name__}; other "
                    "counters would never change"
                )

    def counters(self) -> dict[str, int]:
        """Return counts since the ring was created; see ``Ring.counters``."""
        return self.ring.counters()

    # ----------------------------------------------------------------------------------------------------- writing

    @property
    def write_slot(self) -> int:
        """Index of the slot being written, which is claimed if none is. At most ``num_slots + 1``."""
        return self._claimed().index

    @property
    def write_buffer(self) -> dict[str, NDArray[Any]]:
        """Arrays of the slot being written. Fill them in place, then call ``signal_write_done``."""
        self._claimed()
        return self._write_buffer

    def signal_write_done(self, *, policy_version: int = 0) -> None:
        """Hand the rollout to the learner. ``policy_version`` is that of the weights used."""
        if self._writing is None:
            raise MemlaneError("there is nothing to signal: fill write_buffer first")
        writing, self._writing, self._write_buffer = self._writing, None, {}
        writing.commit(policy_version=policy_version)

    def _claimed(self) -> WriteSlot:
        if self._writing is None:
            self._writing = self.ring.writer().claim()
            self._write_buffer = dict(self._writing)
        return self._writing

    # ----------------------------------------------------------------------------------------------------- reading

    def available(self) -> int:
        """Return the number of rollouts that can be read, the current one included; at most ``num_slots``."""
        return min(self.ring.unread + (self._reading is not None), self.ring.num_slots)

    def wait_for_data(self, timeout: float | None = 60.0, *, peers: Iterable[Peer] = ()) -> bool:
        """Wait until a rollout can be read and return True, or False after ``timeout`` seconds.

        A negative timeout is 0. With ``peers``, the death of one of them raises ``PeerDied`` at once.
        """
        if self._reading is None:
            if timeout is not None:
                timeout = max(timeout, 0)
            try:
                self._reading = self.ring.reader().take(timeout, peers)
            except WaitTimeout:
                return False
        return True

    @property
    def read_slot(self) -> int:
        """Index of the slot being read, which holds the oldest complete rollout. At most ``num_slots + 1``."""
        return self._taken().index

    def read_numpy_views(self) -> dict[str, NDArray[Any]]:
        """Return read-only views of the rollout being read. Copy what must outlive ``advance_read``."""
        return dict(self._taken())

    def copy_read_slot_to_torch(self, destination: dict[str, torch.Tensor]) -> None:
        """Copy the rollout being read into tensors of the same names and shapes, of dtype float32."""
        import torch

        views = self.read_numpy_views()
        for field, view in views.items():
            if field not in destination:
                raise KeyError(f"destination has no field {field!r}; expected {list(views)}")
            tensor = destination[field]
            if tuple(tensor.shape) != view.shape:
                raise ValueError(f"destination[{field!r}] must have shape {view.shape}, found {tuple(tensor.shape)}")
            if tensor.dtype != torch.float32:
                raise TypeError(f"destination[{field!r}] must have dtype torch.float32, found {tensor.dtype}")
        for field in views:
            destination[field].copy_(self._as_tensor(field))

    def read_torch(self, device: str) -> dict[str, torch.Tensor]:
        """Return the rollout being read as new tensors on ``device``."""
        self._taken()
        # copy=True: without it, .to() to the same device returns the shared memory itself.
        return {field: self._as_tensor(field).to(device, copy=True) for field in self.slot_shapes}

    def advance_read(self) -> None:
        """Release the rollout being read."""
        reading = self._taken()
        self._reading = None
        reading.release()

    def _taken(self) -> ReadSlot:
        if self._reading is None and not self.wait_for_data(0):
            raise MemlaneError("the ring is empty: there is no rollout to read; call wait_for_data first")
        assert self._reading is not None
        return self._reading

    def _as_tensor(self, field: str) -> torch.Tensor:
        """Return a field of the rollout being read as a tensor over the shared memory, to copy from.

        Not made from the read-only view, because torch warns about read-only arrays.
        """
        import torch

        mapping, base = self.ring.window(self._taken().index)
        spec = self.ring.layout[field]
        count = spec.nbytes // spec.dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=torch.float32, count=count, offset=base + spec.offset)
        return flat.view(spec.shape)

    # ------------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Release the slots and the mapping of this process. The creator's ``close`` also removes the name.

        Calling it again has no effect.
        """
        if not self.ring.segment.closed:
            if self._writing is not None:
                self._writing.release()
            if self._reading is not None:
                self._reading.release()
        self._drop_slots()
        self.ring.close()

    def cleanup(self) -> None:
        """Close the buffer and remove its name, also in a process that did not create it."""
        if not self.ring.segment.closed:
            self.ring.segment.unlink()
        self.close()

    def __enter__(self) -> RolloutRingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (_from_ring, (self.ring,))


_buffers: weakref.WeakSet[RolloutRingBuffer] = weakref.WeakSet()


def _drop_slots_in_child() -> None:
    """Forget the slots that a forked child inherits: they belong to its parent."""
    for buffer in _buffers:
        buffer._drop_slots()


os.register_at_fork(after_in_child=_drop_slots_in_child)


class Counter:
    """A counter of a ring as an object with ``value``. It can be passed to other processes."""

    def __init__(self, ring: Ring, counter: str) -> None:
        self._ring = ring
        self._counter = counter

    @property
    def value(self) -> int:
        """The count."""
        return self._ring.counters()[self._counter]

    def __repr__(self) -> str:
        return f"<{self._counter}: {self.value}>"


def rollout_layout(num_envs: int, num_steps: int, obs_dim: int, action_dim: int, critic_dim: int = 0) -> Layout:
    """Return the fields of one rollout of a ``RolloutRingBuffer``."""
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "obs_dim": obs_dim, "action_dim": action_dim}
    for argument, size in sizes.items():
        as_count(argument, size, 1)
    if critic_dim < 0:
        raise ValueError(f"critic_dim must be 0 (no critic observation) or more, found {critic_dim}")
    as_count("critic_dim", critic_dim, 0)
    steps = (num_envs, num_steps)
    fields: dict[str, FieldSpec] = {
        "obs": ("float32", (*steps, obs_dim)),
        "actions": ("float32", (*steps, action_dim)),
        "log_probs": ("float32", steps),
        "rewards": ("float32", steps),
        "dones": ("float32", steps),
        "truncated": ("float32", steps),
        "last_obs": ("float32", (num_envs, obs_dim)),
    }
    if critic_dim:
        fields["critic"] = ("float32", (*steps, critic_dim))
        fields["last_critic"] = ("float32", (num_envs, critic_dim))
    return Layout(fields)


def _segment_name(prefix: str | Mapping[str, str] | None) -> str | None:
    if prefix is None or isinstance(prefix, str):
        return prefix
    if not isinstance(prefix, Mapping):
        raise TypeError(f"shm_name_prefix must be a name or the `name` of a RolloutRingBuffer, found {prefix!r}")
    names = set(prefix.values())
    if len(names) != 1:
        raise ValueError(f"shm_name_prefix must be a name or the `name` of a RolloutRingBuffer, found {dict(prefix)}")
    return names.pop()


def _from_ring(ring: Ring) -> RolloutRingBuffer:
    buffer = RolloutRingBuffer.__new__(RolloutRingBuffer)
    buffer._open(ring)
    return buffer
