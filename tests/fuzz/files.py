"""Files of segments, lanes and replays with changed bytes: attached, opened, used and saved to."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from memlane.core import SIGNAL, Layout, LayoutError, Segment, leftovers
from memlane.core.header import DTYPE, LAYOUT_OFFSET
from memlane.lanes import Replay, Ring, Stats, Weights
from memlane.lanes.lane import Lane
from memlane.lanes.limiter import Limiter
from tests.fuzz.call import call
from tests.fuzz.mutations import mutate, mutate_text
from tests.support.replays import PLAIN, STEP, final, step

NAME = "fuzzed"


class Files:
    """Base of these targets: real files, of which each input changes one."""

    def __init__(self, folder: Path) -> None:
        os.environ["MEMLANE_SHM_DIR"] = str(folder)
        np.seterr(all="ignore")  # moments of any numbers
        self.path = folder / f"memlane-{NAME}"
        self.folder = folder
        self.originals: list[tuple[bytes, list[range]]] = []
        """The content of each file, and where it has words that are not payload."""

    def keep(self, segment: Segment, words_of: Iterable[tuple[str, int]]) -> None:
        """Keep the content of a segment. ``words_of`` are fields and the words at the start of each of their rows."""
        header = segment._header
        description = len(segment.layout.to_bytes())
        hot = [range(8, 80), range(8, 80), range(LAYOUT_OFFSET, LAYOUT_OFFSET + description)]
        for name, words in words_of:
            field = segment.layout[name]
            rows = field.shape[0] if len(field.shape) > 1 else 1
            for row in range(rows):
                begin = header.header_bytes + field.offset + row * (field.nbytes // max(rows, 1))
                hot.append(range(begin, begin + min(8 * words, field.nbytes // max(rows, 1))))
        self.originals.append((os.pread(segment._fd, segment.nbytes, 0), [part for part in hot if part]))

    def write_changed(self, draw: random.Random) -> None:
        """Write one of the files with changes. Half of those with a changed layout agree with themselves again."""
        content, hot = draw.choice(self.originals)
        changed = mutate_layout(content, draw) if draw.random() < 0.2 else mutate(content, draw, hot)
        with os.fdopen(os.open(self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(changed)


def mutate_layout(content: bytes, draw: random.Random) -> bytes:
    """Change the description of the layout, and the header so that it agrees with it."""
    record = np.frombuffer(content[:LAYOUT_OFFSET], DTYPE).copy()
    old_header = int(record["header_bytes"][0])
    description = mutate_text(content[LAYOUT_OFFSET : LAYOUT_OFFSET + int(record["layout_bytes"][0])], draw)
    record["layout_bytes"] = len(description)
    payload = content[old_header:]
    with contextlib.suppress(LayoutError):
        layout = Layout.from_bytes(description)
        description = layout.to_bytes()
        record["layout_bytes"], record["layout_hash"] = len(description), layout.hash
        if layout.nbytes < 1 << 20:
            payload = payload.ljust(layout.nbytes, b"\0")
            record["total_bytes"] = old_header + layout.nbytes
    return (record.tobytes() + description).ljust(old_header, b"\0") + payload


class Segments(Files):
    """Segments of many kinds of fields."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        record = np.dtype([("a", ">i2"), ("b", "S3"), ("c", "<f8", (2,))])
        for fields in (
            {"obs": ("float32", (4, 3)), "count": ("int64", 8), "bell": (SIGNAL, 2)},
            {"record": (record, 3), "text": ("<U5", (2, 2)), "when": ("M8[ns]", ()), "none": ("f4", (0, 5))},
            {f"field {i}": ("u1", i) for i in range(40)},
        ):
            with Segment.create(fields) as segment:
                self.keep(segment, ())

    def try_one(self, draw: random.Random) -> None:
        if draw.random() < 0.3:
            content = draw.choice(self.originals)[0][LAYOUT_OFFSET:4096].rstrip(b"\0")
            call(lambda: Layout.from_bytes(mutate_text(content, draw)))
            return
        self.write_changed(draw)
        call(lambda: list(leftovers(self.folder)))
        segment = call(lambda: Segment.attach(NAME, writeable=draw.random() < 0.7))
        if segment is None:
            return
        with segment:
            for name, view in segment.views().items():
                view.tobytes()
                if view.dtype == SIGNAL and view.size and segment.writeable:
                    call(lambda name=name: segment.signal(name).add())  # type: ignore[misc]
            call(lambda: (segment.owner.state, segment.owner.fileno(), segment.owner_closed, repr(segment)))


class Lanes(Files):
    """Rings, weights and statistics, each also as what it is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        slot = {"x": ("float32", 3), "n": ("int64", ())}
        arrays = {"x": np.ones(3, np.float32), "n": np.array(7)}
        for overflow in ("drop_oldest", "block"):
            with Ring(slot, num_slots=3, overflow=overflow) as ring:  # type: ignore[arg-type]
                for _ in range(2):
                    ring.writer().put(arrays)
                with ring.writer().claim() as claimed:
                    self.keep(ring.segment, (("settings", 9), ("description", 9), ("control", 40), ("slots", 8)))
                    claimed.commit()
        for published in (0, 2):
            with Weights(slot) as weights:
                for _ in range(published):
                    weights.publish(arrays)
                self.keep(weights.segment, (("settings", 9), ("description", 9), ("control", 24)))
        with Stats(2, places=2) as stats:
            stats.collector().add([[1.0, 2.0]])
            self.keep(stats.segment, (("settings", 9), ("description", 9), ("roster", 2), ("control", 48)))
        self.uses: list[tuple[type[Lane], Callable[[Any], None]]] = [
            (Ring, use_ring),
            (Weights, use_weights),
            (Stats, use_stats),
        ]

    def try_one(self, draw: random.Random) -> None:
        self.write_changed(draw)
        for kind, use in self.uses:
            lane = call(lambda kind=kind: kind.attach(NAME))  # type: ignore[misc]
            if lane is not None:
                with lane:
                    call(lambda lane=lane: repr(lane))  # type: ignore[misc]
                    use(lane)


def arrays_of(layout: Layout) -> dict[str, Any]:
    return {field.name: np.zeros(field.shape, field.dtype) for field in layout}


def use_ring(ring: Ring) -> None:
    """Call everything that a ring has."""
    writer, reader, arrays = ring.writer(1), ring.reader(), arrays_of(ring.layout)

    def lease() -> None:
        with writer.claim(timeout=0) as claimed:
            for view in (claimed[name] for name in ring.layout.fields):
                view[...] = np.zeros((), view.dtype)
            claimed.commit()
        with reader.take(timeout=0) as taken:
            assert [taken[name].nbytes for name in ring.layout.fields]

    def abandon() -> None:
        with writer.claim(timeout=0):
            pass

    for _ in range(2):
        call(lambda: writer.put(arrays, timeout=0))
        call(lambda: reader.get(arrays, timeout=0))
        call(lease)
        call(abandon)
    call(lambda: (ring.counters(), ring.unread))


def use_weights(weights: Weights) -> None:
    """Call everything that weights have."""
    arrays = arrays_of(weights.layout)
    for _ in range(3):
        call(weights.read)
        call(lambda: weights.publish(arrays))
        call(lambda: weights.wait_for(1, timeout=0))
    call(weights.counters)


def use_stats(stats: Stats) -> None:
    """Call everything that statistics have."""
    call(stats.merged)
    collector = call(stats.collector)
    if collector is not None:
        call(lambda: collector.add(np.ones((2, *stats.shape))))
        call(stats.merged)
        call(collector.close)


class Replays(Files):
    """Files of saved replays."""

    OPTIONS: tuple[dict[str, Any], ...] = (
        {"row": PLAIN, "capacity": 12},
        {"row": PLAIN, "capacity": 12, "alpha": 0.5, "limiter": Limiter(2.0, 2, 100.0)},
        {"row": STEP, "capacity": 12, "streams": 1, "observations": ["obs"]},
        {"row": STEP, "capacity": 40, "streams": 2, "observations": ["obs"], "alpha": 0.5},
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.replays = [Replay(**options) for options in self.OPTIONS]
        for number, replay in enumerate(self.replays):
            fill(replay)
            saved = folder / f"saved-{number}"
            replay.save(saved)
            with Segment.attach(file=saved) as segment:
                head = 4 if replay.streams else 1
                fields = (("settings", 32), ("description", 9), ("control", 56), ("stored", 1), ("streams", 2))
                self.keep(segment, (*fields, ("samplers", 16), ("rng", 8), ("tree", 64), ("rows", head)))

    def try_one(self, draw: random.Random) -> None:
        self.write_changed(draw)
        if draw.random() < 0.2:
            call(lambda: draw.choice(self.replays).save(self.path))
        replay = call(lambda: (Replay.open if draw.random() < 0.5 else Replay.load)(self.path))
        if replay is None:
            return
        with replay:
            use_replay(replay)


def fill(replay: Replay) -> None:
    """Add more rows than the replay holds."""
    writer = replay.writer()
    for number in range(2 * replay.capacity):
        if not replay.streams:
            writer.add({"x": np.full((1, 2), number)})
            continue
        numbers = [float(number)] * replay.streams
        ended = number % 5 == 4
        last = final(*numbers) if ended else None
        writer.add(step(*numbers, terminated=ended), final=last)


_SMALL_LIMITER = "need an error_buffer of at least"
"""Part of the error for a batch that is too large for the limiter. Its settings come from the file."""


def use_replay(replay: Replay) -> None:
    """Call everything that a replay has."""
    rows = {name: array[None].repeat(max(replay.streams, 1), 0) for name, array in arrays_of(replay.layout).items()}
    for options in ({"n_step": 3}, {"length": 3}) if replay.streams else ({},):
        sampler = call(lambda options=options: replay.sampler(seed=0, **options))  # type: ignore[misc]
        if sampler is None:
            continue
        batch = call(lambda sampler=sampler: sampler.sample(8, timeout=0), _SMALL_LIMITER)  # type: ignore[misc]
        if batch is not None and replay.alpha is not None:
            keys = np.maximum(batch["key"], 1)  # a stray word can become a key, and 0 is none
            # Errors of 0: with a changed alpha, a power of any other number can be more than a priority can hold.
            call(lambda keys=keys: replay.update_priorities(keys, np.zeros(8)))  # type: ignore[misc]
        sampler.close()
    writer = call(lambda: replay.writer(resume=True))
    if writer is not None:
        for _ in range(3):
            call(lambda: writer.add(rows, timeout=0), _SMALL_LIMITER)
    call(lambda: (len(replay), replay.counters(), replay.samples_per_insert, repr(replay)))
