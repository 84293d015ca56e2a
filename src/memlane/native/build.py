"""Build: from a C file to a shared library that ``memlane.native.load`` takes, in one command of the system's compiler.

Nothing takes the old library's place before the new one is known to be good: it is compiled beside it, its spec is read
by another process, and then it is renamed. Who has the old one loaded keeps it whole, since its file lives on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from memlane import _native
from memlane.core import MemlaneError

_C, _CPP = {".c"}, {".cc", ".cpp", ".cxx", ".c++"}
_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_INSTALL = (
    "Install one: `apt-get install build-essential` (Debian, Ubuntu), `dnf install gcc gcc-c++` (Fedora), "
    "`xcode-select --install` (macOS); or set {variable} to the one to use."
)

# The same as memlane's own environments have. -ffp-contract=off: what is computed for four environments at a time and
# what for one must round alike, or results would depend on the number of threads. -fno-trapping-math lets the compiler
# compute both sides of a "?".
_FLAGS = ["-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra"]
_FAST = ["-O3"]
# Undefined behaviour (an index beyond its array, an overflow) is told with file and line, and the program goes on.
_DEBUG = ["-Og", "-g", "-fsanitize=undefined", "-fno-omit-frame-pointer"]

# C++20 has the `.name = ...` of the spec, but g++ warns of every field that is left out, as C does not.
_CPP_FLAGS = ["-std=c++20", "-Wno-missing-field-initializers"]

_SECONDS_TO_LOAD = 60.0
"""Far more than it takes to import memlane: a library whose start-up code hangs must not hang the caller."""
_UNFIT = 3
"""How the process that reads the spec ends when it has said what is wrong. Python itself ends with 0, 1 or 2."""
_LOADER = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from memlane.native.library import open_library
from memlane.native.spec import SpecError
try:
    open_library(sys.argv[1])
except SpecError as error:
    sys.stderr.write(str(error))
    sys.exit({_UNFIT})
"""


class BuildError(MemlaneError, RuntimeError):
    """An environment could not be built. The message says what is missing or wrong, in the compiler's words too."""


def build(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    debug: bool = False,
    native: bool = True,
) -> Path:
    """Compiles an environment and returns the library. Warnings of the compiler go to stderr.

    ``output``: None is beside the source, with the ending ``.so``. ``debug``: undefined behaviour is reported while it
    runs, and debuggers see lines. ``native``: for this machine's processor; False when it shall run on others too."""
    source = Path(source)
    output = _output_for(_checked(source), output)
    variable = "CXX" if source.suffix.lower() in _CPP else "CC"
    flags = [*(_DEBUG if debug else _FAST), *_FLAGS, *(["-march=native"] if native else [])]
    flags += _CPP_FLAGS if variable == "CXX" else []
    command = [*_compiler(variable), *flags, f"-I{_include_folder()}", str(source)]
    try:
        # In the folder where it shall end: a rename is one step only within a file system.
        folder = tempfile.TemporaryDirectory(prefix=".memlane-build-", dir=output.parent)
    except OSError as error:
        raise BuildError(f"{output} cannot be written: {error.strerror}") from None
    with folder as name:
        fresh = Path(name) / output.name
        sys.stderr.write(_compile([*command, "-o", str(fresh), "-lm"], source, variable))
        _check(fresh, output, source)
        os.replace(fresh, output)
    return output


def _checked(source: Path) -> Path:
    if source.is_dir():
        raise BuildError(f"{source} is a folder; name the C file in it")
    if not source.exists():
        raise BuildError(f"there is no file {source}; `memlane new NAME` writes one to begin with")
    if source.suffix.lower() not in _C | _CPP:
        known = ", ".join(sorted(_C | _CPP))
        raise BuildError(f"{source} does not look like C or C++: its name should end in one of {known}")
    return source


def _output_for(source: Path, output: str | os.PathLike[str] | None) -> Path:
    if output is None:
        return source.with_suffix(".so")
    file = Path(output)
    if file.is_dir():
        file = file / f"{source.stem}.so"
    if file.suffix.lower() in _C | _CPP:
        raise BuildError(f"the output {file} has the name of a source file; call it {source.stem}.so")
    if not file.parent.is_dir():
        raise BuildError(f"the output {file} cannot be written: there is no folder {file.parent}")
    return file


def _compiler(variable: str) -> list[str]:
    """What the variable says, words and all (``ccache gcc``), or the first one that is there."""
    chosen = shlex.split(os.environ.get(variable, ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"{variable} is {os.environ[variable]!r}, but there is no program {chosen[0]!r} to run")
        return chosen
    for name in _COMPILERS[variable]:
        if shutil.which(name):
            return [name]
    language = "C++" if variable == "CXX" else "C"
    names = ", ".join(_COMPILERS[variable])
    raise BuildError(f"there is no {language} compiler here ({names}). {_INSTALL.format(variable=variable)}")


def _include_folder() -> Path:
    """Beside the native module, which is not beside this file when memlane is installed for editing."""
    folder = Path(_native.__file__).parent / "include"
    if not (folder / "memlane" / "env.h").exists():
        raise BuildError(f"memlane's header memlane/env.h is not in {folder}: install memlane again, it is incomplete")
    return folder


def _compile(command: list[str], source: Path, variable: str) -> str:
    """What the compiler says about a program that it compiles."""
    # In English, so that what it says can be understood below.
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=english, check=False)
    except OSError as error:
        raise BuildError(f"the compiler {command[0]!r} cannot be run: {error.strerror}; see {variable}") from None
    said = done.stdout.decode(errors="replace")
    if done.returncode < 0:
        raise BuildError(f"the compiler was killed by {_signal_name(-done.returncode)} while it compiled {source}")
    if done.returncode:
        raise BuildError(f"{source} does not compile. {_what_to_look_at(said)}\n\n{said.rstrip()}")
    return said


def _what_to_look_at(said: str) -> str:
    if missing := re.search(r"fatal error: '?([^\s':]+)'?(: No such file or directory| file not found)", said):
        return f"The header {missing[1]} was not found: look for it beside the source, or install what it belongs to."
    if re.search(r"ubsan", said) and re.search(r"cannot find|No such file", said):
        return "A debug build needs the compiler's libubsan: install it, or build without debug."
    if first := re.search(r"^(\S.*?):(\d+):(?:\d+:)? (?:fatal )?error:", said, re.MULTILINE):
        where = f"line {first[2]} of {Path(first[1]).name}"
        return f"Look at the first error, {where}: those after it often follow from it."
    return "Look at what the compiler says:"


def _check(fresh: Path, output: Path, source: Path) -> None:
    """Reads the spec where a crash harms nobody: start-up code may do anything, and pointers may lead anywhere."""
    command = [sys.executable, "-c", _LOADER, str(fresh), json.dumps(sys.path)]
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, timeout=_SECONDS_TO_LOAD, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{source} compiles, but its library could not be loaded within {_SECONDS_TO_LOAD:g} s: look at what runs "
            "before `init`"
        ) from None
    said = done.stderr.decode(errors="replace")
    for temporary in (fresh.resolve(), fresh):
        said = said.replace(str(temporary), str(output))
    if done.returncode < 0:
        raise BuildError(
            f"{source} compiles, but reading its memlane_env ended in {_signal_name(-done.returncode)}: look at the "
            "pointers in it, and at the counts (MEMLANE_COUNT), which must not promise more than there is"
        )
    if done.returncode == _UNFIT:
        undefined = " It is used but defined nowhere." if "undefined symbol" in said else ""
        raise BuildError(f"{source} compiles, but cannot be run: {said}{undefined}")
    if done.returncode:
        raise BuildError(f"{source} compiles, but its library could not be looked at:\n\n{said.rstrip()}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
