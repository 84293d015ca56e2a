"""Liveness: which processes are alive, and how a process ends together with another.

A process is identified by its pid *and* its start time, because the kernel reuses pids. ``kill(pid, 0)`` does not
detect death: it succeeds for a zombie. A pidfd does: it becomes readable when exactly the process that it was opened
for dies. Waits such as ``Signal.wait`` poll pidfds.

Pids and start times have a meaning only in the pid and time namespaces in which they were read: in another container
the same pid is another process. What processes hold in shared memory is therefore marked with their life tokens
(``Segment.life``), which are right across namespaces, and not with their pids.
"""

from __future__ import annotations

import enum
import errno
import math
import os
import select
import signal
from functools import cache
from typing import TYPE_CHECKING

from memlane import _native
from memlane.core.arguments import check_timeout, is_finite_number
from memlane.core.children import describe_exit
from memlane.core.errors import MemlaneError, PeerDied, SegmentError

if TYPE_CHECKING:
    from memlane.core.segment import Segment

PID_BITS = _native.PID_BITS
"""Linux pids are below 2**22, so a pid and a start time fit into one 64-bit word."""

_MAX_POLL_SECONDS = 2_000_000
"""``poll`` counts milliseconds in 32 bits. A longer wait has no limit."""


@cache
def own_namespaces() -> int:
    """The pid namespace of this process and, 32 bits above it, its time namespace, as inode numbers; 0 for one that the
    kernel does not show. Containers may share /dev/shm but not pids."""

    def inode(name: str) -> int:
        try:
            return os.stat(f"/proc/self/ns/{name}").st_ino
        except OSError:
            return 0

    return inode("time") << 32 | inode("pid")


os.register_at_fork(after_in_child=own_namespaces.cache_clear)  # a child can be the first process of a new namespace


class PeerState(enum.Enum):
    """The state of a process, as ``Peer.state`` reports it."""

    ALIVE = "alive"
    """Running, sleeping or stopped; also when the first thread has ended and another has not."""
    ZOMBIE = "zombie"
    """Dead, but its parent has not collected its exit status."""
    DEAD = "dead"
    """No process has this pid."""
    RECYCLED = "recycled"
    """Dead, and another process has its pid now."""
    UNKNOWN = "unknown"
    """In another pid or time namespace, such as another container: this process cannot see it."""


class Peer:
    """A process on this machine, identified by pid and start time, that waits can watch.

    Any process may hold a peer; it pickles. Pass peers to a wait, and the wait raises ``PeerDied`` soon after one of
    them dies, instead of waiting for its timeout. The pidfd that this needs is opened on first use; ``close`` and
    garbage collection close it.

        >>> me = Peer.current("learner")
        >>> me.alive, me.state
        (True, <PeerState.ALIVE: 'alive'>)
        >>> Peer.from_word(me.word) == me
        True

    A dead peer stays dead: if the kernel gives its pid to another process, ``state`` is ``RECYCLED``. A peer of another
    pid namespace never counts as dead, because its pid names another process here; a wait that shall watch it raises
    ``MemlaneError`` at once.
    """

    pid: int
    start: int
    """Start time in clock ticks since boot."""
    name: str
    """The name of the process in error messages."""
    namespaces: int
    """The pid and time namespaces in which pid and start time were read; by default those of this process."""

    __slots__ = ("_pidfd", "name", "namespaces", "pid", "start")

    def __init__(self, pid: int, start: int, name: str = "process", namespaces: int | None = None) -> None:
        self.pid = pid
        self.start = start
        self.name = name
        self.namespaces = own_namespaces() if namespaces is None else namespaces
        self._pidfd: int | None = None

    @classmethod
    def current(cls, name: str = "process") -> Peer:
        """The calling process."""
        return cls.from_word(_native.this_process(), name)

    @classmethod
    def of(cls, pid: int, name: str = "process") -> Peer:
        """The process that has this pid now. Raises ``PeerDied`` if there is none."""
        word = _native.process_of(pid) if _is_pid(pid) else 0
        if not word:
            raise PeerDied(f"there is no process with pid {pid}; it has ended, or the pid is wrong")
        return cls.from_word(word, name)

    @property
    def word(self) -> int:
        """Pid and start time as one positive integer, which fits into an atomic 64-bit word."""
        return self.start << PID_BITS | self.pid

    @classmethod
    def from_word(cls, word: int, name: str = "process") -> Peer:
        """The peer whose ``word`` this is, in the namespaces of this process."""
        return cls(word & (1 << PID_BITS) - 1, word >> PID_BITS, name)

    @property
    def state(self) -> PeerState:
        """The state of the process now."""
        if self.namespaces != own_namespaces():
            return PeerState.UNKNOWN
        if not _is_pid(self.pid):
            return PeerState.DEAD
        return PeerState(_native.process_state(self.pid, min(self.start, 2**63 - 1)))

    @property
    def alive(self) -> bool:
        """Whether the process can still run. A stopped process can; a zombie cannot, unless only its first thread has
        ended. True if that is unknown."""
        return self.state in (PeerState.ALIVE, PeerState.UNKNOWN)

    def fileno(self) -> int:
        """A file descriptor that becomes readable when the process dies. Raises ``MemlaneError`` if this process cannot
        see it."""
        if self._pidfd is None:
            if self.namespaces != own_namespaces():
                raise MemlaneError(
                    f"cannot watch {self.name} (pid {self.pid}): expected a process of this pid and time namespace, "
                    "found one of another, such as another container; run both in one pid namespace (docker run "
                    "--pid), or wait with a timeout and without it in peers"
                )
            if not _is_pid(self.pid):
                return _dead_fd()  # not a valid pid: the word or the header that it came from is corrupt
            try:
                pidfd = os.pidfd_open(self.pid)
            except OSError as error:
                # ENOENT and EINVAL: the number is that of a thread, which a corrupt word or header can name.
                if error.errno not in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
                    raise
                return _dead_fd()
            if self.state in (PeerState.RECYCLED, PeerState.DEAD):
                os.close(pidfd)
                return _dead_fd()
            self._pidfd = pidfd
        return self._pidfd

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process is dead. Return False if it is not after ``timeout`` seconds."""
        check_timeout(timeout)
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(None if timeout is None or timeout > _MAX_POLL_SECONDS else math.ceil(timeout * 1000)))

    def describe_death(self) -> str:
        """One line: name, pid, and how the process ended, as far as this process can know."""
        return f"{self.name} (pid {self.pid}) {self._cause()}"

    def error(self, waiting: str) -> Exception:
        """The error that a wait raises when this process is dead. ``waiting`` describes the wait: "waited for ..."."""
        return PeerDied(f"{self.describe_death()} while this process {waiting}", peer=self)

    def _cause(self) -> str:
        if self.state is PeerState.UNKNOWN:
            return "is in another pid or time namespace"
        try:
            # WNOWAIT leaves the exit status to the code that collects the child.
            result = os.waitid(os.P_PIDFD, self.fileno(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            result = None  # not a child of this process, or already collected
        if result is None:
            return "is alive" if self.alive else "died"
        return describe_exit(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def close(self) -> None:
        """Close the pidfd, if one is open. A later wait opens another."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def __del__(self) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, int]:
        return self.pid, self.start, self.namespaces

    def __reduce__(self) -> tuple[object, ...]:
        return (Peer, (self.pid, self.start, self.name, self.namespaces))

    def __repr__(self) -> str:
        return f"Peer({self.name}, pid {self.pid}, {self.state.value})"


class Roster:
    """A table in a segment in which each process that shares a structure has an entry of its own.

    ``field`` is the field of the table: int64, one word per entry. Any process that maps the segment may call any
    method. The entry of a dead process stays taken until another process takes it. ``label`` is the name of the table
    in the error message of a full one, ``remedy`` its end.
    """

    __slots__ = ("_label", "_life", "_remedy", "_words")

    def __init__(
        self, segment: Segment, field: str, remedy: str = "create a larger table", label: str | None = None
    ) -> None:
        self._words = segment.words(field)
        self._life = segment.life
        self._remedy = remedy
        self._label = label or self._words.label

    def join(self) -> int:
        """Take an entry for this process and return its index. A process may have several."""
        me = self._life.process()
        for index in range(len(self._words)):
            holder = self._words.load(index)
            if not self._life.alive(holder) and self._words.compare_and_swap(index, holder, me):
                return index
        raise SegmentError(
            f"all {len(self._words)} entries of {self._label} belong to running processes; {self._remedy}"
        )

    def leave(self, index: int) -> None:
        """Clear entry ``index``, if it still belongs to this process."""
        if me := self._life.process_if_taken():
            self._words.compare_and_swap(index, me, 0)


def die_with(peer: Peer, grace: float = 0.5) -> None:
    """End this process when ``peer`` dies: SIGTERM at once, SIGKILL ``grace`` seconds later.

    Works under fork, forkserver and spawn, and for peers other than the parent. A child of this process does not
    inherit it: it has to call ``die_with`` itself.

    While this process is stopped (SIGSTOP, Ctrl-Z), it cannot end. If ``peer`` is its parent, or has started the fork
    server that it comes from with ``ensure_fork_server``, as memlane does for workers and collectors, the death of
    ``peer`` continues it.
    """
    if not (is_finite_number(grace) and grace >= 0):
        raise ValueError(f"grace must be a finite number of seconds, 0 or more, found {grace!r}")
    _native.tie_lifeline(peer.fileno(), round(grace * 1e9))


def leave_signals_to(peer: Peer) -> None:
    """Do nothing on Ctrl-C, SIGTERM and SIGHUP as long as ``peer`` lives: terminals, ``timeout`` and batch systems send
    them to all processes of a program, and ``peer`` decides what they mean for this one.

    Once ``peer`` is dead, SIGTERM and SIGHUP end this process: ``die_with`` sends SIGTERM. For the main thread. A
    program that this process starts has the default actions, except for Ctrl-C, which it ignores.
    """

    def on_signal(number: int, _: object) -> None:
        if not peer.alive:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)  # not SIG_IGN, which a program that is started from here would inherit


def _is_pid(number: int) -> bool:
    """Whether a process can have this pid."""
    return 0 < number < 1 << PID_BITS


@cache
def _dead_fd() -> int:
    """A descriptor that is always readable, as the pidfd of a dead process would be."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end
