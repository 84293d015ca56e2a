"""A replay buffer in a file: the process that writes it is killed, and the next one continues with all of its rows.

Use it if training must survive crashes or preemption without losing its replay buffer. Three times, it starts a process
that adds transitions, kills it with SIGKILL, and prints how many transitions the file has. At the end it samples by
priority and prints whether any row is torn.

    python examples/resume_replay.py
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import memlane.native
from memlane import Replay

FIELDS = {
    "obs": ("float32", 4), "action": ("int64", ()), "reward": ("float32", ()),
    "terminated": (bool, ()), "truncated": (bool, ()),
}  # fmt: skip


@dataclass
class Args:
    file: Path | None = None
    """path of the replay; by default a temporary file that is removed at the end"""
    capacity: int = 200_000
    num_envs: int = 16


def collect(file: Path, num_envs: int) -> None:
    """Add transitions of random actions to the replay, until killed."""
    replay = Replay.open(file)
    writer = replay.writer()
    envs = memlane.native.make("CartPole-v1", num_envs, copy=True)
    obs, _ = envs.reset(seed=os.getpid())
    valid = np.ones(num_envs, bool)
    while True:
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        row = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        writer.add(row, final={"obs": next_obs}, skip=~valid)  # the step after an episode's end only resets
        valid, obs = ~(terminated | truncated), next_obs


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "replay.memlane"
        if not file.exists():
            Replay(FIELDS, args.capacity, streams=args.num_envs, observations=["obs"], alpha=0.6, file=file).close()
        for attempt in range(1, 4):
            process = mp.get_context("spawn").Process(target=collect, args=(file, args.num_envs))
            process.start()
            with Replay.open(file) as replay:
                before = replay.added
                while replay.added < before + 20_000 and process.is_alive():
                    time.sleep(0.01)
                process.kill()
                process.join()
                added = replay.added - before
                print(f"process {attempt}: killed after {added:,} transitions; the file has {replay.added:,}")
                batch = replay.sampler(n_step=3, gamma=0.99).sample(1024)
                replay.update_priorities(batch["key"], np.abs(batch["obs"][:, 2]))
        with Replay.open(file) as replay:  # no other process has it open: this is the content of the file
            batch = replay.sampler(n_step=3, gamma=0.99).sample(4096)
            intact = np.isfinite(batch["obs"]).all() and (np.abs(batch["obs"][:, 0]) <= 2.4).all()
            print(f"{replay.size:,} transitions are stored, {replay.counters()['abandoned']} were abandoned by a kill;")
            print(f"4,096 of them were sampled by priority: {'none torn' if intact else 'SOME TORN'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
