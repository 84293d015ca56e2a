"""What every call must keep: it works or raises one of memlane's errors, and takes less than a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from memlane.core import MemlaneError

T = TypeVar("T")

LIMIT = 1.0
"""Seconds of this thread's time, not of the clock: the machine may be busy."""

slowest = 0.0
"""Seconds of the call that took longest so far in this process."""


def call(function: Callable[[], T], refusal: str = "") -> T | None:
    """Call ``function``; return None if it raises one of memlane's errors, or a ValueError that has the text
    ``refusal``. Everything else is a finding."""
    global slowest
    begin = time.thread_time()
    try:
        return function()
    except MemlaneError as error:
        if not str(error):
            raise AssertionError(f"{type(error).__name__} says nothing") from error
        return None
    except ValueError as error:
        if not refusal or refusal not in str(error):
            raise
        return None
    finally:
        taken = time.thread_time() - begin
        slowest = max(slowest, taken)
        assert taken < LIMIT, f"a call took {taken:.2f} s"
