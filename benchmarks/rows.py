"""How fast are batches of random rows copied out of a table in shared memory, and back into it?

Two tables: packed transitions of 168 bytes, and images of 84 x 84 bytes. The indices are drawn before the clock starts,
and every call gets new ones, so that rows come from memory as in training, not from the first-level cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Contender, Expectation, Report, Table, bare, bare_skip, machine, parser, race, ratio
from memlane.core import Rows, Segment

TRANSITION = np.dtype(
    [("obs", "f4", 17), ("action", "f4", 6), ("reward", "f4"), ("next_obs", "f4", 17), ("done", "?")], align=True
)
IMAGE = np.dtype("u1")
IMAGE_SHAPE = (84, 84)
FIELDS_BATCH = 4096
BLOCKS = 3
"""Timed blocks per round, one value each."""

Indices = NDArray[np.int64]
Move = Callable[[Indices], object]


class IndexBatches:
    """Batches of random indices in turn; a batch is used again after all others."""

    def __init__(self, pool: Indices, batch: int) -> None:
        self._batches = list(pool[: len(pool) // batch * batch].reshape(-1, batch))
        self._at = 0

    def take(self, count: int) -> list[Indices]:
        taken = [self._batches[(self._at + step) % len(self._batches)] for step in range(count)]
        self._at += count
        return taken


@dataclass
class Run:
    """Rounds, the least number of bytes that one timed block moves, and the indices to use."""

    rounds: int
    block_bytes: int
    pool: Indices

    def race(
        self,
        title: str,
        moves: dict[str, Move],
        draws: IndexBatches,
        batch: int,
        batch_bytes: int,
        limits: dict[str, Callable[[], list[float]]] | None = None,
    ) -> Table:
        calls = max(1, self.block_bytes // batch_bytes)
        contenders = [
            Contender(name, "memlane" if name.startswith("memlane") else "peer", timed(move, draws, calls))
            for name, move in moves.items()
        ]
        for name, measure in (limits or {}).items():
            # The threads of bare C spin at their barrier: on one core they would wait for each other's time slices.
            one_core = "needs two cores" if "2 threads" in name and machine()["cores"] < 2 else ""
            contenders.append(Contender(name, "limit", measure, bare_skip() or one_core))
        race(contenders, self.rounds)
        return Table(title, "memlane", contenders, f"{batch} rows", batch_bytes)


def timed(move: Move, draws: IndexBatches, calls: int) -> Callable[[], list[float]]:
    """A round: nanoseconds per call, one value for each block of ``calls``, after a block that is not counted: it
    refills the caches after the previous contender."""

    def measure() -> list[float]:
        values = []
        for _ in range(1 + BLOCKS):
            batches = draws.take(calls)
            begin = time.perf_counter_ns()
            for indices in batches:
                move(indices)
            values.append((time.perf_counter_ns() - begin) / calls)
        return values[1:]

    return measure


def as_items(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory with one opaque item per row, the form in which numpy copies rows fastest."""
    row_bytes = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(f"V{row_bytes}")[:, 0]


def gather_table(title: str, table: NDArray[Any], batch: int, run: Run) -> Table:
    """Copy a batch of rows that have one field."""
    rows, items = Rows({"row": table}), as_items(table)
    row_bytes = items.dtype.itemsize
    out = np.empty((batch, *table.shape[1:]), table.dtype)
    pinned, out_items = Rows({"row": out}), as_items(out)
    moves: dict[str, Move] = {
        "memlane": lambda indices: rows.gather(indices, pinned),
        "memlane, 2 threads": lambda indices: rows.gather(indices, pinned, threads=2),
        "np.take(out=, mode='clip')": lambda indices: items.take(indices, 0, out_items, "clip"),
        "np.take(out=, mode='raise')": lambda indices: items.take(indices, 0, out_items, "raise"),
        "table[indices]": lambda indices: items[indices],
    }
    draws = IndexBatches(run.pool, batch)
    for name, move in moves.items():
        out_items.view("u1")[:] = 0
        indices = draws.take(1)[0]
        returned = move(indices)
        copied = np.asarray(returned) if name == "table[indices]" else out_items
        _require(np.array_equal(copied, items[indices]), f"{name} copied other rows than requested")
    repeats = 10 * (len(run.pool) // batch)  # bare C runs ten blocks of them: the same variety of rows as above
    limits: dict[str, Callable[[], list[float]]] = {
        "bare C gather": lambda: bare("gather", len(table), row_bytes, batch, repeats),
        "bare C gather, 2 threads": lambda: bare("gather", len(table), row_bytes, batch, repeats, 2),
        "bare C memcpy, the same bytes each time": lambda: bare("memcpy", batch * row_bytes, repeats),
    }
    return run.race(f"{title}, batch {batch}", moves, draws, batch, batch * row_bytes, limits)


def fields_table(columns: dict[str, NDArray[Any]], run: Run) -> Table:
    """Copy five fields from separate arrays: in one call, or with numpy once per field."""
    rows = Rows(columns)
    out = {name: np.empty((FIELDS_BATCH, *column.shape[1:]), column.dtype) for name, column in columns.items()}
    pinned = Rows(out)
    pairs = [(as_items(columns[name]), as_items(out[name])) for name in columns]

    def take(indices: Indices) -> None:
        for column, copy in pairs:
            column.take(indices, 0, copy, "clip")

    moves: dict[str, Move] = {
        "memlane": lambda indices: rows.gather(indices, pinned),
        "memlane, 2 threads": lambda indices: rows.gather(indices, pinned, threads=2),
        "np.take(out=, mode='clip') per field": take,
        "field[indices] per field": lambda indices: [column[indices] for column, _ in pairs],
    }
    return _race_fields("five fields in separate arrays", moves, columns, out, run)


def unpacking_table(table: NDArray[Any], run: Run) -> Table:
    """Copy the fields of packed rows, each into its own array, as a learner needs them from a replay buffer."""
    columns = {name: table[name] for name in table.dtype.names or ()}
    rows = Rows(columns)
    out = {name: np.empty((FIELDS_BATCH, *column.shape[1:]), column.dtype) for name, column in columns.items()}
    pinned = Rows(out)
    items = as_items(table)
    packed = np.empty(FIELDS_BATCH, table.dtype)
    packed_items = as_items(packed)

    def field_by_field(indices: Indices) -> None:
        for name, column in columns.items():
            out[name][:] = column[indices]

    def rows_first(indices: Indices) -> None:
        items.take(indices, 0, packed_items, "clip")
        for name, column in out.items():
            column[:] = packed[name]

    moves: dict[str, Move] = {
        "memlane": lambda indices: rows.gather(indices, pinned),
        "memlane, 2 threads": lambda indices: rows.gather(indices, pinned, threads=2),
        # np.take is missing: it would first copy the whole field, because its rows are not contiguous.
        "table[field][indices] per field": field_by_field,
        "np.take of whole rows, then per field": rows_first,
    }
    return _race_fields("five fields out of packed rows", moves, columns, out, run)


def _race_fields(
    title: str,
    moves: dict[str, Move],
    columns: dict[str, NDArray[Any]],
    out: dict[str, NDArray[Any]],
    run: Run,
) -> Table:
    draws = IndexBatches(run.pool, FIELDS_BATCH)
    for name, move in moves.items():
        for copy in out.values():
            copy[:] = 0
        indices = draws.take(1)[0]
        returned = move(indices)
        copies = returned if isinstance(returned, list) else list(out.values())
        for (field, column), copy in zip(columns.items(), copies, strict=True):
            same = as_items(np.ascontiguousarray(column[indices])).tobytes() == copy.tobytes()
            _require(same, f"{name} copied other rows of {field!r} than requested")
    batch_bytes = sum(copy.nbytes for copy in out.values())
    return run.race(f"{title}, batch {FIELDS_BATCH}", moves, draws, FIELDS_BATCH, batch_bytes)


def scatter_table(table: NDArray[Any], run: Run) -> Table:
    """Copy a batch of rows into random places of the table."""
    rows, items = Rows({"row": table}), as_items(table)
    values = np.empty(FIELDS_BATCH, table.dtype)
    _fill(values, seed=3)
    pinned, values_items = Rows({"row": values}), as_items(values)

    def assign(indices: Indices) -> None:
        items[indices] = values_items

    moves: dict[str, Move] = {
        "memlane": lambda indices: rows.scatter(indices, pinned),
        "memlane, 2 threads": lambda indices: rows.scatter(indices, pinned, threads=2),
        "table[indices] = values": assign,
        "np.put(mode='clip')": lambda indices: items.put(indices, values_items, "clip"),
    }
    places = np.random.default_rng(4).permutation(len(table))[:FIELDS_BATCH]
    for name, move in moves.items():
        items[places] = np.zeros(1, items.dtype)
        move(places)
        _require(np.array_equal(items[places], values_items), f"{name} wrote other rows than requested")
    title = f"packed rows into the table, batch {FIELDS_BATCH}"
    return run.race(title, moves, IndexBatches(run.pool, FIELDS_BATCH), FIELDS_BATCH, values.nbytes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _fill(array: NDArray[Any], seed: int) -> None:
    array.reshape(-1).view("u1")[:] = np.frombuffer(np.random.default_rng(seed).bytes(array.nbytes), "u1")


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("rows", options)
    rounds, block_bytes = (2, 2 << 20) if options.quick else (15, 16 << 20)
    rows, images = (100_000, 2_000) if options.quick else (1_000_000, 20_000)
    batches = (256, 4096) if options.quick else (256, 4096, 65536)
    draw = np.random.default_rng(1).integers
    run = Run(options.rounds or rounds, block_bytes, draw(0, rows, 32_768 if options.quick else rows))
    image_run = replace(run, pool=draw(0, images, max(batches[-1], images)))

    columns = [f"apart_{name}" for name in TRANSITION.names or ()]
    layout: dict[str, Any] = {
        "packed": (TRANSITION, rows),
        "image": (IMAGE, (images, *IMAGE_SHAPE)),
        **{f"apart_{name}": (TRANSITION[name], rows) for name in TRANSITION.names or ()},
    }
    with Segment.create(layout) as segment:
        for seed, view in enumerate(segment.views().values()):
            _fill(view, seed)
        title = f"packed rows of {TRANSITION.itemsize} bytes"
        packed = [report.add(gather_table(title, segment["packed"], batch, run)) for batch in batches]
        for batch in batches:
            report.add(gather_table("images of 84 x 84 bytes", segment["image"], batch, image_run))
        report.add(fields_table({name: segment[name] for name in columns}, run))
        report.add(unpacking_table(segment["packed"], run))
        report.add(scatter_table(segment["packed"], run))
    for batch, table in zip(batches, packed, strict=True):
        best = min((row for row in table.contenders if row.name.startswith("np.take")), key=lambda row: row.median)
        report.expect(
            Expectation(
                f"gathering {batch} packed rows on one thread is at least as fast as np.take(out=), within 5 %",
                ratio(best, table["memlane"]),
                at_least=0.95,
            )
        )
        if batch >= 4096:  # for smaller batches memlane starts no second thread
            report.expect(
                Expectation(
                    f"gathering {batch} packed rows on two threads is more than 1.5 times as fast as np.take(out=)",
                    ratio(best, table["memlane, 2 threads"]),
                    at_least=1.5,
                )
            )
    report.finish()


if __name__ == "__main__":
    main()
