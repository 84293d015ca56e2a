"""Messages between processes with changed bytes: pickles in a channel, and reports in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np

from memlane.runner.collector_error import CollectorErrors
from memlane.vector.channel import Channel
from memlane.vector.float_infos import FloatInfos
from memlane.vector.infos import pack, pack_floats
from memlane.vector.messages import Failure, Message, pickle_for_parent
from tests.fuzz.call import call
from tests.fuzz.mutations import mutate

_SPARE_BYTES = 1 << 30
"""How much memory a call may ask for, whatever lengths it reads."""


def _frames_of(messages: list[bytes]) -> bytes:
    """What a channel writes for some messages."""
    mine, theirs = mp.Pipe()
    channel = Channel(mine)
    for message in messages:
        channel.send(message)
    channel.close()
    frames = os.read(theirs.fileno(), 1 << 16)
    theirs.close()
    return frames


class Messages:
    """What a worker sends to its parent, and a collector to the learner."""

    def __init__(self, folder: Path) -> None:
        del folder
        infos = [(env, {"x": 1.5, "text": "a", "array": np.arange(3), "inner": {"y": env}}) for env in range(3)]
        failure = Failure.from_exception(ValueError("trouble"), 0, 1, 2)
        floats = pack_floats([(env, {"x": 1.5, "y": 2.5}) for env in range(3)])
        self.messages = [
            pickle_for_parent(Message(pack(infos), {"obs": {1: "text"}}, [1, 2.0, None], [failure], ["a cause"])),
            pickle_for_parent(Message({}, {}, None, [], [])),
            pickle_for_parent(floats),
        ]
        self.frames = _frames_of(self.messages)
        self.errors = CollectorErrors(2)
        with contextlib.suppress(ValueError), self.errors.reporting(1) as reporter:
            reporter.step(5)
            raise ValueError("trouble")
        fields = self.errors.segment.views()
        self.report = {name: fields[name].tobytes() for name in ("reporter", "steps", "length", "report")}
        self.progress = np.zeros((2, 8), np.int64)
        self.forms = np.zeros((2, 1024), np.uint8)
        self.float_infos = FloatInfos(np.zeros((16, 6)), self.forms, self.progress)
        keys, types, first, values = pack_floats([(env, {"x": 1.5, "y": 2.5}) for env in range(3)])
        assert self.float_infos.write(0, keys, types, first, values)
        self.form = self.forms.tobytes()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, resource.RLIM_INFINITY))

    def try_one(self, draw: random.Random) -> None:
        draw.choice((self.try_frames, self.try_report, self.try_form))(draw)

    def try_frames(self, draw: random.Random) -> None:
        """What is in a pipe. The channel returns the messages that were sent, or says that it is damaged or closed."""
        mine, theirs = mp.Pipe()
        channel = Channel(mine)
        os.write(theirs.fileno(), mutate(self.frames, draw, [range(12)]))
        theirs.close()
        try:
            while (message := call(lambda: channel.receive(timeout=1))) is not None:
                assert message in self.messages, "a damaged message was received"
                Message.unpickle(message)
        except EOFError:
            pass
        finally:
            channel.close()

    def try_report(self, draw: random.Random) -> None:
        """The report of a collector that raised."""
        for name, content in self.report.items():
            hot = [range(int.from_bytes(self.report["length"][8:16], "little"))] if name == "report" else []
            changed = mutate(content, draw, hot) if draw.random() < 0.5 else content
            view: Any = self.errors.segment[name]
            view.reshape(-1).view(np.uint8)[:] = np.frombuffer(changed[: len(content)].ljust(len(content)), np.uint8)
        call(self.errors.check)
        call(lambda: self.errors.step_of(1))
        call(lambda: self.errors.watch(1, os.getpid()).check())

    def try_form(self, draw: random.Random) -> None:
        """What the infos of floats in shared memory are."""
        content = mutate(self.form, draw, [range(64)])[: len(self.form)]
        self.forms.reshape(-1)[: len(content)] = np.frombuffer(bytes(content), np.uint8)
        self.progress[0, :] = draw.choice((1, 2, -1, 2**62))
        self.float_infos.forget(0)
        form = call(lambda: self.float_infos.form(0))
        if form is not None:
            call(lambda: self.float_infos.packed({0: form}))
