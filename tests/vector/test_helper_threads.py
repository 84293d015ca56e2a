"""Busy threads of numeric libraries give way to workers; all other threads stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from memlane.vector.helper_threads import HelperThreads


def run(program: str) -> str:
    """Run a program in a process of its own: a lowered priority cannot be raised again."""
    begin = """
        import os, threading, time
        from memlane.vector.helper_threads import HelperThreads
        from memlane.vector.placement import Placement, PlacementReview

        def nice():
            threads = map(int, os.listdir("/proc/self/task"))
            return {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}

        def busy_for(seconds):  # in torch, with two threads
            tensor = torch.ones(1 << 20)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                tensor.add_(1)
    """
    code = textwrap.dedent(begin) + textwrap.dedent(program)
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="torch has helper threads on two cores")
def test_a_busy_helper_thread_of_torch_is_lowered_once_and_no_thread_of_python() -> None:
    pytest.importorskip("torch")
    printed = run("""
        import torch
        torch.set_num_threads(2)
        helpers, before = HelperThreads(), os.getpriority(os.PRIO_PROCESS, 0)
        counts = []
        for _ in range(2):
            helpers.watch()
            busy_for(0.3)
            counts.append(helpers.lower_busy())
        python = {thread.native_id for thread in threading.enumerate()}
        lowered = {thread for thread, value in nice().items() if value == before + 5}
        print(counts, len(lowered), lowered & python)
    """)
    assert printed.split("\n")[0] == "[1, 0] 1 set()"


def test_a_busy_thread_of_python_is_no_helper() -> None:
    end = threading.Event()

    def spin() -> None:
        while not end.is_set():
            pass

    thread = threading.Thread(target=spin)
    helpers = HelperThreads()
    thread.start()
    helpers.watch()
    end.wait(0.1)
    lowered = helpers.lower_busy()
    end.set()
    thread.join()
    assert lowered == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="torch has helper threads on two cores")
def test_a_review_of_crowded_workers_lowers_the_helper_threads_and_says_so_in_the_placement() -> None:
    """Two busy processes stand for the workers, on the cores that torch's two threads want."""
    pytest.importorskip("torch")
    printed = run("""
        import signal, torch
        torch.set_num_threads(2)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                parent = os.getppid()
                while os.getppid() == parent:
                    pass
                os._exit(0)
            pids.append(pid)
        review = PlacementReview(Placement(2, None, True, "a test"), 8)
        review.start(pids, 0)
        while review.active:
            review.begin_step()
            busy_for(0.005)
            assert review.end_step(pids, 0) is None
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(review.placement.lowered_threads)
        print(review.placement)
    """)
    lowered, text = printed.splitlines()
    assert lowered == "1"
    assert text.endswith("(a test); 1 helper thread of the caller at a lower priority")
