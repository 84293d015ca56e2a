"""Checks for every test: it leaves no name in /dev/shm, no process and no descriptor of memlane behind."""

from __future__ import annotations

import atexit
import gc
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

from tests.support.kills import Template

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
"""Lets the interpreters that tests start import `tests.support`."""

# A shell that starts the tests in the background makes them ignore SIGINT, which the programs they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes them ignore this one

# Every test checks which names it left behind, so parallel workers must not see the names of each other. The process
# that starts the workers removes their directories, also that of a worker that was killed.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["MEMLANE_SHM_DIR"] = tempfile.mkdtemp(dir=os.environ["MEMLANE_TESTS_DIR"])
else:
    os.environ["MEMLANE_TESTS_DIR"] = tempfile.mkdtemp(dir="/dev/shm", prefix="tests-")
    atexit.register(shutil.rmtree, os.environ["MEMLANE_TESTS_DIR"], ignore_errors=True)

SHM = Path(os.environ.get("MEMLANE_SHM_DIR", "/dev/shm"))


def pytest_collection_finish() -> None:
    """Keep what the collection has created out of later garbage collections: a full one took 0.3 s in a test run of
    7,000 tests, and forked children copied the pages that it touched."""
    gc.collect()
    gc.freeze()


def names_in_shm() -> set[str]:
    return {entry.name for entry in SHM.iterdir()}


def memfds_here() -> int:
    """Count the anonymous segments that this process holds open."""
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
        time.sleep(0.01)  # other programs use /dev/shm too
    assert not [name for name in new if "memlane" in name], f"names left in /dev/shm: {sorted(new)}"
    assert memfds_here() <= memfds, "anonymous segments left open"


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the named segments of one test."""
    # The fork server keeps the environment that it was started in and passes it to all its children.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    monkeypatch.setenv("MEMLANE_SHM_DIR", str(tmp_path))
    yield tmp_path
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def kill_folder() -> Iterator[Path]:
    """A directory for the named segments of kill tests, in the file system of real runs: its memory counts as Shmem."""
    path = Path(tempfile.mkdtemp(prefix="test-kills-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLANE_SHM_DIR", str(path))
        yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def template(kill_folder: Path) -> Iterator[Template]:
    """The process that forks the victims and survivors of kill tests."""
    process = Template(kill_folder)
    yield process
    process.close()
