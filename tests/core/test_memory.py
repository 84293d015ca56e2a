"""Memory: free memory is checked before anything is allocated, and the error has the numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from memlane.core import BudgetError, Segment
from memlane.core.memory import FreeMemory, cgroup_memory, directory_space, format_bytes, machine_memory, require
from tests.support.processes import FIELDS

Run = Callable[[str], str]
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\b\d{4,}\b", text)]


# ------------------------------------------------------------------------------------------- a file system that is full


@pytest.fixture
def in_tiny_shm(tmp_path: Path) -> Run:
    """Runs code with a file system of one megabyte as the directory of named segments."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    probe = subprocess.run([*UNSHARE, "sh", "-c", mount], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"this machine does not let us mount: {probe.stderr.strip()}")

    def run(code: str) -> str:
        preface = """
            import os
            from memlane.core import BudgetError, Segment, memory, segment
            folder = os.environ["MEMLANE_SHM_DIR"]
            def refused(layout, **where):
                try:
                    Segment.create(layout, **where)
                except BudgetError as error:
                    return str(error)
        """
        result = subprocess.run(
            [*UNSHARE, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-W", "error", "-c"]
            + [textwrap.dedent(preface) + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            env={**os.environ, "MEMLANE_SHM_DIR": str(tmp_path)},
        )
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


LARGE = "{'x': ('u1', 2**20)}"


def test_a_named_segment_larger_than_its_file_system_is_an_error_with_both_numbers(in_tiny_shm: Run) -> None:
    text = in_tiny_shm(f"print(refused({LARGE}, name='x'))")
    assert numbers_in(text) == [2**20 + 4096, 2**20]
    assert "file system of" in text


def test_a_file_larger_than_its_file_system_is_an_error_with_both_numbers(in_tiny_shm: Run) -> None:
    assert numbers_in(in_tiny_shm(f"print(refused({LARGE}, file=folder + '/x'))"))[:2] == [2**20 + 4096, 2**20]


def test_a_segment_that_was_refused_leaves_nothing_behind(in_tiny_shm: Run) -> None:
    code = f"""
        before = os.statvfs(folder).f_bfree
        assert refused({LARGE}, name='x')
        print(os.listdir(folder), os.statvfs(folder).f_bfree == before, len(os.listdir('/proc/self/fd')) < 8)
    """
    assert in_tiny_shm(code) == "[] True True\n"


def test_room_that_is_taken_between_the_look_and_the_reservation_is_an_error_that_leaves_nothing(
    in_tiny_shm: Run,
) -> None:
    code = f"""
        memory.require = lambda *_: None  # the check found enough; another process has taken it since
        print(refused({LARGE}, name='x'))
        print(os.listdir(folder), os.statvfs(folder).f_bfree * 4096)
    """
    error, rest = in_tiny_shm(code).splitlines()
    assert numbers_in(error)[0] == 2**20 + 4096
    assert "No space left on device" in error
    assert rest == f"[] {2**20}"


def test_a_named_segment_that_fits_can_be_filled_to_the_last_byte(in_tiny_shm: Run) -> None:
    code = """
        with Segment.create({'x': ('u1', 2**20 - 4096)}, name='x') as all_of_it:
            all_of_it['x'][:] = 1
            print(os.statvfs(folder).f_bfree, refused({'y': ('u1', 1)}, name='y') is not None)
    """
    assert in_tiny_shm(code) == "0 True\n"


def test_anonymous_segments_are_not_bound_by_the_size_of_the_directory(in_tiny_shm: Run) -> None:
    code = """
        with Segment.create({'x': ('u1', 2**24)}) as anonymous:
            anonymous['x'][:] = 1
            print(anonymous['x'].sum())
    """
    assert in_tiny_shm(code) == f"{2**24}\n"


# ----------------------------------------------------------------------------------------------- a machine that is full


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a check that is missing would show as the end of the test run, out of memory."""
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was allocated"))


@pytest.mark.usefixtures("nothing_allocated")
def test_an_anonymous_segment_larger_than_the_machine_is_refused_with_both_numbers_before_it_is_allocated() -> None:
    with pytest.raises(BudgetError) as caught:
        Segment.create({"x": ("u1", 2**50)})
    wanted, free = numbers_in(str(caught.value))
    assert wanted == 2**50 + 4096
    assert 0 < free < 2**50


@pytest.mark.usefixtures("nothing_allocated")
def test_a_budget_error_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        Segment.create({"x": ("u1", 2**50)})


def test_the_tightest_limit_decides_and_is_named() -> None:
    rooms = [
        FreeMemory(1000, "the machine"),
        None,
        FreeMemory(10, "the control group"),
        FreeMemory(100, "the file system"),
    ]
    with pytest.raises(BudgetError, match=r"the ring needs 11 bytes .*, but the control group has only 10 .* free"):
        require(11, "the ring", rooms)


def test_exactly_what_is_free_can_be_had() -> None:
    require(10, "the ring", [FreeMemory(10, "the machine")])


def test_the_machine_has_what_the_kernel_calls_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    5 kB\n")
    assert machine_memory(tmp_path).free == 5 * 1024


def test_this_machine_has_some_room() -> None:
    assert machine_memory().free > 0


def test_a_kernel_that_does_not_say_what_is_available_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\n")
    with pytest.raises(BudgetError, match=r"expected a line MemAvailable in .*/meminfo, found none"):
        machine_memory(tmp_path)


def test_a_directory_has_what_its_file_system_gives_to_this_user(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    assert directory_space(tmp_path).free == pytest.approx(system.f_bavail * system.f_frsize, rel=0.1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**80, "1073741824.0 PiB")],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


# ------------------------------------------------------------------------------------------------------- control groups


class Groups:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path, *lines: str) -> None:
        self.proc, self.root = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("\n".join(lines) + "\n")

    def v2(self, path: str, limit: object, used: int, inactive_file: int = 0) -> None:
        self._write(path, {"memory.max": limit, "memory.current": used}, f"anon 5\ninactive_file {inactive_file}\n")

    def v1(self, path: str, limit: object, used: int, inactive_file: int = 0) -> None:
        statistics = f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive_file}\n"
        self._write(f"memory/{path}", {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}, statistics)

    def _write(self, path: str, numbers: dict[str, object], statistics: str) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, number in numbers.items():
            (folder / name).write_text(f"{number}\n")
        (folder / "memory.stat").write_text(statistics)

    def room(self) -> int | None:
        found = cgroup_memory(self.proc, self.root)
        return found.free if found else None


def test_a_limit_of_version_2_is_read_and_cache_that_can_be_dropped_counts_as_free(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/job")
    groups.v2("job", 1000, 700, inactive_file=50)
    assert groups.room() == 350


def test_a_limit_of_version_1_is_read_and_cache_that_can_be_dropped_counts_as_free(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "5:cpu,cpuacct:/job", "4:memory:/job", "0::/")
    groups.v1("job", 1000, 700, inactive_file=50)
    assert groups.room() == 350


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path: Path, version: str) -> None:
    groups = Groups(tmp_path, "0::/pod/job" if version == "v2" else "4:memory:/pod/job")
    getattr(groups, version)("pod/job", 1000, 100)
    getattr(groups, version)("pod", 2000, 1950)
    assert groups.room() == 50


def test_no_limit_in_version_2_is_the_word_max(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/job")
    groups.v2("job", "max", 700)
    assert groups.room() is None


def test_no_limit_in_version_1_is_a_huge_number(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "4:memory:/job")
    groups.v1("job", 9223372036854771712, 700)
    assert groups.room() is None


def test_a_container_that_sees_only_its_own_group_finds_it_at_the_root(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "4:memory:/docker/0123abcd")
    groups.v1(".", 1000, 400)
    assert groups.room() == 600


def test_a_group_above_its_limit_has_no_room_rather_than_less_than_none(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/job")
    groups.v2("job", 1000, 1200)
    assert groups.room() == 0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path, tmp_path) is None


def test_a_path_that_leads_out_of_the_tree_ends(tmp_path: Path) -> None:
    assert Groups(tmp_path, "0::/../../elsewhere").room() is None


def test_the_limit_of_a_group_is_named(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/job")
    groups.v2("job", 1000, 700)
    found = cgroup_memory(groups.proc, groups.root)
    assert found is not None
    assert found.limit == f"the control group {groups.root}/job"


def test_an_anonymous_segment_that_its_control_group_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = Groups(tmp_path, "0::/job")
    groups.v2("job", 10_000, 5_000)
    room = cgroup_memory(groups.proc, groups.root)
    monkeypatch.setattr("memlane.core.memory.cgroup_memory", lambda: room)
    with pytest.raises(BudgetError, match=f"the control group {groups.root}/job has only 5000"):
        Segment.create({"x": ("u1", 2000)})
    with Segment.create({"x": ("u1", 800)}) as segment:
        assert segment["x"].sum() == 0


def test_this_process_can_make_a_small_segment() -> None:
    with Segment.create(FIELDS) as segment:
        assert segment.nbytes < (cgroup_memory() or machine_memory()).free
