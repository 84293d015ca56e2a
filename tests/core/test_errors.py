"""Errors: each is also a built-in error, and each can be pickled."""

from __future__ import annotations

import pickle
import warnings

import pytest

from memlane import core
from memlane.core import MemlaneError, Peer, PeerDied, StaleViewWarning

BUILT_INS: dict[str, type[Exception]] = {
    "BudgetError": MemoryError,
    "LayoutError": ValueError,
    "NothingToSample": LookupError,
    "PeerDied": ConnectionError,
    "SegmentClosed": ValueError,
    "SegmentError": ValueError,
    "SegmentExists": FileExistsError,
    "SegmentMissing": FileNotFoundError,
    "StaleView": ReferenceError,
    "StartError": RuntimeError,
    "UsedAfterFork": RuntimeError,
    "WaitTimeout": TimeoutError,
}
ERRORS = [
    name
    for name in core.__all__
    if isinstance(getattr(core, name), type) and issubclass(getattr(core, name), Exception)
]


def test_the_list_of_errors_is_complete() -> None:
    assert set(ERRORS) - {"MemlaneError", "StaleViewWarning"} == set(BUILT_INS)


@pytest.mark.parametrize("name", BUILT_INS)
def test_an_error_is_a_memlane_error_and_a_built_in(name: str) -> None:
    error = getattr(core, name)("a message")
    assert isinstance(error, MemlaneError)
    assert isinstance(error, BUILT_INS[name])


@pytest.mark.parametrize("name", BUILT_INS)
def test_an_error_shows_its_message(name: str) -> None:
    assert str(getattr(core, name)("field 'obs': expected 3, found 4")) == "field 'obs': expected 3, found 4"


@pytest.mark.parametrize("name", BUILT_INS)
def test_an_error_pickles_with_its_message(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(core, name)("a message")))
    assert (type(error).__name__, str(error)) == (name, "a message")


def test_the_death_of_a_peer_pickles_with_the_peer() -> None:
    peer = Peer(1234, 5678, "collector 3")
    error = pickle.loads(pickle.dumps(PeerDied("it died", peer=peer)))
    assert (error.peer, error.peer.name) == (peer, "collector 3")


def test_the_kinds_of_segment_errors_are_segment_errors() -> None:
    assert all(
        issubclass(kind, core.SegmentError) for kind in (core.SegmentClosed, core.SegmentMissing, core.SegmentExists)
    )


def test_a_stale_view_warning_can_be_filtered_as_a_runtime_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.warn("held", StaleViewWarning, stacklevel=1)
