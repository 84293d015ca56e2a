"""What can be imported, what must not be, examples that run, and the stub of the native module."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

import pytest

import memlane
from memlane import _native, core

PACKAGE = Path(memlane.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if "template" not in file.parts)
STUB = ast.parse((PACKAGE / "_native.pyi").read_text())


def dotted(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


# --------------------------------------------------------------------------------------------------------------- names

PACKAGES = [dotted(file) for file in FILES if "__all__" in file.read_text()]
"""Every module with a list of public names."""


def documentation_of(module: ModuleType, name: str) -> str | None:
    """The docstring of a public name. Constants and type aliases have theirs in a comment or an attribute docstring."""
    value = getattr(module, name)
    return inspect.getdoc(value) if inspect.ismodule(value) or callable(value) else "a constant"


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert [public for public in module.__all__ if not documentation_of(module, public)] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("name", PACKAGES)
def test_the_public_names_are_sorted_and_unique(name: str) -> None:
    names = importlib.import_module(name).__all__
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if name[0].isupper() and not name.isupper()]
    others = [name for name in names if not name[0].isupper()]
    assert list(names) == sorted(set(constants)) + sorted(set(classes)) + sorted(set(others))


def test_the_core_exports_every_public_name_that_it_imports() -> None:
    public = {name for name, value in vars(core).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(core.__all__)


def test_the_core_exports_every_error() -> None:
    errors = {
        name for name, value in vars(core.errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert errors <= set(core.__all__)


# -------------------------------------------------------------------------------------------------------------- imports


def test_memlane_does_not_even_try_to_import_heavy_packages() -> None:
    """A look at sys.modules alone would miss an import that failed and was caught."""
    code = """
import sys
tried = set()
class Recorder:
    def find_spec(self, name, path=None, target=None):
        tried.add(name.partition(".")[0])
sys.meta_path.insert(0, Recorder())
import memlane, memlane.core
print(sorted({"torch", "ray", "gymnasium", "jax", "pandas", "scipy"} & (tried | set(sys.modules))), "numpy" in tried)
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[] True\n", "")


# ------------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("name", [dotted(file) for file in FILES if ">>> " in file.read_text()])
def test_the_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------------------------------------------------------- stubs


def stub_classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def stub_functions(scope: ast.Module | ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}


def stub_constants(scope: ast.Module | ast.ClassDef) -> set[str]:
    return {ast.unparse(node.target) for node in scope.body if isinstance(node, ast.AnnAssign)}


def signature_in(stub: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """The names of the arguments and their defaults."""
    arguments = [*stub.args.posonlyargs, *stub.args.args]
    return [argument.arg for argument in arguments], [ast.unparse(default) for default in stub.args.defaults]


def signature_of(function: Any) -> tuple[list[str], list[str]]:
    """As ``signature_in``, from nanobind's description of the compiled function, or Python's of a method in C."""
    if isinstance(function, MethodDescriptorType):
        text, defaults = f"def {function.__name__}{inspect.signature(function)}", ()
    else:
        ((text, _, defaults),) = function.__nb_signature__
    placed = re.sub(r"= \\(\d+)", lambda match: f"= {defaults[int(match[1])]!r}", text)
    (node,) = ast.parse(re.sub(r"ndarray\[.*?\]", "ndarray", placed) + ": ...").body
    assert isinstance(node, ast.FunctionDef)
    return signature_in(node)


def is_property(stub: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in stub.decorator_list)


def test_the_stub_has_the_names_of_the_native_module() -> None:
    named = {*stub_classes(), *stub_functions(STUB), *stub_constants(STUB)}
    assert named == {name for name in vars(_native) if not name.startswith("__")}


@pytest.mark.parametrize("name", stub_classes())
def test_the_stub_of_a_native_class_has_its_names(name: str) -> None:
    stub, runtime = stub_classes()[name], vars(getattr(_native, name))
    named = {*stub_functions(stub), *stub_constants(stub)}
    hidden = {"__new__", "__doc__", "__module__", "__weakref__", "__dict__", "__buffer__", "__release_buffer__"}
    if "__setitem__" in named:  # the same slot of the type; it refuses to delete
        hidden.add("__delitem__")
    assert named == set(runtime) - hidden


NATIVE_FUNCTIONS = [("", name) for name in stub_functions(STUB)] + [
    (owner, name)
    for owner, stub in stub_classes().items()
    for name, method in stub_functions(stub).items()
    if not is_property(method)
]


@pytest.mark.parametrize(("owner", "name"), NATIVE_FUNCTIONS)
def test_the_stub_of_a_native_function_has_its_arguments(owner: str, name: str) -> None:
    stub = stub_functions(stub_classes()[owner] if owner else STUB)[name]
    runtime = getattr(getattr(_native, owner) if owner else _native, name)
    if name == "__init__" and not hasattr(runtime, "__nb_signature__"):
        return  # a class that only native code instantiates
    if isinstance(runtime, WrapperDescriptorType):
        return  # a slot of the type, whose arguments Python fixes
    assert signature_of(runtime) == signature_in(stub)


@pytest.mark.parametrize("owner", stub_classes())
def test_properties_of_the_stub_are_properties_and_can_be_set_only_if_it_says_so(owner: str) -> None:
    stub, runtime = stub_classes()[owner], vars(getattr(_native, owner))
    properties = {name for name, method in stub_functions(stub).items() if is_property(method)}
    compiled = {name: value for name, value in runtime.items() if isinstance(value, property)}
    assert {name for name, value in compiled.items() if value.fset is None} == properties
    assert {name for name, value in compiled.items() if value.fset is not None} == stub_constants(stub)


def test_the_stub_has_the_docstrings_of_the_native_module() -> None:
    for owner, stub in stub_classes().items():
        for name, method in stub_functions(stub).items():
            words = ast.get_docstring(method)
            function = getattr(getattr(_native, owner), name)
            if words:
                has_docstring = isinstance(function, property | MethodDescriptorType)
                runtime = function.__doc__ if has_docstring else function.__nb_signature__[0][1]
                assert " ".join(runtime.split()) == " ".join(words.split()), f"{owner}.{name}"
