"""AsyncRunner: what every asynchronous algorithm needs around it, once.

It checks the memory budget, makes the lanes, starts and watches the collectors, paces them by policy lag, replaces the
dead, passes on the errors of those that raised, counts, and ends everything within a bounded time. An algorithm says
what a rollout and its weights look like and how to collect, and learns in ``learn``:

    class Mine(AsyncRunner):
        def learn(self, max_iterations, save_interval=50, log_dir="logs"):
            self.open(make_env, collect, slot=..., weights=..., first=policy.state_dict())
            for iteration in range(max_iterations):
                with self.rollouts() as slots:
                    ...
                self.publish(policy.state_dict())
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memlane.core import Layout, SegmentClosed
from memlane.core.layout import FieldSpec
from memlane.lanes.lane import as_layout
from memlane.lanes.ring import Ring
from memlane.lanes.weights import Weights
from memlane.runner.memory_budget import MemoryBudget
from memlane.runner.process_collectors import Collectors, Restarts
from memlane.runner.protocols import Collect, Event, TakenSlot, Transport
from memlane.runner.thread_collectors import InProcess

SETTINGS: dict[str, type] = {
    "collectors": int, "rollouts_per_update": int, "max_lag": int, "deterministic": bool, "in_process": bool,
    "max_restarts": int, "restart_window": float, "min_collectors": int, "rollout_timeout": float,
}  # fmt: skip
"""What ``rl_cfg`` may say to the runner; ``AsyncRunner`` says what it means."""

_open: weakref.WeakSet[AsyncRunner] = weakref.WeakSet()


class AsyncRunner(ABC):
    """The base of asynchronous algorithms; see the module's text.

    ``rl_cfg`` may say: ``collectors`` (1), ``rollouts_per_update`` (one of each collector; more when one would become
    too old), ``max_lag`` (1; 0 is synchronous), ``deterministic`` (False; it is synchronous), ``in_process`` (False),
    ``max_restarts`` (10) in ``restart_window`` (60 s), ``min_collectors`` (1), ``rollout_timeout`` (600 s; how long to
    wait for a rollout). Whatever else it says is the algorithm's.
    """

    def __init__(
        self,
        env_name: Any,
        env_cfg_overrides: Mapping[str, Any] | None,
        rl_cfg: Mapping[str, Any] | None,
        *,
        device: str | None = None,
        collector_device: str | None = None,
        sim_backend: str = "mujoco",
        num_envs: int = 4096,
    ) -> None:
        """``num_envs`` is that of one collector. ``sim_backend`` selects native, gymnasium or mujoco environments."""
        if sim_backend not in ("native", "gymnasium", "mujoco"):
            raise ValueError(f"sim_backend must be 'native', 'gymnasium' or 'mujoco', found {sim_backend!r}")
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, found {num_envs}")
        self.env_name = env_name
        self.env_cfg_overrides = dict(env_cfg_overrides or {})
        self.rl_cfg = dict(rl_cfg or {})
        self.device = device or "cpu"
        self.collector_device = "cpu"
        self.sim_backend = sim_backend
        self.num_envs = num_envs
        if str(collector_device or "cpu") not in ("cpu", "cpu:0"):
            raise ValueError(f"collectors act on the CPU; collector_device cannot be {collector_device!r}")
        self.num_collectors = int(self.rl_cfg.get("collectors", 1))
        if self.num_collectors < 1:
            raise ValueError(f"collectors must be at least 1, found {self.num_collectors}")
        self.min_collectors = int(self.rl_cfg.get("min_collectors", 1))
        if not 1 <= self.min_collectors <= self.num_collectors:
            raise ValueError(
                f"min_collectors must be from 1 to the number of collectors, {self.num_collectors}, found "
                f"{self.min_collectors}"
            )
        self.deterministic = bool(self.rl_cfg.get("deterministic", False))
        self.max_lag = 0 if self.deterministic else int(self.rl_cfg.get("max_lag", 1))
        self.rollouts_per_update = int(self.rl_cfg.get("rollouts_per_update", self.num_collectors))
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be 0 (synchronous) or more, found {self.max_lag}")
        if self.rollouts_per_update < self.num_collectors:
            raise ValueError(
                f"rollouts_per_update must be at least the number of collectors, {self.num_collectors}, found "
                f"{self.rollouts_per_update}"
            )
        if self.deterministic and self.rollouts_per_update % self.num_collectors:
            raise ValueError(
                f"in deterministic mode every collector gives as many rollouts to an update: rollouts_per_update must "
                f"be a multiple of {self.num_collectors}, found {self.rollouts_per_update}"
            )
        self.rollout_timeout = float(self.rl_cfg.get("rollout_timeout", 600.0))
        self.collectors: Transport | None = None
        self._taken: list[TakenSlot] = []
        self.weights: Weights | None = None
        self.events: list[Event] = []
        self._closed = False
        _open.add(self)

    @abstractmethod
    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:
        """Train for so many updates; every ``save_interval`` of them a checkpoint goes to ``log_dir``."""

    # ----------------------------------------------------------------------------------------------- for algorithms

    def open(
        self,
        make_env: Callable[[int], Any],
        collect: Collect,
        *,
        slot: Mapping[str, FieldSpec],
        weights: Layout,
        first: Mapping[str, Any],
    ) -> None:
        """Make the lanes, publish the ``first`` weights and start the collectors."""
        if self._closed:
            raise ValueError("the runner was closed; make a new one")
        if self.collectors is not None:
            raise ValueError("the runner is open already; a second training needs a runner of its own")
        layout = as_layout(slot)
        under_way = self.rollouts_per_update * (self.max_lag + 1)
        budget = MemoryBudget()
        size = f"num_envs={self.num_envs}, the steps of a rollout, rollouts_per_update or max_lag={self.max_lag}"
        budget.add("rollouts", Ring.segment_layout(layout, under_way, "block"), lower=size)
        budget.add("weights", Weights.segment_layout(weights), lower="the size of the network")
        budget.check()
        self.weights = Weights(weights)
        self.weights.publish(first)
        if self.rl_cfg.get("in_process"):
            self.collectors = InProcess(
                self.num_collectors, make_env, collect, slot=layout, weights=self.weights, under_way=under_way
            )
        else:
            restarts = Restarts(
                int(self.rl_cfg.get("max_restarts", 10)),
                float(self.rl_cfg.get("restart_window", 60.0)),
                self.min_collectors,
            )
            self.collectors = Collectors(
                self.num_collectors, make_env, collect, slot=layout, weights=self.weights, under_way=under_way,
                restarts=restarts, on_event=self.events.append,
            )  # fmt: skip
        # Last come, first served: at the interpreter's end we must be there before the memory and the fork server go.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self.collectors.start()

    @contextmanager
    def rollouts(self, timeout: float | None = None) -> Iterator[list[TakenSlot]]:
        """As many rollouts as one update learns from, and those that would be too old for the next; they are the
        collectors' again at the end of the block. In deterministic mode they come in the collectors' order. After a
        ``WaitTimeout`` those that were there already wait for the next call."""
        assert self.collectors is not None
        assert self.weights is not None
        deadline = time.monotonic() + (self.rollout_timeout if timeout is None else timeout)
        too_old = self.weights.version - self.max_lag
        while len(self._taken) < self.rollouts_per_update or self.collectors.owes(too_old):
            self._taken.append(self.collectors.take(max(deadline - time.monotonic(), 0)))
        taken, self._taken = self._taken, []
        if self.deterministic:
            taken.sort(key=lambda slot: slot.writer)
        try:
            yield taken
        finally:
            with contextlib.suppress(SegmentClosed):  # by a signal handler, say
                for slot in taken:
                    slot.release()

    def publish(self, tensors: Mapping[str, Any]) -> int:
        """New weights; and as many new rollouts may begin as were learned from."""
        assert self.weights is not None
        assert self.collectors is not None
        version = self.weights.publish(tensors)
        self.collectors.pay_back()
        return version

    def lag_of(self, slot: TakenSlot) -> int:
        """How many versions the weights are ahead of those that made a rollout."""
        assert self.weights is not None
        return self.weights.version - slot.policy_version

    def counters(self) -> dict[str, int]:
        """What the collectors did since the start."""
        return {} if self.collectors is None else self.collectors.counters()

    # --------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End the collectors and let the memory go: bounded in time. Again is harmless, also from a signal handler, at
        exit or from ``__del__``."""
        if self._closed:
            return
        if self.collectors is not None:
            self.collectors.close()
        if self.weights is not None:
            self.weights.close()
        self._closed = True  # only now: one that was interrupted can be done again

    def __enter__(self) -> AsyncRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()


def _close_all() -> None:
    for runner in list(_open):
        runner.close()
