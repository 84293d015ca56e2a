"""Weights: any layout, versions that only grow, reads of one version, and waits that end."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memlane.core import (
    SIGNAL,
    Layout,
    PeerDied,
    Segment,
    SegmentClosed,
    SegmentError,
    WaitTimeout,
    fresh_name,
)
from memlane.ipc import Ring, Weights, layout_of
from tests.support import lanes as lane_support
from tests.support.payloads import CHECKED, Payload, whole
from tests.support.processes import METHODS, PATIENCE, PROMISE, ask, child, dead_peer, output_of, within

LAYOUT = {"w": ("float32", (2, 3)), "steps": ("int64", ())}


@pytest.fixture
def weights() -> Iterator[Weights]:
    with Weights(LAYOUT) as weights:
        yield weights


@pytest.fixture
def board() -> Iterator[Segment]:
    with Segment.create({"go": (SIGNAL, ())}) as board:
        yield board


def tensors(value: float) -> dict[str, Any]:
    return {"w": np.full((2, 3), value, np.float32), "steps": np.array(int(value))}


def content(arrays: Mapping[str, Any]) -> tuple[float, int]:
    (value,) = set(arrays["w"].ravel().tolist())
    return value, int(arrays["steps"])


# ------------------------------------------------------------------------------------------------------------- versions


def test_there_is_no_version_before_the_first_publication(weights: Weights) -> None:
    out = tensors(-1)
    assert (weights.version, weights.read(out)[0]) == (0, 0)
    assert content(out) == (-1, -1)


def test_each_publication_is_the_next_version(weights: Weights) -> None:
    assert [weights.publish(tensors(value)) for value in range(5)] == [1, 2, 3, 4, 5]
    assert weights.version == 5


def test_what_is_read_is_the_latest_version(weights: Weights) -> None:
    for value in range(7):
        weights.publish(tensors(value))
    version, arrays = weights.read()
    assert (version, content(arrays)) == (7, (6, 6))


def test_what_was_published_is_a_copy(weights: Weights) -> None:
    mine = tensors(1)
    weights.publish(mine)
    mine["w"][:] = 99
    assert content(weights.read()[1]) == (1, 1)


def test_the_same_arrays_can_be_published_with_new_content(weights: Weights) -> None:
    mine = tensors(1)
    weights.publish(mine)
    mine["w"][:], mine["steps"][...] = 2, 2
    assert weights.publish(mine) == 2
    assert content(weights.read()[1]) == (2, 2)


def test_arrays_that_are_read_into_are_those_that_were_given(weights: Weights) -> None:
    weights.publish(tensors(3))
    out = tensors(0)
    version, same = weights.read(out)
    assert same is out
    assert (version, content(out)) == (1, (3, 3))


def test_reading_again_copies_nothing_when_nothing_is_new(weights: Weights) -> None:
    weights.publish(tensors(3))
    out = tensors(0)
    weights.read(out)
    out["w"][:], out["steps"][...] = 55, 55
    assert (weights.read(out)[0], content(out)) == (1, (55, 55))
    weights.publish(tensors(4))
    assert (weights.read(out)[0], content(out)) == (2, (4, 4))


def test_other_arrays_are_filled_even_when_nothing_is_new(weights: Weights) -> None:
    weights.publish(tensors(3))
    weights.read(tensors(0))
    out = tensors(0)
    assert (weights.read(out)[0], content(out)) == (1, (3, 3))


def test_the_order_of_the_names_does_not_matter(weights: Weights) -> None:
    weights.publish(dict(reversed(tensors(3).items())))
    out = dict(reversed(tensors(0).items()))
    weights.read(out)
    assert content(out) == (3, 3)


def test_the_counters_tell_versions_and_retries(weights: Weights) -> None:
    weights.publish(tensors(1))
    weights.read()
    assert weights.counters() == {"version": 1, "retries": 0}


# ---------------------------------------------------------------------------------------------------------- any content


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        hnp.arrays(
            dtype=st.one_of(
                hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes()
            ),
            shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_arrays_of_any_dtype_and_shape_arrive_bit_for_bit(given: dict[str, Any]) -> None:
    with Weights(layout_of(given)) as weights:
        weights.publish(given)
        out = {name: np.ones_like(array) for name, array in given.items()}
        weights.read(out)
        _, fresh = weights.read()
    for name, array in given.items():
        assert out[name].tobytes() == array.tobytes()
        assert fresh[name].tobytes() == array.tobytes()
        assert (fresh[name].dtype, fresh[name].shape) == (array.dtype, array.shape)


def test_arrays_that_are_not_contiguous_are_published_and_read() -> None:
    source, out = np.arange(12.0).reshape(3, 4)[:, ::2], np.zeros((4, 6)).T[::2, ::2]
    with Weights({"x": ("float64", (3, 2))}) as weights:
        for _ in range(3):
            source += 1
            weights.publish({"x": source})
            weights.read({"x": out})
            assert (out == source).all()


def test_numpy_scalars_can_be_published() -> None:
    with Weights({"x": ("float32", ()), "n": ("int64", ())}) as weights:
        weights.publish({"x": np.float32(2.5), "n": np.int64(7)})
        _, arrays = weights.read()
        assert (arrays["x"], arrays["n"]) == (2.5, 7)


@pytest.mark.parametrize("out", [np.float32(0), np.zeros(())], ids=["a scalar", "a locked array"])
def test_what_cannot_be_written_is_not_read_into(out: Any) -> None:
    if isinstance(out, np.ndarray):
        out = out.astype(np.float32)
        out.flags.writeable = False
    with Weights({"x": ("float32", ())}) as weights:
        weights.publish({"x": np.float32(2.5)})
        with pytest.raises(ValueError, match=re.escape("out['x'] is read-only")):
            weights.read({"x": out})


def test_many_fields_travel_in_one_version() -> None:
    """The observation normaliser is published in the same version as the weights."""
    policy = {f"layer{number}.weight": np.full((4, 4), 1.5, np.float32) for number in range(3)}
    normaliser = {"obs_norm.mean": np.arange(3.0), "obs_norm.var": np.ones(3), "obs_norm.count": np.array(10)}
    with Weights(layout_of(policy | normaliser)) as weights:
        weights.publish(policy | normaliser)
        version, arrays = weights.read()
    assert version == 1
    assert (arrays["layer2.weight"] == 1.5).all()
    assert (arrays["obs_norm.mean"].tolist(), int(arrays["obs_norm.count"])) == ([0, 1, 2], 10)


BAD = [
    ({"w": np.zeros((2, 3), np.float32)}, KeyError, "missing ['steps'], unknown []"),
    (tensors(0) | {"extra": np.zeros(1)}, KeyError, "missing [], unknown ['extra']"),
    (tensors(0) | {"w": np.zeros((3, 2), np.float32)}, ValueError, "['w'] must have shape [2, 3], found [3, 2]"),
    (tensors(0) | {"w": np.zeros(6, np.float32)}, ValueError, "['w'] must have shape [2, 3], found [6]"),
    (tensors(0) | {"w": np.zeros((2, 3))}, TypeError, "['w'] must have dtype float32, found float64"),
    (tensors(0) | {"steps": 4}, TypeError, "'steps' must be a numpy array or a torch tensor, found int"),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD)
def test_what_does_not_fit_is_refused_on_both_sides_and_changes_nothing(
    weights: Weights, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    weights.publish(tensors(1))
    with pytest.raises(error, match=re.escape(words)):
        weights.publish(given)
    with pytest.raises(error, match=re.escape(words)):
        weights.read(given)
    assert (weights.version, content(weights.read()[1])) == (1, (1, 1))


# -------------------------------------------------------------------------------------------------------------- waiting


def test_wait_for_returns_at_once_when_the_version_is_there(weights: Weights) -> None:
    weights.publish(tensors(1))
    weights.publish(tensors(2))
    assert (weights.wait_for(1, timeout=0), weights.wait_for(2, timeout=0), weights.wait_for(0, timeout=0)) == (2, 2, 2)


def test_wait_for_ends_when_another_process_publishes(board: Segment) -> None:
    with Weights(CHECKED) as weights, child(lane_support.publish_after_go, weights, board, 3):
        assert weights.version == 0
        board.signal("go").store(1)
        assert weights.wait_for(3, timeout=PATIENCE) == 3
        version, arrays = weights.read()
        assert (version, int(arrays["number"]), whole(arrays)) == (3, 2, True)


def test_wait_for_ends_with_a_timeout_that_says_what_was_missing(weights: Weights) -> None:
    weights.publish(tensors(1))
    with pytest.raises(WaitTimeout, match=r"waited 0\.02 s for version 5 of the weights of .*; the latest is 1"):
        weights.wait_for(5, timeout=0.02)


def test_wait_for_ends_with_the_death_of_a_peer(weights: Weights) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerDied, match=r"the learner .* while this process waited for version 1"):
        weights.wait_for(1, timeout=PATIENCE, peers=[dead_peer("the learner")])
    assert time.monotonic() - begin < within(PROMISE)


def test_wait_for_lets_other_threads_publish(weights: Weights) -> None:
    thread = threading.Timer(0.05, weights.publish, (tensors(1),))
    thread.start()
    assert weights.wait_for(1, timeout=PATIENCE) == 1
    thread.join()


# ----------------------------------------------------------------------------------------------- writers, readers, ends


def test_every_version_is_read_as_it_was_published() -> None:
    payload, out = Payload(), Payload().arrays
    with Weights(CHECKED) as weights:
        for number in range(20):
            weights.publish(payload.fill(number))
            version, _ = weights.read(out)
            assert (version, int(out["number"]), whole(out)) == (number + 1, number, True)


def test_more_than_one_process_may_publish(weights: Weights) -> None:
    with pickle.loads(pickle.dumps(weights)) as other:
        assert [weights.publish(tensors(1)), other.publish(tensors(2)), weights.publish(tensors(3))] == [1, 2, 3]
        assert content(other.read()[1]) == (3, 3)


@pytest.mark.parametrize("buffers", [0, 1, 9])
def test_a_number_of_buffers_that_cannot_work_is_refused(buffers: int) -> None:
    with pytest.raises(ValueError, match=f"buffers must be 2 to 8, found {buffers}"):
        Weights(LAYOUT, buffers=buffers)


@pytest.mark.parametrize("buffers", range(2, 9))
def test_any_allowed_number_of_buffers_works(buffers: int) -> None:
    with Weights(LAYOUT, buffers=buffers) as weights:
        for value in range(20):
            weights.publish(tensors(value))
        assert content(weights.read()[1]) == (19, 19)


@pytest.mark.parametrize("method", METHODS)
def test_weights_go_into_a_child_as_an_argument(weights: Weights, method: str) -> None:
    weights.publish(tensors(4))
    version, arrays = ask(lane_support.read_weights, weights, method=method)
    assert (version, content(arrays)) == (1, (4, 4))


def test_an_unrelated_process_attaches_by_name_alone() -> None:
    with Weights(LAYOUT, name=fresh_name("weights")) as weights:
        weights.publish(tensors(4))
        output = output_of(
            """
            import sys
            from memlane.ipc import Weights
            with Weights.attach(sys.argv[1]) as weights:
                version, arrays = weights.read()
                print(version, arrays["w"].sum(), arrays["steps"], "torch" in sys.modules)
            """,
            weights.name,
        )
    assert output == "1 24.0 4 False\n"


def test_attaching_with_another_layout_says_the_difference() -> None:
    with (
        Weights(LAYOUT, name=fresh_name("weights")) as weights,
        pytest.raises(SegmentError, match=r"the layout of weights '.*' differs: expected a field 'b', found only"),
    ):
        Weights.attach(weights.name or "", layout={"b": ("float32", ())})


def test_attaching_to_a_ring_is_refused() -> None:
    with Ring(LAYOUT, name=fresh_name("ring")) as ring, pytest.raises(SegmentError, match="is not a weights lane"):
        Weights.attach(ring.name or "")


def test_what_weights_take_is_known_before_they_are_made() -> None:
    layout = Layout(LAYOUT)
    with Weights(layout, buffers=4) as weights:
        assert weights.segment.layout.nbytes == Weights.segment_layout(layout, 4).nbytes


def test_weights_can_be_larger_than_2_gib() -> None:
    assert Weights.segment_layout(Layout({"experts": ("uint16", 2 * 2**30)})).nbytes > 12 * 2**30


USES: dict[str, Callable[[Weights], object]] = {
    "publish": lambda weights: weights.publish(tensors(1)),
    "read": lambda weights: weights.read(),
    "version": lambda weights: weights.version,
    "wait_for": lambda weights: weights.wait_for(1, timeout=0),
    "counters": lambda weights: weights.counters(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_close_is_an_error(use: Callable[[Weights], object]) -> None:
    weights = Weights(LAYOUT)
    mine = tensors(1)
    weights.publish(mine)
    weights.read(mine)
    weights.close()
    with pytest.raises(SegmentClosed):
        use(weights)


def test_no_use_after_close_crashes_the_process() -> None:
    output = output_of(
        """
        from memlane.ipc import Weights
        from tests.lanes.test_weights import LAYOUT, USES, tensors
        weights, mine = Weights(LAYOUT), tensors(1)
        weights.publish(mine)
        weights.read(mine)
        weights.close()
        for use in [*USES.values(), lambda weights: weights.publish(mine), lambda weights: weights.read(mine)]:
            try:
                use(weights)
            except Exception as error:
                print(type(error).__name__)
        """,
    )
    assert output.split() == ["SegmentClosed"] * (len(USES) + 2)
