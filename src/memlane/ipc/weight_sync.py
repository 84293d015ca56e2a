"""Shared weight synchronization for actor networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memlane.core import Layout, Peer, SegmentError, fresh_name
from memlane.lanes.tensors import Tensor, layout_of
from memlane.lanes.weights import Weights


class SharedWeightSync:
    """The latest state dict, torch's or numpy's, from a learner to any number of collectors: a ``Weights`` lane.

    Names, shapes and dtypes are those of the state dict, and values are copied bit for bit, including bfloat16,
    integers, 0-d and empty tensors. ``from_state_dict`` writes its values as version 1; each ``write_weights`` adds 1.
    Version 0 means that nothing was written, as in an object created from shapes alone.

    One process should write; any process may read, with one object per thread. Pass the object to a child process as an
    argument; an unrelated process attaches with ``create=False`` and the creator's ``name`` as ``shm_name``. No lock is
    needed: ``lock=`` is accepted for compatibility and never acquired.

        >>> import numpy as np
        >>> with SharedWeightSync.from_state_dict({"w": np.ones(3, np.float32)}) as sync:
        ...     local = {"w": np.zeros(3, np.float32)}
        ...     print(sync.read_weights_into(local), local["w"])
        ...     sync.write_weights({"w": np.full(3, 5, np.float32)})
        ...     print(sync.read_weights_into(local), local["w"])
        1 [1. 1. 1.]
        2 [5. 5. 5.]

    When the learner dies, even in the middle of ``write_weights``, the latest complete version stays readable. When a
    collector dies, nothing changes for the others.
    """

    def __init__(
        self,
        param_shapes: Mapping[str, Sequence[int]] | Layout | None = None,
        *,
        create: bool = True,
        shm_name: str | None = None,
        lock: Any = None,
    ) -> None:
        """Create shared weights, or attach to those of another process with ``create=False`` and ``shm_name``.

        ``param_shapes`` maps names to shapes of float32 tensors, or is a ``Layout`` for other dtypes
        (``from_state_dict`` creates it). When attaching it may be omitted; otherwise names and shapes must be equal,
        and for a ``Layout`` also dtypes and order.
        """
        layout = param_shapes if isinstance(param_shapes, Layout) else None
        shapes = None if param_shapes is None or layout is not None else _shapes(param_shapes)
        if create:
            if shapes is not None:
                layout = Layout({name: ("float32", shape) for name, shape in shapes.items()})
            if layout is None:
                raise ValueError("param_shapes is needed to create shared weights; omit it only with create=False")
            self._open(Weights(layout, name=shm_name or fresh_name("weights")), lock)
        elif shm_name is None:
            raise ValueError("create=False needs shm_name: the creator's `name`")
        else:
            weights = Weights.attach(shm_name, layout=layout or None)
            if shapes and (difference := _with_dtypes_of(weights.layout, shapes).difference(weights.layout)):
                weights.close()
                raise SegmentError(f"the weights {shm_name!r} have other names or shapes: {difference}")
            self._open(weights, lock)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor], **kwargs: Any) -> SharedWeightSync:
        """Create shared weights with the names, shapes and dtypes of ``state_dict`` and write its values as version 1.

        With ``create=False`` it attaches to existing weights, which must have the same names, shapes and dtypes in the
        same order, and writes nothing.
        """
        sync = cls(layout_of(state_dict), **kwargs)
        if kwargs.get("create", True):
            try:
                sync.write_weights(state_dict)
            except BaseException:
                sync.close()
                raise
        return sync

    def _open(self, weights: Weights, lock: Any) -> None:
        self.weights = weights
        self._lock = lock if lock is not None else _NoLock()

    @property
    def name(self) -> str:
        """The name of the shared memory, to pass as ``shm_name``."""
        return self.weights.name or ""

    @property
    def version(self) -> int:
        """Number of the latest version; 0 if nothing was written yet."""
        return self.weights.version

    def write_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Publish a copy of ``state_dict`` as the next version. Never waits for readers."""
        self.weights.publish(state_dict)

    def read_weights_into(self, state_dict: Mapping[str, Tensor]) -> int:
        """Copy the latest version into the tensors of ``state_dict`` and return its number.

        0: nothing was written yet and nothing was copied. If the tensors already have the latest version from the last
        call, nothing is copied.
        """
        return self.weights.read(state_dict)[0]

    def wait_for(self, version: int, timeout: float | None = None, peers: Iterable[Peer] = ()) -> int:
        """Wait until ``version`` or a later one is written and return the latest number.

        Waits at most ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).
        """
        return self.weights.wait_for(version, timeout, peers)

    def close(self) -> None:
        """Release this process's mapping. The creator's ``close`` also removes the name.

        Calling it again has no effect.
        """
        self.weights.close()

    def cleanup(self) -> None:
        """Close the weights and remove their name, also in a process that did not create them."""
        if not self.weights.segment.closed:
            self.weights.segment.unlink()
        self.close()

    def __enter__(self) -> SharedWeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (_from_weights, (self.weights,))


class _NoLock:
    """The ``_lock`` for callers that pass a lock to a child: acquiring it succeeds and does nothing.

    A real lock could be held for ever by a process that was killed.
    """

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        del block, timeout
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


def _shapes(param_shapes: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(param_shapes, Mapping):
        raise TypeError(f"param_shapes must be a dict of names to shapes, or a Layout, found {param_shapes!r}")
    for name, shape in param_shapes.items():
        if not isinstance(shape, Iterable):
            raise TypeError(f"param_shapes[{name!r}] must be a shape such as (2, 3), found {shape!r}")
    return {name: tuple(shape) for name, shape in param_shapes.items()}


def _with_dtypes_of(existing: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return a layout of these names and shapes with the dtypes and the order of ``existing``."""
    names = [*(name for name in existing.fields if name in shapes), *(name for name in shapes if name not in existing)]
    return Layout({name: (existing[name].dtype if name in existing else "float32", shapes[name]) for name in names})


def _from_weights(weights: Weights) -> SharedWeightSync:
    sync = SharedWeightSync.__new__(SharedWeightSync)
    sync._open(weights, None)
    return sync
