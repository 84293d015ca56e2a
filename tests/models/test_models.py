"""Spin searches all states of the Promela models: the models have no error, and each mutant has one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.spin import MISSING, MODELS, Bounds, Model, Mutant, available, models, verify

SMALL_SECONDS = 300.0
LARGE_SECONDS = 3600.0
"""Seconds after which a search is given up. Not a promise: the machine may be busy."""

needs_spin = pytest.mark.skipif(not available(), reason=MISSING)


def cases(large: bool) -> list[object]:
    return [
        pytest.param(model, bounds, id=f"{model.name}-{bounds.name}")
        for model in models()
        for bounds in model.bounds
        if bounds.large == large
    ]


MUTANTS = [
    pytest.param(model, mutant, id=f"{model.name}-{mutant.name}") for model in models() for mutant in model.mutants
]


@pytest.mark.models
@needs_spin
@pytest.mark.parametrize(("model", "bounds"), cases(large=False))
def test_a_model_has_no_error(
    model: Model, bounds: Bounds, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdict = verify(model, bounds, tmp_path, timeout=SMALL_SECONDS)
    record_property("search", (f"{model.name} {bounds.name}", verdict.states, verdict.seconds))
    assert verdict.errors == 0, f"{verdict.findings}\n{verdict.trail}"


@pytest.mark.models
@needs_spin
@pytest.mark.parametrize(("model", "mutant"), MUTANTS)
def test_a_mutant_has_an_error(
    model: Model, mutant: Mutant, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdict = verify(model, model.small(mutant.bounds), tmp_path, mutant=mutant.name, timeout=SMALL_SECONDS)
    found = verdict.findings[0] if verdict.findings else "nothing"
    record_property("search", (f"{model.name} {mutant.name}: {found}", verdict.states, verdict.seconds))
    assert verdict.errors > 0, f"Spin finds no error although {mutant.text}"


@pytest.mark.models_deep
@pytest.mark.timeout(LARGE_SECONDS + 60)
@needs_spin
@pytest.mark.parametrize(("model", "bounds"), cases(large=False))
def test_every_run_of_a_model_ends(
    model: Model, bounds: Bounds, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdict = verify(model, bounds, tmp_path, cycles=True, timeout=LARGE_SECONDS)
    record_property("search", (f"{model.name} {bounds.name}: cycles", verdict.states, verdict.seconds))
    assert verdict.errors == 0, f"{verdict.findings}\n{verdict.trail}"


@pytest.mark.models_deep
@pytest.mark.timeout(LARGE_SECONDS + 60)
@needs_spin
@pytest.mark.parametrize(("model", "bounds"), cases(large=True))
def test_a_model_with_large_bounds_has_no_error(
    model: Model, bounds: Bounds, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdict = verify(model, bounds, tmp_path, timeout=LARGE_SECONDS)
    record_property("search", (f"{model.name} {bounds.name}, large", verdict.states, verdict.seconds))
    assert verdict.errors == 0, f"{verdict.findings}\n{verdict.trail}"


@pytest.mark.models
@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_a_model_has_small_and_large_bounds_and_its_mutants_name_small_ones(model: Model) -> None:
    assert {bounds.large for bounds in model.bounds} == {False, True}
    assert {mutant.bounds for mutant in model.mutants} <= {b.name for b in model.bounds if not b.large}


@pytest.mark.models
def test_every_mutant_in_the_models_is_tried() -> None:
    written = {name for file in MODELS.rglob("*.pml") for name in re.findall(r"MUTANT_(\w+)", file.read_text())}
    assert written == {mutant.name for model in models() for mutant in model.mutants}
