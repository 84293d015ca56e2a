"""Lane: the base class of all lanes. A lane is a data structure that owns one segment.

The segment contains the layout of the lane's content, so a process that attaches or unpickles the lane needs nothing
else. Before a segment is used, its fields are compared with those that a lane of this class would have created. What
the segment says about itself is read once, checked, and used from that copy.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import numpy as np

from memlane.core import Layout, LayoutError, Segment, SegmentError
from memlane.core.layout import FieldSpec


def require_settings(settings: list[int], count: int) -> None:
    """Raise ``ValueError`` unless a segment has as many settings as this kind of lane stores."""
    if len(settings) != count:
        raise ValueError(f"expected {count} settings, found {len(settings)}")


def as_layout(layout: Layout | Mapping[str, FieldSpec]) -> Layout:
    """Return ``layout`` as a ``Layout``; a mapping is ``{name: (dtype, shape)}``."""
    return layout if isinstance(layout, Layout) else Layout(layout)


class Lane(ABC):
    """Base of ``Ring``, ``Weights``, ``Stats`` and ``Replay``.

    A subclass defines the layout of its segment (``_expected_layout``) and creates its native handle (``_bind``).
    """

    segment: Segment
    layout: Layout
    """The layout of the content: of one slot, one row or one version."""

    def _create(
        self,
        layout: Layout,
        segment_layout: Layout,
        name: str | None,
        settings: list[int],
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        contents = {"settings": np.array(settings, np.int64).tobytes(), "description": layout.to_bytes()}
        segment = Segment.create(segment_layout, name=name, file=file, contents=contents)
        try:
            self._open(segment, layout, settings)
        except BaseException:
            segment.close()
            raise

    @classmethod
    def attach(cls, name: str, *, layout: Layout | Mapping[str, FieldSpec] | None = None) -> Self:
        """Attach to the lane that another process created under ``name``.

        With ``layout``, the lane's content must have exactly that layout; otherwise ``SegmentError``.
        """
        lane = cls.from_segment(Segment.attach(name))
        if layout is not None and (difference := as_layout(layout).difference(lane.layout)):
            lane.close()
            raise SegmentError(f"the layout of {cls.__name__.lower()} {name!r} differs: {difference}")
        return lane

    @classmethod
    def from_segment(cls, segment: Segment) -> Self:
        """Return the lane in an attached or unpickled segment, after checking that it contains one."""
        kind = cls.__name__.lower()
        settings: list[int] = []
        try:
            layout = Layout.from_bytes(segment["description"].tobytes())
            stored = segment["settings"]
            if stored.dtype != np.int64:  # damaged text cannot even be read
                raise TypeError(f"expected settings of int64, found {stored.dtype}")
            settings = [int(setting) for setting in stored]
            expected = cls._expected_layout(layout, settings)
            difference = expected.difference(segment.layout)
        except (KeyError, ValueError, IndexError, TypeError, OverflowError, LayoutError) as error:
            difference = str(error.args[0] if error.args else error)  # str() of a KeyError adds quotes
        if difference:
            raise SegmentError(
                f"{segment.label} is not a {kind} lane: {difference}; attach to it with the class that created it"
            )
        lane = cls.__new__(cls)
        lane._open(segment, layout, settings)
        return lane

    @classmethod
    @abstractmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        """Return the layout of the segment that a lane with this content and these settings creates."""

    def _open(self, segment: Segment, layout: Layout, settings: list[int]) -> None:
        # `settings` are those that were checked: another process may have overwritten them in the segment since.
        self.segment = segment
        self.layout = layout
        self._bind(settings)
        # Here, and not at the first claim: without it, other processes would take what this one holds.
        segment.life.check()

    @abstractmethod
    def _bind(self, settings: list[int]) -> None:
        """Create the native handle."""

    @staticmethod
    def _describe(layout: Layout, settings: int) -> dict[str, FieldSpec]:
        """Return the fields at the start of every lane's segment."""
        return {"settings": ("int64", settings), "description": ("uint8", len(layout.to_bytes()))}

    @property
    def name(self) -> str | None:
        """The name to pass to ``attach``; None if the lane was created without one."""
        return self.segment.name

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the lane uses."""
        return self.segment.nbytes

    def close(self) -> None:
        """Release this process's mapping; in the process that created the lane, also remove its name.

        The memory is freed when the last process has closed the lane. Calling it again has no effect.
        """
        self.segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).from_segment, (self.segment,))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self.layout}, in {self.segment.label}>"
