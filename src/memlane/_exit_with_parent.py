"""The first module that the fork server imports: the server exits when the process that started it dies.

``multiprocessing`` lets it exit when a pipe is closed that every child of the server holds too. So a server, or a child
of it, that was stopped would outlive that process, and keep all memory mapped. Its exit continues stopped children,
which then end themselves; see ``core.liveness.die_with``.

SIGTERM and SIGHUP to all processes of a program are for that process, which may need its children to end in order; so
the server does nothing on them. With SIG_IGN its children would inherit that, and could not be terminated.
"""

import os
import signal
from typing import Any

from memlane import _native

_native.exit_with_parent()


def _do_nothing(*_: Any) -> None:
    pass


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _handled)


def _use_defaults() -> None:
    for number in _handled:
        signal.signal(number, signal.SIG_DFL)
    _unblock()


# SIGTERM has been ignored since the first instruction; see ``core.children.ensure_fork_server``. A program that nohup
# started goes on ignoring SIGHUP.
_handled = [signal.SIGTERM] + ([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else [])
for _number in _handled:
    signal.signal(_number, _do_nothing)
# Blocked from the fork on until the child has its default actions: a signal to a child that has just been started must
# not be lost.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_use_defaults)
