"""New: a folder with a small environment that works, its test and its training, to begin one's own with."""

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
"""The name that the template's files, and their own names, have in place of the new one."""
_FILES = ("my_env.c", "test_my_env.py", "train.py", "README.md")
# Those that are not words of Python too.
_C_WORDS = (
    *("auto", "case", "char", "const", "default", "do", "double", "enum", "extern", "float", "goto", "inline", "int"),
    *("long", "register", "restrict", "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union"),
    *("unsigned", "void", "volatile"),
)


class NewError(MemlaneError, ValueError):
    """A new environment could not be written."""


class FolderExists(NewError, FileExistsError):
    """There is something at that path already. It is left as it is."""


def new(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes a folder with an environment of that name and returns it.

    ``folder``: None is one with the same name, here. It must not be there yet."""
    _check(name)
    into = Path(name if folder is None else folder)
    texts = {
        file.replace(_PLACEHOLDER, name): (_TEMPLATE / file).read_text().replace(_PLACEHOLDER, name) for file in _FILES
    }
    try:
        # Whoever finds no folder makes it: a look first, and then the making, could overwrite what came in between.
        into.mkdir(parents=True)
        for file, text in texts.items():
            (into / file).write_text(text)
    except FileExistsError:
        raise FolderExists(f"{into} is there already, and is left as it is: take another name or folder") from None
    except OSError as error:
        raise NewError(f"{into} cannot be written: {error.strerror}") from None
    return into


def _check(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise NewError(f"{name!r} cannot be a name: use letters of the alphabet, digits and _, and begin with a letter")
    if keyword.iskeyword(name) or name in _C_WORDS:
        raise NewError(f"{name!r} cannot be a name: it is a word of {'Python' if keyword.iskeyword(name) else 'C'}")
    if name in sys.stdlib_module_names or name == "train" or _is_module(name):
        # Python takes a library NAME.so beside a script for the module NAME.
        raise NewError(f"{name!r} cannot be a name: {name}.so would stand in the way of Python's `import {name}`")


def _is_module(name: str) -> bool:
    """A folder without code, which Python takes for a package too, is none."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None
