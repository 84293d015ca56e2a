"""New: write a directory with a small working environment, its tests and a training script, as a template."""

from __future__ import annotations

import keyword
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from memlane.core import MemlaneError

_TEMPLATE = Path(__file__).parent / "template"
_PLACEHOLDER = "my_env"
"""The name in the template's files and file names that the new name replaces."""
_FILES = ("my_env.c", "test_my_env.py", "train.py", "README.md")
# Without those that are also Python keywords.
_C_KEYWORDS = (
    *("auto", "case", "char", "const", "default", "do", "double", "enum", "extern", "float", "goto", "inline", "int"),
    *("long", "register", "restrict", "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union"),
    *("unsigned", "void", "volatile"),
)


class NewError(MemlaneError, ValueError):
    """The template could not be written."""


class DirectoryExists(NewError, FileExistsError):
    """The path already exists; it is not changed."""


def new(name: str, directory: str | os.PathLike[str] | None = None) -> Path:
    """Write a directory with an environment called ``name`` and return its path.

    ``directory``: the directory to create, which must not exist yet; None: ``name``, in the current directory."""
    _check_name(name)
    target = Path(name if directory is None else directory)
    texts = {
        file.replace(_PLACEHOLDER, name): (_TEMPLATE / file).read_text().replace(_PLACEHOLDER, name) for file in _FILES
    }
    try:
        # mkdir is the check: a separate look before it could miss a directory that another process creates meanwhile.
        target.mkdir(parents=True)
        for file, text in texts.items():
            (target / file).write_text(text)
    except FileExistsError:
        raise DirectoryExists(
            f"{target} already exists and was not changed; choose another name or directory"
        ) from None
    except OSError as error:
        raise NewError(f"{target} cannot be written: {error.strerror}; choose another directory") from None
    return target


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise NewError(f"{name!r} cannot be a name: use the letters A to Z, digits and _, and begin with a letter")
    if keyword.iskeyword(name) or name in _C_KEYWORDS:
        language = "Python" if keyword.iskeyword(name) else "C"
        raise NewError(f"{name!r} cannot be a name: it is a keyword of {language}; choose another")
    if name in sys.stdlib_module_names or name == "train" or _is_module(name):
        # Python imports a library NAME.so beside a script as the module NAME.
        raise NewError(
            f"{name!r} cannot be a name: {name}.so would hide the Python module {name} from `import {name}`; "
            "choose another"
        )


def _is_module(name: str) -> bool:
    """Whether ``import name`` finds code. A directory without code (a namespace package) does not count."""
    try:
        module = find_spec(name)
    except (ImportError, ValueError):
        return False
    return module is not None and module.origin is not None
