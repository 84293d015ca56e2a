"""Channel: messages of any length, with a deadline, watching the other process."""

from __future__ import annotations

import multiprocessing as mp
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from memlane.core import MemlaneError, Peer, PeerDied, WaitTimeout
from memlane.vector.channel import Channel
from tests.support.processes import within

pytestmark = pytest.mark.timeout(120, method="signal")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, two = (Channel(end) for end in mp.Pipe())
    yield one, two
    one.close()
    two.close()


def test_messages_arrive_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    messages = [b"", b"a", b"b" * 1000, b""]
    for message in messages:
        one.send(message)
    assert [two.receive(1) for _ in messages] == messages


def test_both_ends_send(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.send(b"question")
    two.send(b"answer")
    assert (two.receive(1), one.receive(1)) == (b"question", b"answer")


def test_a_message_longer_than_the_pipe_arrives_whole(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    message = bytes(range(256)) * 40_000
    sender = threading.Thread(target=one.send, args=(message,))
    sender.start()
    assert two.receive(10) == message
    sender.join()


def test_receiving_nothing_times_out(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(WaitTimeout, match="the parent sent a message"):
        ends[0].receive(0.05)


def test_sending_to_a_process_that_does_not_read_times_out(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(WaitTimeout, match="could take a message"):
        ends[0].send(bytes(10_000_000), 0.05)


def test_the_middle_of_a_message_has_a_deadline_too(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.connection.send_bytes(b"")  # four bytes: half of a length
    with pytest.raises(WaitTimeout):
        two.receive(0.05)


@pytest.mark.parametrize("length", [-1, -8, -(2**63), 2**41, 2**63 - 1])
def test_a_length_that_no_message_has_is_an_error_and_not_waited_for(
    ends: tuple[Channel, Channel], length: int
) -> None:
    one, two = ends
    os.write(one.connection.fileno(), struct.pack("<qI", length, 0) + b"rest")
    with pytest.raises(MemlaneError, match=f"expected the length of a message from the parent, found {length}"):
        two.receive()


def test_bytes_that_are_no_message_are_an_error(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.send(b"a message")
    content = bytearray(os.read(two.connection.fileno(), 100))
    content[-1] ^= 1
    os.write(one.connection.fileno(), content)
    with pytest.raises(MemlaneError, match="expected a message from the parent, found 9 bytes that do not have its"):
        two.receive(1)


def test_the_end_of_the_parent_is_the_end_of_messages(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.send(b"last")
    one.close()
    assert two.receive(1) == b"last"
    with pytest.raises(EOFError):
        two.receive(1)
    with pytest.raises(EOFError):
        two.send(b"more")
    one.connection = mp.Pipe()[0]  # for the fixture to close


def _say_and_wait(connection: Any, message: bytes) -> None:
    if message:
        Channel(connection).send(message)
    time.sleep(60)


@pytest.mark.parametrize("doing", ["receive", "send"])
def test_the_death_of_the_peer_ends_a_wait(doing: str) -> None:
    mine, theirs = mp.Pipe()
    child = mp.get_context("fork").Process(target=_say_and_wait, args=(theirs, b"hello"))
    child.start()
    assert child.pid is not None
    peer = Peer.of(child.pid, "the child")
    channel = Channel(mine)
    channel.watch(peer)
    assert channel.receive(5) == b"hello"
    threading.Timer(0.2, child.kill).start()
    began = time.monotonic()
    # This process holds the child's end open as well: only the watch detects its death.
    with pytest.raises(PeerDied, match="the child"):
        channel.receive() if doing == "receive" else channel.send(bytes(10_000_000))
    assert time.monotonic() - began < within(5)
    child.join()
    child.close()
    channel.close()
    theirs.close()
    peer.close()


def test_what_a_process_sent_before_its_death_is_received() -> None:
    mine, theirs = mp.Pipe()
    child = mp.get_context("fork").Process(target=_say_and_wait, args=(theirs, b"last message"))
    child.start()
    assert child.pid is not None
    peer = Peer.of(child.pid, "the child")
    while not mine.poll(0.1):
        pass
    child.kill()
    child.join()
    channel = Channel(mine)
    channel.watch(peer)
    assert channel.receive(5) == b"last message"
    with pytest.raises(PeerDied):
        channel.receive(5)
    child.close()
    channel.close()
    theirs.close()
    peer.close()
