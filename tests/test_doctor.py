"""What the doctor finds on machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from memlane import doctor
from memlane.core import Segment, leftovers
from memlane.doctor import Finding, examine


def only(found: Any) -> Finding:
    (one,) = found
    assert isinstance(one, Finding)
    assert one.fix or one.state == "ok"  # whatever is wrong has a cure
    return one


def machine(folder: Path, *, group: str = "/box", **files: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with one group; files of the group by name, with _ for the dot."""
    proc, groups = folder / "proc", folder / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / group.lstrip("/")).mkdir(parents=True)
    (proc / "self/cgroup").write_text(f"0::{group}\n")
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    for name, content in files.items():
        (groups / group.lstrip("/") / name.replace("_", ".", 1)).write_text(content)
    return proc, groups


def test_this_machine_can_run_memlane() -> None:
    found = examine()
    assert [one for one in found if one.state == "fail"] == []
    subjects = {"Python", "numpy", "torch", "C compiler", "cores", "workers", "memfd", "futex", "pidfd", "leftovers"}
    assert subjects | {"threads"} <= {one.subject for one in found}


def test_the_doctor_needs_no_torch() -> None:
    code = "import sys; from memlane.doctor import examine; examine(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise PermissionError("/proc/meminfo")

    monkeypatch.setattr(doctor, "CHECKS", [broken])
    assert only(examine()).state == "fail"


# ----------------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize(("version", "state"), [("3.10.9", "fail"), ("3.11.0", "ok"), ("3.14.0rc1", "ok")])
def test_python_must_be_new_enough(version: str, state: str) -> None:
    assert only(doctor.python(version)).state == state


def test_a_missing_package_is_as_bad_as_it_is_needed() -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    states = {one.subject: one.state for one in doctor.packages(none)}
    assert states == {
        "numpy": "fail", "gymnasium": "fail", "torch": "warn", "tensorboard": "ok", "pillow": "ok", "numba": "ok",
    }  # fmt: skip


def test_an_old_package_is_found() -> None:
    states = {one.subject: one.state for one in doctor.packages(lambda _: "0.70.1+cpu")}
    assert states["numpy"] == "fail"
    assert states["torch"] == "warn"
    assert states["numba"] == "ok"


def test_a_missing_compiler_is_no_failure(tmp_path: Path) -> None:
    assert only(doctor.compiler({"PATH": str(tmp_path)})).state == "warn"


def test_the_compiler_that_cc_names_is_the_one() -> None:
    assert only(doctor.compiler({"PATH": os.environ["PATH"], "CC": "sh -c"})).found.endswith("/sh")
    assert only(doctor.compiler({"PATH": os.environ["PATH"], "CC": "no-such-compiler"})).state == "warn"


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_variables_that_pin_threads_are_found(name: str) -> None:
    assert f"unset {name}" in only(doctor.threads({name: "close"})).fix
    assert only(doctor.threads({name: "false", "OMP_NUM_THREADS": "4"})).state == "ok"


# ------------------------------------------------------------------------------------------------------------ machine


@pytest.mark.parametrize(
    ("quota", "affinity", "state"),
    [("max 100000", 8, "ok"), ("400000 100000", 8, "ok"), ("150000 100000", 8, "warn"), ("max 100000", 1, "warn")],
)
def test_fewer_than_two_cores_are_a_warning(tmp_path: Path, quota: str, affinity: int, state: str) -> None:
    proc, groups = machine(tmp_path, cpu_max=quota)
    assert only(doctor.cores(proc, groups, affinity)).state == state


def test_the_tightest_group_on_the_way_up_limits_the_cores(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, group="/outer/inner", cpu_max="800000 100000")
    (groups / "outer/cpu.max").write_text("300000 100000")
    assert doctor.cpu_limit(proc, groups) == 3


def test_the_cores_of_old_control_groups_are_counted(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path)
    (proc / "self/cgroup").write_text("4:memory:/\n3:cpu,cpuacct:/box\n")
    (groups / "cpu/box").mkdir(parents=True)
    (groups / "cpu/box/cpu.cfs_quota_us").write_text("250000\n")
    (groups / "cpu/box/cpu.cfs_period_us").write_text("100000\n")
    assert doctor.cpu_limit(proc, groups) == 2.5


@pytest.mark.parametrize(("limit", "state"), [(100 << 20, "fail"), (1 << 30, "warn"), (8 << 30, "ok")])
def test_little_memory_in_the_group_is_found(tmp_path: Path, limit: int, state: str) -> None:
    proc, groups = machine(tmp_path, memory_max=str(limit), memory_current="0", memory_stat="inactive_file 0")
    whole, group = doctor.memory(proc, groups)
    assert (whole.state, group.state) == ("ok", state)


def test_a_missing_directory_for_names_is_a_warning(tmp_path: Path) -> None:
    assert only(doctor.shared_memory(tmp_path / "none")).state == "warn"


def test_a_small_limit_of_locked_memory_matters_with_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    assert only(doctor.memlock(64 << 10)).state == "ok"
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    assert only(doctor.memlock(64 << 10)).state == "warn"
    assert only(doctor.memlock(-1)).state == "ok"


def test_huge_pages_are_told_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mode").write_text("always [within_size] never\n")
    assert only(doctor.huge_pages(tmp_path / "mode")).found.startswith("within_size")
    assert only(doctor.huge_pages(tmp_path / "none")).state == "ok"


def test_leftovers_are_found_and_stay_where_they_are(shm_dir: Path) -> None:
    leave_one_behind(shm_dir)
    (found,) = [one for one in examine() if one.subject == "leftovers"]
    assert (found.state, found.fix) == ("warn", "memlane clean")
    assert len(list(leftovers(shm_dir))) == 1


def leave_one_behind(folder: Path) -> None:
    code = """
import os
from memlane.core import Segment
segment = Segment.create({"numbers": ("int64", 8)}, name="forgotten")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "MEMLANE_SHM_DIR": str(folder)})


def test_a_living_owner_leaves_nothing_behind(shm_dir: Path) -> None:
    with Segment.create({"numbers": ("int64", 8)}, name="in-use"):
        assert only(doctor.leftover_segments(shm_dir)).state == "ok"
