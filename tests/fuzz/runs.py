"""Run directories with changed files: their options, policy, metrics and report."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from memlane.train import Options, Run, train
from memlane.train.options import load_options
from memlane.train.trainer import _loading_checkpoint, load_policy
from memlane.train.ui.report import write_report
from tests.fuzz.call import call
from tests.fuzz.mutations import mutate, mutate_text

_STEPS = 32 * 32


class Runs:
    """The directory of a short run."""

    def __init__(self, folder: Path) -> None:
        trained, self.run_dir = folder / "trained", folder / "run"
        config = {"update_epochs": 1, "network": {"hidden": (8,)}}
        train(Options("CartPole-v1", max_steps=_STEPS, run_dir=trained, config=config))
        shutil.copytree(trained, self.run_dir)
        names = ("config.json", "checkpoint.pt", "metrics.csv", "result.json")
        self.originals = {name: (trained / name).read_bytes() for name in names}

    def try_one(self, draw: random.Random) -> None:
        for name, content in self.originals.items():
            (self.run_dir / name).write_bytes(content)
        for name in draw.sample(list(self.originals), draw.choice((1, 1, 2))):
            content = self.originals[name]
            changed = mutate(content, draw) if name == "checkpoint.pt" else mutate_text(content, draw)
            (self.run_dir / name).write_bytes(changed)
        call(lambda: load_options(self.run_dir))
        call(lambda: load_policy(self.run_dir))
        call(self.resume)
        call(lambda: write_report(self.run_dir))

    def resume(self) -> None:
        """Read what a resumed run reads."""
        run = Run(self.run_dir, tensorboard=False)
        try:
            with _loading_checkpoint(self.run_dir):
                run.load()
        finally:
            run.close()
