"""SharedWeightSync: a state dict, torch's or numpy's, from one learner to any number of collectors.

The preset face of ``weights.Weights``: names, shapes and dtypes are the state dict's own, bit for bit, also bfloat16,
integers, 0-d and empty tensors. Reading costs one look when nothing is new. No lock is needed: ``lock=`` is accepted,
so that callers of a locking protocol keep working, and never taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memlane.core import Layout, Peer, SegmentError, fresh_name
from memlane.lanes.tensors import Tensor, layout_of
from memlane.lanes.weights import Weights


class SharedWeightSync:
    """The latest weights. A new object has version 0; each ``write_weights`` adds 1."""

    def __init__(
        self,
        param_shapes: Mapping[str, Sequence[int]] | Layout | None = None,
        *,
        create: bool = True,
        shm_name: str | None = None,
        lock: Any = None,
    ) -> None:
        """``param_shapes``: names to shapes, float32; or a ``Layout`` for other dtypes (``from_state_dict`` makes one).
        ``create=False`` attaches by ``shm_name``; the shapes may then be left out, and must agree where given, whatever
        the dtypes and the order. A ``Layout`` must agree in all."""
        layout = param_shapes if isinstance(param_shapes, Layout) else None
        shapes = None if param_shapes is None or layout is not None else _shapes(param_shapes)
        if create:
            if shapes is not None:
                layout = Layout({name: ("float32", shape) for name, shape in shapes.items()})
            if layout is None:
                raise ValueError("param_shapes is needed to create shared weights; only attaching can do without")
            self._open(Weights(layout, name=shm_name or fresh_name("weights")), lock)
        elif shm_name is None:
            raise ValueError("create=False needs shm_name: the creator's `name`")
        else:
            weights = Weights.attach(shm_name, layout=layout or None)
            if shapes and (difference := _as_in(weights.layout, shapes).difference(weights.layout)):
                weights.close()
                raise SegmentError(f"the weights {shm_name!r} have other names or shapes: {difference}")
            self._open(weights, lock)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor], **kwargs: Any) -> SharedWeightSync:
        """Shared weights with the names, shapes and dtypes of ``state_dict``. Nothing is written yet."""
        return cls(layout_of(state_dict), **kwargs)

    def _open(self, weights: Weights, lock: Any) -> None:
        self.weights = weights
        self._lock = lock if lock is not None else _NoLock()

    @property
    def name(self) -> str:
        """What ``shm_name`` takes."""
        return self.weights.name or ""

    @property
    def version(self) -> int:
        """How often weights were written."""
        return self.weights.version

    def write_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Publish a copy of ``state_dict`` as the next version. Never waits, whatever the readers do."""
        self.weights.publish(state_dict)

    def read_weights_into(self, state_dict: Mapping[str, Tensor]) -> int:
        """Copy the latest version into the tensors of ``state_dict`` and return its number; 0 and nothing copied when
        there is none yet. What was read last into the same tensors is not copied again."""
        return self.weights.read(state_dict)[0]

    def wait_for(self, version: int, timeout: float | None = None, peers: Iterable[Peer] = ()) -> int:
        """Wait until ``version`` or a later one is there and return the latest number."""
        return self.weights.wait_for(version, timeout, peers)

    def close(self) -> None:
        """Let the memory go; the creator's ``close`` removes the name as well. Again is harmless."""
        self.weights.close()

    def cleanup(self) -> None:
        """``close``, and the name goes too, whoever made it."""
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
    """What callers of a locking protocol find as ``sync._lock`` and hand to a child: it can be taken, and guards
    nothing that needs guarding. A real one could be kept for ever by a process that is killed."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        del block, timeout
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


def _shapes(given: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(given, Mapping):
        raise TypeError(f"param_shapes must be a dict of names to shapes, or a Layout, found {given!r}")
    for name, shape in given.items():
        if not isinstance(shape, Iterable):
            raise TypeError(f"param_shapes[{name!r}] must be a shape such as (2, 3), found {shape!r}")
    return {name: tuple(shape) for name, shape in given.items()}


def _as_in(found: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """These names and shapes as a layout, in the dtypes and the order of ``found``: plain shapes say neither."""
    names = [*(name for name in found.fields if name in shapes), *(name for name in shapes if name not in found)]
    return Layout({name: (found[name].dtype if name in found else "float32", shapes[name]) for name in names})


def _from_weights(weights: Weights) -> SharedWeightSync:
    sync = SharedWeightSync.__new__(SharedWeightSync)
    sync._open(weights, None)
    return sync
