"""Doctor: whether this machine is one that memlane runs well on; and what to do where it is not.

Needs neither torch nor a working training: it is called when something is missing.
"""

from __future__ import annotations

import contextlib
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
from memlane.core.memory import cgroup_memory, format_bytes, machine_memory
from memlane.core.names import directory

_MIB = 1 << 20
_GIB = 1 << 30
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    state: State
    what: str
    """What was looked at."""
    found: str
    fix: str = ""
    """What to do; empty when there is nothing to do."""


def examine() -> list[Finding]:
    """Everything there is to look at. A look that fails itself is a finding, too."""
    found: list[Finding] = []
    for look in LOOKS:
        try:
            found += look()
        except Exception as error:
            what = look.__name__.replace("_", " ")
            found.append(Finding("fail", what, f"{type(error).__name__}: {error}", "tell memlane's authors"))
    return found


# ----------------------------------------------------------------------------------------------------------- programs

_PACKAGES: dict[str, tuple[tuple[int, ...], State, str]] = {
    "numpy": ((1, 26), "fail", "pip install 'numpy>=1.26'"),
    "gymnasium": ((1, 0), "fail", "pip install 'gymnasium>=1.0'"),
    "torch": ((2, 4), "warn", "training needs it: pip install 'memlane[torch]'"),
    "tensorboard": ((2, 16), "ok", "pip install 'memlane[cli]' to have all curves in TensorBoard"),
    "pillow": ((9,), "ok", "pip install 'memlane[cli]' to have GIFs of episodes"),
    "numba": ((0, 60), "ok", "pip install 'memlane[numba]' to write environments in compiled Python"),
}
"""The oldest that works, how bad it is to have none, and how to get it."""


def python(version: str | None = None) -> Iterator[Finding]:
    version = version or platform.python_version()
    if _numbers(version) < (3, 11):
        yield Finding("fail", "Python", version, "install Python 3.11 or newer")
    else:
        yield Finding("ok", "Python", f"{version} on {platform.system()} {platform.release()}")


def packages(version_of: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    for name, (least, without, fix) in _PACKAGES.items():
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            if without == "ok":
                yield Finding("ok", name, f"not installed (optional: {fix})")
            else:
                yield Finding(without, name, "not installed", fix)
            continue
        if _numbers(version) < least:
            yield Finding("fail" if without == "fail" else "warn", name, f"{version} is too old", fix)
        else:
            yield Finding("ok", name, version)


def compiler(environ: Table[str, str] = os.environ) -> Iterator[Finding]:
    fix = "`memlane build` needs one: apt-get install gcc, or set CC"
    names = [environ["CC"].split()[0]] if environ.get("CC", "").split() else ["cc", "gcc", "clang"]
    for name in names:
        if place := shutil.which(name, path=environ.get("PATH")):
            yield Finding("ok", "C compiler", place)
            return
    yield Finding("warn", "C compiler", f"none of {', '.join(names)} is there (optional)", fix)


# ------------------------------------------------------------------------------------------------------------ machine


def cores(proc: Path = _PROC, groups: Path = _GROUPS, affinity: int | None = None) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if affinity is None else affinity
    limit = cpu_limit(proc, groups)
    words = f"{usable} of {os.cpu_count()} for this process"
    if limit is not None:
        words += f", limited to {limit:g} by its control group"
    if min(usable, limit or math.inf) < 2:
        fix = "learner and collectors take turns on one: allow two or more (docker run --cpus=2, taskset, job limits)"
        yield Finding("warn", "cores", words, fix)
    else:
        yield Finding("ok", "cores", words)


def cpu_limit(proc: Path = _PROC, groups: Path = _GROUPS) -> float | None:
    """The cores that the tightest control group around this process allows; None: all."""
    limits = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups / "cpu" if controllers else groups
            folder = root / path.lstrip("/")
            for place in [folder, *folder.parents]:
                if place != root and root not in place.parents:
                    break
                limits += _quota(place)
    return min(limits, default=None)


def _quota(folder: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
            return [] if most == "max" else [int(most) / int(period)]
        most, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
        return [int(most) / int(period)] if int(most) > 0 else []
    return []


def memory(proc: Path = _PROC, groups: Path = _GROUPS) -> Iterator[Finding]:
    for name, room in (
        ("memory of the machine", machine_memory(proc)),
        ("memory of the group", cgroup_memory(proc, groups)),
    ):
        if room is None:
            yield Finding("ok", name, "no limit")
            continue
        words = f"{format_bytes(room.free)} free"
        if room.free < 256 * _MIB:
            yield Finding("fail", name, words, "too little to train: free some, or raise the limit")
        elif room.free < 2 * _GIB:
            yield Finding("warn", name, words, "enough for small runs; lower num_envs and collectors for others")
        else:
            yield Finding("ok", name, words)


def shared_memory(folder: Path | None = None) -> Iterator[Finding]:
    folder = folder or directory()
    try:
        system = os.statvfs(folder)
    except OSError as error:
        fix = f"mount -t tmpfs tmpfs {folder}; runs work without, named segments do not"
        yield Finding("warn", str(folder), str(error.strerror), fix)
        return
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    words = f"{format_bytes(free)} free of {format_bytes(size)}"
    if not os.access(folder, os.W_OK):
        yield Finding("warn", str(folder), "not writable", f"chmod 1777 {folder}, or set MEMLANE_SHM_DIR")
    elif size <= 64 * _MIB:
        fix = "Docker's default: docker run --shm-size=2g; only named segments need it"
        yield Finding("warn", str(folder), words, fix)
    elif free < 64 * _MIB:
        yield Finding("warn", str(folder), words, f"remove what is not needed there: ls -la {folder}; memlane clean")
    else:
        yield Finding("ok", str(folder), words)


def waiting() -> Iterator[Finding]:
    """Lanes are sealed memory without a name, signals wait in futexes, peers are watched through pidfds. By hand, not
    with a segment: the first one of a process removes leftovers, and this only looks."""
    fd = -1
    try:
        fd = os.memfd_create("memlane-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = Mapping(fd, 0, mmap.PAGESIZE, True)
    except OSError as error:
        fix = "no lane can be made: Linux 5.4 or newer, and a sandbox that allows memfd_create and fallocate"
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
        yield Finding("fail", "futex", "a wait for nothing ended", "this kernel's futex does not work: run on Linux")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield Finding("fail", "pidfd", str(error), "Linux 5.4 or newer; in a sandbox, allow pidfd_open")
    else:
        yield Finding("ok", "pidfd", "can be opened")


def memlock(soft: int | None = None) -> Iterator[Finding]:
    """Memory that a GPU copies from is locked; nothing else of memlane's is."""
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


def huge_pages(file: Path = _HUGE) -> Iterator[Finding]:
    try:
        chosen = re.search(r"\[(\w+)\]", file.read_text())
    except OSError:
        yield Finding("ok", "huge pages", "not in this kernel; rings of many MiB would gain a little")
        return
    mode = chosen[1] if chosen else "unknown"
    hint = "" if mode in ("always", "within_size", "advise") else f" (for rings of many MiB: echo within_size > {file})"
    yield Finding("ok", "huge pages", f"{mode} for shared memory{hint}")


def names(folder: Path | None = None) -> Iterator[Finding]:
    dead = list(leftovers(folder))
    if dead:
        total = format_bytes(sum(one.nbytes for one in dead))
        many = f"{len(dead)} segment{'s' if len(dead) > 1 else ''}, {total}"
        yield Finding("warn", "leftovers", f"{many}, of owners that are dead", "memlane clean")
    else:
        yield Finding("ok", "leftovers", "none")


def threads(environ: Table[str, str] = os.environ) -> Iterator[Finding]:
    pinned = {name: environ[name] for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY") if name in environ}
    pinned = {name: value for name, value in pinned.items() if value.lower() not in ("false", "none", "disabled", "")}
    counts = {name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environ.get(name)}
    if pinned:
        words = ", ".join(f"{name}={value}" for name, value in pinned.items())
        yield Finding("warn", "threads", words, f"every process would use the same cores: unset {' '.join(pinned)}")
    else:
        words = ", ".join(f"{name}={value}" for name, value in counts.items()) or "no variable pins or counts them"
        yield Finding("ok", "threads", f"{words}; collectors use one each")


LOOKS: list[Callable[[], Iterator[Finding]]] = [
    python, packages, compiler, cores, memory, shared_memory, waiting, memlock, huge_pages, names,
    threads,
]  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
