"""Survive crashes: train CartPole while a collector is killed with SIGKILL every second. It still learns.

python examples/survive_a_crash.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

from memlane.runner.protocols import CollectorJoined, CollectorLost
from memlane.train import Metrics, Options, train


class Killer:
    """Called with each update: prints what happened to the collectors, and kills the next one when it is due."""

    def __init__(self, every: float, most: int) -> None:
        self.every = every
        self.most = most
        self.pids: dict[int, int] = {}
        self.begin = time.monotonic()
        self.last = 0.0
        self.kills = self.lost = self.joined = 0

    def __call__(self, metrics: Metrics) -> None:
        self.last = self.last or time.monotonic()
        for event in metrics.events:
            if isinstance(event, CollectorLost):
                self.lost += 1
                self.pids.pop(event.worker, None)
                self.say(f"lost: {event.cause}")
            elif isinstance(event, CollectorJoined):
                self.joined += 1
                self.pids[event.worker] = event.pid
                self.say(f"joined: collector {event.worker} (pid {event.pid}), life {event.incarnation + 1}")
        if self.pids and self.kills < self.most and time.monotonic() - self.last >= self.every:
            worker = sorted(self.pids)[self.kills % len(self.pids)]
            self.last = time.monotonic()
            self.kills += 1
            self.say(
                f"mean return {metrics.mean_return:.0f} after {metrics.env_steps:,} steps; kill -9 collector {worker}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids.pop(worker), signal.SIGKILL)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=float, default=1.0, help="seconds between kills")
    parser.add_argument("--kills", type=int, default=1_000_000, help="maximum number of kills")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="environment steps after which it gives up")
    parser.add_argument("--target", type=float, default=475, help="the mean return at which it is solved")
    parser.add_argument("--run-dir", help="directory of the run (default: runs/CartPole-v1-<time>)")
    args = parser.parse_args()

    killer = Killer(args.every, args.kills)
    options = Options(
        env="CartPole-v1",
        collectors=2,
        num_envs=16,
        max_steps=args.max_steps,
        target=args.target,
        run_dir=args.run_dir,
        # Without this a collector that dies for the 11th time within a minute is not replaced: something is wrong.
        config={"max_restarts": 1_000_000},
    )
    result = train(options, on_update=killer)
    print(f"\n{killer.kills} kills; {killer.lost} collectors were lost, {killer.joined} started")
    print(f"{result.env_steps:,} steps in {result.seconds:.1f} s; {result.reason}")
    print(f"mean return of the last 100 episodes {result.mean_return:.0f}, with deterministic actions "
          f"{result.evaluation['mean_return']:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
