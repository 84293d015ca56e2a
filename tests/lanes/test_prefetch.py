"""Replay pipelines: start, ready, wait, consume; what is drawn while nobody asks, and how errors and ends arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memlane.core import MemlaneError, NothingToSample, SegmentClosed, WaitTimeout
from memlane.ipc import Batch, Limiter, Replay, ReplayPipeline
from memlane.lanes.prefetch import CpuTransfer, CudaTransfer, transfer_to
from tests.support.processes import wait_for

X = {"x": ("int64", 3)}


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(X, capacity=100) as replay:
        replay.add({"x": np.repeat(np.arange(50), 3).reshape(50, 3)})
        yield replay


@pytest.fixture
def pipeline(replay: Replay) -> Iterator[ReplayPipeline]:
    with ReplayPipeline(replay.sampler(seed=1), batch_size=8) as pipeline:
        yield pipeline


def threads() -> list[str]:
    """Of this process, those that draw ahead."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name == "memlane-sampler"]


# ---------------------------------------------------------------------------------------------------------------- moves


def test_a_batch_that_was_started_can_be_consumed(pipeline: ReplayPipeline) -> None:
    pipeline.start()
    batch = pipeline.consume(timeout=20)
    assert (batch["x"].dtype, tuple(batch["x"].shape)) == (torch.int64, (8, 3))
    assert (batch["x"] == batch["x"][:, :1]).all()


def test_a_pipeline_draws_what_its_sampler_would(replay: Replay, pipeline: ReplayPipeline) -> None:
    plain = replay.sampler(seed=1)
    for _ in range(5):
        pipeline.start()
        assert pipeline.consume(timeout=20)["x"].tolist() == plain.sample(8)["x"].tolist()


def test_a_batch_gets_ready_while_the_learner_does_something_else(pipeline: ReplayPipeline) -> None:
    """Nobody waits for the batch, and yet it comes: that is the overlap."""
    assert not pipeline.ready()
    pipeline.start()
    assert wait_for(pipeline.ready)
    pipeline.consume(timeout=0)
    assert not pipeline.ready()


def test_the_next_batch_is_drawn_while_the_learner_holds_the_last(replay: Replay, pipeline: ReplayPipeline) -> None:
    pipeline.start()
    held = pipeline.consume(timeout=20)
    before = held["x"].clone()
    pipeline.start()
    assert wait_for(lambda: replay.counters()["sampled"] == 16)
    assert torch.equal(held["x"], before)


def test_nothing_is_drawn_that_was_not_started(replay: Replay, pipeline: ReplayPipeline) -> None:
    assert replay.counters()["sampled"] == 0
    pipeline.start()
    pipeline.consume(timeout=20)
    assert (replay.counters()["sampled"], pipeline.started) == (8, 0)


def test_wait_leaves_the_batch_for_consume(pipeline: ReplayPipeline) -> None:
    pipeline.start()
    pipeline.wait(timeout=20)
    pipeline.wait(timeout=0)
    assert (pipeline.ready(), pipeline.started) == (True, 1)
    pipeline.consume(timeout=0)


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_no_duration_is_refused_whether_or_not_there_is_a_wait(
    pipeline: ReplayPipeline, timeout: Any, error: type[Exception]
) -> None:
    pipeline.start()
    for move in (pipeline.wait, pipeline.consume):
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds"):
            move(timeout=timeout)
    pipeline.wait(timeout=20)
    for move in (pipeline.wait, pipeline.consume):
        with pytest.raises(error, match=r"timeout must be None .* or a number of seconds"):
            move(timeout=timeout)
    assert pipeline.started == 1


def test_what_was_not_started_cannot_be_waited_for(pipeline: ReplayPipeline) -> None:
    for move in (pipeline.wait, pipeline.consume):
        with pytest.raises(MemlaneError, match=r"no batch was started; call start\(\) before"):
            move()


def test_no_more_can_be_started_than_fit_ahead(pipeline: ReplayPipeline) -> None:
    pipeline.start()
    with pytest.raises(MemlaneError, match="1 started batches, as many as ahead=1 allows; consume one first"):
        pipeline.start()
    assert pipeline.started == 1


def test_several_batches_can_be_ahead_and_come_in_order(replay: Replay) -> None:
    plain = replay.sampler(seed=1)
    with ReplayPipeline(replay.sampler(seed=1), batch_size=8, ahead=3) as pipeline:
        for _ in range(3):
            pipeline.start()
        with pytest.raises(MemlaneError, match="3 started batches"):
            pipeline.start()
        for _ in range(6):
            assert pipeline.consume(timeout=20)["x"].tolist() == plain.sample(8)["x"].tolist()
            pipeline.start()
        assert pipeline.started == 3


def test_all_batches_ahead_get_ready_without_being_asked_for(replay: Replay) -> None:
    with ReplayPipeline(replay.sampler(seed=1), batch_size=8, ahead=4) as pipeline:
        for _ in range(4):
            pipeline.start()
        assert wait_for(lambda: replay.counters()["sampled"] == 32)


@pytest.mark.parametrize("arguments", [{"ahead": 0}, {"batch_size": 0}, {"device": "tpu:0"}])
def test_a_pipeline_that_cannot_be_is_refused(replay: Replay, arguments: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"ahead must|batch_size must|device must be 'cpu', 'cuda' or 'cuda:<n>', found 'tpu:0'"
    ):
        ReplayPipeline(replay.sampler(seed=1), **{"batch_size": 8, **arguments})


def test_the_power_of_the_weights_goes_to_the_sampler() -> None:
    with Replay({"x": ("int64", ())}, capacity=4, alpha=1.0) as replay:
        replay.add({"x": np.arange(4)})
        replay.update_priorities(np.arange(1, 5), np.arange(1.0, 5.0))
        with ReplayPipeline(replay.sampler(seed=1), 16, beta=0.0) as pipeline:
            pipeline.start()
            assert pipeline.consume(timeout=20)["weight"].tolist() == [1.0] * 16


def test_sequences_come_in_their_shape() -> None:
    row = {"reward": ("float32", ()), "terminated": (bool, ()), "truncated": (bool, ())}
    with Replay(row, capacity=9, streams=1) as replay:
        writer = replay.writer()
        for number in range(6):
            writer.add({"reward": float(number), "terminated": False, "truncated": False})
        with ReplayPipeline(replay.sampler(seed=1, length=3), 5) as pipeline:
            pipeline.start()
            assert tuple(pipeline.consume(timeout=20)["reward"].shape) == (5, 3)


# -------------------------------------------------------------------------------------------------------------- staging


def test_a_consumed_batch_stays_as_it_is_until_the_next_consume(replay: Replay) -> None:
    with ReplayPipeline(replay.sampler(seed=1), batch_size=8, ahead=2) as pipeline:
        for _ in range(2):
            pipeline.start()
        held = pipeline.consume(timeout=20)
        before = held["x"].clone()
        pipeline.start()
        assert wait_for(lambda: replay.counters()["sampled"] == 24)
        assert torch.equal(held["x"], before)


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_staging_memory_is_used_again_and_again(replay: Replay, ahead: int) -> None:
    places = set()
    with ReplayPipeline(replay.sampler(seed=1), batch_size=8, ahead=ahead) as pipeline:
        for _ in range(12):
            pipeline.start()
            places.add(pipeline.consume(timeout=20)["x"].data_ptr())
    assert len(places) == ahead + 1


class Recording(CpuTransfer):
    """A device of one's own."""

    def __init__(self) -> None:
        self.staged: list[np.ndarray] = []
        self.log: list[str] = []

    def staging(self, nbytes: int) -> np.ndarray:
        self.staged.append(super().staging(nbytes))
        return self.staged[-1]

    def send(self, batch: Batch) -> Any:
        self.log.append("send")
        return {name: array.copy() for name, array in batch.items()}

    def arrive(self, sent: Any) -> dict[str, torch.Tensor]:
        self.log.append("arrive")
        return {name: torch.from_numpy(array) for name, array in sent.items()}


def test_a_transfer_of_ones_own_stages_sends_and_arrives(replay: Replay) -> None:
    transfer = Recording()
    sampler = replay.sampler(seed=1)
    with ReplayPipeline(sampler, batch_size=8, transfer=transfer) as pipeline:
        pipeline.start()
        pipeline.consume(timeout=20)
    assert [memory.nbytes for memory in transfer.staged] == [8 * sampler.dtype.itemsize] * 2
    assert transfer.log == ["send", "arrive"]


def test_where_batches_go_is_told_by_the_device() -> None:
    assert isinstance(transfer_to("cpu"), CpuTransfer)
    if torch.cuda.is_available():
        assert isinstance(transfer_to("cuda:0"), CudaTransfer)
    else:
        with pytest.raises(MemlaneError, match="device 'cuda:0' needs CUDA"):
            transfer_to("cuda:0")


# ------------------------------------------------------------------------------------------------------ errors and ends


def test_an_error_of_the_thread_reaches_the_learner_and_the_pipeline_goes_on() -> None:
    with Replay(X, capacity=10) as replay, ReplayPipeline(replay.sampler(seed=1), 4) as pipeline:
        for _ in range(3):  # oftener than there is staging memory
            pipeline.start()
            with pytest.raises(NothingToSample, match="add some first"):
                pipeline.consume(timeout=20)
        replay.add({"x": [[1, 2, 3]]})
        pipeline.start()
        assert pipeline.consume(timeout=20)["x"].tolist() == [[1, 2, 3]] * 4


class Broken(CpuTransfer):
    def send(self, batch: Batch) -> Any:
        raise RuntimeError(f"the bus is full of {len(batch)} things")


def test_an_error_on_the_way_to_the_device_reaches_the_learner(replay: Replay) -> None:
    with ReplayPipeline(replay.sampler(seed=1), 4, transfer=Broken()) as pipeline:
        for _ in range(3):
            pipeline.start()
            with pytest.raises(RuntimeError, match="the bus is full of 1 things"):
                pipeline.consume(timeout=20)


def test_a_replay_that_was_closed_reaches_the_learner_as_an_error(replay: Replay, pipeline: ReplayPipeline) -> None:
    replay.close()
    with pytest.raises(SegmentClosed):
        pipeline.start()


@pytest.fixture
def held_back() -> Iterator[Replay]:
    """Its limiter lets nothing out before there are two rows."""
    with Replay(X, capacity=10, limiter=Limiter(1.0, 2)) as replay:
        yield replay


def test_wait_and_consume_take_no_longer_than_told(held_back: Replay) -> None:
    with ReplayPipeline(held_back.sampler(seed=1), 4) as pipeline:
        pipeline.start()
        for move in (pipeline.wait, pipeline.consume):
            with pytest.raises(WaitTimeout, match=r"waited 0\.01 s for a batch of 4 rows to be drawn"):
                move(timeout=0.01)
        assert (pipeline.started, pipeline.ready()) == (1, False)


def test_what_a_limiter_held_back_comes_when_it_lets_go(held_back: Replay) -> None:
    with ReplayPipeline(held_back.sampler(seed=1), 4) as pipeline:
        pipeline.start()
        assert wait_for(lambda: held_back.counters()["held_samplers"])
        held_back.add({"x": [[1, 1, 1], [1, 1, 1]]})
        assert pipeline.consume(timeout=20)["x"].tolist() == [[1, 1, 1]] * 4


def test_close_ends_a_thread_that_a_limiter_holds_back(held_back: Replay) -> None:
    pipeline = ReplayPipeline(held_back.sampler(seed=1), 4)
    pipeline.start()
    assert wait_for(lambda: held_back.counters()["held_samplers"])
    pipeline.close()
    assert not threads()
    assert held_back.counters()["sampled"] == 0


def test_close_ends_the_wait_of_a_learner(held_back: Replay) -> None:
    pipeline = ReplayPipeline(held_back.sampler(seed=1), 4)
    pipeline.start()
    errors: list[BaseException] = []

    def learn() -> None:
        try:
            pipeline.consume(timeout=20)
        except MemlaneError as error:
            errors.append(error)

    learner = threading.Thread(target=learn)
    learner.start()
    pipeline.close()
    learner.join(20)
    assert [str(error) for error in errors] == ["the pipeline was used after close(); create another"]


def test_after_close_every_move_says_so_and_no_thread_is_left(pipeline: ReplayPipeline) -> None:
    pipeline.start()
    pipeline.close()
    pipeline.close()
    assert not threads()
    for move in (pipeline.start, pipeline.wait, pipeline.consume):
        with pytest.raises(MemlaneError, match=r"used after close\(\)"):
            move()


def test_a_pipeline_that_was_never_started_has_no_thread(replay: Replay) -> None:
    with ReplayPipeline(replay.sampler(seed=1), 4):
        assert not threads()


def test_the_seconds_that_were_not_hidden_are_counted(pipeline: ReplayPipeline) -> None:
    assert pipeline.waited == 0.0
    pipeline.start()
    pipeline.consume(timeout=20)
    assert 0 < pipeline.waited < 20
