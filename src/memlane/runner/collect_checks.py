"""Checks of ``collect`` functions: mistakes that would leave the learner waiting are errors at once.

Collectors in processes and on threads share them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MAX_DISCARDED = 20
"""Slots in a row that a collector may leave without ``commit``."""


class DiscardedSlots:
    """The slots of one collector that it left without ``commit``. Discarding a rollout is allowed; never committing one
    is a mistake."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._in_a_row = 0
        self._warned = False

    def committed(self) -> None:
        """A slot was committed."""
        self._in_a_row = 0

    def discarded(self) -> None:
        """A slot was left without ``commit`` and without an exception."""
        self._in_a_row += 1
        remedy = "call slot.commit(policy_version=version, rows=rows) inside of `with sink.open() as slot:`"
        if not self._warned:
            self._warned = True
            logging.getLogger("memlane").warning(
                "collector %d left a slot without commit, so its rollout is discarded; %s", self._worker, remedy
            )
        if self._in_a_row >= _MAX_DISCARDED:
            raise RuntimeError(
                f"collector {self._worker} left {self._in_a_row} slots in a row without commit, so that the learner "
                f"gets no rollout; {remedy}"
            )


def returned_early(worker: int) -> RuntimeError:
    """The error of a ``collect`` that returned while the run goes on."""
    return RuntimeError(
        f"collect of collector {worker} returned before the run ended; collect must not return before sink.open() "
        "raises Stopped: loop with `while True`"
    )


@contextmanager
def closing(env: Any) -> Iterator[None]:
    """Close ``env`` at the end. If that fails after another exception, the other one propagates, with a note."""
    try:
        yield
    except BaseException as error:
        try:
            env.close()
        except Exception as failure:
            error.add_note(f"after that, env.close() raised {type(failure).__name__}: {failure}")
        raise
    env.close()
