"""Interrupts: Ctrl-C ends a training after an update, never in the middle of one. A second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the yielded function say True."""
    if threading.current_thread() is not threading.main_thread():  # Python tells nobody else
        yield lambda: False
        return
    came = False
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    if before is not signal.default_int_handler:  # somebody else has plans for it, or none may be had
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
