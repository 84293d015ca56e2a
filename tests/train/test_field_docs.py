"""What ``help`` shows of the options, settings and results of a training: the docstrings of their fields."""

from __future__ import annotations

import dataclasses
import pydoc
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

import memlane.train
from memlane.train.field_docs import document_fields, field_docs
from memlane.train.presets import Preset

DATACLASSES: list[type[Any]] = [
    Preset, *(cls for cls in (getattr(memlane.train, name) for name in memlane.train.__all__)
              if isinstance(cls, type) and dataclasses.is_dataclass(cls)),
]  # fmt: skip


@document_fields
@dataclass
class Fruit:
    """A fruit."""

    name: str
    """Its name."""
    weight: float = 1.5
    """Its weight
    in grams."""
    colours: list[str] = field(default_factory=list)
    tree: dict[str, int] = field(default_factory=dict)
    """Where it grows."""


@document_fields
@dataclass
class Apple(Fruit):
    weight: float = 200.0
    ripe: bool = True
    """Whether it can be eaten."""


def test_each_field_has_its_type_its_default_and_its_docstring() -> None:
    assert Fruit.__doc__ == (
        "A fruit.\n\nAttributes:\n    name (str): Its name.\n    weight (float, default 1.5): Its weight in grams.\n"
        "    colours (list[str], default []):\n    tree (dict[str, int], default {}): Where it grows."
    )
    assert Fruit("plum").__doc__ == Fruit.__doc__


def test_a_subclass_shows_the_fields_that_it_inherits_with_its_own_defaults() -> None:
    assert "    weight (float, default 200.0): Its weight in grams.\n" in str(Apple.__doc__)
    assert str(Apple.__doc__).endswith("ripe (bool, default True): Whether it can be eaten.")


@pytest.mark.parametrize("cls", DATACLASSES)
def test_help_shows_every_option_and_setting_with_its_meaning(cls: type[Any]) -> None:
    def words(text: str) -> str:
        return " ".join(text.replace("|", " ").split())

    shown, docs = words(pydoc.plain(pydoc.render_doc(cls))), field_docs(cls)
    for each in dataclasses.fields(cls):
        assert each.name in docs, f"{cls.__name__}.{each.name} has no docstring"
        assert words(f"{each.name} ({each.type}") in shown
        assert words(docs[each.name]) in shown


def test_an_import_does_not_read_the_source_for_it() -> None:
    code = "import memlane.train, sys; memlane.train.APPOConfig; "
    code += "print([vars(cls)['__doc__'].complete for cls in (memlane.train.APPOConfig, memlane.train.Options)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "['', '']\n"
