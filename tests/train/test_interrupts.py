"""Signals that end a training: the first is deferred, the second is not, and a program's own handlers stay."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from memlane.train import interrupts as interrupts_module
from memlane.train.interrupts import deferred_interrupts, exit_code

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
CODES = {"Ctrl-C": 130, "SIGTERM": 143, "SIGHUP": 129}


@pytest.fixture(autouse=True)
def _default_actions() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_only_noted(number: signal.Signals) -> None:
    with deferred_interrupts() as interrupts:
        assert interrupts.name == ""
        os.kill(os.getpid(), number)
        name = interrupts.name
    assert exit_code(name) == 128 + number == CODES[name]


def test_what_is_no_signal_has_no_exit_code() -> None:
    assert exit_code("target") == 0


def end_of(number: int) -> type[BaseException]:
    return KeyboardInterrupt if number == signal.SIGINT else SystemExit


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_raises(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "_SAME_SECONDS", 0.0)
    with deferred_interrupts():
        os.kill(os.getpid(), number)
        time.sleep(0.001)
        with pytest.raises(end_of(number)) as caught:
            os.kill(os.getpid(), number)
    if number != signal.SIGINT:
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 128 + number


def test_a_signal_that_timeout_sends_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "_SAME_SECONDS", 1e9)
    with deferred_interrupts() as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.name == "SIGTERM"


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_raises_where_work_can_be_given_up(number: signal.Signals) -> None:
    with deferred_interrupts() as interrupts:
        with pytest.raises(end_of(number)), interrupts.raising():
            os.kill(os.getpid(), number)
        assert exit_code(interrupts.name) == 128 + number


def test_a_block_in_a_block_sees_the_same_signal() -> None:
    with deferred_interrupts() as outer:
        with deferred_interrupts() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)  # still deferred
        assert outer.name == "SIGTERM"


def test_handlers_are_restored() -> None:
    with deferred_interrupts():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == [
        signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL,
    ]  # fmt: skip


def test_a_programs_own_handler_and_nohup_keep_their_meaning() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.name == ""
    assert seen == [signal.SIGTERM]


def test_another_thread_defers_nothing() -> None:
    names: list[str] = []

    def defer() -> None:
        with deferred_interrupts() as interrupts:
            names.append(interrupts.name)

    thread = threading.Thread(target=defer)
    thread.start()
    thread.join()
    assert names == [""]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
