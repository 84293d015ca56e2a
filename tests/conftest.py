"""What holds for every test: it leaves no name in /dev/shm, no process, and no descriptor of ours behind."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
"""New interpreters that tests start import `tests.support` as the tests do."""

# A shell that starts tests in the background lets them ignore Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every test checks which names it left behind, so workers that run side by side must not see each other's.
    os.environ["MEMLANE_SHM_DIR"] = tempfile.mkdtemp(dir="/dev/shm", prefix="tests-")
    atexit.register(shutil.rmtree, os.environ["MEMLANE_SHM_DIR"])

SHM = Path(os.environ.get("MEMLANE_SHM_DIR", "/dev/shm"))


def names_in_shm() -> set[str]:
    return {entry.name for entry in SHM.iterdir()}


def memfds_here() -> int:
    """How many anonymous segments this process holds open."""
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            count += os.readlink(entry.path).startswith("/memfd:memlane")
        except FileNotFoundError:  # the descriptor of the scan itself
            continue
    return count


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    names, memfds = names_in_shm(), memfds_here()
    yield
    left = [child for child in mp.active_children() if child.is_alive()]
    for child in left:
        child.kill()
        child.join()
    assert not left, f"processes left running: {left}"
    deadline = time.monotonic() + 1
    while (new := names_in_shm() - names) and time.monotonic() < deadline:
        time.sleep(0.01)  # other programs use /dev/shm too; ours are gone by now
    assert not [name for name in new if "memlane" in name], f"names left in /dev/shm: {sorted(new)}"
    assert memfds_here() <= memfds, "anonymous segments left open"


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own for named segments."""
    # The fork server keeps the environment that it was started in, and gives it to all its children.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    monkeypatch.setenv("MEMLANE_SHM_DIR", str(tmp_path))
    yield tmp_path
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
