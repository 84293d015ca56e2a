"""Channel: messages of any length between parent and worker, over a pipe.

Python's own ``Connection`` blocks for ever in the middle of a message when the other side stops there. Here every wait
has a deadline and watches the other process, and a message that was read in part before a timeout is completed by the
next call. A checksum tells a message from bytes that something else has written to the pipe: those could be a pickle
that crashes Python.
"""

from __future__ import annotations

import os
import select
import struct
import time
import zlib
from multiprocessing.connection import Connection

from memlane.core import MemlaneError, Peer, WaitTimeout

_HEADER = struct.Struct("<qI")
"""Length and checksum of a message."""
_EMPTY_CHECKSUM = 0x6D656D6C
"""No number that memory is full of, so that stray words are no empty message."""
_MAX_MESSAGE_BYTES = 1 << 40
"""More than a machine has: a longer message is not one."""
_MIN_READ_BYTES, _MAX_READ_BYTES = 1 << 14, 1 << 20


class Channel:
    """One end of a duplex pipe, for one thread. ``peer`` is the process at the other end; None in a worker, where it is
    the parent."""

    def __init__(self, connection: Connection, peer: Peer | None = None) -> None:
        self.connection = connection
        self.peer = peer
        self._read_buffer = bytearray()
        self._write_buffer = bytearray()
        os.set_blocking(connection.fileno(), False)
        self._poll_in = select.poll()
        self._poll_in.register(connection.fileno(), select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(connection.fileno(), select.POLLOUT)

    def watch(self, peer: Peer) -> None:
        """Let the death of ``peer`` end all waits."""
        self.peer = peer
        for poll in (self._poll_in, self._poll_out):
            poll.register(peer.fileno(), select.POLLIN)

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message; returns when all of it is in the pipe."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.post(message)
        while self._write_buffer:
            self._wait(self._poll_out, deadline, "could take a message")
            self._write()

    def post(self, message: bytes) -> None:
        """Send as much of a message as the pipe takes without waiting; ``flush`` or the next ``send`` does the rest."""
        self._write_buffer += _HEADER.pack(len(message), zlib.crc32(message, _EMPTY_CHECKSUM)) + message
        self._write()

    def flush(self) -> None:
        """Wait until all that was posted is in the pipe."""
        while self._write_buffer:
            self._wait(self._poll_out, None, "could take a message")
            self._write()

    def receive(self, timeout: float | None = None) -> bytes:
        """Receive the next message. ``WaitTimeout`` loses nothing of it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._read(_HEADER.size, deadline)
        length, checksum = _HEADER.unpack_from(self._read_buffer)
        if not 0 <= length <= _MAX_MESSAGE_BYTES:
            raise self._damage("the length of a message", str(length))
        self._read(_HEADER.size + length, deadline)
        message = bytes(self._read_buffer[_HEADER.size : _HEADER.size + length])
        if zlib.crc32(message, _EMPTY_CHECKSUM) != checksum:
            raise self._damage("a message", f"{length} bytes that do not have its checksum")
        del self._read_buffer[: _HEADER.size + length]
        return message

    def _damage(self, expected: str, found: str) -> MemlaneError:
        sender = self.peer.name if self.peer else "the parent"
        return MemlaneError(
            f"expected {expected} from {sender}, found {found}: other code in that process has written to this pipe; "
            "close file descriptors only once"
        )

    def _write(self) -> None:
        try:
            while self._write_buffer:
                del self._write_buffer[: os.write(self.connection.fileno(), self._write_buffer)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._write_buffer.clear()
            raise self._closed_error("was sending it a message") from None

    def _read(self, count: int, deadline: float | None) -> None:
        """Read until ``count`` bytes are in the buffer."""
        while len(self._read_buffer) < count:
            try:
                # More than what is missing, so that a length and its short message take one read.
                missing = min(count - len(self._read_buffer), _MAX_READ_BYTES)
                part = os.read(self.connection.fileno(), max(missing, _MIN_READ_BYTES))
            except BlockingIOError:
                self._wait(self._poll_in, deadline, "sent a message")
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._closed_error("waited for its message")
            self._read_buffer += part

    def _wait(self, poll: select.poll, deadline: float | None, until: str) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = poll.poll(None if left is None else left * 1000)
        if not ready:
            raise WaitTimeout(f"timed out before {self.peer.name if self.peer else 'the parent'} {until}")
        if self.peer is not None and all(fd == self.peer.fileno() for fd, _ in ready):
            raise self._closed_error("waited for its message")

    def _closed_error(self, waiting: str) -> Exception:
        if self.peer is None:
            return EOFError("the parent has closed the channel")
        self.peer.wait(1)  # it closed its end because it is about to exit: wait, so that the error can say how it ended
        return self.peer.error(waiting)

    def close(self) -> None:
        """Close this end of the pipe."""
        self.connection.close()
