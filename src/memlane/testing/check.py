"""check_env: all rules, in a child process, so that an environment that crashes or hangs is a failure like another."""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing as mp
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memlane.native import Spec, built_in, built_in_names, open_library
from memlane.testing.bench import Findings
from memlane.testing.report import EnvCheckFailed, EnvReport, Failure
from memlane.testing.rules import CHECKS, Case, Check

_MARK_BYTES = 256


def check_env(
    env: Spec | str | os.PathLike[str],
    *,
    seed: int = 0,
    steps: int = 200,
    timeout: float = 60.0,
    isolated: bool = True,
    **settings: float,
) -> EnvReport:
    """Does a native environment keep the rules of ``memlane/env.h``? Raises ``EnvCheckFailed``, which lists all that
    were broken, what was expected, what came, where, and what to do.

    ``env``: a spec (``numba_env`` makes one, too), the path of a library or the name of an environment that comes with
    memlane. ``steps``: how long the walks of random actions are: a longer one sees more of the game. ``timeout``:
    seconds for one check. ``isolated=False`` runs everything in this process, for debuggers: there a crash is a crash.
    ``settings``: the environment's; its own values unless given.

    >>> from memlane.testing import check_env
    >>> report = check_env("CartPole-v1")
    >>> "determinism" in report.checked
    True
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    spec = _spec_of(env)
    checking = _Checking(spec, spec.settings_from(settings), seed, steps)
    if isolated:
        checking.in_children(timeout)
    else:
        checking.run(0, checking.hear, lambda _: None)
    # The same mistake is often met again by later checks.
    failures = list({(failure.rule, failure.field): failure for failure in reversed(checking.failures)}.values())[::-1]
    report = EnvReport(spec.name, tuple(checking.checked), checking.skipped)
    if failures:
        raise EnvCheckFailed(report, failures)
    return report


def _spec_of(env: Any) -> Spec:
    if isinstance(env, Spec):
        return env
    if isinstance(env, str) and env in built_in_names():
        return built_in(env)
    if isinstance(env, str) and not Path(env).exists() and Path(env).suffix != ".so":
        raise LookupError(
            f"there is no native environment {env!r}, and no such file; there are: {', '.join(built_in_names())}"
        )
    if not isinstance(env, str | os.PathLike):
        raise TypeError(f"env must be a Spec, the path of a library or a name, found {type(env).__name__}")
    return open_library(env)


@dataclass(frozen=True)
class _Begun:
    """News from the child: this check is under way."""

    index: int


@dataclass(frozen=True)
class _Skipped:
    index: int
    why: str


_News = _Begun | _Skipped | Failure


class _Checking:
    """The checks one after the other, and what is known so far: here, and in a child that was forked from here."""

    def __init__(self, spec: Spec, settings: list[float], seed: int, steps: int) -> None:
        self._spec, self._settings, self._seed, self._steps = spec, settings, seed, steps
        self._at = 0
        self.failures: list[Failure] = []
        self.checked: list[str] = []
        self.skipped: dict[str, str] = {}

    def hear(self, news: _News) -> None:
        match news:
            case Failure():
                self.failures.append(news)
            case _Begun(index):
                self._at = index
                self.checked += CHECKS[index].rules
            case _Skipped(index, why):
                self.skipped.update(dict.fromkeys(CHECKS[index].rules, why))

    def run(self, first: int, tell: Callable[[_News], None], mark: Callable[[str], None]) -> None:
        for index, check in enumerate(CHECKS[first:], first):
            if (why := self._why_not(check)) is not None:
                tell(_Skipped(index, why))
                continue
            tell(_Begun(index))
            check.run(Case(self._spec, self._settings, self._seed, self._steps, Findings(tell, mark)))

    def _why_not(self, check: Check) -> str | None:
        if (why := check.pointless(self._spec)) is not None:
            return why
        broken = {failure.rule for failure in self.failures}
        missing = [rule for rule in check.needs if rule in broken or rule in self.skipped]
        return f"as it builds on {missing[0]}" if missing else None

    # ------------------------------------------------------------------------------------------------------ in a child

    def in_children(self, timeout: float) -> None:
        """One does it all, unless it dies: then another goes on with the next check."""
        first = 0
        while first < len(CHECKS):
            self._at = first
            if self._in_child(first, timeout):
                return
            first = self._at + 1

    def _in_child(self, first: int, timeout: float) -> bool:
        """Whether it came to the end."""
        # Forked, as a spec is full of addresses. The page with the last call outlives the child.
        context, page = mp.get_context("fork"), mmap.mmap(-1, _MARK_BYTES)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=self._child, args=(first, sender, page))
        with warnings.catch_warnings():
            # The threads that Python warns of are not missed: the child steps its own environments.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        sender.close()
        try:
            while receiver.poll(timeout):
                news = receiver.recv()
                if isinstance(news, str):
                    raise RuntimeError(f"the check itself failed, which is not the environment's fault:\n{news}")
                if news is None:
                    return True
                self.hear(news)
            self._trouble(page, f"no return within {timeout:g} s", "look for a loop without end")
        except EOFError:
            child.join()
            code = child.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            do = "run it under a debugger or with -fsanitize=address: check_env(..., isolated=False)"
            self._trouble(page, f"the process died ({how})", do)
        finally:
            child.kill()
            child.join()
            receiver.close()
            page.close()
        return False

    def _trouble(self, page: mmap.mmap, found: str, do: str) -> None:
        """Of the rule that is checked; in the first check, where there are many, of ``runs``."""
        rule = "runs" if self._at == 0 else CHECKS[self._at].rules[0]
        call = page[:].rstrip(b"\0").decode(errors="replace")
        self.failures.append(Failure(rule, "the function returns", found, do, call))

    def _child(self, first: int, sender: Connection, page: mmap.mmap) -> None:
        # A crash is told by the parent: no page of stacks, no file with the memory.
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def tell(news: _News) -> None:
            self.hear(news)
            sender.send(news)

        def mark(text: str) -> None:
            page[:] = text.encode()[:_MARK_BYTES].ljust(_MARK_BYTES, b"\0")

        try:
            self.run(first, tell, mark)
            sender.send(None)
        except BaseException:
            sender.send(traceback.format_exc())
        # Not the way out of the process that it was forked from, with its handlers.
        os._exit(0)
