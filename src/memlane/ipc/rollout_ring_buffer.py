"""RolloutRingBuffer: a ring whose slots are rollouts of an actor-critic, float32, shape (num_envs, num_steps, ...).

The preset face of ``ring.Ring`` for APPO and asynchronous PPO. One object plays both roles: ``write_buffer`` and
``signal_write_done`` in the collector, ``wait_for_data``, ``read_...`` and ``advance_read`` in the learner. The slot
that is being written and the slot that is being read belong to their process until it is done with them;
``num_slots`` unread rollouts stay readable beside them, and of more than that the oldest is dropped and counted.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from memlane.core import Layout, MemlaneError, Peer, WaitTimeout, fresh_name
from memlane.core.layout import FieldSpec
from memlane.lanes.ring import Overflow, ReadSlot, Ring, WriteSlot

if TYPE_CHECKING:
    import torch


class RolloutRingBuffer:
    """N-slot ring of rollouts. ``create=False`` with the creator's ``name`` attaches from an unrelated process; a child
    simply gets the object as an argument."""

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
        name = _one_name(shm_name_prefix)
        if create:
            ring = Ring(layout, num_slots=num_slots, overflow=overflow, name=name or fresh_name("rollouts"))
        elif name is None:
            raise ValueError("create=False needs shm_name_prefix: the creator's `name`, or the prefix it was made with")
        else:
            ring = Ring.attach(name, layout=layout)
            if ring.num_slots != num_slots:
                ring.close()
                raise ValueError(f"the ring {name!r} has num_slots={ring.num_slots}, expected {num_slots}")
        self._open(ring)

    def _open(self, ring: Ring) -> None:
        self.ring = ring
        self._forget()
        self._write_ptr, self._read_ptr = Counter(ring, "written"), Counter(ring, "read")
        _here.add(self)

    def _forget(self) -> None:
        self._writing: WriteSlot | None = None
        self._write_buffer: dict[str, NDArray[Any]] = {}
        self._reading: ReadSlot | None = None

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def name(self) -> dict[str, str]:
        """For each field, the name of the shared memory that it lies in: one for all."""
        return dict.fromkeys(self.slot_shapes, self.ring.name or "")

    @property
    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of one rollout."""
        return {field.name: field.shape for field in self.ring.layout}

    @property
    def sync_primitives(self) -> tuple[Counter, Counter]:
        """Rollouts written and read since the start; the pair that ``attach_sync_primitives`` takes."""
        return self._write_ptr, self._read_ptr

    def attach_sync_primitives(self, write_ptr: Any, read_ptr: Any) -> None:
        """Accepted so that callers of the two-object protocol keep working: here the counters lie in the ring
        itself."""
        for role, pointer in (("write_ptr", write_ptr), ("read_ptr", read_ptr)):
            if not isinstance(pointer, Counter):
                raise TypeError(
                    f"{role} must be one of the creator's sync_primitives, found {type(pointer).__name__}; counters of "
                    "your own would never move"
                )

    def counters(self) -> dict[str, int]:
        """What happened since the start; see ``Ring.counters``."""
        return self.ring.counters()

    # ----------------------------------------------------------------------------------------------------- writing

    @property
    def write_slot(self) -> int:
        """The slot that is being written; claimed at the first look. A ring that drops has two slots to spare, for the
        writer and the reader: it goes up to ``num_slots + 1``."""
        return self._claimed().index

    @property
    def write_buffer(self) -> dict[str, NDArray[Any]]:
        """The fields of the slot that is being written: fill them in place, then call ``signal_write_done``."""
        self._claimed()
        return self._write_buffer

    def signal_write_done(self, *, policy_version: int = 0) -> None:
        """The rollout is complete: readers may have it."""
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
        """Rollouts that can be read, the one that is being read among them; never more than ``num_slots``."""
        return min(self.ring.unread + (self._reading is not None), self.ring.num_slots)

    def wait_for_data(self, timeout: float | None = 60.0, *, peers: Iterable[Peer] = ()) -> bool:
        """Wait until a rollout can be read; say whether one came. A time that is over (``deadline - now``) is a look.
        With ``peers``, the death of a writer is ``PeerDied`` at once instead of False after the timeout."""
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
        """The slot that is being read: the oldest complete rollout. It stays until ``advance_read``. Like
        ``write_slot``, it can be ``num_slots`` or one more."""
        return self._taken().index

    def read_numpy_views(self) -> dict[str, NDArray[Any]]:
        """The rollout that is being read, borrowed and read-only: copy what must outlive ``advance_read``."""
        return dict(self._taken())

    def copy_read_slot_to_torch(self, destination: dict[str, torch.Tensor]) -> None:
        """Copy the rollout that is being read into tensors of the same names, shapes and dtypes."""
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
        """The rollout that is being read, copied into new tensors on ``device``."""
        self._taken()
        # To another device .to() copies by itself; to the same one it would hand out the shared memory.
        return {field: self._as_tensor(field).to(device, copy=True) for field in self.slot_shapes}

    def advance_read(self) -> None:
        """Done with the rollout that is being read; the next one is the oldest complete then."""
        reading = self._taken()
        self._reading = None
        reading.release()

    def _taken(self) -> ReadSlot:
        if self._reading is None and not self.wait_for_data(0):
            raise MemlaneError("the ring is empty: there is no rollout to read; call wait_for_data first")
        assert self._reading is not None
        return self._reading

    def _as_tensor(self, field: str) -> torch.Tensor:
        """A field of the rollout that is being read as a tensor over the shared memory, to copy from. Not made from the
        read-only view: torch has no read-only tensors and warns about them."""
        import torch

        (mapping, base), _ = self.ring.windows(self._taken().index, writeable=False)
        place = self.ring.layout[field]
        count = place.nbytes // place.dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=torch.float32, count=count, offset=base + place.offset)
        return flat.view(place.shape)

    # ------------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Let go of what this object holds and of the memory; the creator's ``close`` removes the name as well. Again
        is harmless."""
        if not self.ring.segment.closed:
            if self._writing is not None:
                self._writing.release()
            if self._reading is not None:
                self._reading.release()
        self._forget()
        self.ring.close()

    def cleanup(self) -> None:
        """``close``, and the name goes too, whoever made it."""
        if not self.ring.segment.closed:
            self.ring.segment.unlink()
        self.close()

    def __enter__(self) -> RolloutRingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (_from_ring, (self.ring,))


_here: weakref.WeakSet[RolloutRingBuffer] = weakref.WeakSet()


def _leave_slots_to_the_parent() -> None:
    """A forked child inherits the objects, but the slots that they hold belong to its parent."""
    for buffer in _here:
        buffer._forget()


os.register_at_fork(after_in_child=_leave_slots_to_the_parent)


class Counter:
    """A counter of a ring as an object with ``value``, which goes into a child like the ring itself."""

    def __init__(self, ring: Ring, counter: str) -> None:
        self._ring = ring
        self._counter = counter

    @property
    def value(self) -> int:
        return self._ring.counters()[self._counter]

    def __repr__(self) -> str:
        return f"<{self._counter}: {self.value}>"


def rollout_layout(num_envs: int, num_steps: int, obs_dim: int, action_dim: int, critic_dim: int = 0) -> Layout:
    """The fields of one rollout."""
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "obs_dim": obs_dim, "action_dim": action_dim}
    for argument, size in sizes.items():
        if size < 1:
            raise ValueError(f"{argument} must be 1 or more, found {size}")
    if critic_dim < 0:
        raise ValueError(f"critic_dim must be 0 (no critic observation) or more, found {critic_dim}")
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


def _one_name(given: str | Mapping[str, str] | None) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"shm_name_prefix must be a name or the `name` of a RolloutRingBuffer, found {given!r}")
    names = set(given.values())
    if len(names) != 1:
        raise ValueError(f"shm_name_prefix must be a name or the `name` of a RolloutRingBuffer, found {dict(given)}")
    return names.pop()


def _from_ring(ring: Ring) -> RolloutRingBuffer:
    buffer = RolloutRingBuffer.__new__(RolloutRingBuffer)
    buffer._open(ring)
    return buffer
