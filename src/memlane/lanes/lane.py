"""Lane: a structure in a segment of its own. What all lanes have in common: a description inside, and an end.

The segment carries the layout of the lane's content as bytes, so that whoever attaches or unpickles needs nothing else;
and nothing of it is trusted before the whole segment is what such a lane would have made.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import numpy as np

from memlane.core import Layout, LayoutError, Segment, SegmentError
from memlane.core.layout import FieldSpec


def as_layout(layout: Layout | Mapping[str, FieldSpec]) -> Layout:
    return layout if isinstance(layout, Layout) else Layout(layout)


class Lane(ABC):
    """The base of ring, weights, statistics and replay. Subclasses say how their segment is laid out and bind their
    native handle."""

    segment: Segment
    layout: Layout
    """The layout of the content: of one slot, of one version."""

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
            self._open(segment, layout)
        except BaseException:
            segment.close()
            raise

    @classmethod
    def attach(cls, name: str, *, layout: Layout | Mapping[str, FieldSpec] | None = None) -> Self:
        """The lane that another process made under ``name``. With ``layout``, its content must have exactly that
        one."""
        lane = cls.from_segment(Segment.attach(name))
        if layout is not None and (difference := as_layout(layout).difference(lane.layout)):
            lane.close()
            raise SegmentError(f"the {cls.__name__.lower()} {name!r} has another layout: {difference}")
        return lane

    @classmethod
    def from_segment(cls, segment: Segment) -> Self:
        """The lane in a segment that was attached or unpickled. Checked before it is used."""
        kind = cls.__name__.lower()
        try:
            layout = Layout.from_bytes(segment["description"].tobytes())
            expected = cls._expected_layout(layout, [int(setting) for setting in segment["settings"]])
        except (KeyError, ValueError, IndexError, LayoutError) as error:
            raise SegmentError(f"{segment.label} is not a {kind} lane: {error}") from None
        if difference := expected.difference(segment.layout):
            raise SegmentError(f"{segment.label} is not a {kind} lane: {difference}")
        lane = cls.__new__(cls)
        lane._open(segment, layout)
        return lane

    @classmethod
    @abstractmethod
    def _expected_layout(cls, layout: Layout, settings: list[int]) -> Layout:
        """The segment that a lane of this content and these settings would have made."""

    def _open(self, segment: Segment, layout: Layout) -> None:
        self.segment = segment
        self.layout = layout
        self._bind([int(setting) for setting in segment["settings"]])

    @abstractmethod
    def _bind(self, settings: list[int]) -> None:
        """Make the native handle."""

    @staticmethod
    def _describe(layout: Layout, settings: int) -> dict[str, FieldSpec]:
        """The fields that every lane's segment begins with."""
        return {"settings": ("int64", settings), "description": ("uint8", len(layout.to_bytes()))}

    @property
    def name(self) -> str | None:
        """What ``attach`` takes; None unless the lane was made with a name."""
        return self.segment.name

    @property
    def nbytes(self) -> int:
        """What the lane takes from the machine."""
        return self.segment.nbytes

    def close(self) -> None:
        """Let the memory go; it is gone when the last process that has the lane lets go. Again is harmless."""
        self.segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).from_segment, (self.segment,))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self.layout}, in {self.segment.label}>"
