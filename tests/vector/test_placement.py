"""How many workers there are, where they run, and what is said about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from memlane.core import cores
from memlane.vector.placement import Placement, PlacementReview, choose_placement


@pytest.fixture
def restrict() -> Iterator[Callable[[int], list[int]]]:
    """Restrict this process to some of its cores."""
    before = os.sched_getaffinity(0)

    def to(count: int) -> list[int]:
        if len(before) < count:
            pytest.skip(f"needs {count} cores")
        chosen = sorted(before)[:count]
        os.sched_setaffinity(0, chosen)
        return chosen

    yield to
    os.sched_setaffinity(0, before)


def test_by_default_each_core_has_a_worker_that_is_pinned_to_it(restrict: Callable[[int], list[int]]) -> None:
    usable = restrict(2)
    placement = choose_placement(8)
    assert placement == Placement(2, tuple(usable), True, "one worker for each of 2 cores")


def test_there_is_no_worker_without_an_environment(restrict: Callable[[int], list[int]]) -> None:
    restrict(2)
    assert choose_placement(1) == Placement(1, None, True, "one worker for each environment")


def test_more_workers_than_cores_neither_spin_nor_are_pinned(restrict: Callable[[int], list[int]]) -> None:
    restrict(2)
    assert choose_placement(8, num_workers=4) == Placement(4, None, False, "num_workers=4 on 2 cores")


def test_a_control_group_limits_the_workers_and_none_is_pinned(
    restrict: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    restrict(2)
    monkeypatch.setattr(cores, "cpu_limit", lambda: 1.5)  # a real limit needs a cgroup that tests may not create
    assert choose_placement(8) == Placement(1, None, True, "one worker for each of 1 core")


def test_pin_workers_decides_when_it_is_given(restrict: Callable[[int], list[int]]) -> None:
    first, second = restrict(2)
    assert choose_placement(8, num_workers=3, pin=True).cores == (first, second, first)
    assert choose_placement(8, pin=False).cores is None


def test_a_placement_reads_as_a_sentence(restrict: Callable[[int], list[int]]) -> None:
    first, second = restrict(2)
    assert str(choose_placement(8)) == (
        f"2 workers, pinned to cores {first}, {second}, spinning between steps (one worker for each of 2 cores)"
    )
    assert str(choose_placement(8, num_workers=0)) == "no workers (num_workers=0 on 2 cores)"


# ------------------------------------------------------------------------------------------------------------- reviews


def review(busy_us: int, step_us: int, review: PlacementReview | None = None) -> str | None:
    """What is said after steps of ``step_us``, of which the workers were busy for ``busy_us`` together."""
    review = review or PlacementReview(Placement(2, None, True, ""), 8)
    review.start([], 0)
    advice = None
    for step in range(PlacementReview.STEPS):
        assert review.active
        review.begin_step()
        time.sleep(step_us / 1e6)
        advice = review.end_step([], (step + 1) * busy_us * 1000)
    assert not review.active
    return advice


def test_steps_that_take_longer_than_the_environments_need_are_better_made_in_the_caller() -> None:
    advice = review(busy_us=100, step_us=1000)
    assert advice is not None
    assert advice.startswith("a step of 8 environments takes ")
    assert "the environments need 100 us of that: num_workers=0" in advice


def test_workers_that_share_the_work_are_not_remarked_on() -> None:
    assert review(busy_us=200_000, step_us=1000) is None


def test_advice_is_given_once() -> None:
    one = PlacementReview(Placement(2, None, True, ""), 8)
    assert review(100, 1000, one) is not None
    assert review(100, 1000, one) is None


def test_a_step_that_began_before_the_review_is_not_counted() -> None:
    one = PlacementReview(Placement(2, None, True, ""), 8)
    one.start([], 0)
    for _ in range(PlacementReview.STEPS * 2):
        assert one.end_step([], 0) is None
    assert one.active


def test_workers_that_wait_for_cores_beside_the_threads_of_torch_are_remarked_on(
    restrict: Callable[[int], list[int]],
) -> None:
    """Two busy processes on one core: each waits while the other runs."""
    torch = pytest.importorskip("torch")
    restrict(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    pids = [_busy_process(), _busy_process()]
    try:
        one = PlacementReview(Placement(2, None, True, ""), 8)
        one.start(pids, 0)
        advice = None
        while one.active:
            one.begin_step()
            time.sleep(0.01)
            advice = one.end_step(pids, 0)
    finally:
        torch.set_num_threads(threads)
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    assert advice is not None
    assert advice.startswith("the workers waited for a core in ")
    assert "because torch computes with 2 threads on 1 core; " in advice


def _busy_process() -> int:
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        while os.getppid() == parent:
            pass
        os._exit(0)
    return pid
