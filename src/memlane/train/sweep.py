"""Sweep: the runs of several seeds and of several values of settings, one after the other or side by side.

Each run is a process of its own, ``memlane train``, so that one that fails takes nothing with it. Signals to the sweep
are passed on to the runs, which save and stop; when the sweep is killed, they do the same.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path

from memlane.core import Peer
from memlane.core.children import describe_exit
from memlane.core.cores import core_count
from memlane.train.algorithms import algorithm_for
from memlane.train.environments import make_envs
from memlane.train.interrupts import deferred_interrupts, exit_code
from memlane.train.options import (
    RUNS_DIR,
    OptionError,
    Options,
    build_config,
    env_label,
    parse_settings,
    resolve_options,
)
from memlane.train.run_dir import make_run_dir, run_name
from memlane.train.runs import find_runs, read_run
from memlane.train.ui.formatting import short_number
from memlane.train.ui.report import write_comparison

COMPARISON = "compare.html"
"""Name of the page in the directory of a sweep."""
_GRACE = 60.0
"""Seconds that a run gets to save and stop after the sweep was killed."""
_SIGNAL_SECONDS = 0.2
"""Longest wait before a signal to the sweep is passed on."""

# The runs are in process groups of their own, so that each gets a signal once, from the sweep.
_CHILD = """
import sys
from memlane.core import Peer, die_with
die_with(Peer.from_word(int(sys.argv[1]), "sweep"), float(sys.argv[2]))
from memlane.cli import main
sys.exit(main(sys.argv[3:]))
"""


def parse_seeds(text: str) -> list[int]:
    """Read seeds written as a number of them, as a range or as a list.

    >>> parse_seeds("3"), parse_seeds("100-102"), parse_seeds("3,7")
    ([0, 1, 2], [100, 101, 102], [3, 7])
    """
    first, dash, last = text.partition("-")
    parts = text.split(",")
    if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return list(range(int(first), int(last) + 1))
    if len(parts) > 1 and all(part.isdecimal() for part in parts) and len({*map(int, parts)}) == len(parts):
        return [int(part) for part in parts]
    if text.isdecimal() and int(text) > 0:
        return list(range(int(text)))
    raise OptionError(
        f"seeds must be a number of seeds (5), a range (100-119) or a list of different ones (3,7), found {text!r}"
    )


def split_values(text: str) -> list[str]:
    """Split at commas that are not in brackets.

    >>> split_values("1e-3,3e-4"), split_values("(64,64),(128,128)")
    (['1e-3', '3e-4'], ['(64,64)', '(128,128)'])
    """
    values, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    return values


@dataclass(frozen=True)
class _Job:
    """One run of a sweep."""

    name: str
    """Name of its directory."""
    options: Options
    settings: tuple[str, ...]
    """Settings as ``--set`` takes them."""


@dataclass(eq=False)
class _Child:
    """A run that is going on."""

    job: _Job
    process: subprocess.Popen[bytes]
    pidfd: int


class Sweep:
    """The runs of every combination of ``seeds`` and values of settings, with the other options of ``options``.

    ``settings`` are written as ``KEY=VALUE,VALUE``. ``directory`` is made for them; it must not have runs yet.
    ``parallel`` of them train at the same time; None: as many as there is a core for each learner and collector.
    Everything is checked here, before anything starts: ``OptionError``.
    """

    def __init__(
        self,
        options: Options,
        seeds: Sequence[int],
        settings: Sequence[str] = (),
        *,
        directory: Path | None = None,
        parallel: int | None = None,
    ) -> None:
        if parallel is not None and parallel < 1:
            raise OptionError(f"parallel must be at least 1, found {parallel}")
        self.jobs = list(_jobs(options, seeds, settings))
        names = [job.name for job in self.jobs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise OptionError(f"two runs would be {twice}; write different values in {', '.join(settings)}")
        resolved = resolve_options(self.jobs[0].options)
        assert resolved.backend is not None
        try:
            make_envs(resolved.env, 1, resolved.backend, settings=dict(resolved.env_settings)).close()
        except Exception as error:
            raise OptionError(str(error)) from error
        self.parallel = parallel or max(core_count() // (1 + options.collectors), 1)
        try:
            if directory is None:
                self.directory = make_run_dir(RUNS_DIR, run_name("sweep", env_label(options.env), options.algo))
            else:
                self.directory = directory
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"the directory {directory or RUNS_DIR} cannot be written: {error.strerror}") from error
        if find_runs([self.directory]):
            raise OptionError(f"{self.directory} has runs already: choose another directory")

    def run(self, say: Callable[[str], object]) -> int:
        """Train; ``say`` gets a line for each run that starts or ends. Return the exit code: 1 if a run has failed, and
        130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP."""
        say(f"{len(self.jobs)} runs in {self.directory}, {self.parallel} at a time")
        waiting = list(self.jobs)
        running: list[_Child] = []
        failed: list[str] = []
        passed_on = False
        with deferred_interrupts() as interrupts:
            try:
                while running or (waiting and not interrupts.name):
                    while waiting and len(running) < self.parallel and not interrupts.name:
                        running.append(self._start(waiting.pop(0)))
                    if interrupts.name and not passed_on:
                        passed_on = True
                        say(f"{interrupts.name}: waiting for {len(running)} runs to save and stop")
                        _send(running, exit_code(interrupts.name) - 128)
                    connection.wait([child.pidfd for child in running], _SIGNAL_SECONDS)
                    for child in [child for child in running if child.process.poll() is not None]:
                        running.remove(child)
                        os.close(child.pidfd)
                        if child.process.returncode and not interrupts.name:
                            failed.append(child.job.name)
                        say(self._describe(child, stopped=bool(interrupts.name)))
            finally:  # after a second signal, or when nobody reads what is said
                _send(running, signal.SIGKILL if interrupts.name else signal.SIGTERM)
                for child in running:
                    child.process.wait()
                    os.close(child.pidfd)
        found = find_runs([self.directory])
        if found:
            say(f"\n{write_comparison(found, self.directory / COMPARISON)}")
        if failed:
            say(f"{len(failed)} of {len(self.jobs)} runs failed: {', '.join(failed)}; their .log files say why")
        return exit_code(interrupts.name) or int(bool(failed))

    def _start(self, job: _Job) -> _Child:
        command = [
            sys.executable, "-c", _CHILD, str(Peer.current().word), str(_GRACE),
            *_arguments(job.options), "--run-dir", str(self.directory / job.name),
            *(["--set", *job.settings] if job.settings else []),
        ]  # fmt: skip
        with (self.directory / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        return _Child(job, process, os.pidfd_open(process.pid))

    def _describe(self, child: _Child, *, stopped: bool) -> str:
        """How a run has ended, in one line. ``stopped``: it was asked to."""
        name = child.job.name
        info = read_run(self.directory / name)
        if child.process.returncode and not stopped:
            log = self.directory / f"{name}.log"
            lines = log.read_text(errors="replace").strip().splitlines()
            return f"{name}: failed: {lines[-1] if lines else describe_exit(child.process.returncode)} ({log})"
        if not info.reason or info.state == "damaged":
            return f"{name}: stopped before its first update"
        evaluated = "" if math.isnan(info.evaluation) else f", evaluated {short_number(info.evaluation)}"
        return f"{name}: {info.reason}; {info.steps:,} steps, return {short_number(info.mean_return)}{evaluated}"


def _send(children: Iterable[_Child], number: int) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)


def _jobs(options: Options, seeds: Sequence[int], settings: Sequence[str]) -> Iterator[_Job]:
    """Every combination, checked."""
    names: list[str] = []
    values: list[list[str]] = []
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"a setting is written KEY=VALUE, found {text!r}")
        if name in names:
            raise OptionError(f"{name} is set twice; write all its values once, {name}=VALUE,VALUE")
        names.append(name)
        values.append(split_values(value))
    varied = [len(each) > 1 for each in values]
    label = env_label(options.env)
    for chosen in itertools.product(*values):
        texts = tuple(f"{name}={value}" for name, value in zip(names, chosen, strict=True))
        config = parse_settings(texts, options.algo)
        differs = "".join(f"-{_file_name(text)}" for text, several in zip(texts, varied, strict=True) if several)
        for seed in seeds:
            of_job = replace(options, seed=seed, config=config)
            try:
                build_config(algorithm_for(options.algo).Config, resolve_options(of_job).config)
            except (TypeError, ValueError) as error:
                raise OptionError(str(error)) from error
            yield _Job(f"{label}-{options.algo}{differs}-s{seed}", of_job, texts)


def _file_name(setting: str) -> str:
    """``network.hidden=(64,64)`` as part of a file name: ``hidden=64,64``."""
    name, _, value = setting.partition("=")
    value = "".join(character for character in value if character.isalnum() or character in ",.+-_")
    return f"{name.rpartition('.')[2]}={value.strip(',')}"


def _arguments(options: Options) -> list[str]:
    """The options as arguments of ``memlane train``; those that are None come from the preset again."""
    flags = [
        "algo", "collectors", "num_envs", "backend", "seed", "max_steps", "max_seconds", "target", "save_seconds",
        "max_lag",
    ]  # fmt: skip
    arguments = ["train", str(options.env)]
    for name in flags:
        if (value := getattr(options, name)) is not None:
            arguments.append(f"--{name.replace('_', '-')}={value}")
    return arguments + (["--deterministic"] if options.deterministic else [])
