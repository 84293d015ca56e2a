"""The smallest algorithm over AsyncRunner: it learns nothing and records the rollouts of each update."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from memlane.runner.async_runner import AsyncRunner
from tests.support.payloads import whole
from tests.support.transports import SLOT, Count, make_env, weights_of


class Tiny(AsyncRunner):
    def __init__(self, collect: Any = None, others: dict[str, Any] | None = None, **rl_cfg: Any) -> None:
        super().__init__("none", None, rl_cfg, **{"sim_backend": "gymnasium", "num_envs": 1, **(others or {})})
        self.collect = collect or Count()
        self.slot: Any = SLOT
        self.updates: list[list[tuple[int, int, int]]] = []
        """(writer, number, lag) of each rollout, by update."""
        self.torn = 0
        self.pause = 0.0
        """Seconds to sleep before each update."""
        self.at_update: dict[int, Callable[[], object]] = {}
        """Functions to call before an update, by its number."""

    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:  # noqa: ARG002
        self.begin()
        self.go_on(max_iterations)

    def begin(self) -> None:
        self.open(make_env, self.collect, rollout=self.slot, weights=weights_of(1))

    def go_on(self, updates: int) -> None:
        for number in range(updates):
            self.at_update.get(number, bool)()
            time.sleep(self.pause)
            with self.rollouts(40) as slots:
                self.torn += sum(not whole(slot) for slot in slots)
                self.updates.append([(slot.writer, int(slot["number"]), self.lag_of(slot)) for slot in slots])
            self.publish_next()

    def publish_next(self) -> None:
        assert self.weights is not None
        self.publish(weights_of(self.weights.version + 1))

    def pid(self, worker: int) -> int:
        assert self.collectors is not None
        return self.collectors.pids[worker]

    @property
    def restarts(self) -> int:
        return self.counters()["restarts"]
