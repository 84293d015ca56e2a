"""Channel: messages between parent and worker, of any length, in a stream.

Python's own ``Connection`` blocks for ever in the middle of a message when the other side stops there. Here every wait
has a deadline and watches the other process.
"""

from __future__ import annotations

import os
import select
import struct
import time
from multiprocessing.connection import Connection

from memlane.core import Peer, WaitTimeout

_LENGTH = struct.Struct("<q")


class Channel:
    """One end of a duplex pipe. ``peer`` is the process at the other end, once it is known."""

    def __init__(self, connection: Connection, peer: Peer | None = None) -> None:
        self.connection = connection
        self.peer = peer
        os.set_blocking(connection.fileno(), False)
        self._poll_in = select.poll()
        self._poll_in.register(connection.fileno(), select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(connection.fileno(), select.POLLOUT)

    def watch(self, peer: Peer) -> None:
        self.peer = peer
        for poll in (self._poll_in, self._poll_out):
            poll.register(peer.fileno(), select.POLLIN)

    def send(self, message: bytes, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        left = memoryview(_LENGTH.pack(len(message)) + message)
        while left:
            try:
                left = left[os.write(self.connection.fileno(), left) :]
            except BlockingIOError:
                self._wait(self._poll_out, deadline, "could take a message")
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended("was sending it a message") from None

    def receive(self, timeout: float | None = None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float | None) -> bytes:
        parts = []
        while count:
            try:
                part = os.read(self.connection.fileno(), min(count, 1 << 20))
            except BlockingIOError:
                self._wait(self._poll_in, deadline, "sent a message")
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._ended("waited for its message")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _wait(self, poll: select.poll, deadline: float | None, until: str) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = poll.poll(None if left is None else left * 1000)
        if not ready:
            raise WaitTimeout(f"the time was over before {self.peer.name if self.peer else 'the parent'} {until}")
        if self.peer is not None and all(fd == self.peer.fileno() for fd, _ in ready):
            raise self._ended("waited for its message")

    def _ended(self, waiting: str) -> Exception:
        if self.peer is None:
            return EOFError("the parent has closed the channel")
        self.peer.wait(1)  # a process that closes its end is about to end itself: then it can say of what
        return self.peer.error(waiting)

    def close(self) -> None:
        self.connection.close()
