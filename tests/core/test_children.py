"""Children: how they are started, how often they may be restarted, and how their exit is described."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.process
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memlane.core import children
from memlane.core.children import (
    THREAD_LIMITS,
    RestartWindow,
    describe_exit,
    exit_of,
    one_thread_each,
    signal_name,
    without_main_module,
)
from tests.support.processes import PATIENCE, child, sleep_forever

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, without a guard for its main module unless the source has one."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    command = [sys.executable, "-W", "error", str(path)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a window sees: change its only entry."""
    now = [1000.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.usefixtures("clock")
def test_restarts_are_allowed_up_to_the_limit() -> None:
    window = RestartWindow(3, 60)
    assert [window.record() for _ in range(5)] == [True, True, True, False, False]


@pytest.mark.usefixtures("clock")
def test_a_limit_of_zero_allows_no_restart() -> None:
    assert not RestartWindow(0, 60).record()


def test_old_restarts_do_not_count(clock: list[float]) -> None:
    window = RestartWindow(2, 60)
    assert window.record()
    clock[0] += 59
    assert window.record()
    clock[0] += 1  # the first is exactly 60 s old, and still counts
    assert not window.record()
    clock[0] += 60.5  # only the one above is not older than 60.5 s
    assert window.record()
    assert window.recent == 1


def test_refused_restarts_count_too(clock: list[float]) -> None:
    window = RestartWindow(1, 60)
    window.record()
    clock[0] += 50
    assert not window.record()
    clock[0] += 20  # the first is too old, the refused one is not
    assert not window.record()
    assert window.recent == 2


def test_recent_is_zero_before_the_first_restart() -> None:
    assert RestartWindow(3, 60).recent == 0


# ----------------------------------------------------------------------------------------------------------------- exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-signal.SIGKILL, "was killed by SIGKILL (by hand, or the kernel was out of memory)"),
        (-signal.SIGBUS, "was killed by SIGBUS (a mapped file was truncated, or memory or disk space for it ran out)"),
        (-250, "was killed by signal 250"),
    ],
)
def test_an_exit_code_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_every_signal_with_a_likely_cause_has_its_name_first() -> None:
    for number, cause in children._LIKELY_CAUSES.items():
        assert signal_name(number) == f"{signal.Signals(number).name} ({cause})"


def test_the_exit_of_a_child_is_described_once_it_has_ended() -> None:
    with child(sleep_forever) as process:
        process.kill()
        assert exit_of(process, PATIENCE) == describe_exit(-signal.SIGKILL)
        assert exit_of(process) == describe_exit(-signal.SIGKILL)


def test_a_child_that_runs_has_no_exit_and_is_waited_for_only_so_long() -> None:
    with child(sleep_forever) as process:
        begin = time.monotonic()
        assert exit_of(process, 0.05) is None
        assert time.monotonic() - begin < PATIENCE / 2
        process.kill()


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def no_thread_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_thread_limits")
def test_children_that_are_started_inside_get_one_thread_each() -> None:
    code = f"import os; print([os.environ.get(name) for name in {THREAD_LIMITS!r}])"
    with one_thread_each():
        inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert inside == f"{['1'] * len(THREAD_LIMITS)}\n"
    assert outside == f"{[None] * len(THREAD_LIMITS)}\n"


@pytest.mark.usefixtures("no_thread_limits")
def test_a_limit_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with one_thread_each():
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ["MKL_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


@pytest.mark.usefixtures("no_thread_limits")
def test_the_environment_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="start failed"), one_thread_each():
        raise RuntimeError("start failed")
    assert not set(THREAD_LIMITS) & set(os.environ)


# ---------------------------------------------------------------------------------------------------------- main module


def test_the_main_module_is_hidden_inside_and_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = ModuleType("__main__")
    main.__file__, main.__spec__ = "/script.py", "the spec"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with without_main_module():
        assert not hasattr(main, "__file__")
        assert main.__spec__ is None
    assert (main.__file__, main.__spec__) == ("/script.py", "the spec")
    with pytest.raises(RuntimeError, match="start failed"), without_main_module():
        raise RuntimeError("start failed")
    assert (main.__file__, main.__spec__) == ("/script.py", "the spec")


def test_a_main_module_without_a_file_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a notebook or of ``python -c``."""
    main: Any = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with without_main_module():
        pass
    assert not hasattr(main, "__file__")


def test_a_process_without_a_main_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__main__")
    with without_main_module():
        assert "__main__" not in sys.modules


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_of_a_script_without_a_guard_do_not_run_it_again(tmp_path: Path, method: str) -> None:
    done = run(
        tmp_path,
        f"""
        import multiprocessing as mp
        import os
        from memlane.core.children import ensure_fork_server, without_main_module

        print("script", flush=True)
        process = mp.get_context("{method}").Process(target=os.getpid)
        with without_main_module():
            if "{method}" == "forkserver":
                ensure_fork_server([])
            process.start()
        process.join()
        print(process.exitcode, flush=True)
        """,
    )
    assert (done.stdout, done.stderr) == ("script\n0\n", "")


# ---------------------------------------------------------------------------------------------------------- fork server

LOADED = """
    import multiprocessing as mp
    import sys
    from memlane.core.children import ensure_fork_server

    def report(pipe):
        pipe.send([name for name in ("colorsys", "wave") if name in sys.modules])

    def modules():
        context = mp.get_context("forkserver")
        here, there = context.Pipe()
        process = context.Process(target=report, args=(there,))
        process.start()
        print(here.recv(), flush=True)
        process.join()

    if __name__ == "__main__":
"""


@pytest.mark.parametrize(
    ("start", "loaded"),
    [
        ("ensure_fork_server(['colorsys'])", ["colorsys"]),
        ("mp.set_forkserver_preload(['wave']); ensure_fork_server(['colorsys'])", ["wave"]),
        ("mp.set_forkserver_preload([]); ensure_fork_server(['colorsys'])", []),
        ("ensure_fork_server(['colorsys']); ensure_fork_server(['wave'])", ["colorsys"]),
    ],
    ids=["memlane's list", "the user's list", "the user's empty list", "a server that runs"],
)
def test_the_fork_server_preloads_what_the_user_said_and_otherwise_what_memlane_says(
    tmp_path: Path, start: str, loaded: list[str]
) -> None:
    done = run(tmp_path, f"{LOADED}        {start}\n        modules()\n")
    assert (done.stdout, done.stderr) == (f"{loaded}\n", "")


def test_a_list_of_memlanes_own_may_be_replaced_after_the_server_has_stopped(tmp_path: Path) -> None:
    again = "ensure_fork_server(['colorsys']); forkserver._forkserver._stop(); ensure_fork_server(['wave'])"
    source = f"{LOADED}        from multiprocessing import forkserver\n        {again}\n        modules()\n"
    done = run(tmp_path, source)
    assert (done.stdout, done.stderr) == ("['wave']\n", "")


def test_children_collect_garbage_but_not_what_the_server_has_imported(tmp_path: Path) -> None:
    """A collection writes to each object that it looks at, and so copies the memory that children share."""
    done = run(
        tmp_path,
        """
        import gc
        import multiprocessing as mp
        from memlane.core.children import ensure_fork_server

        def report(pipe):
            import colorsys
            pipe.send((gc.isenabled(), any(thing is vars(colorsys) for thing in gc.get_objects())))

        if __name__ == "__main__":
            ensure_fork_server(["colorsys"])
            context = mp.get_context("forkserver")
            here, there = context.Pipe()
            process = context.Process(target=report, args=(there,))
            process.start()
            print(here.recv(), gc.isenabled(), gc.get_freeze_count(), flush=True)
            process.join()
        """,
    )
    assert (done.stdout, done.stderr) == ("(True, False) True 0\n", "")


def test_a_server_survives_signals_to_the_whole_program_and_its_children_can_be_terminated(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import multiprocessing as mp
        import os
        import signal
        import time
        from multiprocessing import forkserver
        from memlane.core.children import ensure_fork_server

        def get_signals(pipe):
            pipe.send([signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)])

        if __name__ == "__main__":
            ensure_fork_server([])
            server = forkserver._forkserver._forkserver_pid
            os.kill(server, signal.SIGTERM)  # before its first instruction
            context = mp.get_context("forkserver")
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                here, there = context.Pipe()
                process = context.Process(target=get_signals, args=(there,))
                process.start()
                print(here.recv(), forkserver._forkserver._forkserver_pid == server)
                process.join()
                os.kill(server, number)
                time.sleep(0.05)
            codes = set()
            for _ in range(30):  # one that has just been forked may be in between two actions
                sleeper = context.Process(target=time.sleep, args=(600,))
                sleeper.start()
                sleeper.terminate()
                sleeper.join(20)
                codes.add(sleeper.exitcode)
                sleeper.kill()
                sleeper.join()
            print(codes)
        """,
    )
    assert (done.stdout, done.stderr) == ("[True, True] True\n" * 3 + "{-15}\n", "")


def test_a_quiet_server_and_its_children_ignore_ctrl_c_and_this_process_does_not(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import multiprocessing as mp
        import signal
        from memlane.core.children import ensure_fork_server

        def report(pipe):
            pipe.send(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)

        if __name__ == "__main__":
            before = signal.getsignal(signal.SIGINT)
            ensure_fork_server([], quiet=True)
            context = mp.get_context("forkserver")
            here, there = context.Pipe()
            process = context.Process(target=report, args=(there,))
            process.start()
            print(here.recv(), signal.getsignal(signal.SIGINT) is before, flush=True)
            process.join()
        """,
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_a_quiet_server_is_gone_when_its_process_has_exited(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from multiprocessing import forkserver
        from memlane.core.children import ensure_fork_server

        ensure_fork_server([], quiet=True)
        ensure_fork_server([], quiet=True)
        print(forkserver._forkserver._forkserver_pid)
        """,
    )
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_forked_child_that_exits_leaves_the_server_of_its_parent_alone(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import os
        import sys
        from multiprocessing import forkserver
        from memlane.core.children import ensure_fork_server

        ensure_fork_server([], quiet=True)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs the exit handlers that it has inherited
        print(os.waitpid(child, 0)[1], os.waitpid(forkserver._forkserver._forkserver_pid, os.WNOHANG))
        """,
    )
    assert (done.stdout, done.stderr) == ("0 (0, 0)\n", "")


def test_the_fork_server_may_be_started_from_any_thread(tmp_path: Path) -> None:
    """Only the main thread may change signal handlers."""
    done = run(
        tmp_path,
        """
        import threading
        from memlane.core.children import ensure_fork_server

        thread = threading.Thread(target=ensure_fork_server, args=([],), kwargs={"quiet": True})
        thread.start()
        thread.join()
        print("started")
        """,
    )
    assert (done.stdout, done.stderr) == ("started\n", "")


def test_multiprocessing_still_has_the_internals_that_the_fork_server_needs() -> None:
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    assert callable(server._stop)
    assert {"_forkserver_pid", "_preload_modules"} <= set(vars(server))
    assert callable(mp.set_forkserver_preload)


def test_multiprocessing_still_has_the_list_of_children_that_a_forked_child_must_forget() -> None:
    assert isinstance(vars(multiprocessing.process)["_children"], set)
