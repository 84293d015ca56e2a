"""Doctor: checks whether memlane can run well on this machine, and says what to do where it cannot.

The checks need neither torch nor a working training: people run them when something is missing.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Mapping as Table
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from memlane._native import Mapping
from memlane.core import Signal, WaitTimeout, leftovers
from memlane.core.cores import cpu_limit
from memlane.core.memory import cgroup_memory, format_bytes, machine_memory
from memlane.core.names import directory

_MIB = 1 << 20
_GIB = 1 << 30
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    state: State
    subject: str
    """What was checked."""
    found: str
    fix: str = ""
    """What to do; empty when there is nothing to do."""


def examine() -> list[Finding]:
    """Run all checks. A check that raises is a failed finding."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:
            subject = check.__name__.replace("_", " ")
            fix = "this is a bug in memlane: please report it"
            findings.append(Finding("fail", subject, f"{type(error).__name__}: {error}", fix))
    return findings


# ----------------------------------------------------------------------------------------------------------- software

_PACKAGES: dict[str, tuple[tuple[int, ...], State, str]] = {
    "numpy": ((1, 26), "fail", "pip install 'numpy>=1.26'"),
    "gymnasium": ((1, 0), "fail", "pip install 'gymnasium>=1.0'"),
    "torch": ((2, 4), "warn", "training needs it: pip install 'memlane[torch]'"),
    "tensorboard": ((2, 16), "ok", "pip install 'memlane[cli]' for metrics in TensorBoard"),
    "pillow": ((9,), "ok", "pip install 'memlane[cli]' for GIFs of episodes"),
    "numba": ((0, 60), "ok", "pip install 'memlane[numba]' for environments in compiled Python"),
}
"""Oldest version that works, state when the package is missing, and how to install it."""


def python(version: str | None = None) -> Iterator[Finding]:
    version = version or platform.python_version()
    if _version_numbers(version) < (3, 11):
        yield Finding("fail", "Python", version, "install Python 3.11 or newer")
    else:
        yield Finding("ok", "Python", f"{version} on {platform.system()} {platform.release()}")


def packages(version_of: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    for name, (oldest, if_missing, fix) in _PACKAGES.items():
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            if if_missing == "ok":
                yield Finding("ok", name, f"not installed (optional: {fix})")
            else:
                yield Finding(if_missing, name, "not installed", fix)
            continue
        if _version_numbers(version) < oldest:
            yield Finding("fail" if if_missing == "fail" else "warn", name, f"{version} is too old", fix)
        else:
            yield Finding("ok", name, version)


def compiler(environ: Table[str, str] = os.environ) -> Iterator[Finding]:
    fix = "`memlane build` needs a C compiler: apt-get install gcc, or set CC"
    names = [environ["CC"].split()[0]] if environ.get("CC", "").split() else ["cc", "gcc", "clang"]
    for name in names:
        if path := shutil.which(name, path=environ.get("PATH")):
            yield Finding("ok", "C compiler", path)
            return
    yield Finding("warn", "C compiler", f"not found: {', '.join(names)} (optional)", fix)


# ------------------------------------------------------------------------------------------------------------ machine


def cores(proc: Path = _PROC, cgroups: Path = _CGROUPS, affinity: int | None = None) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if affinity is None else affinity
    limit = cpu_limit(proc, cgroups)
    found = f"{usable} of {os.cpu_count()} usable by this process"
    if limit is not None:
        found += f", limited to {limit:g} by its control group"
    if min(usable, limit or math.inf) < 2:
        fix = "learner and collectors share one core: allow two or more (docker run --cpus=2, taskset, job limits)"
        yield Finding("warn", "cores", found, fix)
    else:
        yield Finding("ok", "cores", found)


def workers() -> Iterator[Finding]:
    """Where the workers of a large vector environment would run; nothing where Gymnasium cannot be imported."""
    try:
        from memlane.vector.placement import choose_placement
    except ImportError:
        return
    yield Finding("ok", "workers", f"of vector environments: {choose_placement(num_envs=1 << 20)}")


def memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Iterator[Finding]:
    for name, room in (
        ("machine memory", machine_memory(proc)),
        ("control group memory", cgroup_memory(proc, cgroups)),
    ):
        if room is None:
            yield Finding("ok", name, "no limit")
            continue
        found = f"{format_bytes(room.free)} free"
        if room.free < 256 * _MIB:
            yield Finding("fail", name, found, "not enough to train: free some memory, or raise the limit")
        elif room.free < 2 * _GIB:
            yield Finding("warn", name, found, "enough for small runs; larger ones need lower num_envs or collectors")
        else:
            yield Finding("ok", name, found)


def shared_memory(folder: Path | None = None) -> Iterator[Finding]:
    """The directory of named segments."""
    folder = folder or directory()
    try:
        system = os.statvfs(folder)
    except OSError as error:
        fix = f"named segments need it, training does not: mount -t tmpfs tmpfs {folder}"
        yield Finding("warn", str(folder), str(error.strerror), fix)
        return
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    found = f"{format_bytes(free)} free of {format_bytes(size)}"
    if not os.access(folder, os.W_OK):
        yield Finding("warn", str(folder), "not writable", f"chmod 1777 {folder}, or set MEMLANE_SHM_DIR")
    elif size <= 64 * _MIB:
        fix = "only named segments need it; this is Docker's default: docker run --shm-size=2g"
        yield Finding("warn", str(folder), found, fix)
    elif free < 64 * _MIB:
        fix = f"delete files that nothing needs: ls -la {folder}; memlane clean"
        yield Finding("warn", str(folder), found, fix)
    else:
        yield Finding("ok", str(folder), found)


def kernel() -> Iterator[Finding]:
    """System calls that lanes need: memfd for memory, futex for signals, pidfd for the death of peers.

    Makes a memfd itself: the first ``Segment`` of a process would remove leftovers, which a check must not.
    """
    fd = -1
    try:
        fd = os.memfd_create("memlane-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = Mapping(fd, 0, mmap.PAGESIZE, True)
    except OSError as error:
        fix = "lanes need Linux 5.4 or newer, and a sandbox that allows memfd_create and fallocate"
        yield Finding("fail", "memfd", str(error), fix)
        return
    finally:
        if fd >= 0:
            os.close(fd)
    yield Finding("ok", "memfd", "created, reserved and sealed")
    try:
        Signal(mapping, 0, "doctor").wait(1, timeout=0.01)
    except WaitTimeout:
        yield Finding("ok", "futex", "waits and times out")
    else:
        yield Finding("fail", "futex", "a wait returned without a wake", "this kernel's futex is broken: run on Linux")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield Finding(
            "fail", "pidfd", str(error), "lanes need Linux 5.4 or newer, and a sandbox that allows pidfd_open"
        )
    else:
        yield Finding("ok", "pidfd", "can be opened")


def memlock(soft: int | None = None) -> Iterator[Finding]:
    """The limit of locked memory. memlane locks only memory that a GPU copies from."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if soft is None else soft
    if soft == resource.RLIM_INFINITY:
        yield Finding("ok", "locked memory", "no limit")
    elif soft < 64 * _MIB and _has_gpu():
        fix = "pinned copies to the GPU are limited: ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield Finding("warn", "locked memory", f"at most {format_bytes(soft)}", fix)
    else:
        yield Finding("ok", "locked memory", f"at most {format_bytes(soft)}; only GPUs need more")


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def huge_pages(file: Path = _HUGE_PAGES) -> Iterator[Finding]:
    try:
        chosen = re.search(r"\[(\w+)\]", file.read_text())
    except OSError:
        yield Finding("ok", "huge pages", "not supported by this kernel (rings of many MiB would gain a little)")
        return
    mode = chosen[1] if chosen else "unknown"
    hint = f" (faster for rings of many MiB: echo within_size > {file})"
    hint = "" if mode in ("always", "within_size", "advise") else hint
    yield Finding("ok", "huge pages", f"{mode} for shared memory{hint}")


def leftover_segments(folder: Path | None = None) -> Iterator[Finding]:
    segments = list(leftovers(folder))
    if segments:
        size = format_bytes(sum(segment.nbytes for segment in segments))
        count = f"{len(segments)} segment{'s' if len(segments) > 1 else ''}"
        yield Finding("warn", "leftovers", f"{count} of dead processes, {size}", "memlane clean")
    else:
        yield Finding("ok", "leftovers", "none")


def threads(environ: Table[str, str] = os.environ) -> Iterator[Finding]:
    pinned = {name: environ[name] for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY") if name in environ}
    pinned = {name: value for name, value in pinned.items() if value.lower() not in ("false", "none", "disabled", "")}
    counts = {name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environ.get(name)}
    if pinned:
        found = ", ".join(f"{name}={value}" for name, value in pinned.items())
        yield Finding("warn", "threads", found, f"every process would use the same cores: unset {' '.join(pinned)}")
    else:
        found = ", ".join(f"{name}={value}" for name, value in counts.items()) or "no environment variable sets them"
        yield Finding("ok", "threads", f"{found}; collectors use one thread each")


CHECKS: list[Callable[[], Iterator[Finding]]] = [
    python, packages, compiler, cores, workers, memory, shared_memory, kernel, memlock, huge_pages, leftover_segments,
    threads,
]  # fmt: skip


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
