"""Liveness: which processes are alive, and what becomes of one whose partner dies.

A process is known by its pid *and* its start time, because pids are used again. ``kill(pid, 0)`` is no test of life: it
calls a zombie alive. A pidfd is: it becomes readable at the death of exactly the process that it was opened for, and
that is what waits watch (see ``Signal.wait``).
"""

from __future__ import annotations

import enum
import os
import select
from functools import cache

from memlane import _native
from memlane.core.children import describe_exit
from memlane.core.errors import PeerDied, SegmentError

PID_BITS = 22
"""Linux numbers processes below 2**22, so a pid and a start time fit into one atomic word."""


class Life(enum.Enum):
    """What ``Peer.life`` finds."""

    ALIVE = "alive"
    ZOMBIE = "zombie"
    DEAD = "dead"
    RECYCLED = "recycled"


class Peer:
    """A process on this machine: pid, start time, and a pidfd from the first time that somebody watches it.

    >>> Peer.current().alive
    True
    """

    __slots__ = ("_pidfd", "name", "pid", "start")

    def __init__(self, pid: int, start: int, name: str = "process") -> None:
        self.pid = pid
        self.start = start
        self.name = name
        self._pidfd: int | None = None

    @classmethod
    def current(cls, name: str = "process") -> Peer:
        pid = os.getpid()
        return cls(pid, _current_start(pid), name)

    @classmethod
    def of(cls, pid: int, name: str = "process") -> Peer:
        """The process that has this pid now. ``PeerDied`` if there is none."""
        found = _stat(pid)
        if found is None:
            raise PeerDied(f"there is no process with pid {pid}")
        return cls(pid, found[1], name)

    @property
    def word(self) -> int:
        """Pid and start time as one number above zero that an atomic word can hold."""
        return self.start << PID_BITS | self.pid

    @classmethod
    def from_word(cls, word: int, name: str = "process") -> Peer:
        return cls(word & (1 << PID_BITS) - 1, word >> PID_BITS, name)

    @property
    def life(self) -> Life:
        found = _stat(self.pid)
        if found is None:
            return Life.DEAD
        state, start = found
        if start != self.start:
            return Life.RECYCLED
        return Life.ZOMBIE if state in "ZX" else Life.ALIVE

    @property
    def alive(self) -> bool:
        """Whether it can still do anything. A zombie cannot."""
        return self.life is Life.ALIVE

    def fileno(self) -> int:
        """A descriptor that is readable as soon as the process is dead."""
        if self._pidfd is None:
            if not 0 < self.pid < 1 << PID_BITS:
                return _dead_fd()  # no process has such a number; a word or a header was tampered with
            try:
                pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return _dead_fd()
            if self.life in (Life.RECYCLED, Life.DEAD):
                os.close(pidfd)
                return _dead_fd()
            self._pidfd = pidfd
        return self._pidfd

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its death; say whether it came."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0, round(timeout * 1000))))

    def obituary(self) -> str:
        """One line: who died, and of what as far as this process can know."""
        return f"{self.name} (pid {self.pid}) {self._cause()}"

    def error(self, waiting: str) -> Exception:
        """What a wait raises when it finds this process dead. ``waiting`` says what it did: "waited for ..."."""
        return PeerDied(f"{self.obituary()} while this process {waiting}", peer=self)

    def _cause(self) -> str:
        try:
            # WNOWAIT: only look. The exit status stays for whoever is to collect it.
            result = os.waitid(os.P_PIDFD, self.fileno(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            result = None  # not a child of ours, or collected already
        if result is None:
            return "is alive" if self.alive else "died"
        return describe_exit(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def __del__(self) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and (self.pid, self.start) == (other.pid, other.start)

    def __hash__(self) -> int:
        return hash((self.pid, self.start))

    def __reduce__(self) -> tuple[object, ...]:
        return (Peer, (self.pid, self.start, self.name))

    def __repr__(self) -> str:
        return f"Peer({self.name}, pid {self.pid}, {self.life.value})"


class Roster:
    """A table of atomic words in a segment in which processes enter themselves, so that others can watch them.

    Who may call: any process that maps the table. An entry whose process is dead is free for the next one.
    """

    __slots__ = ("_words",)

    def __init__(self, words: _native.Words) -> None:
        self._words = words

    def join(self, peer: Peer | None = None) -> int:
        """Enter ``peer`` (default: this process) and return its place."""
        word = (peer or Peer.current()).word
        for place in range(len(self._words)):
            holder = self._words.load(place)
            free = holder == 0 or not Peer.from_word(holder).alive
            if free and self._words.compare_and_swap(place, holder, word):
                return place
        raise SegmentError(
            f"all {len(self._words)} places of {self._words.label} are taken by living processes; make the table larger"
        )

    def leave(self, place: int, peer: Peer | None = None) -> None:
        """Give the place back, if it is still ours."""
        self._words.compare_and_swap(place, (peer or Peer.current()).word, 0)

    def peers(self) -> dict[int, Peer]:
        """Who has entered, by place; the dead among them too."""
        words = {place: self._words.load(place) for place in range(len(self._words))}
        return {
            place: Peer.from_word(word, f"{self._words.label}, place {place}") for place, word in words.items() if word
        }


def die_with(peer: Peer, grace: float = 0.5) -> None:
    """End this process when ``peer`` dies: SIGTERM at once, SIGKILL ``grace`` seconds later.

    Works under fork, forkserver and spawn, whoever forked us. A child forked from here has to ask for itself.
    """
    if not grace >= 0:
        raise ValueError(f"grace must be a number of seconds, 0 or more, found {grace!r}")
    _native.tie_lifeline(peer.fileno(), round(grace * 1e9))


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time (clock ticks since boot) of a process, or None if there is none."""
    try:
        # Not a file object: a signal handler that leaves the program right here would leave it to warn about itself.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may itself contain some: what counts begins after the last one.
    fields = line[line.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


@cache
def _current_start(pid: int) -> int:
    found = _stat(pid)
    assert found is not None, "a running process has a stat file"
    return found[1]


# A child may get a pid that one of its ancestors had when it filled the cache.
os.register_at_fork(after_in_child=_current_start.cache_clear)


@cache
def _dead_fd() -> int:
    """A descriptor that is readable for ever: what a pidfd of a process long gone would be."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end
