"""A storm: keeps many processes of one lane running while they die, stop and yield at fault points, and counts.

Faults come from inside, at the n-th fault point of a process (its plan), and from outside, at random instants. Some
processes of each role are spared: they only yield, so that the lane must always make progress.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlane.core import Segment
from tests.support.freezer import Freezer
from tests.support.kills import PATIENCE, Life, Processes, Template
from tests.support.processes import PROMISE, within

MOST_POINTS = 4.5
"""A process meets its fault after at most 10 to this power of its fault points, some hundred operations; most meet it
much earlier, because the number is drawn on a logarithmic scale."""
LONGEST_STOP = 0.05
"""Seconds for which a process is stopped or frozen."""
BOARD = "chaos-board"
STRIKES_PER_SECOND = 10.0
"""Faults from outside."""
FREEZES = 0.15
"""The share of these faults that freeze a process."""


@dataclass
class Counts:
    """What a storm did and found. All from ``torn`` on must be 0."""

    kills: int = 0
    """Processes that died of SIGKILL, at a fault point or by a signal from outside."""
    stops: int = 0
    freezes: int = 0
    """Processes that a control group froze, as `docker pause` does."""
    checked: int = 0
    """Slots, rows, weight sets and results of environments that were checked."""
    longest_stall: float = 0.0
    """Seconds in which no process of a lane completed anything."""
    torn: int = 0
    wrong: int = 0
    """What is whole, but in the wrong place: steps of two episodes, an older version after a newer one."""
    twice: int = 0
    lost: int = 0
    """Committed, not received and not counted."""
    overtaken: int = 0
    """Slots that were taken before an older one."""
    hangs: int = 0
    """Stalls above a second, longer in proportion on a busy machine."""
    leaks: int = 0
    """Processes, slots, names and descriptors that were left."""
    failures: list[str] = field(default_factory=list)

    def faults(self) -> int:
        found = self.torn, self.wrong, self.twice, self.lost, self.overtaken, self.hangs, self.leaks
        return sum(found) + len(self.failures)

    def note_stall(self, seconds: float, allowed: float = PROMISE) -> bool:
        """Note a time without progress; return whether it counts as a hang."""
        self.longest_stall = max(self.longest_stall, seconds)
        hang = seconds > allowed and seconds > within(allowed)
        self.hangs += hang
        return hang

    def __iadd__(self, other: Counts) -> Counts:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "longest_stall" else mine + value)
        return self


@dataclass(frozen=True)
class ByName:
    """A segment or a lane that each process attaches by its name: one in another pid namespace cannot unpickle it."""

    attach: Callable[[str], Any]
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return self.attach, (self.name,)


@dataclass(eq=False)
class Role:
    """A place in the storm: when its process dies, a successor plays the role."""

    life: Life
    place: int
    arguments: tuple[Any, ...]
    spared: bool = False
    counts_incarnations: bool = False
    """Whether the life gets the number of its incarnation as the last argument."""
    incarnation: int = 0
    pid: int = 0
    """Of its process, as its template knows it; 0: it has none."""


class Storm(Processes):
    """The processes of one storm. Each template forks its share of them."""

    def __init__(self, templates: Sequence[Template], layout: Any, chance: random.Random) -> None:
        super().__init__(templates[0], layout, BOARD)
        self.templates = templates
        self.chance = chance
        self.counts = Counts()
        self.roles: list[Role] = []
        self._due: dict[Role, tuple[float, int]] = {}
        """When a stopped process gets which signal."""
        self._freezer = Freezer()
        self._thaw_at = 0.0
        self._done = 0
        self._moved = time.monotonic()

    def __exit__(self, *error: Any) -> None:
        self.counts.freezes += self._freezer.count
        self._freezer.close()
        super().__exit__(*error)
        for template in self.templates:
            template.kill_all()

    # ---------------------------------------------------------------------------------------------------------- roles

    def play(self, role: Role) -> None:
        self.roles.append(role)
        self._start(role)

    def _home(self, role: Role) -> Template:
        return self.templates[role.place % len(self.templates)]

    def _start(self, role: Role) -> None:
        arguments = (*role.arguments, role.incarnation) if role.counts_incarnations else role.arguments
        board = ByName(Segment.attach, BOARD)
        role.pid = self._home(role).fork(role.life, board, self._plan(role), role.place, *arguments)

    def _plan(self, role: Role) -> str:
        if role.spared:
            every = self.chance.randint(50, 500)
            return f"yield:{every}:{every}"
        point = int(10 ** self.chance.uniform(0, MOST_POINTS))
        return f"die:{point}" if self.chance.random() < 0.7 else f"stop:{point}:{max(100, point)}"

    def exhausted(self) -> bool:
        """Whether the storm must end early."""
        return False

    def on_death(self, role: Role) -> None:
        """Note what the dead process may have left, before its successor starts."""

    # --------------------------------------------------------------------------------------------------------- faults

    def run(self, seconds: float) -> None:
        """Let the storm rage for so long."""
        until, strike = time.monotonic() + seconds, 0.0
        self._moved = time.monotonic()
        while (now := time.monotonic()) < until and not self.exhausted() and not self.counts.failures:
            self._tend(now, restart=True)
            if now >= strike:
                strike = now + self.chance.expovariate(STRIKES_PER_SECOND)
                self._strike()
            self._look_for_a_hang(now)
            time.sleep(0.001)

    def _tend(self, now: float, *, restart: bool) -> None:
        """Replace those that have died, and continue or kill those that were stopped for long enough."""
        if now >= self._thaw_at or not restart:
            self._freezer.thaw()
        by_pid = {(self._home(role), role.pid): role for role in self.roles if role.pid}
        for template in self.templates:
            for pid, end in template.changes():
                role = by_pid.get((template, pid))
                if role is None:
                    self.counts.failures.append(f"an unknown process {pid} ended with {end}")
                elif end is None:
                    self.counts.stops += 1
                    then = signal.SIGKILL if self.chance.random() < 0.2 and not role.spared else signal.SIGCONT
                    self._due[role] = (now + self.chance.uniform(0, LONGEST_STOP), then)
                else:
                    self._ended(role, end, restart)
        for role, (moment, then) in list(self._due.items()):
            if now >= moment or not restart:
                del self._due[role]
                self._home(role).send_signal(role.pid, then if restart else signal.SIGCONT)

    def _ended(self, role: Role, exit_code: int, restart: bool) -> None:
        self._due.pop(role, None)
        role.pid = 0
        if exit_code == -signal.SIGKILL:
            self.counts.kills += 1
            self.on_death(role)
            role.incarnation += 1
            if restart:
                self._start(role)
        elif exit_code != 0 or restart:
            self.counts.failures.append(f"{role.life.__name__} at place {role.place} ended with exit code {exit_code}")

    def _strike(self) -> None:
        """A fault from outside, for one of those that are not spared."""
        if victims := [role for role in self.roles if not role.spared and role.pid]:
            victim = self.chance.choice(victims)
            fault = self.chance.random()
            # A template in a pid namespace of its own knows its processes by other pids than this one.
            if fault < FREEZES and self._home(victim) is self.templates[0]:
                if self._freezer.freeze(victim.pid):
                    self._thaw_at = time.monotonic() + self.chance.uniform(0, LONGEST_STOP)
                return
            number = signal.SIGKILL if fault < 0.5 else signal.SIGSTOP
            self._home(victim).send_signal(victim.pid, number)

    def _look_for_a_hang(self, now: float) -> None:
        done = int(self.board["done"].sum())
        if done != self._done:
            self._done, self._moved = done, now
            return
        if self.counts.note_stall(now - self._moved):
            self._moved = now

    # -------------------------------------------------------------------------------------------------------------- end

    def settle(self) -> None:
        """Tell all processes to return, and wait until they have; collect what they counted."""
        self.board.signal("end").store(1)
        deadline = time.monotonic() + PATIENCE
        while any(role.pid for role in self.roles):
            self._tend(time.monotonic(), restart=False)
            if time.monotonic() > deadline:
                left = [role.life.__name__ for role in self.roles if role.pid]
                self.counts.leaks += len(left)
                self.counts.failures.append(f"still running after the storm: {left}")
                return
            time.sleep(0.001)
        self.counts.checked += int(self.board["checked"].sum())
        self.counts.torn += int(self.board["torn"].sum())
        self.counts.wrong += int(self.board["wrong"].sum())
