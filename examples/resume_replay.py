"""A replay in a file: the process that fills it is killed, and the next one goes on with every row that it had.

python examples/resume_replay.py
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import memlane.native
from memlane.ipc import Replay

ROW = {
    "obs": ("float32", 4), "action": ("int64", ()), "reward": ("float32", ()),
    "terminated": (bool, ()), "truncated": (bool, ()),
}  # fmt: skip


@dataclass
class Args:
    file: Path | None = None
    """where the replay is; otherwise in a folder that is removed at the end"""
    capacity: int = 200_000
    num_envs: int = 16


def collect(file: Path, num_envs: int) -> None:
    """Steps environments at random into the replay, for ever."""
    replay = Replay.open(file)
    writer = replay.writer()
    envs = memlane.native.make("CartPole-v1", num_envs, copy=True)
    obs, _ = envs.reset(seed=os.getpid())
    valid = np.ones(num_envs, bool)
    while True:
        action = envs.action_space.sample()
        after, reward, terminated, truncated, _ = envs.step(action)
        step = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        writer.add(step, final={"obs": after}, skip=~valid)
        valid, obs = ~(terminated | truncated), after


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "replay.memlane"
        if not file.exists():
            Replay(ROW, args.capacity, streams=args.num_envs, observations=["obs"], alpha=0.6, file=file).close()
        for life in range(1, 4):
            process = mp.get_context("spawn").Process(target=collect, args=(file, args.num_envs))
            process.start()
            with Replay.open(file) as replay:
                before = replay.added
                while replay.added < before + 20_000:
                    time.sleep(0.01)
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
                print(f"life {life}: killed after {replay.added - before:,} transitions; the file has {replay.added:,}")
                batch = replay.sampler(n_step=3, gamma=0.99).sample(1024)
                replay.update_priorities(batch["key"], np.abs(batch["obs"][:, 2]))
        with Replay.open(file) as replay:  # nobody has it open now: this is what the disk has
            batch = replay.sampler(n_step=3, gamma=0.99).sample(4096)
            whole = np.isfinite(batch["obs"]).all() and (np.abs(batch["obs"][:, 0]) <= 2.4).all()
            print(f"{replay.size:,} transitions are stored, {replay.counters()['abandoned']} were not finished;")
            print(f"4,096 of them were drawn by priority: {'all whole' if whole else 'SOME TORN'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
