"""How fast are transitions added to a replay and sampled from it, and how much memory does each take?

Peers at their best settings: Stable-Baselines3, cpprb (plain, prioritised, multi-process), torchrl. The limits are
numpy's ``take(out=)`` and a bare C gather of packed rows, which have no writers, links or priorities.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Contender, Expectation, Report, Table, bare, bare_skip, best, parser, race, ratio
from memlane.ipc import Replay, ReplayBuffer, ReplayPipeline

BLOCKS = 3
PRIORITY = 0.6
FRAME = (84, 84)
STACK = 4


@dataclass(frozen=True)
class Shape:
    obs: int
    act: int

    def __str__(self) -> str:
        return f"obs {self.obs}, act {self.act}"

    def columns(self, rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
        draw = np.random.default_rng(seed)
        return {
            "obs": draw.random((rows, self.obs), np.float32),
            "action": draw.random((rows, self.act), np.float32),
            "reward": draw.random(rows, np.float32),
            "next_obs": draw.random((rows, self.obs), np.float32),
            "done": draw.random(rows, np.float32) < 0.01,
        }

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "obs": ("float32", self.obs),
            "action": ("float32", self.act),
            "reward": ("float32", ()),
            "next_obs": ("float32", self.obs),
            "done": (bool, ()),
        }

    @property
    def row_bytes(self) -> int:
        return 4 * (2 * self.obs + self.act + 1) + 1


# ----------------------------------------------------------------------------------------- the buffers of all libraries


def memlane_replay(shape: Shape, rows: int, **options: Any) -> Replay:
    replay = Replay(shape.fields, rows, **options)
    for part in _parts(rows):
        replay.add(shape.columns(part))
    return replay


def sb3_buffer(shape: Shape, rows: int) -> Any:
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer as Buffer

    buffer = Buffer(rows, Box(-1, 1, (shape.obs,)), Box(-1, 1, (shape.act,)), "cpu", handle_timeout_termination=False)
    columns = shape.columns(rows)
    buffer.observations[:, 0] = columns["obs"]
    buffer.next_observations[:, 0] = columns["next_obs"]
    buffer.actions[:, 0] = columns["action"]
    buffer.rewards[:, 0] = columns["reward"]
    buffer.full = True
    return buffer


def cpprb_buffer(kind: str, shape: Shape, rows: int, **options: Any) -> Any:
    import cpprb

    fields = {
        "obs": {"shape": shape.obs},
        "act": {"shape": shape.act},
        "rew": {},
        "next_obs": {"shape": shape.obs},
        "done": {},
    }
    buffer = getattr(cpprb, kind)(rows, fields, **options)
    for part in _parts(rows):
        columns = shape.columns(part)
        buffer.add(
            obs=columns["obs"],
            act=columns["action"],
            rew=columns["reward"],
            next_obs=columns["next_obs"],
            done=columns["done"],
        )
    return buffer


def torchrl_buffer(shape: Shape, rows: int, batch: int) -> Any:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=batch)
    for part in _parts(rows):
        columns = {name: torch.from_numpy(column) for name, column in shape.columns(part).items()}
        buffer.extend(TensorDict(columns, batch_size=[part]))
    return buffer


def _parts(rows: int, most: int = 100_000) -> Iterator[int]:
    for begin in range(0, rows, most):
        yield min(most, rows - begin)


# --------------------------------------------------------------------------------------------------------------- racing


def timed(call: Callable[[], object], calls: int) -> Callable[[], list[float]]:
    """A round: nanoseconds per call, one value for each block of ``calls``, after a block that is not counted."""

    def measure() -> list[float]:
        values = []
        for _ in range(1 + BLOCKS):
            begin = time.perf_counter_ns()
            for _ in range(calls):
                call()
            values.append((time.perf_counter_ns() - begin) / calls)
        return values[1:]

    return measure


class Entry:
    """A contender whose buffer is created once, when it is first measured."""

    def __init__(self, name: str, prepare: Callable[[], Callable[[], object]], calls: int) -> None:
        self._prepare, self._calls = prepare, calls
        kind: Any = next((kind for kind in ("memlane", "limit") if name.startswith(kind)), "peer")
        self.contender = Contender(name, kind, self._measure)

    @functools.cached_property
    def _call(self) -> Callable[[], object]:
        return self._prepare()

    def _measure(self) -> list[float]:
        return timed(self._call, self._calls)()


def race_of(
    title: str,
    operation: str,
    entries: dict[str, Callable[[], Callable[[], object]]],
    options: Any,
    calls: int,
    limits: list[Contender] | None = None,
    operation_bytes: int = 0,
) -> Table:
    contenders = [Entry(name, prepare, calls).contender for name, prepare in entries.items()] + (limits or [])
    race(contenders, options.rounds or (2 if options.quick else 7))
    gc.collect()
    return Table(title, "memlane", contenders, operation, operation_bytes)


def sampling(shape: Shape, rows: int, batch: int, options: Any) -> Table:
    replay = memlane_replay(shape, rows)

    def ours(threads: int = 1, reuse: bool = True) -> Callable[[], object]:
        sampler = replay.sampler(seed=0, threads=threads)
        out = sampler.batch(batch) if reuse else None
        return lambda: sampler.sample(batch, out=out)

    def preset() -> Callable[[], object]:
        buffer = ReplayBuffer(rows, shape.obs, shape.act, "cpu", seed=0)
        for part in _parts(rows):
            columns = shape.columns(part)
            flags = columns["done"].astype(np.float32)
            buffer.add(columns["obs"], columns["action"], columns["reward"], columns["next_obs"], flags, flags)
        return lambda: buffer.sample(batch)

    def numpy_take() -> Callable[[], object]:
        width = -(-shape.row_bytes // 8) * 8
        table = np.random.default_rng(0).bytes(rows * width)
        items = np.frombuffer(table, f"V{width}")
        out = np.empty(batch, items.dtype)
        draw = np.random.default_rng(1)
        return lambda: items.take(draw.integers(0, rows, batch), 0, out, "clip")

    entries: dict[str, Callable[[], Callable[[], object]]] = {
        "memlane": ours,
        "memlane, 2 threads": lambda: ours(threads=2),
        "memlane, a new batch each time": lambda: ours(reuse=False),
        "memlane ReplayBuffer, torch": preset,
        "SB3 ReplayBuffer": lambda: functools.partial(sb3_buffer(shape, rows).sample, batch),
        "cpprb ReplayBuffer": lambda: functools.partial(cpprb_buffer("ReplayBuffer", shape, rows).sample, batch),
        "cpprb MPReplayBuffer": lambda: functools.partial(cpprb_buffer("MPReplayBuffer", shape, rows).sample, batch),
        "limit: np.take(out=) of packed rows": numpy_take,
        "torchrl TensorDictReplayBuffer": lambda: torchrl_buffer(shape, rows, batch).sample,
    }
    width = -(-shape.row_bytes // 8) * 8
    repeats = 200 if options.quick else 1000
    limit = Contender(
        "bare C gather of packed rows", "limit", lambda: bare("gather", rows, width, batch, repeats), bare_skip()
    )
    title = f"sample {batch} of {rows:,} rows, {shape}"
    table = race_of(
        title, f"{batch} rows", entries, options, 20 if options.quick else 60, [limit], batch * shape.row_bytes
    )
    replay.close()
    return table


def adding(shape: Shape, rows: int, options: Any) -> Table:
    columns = shape.columns(1)
    row = {name: column[0] for name, column in columns.items()}
    scalars = {**row, "reward": float(row["reward"]), "done": bool(row["done"])}

    def ours() -> Callable[[], object]:
        writer = Replay(shape.fields, rows).writer()
        return lambda: writer.add(scalars)

    def sb3() -> Callable[[], object]:
        buffer = sb3_buffer(shape, rows)
        obs, next_obs, action = (columns[name] for name in ("obs", "next_obs", "action"))
        return lambda: buffer.add(obs, next_obs, action, columns["reward"], columns["done"], [{}])

    def cpprb(kind: str) -> Callable[[], object]:
        buffer = cpprb_buffer(kind, shape, rows)
        return lambda: buffer.add(
            obs=row["obs"], act=row["action"], rew=scalars["reward"], next_obs=row["next_obs"], done=scalars["done"]
        )

    entries: dict[str, Callable[[], Callable[[], object]]] = {
        "memlane": ours,
        "SB3 ReplayBuffer": sb3,
        "cpprb ReplayBuffer": lambda: cpprb("ReplayBuffer"),
        "cpprb MPReplayBuffer": lambda: cpprb("MPReplayBuffer"),
    }
    return race_of(f"add one row, {shape}", "one row", entries, options, 500 if options.quick else 5000)


def prioritised(shape: Shape, rows: int, batch: int, options: Any) -> Table:
    errors = np.random.default_rng(2).random(batch)

    def ours(threads: int = 1) -> Callable[[], object]:
        replay = memlane_replay(shape, rows, alpha=PRIORITY)
        sampler = replay.sampler(seed=0, threads=threads)
        out = sampler.batch(batch)

        def turn() -> None:
            sampler.sample(batch, out=out, beta=0.4)
            replay.update_priorities(out["key"], errors)

        return turn

    def cpprb(kind: str) -> Callable[[], object]:
        buffer = cpprb_buffer(kind, shape, rows, alpha=PRIORITY)

        def turn() -> None:
            sampled = buffer.sample(batch, beta=0.4)
            buffer.update_priorities(sampled["indexes"], errors)

        return turn

    def torchrl() -> Callable[[], object]:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=PRIORITY, beta=0.4, storage=LazyTensorStorage(rows), batch_size=batch, priority_key="td_error"
        )
        for part in _parts(rows):
            columns = {name: torch.from_numpy(column) for name, column in shape.columns(part).items()}
            buffer.extend(TensorDict(columns, batch_size=[part]))
        td_errors = torch.from_numpy(errors.astype(np.float32))

        def turn() -> None:
            sampled = buffer.sample()
            sampled["td_error"] = td_errors
            buffer.update_tensordict_priority(sampled)

        return turn

    entries: dict[str, Callable[[], Callable[[], object]]] = {
        "memlane": ours,
        "memlane, 2 threads": lambda: ours(2),
        "cpprb PrioritizedReplayBuffer": lambda: cpprb("PrioritizedReplayBuffer"),
        "cpprb MPPrioritizedReplayBuffer": lambda: cpprb("MPPrioritizedReplayBuffer"),
        "torchrl TensorDictPrioritizedReplayBuffer": torchrl,
    }
    title = f"sample {batch} of {rows:,} rows by priority and update them, {shape}"
    return race_of(title, f"{batch} rows", entries, options, 10 if options.quick else 40)


def overlapping(shape: Shape, rows: int, batch: int, options: Any) -> Table:
    """A learner that computes on each batch: sampled by a pipeline in parallel, or in between."""
    import torch

    torch.set_num_threads(1)
    replay = memlane_replay(shape, rows, alpha=PRIORITY)
    network = torch.nn.Sequential(torch.nn.Linear(shape.obs, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))

    def compute(fields: dict[str, Any]) -> None:
        network(fields["obs"].float()).square().mean().backward()

    def pipelined() -> Callable[[], object]:
        pipeline = ReplayPipeline(replay.sampler(seed=0), batch)

        def turn() -> None:
            if not pipeline.started:
                pipeline.start()
            fields = pipeline.consume()
            pipeline.start()
            compute(fields)

        return turn

    def in_between() -> Callable[[], object]:
        sampler = replay.sampler(seed=0)
        out = sampler.batch(batch)
        return lambda: compute(sampler.sample(batch, out=out).torch())

    def alone() -> Callable[[], object]:
        fields = replay.sampler(seed=0).sample(batch).torch()
        return lambda: compute(fields)

    entries: dict[str, Callable[[], Callable[[], object]]] = {
        "memlane": pipelined,
        "memlane, sampled in between": in_between,
        "limit: the computation alone": alone,
    }
    title = f"learn from {batch} of {rows:,} rows by priority, {shape}"
    return race_of(title, f"{batch} rows sampled and learned from", entries, options, 10 if options.quick else 40)


def bytes_of_rows(shape: Shape, rows: int) -> dict[str, float]:
    """Bytes per transition with its next observation, by library."""
    bytes_each = {"memlane": memlane_replay(shape, rows).bytes_per_transition}
    totals: dict[str, Callable[[], float]] = {
        "SB3": lambda: sum(
            array.nbytes for array in vars(sb3_buffer(shape, rows)).values() if isinstance(array, np.ndarray)
        ),
        "cpprb": lambda: sum(
            array.nbytes for array in cpprb_buffer("ReplayBuffer", shape, rows).get_all_transitions().values()
        ),
        "torchrl": lambda: sum(tensor.nbytes for tensor in torchrl_buffer(shape, rows, 1)[:].values()),
    }
    for name, total in totals.items():
        with contextlib.suppress(ImportError):
            bytes_each[name] = total() / rows
    return bytes_each


def pixels(rows: int, batch: int, options: Any) -> tuple[Table, dict[str, float]]:
    """Stacks of four frames of 84 x 84 bytes, of one environment with episodes of 500 steps."""
    draw = np.random.default_rng(3)
    frames = draw.integers(0, 255, (500 + STACK, *FRAME), np.uint8)
    stacked = np.stack([frames[k : k + 500] for k in range(STACK)], 1)
    bytes_each: dict[str, float] = {}

    def ours(threads: int = 1, reuse: bool = True) -> Callable[[], object]:
        fields: dict[str, Any] = {
            "obs": ("uint8", FRAME),
            "action": ("int64", ()),
            "reward": ("float32", ()),
            "terminated": (bool, ()),
            "truncated": (bool, ()),
        }
        replay = Replay(fields, rows, streams=1, observations=["obs"])
        writer = replay.writer()
        for step in range(rows):
            last = step % 500 == 499
            row = {"obs": frames[step % 500], "action": 1, "reward": 1.0, "terminated": last, "truncated": False}
            writer.add(row, final={"obs": frames[500]} if last else None)
        bytes_each["memlane"] = replay.nbytes / replay.size
        sampler = replay.sampler(seed=0, stack={"obs": STACK}, threads=threads)
        out = sampler.batch(batch) if reuse else None
        return lambda: sampler.sample(batch, out=out)

    def sb3(save_memory: bool) -> Callable[[], object]:
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer as Buffer

        space = Box(0, 255, (STACK, *FRAME), np.uint8)
        buffer = Buffer(
            rows,
            space,
            Discrete(4),
            "cpu",
            optimize_memory_usage=save_memory,
            handle_timeout_termination=not save_memory,
        )
        arrays = [buffer.observations] + ([] if save_memory else [buffer.next_observations])
        for array in arrays:
            for step in range(rows):
                array[step, 0] = stacked[step % 500]
        buffer.full = True
        all_arrays = [*arrays, buffer.actions, buffer.rewards, buffer.dones, buffer.timeouts]
        bytes_each["SB3" + (", optimize_memory_usage" if save_memory else "")] = (
            sum(array.nbytes for array in all_arrays) / rows
        )
        return functools.partial(buffer.sample, batch)

    def cpprb() -> Callable[[], object]:
        import cpprb as peer

        fields = {"obs": {"shape": (*FRAME, STACK), "dtype": np.uint8}, "act": {}, "rew": {}, "done": {}}
        buffer = peer.ReplayBuffer(rows, fields, next_of="obs", stack_compress="obs")
        last_axis = np.moveaxis(stacked, 1, -1)
        for step in range(rows):
            obs, next_obs = last_axis[step % 500], last_axis[(step + 1) % 500]
            done = step % 500 == 499
            buffer.add(obs=obs, act=1, rew=1, next_obs=next_obs, done=done)
            if done:
                buffer.on_episode_end()
        return functools.partial(buffer.sample, batch)

    entries: dict[str, Callable[[], Callable[[], object]]] = {
        "memlane": ours,
        "memlane, 2 threads": lambda: ours(2),
        "memlane, a new batch each time": lambda: ours(reuse=False),
        "SB3 ReplayBuffer": lambda: sb3(False),
        "SB3 ReplayBuffer, optimize_memory_usage": lambda: sb3(True),
        "cpprb ReplayBuffer, stack_compress, next_of": cpprb,
    }
    title = f"sample {batch} of {rows:,} transitions of {STACK} x 84 x 84 pixels, with the next ones"
    moved = 2 * STACK * FRAME[0] * FRAME[1] * batch
    return race_of(
        title, f"{batch} rows", entries, options, 3 if options.quick else 10, operation_bytes=moved
    ), bytes_each


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("replay", options, ("stable-baselines3", "cpprb", "torchrl", "torch"))
    rows = 50_000 if options.quick else 1_000_000
    small = Shape(17, 6)
    for shape in (small, Shape(48, 12)):
        for batch in (4096,) if options.quick else (256, 4096):
            table = report.add(sampling(shape, rows, batch, options))
            if shape == small and batch == 4096:
                report.expect(
                    Expectation(
                        "sampling 4096 rows on one thread is at least 4 times as fast as the best library",
                        ratio(best(table.contenders, kind="peer"), table["memlane"]),
                        at_least=4,
                    ),
                    Expectation(
                        "sampling 4096 rows on one thread has at least 0.75 of the speed of a bare C gather",
                        ratio(table["bare C gather of packed rows"], table["memlane"]),
                        at_least=0.75,
                    ),
                    Expectation(
                        "sampling 4096 rows on two threads is faster than on one",
                        ratio(table["memlane"], table["memlane, 2 threads"]),
                        at_least=1,
                    ),
                )
    table = report.add(adding(small, rows, options))
    for peer in ("SB3", "cpprb ReplayBuffer"):
        report.expect(
            Expectation(
                f"adding one row is at least 5 times as fast as with {peer}",
                ratio(best(table.contenders, peer), table["memlane"]),
                at_least=5,
            )
        )
    for batch in (256, 4096):
        table = report.add(prioritised(small, rows, batch, options))
        report.expect(
            Expectation(
                f"sampling {batch} rows by priority and updating them is at least 3 times as fast as cpprb",
                ratio(best(table.contenders, "cpprb"), table["memlane"]),
                at_least=3,
            )
        )
    table = report.add(overlapping(small, rows, 4096, options))
    report.expect(
        Expectation(
            "a pipeline hides some of the sampling behind the computation",
            ratio(table["memlane, sampled in between"], table["memlane"]),
            at_least=1,
        )
    )
    print("\nmemory per transition:")
    for shape in (small, Shape(48, 12)):
        each = ", ".join(f"{name} {nbytes:,.0f} bytes" for name, nbytes in bytes_of_rows(shape, 10_000).items())
        print(f"  {shape}: {each}")
    table, bytes_each = pixels(2_000 if options.quick else 20_000, 64, options)
    report.add(table)
    print("\nmemory per transition of pixels:")
    for name, nbytes in bytes_each.items():
        print(f"  {name}: {nbytes:,.0f} bytes")
    report.expect(
        Expectation(
            "pixels take at most a quarter of SB3's memory",
            bytes_each["memlane"] / bytes_each["SB3"] if "SB3" in bytes_each else None,
            at_most=0.25,
        ),
        Expectation(
            "pixels are sampled on one thread at least as fast as by cpprb",
            ratio(best(table.contenders, "cpprb"), table["memlane"]),
            at_least=1,
        ),
        Expectation(
            "pixels are sampled on one thread into a new batch at least as fast as by cpprb",
            ratio(best(table.contenders, "cpprb"), table["memlane, a new batch each time"]),
            at_least=1,
        ),
    )
    report.finish()


if __name__ == "__main__":
    main()
