"""Forked children leave the samplers and collectors of statistics of their parent alone."""

from __future__ import annotations

import pytest

from tests.support.forks import every_end, every_fork, output_of_forking, refusals

SAMPLER = """
    import numpy as np
    from memlane.lanes import Replay, ReplayPipeline, Stats
    replay = Replay({"x": ("int64", ())}, capacity=1000)
    replay.add({"x": np.arange(1000)})
    it = replay.sampler(seed=3)
    first = it.sample(5)["x"].tolist()
"""
UNDISTURBED = """
    with Replay({"x": ("int64", ())}, capacity=1000) as other:
        other.add({"x": np.arange(1000)})
        sampler = other.sampler(seed=3)
        expected = [sampler.sample(5)["x"].tolist() for _ in range(2)]
    print([first, it.sample(5)["x"].tolist()] == expected, np.flatnonzero(replay.segment["samplers"]).tolist() == [0])
"""
STATS = """
    from memlane.lanes import Stats
    stats = Stats(shape=())
    it = stats.collector()
    it.add([1.0, 2.0])
"""
COUNTED = """
    it.add([6.0])
    print(stats.merged().count, stats.merged().mean)
"""


@every_end
@every_fork
def test_a_sampler_goes_on_with_its_sequence_when_a_forked_child_ends(fork: str, ending: str) -> None:
    assert output_of_forking(fork, SAMPLER, ending, UNDISTURBED) == "True True\n"


def test_a_forked_child_cannot_move_the_sequence_of_its_parent() -> None:
    """Random sequences are in shared memory: what the child samples would be missing in the parent."""
    output = output_of_forking("os.fork", SAMPLER, refusals("it.sample(5)"), UNDISTURBED)
    assert output == "all refused\nTrue True\n"


def test_a_forked_child_may_have_a_sampler_of_its_own() -> None:
    own = "it = replay.sampler(seed=3); print(it.sample(5)['x'].tolist() == first, flush=True); it.close()"
    assert output_of_forking("os.fork", SAMPLER, own, UNDISTURBED) == "True\nTrue True\n"


@every_fork
@pytest.mark.parametrize("ending", ["sys.exit", "close", "a garbage collection"])
def test_a_pipeline_goes_on_when_a_forked_child_ends(fork: str, ending: str) -> None:
    before = SAMPLER + "    sampler = it\n    it = ReplayPipeline(sampler, 5)\n    it.start()\n"
    after = "batch = it.consume()['x'].tolist(); print(len(batch), set(batch) <= set(range(1000))); it.close()"
    assert output_of_forking(fork, before, ending, after) == "5 True\n"


def test_a_forked_child_cannot_use_the_pipeline_of_its_parent() -> None:
    before = SAMPLER + "    it = ReplayPipeline(it, 5)\n    it.start()\n    it.wait()\n"
    calls = refusals("it.start()", "it.wait()", "it.consume()")
    assert output_of_forking("os.fork", before, calls, "it.consume(); it.close()") == "all refused\n"


@every_fork
def test_a_replay_buffer_samples_other_rows_in_a_forked_child(fork: str) -> None:
    before = """
        import numpy as np
        from memlane.ipc import ReplayBuffer

        def filled():
            buffer = ReplayBuffer(1000, 1, 1, "cpu", seed=3)
            column = np.arange(1000.0)[:, None]
            buffer.add(column, column, column[:, 0], column, column[:, 0] < 0, column[:, 0] < 0)
            return buffer

        def rows(buffer):
            return buffer.sample(5)["obs"][:, 0].tolist()

        it, undisturbed = filled(), filled()
        rows(it), rows(undisturbed)
        expected = rows(undisturbed)
    """
    output = output_of_forking(
        fork, before, "print(rows(it) == expected, flush=True)", "print(rows(it) == expected); undisturbed.close()"
    )
    assert output == "False\nTrue\n"


@every_end
@every_fork
def test_a_collector_of_statistics_goes_on_when_a_forked_child_ends(fork: str, ending: str) -> None:
    assert output_of_forking(fork, STATS, ending, COUNTED) == "3.0 3.0\n"


def test_a_forked_child_cannot_count_in_the_entry_of_its_parent() -> None:
    """The one that writes last would overwrite what the other has counted."""
    output = output_of_forking("os.fork", STATS, refusals("it.add([7.0])"), COUNTED)
    assert output == "all refused\n3.0 3.0\n"


def test_a_forked_child_may_have_a_collector_of_its_own() -> None:
    assert output_of_forking("os.fork", STATS, "stats.collector().add([7.0])", COUNTED) == "4.0 4.0\n"
