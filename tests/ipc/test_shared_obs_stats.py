"""SharedObsNormStats: the latest value, never blocking, whatever was put and however often."""

from __future__ import annotations

import math
import multiprocessing as mp
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memlane.core import SegmentClosed
from memlane.ipc import SharedObsNormStats
from tests.support import lanes as lane_support
from tests.support.processes import METHODS, PATIENCE, ask, output_of


@pytest.fixture
def stats() -> Iterator[SharedObsNormStats]:
    with SharedObsNormStats(mp.get_context("spawn")) as stats:
        yield stats


def test_there_is_nothing_until_the_first_put(stats: SharedObsNormStats) -> None:
    assert stats.get() is None
    stats.put((np.zeros(3), np.ones(3)))
    assert stats.get() is not None


def test_what_was_put_last_is_what_is_got(stats: SharedObsNormStats) -> None:
    for number in range(5):
        stats.put((np.full(3, number), np.ones(3)))
    mean, std = stats.get()  # type: ignore[misc]
    assert (mean.tolist(), std.tolist()) == ([4, 4, 4], [1, 1, 1])


def test_get_is_none_until_something_new_is_put(stats: SharedObsNormStats) -> None:
    found = []
    for number in range(3):
        stats.put((number,))
        found.append([stats.get(), stats.get(), stats.get()])
    assert found == [[(0,), None, None], [(1,), None, None], [(2,), None, None]]


def test_the_same_value_put_again_is_new(stats: SharedObsNormStats) -> None:
    stats.put((1,))
    stats.get()
    stats.put((1,))
    assert stats.get() == (1,)


def test_latest_gives_the_value_again_and_leaves_get_alone(stats: SharedObsNormStats) -> None:
    assert stats.latest() is None
    stats.put((np.arange(3),))
    assert [stats.latest()[0].tolist() for _ in range(2)] == [[0, 1, 2]] * 2  # type: ignore[index]
    assert stats.get()[0].tolist() == [0, 1, 2]  # type: ignore[index]
    assert (stats.get(), stats.latest()[0].tolist()) == (None, [0, 1, 2])  # type: ignore[index]


@pytest.mark.parametrize("method", METHODS)
def test_what_one_process_got_is_new_to_another(stats: SharedObsNormStats, method: str) -> None:
    stats.put((5,))
    assert stats.get() == (5,)
    assert ask(lane_support.get_stats_twice, stats, method=method) == [(5,), None]
    assert stats.get() is None


def test_a_thousand_puts_without_a_reader_do_not_block(stats: SharedObsNormStats) -> None:
    """The reference hung after a few: its queue's pipe was full."""
    done = threading.Event()

    def put() -> None:
        for number in range(1000):
            stats.put((np.full(1000, float(number)), np.ones(1000)))
        done.set()

    threading.Thread(target=put, daemon=True).start()
    assert done.wait(PATIENCE)
    assert stats.get()[0][0] == 999  # type: ignore[index]


def test_what_is_got_is_the_callers_own(stats: SharedObsNormStats) -> None:
    stats.put((np.zeros(3),))
    (first,) = stats.get()  # type: ignore[misc]
    first[:] = 9
    (second,) = stats.latest()  # type: ignore[misc]
    stats.put((np.ones(3),))
    assert (first.tolist(), second.tolist()) == ([9, 9, 9], [0, 0, 0])


VALUES: dict[str, Any] = {
    "float32": (np.arange(3, dtype=np.float32), np.ones(3, np.float32)),
    "float64 and a count": (np.arange(3.0), np.ones(3), 17),
    "numbers": (1.5, 2, True),
    "numpy's scalars": (np.float32(1.5), np.float64(0.1), np.int8(-3), np.bool_(True)),
    "0-d and empty": (np.array(2.5), np.zeros((0, 3))),
    "matrices": (np.eye(3), np.arange(8).reshape(2, 2, 2)),
    "not contiguous": (np.arange(6.0).reshape(2, 3).T,),
    "nothing": (),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_tuple_comes_back_as_it_was(stats: SharedObsNormStats, value: tuple[Any, ...]) -> None:
    stats.put(value)
    found = stats.get()
    assert isinstance(found, tuple)
    assert len(found) == len(value)
    for given, got in zip(value, found, strict=True):
        assert type(got) is type(given)
        assert np.asarray(got).dtype == np.asarray(given).dtype
        assert np.array_equal(got, given)


def test_a_dict_comes_back_as_a_dict(stats: SharedObsNormStats) -> None:
    stats.put({"mean": np.arange(2.0), "count": 5})
    found = stats.get()
    assert isinstance(found, dict)
    assert (found["mean"].tolist(), found["count"]) == ([0, 1], 5)


def test_tensors_come_back_as_tensors(stats: SharedObsNormStats) -> None:
    torch = pytest.importorskip("torch")
    stats.put((torch.arange(3.0), torch.ones(3, requires_grad=True), torch.tensor(4)))
    mean, std, count = stats.get()  # type: ignore[misc]
    assert torch.equal(mean, torch.arange(3.0))
    assert torch.equal(std, torch.ones(3))
    assert (count.dtype, count.item()) == (torch.int64, 4)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float64", "bool", "complex64"])
def test_tensors_of_any_dtype_and_shape_come_back_bit_for_bit(
    stats: SharedObsNormStats, dtype: str, shape: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch")
    given = torch.linspace(-3, 3, math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    stats.put({"std": given, "count": 3})
    found = stats.get()["std"]  # type: ignore[call-overload, index]
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), given.reshape(-1).view(torch.uint8))


def test_tensors_that_are_not_contiguous_or_not_yet_computed_come_back_as_they_are(stats: SharedObsNormStats) -> None:
    torch = pytest.importorskip("torch")
    given = (torch.arange(6.0).reshape(2, 3).T, torch.tensor([1 + 2j]).conj())
    stats.put(given)
    assert all(torch.equal(found, one) for found, one in zip(stats.get() or (), given, strict=True))


def test_shapes_may_change_from_one_put_to_the_next(stats: SharedObsNormStats) -> None:
    for size in (3, 1000, 1, 50):
        stats.put((np.full(size, size),))
        assert stats.get()[0].tolist() == [size] * size  # type: ignore[index]


def test_a_reader_never_sees_the_shape_of_one_put_and_the_content_of_another(stats: SharedObsNormStats) -> None:
    stop = threading.Event()

    def put() -> None:
        size = 0
        while not stop.is_set():
            size = (size + 37) % 500
            stats.put((np.full(size, float(size)), size))

    thread = threading.Thread(target=put)
    thread.start()
    wrong = 0
    for _ in range(2000):
        found = stats.get()
        if found is not None:
            array, size = found
            wrong += len(array) != size or bool((array != size).any())  # type: ignore[operator]
    stop.set()
    thread.join()
    assert wrong == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_object_goes_into_a_child(method: str) -> None:
    with SharedObsNormStats(mp.get_context(method)) as stats:
        stats.put((np.arange(3.0), np.ones(3)))
        mean, _ = ask(lane_support.get_stats, stats, method=method)
        assert mean.tolist() == [0, 1, 2]


def test_a_put_in_a_child_is_got_here(stats: SharedObsNormStats) -> None:
    other = pickle.loads(pickle.dumps(stats))
    other.put((np.full(2, 8),))
    other.close()
    assert stats.get()[0].tolist() == [8, 8]  # type: ignore[index]


def test_torch_is_not_needed() -> None:
    output = output_of(
        """
        import sys
        import numpy as np
        from memlane.ipc import SharedObsNormStats
        with SharedObsNormStats(None) as stats:
            stats.put((np.ones(2), 3))
            print(stats.get(), "torch" in sys.modules)
        """
    )
    assert output == "(array([1., 1.]), 3) False\n"


def test_what_is_neither_array_nor_number_is_refused_by_name(stats: SharedObsNormStats) -> None:
    with pytest.raises(TypeError, match="statistic '1' must be an array, a tensor or a number, found str"):
        stats.put((np.zeros(1), "std"))
    assert stats.get() is None


@pytest.mark.parametrize(
    "value", [np.zeros((2, 3)), None, 1.5, "mean", iter([np.zeros(2)])], ids=lambda value: type(value).__name__
)
def test_what_is_neither_tuple_nor_dict_is_refused(stats: SharedObsNormStats, value: Any) -> None:
    """An array was taken for a tuple of its rows."""
    expected = f"must be a tuple such as (mean, std), or a dict, found {type(value).__name__}; put a single one"
    with pytest.raises(TypeError, match=re.escape(expected)):
        stats.put(value)
    assert stats.get() is None


def test_a_bare_tensor_is_refused_too(stats: SharedObsNormStats) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="found Tensor; put a single one as"):
        stats.put(torch.zeros(2, 3))


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with SharedObsNormStats(capacity_bytes=64) as stats:
        with pytest.raises(ValueError, match="content of the statistics takes 832 bytes, there is room for 64"):
            stats.put((np.zeros(100),))
        stats.put((np.zeros(8),))
        assert stats.get()[0].shape == (8,)  # type: ignore[index]


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes must be 1 or more, found 0"):
        SharedObsNormStats(capacity_bytes=0)


USES: dict[str, Callable[[SharedObsNormStats], object]] = {
    "put": lambda stats: stats.put((np.zeros(1),)),
    "get": lambda stats: stats.get(),
    "latest": lambda stats: stats.latest(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_close_is_an_error(use: Callable[[SharedObsNormStats], object]) -> None:
    stats = SharedObsNormStats()
    stats.put((np.zeros(1),))
    stats.close()
    stats.close()
    with pytest.raises(SegmentClosed):
        use(stats)
