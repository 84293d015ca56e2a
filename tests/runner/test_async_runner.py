"""AsyncRunner: what it checks, how it replaces the dead, and that it ends. With an algorithm that only counts."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memlane.core import BudgetError, Layout, Peer, WaitTimeout
from memlane.runner.async_runner import AsyncRunner
from memlane.runner.collector_error import CollectorError
from memlane.runner.process_collectors import ProcessCollectors
from memlane.runner.protocols import CollectorJoined, CollectorLost
from tests.support.payloads import whole
from tests.support.processes import state_of, within
from tests.support.tiny_runner import Tiny
from tests.support.transports import (
    Count,
    Die,
    Raise,
    die_between_commit_and_count,
    moment_of,
    sleep_through_it,
)

PATIENCE = 40.0
PROMISE = 2.0
"""Seconds within which nothing is left of a run whose learner was killed."""
STOP_LIMIT = 4.0
"""Seconds of all the limits of a stop together: by word, SIGKILL."""
SLACK = 2.0

Make = Callable[..., Tiny]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Tiny] = []

    def begin(collect: Any = Count(), **rl_cfg: Any) -> Tiny:  # noqa: B008
        made.append(Tiny(collect, **rl_cfg))
        return made[-1]

    yield begin
    for runner in made:
        runner.close()


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def peers_of(runner: Tiny) -> list[Peer]:
    assert runner.collectors is not None
    return [Peer.of(pid) for pid in runner.collectors.pids.values()]


def memfds_here() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:memlane" in link for link in links)


# --------------------------------------------------------------------------------------------------------- constructor


@pytest.mark.parametrize(
    ("rl_cfg", "others", "message"),
    [
        ({}, {"sim_backend": "isaac"}, "sim_backend must be 'native', 'gymnasium' or 'mujoco', found 'isaac'"),
        ({}, {"num_envs": 0}, "num_envs must be 1 or more, found 0"),
        ({"max_lag": -1}, {}, "max_lag must be 0 .* or more, found -1"),
        ({"collectors": 3, "rollouts_per_update": 2}, {}, "at least the number of collectors, 3, found 2"),
        ({"collectors": 0}, {}, "found 0"),
        ({"collectors": 2, "min_collectors": 3}, {}, "min_collectors.* found 3"),
        (
            {},
            {"collector_device": "cuda"},
            "collector_device must be 'cpu', because collectors act on the CPU, found 'cuda'",
        ),
    ],
    ids=["backend", "num_envs", "max_lag", "rollouts_per_update", "collectors", "min_collectors", "collector_device"],
)
def test_the_constructor_refuses(rl_cfg: dict[str, Any], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiny(Count(), others, **rl_cfg)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0"])
def test_collectors_act_on_the_cpu_whatever_it_is_called(device: str | None) -> None:
    with Tiny(Count(), {"collector_device": device}) as runner:
        assert runner.collector_device == "cpu"


def test_a_runner_without_learn_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="learn"):
        AsyncRunner("x", None, None)  # type: ignore[abstract]


def test_what_is_not_said_is_one_collector_with_a_lag_of_one(make: Make) -> None:
    runner = make()
    assert (runner.num_collectors, runner.rollouts_per_update, runner.max_lag) == (1, 1, 1)


def test_deterministic_is_synchronous(make: Make) -> None:
    assert make(deterministic=True).max_lag == 0


def test_rollouts_that_do_not_fit_are_refused_with_what_to_lower(make: Make) -> None:
    runner = make()
    runner.slot = {"body": ("uint8", (1 << 44,))}
    with pytest.raises(BudgetError, match="num_envs=1"):
        runner.begin()


def test_the_budget_is_checked_before_anything_is_allocated(make: Make) -> None:
    runner, before = make(), memfds_here()
    runner.slot = {"body": ("uint8", (1 << 44,))}
    with pytest.raises(BudgetError):
        runner.begin()
    assert (memfds_here(), runner.weights, runner.collectors) == (before, None, None)


def test_a_closed_runner_cannot_be_opened(make: Make) -> None:
    runner = make()
    runner.close()
    with pytest.raises(ValueError, match="was closed"):
        runner.begin()


def test_an_open_runner_cannot_be_opened_again(make: Make) -> None:
    runner = make()
    runner.begin()
    first = peers_of(runner)
    try:
        with pytest.raises(ValueError):
            runner.begin()
    finally:
        for peer in first:  # nobody else will, if the runner forgot them
            if peer.alive:
                os.kill(peer.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("in_process", [False, True], ids=["processes", "threads"])
def test_every_update_has_as_many_whole_rollouts_as_it_wants(make: Make, in_process: bool) -> None:
    runner = make(collectors=2, rollouts_per_update=3, in_process=in_process)
    runner.learn(20)
    assert min(len(update) for update in runner.updates) == 3  # more when one would be too old for the next
    assert not runner.torn


@pytest.mark.parametrize("in_process", [False, True], ids=["processes", "threads"])
def test_in_deterministic_mode_rollouts_come_in_the_collectors_order(make: Make, in_process: bool) -> None:
    runner = make(
        Count({0: 0.02, 2: 0.01}), collectors=3, rollouts_per_update=6, deterministic=True, in_process=in_process
    )
    runner.learn(10)
    writers = [[writer for writer, _, _ in update] for update in runner.updates]
    assert writers == [[0, 0, 1, 1, 2, 2]] * 10


def test_in_deterministic_mode_the_rollouts_of_one_collector_stay_in_order(make: Make) -> None:
    runner = make(collectors=2, rollouts_per_update=4, deterministic=True)
    runner.learn(10)
    numbers = [[number for _, number, _ in update] for update in runner.updates]
    assert numbers == [[2 * i, 2 * i + 1, 2 * i, 2 * i + 1] for i in range(10)]


def test_synchronous_collectors_act_with_the_latest_weights(make: Make) -> None:
    runner = make(collectors=2, max_lag=0)
    runner.learn(20)
    assert {lag for update in runner.updates for _, _, lag in update} == {0}


def test_a_timeout_loses_no_rollout(make: Make) -> None:
    """One of two collectors is slow: a learner that looks in vain finds the first rollout again when it comes back."""
    runner = make(Count({1: 1.5}), collectors=2, max_lag=0)
    runner.begin()
    with runner.rollouts(PATIENCE):
        pass
    runner.publish_next()
    with pytest.raises(WaitTimeout), runner.rollouts(0.3):
        pass
    with runner.rollouts(6) as slots:
        assert [(slot.writer, int(slot["number"])) for slot in slots] == [(0, 1), (1, 1)]


# -------------------------------------------------------------------------------------------------------------- deaths


def test_a_collector_that_is_killed_is_replaced(make: Make) -> None:
    runner = make(Count({0: 0.005, 1: 0.005}), collectors=2)
    runner.at_update[3] = lambda: os.kill(runner.pid(0), signal.SIGKILL)
    runner.learn(40)
    assert runner.restarts == 1
    assert not runner.torn


def test_a_death_and_its_replacement_are_events(make: Make) -> None:
    runner = make(Count({0: 0.005}))
    runner.begin()
    first = runner.pid(0)
    runner.at_update[3] = lambda: os.kill(first, signal.SIGKILL)
    runner.go_on(20)
    second = runner.pid(0)
    joined, lost, joined_again = runner.events
    assert joined == CollectorJoined(0, 0, first)
    assert isinstance(lost, CollectorLost)
    assert (lost.worker, lost.incarnation, lost.pid, lost.replaced) == (0, 0, first, True)
    assert "SIGKILL" in lost.cause
    assert joined_again == CollectorJoined(0, 1, second)


def test_a_collector_that_dies_in_the_middle_of_a_rollout_costs_no_credit(make: Make) -> None:
    runner = make(Die(at=1, incarnations=4), max_lag=0)
    runner.learn(12)
    assert runner.restarts == 4


def test_the_numbers_of_a_successor_go_on_where_the_dead_one_stopped(make: Make) -> None:
    runner = make(Die(at=2, incarnations=3), max_lag=0)
    runner.learn(12)
    assert [number for update in runner.updates for _, number, _ in update] == list(range(12))


def test_lag_stays_bounded_when_collectors_die(make: Make) -> None:
    runner = make(Die(at=1, incarnations=4), collectors=1, max_lag=0)
    runner.learn(12)
    assert {lag for update in runner.updates for _, _, lag in update} == {0}


def test_a_death_between_commit_and_count_does_not_let_one_rollout_too_many_begin(make: Make) -> None:
    """The rollout is in the ring, nobody has taken it, and its collector did not live to count it."""
    runner = make(die_between_commit_and_count, max_lag=0)
    runner.begin()
    assert isinstance(runner.collectors, ProcessCollectors)
    ring = runner.collectors.ring
    assert wait_until(lambda: ring.unread == 1)
    assert wait_until(lambda: not exists(runner.pid(0)))
    runner.collectors.check()
    wait_until(lambda: ring.counters()["blocked"], 1.5)  # whoever begins one too many waits here
    with runner.rollouts(PATIENCE):
        pass
    time.sleep(0.3)  # this is where others learn
    runner.publish_next()
    with runner.rollouts(PATIENCE) as slots:
        assert [runner.lag_of(slot) for slot in slots] == [0]


def test_a_death_between_commit_and_count_gives_no_number_twice(make: Make) -> None:
    runner = make(die_between_commit_and_count, max_lag=0)
    runner.learn(8)
    assert [number for update in runner.updates for _, number, _ in update] == list(range(8))


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_dead_collector_is_replaced_while_another_one_delivers(make: Make) -> None:
    """A learner that is slower than its collectors always finds a rollout, and looks after them all the same."""
    runner = make(Count(), collectors=2, rollouts_per_update=2)
    runner.at_update[2] = lambda: os.kill(runner.pid(1), signal.SIGKILL)
    runner.pause = 0.05
    runner.learn(40)
    assert runner.restarts == 1


def test_a_collector_that_dies_too_often_ends_the_run_and_the_error_names_the_counts(make: Make) -> None:
    runner = make(Die(at=0), max_restarts=2)
    with pytest.raises(
        CollectorError,
        match=r"SIGKILL.*; 3 deaths in 60 s exceed max_restarts=2, and 0 running collectors are fewer than "
        r"min_collectors=1",
    ):
        runner.learn(5)


def test_the_last_death_is_an_event_without_replacement(make: Make) -> None:
    runner = make(Die(at=0), max_restarts=1)
    with pytest.raises(CollectorError):
        runner.learn(5)
    assert [event.replaced for event in runner.events if isinstance(event, CollectorLost)] == [True, False]


def test_old_deaths_are_forgotten(make: Make) -> None:
    runner = make(Die(at=1, incarnations=4), max_restarts=1, restart_window=0.001)
    runner.learn(10)
    assert runner.restarts == 4


def test_with_fewer_than_min_collectors_the_run_ends(make: Make) -> None:
    runner = make(Die(workers=(1,)), collectors=2, max_restarts=0, min_collectors=2, max_lag=0)
    with pytest.raises(CollectorError, match="1 running collectors are fewer than min_collectors=2"):
        runner.learn(50)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_others_make_the_rollouts_of_a_collector_that_stays_away(make: Make, lost: int, max_lag: int) -> None:
    runner = make(Die(workers=(lost,)), collectors=3, rollouts_per_update=4, max_restarts=0, max_lag=max_lag)
    runner.learn(12)
    assert {writer for writer, _, _ in runner.updates[-1]} <= {0, 1, 2} - {lost}


def test_one_collector_makes_all_rollouts_when_the_others_stay_away(make: Make) -> None:
    runner = make(Die(workers=(0, 1)), collectors=3, rollouts_per_update=3, max_restarts=0, max_lag=0)
    runner.learn(12)
    assert [writer for writer, _, _ in runner.updates[-1]] == [2, 2, 2]


def test_a_collector_that_raises_is_not_replaced(make: Make) -> None:
    runner = make(Raise())
    with pytest.raises(CollectorError, match="ZeroDivisionError: broken at") as caught:
        runner.learn(5)
    assert time.monotonic() - moment_of(caught.value) < within(PROMISE)
    assert not [event for event in runner.events if isinstance(event, CollectorLost)]


# ----------------------------------------------------------------------------------------------------------------- end


def test_nothing_is_left_after_close(make: Make) -> None:
    before = memfds_here()
    runner = make(collectors=2)
    runner.begin()
    runner.go_on(3)
    peers = peers_of(runner)
    runner.close()
    assert not [peer for peer in peers if peer.alive]
    assert memfds_here() == before


def test_close_again_is_harmless(make: Make) -> None:
    runner = make()
    runner.begin()
    runner.close()
    runner.close()


def test_a_stopped_collector_is_killed_within_the_limits(make: Make) -> None:
    runner = make(collectors=2)
    runner.begin()
    runner.go_on(3)
    (victim, _), peers = runner.collectors.pids.values(), peers_of(runner)  # type: ignore[union-attr]
    os.kill(victim, signal.SIGSTOP)
    assert wait_until(lambda: state_of(victim) == "T")
    begin = time.monotonic()
    runner.close()
    assert time.monotonic() - begin < within(STOP_LIMIT + SLACK)
    assert not [peer for peer in peers if peer.alive]


def test_a_runner_that_nobody_has_any_more_ends_its_collectors() -> None:
    runner = Tiny(Count())
    runner.begin()
    runner.go_on(2)
    peers = peers_of(runner)
    del runner
    gc.collect()
    assert wait_until(lambda: not [peer for peer in peers if peer.alive], within(STOP_LIMIT + SLACK))


def test_a_close_that_was_interrupted_can_be_finished(make: Make) -> None:
    """Ctrl-C twice: the second one comes while the first one's close waits for a collector."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    runner = make(sleep_through_it, max_lag=0)
    runner.begin()
    with runner.rollouts(PATIENCE):
        pass
    peers = peers_of(runner)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            runner.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    runner.close()
    left = [peer for peer in peers if peer.alive]
    for peer in left:
        os.kill(peer.pid, signal.SIGKILL)
    assert not left


def test_an_exception_leaves_the_block_of_rollouts_as_itself_when_the_runner_was_closed_in_it(make: Make) -> None:
    """As a signal handler does that closes and says goodbye."""
    runner = make()
    runner.begin()

    def leave() -> None:
        with runner.rollouts(PATIENCE):
            runner.close()
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()


# ------------------------------------------------------------------------------------------------- in another process


@contextmanager
def program(body: str) -> Iterator[subprocess.Popen[str]]:
    """A learner in a fresh interpreter. It says its collectors' pids, and then does ``body``."""
    code = f"""
        import os, signal, sys, time
        from tests.support.tiny_runner import Tiny
        from tests.support.transports import Count
        if __name__ == "__main__":
            runner = Tiny(Count(), collectors=2)
            runner.begin()
            runner.go_on(3)
            print(*runner.collectors.pids.values(), flush=True)
{textwrap.indent(textwrap.dedent(body), " " * 12)}
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that is to end by itself now."""
    try:
        output, errors = process.communicate(timeout=within(STOP_LIMIT + 3 * SLACK))
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"the program did not end:\n{output}{errors}")
    return process.returncode, output, errors


def descendants(pid: int) -> list[Peer]:
    """All processes below one, the fork server and the resource tracker too."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [Peer.of(child), *descendants(child)]
    return found


def first_line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"the program ended early:\n{process.stderr.read() if process.stderr else ''}")
    return list(map(int, line.split()))


@pytest.mark.parametrize("stopped", [False, True], ids=["", "its collectors and the fork server are stopped"])
def test_nothing_is_left_of_a_run_whose_learner_is_killed(stopped: bool) -> None:
    with program("while True: runner.go_on(1)") as process:
        pids = first_line(process)
        peers = descendants(process.pid)
        assert set(pids) <= {peer.pid for peer in peers}
        for peer in peers if stopped else []:
            if "resource_tracker" not in Path(f"/proc/{peer.pid}/cmdline").read_text():  # not memlane's
                os.kill(peer.pid, signal.SIGSTOP)
                assert wait_until(lambda pid=peer.pid: state_of(pid) == "T")  # type: ignore[misc]
        process.kill()
        # Anonymous memory goes with the last process that maps it.
        assert wait_until(lambda: not [peer for peer in peers if peer.alive], within(PROMISE + SLACK / 2)), [
            peer for peer in peers if peer.alive
        ]


def test_collectors_end_with_a_program_that_does_not_close() -> None:
    with program("") as process:
        first_line(process)
        peers = descendants(process.pid)
        code, _, errors = end_of(process)
        assert (code, errors) == (0, "")
        assert wait_until(lambda: not [peer for peer in peers if peer.alive], within(PROMISE))


def test_a_program_that_raises_ends_with_its_own_error() -> None:
    with program("raise KeyError('mine')") as process:
        first_line(process)
        peers = descendants(process.pid)
        code, _, errors = end_of(process)
        assert code == 1
        assert errors.strip().endswith("KeyError: 'mine'")
        assert wait_until(lambda: not [peer for peer in peers if peer.alive], within(PROMISE))


@pytest.mark.parametrize(
    "moment",
    ["while True: runner.go_on(1)", "kept = [runner.collectors.take(60) for _ in range(9)]", "time.sleep(60)"],
    ids=["learning", "waiting", "elsewhere"],
)
def test_a_signal_handler_may_close_and_leave(moment: str) -> None:
    body = f"""
        def leave(*_):
            runner.close()
            sys.exit(7)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        {moment}
    """
    with program(body) as process:
        first_line(process)
        assert process.stdout is not None
        process.stdout.readline()
        peers = descendants(process.pid)
        time.sleep(0.3)
        process.terminate()
        code, _, errors = end_of(process)
        assert (code, errors) == (7, "")
        assert wait_until(lambda: not [peer for peer in peers if peer.alive], within(PROMISE))


def test_a_wait_ends_with_an_error_when_a_signal_handler_closes_the_runner() -> None:
    """It would wait for rollouts of collectors that are no more."""
    body = """
        signal.signal(signal.SIGTERM, lambda *_: runner.close())
        print("ready", flush=True)
        try:
            kept = [runner.collectors.take(15) for _ in range(9)]
        except TimeoutError:
            print("waited to the end", flush=True)
        except Exception as error:
            print("raised", type(error).__name__, flush=True)
    """
    with program(body) as process:
        first_line(process)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        process.terminate()
        code, output, errors = end_of(process)
        assert (code, errors) == (0, "")
        assert output.startswith("raised")


def test_layouts_may_be_mappings_or_layouts(make: Make) -> None:
    runner = make()
    runner.slot = Layout(runner.slot)
    runner.begin()
    with runner.rollouts(PATIENCE) as slots:
        assert whole(slots[0])
