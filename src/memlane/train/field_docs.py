"""Field docs: the docstrings below the fields of a dataclass become part of what ``help`` shows of it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_WIDTH = 100
"""Characters per line of the section."""


def document_fields(cls: _Class) -> _Class:
    """Decorate a dataclass: its ``__doc__`` ends with a section "Attributes", which has the type, the default and the
    docstring of each field."""
    cls.__doc__ = _Docstring(cls.__doc__ or "")  # type: ignore[assignment]
    return cls


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings of the fields of a dataclass, those that it inherits included, each as one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        with contextlib.suppress(OSError):  # there is no source file
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for statement, after in pairwise(definition.body):
                match statement, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = " ".join(text.split())
    return docs


class _Docstring:
    """``__doc__`` of a class. It reads the source file at first use, so that an import does not wait for it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.complete = ""

    def __get__(self, instance: object, owner: type) -> str:
        if not self.complete:
            docs = field_docs(owner)
            entries = [_entry(field, docs.get(field.name, "")) for field in fields(owner)]
            self.complete = "\n".join([inspect.cleandoc(self.text), "", "Attributes:", *entries])
        return self.complete


def _entry(field: Field[Any], text: str) -> str:
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    entry = f"{field.name} ({kind}{_default(field)}): {text}"
    return textwrap.fill(
        entry, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f", default {field.default!r}"
    if field.default_factory is not MISSING:
        empty = {dict: "{}", list: "[]"}
        factory: Any = field.default_factory
        return f", default {empty.get(factory) or f'{factory.__name__}()'}"
    return ""
