"""Observations: what ``reset`` and ``step`` hand out of the steps, as copies or as borrowed views."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from memlane.core.lease import Lease, debug_mode
from memlane.spaces import Column
from memlane.vector.steps import Steps, part_column


class Observations:
    """With ``copy``, every batch is the caller's own. Without, it is a read-only view of the rows themselves, valid
    until the next ``reset``, ``step`` or ``send``; in debug mode, using it afterwards is an error (see ``Lease``)."""

    def __init__(self, steps: Steps, *, copy: bool) -> None:
        self._steps = steps
        self._copy = copy
        self._lease: Lease | None = None
        self._debug = debug_mode()
        self._view: Column | None = None
        if steps.plan.observation_space is not None and not copy and not self._debug:
            views = {name: _read_only(array) for name, array in steps.segment.views().items()}
            self._view = part_column("observation", steps.plan.observation_space, views)

    def batch(self) -> Any:
        """All rows."""
        column = self._steps.observations
        assert column is not None
        if self._copy or self._steps.plan.observation_space is None:
            return column.read(copy=self._copy)
        if self._view is not None:
            return self._view.read(copy=False)
        self._lease = Lease(self._steps.segment, writeable=False, label="the observations of a step", debug=True)
        # Only those of the observations: whoever holds one when the lease ends is told of it.
        views = {name: self._lease[name] for name in self._lease if name.startswith("observation.")}
        borrowed = part_column("observation", self._steps.plan.observation_space, views)
        assert borrowed is not None
        return borrowed.read(copy=False)

    def end(self) -> None:
        """The rows are about to change: what was borrowed ends."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
