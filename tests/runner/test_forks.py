"""Forked children of a learner leave its collectors alone."""

from __future__ import annotations

import pytest

from memlane.core import SIGNAL, Segment
from memlane.runner.process_collectors import _Credits
from tests.support.forks import every_end, every_fork, output_of_forking, refusals

LEARNER = """
    from tests.support.tiny_runner import Tiny
    from tests.support.transports import Count
    it = Tiny(Count(), collectors=2, in_process={in_process})
    it.begin()
    it.go_on(2)
    pids = dict(it.collectors.pids)
"""
GO_ON = """
    it.go_on(5)
    counters = it.counters()
    print(counters["restarts"], counters["collectors"], it.collectors.pids == pids)
    it.close()
"""
in_processes_and_threads = pytest.mark.parametrize("in_process", [False, True], ids=["processes", "threads"])


@every_end
@every_fork
@in_processes_and_threads
def test_a_learner_goes_on_when_a_forked_child_of_it_ends(in_process: bool, fork: str, ending: str) -> None:
    before = LEARNER.format(in_process=in_process)
    assert output_of_forking(fork, before, ending, GO_ON) == "0 2 True\n"


@in_processes_and_threads
def test_a_forked_child_may_leave_the_block_of_rollouts(in_process: bool) -> None:
    before = LEARNER.format(in_process=in_process) + "    block = it.rollouts()\n    slots = block.__enter__()\n"
    after = "    block.__exit__(None, None, None)\n    it.publish_next()\n" + GO_ON
    leave = "block.__exit__(None, None, None); sys.exit(0)"
    assert output_of_forking("os.fork", before, leave, after) == "0 2 True\n"


@in_processes_and_threads
def test_a_forked_child_cannot_use_the_runner_of_its_parent(in_process: bool) -> None:
    calls = refusals(
        "it.rollouts().__enter__()", "it.publish({})", "it.begin()", "it.lag_of(None)", "it.counters()",
        "it.collectors.take()", "it.collectors.check()", "it.collectors.return_credits()", "it.collectors.start()",
        "it.collectors.has_older_than(0)", "it.collectors.counters()",
    )  # fmt: skip
    output = output_of_forking("os.fork", LEARNER.format(in_process=in_process), calls, GO_ON)
    assert output == "all refused\n0 2 True\n"


def test_a_forked_child_may_have_a_runner_of_its_own() -> None:
    own = """
        it = Tiny(Count(), collectors=1)
        it.begin()
        it.go_on(2)
        print(it.counters()["collectors"], flush=True)
        it.close()
    """
    assert output_of_forking("os.fork", LEARNER.format(in_process=False), own, GO_ON) == "1\n0 2 True\n"


@pytest.mark.parametrize("count", [0, 1, 2, 7, 2**40 + 1])
def test_credits_of_a_lost_collector_are_shared_out_at_once(count: int) -> None:
    """2**40 is what a stop gives to everybody, so that no wait for a credit lasts; one by one, that took weeks."""
    with Segment.create({"granted": (SIGNAL, 3)}) as segment:
        granted = [segment.signal("granted", worker) for worker in range(3)]
        rights = _Credits(granted, in_flight=3)
        granted[1].add(count)
        rights.reassign(1, started=1, running={0, 2})
        assert [granted[0].value - 1, granted[2].value - 1] == [count - count // 2, count // 2]
