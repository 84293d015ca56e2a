"""Programs that fork while they have an object of memlane: the child ends in every way, and the parent goes on."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.processes import output_of

FORKS = ["os.fork", "multiprocessing"]
ENDINGS = {
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "an exception": "os.dup2(os.open(os.devnull, os.O_WRONLY), 2); raise RuntimeError('on purpose')",
    "a garbage collection": "del it; gc.collect(); os._exit(0)",
    "close": "it.close(); sys.exit(0)",
}
every_end = pytest.mark.parametrize("ending", ENDINGS)
every_fork = pytest.mark.parametrize("fork", FORKS)


def output_of_forking(fork: str, before: str, ending: str, after: str) -> str:
    """What a program prints that executes ``before``, which sets ``it``, forks a child that ends with ``ending`` (a key
    of ``ENDINGS``, or code), and executes ``after``. Neither process may print anything on stderr."""
    return output_of(
        f"""
import gc, multiprocessing as mp, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
{textwrap.dedent(before)}
def end():
    global it
{textwrap.indent(textwrap.dedent(ENDINGS.get(ending, ending)), "    ")}
if {fork!r} == "os.fork":
    if (child := os.fork()) == 0:
        end()
        sys.exit(0)
    os.waitpid(child, 0)
else:
    child = mp.get_context("fork").Process(target=end)
    child.start()
    child.join()
{textwrap.dedent(after)}
"""
    )


def refusals(*calls: str) -> str:
    """Code for a child that prints which of these calls do not raise ``UsedAfterFork`` with a hint."""
    return f"""
from memlane.core import UsedAfterFork
for call in {calls!r}:
    try:
        print(call, "returned", eval(call), flush=True)
    except UsedAfterFork as error:
        assert "in this process" in str(error), error
print("all refused", flush=True)
"""
