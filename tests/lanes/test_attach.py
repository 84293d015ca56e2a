"""Attaching to a lane: what its segment says about itself is read once, checked, and used from that copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane import _native
from memlane.core import Layout, Segment, SegmentError, fresh_name
from memlane.ipc import Ring, Weights
from memlane.lanes import Stats
from tests.support.lanes import second_mapping

LARGE = {"x": ("float32", 2**18)}


@pytest.mark.parametrize(
    ("make", "settings", "found"),
    [
        (lambda name: Ring(LARGE, num_slots=3, name=name), [1, 1], lambda ring: (ring.num_slots, ring.overflow)),
        (lambda name: Weights(LARGE, name=name), [8], lambda weights: weights.publish({"x": np.ones(2**18, "f4")})),
        (lambda name: Stats(3, places=4, name=name), [64], lambda stats: stats.merged().count),
    ],
    ids=["ring", "weights", "stats"],
)
def test_settings_that_change_after_their_check_are_not_used(
    make: Callable[[str], Any], settings: list[int], found: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another process wrote at the worst instant: between the check of the settings and their use."""
    with make(fresh_name("lane")) as lane:
        expected = found(lane)
        check = type(lane)._expected_layout
        words = second_mapping(lane.segment, "settings")

        def check_then_change(layout: Layout, checked: list[int]) -> Layout:
            result = check(layout, checked)
            words[:] = settings
            return result

        monkeypatch.setattr(type(lane), "_expected_layout", check_then_change)
        with type(lane).attach(lane.name) as attached:
            assert type(found(attached)) is type(expected)
            if isinstance(lane, Ring):
                assert found(attached) == expected
            if isinstance(lane, Stats):
                assert len(attached._places) == 4


@pytest.mark.parametrize(("count", "stride"), [(2**57, 128), (2**58 + 1, 64), (-1, 128), (0, 128), (1, 0)])
def test_a_number_of_slots_whose_product_wraps_around_is_refused(count: int, stride: int) -> None:
    with Segment.create({"x": ("uint8", 8192)}) as segment:
        mapping, base = segment.window(0, 8192, writeable=True)
        with pytest.raises(SegmentError, match=r"the ring needs \d+ blocks of \d+ bytes, but its mapping has 12288"):
            _native.Ring(mapping, base, base + 512, count, stride, 1, True, "the ring", segment.layout, None)


@pytest.mark.parametrize(("count", "stride"), [(4, 2**62), (8, 2**61 + 64), (-1, 64), (0, 64), (9, 64), (1, 64)])
def test_a_number_of_buffers_whose_product_wraps_around_is_refused(count: int, stride: int) -> None:
    with Segment.create({"x": ("uint8", 8192)}) as segment:
        mapping, base = segment.window(0, 8192, writeable=True)
        with pytest.raises(SegmentError, match=r"the weights needs .*(blocks of|2 to 8 buffers)"):
            _native.Weights(mapping, base, base + 512, count, stride, "the weights")


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "int64", "V8", "S8", "U2", "complex128"])
def test_a_segment_with_settings_of_another_kind_is_no_lane(dtype: str, shape: tuple[int, ...]) -> None:
    layout = Layout(LARGE)
    description = np.frombuffer(layout.to_bytes(), np.uint8)
    fields = {"settings": (dtype, shape), "description": ("uint8", len(description))}
    with Segment.create(fields) as segment:
        segment["description"][:] = description
        segment["settings"][:] = np.frombuffer(bytes([255]) * segment["settings"].nbytes, dtype).reshape(shape)
        with pytest.raises(SegmentError, match="is not a ring lane"):
            Ring.from_segment(segment)
