"""A worker of a vector environment that dies at each fault point from the middle of a step on, until it waits again.

Its environments are truncated, or their results are those of the step; the other workers go on. The death of a worker
that has arrived may be noticed in the same step, while others still work, or in the next one.
"""

from __future__ import annotations

from typing import Any

import pytest

from memlane import _native
from memlane.vector import AsyncVectorEnv
from tests.chaos.lives import arm
from tests.chaos.storm import Counts
from tests.chaos.storms import ChaosRun
from tests.support.failing_envs import Counting, makers
from tests.vector.test_kills import ENVS, WORKERS, FaultInjector

pytestmark = [
    pytest.mark.skipif(not hasattr(_native, "arm_fault"), reason="the extension has no fault points; see `make chaos`"),
    pytest.mark.filterwarnings("ignore:.*WARN: "),
]

ARM = 10**6
"""A step with the action ARM + n arms the worker: it dies at its n-th fault point from there."""
LATE_DEATHS = 6
"""Deaths that the step itself does not notice: the worker has arrived and only waits for its next command."""
MOST_POINTS = 500


class Arming(Counting):
    def step(self, action: Any) -> Any:
        if action >= ARM:
            arm(f"die:{int(action) - ARM}")
        return super().step(action)


class PointRun(ChaosRun):
    """Steps whose first environment arms its worker, if a point is set."""

    point = 0

    def actions(self) -> tuple[dict[int, int], set[int]]:
        chosen, raised = super().actions()
        if self.point:
            chosen[0] = ARM + self.point
        return chosen, raised


@pytest.mark.parametrize("call", ["step", "send_and_receive"])
def test_a_worker_that_dies_at_any_point_has_made_its_step_or_is_restarted(call: str) -> None:
    envs = AsyncVectorEnv(
        makers(ENVS, Arming), num_workers=WORKERS, on_error="restart", max_restarts=10**9, autoreset_mode="SameStep"
    )
    try:
        run = PointRun(Counts(), envs, FaultInjector(envs, 0, ""), "SameStep", call)
        run.reset()
        completed = died = 0
        while completed < LATE_DEATHS and died + completed < MOST_POINTS:
            run.point = died + completed + 1
            before = run.peers[0]
            getattr(run, call)()  # compares every result with the expected one
            in_the_step = run.peers[0] != before
            died, completed = died + in_the_step, completed + (not in_the_step)
            run.point = 0
            run.step()
            assert run.peers[0] != before, "the worker must have died at its point"
            run.step()
        print(f"{call}: {died} deaths noticed in the step, {completed} in the next one")
        assert died > 0
        assert completed == LATE_DEATHS
    finally:
        envs.close(terminate=True)
