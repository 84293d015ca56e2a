"""Build: compile a C file into a shared library for ``memlane.native.load``, with the system's compiler.

The new library replaces the old one only after it has been checked: it is compiled into a temporary directory, another
process reads its spec, and then it is renamed. Processes that have the old library loaded keep using it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Never

from memlane import _native
from memlane.core import MemlaneError
from memlane.core.children import describe_exit
from memlane.core.suggestions import did_you_mean

_C, _CPP = {".c"}, {".cc", ".cpp", ".cxx", ".c++"}
_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_INSTALL = (
    "Install one: `apt-get install build-essential` (Debian, Ubuntu) or `dnf install gcc gcc-c++` (Fedora); or set "
    "{variable} to a compiler command."
)

# The flags that memlane's own environments are built with. -ffp-contract=off: vectorised and scalar code must round
# alike, or results would depend on the number of threads. -fno-trapping-math lets the compiler evaluate both operands
# of "?:" without a branch.
_FLAGS = ["-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra"]
_FAST = ["-O3"]
# Undefined behaviour (an index out of bounds, an overflow) is reported with file and line, and the program continues.
_DEBUG = ["-Og", "-g", "-fsanitize=undefined", "-fno-omit-frame-pointer"]

# C++20 has designated initialisers (`.name = ...`), but unlike gcc for C, g++ warns about every field that is left out.
_CPP_FLAGS = ["-std=c++20", "-Wno-missing-field-initializers"]

_SECONDS_TO_LOAD = 60.0
"""Time limit for reading the spec, far above the import time of memlane, so that a constructor cannot hang a build."""
_INVALID_SPEC = 3
"""Exit code of the process that reads the spec, after it wrote a SpecError to stderr. Python itself uses 0, 1 and 2."""
_LOADER = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from memlane.native.library import open_library
from memlane.native.spec import SpecError
try:
    open_library(sys.argv[1])
except SpecError as error:
    sys.stderr.write(str(error))
    sys.exit({_INVALID_SPEC})
"""


class BuildError(MemlaneError, RuntimeError):
    """An environment could not be built. The message says what is missing or wrong and has the compiler's output."""


def build(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    debug: bool = False,
    native: bool = True,
    **unknown: Never,
) -> Path:
    """Compile an environment and return the path of the library. Compiler warnings go to stderr.

    ``output``: the library to write, or the directory for it; None writes it beside the source with the suffix ``.so``.
    ``debug``: report undefined behaviour at run time, and add debug information. ``native``: optimise for this
    machine's processor; False builds a library that also runs on other machines."""
    for name in unknown:
        suggestion = did_you_mean(name, ["debug", "native", "output"], {"portable": "native"})
        raise TypeError(f"build() has no option {name!r}{suggestion} (options: output, debug, native)")
    source = Path(source)
    _check_source(source)
    output = _output_path(source, output)
    variable = "CXX" if source.suffix.lower() in _CPP else "CC"
    flags = [*(_DEBUG if debug else _FAST), *_FLAGS, *(["-march=native"] if native else [])]
    flags += _CPP_FLAGS if variable == "CXX" else []
    command = [*_compiler(variable), *flags, f"-I{_include_folder()}", _as_argument(source)]
    try:
        # In the directory of the output: a rename is atomic only within one file system.
        folder = tempfile.TemporaryDirectory(prefix=".memlane-build-", dir=output.parent)
    except OSError as error:
        raise BuildError(f"{output} cannot be written: {error.strerror}") from None
    with folder as temporary:
        library = Path(temporary) / output.name
        sys.stderr.write(_compile([*command, "-o", _as_argument(library), "-lm"], source, variable))
        _check_library(library, output, source)
        os.replace(library, output)
    return output


def _as_argument(path: Path) -> str:
    """The path as the compiler reads no option (``-o``) and no list of options (``@file``) in it."""
    text = str(path)
    return f"./{text}" if text.startswith(("-", "@")) else text


def _check_source(source: Path) -> None:
    if source.is_dir():
        raise BuildError(f"{source} is a directory; pass the C file in it")
    if not source.exists():
        raise BuildError(f"there is no file {source}; `memlane new NAME` writes a template")
    if source.suffix.lower() not in _C | _CPP:
        known = ", ".join(sorted(_C | _CPP))
        raise BuildError(f"{source} is not a C or C++ file: its name should end in one of {known}")


def _output_path(source: Path, output: str | os.PathLike[str] | None) -> Path:
    if output is None:
        return source.with_suffix(".so")
    file = Path(output)
    if file.is_dir():
        file = file / f"{source.stem}.so"
    if file.suffix.lower() in _C | _CPP:
        raise BuildError(f"the output {file} has the suffix of a source file; use {source.stem}.so")
    if file.exists() and not file.is_file():
        raise BuildError(f"the output {file} is a device, a pipe or a socket; name a file, such as {source.stem}.so")
    if not file.parent.is_dir():
        raise BuildError(f"the output {file} cannot be written: there is no directory {file.parent}")
    return file


def _compiler(variable: str) -> list[str]:
    """The command in the environment variable (it may have arguments: ``ccache gcc``), or the first known compiler."""
    command = shlex.split(os.environ.get(variable, ""))
    if command:
        if shutil.which(command[0]) is None:
            raise BuildError(
                f"{variable} is {os.environ[variable]!r}, but there is no program {command[0]!r}; set {variable} to a "
                "compiler command, or unset it"
            )
        return command
    for name in _COMPILERS[variable]:
        if shutil.which(name):
            return [name]
    language = "C++" if variable == "CXX" else "C"
    names = ", ".join(_COMPILERS[variable])
    raise BuildError(f"found no {language} compiler ({names}). {_INSTALL.format(variable=variable)}")


def _include_folder() -> Path:
    """The directory ``include`` beside the native module, which an editable install does not have beside this file."""
    folder = Path(_native.__file__).parent / "include"
    if not (folder / "memlane" / "env.h").exists():
        raise BuildError(f"the header memlane/env.h is missing in {folder}: install memlane again, it is incomplete")
    return folder


def _compile(command: list[str], source: Path, variable: str) -> str:
    """Run the compiler and return its output."""
    # In English: _explain matches its messages.
    english = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=english, check=False)
    except OSError as error:
        raise BuildError(
            f"the compiler {command[0]!r} cannot be run: {error.strerror}; {variable} chooses another one"
        ) from None
    text = result.stdout.decode(errors="replace")
    if result.returncode < 0:
        raise BuildError(f"the compiler {describe_exit(result.returncode)} while it compiled {source}")
    if result.returncode:
        raise BuildError(f"{source} does not compile. {_explain(text)}\n\n{text.rstrip()}")
    return text


def _explain(text: str) -> str:
    """A sentence about the compiler's output: where to look first."""
    if missing := re.search(r"fatal error: '?([^\s':]+)'?(: No such file or directory| file not found)", text):
        return f"The header {missing[1]} was not found: put it beside the source, or install the package that has it."
    if re.search(r"ubsan", text) and re.search(r"cannot find|No such file", text):
        return "A debug build needs the compiler's libubsan: install it, or build without debug."
    if first := re.search(r"^(\S.*?):(\d+):(?:\d+:)? (?:fatal )?error:", text, re.MULTILINE):
        where = f"line {first[2]} of {Path(first[1]).name}"
        return f"Start with the first error, {where}: later ones are often consequences of it."
    return "The compiler's output:"


def _check_library(library: Path, output: Path, source: Path) -> None:
    """Read the spec in another process: constructors of the library and bad pointers in the spec may crash it."""
    command = [sys.executable, "-c", _LOADER, str(library), json.dumps(sys.path)]
    quiet = subprocess.DEVNULL
    try:
        result = subprocess.run(
            command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, timeout=_SECONDS_TO_LOAD, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{source} compiles, but its library did not load within {_SECONDS_TO_LOAD:g} s: check the code that runs "
            "when it is loaded (constructors)"
        ) from None
    text = result.stderr.decode(errors="replace")
    for temporary in (library.resolve(), library):
        text = text.replace(str(temporary), str(output))
    if result.returncode < 0:
        raise BuildError(
            f"{source} compiles, but the process that read its memlane_env {describe_exit(result.returncode)}: check "
            "the pointers in it and the counts of its arrays (use MEMLANE_COUNT)"
        )
    if result.returncode == _INVALID_SPEC:
        undefined = " It is used but not defined." if "undefined symbol" in text else ""
        raise BuildError(f"{source} compiles, but cannot be run: {text}{undefined}")
    if result.returncode:
        raise BuildError(f"{source} compiles, but its library could not be checked:\n\n{text.rstrip()}")
