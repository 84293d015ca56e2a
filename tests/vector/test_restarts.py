"""Workers that die, hang or raise: what the parent raises, and what happens to the other environments."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from memlane._native import PROGRESS_STEPS
from memlane.core import Peer, names
from memlane.vector import AsyncVectorEnv, RemoteTraceback, RestartLimit, WorkerDied
from tests.support.failing_envs import (
    EXIT,
    INVALID,
    KILL,
    NAP,
    PERCENT,
    PLAIN,
    RAISE,
    SEGV,
    SLEEP,
    SPIN,
    Boom,
    Counting,
    Ledger,
    MessageActions,
    makers,
    observation,
)
from tests.support.processes import within

# Gymnasium's logger uses warnings; the exceptions and infos say the same.
pytestmark = [pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): "), pytest.mark.timeout(120, method="signal")]

PROMISE = 1.0
"""Seconds within which a death is noticed."""
BUSY = 1.0
"""Seconds more that a busy machine is given."""
PATIENCE = 60.0
MODES = ["NextStep", "SameStep", "Disabled"]
METHODS = ["forkserver", "fork", "spawn"]


@contextlib.contextmanager
def vector(count: int = 4, workers: int = 2, kind: Any = Counting, **arguments: Any) -> Iterator[AsyncVectorEnv]:
    """A vector environment that must be quick to close, whatever happened to it, and leave no process."""
    own = {name: arguments.pop(name) for name in ("factory_fault", "endless") if name in arguments}
    envs = AsyncVectorEnv(makers(count, kind, **own), num_workers=workers, **arguments)
    first = peers_of(envs)
    try:
        yield envs
        last = peers_of(envs)
        begin = time.monotonic()
        envs.close()
        assert time.monotonic() - begin < within(PROMISE + BUSY), "close() took long"
        for peer in first + last:
            assert not Peer(peer.pid, peer.start).alive, f"{peer} was left running"
    finally:
        envs.close(terminate=True)


def peers_of(envs: AsyncVectorEnv) -> list[Peer]:
    return [Peer(handle.peer.pid, handle.peer.start) for handle in envs._workers.handles]


def pid_of(envs: AsyncVectorEnv, worker: int) -> int:
    return peers_of(envs)[worker].pid


def kill(envs: AsyncVectorEnv, worker: int, number: int = signal.SIGKILL) -> None:
    """And wait until it is dead."""
    peer = peers_of(envs)[worker]
    os.kill(peer.pid, number)
    assert peer.wait(PATIENCE)
    peer.close()


def actions(count: int = 4, **faults: int) -> Any:
    """``actions(4, e2=KILL)``: plain, but for environment 2."""
    all_ = np.full(count, PLAIN, np.int64)
    for name, fault in faults.items():
        all_[int(name[1:])] = fault
    return all_


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < within(PROMISE + BUSY), f"took {took:.2f} s"


# ------------------------------------------------------------------------------------------ on_error="raise": deaths

CAUSES = [
    pytest.param(KILL, "SIGKILL", "out of memory", id="sigkill"),
    pytest.param(SEGV, "SIGSEGV", "invalid memory access", id="sigsegv"),
    pytest.param(INVALID, "SIGSEGV", "invalid memory access", id="invalid access"),
    pytest.param(EXIT, "code 3", "", id="exit"),
]

DURING: dict[str, Callable[[AsyncVectorEnv, int], object]] = {
    "step": lambda envs, fault: envs.step(actions(e3=fault)),
    "reset": lambda envs, fault: envs.reset(seed=70, options={"env": 3, "fault": fault}),
    "call": lambda envs, fault: envs.call("once", 3, fault),
    "send": lambda envs, fault: (envs.send(actions(e3=fault)), envs.recv(min_envs=4)),
}


def died(envs: AsyncVectorEnv, function: Callable[[], object]) -> WorkerDied:
    with in_time(), pytest.raises(WorkerDied) as caught:
        function()
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.worker == 1
    assert list(caught.value.envs) == [2, 3]
    with pytest.raises(ClosedEnvironmentError, match="worker 1"):
        envs.step(actions())
    return caught.value


@pytest.mark.parametrize("during", DURING)
@pytest.mark.parametrize(("fault", "name", "reason"), CAUSES)
@pytest.mark.parametrize("method", METHODS[:2])
def test_a_death_is_raised_within_a_second_with_the_worker_and_the_cause(
    method: str, fault: int, name: str, reason: str, during: str
) -> None:
    with vector(context=method) as envs:
        envs.reset(seed=50)
        envs.step(actions())
        pid = pid_of(envs, 1)
        text = str(died(envs, lambda: DURING[during](envs, fault)))
        for part in ("worker 1", f"pid {pid}", "environments 2 to 3", name, reason, " steps"):
            assert part in text, f"no {part!r} in {text!r}"


def test_a_death_with_spawn_says_the_signal_too() -> None:
    with vector(context="spawn") as envs:
        envs.reset()
        assert "SIGSEGV" in str(died(envs, lambda: envs.step(actions(e2=SEGV))))


@pytest.mark.parametrize("during", DURING)
def test_the_text_names_the_environment_at_which_the_worker_died_and_its_seed(during: str) -> None:
    with vector() as envs:
        envs.reset(seed=50)
        text = str(died(envs, lambda: DURING[during](envs, KILL)))
        assert f"at environment 3, last seed {73 if during == 'reset' else 53}" in text


def test_the_text_of_a_death_at_an_environment_that_alone_was_sent_names_that_one() -> None:
    with vector() as envs:
        envs.reset(seed=50)
        envs.send([KILL], [3])
        assert "at environment 3, last seed 53" in str(died(envs, envs.recv))


def test_the_text_counts_the_steps_of_the_worker() -> None:
    with vector(workers=4, endless=True) as envs:
        envs.reset()
        for _ in range(17):
            envs.step(actions())
        with pytest.raises(WorkerDied, match="environment 2, after 17 steps"):
            envs.step(actions(e2=KILL))


def test_a_count_of_steps_that_a_stray_store_left_is_not_below_0() -> None:
    with vector() as envs:
        envs.reset()
        envs._workers.handles[1]._progress[PROGRESS_STEPS] = -5
        kill(envs, 1)
        with pytest.raises(WorkerDied, match="after 0 steps"):
            envs.step(actions())


@pytest.mark.parametrize("then", ["step", "reset", "call", "send"])
def test_a_death_while_idle_is_raised_by_the_next_call(then: str) -> None:
    with vector() as envs:
        envs.reset()
        kill(envs, 1)
        died(envs, lambda: DURING[then](envs, PLAIN))


@pytest.mark.parametrize("step_timeout", [None, 10.0])
def test_a_death_is_logged_once(step_timeout: float | None) -> None:
    with vector(step_timeout=step_timeout) as envs:
        envs.reset()
        with pytest.warns(UserWarning, match="ERROR") as logged, pytest.raises(WorkerDied):
            envs.step(actions(e2=KILL))
        assert len([warning for warning in logged if "worker 1" in str(warning.message)]) == 1


# ---------------------------------------------------------------------------------------------------------- interrupts


class Interrupted:
    """Ctrl-C comes when the commands have just been issued."""

    def __init__(self, commands: Any) -> None:
        self.commands = commands

    def issue_all(self, cell: int, command: int) -> None:
        self.commands.issue_all(cell, command)
        raise KeyboardInterrupt

    def issue(self, workers: list[int], cell: int, command: int) -> None:
        self.commands.issue(workers, cell, command)
        raise KeyboardInterrupt

    @staticmethod
    def raised(*_: object) -> None:
        raise KeyboardInterrupt


def interrupt(envs: AsyncVectorEnv, call: Callable[[], object], at: str = "_commands") -> None:
    """Let Ctrl-C come in the middle of a call."""
    supervisor = envs._supervisor
    real = getattr(supervisor, at)
    setattr(supervisor, at, Interrupted(real) if at == "_commands" else Interrupted.raised)
    with pytest.raises(KeyboardInterrupt):
        call()
    setattr(supervisor, at, real)


def test_a_step_that_was_interrupted_can_be_waited_for() -> None:
    with vector() as envs:
        envs.reset()
        interrupt(envs, lambda: envs.step(actions(e2=NAP)))
        with pytest.raises(AlreadyPendingCallError):
            envs.step(actions())
        assert envs.step_wait()[0][:, 2].tolist() == [1] * 4
        assert envs.step(actions())[0][:, 2].tolist() == [2] * 4


def test_a_step_that_was_interrupted_before_its_command_can_be_made_again() -> None:
    with vector() as envs:
        envs.reset()
        interrupt(envs, lambda: envs.step(actions()), at="_issue_step")
        assert envs.step(actions())[0][:, 2].tolist() == [1] * 4


def test_a_call_that_was_interrupted_between_two_workers_breaks_the_environments() -> None:
    with vector() as envs:
        envs.reset()
        last = envs._workers.handles[-1]
        issue, last.issue = last.issue, Interrupted.raised  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            envs.call("pid")
        last.issue = issue  # type: ignore[method-assign]
        with pytest.raises(ClosedEnvironmentError, match="Ctrl-C"):
            envs.step(actions())


def test_a_restart_that_was_interrupted_breaks_the_environments() -> None:
    with vector(on_error="restart") as envs:
        envs.reset()
        handle = envs._workers.handles[1]
        receive, handle.receive_ready = handle.receive_ready, Interrupted.raised  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            envs.step(actions(e2=KILL))
        handle.receive_ready = receive  # type: ignore[method-assign]
        with pytest.raises(ClosedEnvironmentError, match=r"Ctrl-C .* restart of worker 1.* make a new one$"):
            envs.step_wait()


@pytest.mark.parametrize("method", ["join", "close", "start"])
def test_environments_can_be_closed_after_ctrl_c_in_a_restart_at(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: BaseProcess, *arguments: Any) -> None:
        if method != "start":
            real(process, *arguments)
        raise KeyboardInterrupt

    real = getattr(BaseProcess, method)
    with vector(on_error="restart") as envs:
        envs.reset()
        with monkeypatch.context() as patched:
            patched.setattr(BaseProcess, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                envs.step(actions(e2=KILL))


def test_what_was_sent_when_the_send_was_interrupted_is_received() -> None:
    with vector() as envs:
        envs.reset()
        interrupt(envs, lambda: envs.send(actions(e2=NAP)))
        assert envs.recv(4)[0][:, 2].tolist() == [1] * 4
        assert envs.step(actions())[0][:, 2].tolist() == [2] * 4


def test_what_was_sent_when_the_send_was_interrupted_with_its_request_is_received() -> None:
    class Requests:
        """Ctrl-C comes when the steps have just been requested."""

        def __init__(self, words: Any) -> None:
            self.words = words

        def add_each(self, *arguments: Any) -> None:
            self.words.add_each(*arguments)
            raise KeyboardInterrupt

    with vector() as envs:
        envs.reset()
        steps: Any = envs._steps
        real, steps.requested_step = steps.requested_step, Requests(steps.requested_step)
        with pytest.raises(KeyboardInterrupt):
            envs.send(actions())
        steps.requested_step = real
        assert envs.recv(4)[0][:, 2].tolist() == [1] * 4
        assert envs.step(actions())[0][:, 2].tolist() == [2] * 4


def test_what_was_sent_when_the_send_was_interrupted_before_its_command_is_received() -> None:
    with vector() as envs:
        envs.reset()
        interrupt(envs, lambda: envs.send(actions(e2=NAP)), at="_issue_send")
        assert envs.recv(4)[0][:, 2].tolist() == [1] * 4
        assert envs.step(actions())[0][:, 2].tolist() == [2] * 4


def test_a_restart_that_was_interrupted_is_made_by_the_next_wait() -> None:
    with vector(on_error="restart") as envs:
        envs.reset()
        before = envs.call("pid")
        os.kill(before[2], signal.SIGKILL)
        envs.call_async("pid")
        interrupt(envs, envs.call_wait, at="_count_restart")
        after = envs.call_wait()
        assert after[:2] == before[:2]
        assert after[2] == after[3] != before[2]
        assert envs.restarts == 1


# -------------------------------------------------------------------------------------- on_error="raise": exceptions


@pytest.mark.parametrize("during", ["step", "reset", "call", "send"])
def test_an_exception_arrives_as_itself_with_its_traceback_and_where_it_came_from(during: str) -> None:
    with vector() as envs:
        envs.reset(seed=50)
        envs.step(actions())
        with in_time(), pytest.raises(Boom, match="boom") as caught:
            DURING[during](envs, RAISE)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert "failing_envs.py" in str(cause)
        (note,) = caught.value.__notes__
        for part in ("environment 3", "worker 1", f"seed {73 if during == 'reset' else 53}", " steps"):
            assert part in note, f"no {part!r} in {note!r}"


@pytest.mark.parametrize("during", ["step", "call"])
def test_an_exception_with_percent_signs_arrives_as_itself(during: str) -> None:
    with vector() as envs:
        envs.reset()
        with pytest.raises(Boom, match="50% of %d are broken"):
            DURING[during](envs, PERCENT)


def test_several_exceptions_at_once_are_all_logged_and_the_last_is_raised() -> None:
    with vector() as envs:
        envs.reset()
        with pytest.warns(UserWarning, match="ERROR") as logged, pytest.raises(Boom) as caught:
            envs.step(actions(e0=RAISE, e1=RAISE, e3=RAISE))
        text = "\n".join(str(warning.message) for warning in logged)
        assert [f"Worker-{env} " in text for env in range(4)] == [True, True, False, True]
        assert "environment 3" in caught.value.__notes__[0]


def test_after_an_exception_in_a_call_the_environments_go_on() -> None:
    with vector() as envs:
        envs.reset()
        with pytest.raises(Boom):
            envs.call("once", 2, RAISE)
        assert envs.step(actions())[0][2].tolist() == observation(2, 0, 1, PLAIN).tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("fault", "error"), [(RAISE, Boom), (KILL, WorkerDied), (EXIT, WorkerDied)])
def test_a_factory_that_fails_ends_the_constructor_and_all_workers(
    tmp_path: Path, method: str, fault: int, error: type[Exception]
) -> None:
    trap = tmp_path / "fault"
    trap.write_text(str(fault))
    functions = makers(4)
    functions[3] = makers(4, factory_fault=trap)[3]
    with pytest.raises(error) as caught:  # what is left is found by the fixture of all tests
        AsyncVectorEnv(functions, num_workers=4, context=method)
    text = str(caught.value) + str(getattr(caught.value, "__notes__", ""))
    assert "environment 3" in text
    assert "worker 3" in text


# ------------------------------------------------------------------------------------------------ on_error="restart"


def restarting(count: int = 6, workers: int = 3, **arguments: Any) -> contextlib.AbstractContextManager[AsyncVectorEnv]:
    return vector(count, workers, on_error="restart", **{"max_restarts": 1000, **arguments})


def run(envs: AsyncVectorEnv, ledger: Ledger, steps: int, faults: dict[int, dict[int, int]] | None = None) -> None:
    """Step and check every number; ``faults`` says at which step which environment does what."""
    all_envs = list(range(envs.num_envs))
    ranges = [handle.envs for handle in envs._workers.handles]
    for step in range(steps):
        chosen = [step % 1000] * envs.num_envs
        lost: set[int] = set()
        for env, fault in (faults or {}).get(step, {}).items():
            if ledger.needs_reset[env]:
                continue  # its action is not looked at
            chosen[env] = fault
            lost |= {env} if fault == RAISE else set(next(envs for envs in ranges if env in envs))
        results = envs.step(np.array(chosen, np.int64))
        assert ledger.check_step(all_envs, chosen, results, lost) == lost
        if ledger.mode == "Disabled" and (results[2] | results[3]).any():
            mask = np.logical_or(results[2], results[3])
            observations, _ = envs.reset(options={"reset_mask": mask})
            over = np.flatnonzero(mask).tolist()
            ledger.check_reset(over, observations[over], set())


@pytest.mark.parametrize("mode", MODES)
def test_only_the_environments_of_a_dead_worker_are_truncated_and_the_others_lose_nothing(mode: str) -> None:
    faults = {10: {2: KILL}, 11: {5: SEGV}, 12: {2: EXIT}, 40: {0: KILL, 3: KILL}, 60: {1: KILL, 2: KILL, 5: KILL}}
    with restarting(autoreset_mode=mode) as envs:
        ledger = Ledger(6, mode)
        ledger.check_reset(list(range(6)), envs.reset(seed=1)[0], set())
        run(envs, ledger, 300, faults)
        assert ledger.restarted >= 10


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_raises_is_restarted_without_touching_its_neighbours(mode: str) -> None:
    with restarting(autoreset_mode=mode) as envs:
        ledger = Ledger(6, mode)
        ledger.check_reset(list(range(6)), envs.reset(seed=1)[0], set())
        pids = envs.call("pid")
        run(envs, ledger, 100, {7: {2: RAISE}, 8: {0: RAISE, 1: RAISE}, 33: {5: RAISE}})
        assert envs.call("pid") == pids


def test_the_cause_of_a_restart_is_in_the_infos() -> None:
    with restarting() as envs:
        envs.reset()
        causes = envs.step(actions(6, e2=KILL, e5=RAISE))[4]["restarted"]
        assert "worker 1" in causes[2]
        assert "SIGKILL" in causes[2]
        assert causes[5] == "Boom: boom"


def test_an_exception_with_percent_signs_is_restarted_too() -> None:
    with restarting() as envs:
        envs.reset()
        assert envs.step(actions(6, e5=PERCENT))[4]["restarted"][5] == "Boom: 50% of %d are broken"


def test_after_next_step_truncation_the_next_step_is_a_reset_step() -> None:
    with restarting(autoreset_mode="NextStep", endless=True) as envs:
        envs.reset()
        assert envs.step(actions(6, e2=KILL))[3].tolist() == [False, False, True, True, False, False]
        observations, rewards, terminated, truncated, infos = envs.step(actions(6))
        assert observations[2].tolist() == observation(2, 1, 0, -1).tolist()
        assert (rewards[2], terminated[2], truncated[2], infos) == (0.0, False, False, {})
        assert envs.step(actions(6))[0][2].tolist() == observation(2, 1, 1, PLAIN).tolist()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("fault", [KILL, RAISE])
def test_in_same_step_mode_the_final_observation_is_the_last_one_handed_out(fault: int, shared_memory: bool) -> None:
    with restarting(autoreset_mode="SameStep", endless=True, shared_memory=shared_memory) as envs:
        envs.reset()
        last = envs.step(actions(6))[0]
        observations, _, _, truncated, infos = envs.step(actions(6, e2=fault))
        assert truncated[2]
        assert observations[2].tolist() == observation(2, 0, 0, -1).tolist()
        assert infos["final_obs"][2] is not None
        assert infos["final_obs"][2].tolist() == last[2].tolist()


def test_in_same_step_mode_the_final_observation_is_the_last_one_that_went_into_a_slot() -> None:
    with vector(on_error="restart", autoreset_mode="SameStep") as envs:
        rows = envs.single_observation_space.shape
        slot = {
            "obs": np.zeros((4, 3, *rows), np.int64),
            "last_obs": np.zeros((4, *rows), np.int64),
            **{
                name: np.zeros((4, 3), dtype)
                for name, dtype in (("rewards", float), ("dones", bool), ("truncated", bool))
            },
        }
        envs.reset_into(slot)
        envs.step_into(actions(), slot, 0)
        infos = envs.step_into(actions(e2=KILL), slot, 1)
        assert infos["final_obs"][2].tolist() == slot["obs"][2, 1].tolist()


def test_actions_that_travel_as_messages_are_not_made_twice() -> None:
    with restarting(kind=MessageActions, endless=True) as envs:
        envs.reset()
        observations, _, _, truncated, infos = envs.step((PLAIN, PLAIN, KILL, PLAIN, PLAIN, PLAIN))
        assert infos["_restarted"].tolist() == [False, False, True, True, False, False]
        assert truncated.tolist() == [False, False, True, True, False, False]
        assert observations[3].tolist() == observation(3, 0, 0, -1).tolist()


def test_a_death_during_reset_is_restarted_and_the_reset_answered_with_its_seeds(tmp_path: Path) -> None:
    with restarting() as envs:
        envs.reset()
        observations, _ = envs.reset(seed=90, options={"env": 2, "fault": KILL, "path": str(tmp_path / "once")})
        assert observations[2].tolist() == observation(2, 0, 0, -1).tolist()
        assert observations[0].tolist() == observation(0, 1, 0, -1).tolist()
        assert envs.np_random_seed == (90, 91, 92, 93, 94, 95)
        assert envs.step(actions(6))[0][2].tolist() == observation(2, 0, 1, PLAIN).tolist()


def test_a_death_during_reset_counts_and_so_does_the_next_exception(tmp_path: Path) -> None:
    with restarting() as envs:
        envs.reset()
        envs.reset(options={"env": 2, "fault": KILL, "path": str(tmp_path / "once")})
        assert envs.restarts == 1
        envs.step(actions(6, e2=RAISE))
        assert envs.restarts == 2


def test_the_seed_of_a_reset_that_was_repeated_is_reported_when_the_worker_dies_again(tmp_path: Path) -> None:
    with vector(on_error="restart", max_restarts=1) as envs:
        envs.reset(seed=50, options={"env": 3, "fault": KILL, "path": str(tmp_path / "once")})
        with pytest.raises(RestartLimit, match="at environment 2, last seed 52"):
            envs.step(actions(e2=KILL))


def test_an_environment_that_raises_in_reset_is_restarted_and_its_next_step_is_a_step(tmp_path: Path) -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        observations, infos = envs.reset(seed=90, options={"env": 2, "fault": RAISE, "path": str(tmp_path / "once")})
        assert observations[:, 1].tolist() == [1, 1, 0, 1, 1, 1]
        assert infos["_restarted"].tolist() == [False, False, True, False, False, False]
        assert envs.step(actions(6))[0][:, 2].tolist() == [1] * 6


def test_a_neighbour_that_a_masked_reset_spared_is_truncated_when_its_worker_died_in_it(tmp_path: Path) -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        envs.step(actions(6))
        mask = np.array([False, False, True, False, False, False])
        envs.reset(options={"reset_mask": mask, "env": 2, "fault": KILL, "path": str(tmp_path / "once")})
        observations, _, _, truncated, infos = envs.step(actions(6))
        assert truncated.tolist() == [False, False, False, True, False, False]
        assert infos["_restarted"].tolist() == [False, False, False, True, False, False]
        assert observations[3].tolist() == observation(3, 0, 0, -1).tolist()


def test_a_death_during_call_is_restarted_and_the_call_answered(tmp_path: Path) -> None:
    with restarting() as envs:
        envs.reset()
        assert envs.call("once", 2, KILL, str(tmp_path / "once")) == (0, 1, 2, 3, 4, 5)


def test_a_death_during_a_call_with_long_answers_does_not_block_the_others(tmp_path: Path) -> None:
    with restarting() as envs:
        envs.reset()
        begin = time.monotonic()
        answers = envs.call("long_answer", 2, KILL, str(tmp_path / "once"))
        assert time.monotonic() - begin < within(8)
        assert [(len(answer), answer[0]) for answer in answers] == [(1_000_000, env) for env in range(6)]


def test_a_death_before_set_attr_is_restarted_and_the_attribute_set() -> None:
    with restarting() as envs:
        envs.reset()
        kill(envs, 1)
        envs.set_attr("mark", list("abcdef"))
        assert envs.get_attr("mark") == tuple("abcdef")


@pytest.mark.parametrize("during", ["call", "idle before a call", "set_attr"])
def test_environments_that_died_outside_a_step_are_truncated_in_the_next(tmp_path: Path, during: str) -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        envs.step(actions(6))
        if during == "call":
            envs.call("once", 2, KILL, str(tmp_path / "once"))
        else:
            kill(envs, 1)
            envs.set_attr("mark", 1) if during == "set_attr" else envs.call("pid")
        observations, _, terminated, truncated, infos = envs.step(actions(6))
        assert truncated.tolist() == [False, False, True, True, False, False]
        assert infos["_restarted"].tolist() == [False, False, True, True, False, False]
        assert not terminated.any()
        assert observations[2].tolist() == observation(2, 0, 0, -1).tolist()
        assert observations[0].tolist() == observation(0, 0, 2, PLAIN).tolist()


def test_a_death_while_idle_is_restarted_by_the_next_step() -> None:
    with restarting() as envs:
        ledger = Ledger(6, "NextStep")
        ledger.check_reset(list(range(6)), envs.reset()[0], set())
        for _ in range(5):
            kill(envs, 1)
            assert ledger.check_step(list(range(6)), [1] * 6, envs.step(np.full(6, 1)), {2, 3}) == {2, 3}


def test_a_death_while_idle_is_restarted_by_the_next_reset() -> None:
    with restarting() as envs:
        envs.reset()
        kill(envs, 1)
        assert envs.reset()[0][:, 1].tolist() == [1, 1, 0, 0, 1, 1]


@contextlib.contextmanager
def a_second_death(envs: AsyncVectorEnv) -> Iterator[dict[int, int]]:
    """Worker 1 dies at once, and worker 2 when it has done its part and only worker 0 is waited for."""
    timer = threading.Timer(0.35, os.kill, (pid_of(envs, 2), signal.SIGKILL))
    timer.start()
    yield {0: NAP, 2: KILL}
    timer.join()


def test_a_worker_that_dies_after_its_part_of_a_step_that_is_being_restarted_is_truncated_too() -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        with a_second_death(envs):
            _, _, _, truncated, infos = envs.step(actions(6, e0=NAP, e2=KILL))
        assert truncated.tolist() == [False, False, True, True, True, True]
        assert infos["_restarted"].tolist() == truncated.tolist()
        assert envs.restarts == 2


def test_a_worker_that_dies_after_its_part_of_a_reset_that_is_being_restarted_is_reset_again(tmp_path: Path) -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        with a_second_death(envs) as faults:
            observations, _ = envs.reset(seed=90, options={"faults": faults, "path": str(tmp_path / "once")})
        assert observations[:, 1].tolist() == [1, 1, 0, 0, 0, 0]
        assert envs.np_random_seed == (90, 91, 92, 93, 94, 95)
        assert envs.step(actions(6))[0][:, 2].tolist() == [1] * 6


def test_a_worker_that_dies_after_its_part_of_a_call_that_is_being_restarted_is_asked_again(tmp_path: Path) -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        with a_second_death(envs) as faults:
            assert envs.call("plan", faults, str(tmp_path / "once")) == (0, 1, 2, 3, 4, 5)


def test_a_worker_that_dies_after_its_part_of_a_recv_that_is_being_restarted_is_truncated_too() -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        with a_second_death(envs):
            envs.send(actions(6, e0=NAP, e2=KILL))
            _, _, _, truncated, infos, _ = envs.recv(min_envs=6, timeout=PATIENCE)
        assert truncated.tolist() == [False, False, True, True, True, True]
        assert infos["_restarted"].tolist() == truncated.tolist()
        assert envs.step(actions(6))[4] == {}


def test_the_death_of_all_workers_at_once_is_restarted() -> None:
    with restarting() as envs:
        envs.reset()
        for worker in range(3):
            kill(envs, worker)
        assert envs.step(actions(6))[3].all()
        assert not envs.step(actions(6))[3].any()


def test_restarts_count_dead_workers_and_environments_that_raised() -> None:
    with restarting() as envs:
        envs.reset()
        assert envs.restarts == 0
        envs.step(actions(6, e2=KILL))
        assert envs.restarts == 1
        envs.step(actions(6))
        envs.step(actions(6, e4=RAISE, e5=RAISE))
        assert envs.restarts == 3


def test_as_many_deaths_as_max_restarts_are_restarted_and_one_more_is_raised() -> None:
    with vector(on_error="restart", max_restarts=3) as envs:
        envs.reset()
        for _ in range(3):
            kill(envs, 1)
            envs.step(actions())
        kill(envs, 1)
        with in_time(), pytest.raises(RestartLimit, match="max_restarts=3") as caught:
            envs.step(actions())
        assert "worker 1" in str(caught.value)
        assert isinstance(caught.value.__cause__, WorkerDied)
        with pytest.raises(ClosedEnvironmentError):
            envs.step(actions())


def test_environments_that_raise_again_and_again_reach_the_limit_too() -> None:
    with vector(on_error="restart", max_restarts=2, autoreset_mode="SameStep") as envs:
        envs.reset()
        envs.step(actions(e0=RAISE))
        envs.step(actions(e0=RAISE))
        with pytest.raises(RestartLimit, match="Boom: boom"):
            envs.step(actions(e0=RAISE))


def test_restarts_that_lie_longer_back_than_the_window_do_not_count() -> None:
    with vector(4, 4, on_error="restart", max_restarts=1, restart_window=0.2) as envs:
        envs.reset()
        for _ in range(3):
            kill(envs, 1)
            envs.step(actions())
            time.sleep(0.25)


def test_a_factory_that_raises_at_a_restart_ends_with_its_error(tmp_path: Path) -> None:
    trap = tmp_path / "fault"
    with vector(on_error="restart", factory_fault=trap) as envs:
        envs.reset()
        trap.write_text(str(RAISE))
        kill(envs, 1)
        with in_time(), pytest.raises(Boom):
            envs.step(actions())
        with pytest.raises(ClosedEnvironmentError):
            envs.step(actions())


def test_a_factory_that_kills_its_process_at_a_restart_ends_with_the_limit(tmp_path: Path) -> None:
    trap = tmp_path / "fault"
    with vector(on_error="restart", max_restarts=4, factory_fault=trap) as envs:
        envs.reset()
        trap.write_text(str(KILL))
        kill(envs, 1)
        with pytest.raises(RestartLimit):
            envs.step(actions())


def test_a_factory_that_raises_when_its_environment_is_restarted_ends_with_its_error(tmp_path: Path) -> None:
    trap = tmp_path / "fault"
    with vector(on_error="restart", factory_fault=trap) as envs:
        envs.reset()
        trap.write_text(str(RAISE))
        with pytest.raises(Boom):
            envs.step(actions(e1=RAISE))


# ------------------------------------------------------------------------------------------------------ send and recv


def receive(envs: AsyncVectorEnv, ledger: Ledger, chosen: dict[int, int], lost: set[int], least: int) -> set[int]:
    """Receive until all that were sent have come; returns those that were restarted."""
    hit: set[int] = set()
    left = set(chosen)
    while left:
        *results, ids = envs.recv(min_envs=min(least, len(left)), timeout=PATIENCE)
        mine = ids.tolist()
        assert set(mine) <= left
        hit |= ledger.check_step(mine, [chosen[env] for env in mine], results, lost)
        left -= set(mine)
    return hit


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("mode", MODES[:2])
def test_deaths_between_send_and_recv_truncate_and_the_others_lose_nothing(mode: str, least: int) -> None:
    with restarting(autoreset_mode=mode) as envs:
        ledger = Ledger(6, mode)
        ledger.check_reset(list(range(6)), envs.reset()[0], set())
        for number in range(60):
            chosen = dict.fromkeys(range(6), number)
            lost = set()
            if number % 7 == 0 and not ledger.needs_reset[2]:
                chosen[2], lost = KILL, {2, 3}
            if number % 7 == 3 and not ledger.needs_reset[5]:
                chosen[5], lost = RAISE, {5}
            envs.send(np.array([chosen[env] for env in range(6)]))
            assert receive(envs, ledger, chosen, lost, least) == lost
        chosen = dict.fromkeys(range(6), 1)
        ledger.check_step(list(range(6)), [1] * 6, envs.step(np.full(6, 1)), set())


def test_an_environment_that_was_sent_nothing_is_truncated_at_its_next_step_when_its_worker_dies() -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        envs.send([KILL, PLAIN], [2, 4])
        assert envs.recv(min_envs=2, timeout=PATIENCE)[3].tolist() == [True, False]
        _, _, _, truncated, infos = envs.step(actions(6))
        assert truncated[3]
        assert infos["_restarted"][3]


def test_a_worker_that_was_sent_nothing_and_died_idle_is_truncated_at_its_next_step() -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        kill(envs, 2)
        envs.send([KILL], [2])
        assert envs.recv(timeout=PATIENCE)[3].tolist() == [True]
        observations, _, _, truncated, infos = envs.step(actions(6))
        assert truncated.tolist() == [False, False, False, True, True, True]
        assert infos["_restarted"].tolist() == truncated.tolist()
        assert observations[4].tolist() == observation(4, 0, 0, -1).tolist()


def test_infos_of_one_recv_do_not_come_again_with_the_next() -> None:
    with restarting(endless=True) as envs:
        envs.reset()
        envs.send(actions(6, e2=KILL))
        assert envs.recv(min_envs=6, timeout=PATIENCE)[4]["_restarted"].any()
        envs.send(actions(6))
        assert envs.recv(min_envs=6, timeout=PATIENCE)[4] == {}
        assert envs.step(actions(6))[4] == {}


def test_a_death_after_actions_that_were_sent_in_two_parts_is_restarted() -> None:
    with restarting(2, 1, endless=True) as envs:
        envs.reset()
        pid = pid_of(envs, 0)
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)  # both parts are there before the worker looks
            envs.send([PLAIN], [0])
            envs.send([PLAIN], [1])
            os.kill(pid, signal.SIGCONT)
            assert len(envs.recv(min_envs=2, timeout=PATIENCE)[5]) == 2
        kill(envs, 0)
        assert envs.step(actions(2))[3].all()


def test_the_survivor_of_actions_sent_in_two_parts_does_not_block_the_restart_of_another() -> None:
    with restarting(4, 2, endless=True) as envs:
        envs.reset()
        os.kill(pid_of(envs, 0), signal.SIGSTOP)
        envs.send([PLAIN], [0])
        envs.send([PLAIN], [1])
        os.kill(pid_of(envs, 0), signal.SIGCONT)
        assert len(envs.recv(min_envs=2, timeout=PATIENCE)[5]) == 2
        kill(envs, 1)
        envs.step_async(actions(4))
        assert envs.step_wait(timeout=PATIENCE)[3].tolist() == [False, False, True, True]


def test_a_worker_that_dies_in_the_middle_of_a_long_info_is_restarted_by_recv() -> None:
    with restarting(2, 1, endless=True) as envs:
        envs.reset()
        envs.set_attr("info_bytes", [4_000_000, 0])
        envs.send(actions(2))
        time.sleep(0.2)  # it has arrived for the first environment, and waits until its message is read
        kill(envs, 0)
        assert envs.recv(min_envs=2, timeout=PATIENCE)[3].all()


# ------------------------------------------------------------------------------------------------------ step_timeout

HANGS = [pytest.param(SLEEP, id="sleeps"), pytest.param(SPIN, id="spins"), pytest.param(None, id="stopped")]


def hang(envs: AsyncVectorEnv, fault: int | None) -> Any:
    """Actions for four environments with which worker 1 hangs."""
    if fault is not None:
        return actions(e2=fault)
    os.kill(pid_of(envs, 1), signal.SIGSTOP)
    return actions()


@pytest.mark.parametrize("fault", HANGS)
def test_a_worker_that_hangs_is_named_and_killed_after_the_step_timeout(fault: int | None) -> None:
    with vector(step_timeout=0.4) as envs:
        envs.reset()
        pid = pid_of(envs, 1)
        text = str(died(envs, lambda: envs.step(hang(envs, fault))))
        for part in (f"worker 1 (pid {pid})", "step_timeout=0.4", "was killed"):
            assert part in text
        assert fault is None or "at environment 2" in text  # one that was stopped had not begun
        assert not Path(f"/proc/{pid}").exists() or Peer.of(pid).wait(PATIENCE)


@pytest.mark.parametrize("fault", HANGS)
def test_a_worker_that_hangs_is_replaced_and_the_others_lose_nothing(fault: int | None) -> None:
    with vector(on_error="restart", step_timeout=0.4) as envs:
        ledger = Ledger(4, "NextStep")
        ledger.check_reset([0, 1, 2, 3], envs.reset()[0], set())
        for _ in range(2):
            chosen = hang(envs, fault)
            results = envs.step(chosen)
            assert ledger.check_step([0, 1, 2, 3], chosen.tolist(), results, {2, 3}) == {2, 3}
            assert "step_timeout" in results[4]["restarted"][2]
            ledger.check_step([0, 1, 2, 3], [1] * 4, envs.step(np.full(4, 1)), set())


@pytest.mark.parametrize("during", ["reset", "call", "send"])
def test_the_step_timeout_holds_for_everything_that_a_worker_is_asked(during: str) -> None:
    with vector(step_timeout=0.4) as envs:
        envs.reset()
        assert "step_timeout" in str(died(envs, lambda: DURING[during](envs, SLEEP)))


def test_a_worker_that_does_not_take_a_long_message_is_killed_after_the_step_timeout() -> None:
    with vector(step_timeout=0.4) as envs:
        envs.reset()
        os.kill(pid_of(envs, 1), signal.SIGSTOP)
        assert "step_timeout" in str(died(envs, lambda: envs.set_attr("mark", [b"x" * 1_000_000] * 4)))


def test_a_worker_that_does_not_take_a_long_message_is_replaced_and_the_new_one_gets_it() -> None:
    with vector(on_error="restart", step_timeout=0.4) as envs:
        envs.reset()
        os.kill(pid_of(envs, 1), signal.SIGSTOP)
        envs.set_attr("mark", [b"x" * 1_000_000] * 4)
        assert [len(mark) for mark in envs.get_attr("mark")] == [1_000_000] * 4
        assert envs.restarts == 1


def test_a_new_worker_that_hangs_while_it_makes_its_environments_is_killed(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    with vector(on_error="restart", step_timeout=0.2, max_restarts=1, factory_fault=fault, context="fork") as envs:
        envs.reset()
        fault.write_text(str(SLEEP))
        with pytest.raises(RestartLimit, match=r"did not build its environments within .* s \(see step_timeout\)"):
            envs.step(actions(e2=KILL))


def test_a_new_worker_that_hangs_is_killed_after_the_start_timeout_without_a_step_timeout(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    with vector(on_error="restart", start_timeout=5, max_restarts=1, factory_fault=fault, context="fork") as envs:
        envs.reset()
        fault.write_text(str(SLEEP))
        with pytest.raises(RestartLimit, match=r"did not build its environments within 5 s \(see start_timeout\)"):
            envs.step(actions(e2=KILL))


def test_a_worker_that_stops_in_the_middle_of_a_long_info_is_killed_after_the_step_timeout() -> None:
    with vector(step_timeout=0.4, endless=True) as envs:
        envs.reset()
        envs.set_attr("info_bytes", [0, 0, 4_000_000, 0])
        envs.step_async(actions())
        time.sleep(0.2)  # it has arrived, and waits until its message is read
        os.kill(pid_of(envs, 1), signal.SIGSTOP)
        assert "step_timeout" in str(died(envs, envs.step_wait))


def test_a_wait_that_is_shorter_than_the_step_timeout_kills_no_worker() -> None:
    with vector(step_timeout=5) as envs:
        envs.reset()
        pid = pid_of(envs, 1)
        os.kill(pid, signal.SIGSTOP)
        envs.step_async(actions())
        for _ in range(2):
            with pytest.raises(TimeoutError, match="step_wait"):
                envs.step_wait(timeout=0.1)
        os.kill(pid, signal.SIGCONT)
        assert envs.step_wait(timeout=PATIENCE)[0][:, 2].tolist() == [1, 1, 1, 1]
        assert pid_of(envs, 1) == pid


def test_a_worker_that_is_stopped_for_a_while_goes_on_and_nothing_is_lost() -> None:
    with vector(on_error="restart") as envs:
        ledger = Ledger(4, "NextStep")
        ledger.check_reset([0, 1, 2, 3], envs.reset()[0], set())
        for number in range(4):
            pid = pid_of(envs, number % 2)
            os.kill(pid, signal.SIGSTOP)
            timer = threading.Timer(0.25, os.kill, (pid, signal.SIGCONT))
            timer.start()
            ledger.check_step([0, 1, 2, 3], [number] * 4, envs.step(np.full(4, number)), set())
            timer.join()
        assert envs.restarts == 0


# ---------------------------------------------------------------------------------------------- the parent's death


PARENT = """
import sys, time
import numpy as np
from tests.support.failing_envs import SLEEP, SPIN, makers
from tests.support.processes import within
from memlane.vector import AsyncVectorEnv

if __name__ == "__main__":
    envs = AsyncVectorEnv(makers(4), num_workers=2, context=sys.argv[1])
    envs.reset()
    print(*sorted(set(envs.call("pid"))), flush=True)
    fault = {"idle": None, "step": 0, "sleep": SLEEP, "spin": SPIN}[sys.argv[2]]
    try:
        while fault is not None:
            envs.step(np.full(4, fault))
        time.sleep(60)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        begin = time.monotonic()
        envs.close(timeout=0.5)
        print("closed", time.monotonic() - begin < within(2), flush=True)
"""


@contextlib.contextmanager
def parent(tmp_path: Path, method: str, fault: str) -> Iterator[tuple[subprocess.Popen[str], list[Peer]]]:
    """A process of its own with two workers, in a group of its own."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, str(script), method, fault],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert len(line.split()) == 2, f"the parent did not start: {process.communicate(timeout=PATIENCE)[1]}"
        peers = [Peer.of(int(pid)) for pid in line.split()]
        yield process, peers
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("method", "fault"),
    [*(("forkserver", fault) for fault in ("idle", "step", "sleep", "spin")), ("fork", "sleep"), ("spawn", "spin")],
)
def test_the_workers_of_a_killed_parent_are_gone_within_a_second(tmp_path: Path, method: str, fault: str) -> None:
    before = set(os.listdir(names.directory()))
    with parent(tmp_path, method, fault) as (process, peers):
        time.sleep(0.05)
        process.kill()
        begin = time.monotonic()
        for peer in peers:
            assert peer.wait(PATIENCE)
            peer.close()
        assert time.monotonic() - begin < within(PROMISE + BUSY)
    assert not [name for name in set(os.listdir(names.directory())) - before if "memlane" in name]


@pytest.mark.parametrize(
    ("method", "fault"), [("forkserver", "step"), ("forkserver", "sleep"), ("fork", "step"), ("spawn", "step")]
)
def test_ctrl_c_is_the_parents_business_and_the_workers_stay_quiet(tmp_path: Path, method: str, fault: str) -> None:
    with parent(tmp_path, method, fault) as (process, peers):
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
        assert output.split("\n")[:2] == ["KeyboardInterrupt", "closed True"]
        lines = [line for line in errors.splitlines() if "pending call" not in line and "logger.warn" not in line]
        assert lines == []
        for peer in peers:
            assert peer.wait(PATIENCE)
            peer.close()
