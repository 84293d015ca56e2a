"""Survive crashes: train CartPole-v1 while a collector is killed with SIGKILL every 25,000 steps. It still learns.

Use it to see what a crash costs: the runner notices the death, starts another collector, and training goes on. It
prints each kill, loss and restart with the mean return, and at the end their numbers and the result of the training.

    python examples/survive_a_crash.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

from memlane.ipc import CollectorJoined, CollectorLost
from memlane.train import Metrics, Options, train


class Killer:
    """Called after each update: prints what happened to the collectors, and kills one every ``interval`` steps."""

    def __init__(self, interval: int, max_kills: int) -> None:
        self.interval = interval
        self.max_kills = max_kills
        self.next_kill = interval
        self.pids: dict[int, int] = {}
        self.start = time.monotonic()
        self.kills = self.lost = self.joined = 0

    def __call__(self, metrics: Metrics) -> None:
        for event in metrics.events:
            if isinstance(event, CollectorLost):
                self.lost += 1
                self.pids.pop(event.worker, None)
                self.log(f"lost: {event.cause}")
            elif isinstance(event, CollectorJoined):
                self.joined += 1
                self.pids[event.worker] = event.pid
                self.log(f"joined: collector {event.worker} (pid {event.pid}), start number {event.incarnation + 1}")
        # By steps, not by time: on a slow machine as much is learned between two kills as on a fast one.
        if self.pids and self.kills < self.max_kills and metrics.env_steps >= self.next_kill:
            worker = sorted(self.pids)[self.kills % len(self.pids)]
            self.next_kill = metrics.env_steps + self.interval
            self.kills += 1
            self.log(
                f"mean return {metrics.mean_return:.0f} after {metrics.env_steps:,} steps; kill -9 collector {worker}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids.pop(worker), signal.SIGKILL)

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=25_000, help="environment steps between kills")
    parser.add_argument("--kills", type=int, default=1_000_000, help="maximum number of kills")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="environment steps after which training stops")
    parser.add_argument("--target", type=float, default=475, help="mean return at which training stops")
    parser.add_argument("--run-dir", help="run directory (default: runs/CartPole-v1-appo-s0-<time>)")
    args = parser.parse_args()

    killer = Killer(args.every, args.kills)
    options = Options(
        env="CartPole-v1",
        collectors=2,
        num_envs=16,
        max_steps=args.max_steps,
        target=args.target,
        run_dir=args.run_dir,
        # By default, a collector that dies for the 11th time within a minute is not restarted.
        config={"max_restarts": 1_000_000},
    )
    result = train(options, on_update=killer)
    print(f"\n{killer.kills} kills; {killer.lost} collectors were lost, {killer.joined} started")
    print(f"{result.env_steps:,} steps in {result.seconds:.1f} s; {result.reason}")
    print(f"mean return of the last 100 episodes: {result.mean_return:.0f}; of the deterministic evaluation: "
          f"{result.evaluation['mean_return']:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
