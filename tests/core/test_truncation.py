"""Files that are truncated while they are mapped, and files with holes. A named or file-backed segment cannot be sealed
against it; what memlane itself reads and writes then is an error, and not the end of the process by SIGBUS."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import SIGNAL, BudgetError, Layout, Lease, Segment, SegmentError, fresh_name
from memlane.core.header import PAGE
from memlane.ipc import Ring, Weights
from memlane.lanes import Limiter, Replay, ReplayPipeline, ReplaySampler, ReplayWriter
from tests.support.processes import FIELDS, ask, script, write_segment

DATA = {"x": np.ones(2**14, np.float32)}
LAYOUT = {"x": ("float32", 2**14)}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
        return "worked"
    except SegmentError as error:
        return str(error)


def use_ring(name: str, size: int, later_handler: bool = False) -> dict[str, str]:
    """What each call of a ring does after its file was truncated to ``size`` bytes, each with a new ring."""
    out = {"x": np.zeros(2**14, np.float32)}
    calls: dict[str, Callable[[Ring], object]] = {
        "put": lambda ring: ring.writer().put(DATA, timeout=1),
        "get": lambda ring: ring.reader().get(out, timeout=1),
        "claim": lambda ring: ring.writer().claim(timeout=1),
        "take": lambda ring: ring.reader().take(timeout=1),
        "wait": lambda ring: ring.reader().take(timeout=5),
    }
    outcomes = {}
    for label, call in calls.items():
        with Ring(LAYOUT, num_slots=4, name=f"{name}-{label}") as ring:
            if later_handler:
                ring.counters()  # memlane has its handler
                faulthandler.enable(file=open(os.devnull, "w"))  # noqa: SIM115
            if label != "wait":
                ring.writer().put(DATA)
            os.truncate(ring.segment.path or "", size)
            outcomes[label] = outcome(lambda call=call, ring=ring: call(ring))  # type: ignore[misc]
    return outcomes


@pytest.mark.parametrize("size", [0, PAGE])
@pytest.mark.parametrize("later_handler", [False, True])
def test_every_call_of_a_ring_whose_file_was_truncated_is_an_error(size: int, later_handler: bool) -> None:
    for label, found in ask(use_ring, fresh_name("ring"), size, later_handler).items():
        assert "its file was truncated" in found or "the memory is gone" in found, f"{label}: {found}"


def test_a_slot_is_leased_only_if_the_file_is_whole() -> None:
    # The control words and the first slot are still there: only the end is missing.
    outcomes = ask(use_ring, fresh_name("ring"), 2 * PAGE + 2**16)
    assert "its file was truncated" in outcomes["claim"]
    assert "its file was truncated" in outcomes["take"]


def use_weights(name: str, size: int) -> list[str]:
    outcomes = []
    for call in ("read", "publish", "version", "counters"):
        with Weights(LAYOUT, name=f"{name}-{call}") as weights:
            weights.publish(DATA)
            os.truncate(weights.segment.path or "", size)
            calls: dict[str, Callable[[], object]] = {
                "read": weights.read,
                "publish": lambda weights=weights: weights.publish(DATA),  # type: ignore[misc]
                "version": lambda weights=weights: weights.version,  # type: ignore[misc]
                "counters": weights.counters,
            }
            outcomes.append(outcome(calls[call]))
            outcomes.append(outcome(calls[call]))
    return outcomes


@pytest.mark.parametrize("size", [0, PAGE])
def test_every_call_of_weights_whose_file_was_truncated_is_an_error_again_and_again(size: int) -> None:
    for found in ask(use_weights, fresh_name("weights"), size):
        assert "its file was truncated while it was mapped" in found


def test_weights_whose_last_page_is_gone_are_not_read_as_zeros() -> None:
    def read_rest() -> str:
        with Weights(LAYOUT, name=fresh_name("weights")) as weights:
            for _ in range(3):
                weights.publish(DATA)
            path = weights.segment.path or Path()
            os.truncate(path, path.stat().st_size - 2 * 2**16 - PAGE)  # the end of the first buffer, and the others
            return outcome(weights.read)

    assert "its file was truncated" in ask(read_rest)


ROW = {"x": ("float32", 2**8), "reward": ("float32", ()), "terminated": (bool, ()), "truncated": (bool, ())}
ROWS: dict[str, Any] = {
    "x": np.ones((2, 2**8), np.float32),
    "reward": np.ones(2, np.float32),
    "terminated": np.zeros(2, bool),
    "truncated": np.zeros(2, bool),
}
LAST_PAGE = -PAGE
"""The size of a file that has lost its last page, which no call happens to need."""


def truncate(segment: Segment, size: int) -> None:
    assert segment.path is not None
    os.truncate(segment.path, size if size >= 0 else segment.path.stat().st_size + size)


class TruncatedCopy(Replay):
    """The file that it is saved to is truncated as soon as it is open."""

    size_of_copies: int | None = None

    def _copy_into(self, copy: Replay) -> int:
        if self.size_of_copies is not None:
            truncate(copy.segment, self.size_of_copies)
        return super()._copy_into(copy)


def calls_of(
    replay: Replay, writer: ReplayWriter, sampler: ReplaySampler, file: Path
) -> dict[str, Callable[[], object]]:
    return {
        "add": lambda: writer.add(ROWS, timeout=1),
        "cut": lambda: writer.cut() if replay.streams else writer.add(ROWS),
        "sample": lambda: sampler.sample(512),
        "start": lambda: consumed(sampler),
        "sampler": lambda: replay.sampler(seed=0),
        "update_priorities": lambda: replay.update_priorities(np.arange(1, 9), np.ones(8)),
        "total_priority": replay.native.total_priority,
        "len": lambda: len(replay),
        "added": lambda: replay.added,
        "counters": replay.counters,
        "save": lambda: replay.save(file),
    }


def consumed(sampler: ReplaySampler) -> object:
    with ReplayPipeline(sampler, 512) as pipeline:
        pipeline.start()
        return pipeline.consume(timeout=10)


def use_replay(name: str, folder: Path, size: int, streams: int, threads: int) -> dict[str, list[str]]:
    """What two calls of a replay do after its file was truncated, each pair with a new replay."""
    outcomes = {}
    labels = ["add"]
    for label in labels:
        with Replay(ROW, 256, streams=streams, alpha=0.6, name=f"{name}-{label}") as replay:
            writer, sampler = replay.writer(), replay.sampler(seed=0, threads=threads)
            for _ in range(16):
                writer.add(ROWS)
            calls = calls_of(replay, writer, sampler, folder / label)
            labels += [other for other in calls if other not in labels]
            truncate(replay.segment, size)
            outcomes[label] = [outcome(calls[label]) for _ in range(2)]
    return outcomes


@pytest.mark.parametrize("size", [0, PAGE, LAST_PAGE])
@pytest.mark.parametrize(("streams", "threads"), [(0, 1), (2, 2)])
def test_every_call_of_a_replay_whose_file_was_truncated_is_an_error(
    tmp_path: Path, size: int, streams: int, threads: int
) -> None:
    for label, found in ask(use_replay, fresh_name("replay"), tmp_path, size, streams, threads).items():
        if (label, size) != ("cut", LAST_PAGE):  # needs only the words of its streams, which are still there
            assert all("truncated" in text for text in found), f"{label}: {found}"


def save_into_truncated(size: int, path: Path, again: bool) -> list[str]:
    with TruncatedCopy(ROW, 256, streams=2, alpha=0.6) as replay:
        writer = replay.writer()
        writer.add(ROWS)
        if again:
            replay.save(path)
        replay.size_of_copies = size
        return [outcome(lambda: replay.save(path)), f"{len(replay)} rows"]


@pytest.mark.parametrize("size", [0, PAGE, LAST_PAGE])
@pytest.mark.parametrize("again", [False, True], ids=["a new file", "an earlier save"])
def test_a_replay_is_not_saved_to_a_file_that_is_truncated_meanwhile(tmp_path: Path, size: int, again: bool) -> None:
    found, rows = ask(save_into_truncated, size, tmp_path / "saved", again)
    assert "saved has lost memory: its file was truncated" in found
    assert rows == "2 rows"


def use_waiting_pipeline(name: str, size: int) -> list[str]:
    with (
        Replay({"x": ("float32", 4)}, 64, limiter=Limiter(1, min_size=32), name=name) as replay,
        ReplayPipeline(replay.sampler(seed=0), 8) as pipeline,
    ):
        pipeline.start()  # waits for the limiter, in its own thread
        time.sleep(0.05)
        truncate(replay.segment, size)
        return [outcome(lambda: pipeline.consume(timeout=30)) for _ in range(2)]


@pytest.mark.parametrize("size", [0, PAGE])
def test_a_pipeline_that_waits_for_rows_of_a_truncated_file_is_an_error(size: int) -> None:
    for found in ask(use_waiting_pipeline, fresh_name("replay"), size):
        assert "its file was truncated while it was mapped" in found


def use_replay_until_truncated(name: str, folder: Path, label: str, threads: int) -> list[str]:
    """What a call does whose file is truncated while it runs, most likely while it copies rows without the GIL."""
    rows = {"x": np.ones((2**10, 2**8), np.float32)}
    outcomes = []
    for number in range(4):
        with Replay({"x": ("float32", 2**8)}, 2**14, alpha=0.6, name=f"{name}-{number}") as replay:
            sampler = replay.sampler(seed=0, threads=threads)
            for _ in range(16):
                replay.add(rows)
            call = {
                "add": lambda replay=replay: replay.add(rows),
                "sample": lambda sampler=sampler: sampler.sample(2**12),
                "start": lambda sampler=sampler: consumed(sampler),
                "save": lambda replay=replay: save_anew(replay, folder / "saved"),
            }[label]
            timer = threading.Timer(0.02 + number * 0.003, truncate, (replay.segment, number % 2 * 2**23))
            timer.start()
            while (found := outcome(call)) == "worked":
                pass
            timer.join()
            outcomes.append(found)
    return outcomes


def save_anew(replay: Replay, file: Path) -> None:
    file.unlink(missing_ok=True)
    replay.save(file)


@pytest.mark.parametrize(("label", "threads"), [("add", 1), ("sample", 1), ("sample", 2), ("start", 2), ("save", 1)])
def test_a_call_of_a_replay_whose_file_is_truncated_meanwhile_is_an_error(
    tmp_path: Path, label: str, threads: int
) -> None:
    for found in ask(use_replay_until_truncated, fresh_name("replay"), tmp_path, label, threads):
        assert "truncated" in found


def use_segment(path: Path, name: str) -> str:
    with Segment.create({"go": (SIGNAL, ()), "count": ("int64", 4)}, file=path) as segment:
        go, words = segment.signal("go"), segment.words("count")
        os.truncate(path, 0)
        calls: dict[str, Callable[[], object]] = {
            "add": go.add,
            "store": lambda: go.store(1),
            "value": lambda: go.value,
            "wait": lambda: go.wait(1, timeout=1),
            "load": lambda: words.load(1),
            "window": lambda: segment.window(0, 64, writeable=True),
            "lease": lambda: Lease(segment),
        }
        return outcome(calls[name])


@pytest.mark.parametrize("name", ["add", "store", "value", "wait", "load", "window", "lease"])
def test_signals_words_and_leases_of_a_truncated_file_are_an_error(tmp_path: Path, name: str) -> None:
    assert "truncated" in ask(use_segment, tmp_path / "file", name)


def test_an_array_of_a_truncated_file_ends_the_process_as_the_readme_says(tmp_path: Path) -> None:
    with script(
        """
        import os, sys
        from memlane.core import SIGNAL, Segment
        segment = Segment.create({"go": (SIGNAL, ()), "x": ("float32", 4)}, file=sys.argv[1])
        segment.signal("go").add()
        x = segment["x"]
        os.truncate(sys.argv[1], 0)
        x[0] = 1
        """,
        tmp_path / "file",
    ) as process:
        process.communicate()
    assert process.returncode == -signal.SIGBUS


def test_the_holes_of_a_file_are_filled_when_it_is_attached_to_for_writing(tmp_path: Path) -> None:
    layout = Layout({**FIELDS, "large": ("uint8", 2**20)})
    path = write_segment(tmp_path / "sparse", layout=layout)
    assert path.stat().st_blocks * 512 < 2**20
    with Segment.attach(file=path, writeable=False):
        assert path.stat().st_blocks * 512 < 2**20
    with Segment.attach(file=path) as segment:
        segment["large"][:] = 1
        assert path.stat().st_blocks * 512 >= segment.nbytes


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_sparse_file_in_a_full_file_system_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k none {folder} 2>/dev/null") != 0:
        pytest.skip("mounting is not allowed here")
    try:
        path = write_segment(folder / "sparse", layout=Layout({"large": ("uint8", 2**20)}))
        with pytest.raises(BudgetError, match="sparse"):
            Segment.attach(file=path)
    finally:
        assert os.system(f"umount {folder}") == 0
