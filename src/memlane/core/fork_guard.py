"""ForkGuard: an object that belongs to the process that created it is not used by forked children of that process.

A forked child has a copy of every object, and runs its ``__del__`` and its exit handlers. But the child processes of
the object, the other end of its pipes and its place in shared memory are still its parent's.
"""

from __future__ import annotations

import os
import weakref

from memlane.core.errors import UsedAfterFork


class ForkGuard:
    """Tells whether this process created an object, or was forked from the one that did.

    Methods of the object call ``require``; ``close`` and ``__del__`` do nothing unless ``owned``.

        >>> guard = ForkGuard("the environment", "create another in this process")
        >>> guard.require()
        >>> guard.owned
        True
    """

    owned: bool
    """False in forked children of the process that created the object. An attribute, because ``os.getpid`` is a system
    call, and a step of a vector environment asks."""

    __slots__ = ("__weakref__", "_label", "_pid", "_remedy", "owned")

    def __init__(self, label: str, remedy: str) -> None:
        """``label`` is the object in the error message, ``remedy`` what to do instead."""
        self.owned = True
        self._label = label
        self._remedy = remedy
        self._pid = os.getpid()
        _guards.add(self)

    def require(self) -> None:
        """Raise ``UsedAfterFork`` in a forked child."""
        if not self.owned:
            raise UsedAfterFork(
                f"{self._label} belongs to the process that created it (pid {self._pid}), from which this one (pid "
                f"{os.getpid()}) was forked; {self._remedy}"
            )


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


def _disown() -> None:
    for guard in _guards:
        guard.owned = False


os.register_at_fork(after_in_child=_disown)
