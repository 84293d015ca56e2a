"""Interrupts: Ctrl-C ends a training run after an update, never during one. A second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C: within the block it only makes the yielded function return True.

    Ctrl-C keeps its meaning outside of the main thread, where Python delivers no signals, and in a program that has a
    SIGINT handler of its own or ignores SIGINT.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield lambda: False
        return
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
