"""Suggestions: an unknown name is answered with the nearest known one, or with nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlane.core.suggestions import describe_unknown, did_you_mean

KNOWN = ["num_steps", "gae_lambda", "clip_coef", "Tau"]
SYNONYMS = {"n_steps": "num_steps", "clip_range": "clip_coef", "horizon": "num_steps", "gone": "removed_setting"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_step", "num_steps"),
        ("gae_lamda", "gae_lambda"),
        ("NUM_STEPS", "num_steps"),
        ("tau", "Tau"),
        ("n_steps", "num_steps"),
        ("horizon", "num_steps"),
        ("clip_range", "clip_coef"),
    ],
)
def test_a_name_that_is_similar_or_a_synonym_is_answered_with_the_known_name(name: str, expected: str) -> None:
    assert did_you_mean(name, KNOWN, SYNONYMS) == f"; did you mean {expected!r}?"


@pytest.mark.parametrize("name", ["colour", "", "x"])
def test_a_name_that_is_similar_to_nothing_gets_no_answer(name: str) -> None:
    assert did_you_mean(name, KNOWN, SYNONYMS) == ""


def test_a_synonym_of_a_name_that_is_not_known_here_is_ignored() -> None:
    assert did_you_mean("gone", KNOWN, SYNONYMS) == ""


def test_a_synonym_goes_before_a_similar_name() -> None:
    assert did_you_mean("n_steps", ["n_step", "num_steps"], {"n_steps": "num_steps"}) == "; did you mean 'num_steps'?"


def test_nothing_is_suggested_where_nothing_is_known() -> None:
    assert did_you_mean("gamma", [], {"gamma": "discount"}) == ""


def test_known_names_may_come_from_an_iterator() -> None:
    assert did_you_mean("obss", iter(["obs", "reward"])) == "; did you mean 'obs'?"


@given(st.text(max_size=12), st.lists(st.text(max_size=12), max_size=5))
def test_only_known_names_are_ever_suggested(name: str, known: list[str]) -> None:
    assert did_you_mean(name, known) in {"", *(f"; did you mean {each!r}?" for each in known)}


def test_unknown_names_are_listed_in_order_each_with_its_hint_before_the_known_names() -> None:
    message = describe_unknown("settings", {"tua", "colour"}, KNOWN, lambda name: did_you_mean(name, KNOWN))
    assert message == (
        "unknown settings: 'colour', 'tua' (did you mean 'Tau'?); known are Tau, clip_coef, gae_lambda, num_steps"
    )
