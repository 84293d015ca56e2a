"""Three exercises in shared memory for reinforcement learning, built on ``memlane.core``.

1. ``shared_memory_rl_pipeline``: workers write steps into named shared memory; a learner attaches by name and reads.
2. ``SharedCircularBuffer``: a replay buffer that several processes push to and sample from at once, without a lock.
3. ``zero_copy_env_simulation``: why a stored zero-copy observation changes when the environment steps.

They return plain Python lists and numbers, so that they are easy to try in a Python shell.

    >>> result = shared_memory_rl_pipeline(2, 3, [(0, [1, 2, 3], 0.5, False), (1, [3, 2, 1], 1.5, True)])
    >>> result["mean_obs"], result["mean_reward"], result["num_done"], result["active_mean_reward"]
    ([2.0, 2.0, 2.0], 1.0, 1, 0.5)

    >>> with SharedCircularBuffer(capacity=2, state_dim=1) as buffer:
    ...     for step in range(3):
    ...         buffer.push([step], action=step, reward=1.0, next_state=[step + 1], done=step == 2)
    ...     buffer.latest(2)["states"]
    [[1.0], [2.0]]

    >>> steps = [([[1.0, 2.0]], [0.0], [False]), ([[3.0, 4.0]], [0.0], [True])]
    >>> zero_copy_env_simulation(1, 2, steps, [
    ...     ("step",), ("store_view", "view"), ("store_copy", "copy"), ("step",), ("read", "view"), ("read", "copy"),
    ... ])["reads"]
    [[[3.0, 4.0]], [[1.0, 2.0]]]
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memlane.core import SIGNAL, Peer, PeerDied, Rows, Segment, SegmentError, die_with, fresh_name
from memlane.core.children import describe_exit
from memlane.core.layout import FieldSpec
from memlane.core.suggestions import did_you_mean

# ------------------------------------------------------------------------------------------------ 1. the pipeline

Step = tuple[int, list[float], float, int]


def shared_memory_rl_pipeline(
    num_envs: int, obs_dim: int, step_data: Sequence[Sequence[Any]], *, workers: int = 0
) -> dict[str, Any]:
    """Write environment steps into three named blocks of shared memory, attach to them by name, and return statistics.

    ``step_data`` is a list of ``(env_id, obs, reward, done)``; a later entry of the same environment overwrites an
    earlier one. If ``workers`` is greater than 0, that many processes write, each for different environments. The
    blocks are removed when this function returns or raises.
    """
    _at_least(1, num_envs=num_envs)
    _at_least(0, obs_dim=obs_dim, workers=workers)
    layouts: dict[str, dict[str, FieldSpec]] = {
        "observations": {"observations": ("float64", (num_envs, obs_dim))},
        "rewards": {"rewards": ("float64", num_envs)},
        "dones": {"dones": ("int8", num_envs)},
    }
    with ExitStack() as blocks:
        owned = [
            blocks.enter_context(Segment.create(layout, name=fresh_name(name))) for name, layout in layouts.items()
        ]
        names = [segment.name or "" for segment in owned]
        steps = [_checked_step(entry, position, num_envs, obs_dim) for position, entry in enumerate(step_data)]
        if workers:
            _write_from_workers(names, steps, workers)
        else:
            _write_steps(names, steps)
        observations, rewards, dones = _read_blocks(names)

    active = rewards[dones == 0]
    return {
        "observations": observations.round(4).tolist(),
        "rewards": rewards.round(4).tolist(),
        "dones": dones.tolist(),
        "mean_obs": observations.mean(axis=0).round(4).tolist(),
        "mean_reward": round(float(rewards.mean()), 4),
        "num_done": int(np.count_nonzero(dones)),
        "active_mean_reward": round(float(active.mean()), 4) if active.size else 0.0,
        "total_shared_bytes": observations.nbytes + rewards.nbytes + dones.nbytes,
    }


def _read_blocks(names: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Attach by name, copy the data and close, as a separate process would."""
    copies = []
    for name in names:
        with Segment.attach(name, writeable=False) as segment:
            (view,) = segment.views().values()
            copies.append(view.copy())
    return copies[0], copies[1], copies[2]


def _write_steps(names: Sequence[str], steps: Sequence[Step]) -> None:
    with ExitStack() as blocks:
        segments = [blocks.enter_context(Segment.attach(name)) for name in names]
        observations, rewards, dones = (view for segment in segments for view in segment.views().values())
        for env_id, obs, reward, done in steps:
            observations[env_id], rewards[env_id], dones[env_id] = obs, reward, done


def _write_from_workers(names: Sequence[str], steps: Sequence[Step], workers: int) -> None:
    """Write from separate processes that get only the names. All steps of an environment go to the same process."""
    command = [sys.executable, "-c", "from memlane.lessons import _worker_main; _worker_main()"]
    processes = []
    try:
        for worker in range(workers):
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            share = [step for step in steps if step[0] % workers == worker]
            task = json.dumps({"parent": Peer.current().word, "names": names, "steps": share})
            assert processes[-1].stdin is not None
            with suppress(BrokenPipeError), processes[-1].stdin as pipe:  # a worker that died is reported below
                pipe.write(task)
        for worker, process in enumerate(processes):
            assert process.stderr is not None
            output = process.stderr.read().strip()
            if process.wait() != 0:
                raise PeerDied(f"worker {worker} (pid {process.pid}) {describe_exit(process.returncode)}: {output}")
    finally:
        for process in processes:
            with process:  # closes its pipes and waits for it
                process.kill()


def _worker_main() -> None:
    task = json.load(sys.stdin)
    die_with(Peer.from_word(task["parent"]))
    _write_steps(task["names"], task["steps"])


def _checked_step(entry: Sequence[Any], position: int, num_envs: int, obs_dim: int) -> Step:
    where = f"step_data[{position}]"
    try:
        env_id, obs, reward, done = entry
    except (TypeError, ValueError):
        raise ValueError(f"{where} must be (env_id, obs, reward, done), found {entry!r}") from None
    try:
        env_id = operator.index(env_id)
    except TypeError:
        raise ValueError(f"{where}: the env id must be an integer, found {env_id!r}") from None
    if not 0 <= env_id < num_envs:
        raise IndexError(f"{where}: there is no env {env_id}; num_envs is {num_envs}, so ids are 0 to {num_envs - 1}")
    return (
        env_id,
        _numbers(obs, (obs_dim,), f"{where}: the observation").tolist(),
        float(_numbers(reward, (), f"{where}: the reward")),
        int(_flags(done, (), f"{where}: done")),
    )


# ----------------------------------------------------------------------------------------- 2. the circular buffer

_CELL_BITS = 24
_CELL_MASK = (1 << _CELL_BITS) - 1
_MAX_TICKET = 1 << 62 - _CELL_BITS
_SPARE_CELLS = 64
_MAX_CANDIDATES = 4096
_MAX_SECONDS = 5.0
"""How long a call tries again when other processes change what it has just read. Each loss is progress of another
process: in a buffer of one row with three busy writers, a reader lost a thousand times in a row."""


def _tries() -> Iterator[None]:
    yield None  # without a look at the clock
    end = time.monotonic() + _MAX_SECONDS
    while time.monotonic() < end:
        yield None


class SharedCircularBuffer:
    """The last ``capacity`` transitions, in shared memory. Any number of processes may push and sample at once.

    Pass the object to another process (as a ``Process`` argument, or through a pipe) and use it there. Neither ``push``
    nor ``sample`` waits for another process. A process that is killed during a push loses only that push.

    A transition is written into a *cell* that is not part of the buffer yet, and then published by one atomic change of
    one word.

    - ``order[slot]`` is the cell at a slot of the circle, and the number of the push that put it there (its *ticket*,
      counted from 1). Ticket t is at slot (t - 1) % capacity.
    - ``cells[cell]`` is the state of a cell: 0 if it is free; positive (the identity of ``Segment.life``) while a
      process writes to it; negative if it was offered as ticket -value. An offered cell is free again if another cell
      won the ticket, or if it was published and has been replaced.
    - ``head`` is the number of pushes. It may be one behind ``order``; any process that notices advances it.

    There are more cells than slots, so a writer always finds a free one. A reader loads the word, copies the cell, and
    loads the word again: a cell is only written to after its word has changed, so if the word is the same, the copy is
    not torn.

    If a writer dies while it writes to a cell, the cell is free for the first process that finds the writer dead. If it
    dies after the offer and before publication, or between publication and reuse of the replaced cell, the rule for
    offered cells makes those cells free.
    """

    capacity: int
    """The largest number of transitions."""
    state_dim: int
    """The length of a state."""

    def __init__(self, capacity: int, state_dim: int) -> None:
        _at_least(1, capacity=capacity)
        _at_least(0, state_dim=state_dim)
        cells = capacity + _SPARE_CELLS
        if cells > _CELL_MASK:
            raise ValueError(f"capacity must be at most {_CELL_MASK - _SPARE_CELLS}, found {capacity}")
        self._open(
            Segment.create(
                {
                    "head": (SIGNAL, ()),
                    "order": ("int64", capacity),
                    "cells": ("int64", cells),
                    "states": ("float64", (cells, state_dim)),
                    "actions": ("int64", cells),
                    "rewards": ("float64", cells),
                    "next_states": ("float64", (cells, state_dim)),
                    "dones": ("bool", cells),
                }
            )
        )

    def _open(self, segment: Segment) -> None:
        self._segment = segment
        self._life = segment.life
        self._head = segment.signal("head")
        self._order = segment.words("order")
        self._cells = segment.words("cells")
        self._fields = {name: segment[name] for name in ("states", "actions", "rewards", "next_states", "dones")}
        self._rows = Rows(self._fields)
        self._candidates: list[int] = []
        self.capacity = len(self._order)
        self.state_dim = self._fields["states"].shape[1]

    # ------------------------------------------------------------------------------------------------------ write

    def push(self, state: ArrayLike, action: int, reward: float, next_state: ArrayLike, done: bool) -> None:
        """Store a transition. When the buffer is full, it replaces the oldest one."""
        state_shape = (self.state_dim,)
        row = {
            "states": _numbers(state, state_shape, "state"),
            "actions": _integer(action, "action"),
            "rewards": _numbers(reward, (), "reward"),
            "next_states": _numbers(next_state, state_shape, "next_state"),
            "dones": _flags(done, (), "done"),
        }
        for _ in _tries():
            if self._publish(row):
                return
        raise self._damaged("each cell was taken away while it was written")

    def _publish(self, row: dict[str, Any]) -> bool:
        """Write a cell and offer it until it wins a ticket. Return False if another process took the cell."""
        cell, state = self._claim()
        try:
            for name, value in row.items():
                self._fields[name][cell] = value
        except BaseException:  # such as Ctrl-C: the cell was not offered yet, so it becomes free
            self._cells.compare_and_swap(cell, state, 0)
            raise
        for _ in _tries():
            ticket, replaced = self._next_ticket()
            if not self._cells.compare_and_swap(cell, state, -ticket):
                return False  # it lost an earlier ticket, and another process has taken it as a free cell
            state = -ticket
            slot = (ticket - 1) % self.capacity
            if self._order.compare_and_swap(slot, replaced, ticket << _CELL_BITS | cell):
                self._head.compare_and_swap(ticket - 1, ticket)
                if replaced:
                    self._candidates.append(replaced & _CELL_MASK)
                return True
        self._cells.compare_and_swap(cell, state, 0)
        raise self._damaged("every ticket was lost to another process")

    def _next_ticket(self) -> tuple[int, int]:
        """The next ticket, and the word of ``order`` that it would replace."""
        for _ in _tries():
            pushed = self._head.value
            slot = pushed % self.capacity
            word = self._order.load(slot)
            ticket = word >> _CELL_BITS
            if self._head.value != pushed:
                continue  # the word may belong to a later ticket
            # The slot has the ticket of an earlier round, or the next one.
            if not 0 <= pushed < _MAX_TICKET or not self._is_possible(slot, word) or ticket > pushed + 1:
                raise self._damaged(f"head is {pushed} and order[{slot}] has ticket {ticket}")
            if ticket <= pushed:
                return pushed + 1, word
            self._head.compare_and_swap(pushed, pushed + 1)  # published, but its writer has not advanced head yet
        raise self._damaged("head changes all the time")

    def _is_possible(self, slot: int, word: int) -> bool:
        """Whether a push can have stored ``word`` in ``order[slot]``. Any process that maps it can store others."""
        ticket, cell = word >> _CELL_BITS, word & _CELL_MASK
        return word == 0 or (ticket > 0 and (ticket - 1) % self.capacity == slot and cell < len(self._cells))

    def _damaged(self, finding: str) -> SegmentError:
        return SegmentError(
            f"the buffer is damaged: {finding}; a process has overwritten its words: create another buffer"
        )

    def _claim(self) -> tuple[int, int]:
        """Take a free cell; return it and its new state."""
        me = self._life.process()
        for _ in _tries():
            while self._candidates:
                cell = self._candidates.pop()
                state = self._cells.load(cell)
                if self._is_free(cell, state) and self._cells.compare_and_swap(cell, state, me):
                    return cell, me
            self._candidates = self._find_candidates()
        raise self._damaged(f"none of {len(self._cells)} cells is free for this process")

    def _is_free(self, cell: int, state: int) -> bool:
        if state > 0:
            return not self._life.alive(state)
        if state == 0:
            return True
        ticket = -state
        word = self._order.load((ticket - 1) % self.capacity)
        # A smaller ticket at the slot means that this ticket is undecided: its writer may be about to publish.
        return word >> _CELL_BITS >= ticket and word != ticket << _CELL_BITS | cell

    def _find_candidates(self) -> list[int]:
        """Cells that were free at the time of a plain, not atomic copy. ``_claim`` checks each again."""
        state, order = self._segment["cells"].copy(), self._segment["order"].copy()
        ticket = np.maximum(-state, 1)
        word = order[(ticket - 1) % self.capacity]
        published = word == (ticket << _CELL_BITS | np.arange(len(state)))
        candidates = np.flatnonzero((state == 0) | ((state < 0) & ~published))
        if not len(candidates):  # all other cells are being written: one of the writers may be dead
            candidates = np.flatnonzero(state > 0)
        # Processes start at different cells, so that two do not try the same cells in the same order.
        return np.roll(candidates, os.getpid() * 7919 % max(len(candidates), 1)).tolist()[:_MAX_CANDIDATES]

    # ------------------------------------------------------------------------------------------------------- read

    def sample(self, batch_size: int, seed: int | None = None) -> dict[str, list[Any]]:
        """``batch_size`` transitions, sampled uniformly with replacement. The same seed samples the same slots."""
        _at_least(0, batch_size=batch_size)
        size = len(self)
        if size == 0:
            raise ValueError("cannot sample: the buffer is empty; push a transition first")
        slots = np.random.RandomState(seed).randint(0, size, size=batch_size).astype(np.int64)
        _, batch = self._read(slots)
        return {name: column.tolist() for name, column in batch.items()}

    def latest(self, n: int) -> dict[str, list[Any]]:
        """The ``n`` most recent transitions, oldest first; all of them if there are fewer."""
        _at_least(0, n=n)
        read = np.empty(0, np.int64)
        rows = {name: field[:0] for name, field in self._fields.items()}
        for _ in _tries():
            last = self._pushed()
            wanted = np.arange(max(0, last - min(n, self.capacity)) + 1, last + 1)
            missing = np.setdiff1d(wanted, read)
            tickets, batch = self._read((missing - 1) % self.capacity)
            read = np.append(read, tickets)
            rows = {name: np.concatenate([rows[name], batch[name]]) for name in rows}
            # If others push meanwhile, an old transition may be overwritten before it is read. Then the window moves
            # on, and only newer transitions are read. This ends, because the newest are overwritten last.
            if np.isin(wanted, read).all():
                break
        else:
            raise self._damaged("transitions that were pushed cannot be found")
        sorter = np.argsort(read)
        selected = sorter[np.searchsorted(read, wanted, sorter=sorter)]
        return {name: column[selected].tolist() for name, column in rows.items()}

    def __len__(self) -> int:
        return min(self._pushed(), self.capacity)

    def _pushed(self) -> int:
        return self._next_ticket()[0] - 1

    def _read(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Copy the rows at ``slots``, none of them torn. Return the ticket of each, and the rows."""
        words = np.empty(len(slots), np.int64)
        batch = {name: np.empty((len(slots), *field.shape[1:]), field.dtype) for name, field in self._fields.items()}
        pending = np.arange(len(slots))
        for _ in _tries():
            seen = np.empty(len(pending), np.int64)
            self._order.load_into(slots[pending], seen)
            stray = seen[(seen < 0) | ((seen & _CELL_MASK) >= len(self._cells))]
            if len(stray):
                raise self._damaged(f"order has the word {stray[0]:#x}")
            rows = self._rows.gather(seen & _CELL_MASK)
            for name, column in rows.items():
                batch[name][pending] = column
            words[pending] = seen
            pending = pending[self._order.changed(slots[pending], seen)]
            if not len(pending):
                return words >> _CELL_BITS, batch
        raise self._damaged("order changes all the time")

    # ------------------------------------------------------------------------------------------------------ close

    def close(self) -> None:
        """Close the buffer in this process. The memory is freed when the last process closes it. Calling it again has
        no effect."""
        self._segment.close()

    def __enter__(self) -> SharedCircularBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Segment:
        return self._segment

    def __setstate__(self, segment: Segment) -> None:
        self._open(segment)


# -------------------------------------------------------------------------------------------- 3. zero-copy hazard


def zero_copy_env_simulation(
    num_envs: int,
    obs_dim: int,
    step_data: Iterable[Sequence[Any]],
    commands: Iterable[Sequence[str]],
) -> dict[str, Any]:
    """Simulate a vector environment that writes every step into the same buffers, and code that keeps observations.

    ``step_data`` has one ``(obs, rewards, dones)`` for each ``("step",)`` command. The commands are ``("step",)``,
    ``("store_view", name)``, ``("store_copy", name)``, ``("read", name)``, ``("read_buffer",)``,
    ``("check_alias", name)`` and ``("auto_reset",)``, which sets observation and reward of each environment that is
    done to zero.
    """
    _at_least(1, num_envs=num_envs)
    _at_least(0, obs_dim=obs_dim)
    layout: dict[str, FieldSpec] = {
        "obs": ("float64", (num_envs, obs_dim)),
        "rewards": ("float64", num_envs),
        "dones": ("int8", num_envs),
    }
    with Segment.create(layout) as segment:
        simulation = _Simulation(segment, step_data)
        for position, command in enumerate(commands):
            simulation.execute(command, f"commands[{position}]")
        return {
            "reads": simulation.reads,
            "alias_checks": simulation.alias_checks,
            "total_copies": simulation.copies,
            "total_views": simulation.views,
            "total_bytes_saved": simulation.views * num_envs * obs_dim * 8,
            "buffer_reallocs": simulation.reallocations(),
        }


class _Simulation:
    def __init__(self, segment: Segment, step_data: Iterable[Sequence[Any]]) -> None:
        self.obs, self.rewards, self.dones = segment["obs"], segment["rewards"], segment["dones"]
        self.address = self.obs.ctypes.data
        self.step_data = iter(step_data)
        self.steps = 0
        self.stored: dict[str, NDArray[Any]] = {}
        self.reads: list[list[list[float]]] = []
        self.alias_checks: list[bool] = []
        self.copies = self.views = 0

    def execute(self, command: Sequence[str], where: str) -> None:
        match tuple(command):
            case ("step",):
                self.step(where)
            case ("store_view", name):
                self.stored[name] = self.obs[:]
                self.views += 1
            case ("store_copy", name):
                self.stored[name] = self.obs.copy()
                self.copies += 1
            case ("read", name):
                self.reads.append(self.find(name, where).round(4).tolist())
            case ("read_buffer",):
                self.reads.append(self.obs.round(4).tolist())
            case ("check_alias", name):
                self.alias_checks.append(bool(np.shares_memory(self.find(name, where), self.obs)))
            case ("auto_reset",):
                done = self.dones != 0
                self.obs[done] = 0
                self.rewards[done] = 0
            case _:
                raise ValueError(
                    f"{where} must be step, store_view NAME, store_copy NAME, read NAME, read_buffer, check_alias NAME "
                    f"or auto_reset, found {command!r}"
                )

    def step(self, where: str) -> None:
        source = f"step_data[{self.steps}]"
        try:
            entry = next(self.step_data)
        except StopIteration:
            raise IndexError(
                f"{where}: step_data has only {self.steps} steps, and all were used; add one for each ('step',)"
            ) from None
        try:
            obs, rewards, dones = entry
        except (TypeError, ValueError):
            raise ValueError(f"{source} must be (obs, rewards, dones), found {entry!r}") from None
        # All three are checked before any is written: an invalid step changes nothing.
        checked = (
            _numbers(obs, self.obs.shape, f"{source}: obs"),
            _numbers(rewards, self.rewards.shape, f"{source}: rewards"),
            _flags(dones, self.dones.shape, f"{source}: dones"),
        )
        self.obs[:], self.rewards[:], self.dones[:] = checked
        self.steps += 1

    def find(self, name: str, where: str) -> NDArray[Any]:
        if name not in self.stored:
            hint = did_you_mean(str(name), self.stored)
            raise KeyError(f"{where}: nothing was stored as {name!r}; the stored names are {list(self.stored)}{hint}")
        return self.stored[name]

    def reallocations(self) -> int:
        return int(self.obs.ctypes.data != self.address)


# --------------------------------------------------------------------------------------------------------- checks


def _at_least(minimum: int, **arguments: int) -> None:
    for name, value in arguments.items():
        if not isinstance(value, int | np.integer) or value < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, found {value!r}")


def _numbers(value: ArrayLike, shape: tuple[int, ...], what: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{what} must have shape {list(shape)}, found rows of different lengths") from None
    if array.dtype.kind not in "biuf" and array.size:
        raise ValueError(f"{what} must be made of numbers, found {value!r}")
    if array.shape != shape:
        raise ValueError(f"{what} must have shape {list(shape)}, found {list(array.shape)}")
    return array.astype(np.float64)


def _flags(value: ArrayLike, shape: tuple[int, ...], what: str) -> NDArray[np.bool_]:
    numbers = _numbers(value, shape, what)
    if not np.isin(numbers, (0, 1)).all():
        raise ValueError(f"{what} must be True or False, found {value!r}")
    return numbers.astype(bool)


def _integer(value: int, what: str) -> np.int64:
    number = float(_numbers(value, (), what))
    if not number.is_integer() or not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{what} must be an integer of at most 64 bits, found {value!r}")
    return np.int64(int(value))
