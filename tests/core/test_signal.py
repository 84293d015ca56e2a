"""Signal and Words: atomic numbers that several processes change, and waits that always end."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlane import _native
from memlane.core import SIGNAL, Peer, PeerDied, Segment, SegmentClosed, SegmentError, Signal, WaitTimeout
from memlane.core.lowlevel import Words
from tests.support.processes import PATIENCE, child, dead_peer, script, sleep_forever, within

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
FIELDS = {
    "ping": (SIGNAL, ()),
    "pong": (SIGNAL, ()),
    "many": (SIGNAL, 4),
    "words": ("int64", 16),
    "data": ("int64", 1024),
}
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(FIELDS) as segment:
        yield segment


@pytest.fixture
def ping(segment: Segment) -> Signal:
    return segment.signal("ping")


# ------------------------------------------------------------------------------------------------------------- changing


def test_a_new_signal_is_at_zero(ping: Signal) -> None:
    assert ping.value == 0


def test_store_sets_the_value(ping: Signal) -> None:
    ping.store(5)
    ping.store(-3)
    assert ping.value == -3


def test_add_returns_the_new_value(ping: Signal) -> None:
    assert (ping.add(), ping.add(5), ping.add(-2), ping.value) == (1, 6, 4, 4)


def test_compare_and_swap_changes_only_what_it_expected(ping: Signal) -> None:
    assert ping.compare_and_swap(0, 7)
    assert not ping.compare_and_swap(0, 9)
    assert ping.value == 7


def test_two_handles_on_one_signal_share_it(segment: Segment) -> None:
    segment.signal("ping").add(3)
    assert segment.signal("ping").value == 3
    assert segment["ping"]["value"] == 3


@given(INT64)
def test_a_signal_holds_any_64_bit_number(value: int) -> None:
    with Segment.create({"x": (SIGNAL, ())}) as segment:
        segment.signal("x").store(value)
        assert segment.signal("x").value == value


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.5, "1", None])
def test_what_is_no_64_bit_number_is_refused(ping: Signal, value: object) -> None:
    with pytest.raises(TypeError):
        ping.store(value)  # type: ignore[arg-type]
    assert ping.value == 0


def test_its_label_says_which_signal_it_is(segment: Segment) -> None:
    assert segment.signal("ping").label == "signal 'ping' of anonymous segment"
    assert segment.signal("many", 3).label == "signal 'many'[3] of anonymous segment"


@pytest.mark.parametrize(
    ("offset", "why"), [(2**40, "outside"), (2**64 - 64, "outside"), (32, "unaligned"), (2**13 - 32, "both")]
)
def test_a_signal_cannot_be_placed_where_there_is_no_room(segment: Segment, offset: int, why: str) -> None:
    with pytest.raises(SegmentError, match=f"needs 64 bytes at a multiple of 64, but was placed at offset {offset}"):
        Signal(segment._mapping, offset, why)


# -------------------------------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize("until", [-5, 0, 3])
def test_a_wait_for_what_is_there_already_returns_the_value(ping: Signal, until: int) -> None:
    ping.store(3)
    assert ping.wait(until) == 3


def test_a_wait_ends_when_another_thread_stores(ping: Signal) -> None:
    timer = threading.Timer(0.05, ping.store, [2])
    timer.start()
    assert ping.wait(1, timeout=PATIENCE) == 2
    timer.join()


@pytest.mark.parametrize("change", ["store", "add", "compare_and_swap"])
def test_every_way_to_change_a_signal_wakes_a_sleeper_at_once(segment: Segment, change: str) -> None:
    """A change that forgot to wake would be noticed only at the end of the sleeper's slice."""
    arguments = {"store": (1,), "add": (1,), "compare_and_swap": (0, 1)}[change]
    slow = 0
    for index in range(4):
        bell = segment.signal("many", index)
        bell.spin_limit_ns = 0
        changed: list[float] = []

        def make_change(bell: Signal = bell, changed: list[float] = changed) -> None:
            time.sleep(0.01)
            changed.append(time.monotonic())
            getattr(bell, change)(*arguments)

        thread = threading.Thread(target=make_change)
        thread.start()
        bell.wait(1, timeout=PATIENCE)
        slow += time.monotonic() - changed[0] > _native.SLICE_SECONDS / 2
        thread.join()
    assert slow < 4


def test_a_wait_goes_on_until_its_number_is_reached(ping: Signal) -> None:
    def count_slowly() -> None:
        for _ in range(5):
            time.sleep(0.01)
            ping.add()

    thread = threading.Thread(target=count_slowly)
    thread.start()
    assert ping.wait(5, timeout=PATIENCE) == 5
    thread.join()


def test_a_wait_that_ends_too_late_has_the_label_and_both_numbers(ping: Signal) -> None:
    ping.store(3)
    with pytest.raises(
        WaitTimeout, match=r"^waited 0.05 s for signal 'ping' of anonymous segment to reach 7; it is at 3$"
    ):
        ping.wait(7, timeout=0.05)


def test_a_timeout_is_a_timeout_error(ping: Signal) -> None:
    with pytest.raises(TimeoutError):
        ping.wait(1, timeout=0.001)


def test_a_timeout_is_not_early(ping: Signal) -> None:
    begin = time.monotonic()
    with pytest.raises(WaitTimeout):
        ping.wait(1, timeout=0.25)
    assert time.monotonic() - begin >= 0.25


def test_a_timeout_of_nothing_only_looks(ping: Signal) -> None:
    with pytest.raises(WaitTimeout, match="waited 0 s"):
        ping.wait(1, timeout=0)
    ping.store(1)
    assert ping.wait(1, timeout=0) == 1


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("-inf")])
def test_a_timeout_must_be_a_number_of_seconds(ping: Signal, timeout: float) -> None:
    for until in (1, 0):  # also if there is nothing to wait for
        with pytest.raises(ValueError, match=r"timeout must be None .* or a number of seconds, 0 or more"):
            ping.wait(until, timeout=timeout)


@pytest.mark.parametrize("timeout", ["1", [1.0], object()])
def test_a_timeout_that_is_not_a_number_is_an_error_that_names_it(ping: Signal, timeout: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"0 or more, found {timeout!r}")):
        ping.wait(0, timeout=timeout)


@pytest.mark.parametrize("timeout", [1e300, float("inf"), None])
def test_a_wait_without_end_ends_with_data(ping: Signal, timeout: float | None) -> None:
    timer = threading.Timer(0.02, ping.store, [1])
    timer.start()
    assert ping.wait(1, timeout=timeout) == 1
    timer.join()


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ([3], r"^peers must be Peer objects, such as Peer\.of\(pid\), found int$"),
        (3, r"^peers must be a list or tuple of Peer objects, such as Peer\.of\(pid\), found int$"),
        (Peer.current(), r"^peers must be a list or tuple of Peer objects, such as Peer\.of\(pid\), found Peer$"),
    ],
)
def test_peers_must_be_something_that_can_be_watched(ping: Signal, peers: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ping.wait(1, timeout=1, peers=peers)


@pytest.mark.parametrize("limit", [0, 1, 10**6])
def test_a_wait_works_with_any_limit_of_spinning(ping: Signal, limit: int) -> None:
    ping.spin_limit_ns = limit
    timer = threading.Timer(0.02, ping.store, [1])
    timer.start()
    assert (ping.spin_limit_ns, ping.wait(1, timeout=PATIENCE)) == (limit, 1)
    timer.join()


def test_a_limit_of_spinning_cannot_be_negative(ping: Signal) -> None:
    before = ping.spin_limit_ns
    with pytest.raises(ValueError, match=r"spin_limit_ns must be 0 .* or more"):
        ping.spin_limit_ns = -1
    assert ping.spin_limit_ns == before


def test_a_process_kept_on_one_core_of_several_spins_all_the_same() -> None:
    """Its peer may have another core, and if not, a yield finds out."""
    expected = "0\n" if os.cpu_count() == 1 else "50000\n"
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from memlane.core import SIGNAL, Segment
        print(Segment.create({"x": (SIGNAL, ())}).signal("x").spin_limit_ns)
    """
    with script(code) as process:
        assert process.communicate(timeout=PATIENCE)[0] == expected


def test_a_limit_that_is_set_during_a_wait_stays_set(ping: Signal) -> None:
    waiter = threading.Thread(target=ping.wait, args=[1])
    waiter.start()
    time.sleep(0.05)
    ping.spin_limit_ns = 7
    ping.store(1)
    waiter.join()
    assert ping.spin_limit_ns == 7


# --------------------------------------------------------------------------------------------------------------- ending


def test_the_interpreter_ends_in_peace_while_a_daemon_thread_waits() -> None:
    code = """
        import threading, time
        from memlane.core import SIGNAL, Segment
        segment = Segment.create({"x": (SIGNAL, ())})
        signal = segment.signal("x")
        for _ in range(4):
            threading.Thread(target=signal.wait, args=[1], daemon=True).start()
        time.sleep(0.08)  # the waits look around every 0.1 s: most of them do so during the end
    """
    for _ in range(3):
        with script(code) as process:
            assert process.communicate(timeout=PATIENCE)[1] in ("", None)
            assert process.returncode == 0


def test_the_death_of_a_peer_ends_a_wait_within_a_second_and_is_described_in_full(ping: Signal) -> None:
    with child(sleep_forever) as process:
        peer = Peer.of(process.pid or 0, "collector 3")
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(peer.pid, signal.SIGKILL)

        timer = threading.Timer(0.3, kill)
        timer.start()
        with pytest.raises(PeerDied) as caught:
            ping.wait(1, peers=[Peer.current("learner"), peer])
        seconds = time.monotonic() - killed[0]
        timer.join()
    assert seconds < 1
    assert caught.value.peer is peer
    assert str(caught.value).startswith(f"collector 3 (pid {peer.pid}) was killed by SIGKILL")
    assert str(caught.value).endswith("waited for signal 'ping' of anonymous segment to reach 1; it is at 0")


def test_a_wait_for_the_long_dead_ends_at_once(ping: Signal) -> None:
    with pytest.raises(PeerDied, match=r"stranger \(pid \d+\) died while this process waited"):
        ping.wait(1, peers=[dead_peer("stranger")])


def test_the_living_do_not_end_a_wait(ping: Signal) -> None:
    with pytest.raises(WaitTimeout):
        ping.wait(1, timeout=0.15, peers=[Peer.current()])


def test_a_timeout_comes_also_when_peers_are_watched(ping: Signal) -> None:
    with child(sleep_forever) as process:
        with pytest.raises(WaitTimeout):
            ping.wait(1, timeout=0.05, peers=[Peer.of(process.pid or 0)])
        process.kill()


def signal_and_die(segment: Segment, value: int) -> None:
    segment["data"][0] = value
    segment.signal("ping").store(value)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_signalled_before_a_death_is_not_lost(segment: Segment) -> None:
    for value in range(1, 21):
        with child(signal_and_die, segment, value) as process:
            peer = Peer.of(process.pid or 0)
            if value % 2:
                peer.wait(PATIENCE)  # dead before the wait, or somewhere in it
            assert segment.signal("ping").wait(value, timeout=PATIENCE, peers=[peer]) == value
            assert segment["data"][0] == value


def test_ctrl_c_ends_a_wait_within_a_second() -> None:
    code = """
        import signal, time
        from memlane.core import SIGNAL, Segment
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
        segment = Segment.create({"x": (SIGNAL, ())})
        bell = segment.signal("x")
        print("ready", flush=True)
        try:
            bell.wait(1)
        except KeyboardInterrupt:
            print(time.monotonic())
    """
    with script(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert errors == ""
    assert float(output) - sent < 1


def test_the_handler_of_another_signal_runs_during_a_wait(ping: Signal) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: ping.store(4))
    timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        assert ping.wait(4, timeout=PATIENCE) == 4
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_run_while_one_waits(ping: Signal) -> None:
    steps = 0
    done = threading.Event()

    def work() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1

    thread = threading.Thread(target=work)
    thread.start()
    before = steps
    with pytest.raises(WaitTimeout):
        ping.wait(1, timeout=0.2)
    ran = steps - before
    done.set()
    thread.join()
    assert ran > 100


def test_several_threads_may_wait_on_one_handle(ping: Signal) -> None:
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(ping.wait(1, timeout=PATIENCE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ping.store(1)
    for thread in threads:
        thread.join()
    assert values == [1] * 4


def test_closing_the_segment_in_another_thread_ends_a_wait_within_a_second(segment: Segment) -> None:
    closed: list[float] = []

    def close() -> None:
        closed.append(time.monotonic())
        segment.close()

    timer = threading.Timer(0.1, close)
    timer.start()
    with pytest.raises(SegmentClosed, match="signal 'ping' of anonymous segment was used after its segment was closed"):
        segment.signal("ping").wait(1)
    assert time.monotonic() - closed[0] < within(1)
    timer.join()


# -------------------------------------------------------------------------------------------------------- heavy traffic


ROUNDS = 20_000


def play_pong(segment: Segment, rounds: int, spin_limit_ns: int) -> None:
    ping, pong = segment.signal("ping"), segment.signal("pong")
    ping.spin_limit_ns = spin_limit_ns
    for turn in range(1, rounds + 1):
        ping.wait(turn, timeout=PATIENCE)
        segment["data"][0] += 1
        pong.store(turn)


@pytest.mark.parametrize("spin_limit_ns", [0, 50_000], ids=["sleeping at once", "spinning first"])
def test_a_long_game_of_ping_pong_loses_no_ball(segment: Segment, spin_limit_ns: int) -> None:
    ping, pong = segment.signal("ping"), segment.signal("pong")
    pong.spin_limit_ns = spin_limit_ns
    data, slow = segment["data"], 0
    with child(play_pong, segment, ROUNDS, spin_limit_ns) as process:
        peers = [Peer.of(process.pid or 0, "pong")]
        for turn in range(1, ROUNDS + 1):
            begin = time.monotonic()
            data[0] += 1
            ping.store(turn)
            assert pong.wait(turn, timeout=PATIENCE, peers=peers) == turn
            slow += time.monotonic() - begin > 0.9 * _native.SLICE_SECONDS
    assert data[0] == 2 * ROUNDS  # neither saw the other's number before the other's data
    # A wake-up that was lost costs a slice and nothing else. This machine may cost some rounds that much by itself.
    assert slow < ROUNDS / 1000


def echo(segment: Segment, place: int, rounds: int) -> None:
    call, answers = segment.signal("ping"), segment.signal("pong")
    for turn in range(1, rounds + 1):
        call.wait(turn, timeout=PATIENCE)
        assert segment["data"][0] == turn
        segment["data"][1 + place] = turn
        answers.add()


def test_a_call_to_many_reaches_all_of_them_every_time(segment: Segment) -> None:
    rounds, count, slow = 2000, 4, 0
    call, answers = segment.signal("ping"), segment.signal("pong")
    with ExitStack() as stack:
        processes = [stack.enter_context(child(echo, segment, place, rounds)) for place in range(count)]
        peers = [Peer.of(process.pid or 0, "echo") for process in processes]
        for turn in range(1, rounds + 1):
            begin = time.monotonic()
            segment["data"][0] = turn
            call.store(turn)
            answers.wait(count * turn, timeout=PATIENCE, peers=peers if turn < rounds else [])
            assert segment["data"][1 : 1 + count].tolist() == [turn] * count
            slow += time.monotonic() - begin > 0.9 * _native.SLICE_SECONDS
    assert slow < rounds / 100


def add_many(segment: Segment, times: int) -> None:
    bell, words = segment.signal("pong"), segment.words("words")
    segment.signal("ping").wait(1, timeout=PATIENCE)
    for turn in range(times):
        bell.add()
        words.add(0, 1)
        words.add(1 + turn % 3, -2)
        while True:
            seen = words.load(7)
            if words.compare_and_swap(7, seen, seen + 1):
                break
        while not bell_swap(segment.signal("many", 0)):
            pass


def bell_swap(bell: Signal) -> bool:
    seen = bell.value
    return bell.compare_and_swap(seen, seen + 1)


def test_no_change_by_several_processes_is_lost(segment: Segment) -> None:
    times, count = 3000, 4
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(child(add_many, segment, times))
        segment.signal("ping").store(1)
    assert segment.signal("pong").value == times * count
    assert segment.signal("many", 0).value == times * count
    assert segment["words"][[0, 1, 2, 3, 7]].tolist() == [12000, -8000, -8000, -8000, 12000]


def count_down(segment: Segment, index: int) -> None:
    for _ in range(2000):
        segment.signal("many", index).add()


def test_signals_side_by_side_do_not_disturb_each_other(segment: Segment) -> None:
    processes = [mp.get_context("fork").Process(target=count_down, args=(segment, index)) for index in range(4)]
    for process in processes:
        process.start()
    values = [segment.signal("many", index).wait(2000, timeout=PATIENCE) for index in range(4)]
    for process in processes:
        process.join()
    assert values == [2000] * 4


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.fixture
def words(segment: Segment) -> Words:
    return segment.words("words")


def test_words_can_be_stored_and_loaded(segment: Segment, words: Words) -> None:
    words.store(3, -7)
    assert (words.load(3), segment["words"][3], len(words)) == (-7, -7, 16)


def test_words_add_returns_the_new_value(words: Words) -> None:
    assert (words.add(0, 5), words.add(0, -7)) == (5, -2)


def test_words_compare_and_swap_changes_only_what_it_expected(words: Words) -> None:
    assert words.compare_and_swap(1, 0, 5)
    assert not words.compare_and_swap(1, 0, 6)
    assert words.load(1) == 5


def test_a_word_is_unchanged_until_it_is_changed(words: Words) -> None:
    assert words.unchanged(2, 0)
    words.store(2, 1)
    assert not words.unchanged(2, 0)


def test_many_words_are_loaded_at_once(words: Words) -> None:
    words.store(5, 50)
    out = np.full(3, -1)
    words.load_into(np.array([5, 0, 5]), out)
    assert out.tolist() == [50, 0, 50]


def test_changed_words_are_named_by_their_position(words: Words) -> None:
    indices = np.array([5, 0, 9])
    seen = np.zeros(3, int)
    words.load_into(indices, seen)
    words.store(9, 1)
    words.store(5, 1)
    assert words.changed(indices, seen) == [0, 2]


@pytest.mark.parametrize("index", [-1, 16, 2**62, -(2**63)])
def test_a_word_that_does_not_exist_is_an_index_error(words: Words, index: int) -> None:
    message = f"words 'words' of anonymous segment has 16 words, there is no word {index}"
    for call in (
        lambda: words.load(index),
        lambda: words.store(index, 1),
        lambda: words.add(index, 1),
        lambda: words.compare_and_swap(index, 0, 1),
        lambda: words.unchanged(index, 0),
        lambda: words.load_into(np.array([0, index]), np.zeros(2, int)),
        lambda: words.changed(np.array([0, index]), np.zeros(2, int)),
    ):
        with pytest.raises(IndexError, match=message):
            call()


def test_a_bad_index_among_good_ones_loads_nothing(words: Words) -> None:
    out = np.full(2, 99)
    with pytest.raises(IndexError):
        words.load_into(np.array([0, 16]), out)
    assert out.tolist() == [99, 99]


@pytest.mark.parametrize("method", ["load_into", "changed"])
def test_arrays_of_different_length_are_refused(words: Words, method: str) -> None:
    with pytest.raises(ValueError, match="must have the same length"):
        getattr(words, method)(np.zeros(2, int), np.zeros(3, int))


@pytest.mark.parametrize("count", [17 * 1000, 2**61, 2**63])
def test_words_cannot_be_placed_where_there_is_no_room(segment: Segment, count: int) -> None:
    with pytest.raises(SegmentError, match=r"the words (has more words than its segment has room for|needs)"):
        Words(segment._mapping, 4096, count, "the words")


def test_words_must_be_aligned(segment: Segment) -> None:
    with pytest.raises(SegmentError, match="needs 8 bytes at a multiple of 8, but was placed at offset 4"):
        Words(segment._mapping, 4, 1, "the words")
