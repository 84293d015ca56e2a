"""The front door: what ``import memlane`` shows, what it does not import, and the command without its packages."""

from __future__ import annotations

import importlib
import os
import re
import rlcompleter
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import memlane

COMMAND = Path(sys.executable).with_name("memlane")
SUBPACKAGES = ["core", "ipc", "lanes", "lessons", "native", "runner", "spaces", "testing", "train", "vector"]
NAMES = {
    "AsyncVectorEnv": "memlane.vector.async_vector_env",
    "Replay": "memlane.lanes.replay",
    "Ring": "memlane.lanes.ring",
    "Segment": "memlane.core.segment",
    "SharedCircularBuffer": "memlane.lessons",
    "Weights": "memlane.lanes.weights",
    "load": "memlane.native",
    "make": "memlane.native",
    "shared_memory_rl_pipeline": "memlane.lessons",
    "zero_copy_env_simulation": "memlane.lessons",
}


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60)


# --------------------------------------------------------------------------------------------------------------- names


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(memlane) == sorted(memlane.__all__) == sorted([*NAMES, *SUBPACKAGES, "__version__"])


@pytest.mark.parametrize("name", ["ipc", "lanes", "native", "runner", "spaces", "testing", "train", "vector"])
def test_dir_of_a_package_shows_its_public_names_and_nothing_else(name: str) -> None:
    package = importlib.import_module(f"memlane.{name}")
    assert dir(package) == sorted(package.__all__)


def test_tab_completion_shows_the_public_names() -> None:
    completer = rlcompleter.Completer({"memlane": memlane})
    shown = []
    while (text := completer.complete("memlane.", len(shown))) is not None:
        shown.append(text.removeprefix("memlane.").removesuffix("(").removesuffix("()"))
    assert sorted(shown) == sorted([*NAMES, *SUBPACKAGES])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_one_of_its_module(name: str) -> None:
    assert getattr(memlane, name) is getattr(importlib.import_module(NAMES[name]), name)


def test_threads_can_use_names_first_at_the_same_time() -> None:
    """A package and a module in it, imported by two threads: Python would let one of them see a half-imported one."""
    result = python(
        """
import sys, threading, time
import memlane

class Slow:
    @staticmethod
    def find_spec(name, path, target=None):
        if name.startswith("memlane"):
            time.sleep(0.02)

sys.meta_path.insert(0, Slow)
first = threading.Thread(target=lambda: memlane.core)
first.start()
time.sleep(0.01)
memlane.Segment
first.join()
"""
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", [*NAMES, *SUBPACKAGES])
def test_each_name_can_be_used_first(name: str) -> None:
    """No name depends on another one having been imported before."""
    assert python(f"import memlane; memlane.{name}", "-W", "error").stderr == ""


def test_the_front_door_offers_every_public_subpackage() -> None:
    root = Path(memlane.__file__).parent
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    assert packages | {"lessons"} == set(SUBPACKAGES)


def test_a_subpackage_is_an_attribute() -> None:
    code = f"import memlane; print([getattr(memlane, name).__name__ for name in {SUBPACKAGES}])"
    assert python(code).stdout == f"{[f'memlane.{name}' for name in SUBPACKAGES]}\n"


def test_everything_can_be_imported_with_a_star() -> None:
    code = "from memlane import *; print(Ring.__name__, make.__name__, core.__name__, __version__)"
    assert python(code).stdout == f"Ring make memlane.core {metadata.version('memlane')}\n"


def test_the_version_is_the_one_of_the_package() -> None:
    assert memlane.__version__ == metadata.version("memlane")


def test_an_unknown_name_is_answered_with_the_nearest_one_and_only_once() -> None:
    said = python("import memlane; memlane.AsyncVecEnv").stderr
    assert said.endswith(
        "AttributeError: module 'memlane' has no attribute 'AsyncVecEnv'; did you mean 'AsyncVectorEnv'?\n"
    )


def test_an_unknown_name_that_is_near_nothing_has_no_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"^module 'memlane' has no attribute 'xyzzy'$"):
        _ = memlane.xyzzy  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------------- imports


def test_importing_memlane_imports_nothing_of_it_but_the_door() -> None:
    code = """
import sys
import memlane
print(sorted(name for name in sys.modules if name.startswith("memlane")))
print(sorted({"numpy", "gymnasium", "torch", "ray", "importlib.metadata", "difflib"} & set(sys.modules)))
"""
    assert python(code).stdout == "['memlane', 'memlane._lazy', 'memlane._registration']\n[]\n"


@pytest.mark.parametrize("first", ["memlane", "gymnasium"])
def test_gymnasium_knows_the_native_environments_whichever_is_imported_first(first: str) -> None:
    second = {"memlane": "gymnasium", "gymnasium": "memlane"}[first]
    code = f"import {first}; import {second}; import gymnasium; print(gymnasium.make('memlane/CartPole-v1').spec.id)"
    assert python(code, "-W", "error").stdout == "memlane/CartPole-v1\n"


# ---------------------------------------------------------------------------------------------------------- the command


def run_module(*arguments: str, blocked: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m memlane`` in a process that cannot import ``blocked`` packages."""
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({blocked.split()!r}))  # None: "No module named ..."
sys.argv = ["memlane", *{list(arguments)!r}]
runpy.run_module("memlane", run_name="__main__")
"""
    environ = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)


def test_the_package_can_be_run_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "memlane", "clean", "--help"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: memlane clean")


@pytest.mark.parametrize("command", [[sys.executable, "-m", "memlane"], [COMMAND]], ids=["module", "script"])
def test_the_version_can_be_asked_for(command: list[str | Path]) -> None:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"memlane {memlane.__version__}\n", "")


@pytest.mark.parametrize("blocked", ["tyro rich", "tyro", "rich"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["doctor"]], ids=" ".join)
def test_the_command_without_its_packages_says_in_one_line_what_to_install(blocked: str, arguments: list[str]) -> None:
    result = run_module(*arguments, blocked=blocked)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == 'the command memlane needs tyro and rich: pip install "memlane[cli]"\n'


def test_the_version_needs_no_other_package() -> None:
    result = run_module("--version", blocked="tyro rich numpy gymnasium torch")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"memlane {memlane.__version__}\n", "")


def test_what_the_command_alone_needs_is_in_the_cli_extra() -> None:
    required = metadata.requires("memlane")
    assert required is not None
    names = {re.split(r"[^\w-]", line)[0]: "extra" in line for line in required if "extra" not in line or "cli" in line}
    assert names == {
        "numpy": False, "cloudpickle": False, "gymnasium": False,
        "pillow": True, "rich": True, "tensorboard": True, "tyro": True,
    }  # fmt: skip
