"""The replay against a model in plain Python: streams of several writers, episodes, cuts, wrap-around, priorities.

The model keeps every row as a small object. After every step it knows which rows can be drawn, and what a draw of each
must contain for samplers with different wishes; what is drawn must be exactly that, and all of it.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memlane.core import NothingToSample
from memlane.ipc import Replay, ReplaySampler, ReplayWriter

ROW = {
    "obs": ("int64", 2),
    "action": ("int32", ()),
    "reward": ("float64", ()),
    "terminated": (bool, ()),
    "truncated": (bool, ()),
}
STREAMS = ((0, 2), (1,))  # of each writer
GAMMA = 0.5  # so that sums are exact
BETA = 0.5
ENDS = ("no", "no", "no", "terminated", "truncated", "both")


@dataclass
class Row:
    number: int
    obs: int
    previous: int
    tail: bool = False
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    version: int = 0
    next: int | None = None  # None: nobody knows yet; itself: the episode ended, with nothing after it

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True)
class Wish:
    n_step: int
    obs_frames: int
    action_frames: int
    length: int

    def arguments(self) -> dict[str, Any]:
        stack = {"obs": self.obs_frames, "action": self.action_frames}
        return {"n_step": self.n_step, "gamma": GAMMA, "stack": stack, "length": self.length}


@dataclass
class Model:
    """What a replay is supposed to be."""

    capacity: int
    weighted: bool
    rows: dict[int, Row] = field(default_factory=dict)  # those that are stored
    newest: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(3), 0))
    priorities: dict[int, float] = field(default_factory=dict)  # of rows that can be drawn
    highest: float = 1.0
    last: int = 0
    added: int = 0
    evicted: int = 0
    sampled: int = 0
    stale: int = 0

    def store(self, row: Row) -> None:
        self.rows[row.number] = row
        gone = self.rows.pop(row.number - self.capacity, None)
        self.priorities.pop(row.number - self.capacity, None)
        self.evicted += gone is not None and not gone.tail

    def number(self) -> int:
        self.last += 1
        return self.last

    def add(self, stream: int, final: int | None, **content: Any) -> None:
        before = self.newest[stream]
        row = Row(self.number(), previous=before, **content)
        self.store(row)
        if row.ended:
            row.next = row.number
            if final is not None:
                tail = Row(self.number(), final, row.number, tail=True)
                self.store(tail)
                row.next = tail.number
            self.priorities[row.number] = self.highest
        if before in self.rows:
            self.rows[before].next = row.number
            self.priorities[before] = self.highest
        self.newest[stream] = 0 if row.ended else row.number
        self.added += 1

    # --------------------------------------------------------------------------------------------------------- draws

    def frames(self, number: int, many: int, name: str) -> list[int] | None:
        """The oldest first; None if one of them is gone."""
        found = [self.rows[number]]
        while len(found) < many:
            previous = found[-1].previous
            if previous and previous not in self.rows:
                return None
            found.append(self.rows[previous] if previous else found[-1])
        return [getattr(row, name) for row in reversed(found)]

    def draw(self, number: int, wish: Wish) -> dict[str, Any] | None:
        """What a draw of the row contains; None if it cannot be drawn."""
        row = self.rows[number]
        if row.tail or row.next is None:
            return None
        reward, horizon, at = 0.0, 0, row
        while True:
            reward += GAMMA**horizon * at.reward
            horizon += 1
            assert at.next is not None
            after = self.rows[at.next]
            if at.ended or horizon == wish.n_step or after.next is None:
                break
            at = after
        obs = self.frames(number, wish.obs_frames, "obs")
        action = self.frames(number, wish.action_frames, "action")
        next_obs = self.frames(after.number, wish.obs_frames, "obs")
        if obs is None or action is None or next_obs is None:
            return None
        return {
            "key": number,
            "version": row.version,
            "horizon": horizon,
            "reward": reward,
            "discount": 0.0 if at.terminated else GAMMA**horizon,
            "terminated": at.terminated,
            "truncated": at.truncated,
            "obs": _shaped([[seen, -seen] for seen in obs]),
            "action": _shaped(action),
            "next_obs": _shaped([[seen, -seen] for seen in next_obs]),
        }

    def run(self, number: int, wish: Wish) -> list[dict[str, Any]]:
        """What a draw of the sequence that begins there contains, as far as it goes."""
        drawn = []
        while len(drawn) < wish.length and number in self.rows and (row := self.draw(number, wish)) is not None:
            drawn.append(row)
            follower = self.rows[number].next
            assert follower is not None
            if self.rows[number].ended:
                break
            number = follower
        return drawn

    def runs(self, wish: Wish) -> dict[int, list[dict[str, Any]]]:
        """All that can be drawn, by key."""
        return {number: run for number in self.rows if (run := self.run(number, wish))}


def _shaped(frames: list[Any]) -> Any:
    return frames if len(frames) > 1 else frames[0]


class ReplayMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replays: list[Replay] = []
        self.count = 0
        self.keys: list[int] = []

    @initialize(
        capacity=st.integers(6, 20),
        alpha=st.sampled_from([None, 1.0]),
        wishes=st.lists(
            st.builds(Wish, st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)),
            min_size=2,
            max_size=2,
        ),
    )
    def make(self, capacity: int, alpha: float | None, wishes: list[Wish]) -> None:
        replay = Replay(ROW, capacity, streams=3, observations=["obs"], alpha=alpha)
        self.model = Model(capacity, alpha is not None)
        self.wishes = wishes
        self.spread(replay)
        self.writers = [self.writer(which, resume=False) for which in range(2)]

    def spread(self, replay: Replay) -> None:
        """Each role has an object and a mapping of its own, as in another process."""
        for old in self.replays:
            old.close()
        self.replays = [replay, *(pickle.loads(pickle.dumps(replay)) for _ in range(2))]
        self.samplers: list[ReplaySampler] = [
            replay.sampler(seed=place, extras=["key", "version", "horizon"], **wish.arguments())
            for place, wish in enumerate(self.wishes)
        ]

    def writer(self, which: int, *, resume: bool) -> ReplayWriter:
        return self.replays[1 + which].writer(STREAMS[which], resume=resume)

    def teardown(self) -> None:
        for replay in self.replays:
            replay.close()

    def next_count(self) -> int:
        self.count += 1
        return self.count

    # ------------------------------------------------------------------------------------------------------- writers

    @rule(
        which=st.integers(0, 1),
        ends=st.lists(st.sampled_from(ENDS), min_size=2, max_size=2),
        skips=st.lists(st.sampled_from([False, False, False, True]), min_size=2, max_size=2),
        places=st.sampled_from([None, [0], [1], [1, 0]]),
        with_final=st.booleans(),
        version=st.integers(0, 2**62),
        form=st.sampled_from(["fast", "slow"]),
    )
    def add(
        self,
        which: int,
        ends: list[str],
        skips: list[bool],
        places: list[int] | None,
        with_final: bool,
        version: int,
        form: str,
    ) -> None:
        mine = STREAMS[which]
        places = None if places is None else [place for place in places if place < len(mine)]
        streams = mine if places is None else [mine[place] for place in places]
        ends, skips = ends[: len(streams)], skips[: len(streams)]
        count = len(streams)
        contents = [
            {
                "obs": self.next_count(),
                "action": self.count % 1000,
                "reward": float(self.count % 7),
                "terminated": end in ("terminated", "both"),
                "truncated": end in ("truncated", "both"),
            }
            for end in ends
        ]
        needed = any(row["truncated"] and not skip for row, skip in zip(contents, skips, strict=True))
        finals = [self.next_count() for _ in range(count)] if with_final or needed else None
        rows = {name: np.array([row[name] for row in contents], ROW[name][0]) for name in ROW}
        rows["obs"] = np.array([[row["obs"], -row["obs"]] for row in contents], np.int64).reshape(count, 2)
        final = (
            None
            if finals is None
            else {"obs": np.array([[seen, -seen] for seen in finals], np.int64).reshape(count, 2)}
        )
        if form == "slow":
            rows = {name: array.tolist() if count else array for name, array in rows.items()}
        added = self.writers[which].add(
            rows, final=final, env_ids=places, skip=skips if any(skips) else None, version=version
        )
        assert added == skips.count(False)
        for place, stream in enumerate(streams):
            if not skips[place]:
                self.model.add(stream, finals[place] if finals else None, version=version, **contents[place])

    @rule(which=st.integers(0, 1), ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=6))
    def add_several_steps(self, which: int, ends: list[str]) -> None:
        for end in ends:
            self.add(which, [end] * 2, [False] * 2, None, True, 7, "fast")

    @rule(which=st.integers(0, 1), places=st.sampled_from([None, [0], []]))
    def cut(self, which: int, places: list[int] | None) -> None:
        self.writers[which].cut(places)
        for place, stream in enumerate(STREAMS[which]):
            if places is None or place in places:
                self.model.newest[stream] = 0

    @rule(which=st.integers(0, 1), resume=st.booleans())
    def another_writer_takes_over(self, which: int, resume: bool) -> None:
        self.writers[which] = self.writer(which, resume=resume)
        if not resume:
            self.model.newest |= dict.fromkeys(STREAMS[which], 0)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.replays[0].save(Path(folder) / "replay")
            self.spread(Replay.load(Path(folder) / "replay"))
        self.writers = [self.writer(which, resume=True) for which in range(2)]

    # ---------------------------------------------------------------------------------------------------- priorities

    @rule(errors=st.lists(st.integers(0, 50), min_size=1, max_size=8))
    def update_priorities(self, errors: list[int]) -> None:
        model = self.model
        if not (model.weighted and self.keys):
            return
        keys = np.array([self.keys[place % len(self.keys)] for place in range(len(errors))])
        there = [int(key) for key in keys if int(key) in model.rows]
        assert self.replays[2].update_priorities(keys, np.array(errors, float)) == len(there)
        model.stale += len(keys) - len(there)
        for key, error in zip(keys.tolist(), errors, strict=True):
            if key in model.rows:
                model.priorities[key] = float(np.float32(error + 1e-6))
                model.highest = max(model.highest, model.priorities[key])

    # ---------------------------------------------------------------------------------------------------- must agree

    @invariant()
    def the_counters_agree(self) -> None:
        for replay in self.replays:
            counters = replay.counters()
            model = self.model
            assert (counters["added"], counters["evicted"], counters["sampled"], counters["stale_priorities"]) == (
                model.added,
                model.evicted,
                model.sampled,
                model.stale,
            )
            assert replay.size == model.added - model.evicted

    @invariant()
    def the_priorities_agree(self) -> None:
        if self.replays and self.model.weighted:
            total = sum(self.model.priorities.values())
            assert self.replays[0].native.total_priority() == pytest.approx(total, rel=1e-5)

    @invariant()
    def what_is_drawn_agrees(self) -> None:
        for place in range(len(self.replays) and len(self.samplers)):
            self.check(self.samplers[place], self.wishes[place])

    def check(self, sampler: ReplaySampler, wish: Wish) -> None:
        model = self.model
        runs = model.runs(wish)
        if not runs:
            with pytest.raises(NothingToSample):
                sampler.sample(3)
            return
        size = 30 * len(runs)  # so many that a row which can be drawn is missed once in 10^12 times
        batch = sampler.sample(size, beta=BETA)
        model.sampled += size
        records = {
            name: array.reshape(size, wish.length, *array.shape[batch_dims(wish) :]) for name, array in batch.items()
        }
        drawn = records["key"][:, 0].tolist()
        self.keys = [*self.keys[-30:], *drawn[:5]]
        assert set(drawn) <= runs.keys()
        if not model.weighted:
            assert set(drawn) == runs.keys()
        for key in set(drawn):
            chosen = records["key"][:, 0] == key
            for name in batch:
                if name == "weight":
                    continue
                for step in range(wish.length):
                    found = records[name][chosen, step]
                    inside = step < len(runs[key])
                    expected = inside if name == "valid" else runs[key][step][name] if inside else 0
                    assert (found == expected).all(), (name, key, step, found, expected)
        if model.weighted:
            shares = np.array([model.priorities[key] for key in drawn])
            expected_weights = (shares / shares.min()) ** -BETA
            inside = records["valid"] if "valid" in records else np.ones((size, 1))
            assert np.allclose(records["weight"], expected_weights[:, None] * inside, rtol=1e-3)


def batch_dims(wish: Wish) -> int:
    return 1 if wish.length == 1 else 2


PHASES = (Phase.reuse, Phase.generate, Phase.shrink)
UNHURRIED = settings(deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])


class TestReplayAgreesWithItsModel(ReplayMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(UNHURRIED, max_examples=40, stateful_step_count=25)


@pytest.mark.soak
@pytest.mark.timeout(900)
class TestReplayAgreesWithItsModelForLong(ReplayMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(UNHURRIED, max_examples=2000, stateful_step_count=60)
