"""check_env: checks all rules in a child process, so that a crash or a hang is reported like any other failure."""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing as mp
import os
import resource
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memlane.core.arguments import as_count, is_finite_number
from memlane.core.children import describe_exit
from memlane.native import Spec, built_in_names
from memlane.native.library import unknown_env
from memlane.native.lowlevel import built_in, open_library
from memlane.testing.harness import FailureLog
from memlane.testing.report import EnvCheckFailed, EnvReport, Failure
from memlane.testing.rules import CHECKS, Check, CheckContext

_CALL_BYTES = 256
"""Size of the description of the current call that the child process shares with its parent."""


def check_env(
    env: Spec | str | os.PathLike[str],
    *,
    seed: int = 0,
    steps: int = 200,
    timeout: float = 60.0,
    isolated: bool = True,
    **settings: float,
) -> EnvReport:
    """Check that a native environment follows the rules of ``memlane/env.h`` (``memlane.testing.RULES``).

    Raises ``EnvCheckFailed``, which lists all violations: what was expected, what was found, where, and how to fix it.

    ``env``: a spec (also one from ``numba_env``), the path of a library, or the name of a built-in environment.
    ``steps``: length of the runs with random actions; longer runs reach more states. ``timeout``: seconds for one
    check. ``isolated=False`` runs everything in this process, so that a debugger sees a crash. ``settings``: values of
    the environment's settings instead of its defaults.

    >>> from memlane.testing import check_env
    >>> report = check_env("CartPole-v1")
    >>> "determinism" in report.checked
    True
    """
    as_count("steps", steps, 1)
    as_count("seed", seed, 0)
    if not (is_finite_number(timeout) and timeout > 0):
        raise ValueError(f"timeout must be a finite number of seconds above 0, found {timeout!r}")
    spec = _find_spec(env)
    values = spec.resolve_settings(settings, arguments=("seed", "steps", "timeout", "isolated"))
    checks = _CheckRun(spec, values, seed, steps)
    if isolated:
        checks.run_in_children(timeout)
    else:
        checks.run(0, checks.record, lambda _: None)
    # Later checks often find the same mistake again.
    failures = list({(failure.rule, failure.field): failure for failure in reversed(checks.failures)}.values())[::-1]
    report = EnvReport(spec.name, tuple(checks.checked), checks.skipped)
    if failures:
        raise EnvCheckFailed(report, failures)
    return report


def _find_spec(env: Any) -> Spec:
    if isinstance(env, Spec):
        return env
    if isinstance(env, str) and env in built_in_names():
        return built_in(env)
    if isinstance(env, str) and not Path(env).exists() and Path(env).suffix != ".so":
        raise LookupError(unknown_env(env, ", and there is no file of that name"))
    if not isinstance(env, str | os.PathLike):
        raise TypeError(
            f"env must be a Spec, the path of a library or the name of a built-in environment, found "
            f"{type(env).__name__}"
        )
    return open_library(env)


@dataclass(frozen=True)
class _CheckStarted:
    index: int


@dataclass(frozen=True)
class _CheckSkipped:
    index: int
    reason: str


_Event = _CheckStarted | _CheckSkipped | Failure


class _CheckRun:
    """Runs the checks one after the other, and records the results: in this process and in its forked child."""

    def __init__(self, spec: Spec, settings: list[float], seed: int, steps: int) -> None:
        self._spec, self._settings, self._seed, self._steps = spec, settings, seed, steps
        self._current = 0
        """Index of the check that was started last."""
        self.failures: list[Failure] = []
        self.checked: list[str] = []
        self.skipped: dict[str, str] = {}

    def record(self, event: _Event) -> None:
        match event:
            case Failure():
                self.failures.append(event)
            case _CheckStarted(index):
                self._current = index
                self.checked += CHECKS[index].rules
            case _CheckSkipped(index, reason):
                self.skipped.update(dict.fromkeys(CHECKS[index].rules, reason))

    def run(self, first: int, report: Callable[[_Event], None], set_current_call: Callable[[str], None]) -> None:
        for index, check in enumerate(CHECKS[first:], first):
            if (reason := self._skip_reason(check)) is not None:
                report(_CheckSkipped(index, reason))
                continue
            report(_CheckStarted(index))
            failures = FailureLog(report, set_current_call)
            check.run(CheckContext(self._spec, self._settings, self._seed, self._steps, failures))

    def _skip_reason(self, check: Check) -> str | None:
        if (reason := check.not_applicable(self._spec)) is not None:
            return reason
        violated = {failure.rule for failure in self.failures}
        for rule in check.depends_on:
            if rule in violated or rule in self.skipped:
                state = "is violated" if rule in violated else "was not checked"
                return f"because it depends on the rule {rule}, which {state}"
        return None

    # ------------------------------------------------------------------------------------------------------ in a child

    def run_in_children(self, timeout: float) -> None:
        """One child runs all checks. If it dies, another child continues with the next check."""
        first = 0
        while first < len(CHECKS):
            self._current = first
            if self._run_child(first, timeout):
                return
            first = self._current + 1

    def _run_child(self, first: int, timeout: float) -> bool:
        """Run the checks from ``first`` on in a child process. False: it died or was too slow."""
        # Forked, because a spec consists of addresses. The page with the current call stays readable after a crash.
        context, page = mp.get_context("fork"), mmap.mmap(-1, _CALL_BYTES)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=self._child_main, args=(first, sender, page))
        with warnings.catch_warnings():
            # Python warns about threads of this process, which the child does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        sender.close()
        try:
            while receiver.poll(timeout):
                event = receiver.recv()
                if isinstance(event, str):
                    raise RuntimeError(
                        f"the check itself failed, which is a bug in memlane, not in the environment:\n{event}"
                    )
                if event is None:
                    return True
                self.record(event)
            self._record_crash(
                page,
                f"no return within {timeout:g} s",
                "look for an endless loop, or allow more time: check_env(..., timeout=)",
            )
        except EOFError:
            child.join()
            fix = "run check_env(..., isolated=False) in a debugger, or build with -fsanitize=address"
            self._record_crash(page, f"the process {describe_exit(child.exitcode or 0)}", fix)
        finally:
            child.kill()
            child.join()
            receiver.close()
            page.close()
        return False

    def _record_crash(self, page: mmap.mmap, found: str, fix: str) -> None:
        """Record a failure of the current check's rule; the first check, which has many rules, has ``no_crash``."""
        rule = "no_crash" if self._current == 0 else CHECKS[self._current].rules[0]
        call = page[:].rstrip(b"\0").decode(errors="replace")
        self.failures.append(Failure(rule, "the function returns", found, fix, call))

    def _child_main(self, first: int, sender: Connection, page: mmap.mmap) -> None:
        # The parent reports a crash: no stack traces on stderr, no core file.
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def report(event: _Event) -> None:
            self.record(event)
            sender.send(event)

        def set_current_call(call: str) -> None:
            page[:] = call.encode()[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")

        try:
            self.run(first, report, set_current_call)
            sender.send(None)
        except BaseException:
            sender.send(traceback.format_exc())
        # Not sys.exit: the exit handlers belong to the parent process.
        os._exit(0)
