"""A process that overwrites the segments of lanes, headers included, while this one attaches to them and uses them."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import random
from pathlib import Path

from memlane.core import Peer, die_with
from memlane.lanes import Replay, Ring, Weights
from tests.fuzz.call import call
from tests.fuzz.files import Files, fill, use_replay, use_ring, use_weights
from tests.fuzz.mutations import word
from tests.support.replays import PLAIN, STEP


class Strangers(Files):
    """Named lanes that another process scribbles on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        slot = {"x": ("float32", 3)}
        self.lanes = [
            Ring(slot, num_slots=3, name="ring"),
            Ring(slot, num_slots=3, overflow="block", name="blocking"),
            Weights(slot, name="weights"),
            Replay(PLAIN, 12, alpha=0.5, name="replay"),
            Replay(STEP, 12, streams=1, observations=["obs"], alpha=0.5, name="linked"),
        ]
        words = {
            "settings": 32, "description": 9, "control": 56, "slots": 8, "rows": 4, "stored": 1, "streams": 2,
            "samplers": 16, "rng": 8, "tree": 64,
        }  # fmt: skip
        for lane in self.lanes:
            if isinstance(lane, Replay):
                fill(lane)
            self.keep(lane.segment, [(name, count) for name, count in words.items() if name in lane.segment.layout])
        # A daemon, which ends with this process; and it dies with this process if that is killed.
        scribbler = mp.get_context("fork").Process(target=self.scribble, args=(Peer.current(),), daemon=True)
        scribbler.start()

    def scribble(self, parent: Peer) -> None:
        """Store words into all lanes, for ever. From time to time everything is as it was, so that attaching works."""
        die_with(parent)
        draw = random.Random(os.getpid())
        files = []
        for lane, (content, hot) in zip(self.lanes, self.originals, strict=True):
            files.append((mmap.mmap(lane.segment._fd, len(content)), content, hot))
        while True:
            memory, content, hot = draw.choice(files)
            for _ in range(draw.randrange(100)):
                at = draw.choice(draw.choice(hot)) & ~7
                memory[at : at + 8] = word(draw, memory[at : at + 8]).to_bytes(8, "little")
            memory[:] = content

    def try_one(self, draw: random.Random) -> None:
        known = draw.choice(self.lanes)
        lane = call(lambda: type(known).attach(known.name or ""))
        if lane is None:
            return
        with lane:
            match lane:
                case Ring():
                    use_ring(lane)
                case Weights():
                    use_weights(lane)
                case Replay():
                    use_replay(lane)
