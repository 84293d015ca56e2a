"""Interrupts: Ctrl-C, SIGTERM and SIGHUP end a training run after an update, never during one; a second one ends it at
once.

SIGTERM comes from ``docker stop``, Slurm, Kubernetes and ``timeout``, SIGHUP from a terminal that is closed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
"""The signals that end a run, and what they are called in results."""

_SAME_SECONDS = 1.0
"""A signal that follows within this time is the same one: ``timeout`` sends it to its child and to the whole group."""


def exit_code(name: str) -> int:
    """The exit code of a program that a signal has ended, as shells report it: 130, 143 or 129. 0 for what is not the
    name of a signal."""
    return next((128 + number for number, known in NAMES.items() if known == name), 0)


class Interrupts:
    """The signals that have arrived in a block of ``deferred_interrupts``."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._first_time = 0.0
        self._deferring = True

    @property
    def name(self) -> str:
        """The name of the signal that has arrived; empty if none has."""
        return "" if self._first is None else NAMES[signal.Signals(self._first)]

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within this block, the first signal raises at once, for work that can be given up at any point."""
        self._deferring = False
        try:
            yield
        finally:
            self._deferring = True

    def on_signal(self, number: int, _: object) -> None:
        if self._first is None:
            self._first, self._first_time = number, time.monotonic()
            if not self._deferring:
                stop_at_once(number)
        elif time.monotonic() - self._first_time > _SAME_SECONDS:
            stop_at_once(number)

    def raise_arrived(self) -> None:
        """Raise for the signal that has arrived, if one has."""
        if self._first is not None:
            stop_at_once(self._first)


def stop_at_once(number: int) -> NoReturn:
    """Raise what ends this program as the signal would: ``KeyboardInterrupt`` for Ctrl-C, else ``SystemExit``."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


_active: Interrupts | None = None
"""Those of the block that the main thread is in."""


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Defer the first signal: within the block it only sets ``name`` of the yielded object. A second one, more than a
    second later, raises.

    A block within a block yields the object of the outer one. Signals keep their meaning outside of the main thread,
    where Python delivers none, and where a program has a handler of its own or ignores them.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Interrupts()
        return
    if _active is not None:
        yield _active
        return
    defaults: dict[int, Any] = dict.fromkeys(NAMES, signal.SIG_DFL)
    defaults[signal.SIGINT] = signal.default_int_handler
    deferred = [number for number, default in defaults.items() if signal.getsignal(number) is default]
    interrupts = _active = Interrupts()
    try:
        for number in deferred:
            signal.signal(number, interrupts.on_signal)
        yield interrupts
    finally:
        for number in deferred:
            signal.signal(number, defaults[number])
        _active = None
