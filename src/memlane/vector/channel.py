"""Channel: messages between parent and worker, of any length, in a stream.

Python's own ``Connection`` blocks for ever in the middle of a message when the other side stops there. Here every wait
has a deadline and watches the other process, and a message that was read in part when the time was over is read on by
the next call.
"""

from __future__ import annotations

import os
import select
import struct
import time
from multiprocessing.connection import Connection

from memlane.core import Peer, WaitTimeout

_LENGTH = struct.Struct("<q")
_LEAST_AT_ONCE, _MOST_AT_ONCE = 1 << 14, 1 << 20


class Channel:
    """One end of a duplex pipe. ``peer`` is the process at the other end, once it is known."""

    def __init__(self, connection: Connection, peer: Peer | None = None) -> None:
        self.connection = connection
        self.peer = peer
        self._arrived = bytearray()
        self._posted = bytearray()
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
        """Returns when the other side has taken all of it, or the kernel for it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.post(message)
        while self._posted:
            self._wait(self._poll_out, deadline, "could take a message")
            self._write()

    def post(self, message: bytes) -> None:
        """``send`` as much as goes without waiting; the rest goes with what is sent next."""
        self._posted += _LENGTH.pack(len(message)) + message
        self._write()

    def flush(self) -> None:
        """Send what was posted."""
        while self._posted:
            self._wait(self._poll_out, None, "could take a message")
            self._write()

    def receive(self, timeout: float | None = None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._read(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._arrived)
        self._read(_LENGTH.size + length, deadline)
        message = bytes(self._arrived[_LENGTH.size : _LENGTH.size + length])
        del self._arrived[: _LENGTH.size + length]
        return message

    def _write(self) -> None:
        try:
            while self._posted:
                del self._posted[: os.write(self.connection.fileno(), self._posted)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._posted.clear()
            raise self._ended("was sending it a message") from None

    def _read(self, count: int, deadline: float | None) -> None:
        """Until so many bytes have arrived."""
        while len(self._arrived) < count:
            try:
                # More than what is missing, if it is there: the length and a short message in one go.
                missing = min(count - len(self._arrived), _MOST_AT_ONCE)
                part = os.read(self.connection.fileno(), max(missing, _LEAST_AT_ONCE))
            except BlockingIOError:
                self._wait(self._poll_in, deadline, "sent a message")
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._ended("waited for its message")
            self._arrived += part

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
