"""The memory of batches: reused when nothing refers to it any more, and never before."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memlane
from memlane import _native
from memlane.lanes import Batch, Replay, ReplaySampler
from tests.support.replays import PLAIN

ROWS = 64


@pytest.fixture
def sampler() -> Iterator[ReplaySampler]:
    with Replay(PLAIN, capacity=500) as replay:
        replay.add({"x": np.repeat(np.arange(500)[:, None], 2, axis=1)})
        yield replay.sampler(seed=0)


def address(batch: Batch) -> int:
    return batch.block.ctypes.data


# What may be left of a batch when its other parts are gone.
PARTS = {
    "the batch": lambda batch: batch,
    "a field": lambda batch: batch["x"],
    "a slice of a field": lambda batch: batch["x"][3:9, 1],
    "a view of another dtype": lambda batch: batch["x"].view(np.uint8),
    "the block": lambda batch: batch.block,
    "a memoryview": lambda batch: memoryview(batch["x"]),
    "a tensor": lambda batch: batch.torch()["x"],
    "a slice of a tensor": lambda batch: batch.torch()["x"][5:, :1],
}


@pytest.mark.parametrize("part", PARTS)
def test_memory_is_not_reused_while_any_part_of_its_batch_is_alive(sampler: ReplaySampler, part: str) -> None:
    def values() -> Any:
        return np.asarray(kept["x"] if isinstance(kept, Batch) else kept).tolist()

    kept = PARTS[part](sampler.sample(ROWS))
    before = values()
    others = [sampler.sample(ROWS) for _ in range(10)]
    assert values() == before
    assert len({address(batch) for batch in others}) == len(others)


def test_memory_is_reused_when_the_last_part_of_its_batch_is_gone(sampler: ReplaySampler) -> None:
    batch = sampler.sample(ROWS)
    where = address(batch)
    field = batch["x"][4:]
    del batch
    gc.collect()
    kept = [sampler.sample(ROWS)]
    assert address(kept[0]) != where
    del field
    kept.append(sampler.sample(ROWS))
    assert address(kept[1]) == where


# On CPython 3.14 sys.getrefcount returns one less than before, because variables borrow references.
def test_memory_in_use_is_not_reused_where_fewer_references_are_counted(
    sampler: ReplaySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: counted(thing) - 2)  # one for this function's own argument
    fields = [sampler.sample(ROWS)["x"] for _ in range(5)]
    assert len({field.ctypes.data for field in fields}) == 5


def test_no_module_counts_references() -> None:
    for file in Path(memlane.__file__).parent.rglob("*.py"):
        assert "getrefcount" not in file.read_text(), f"{file} counts references"


def test_batches_of_other_sizes_have_memory_of_their_own(sampler: ReplaySampler) -> None:
    for rows in (1, 3, 64, 3, 1, 20_000, 64, 300_000, 20_000):  # the largest has huge pages
        batch = sampler.sample(rows)
        assert batch.block.nbytes == rows * sampler.dtype.itemsize
        assert (batch["x"][:, 0] == batch["x"][:, 1]).all()


def test_a_batch_outlives_its_sampler_and_its_replay() -> None:
    with Replay(PLAIN, capacity=5) as replay:
        replay.add({"x": np.full((5, 2), 7)})
        batch = replay.sampler(seed=0).sample(3)
    del replay
    gc.collect()
    assert (batch["x"] == 7).all()


def test_threads_that_drop_batches_of_one_pool_get_no_block_twice() -> None:
    pool = _native.BlockPool()
    wrong: list[Any] = []

    def use(number: int) -> None:
        for turn in range(3000):
            array = np.frombuffer(_native.Block(pool, 4096), np.uint8)
            array[:] = number
            if turn % 7 == 0:
                threading.Event().wait(0)  # let another thread run
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_block_that_no_memory_suffices_for_is_a_memory_error() -> None:
    for nbytes in (2**62, 2**64 - 1):
        with pytest.raises(MemoryError):
            _native.Block(_native.BlockPool(), nbytes)
