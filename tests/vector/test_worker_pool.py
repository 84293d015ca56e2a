"""Workers: how many there are, how they start, and on which cores they run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from memlane.vector import worker_pool
from tests.support.vector_envs import Counter, ours

pytestmark = pytest.mark.timeout(120, method="signal")

PATIENCE = 60.0
"""Seconds after which a wait for a file fails."""


def await_file(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} was not created")
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- start-up


@pytest.fixture
def _new_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A new fork server without a preload list of other tests."""
    server: Any = forkserver._forkserver
    server._stop()
    monkeypatch.setattr(server, "_preload_modules", ["__main__"])
    yield
    server._stop()


@pytest.mark.usefixtures("_new_server")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_do_not_import_torch(context: str) -> None:
    with ours([Counter] * 2, context=context) as envs:
        envs.reset()
        envs.step([0, 0])
        assert envs.apply(lambda env: "torch" in sys.modules) == (False, False)  # noqa: ARG005


def test_workers_come_from_the_fork_server_by_default() -> None:
    with ours([Counter] * 2) as envs:
        server: Any = forkserver._forkserver
        assert envs.apply(lambda env: os.getppid()) == (server._forkserver_pid,) * 2  # noqa: ARG005


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_make_their_environments_at_the_same_time(context: str, tmp_path: Path) -> None:
    def factory(number: int) -> Counter:
        (tmp_path / str(number)).touch()
        await_file(tmp_path / str(1 - number))  # a start one after the other would end here
        return Counter()

    with ours([partial(factory, number) for number in range(2)], context=context) as envs:
        assert envs.num_workers == 2


class Listener:
    """A replacement of stderr that creates a file when a text is written."""

    def __init__(self, text: str, file: Path) -> None:
        self.text, self.file = text, file
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        if self.text in self.written:
            self.file.touch()
        return len(text)

    def flush(self) -> None:
        """As files do."""


def test_a_start_that_takes_long_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = tmp_path / "printed"

    def slow() -> Counter:
        await_file(printed)  # it continues when the parent has printed its progress
        return Counter()

    listener = Listener("memlane: 1 of 2 workers ready, ", printed)
    monkeypatch.setattr(worker_pool, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", listener)
    with ours([Counter, slow], context="fork"):
        assert printed.exists()


def test_a_start_that_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker_pool, "_QUIET_SECONDS", PATIENCE)
    with ours([Counter] * 2, context="fork"):
        assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------------------------------------------------- threads


class Diary(Counter):
    """Writes down which thread of which process calls what."""

    def __init__(self, file: Path) -> None:
        super().__init__(2)
        self.file = file
        self._note("__init__")

    def _note(self, called: str) -> None:
        with self.file.open("a") as diary:
            diary.write(f"{called} {os.getpid()}.{threading.get_native_id()}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._note("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._note("step")
        return super().step(action)

    def render(self) -> None:
        self._note("render")

    def close(self) -> None:
        self._note("close")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_one_thread_makes_resets_steps_renders_and_closes_an_environment(mode: str, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(4)]
    with ours([partial(Diary, file) for file in files], context="fork", autoreset_mode=mode) as envs:
        envs.reset()
        for _ in range(5):  # over the end of an episode
            envs.step([0] * 4)
        envs.send([0] * 4)
        envs.recv(4)
        envs.render()
    diaries = [[line.split() for line in file.read_text().splitlines()] for file in files]
    assert [{called for called, _ in diary} for diary in diaries] == [
        {"__init__", "reset", "step", "render", "close"}
    ] * 4
    assert [len({thread for _, thread in diary}) for diary in diaries] == [1] * 4


# ---------------------------------------------------------------------------------------------------------------- cores


@pytest.fixture
def restrict() -> Iterator[Callable[[int], set[int]]]:
    """Leaves this process only so many of its cores, and says which."""
    before = os.sched_getaffinity(0)

    def to(count: int) -> set[int]:
        if len(before) < count:
            pytest.skip(f"needs {count} cores")
        cores = set(sorted(before)[:count])
        os.sched_setaffinity(0, cores)
        return cores

    yield to
    os.sched_setaffinity(0, before)


def _pid(env: Any) -> int:  # noqa: ARG001
    return os.getpid()


def _cores(env: Any) -> set[int]:  # noqa: ARG001
    return os.sched_getaffinity(0)


@pytest.mark.parametrize("count", [1, 2])
def test_there_are_as_many_workers_as_cores_that_this_process_may_use(
    count: int, restrict: Callable[[int], set[int]]
) -> None:
    restrict(count)
    with ours([Counter] * 3, context="fork", num_workers=None) as envs:
        assert envs.num_workers == count
        assert len(set(envs.apply(_pid))) == count


def test_there_are_no_more_workers_than_environments_when_there_are_more_cores(
    restrict: Callable[[int], set[int]],
) -> None:
    restrict(2)
    with ours([Counter], context="fork", num_workers=None) as envs:
        assert envs.num_workers == 1


def test_workers_that_are_pinned_are_each_on_a_core_of_its_own(restrict: Callable[[int], set[int]]) -> None:
    cores = restrict(2)
    with ours([Counter] * 2, context="fork", pin_workers=True) as envs:
        first, second = envs.apply(_cores)
    assert len(first) == len(second) == 1
    assert first | second == cores


def test_more_workers_than_cores_are_pinned_in_turn(restrict: Callable[[int], set[int]]) -> None:
    first, second = sorted(restrict(2))
    with ours([Counter] * 3, context="fork", num_workers=3, pin_workers=True) as envs:
        assert envs.apply(_cores) == ({first}, {second}, {first})


def test_workers_that_are_not_pinned_may_use_every_core(restrict: Callable[[int], set[int]]) -> None:
    cores = restrict(2)
    with ours([Counter] * 2, context="fork", pin_workers=False) as envs:
        assert envs.apply(_cores) == (cores, cores)


@pytest.mark.parametrize(("count", "pinned"), [(1, False), (2, True), (3, False)])
def test_by_default_workers_are_pinned_when_there_are_as_many_as_cores(
    count: int, pinned: bool, restrict: Callable[[int], set[int]]
) -> None:
    cores = restrict(2)
    with ours([Counter] * 3, context="fork", num_workers=count) as envs:
        found = envs.apply(_cores)
    assert [len(each) for each in found] == [1 if pinned else len(cores)] * 3
