"""What can be imported, what must not be, and that stubs, examples and layers are what they claim to be."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import memlane
from memlane import _native, core

PACKAGE = Path(memlane.__file__).parent
CORE = sorted((PACKAGE / "core").glob("*.py"))
SPACES = sorted((PACKAGE / "spaces").glob("*.py"))
VECTOR = sorted((PACKAGE / "vector").glob("*.py"))
STUB = ast.parse((PACKAGE / "_native.pyi").read_text())


def module_of(file: Path) -> ModuleType:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return importlib.import_module(".".join(part for part in parts if part != "__init__"))


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("module", [memlane, core], ids=lambda module: module.__name__)
def test_every_name_that_is_promised_can_be_imported(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", [memlane, core], ids=lambda module: module.__name__)
def test_the_promised_names_are_sorted_and_each_is_there_once(module: ModuleType) -> None:
    constants = [name for name in module.__all__ if name.isupper()]
    classes = [name for name in module.__all__ if name[0].isupper() and not name.isupper()]
    others = [name for name in module.__all__ if not name[0].isupper()]
    assert module.__all__ == sorted(set(constants)) + sorted(set(classes)) + sorted(set(others))


def test_the_core_promises_every_public_name_that_it_imports() -> None:
    public = {name for name, value in vars(core).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(core.__all__)


def test_the_core_promises_every_error() -> None:
    errors = {
        name for name, value in vars(core.errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert errors <= set(core.__all__)


def test_every_promised_name_says_what_it_is() -> None:
    silent = [name for name in core.__all__ if not name.isupper() and not inspect.getdoc(getattr(core, name))]
    assert silent == []


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


def imports_of(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


LAYERS = {
    "core": {"memlane._native", "memlane.core", "numpy", "typing_extensions"},
    "spaces": {"memlane._native", "memlane.core", "memlane.spaces", "numpy", "gymnasium"},
    "vector": {
        *("memlane._native", "memlane.core", "memlane.spaces", "memlane.vector"),
        *("numpy", "gymnasium", "cloudpickle"),
    },
}
"""Whom the files of a layer may import: the table in ARCHITECTURE.md."""
FACES = {"vector/tensors": {"torch"}, "vector/sb3": {"stable_baselines3"}}
"""Files that serve one library, and may import it."""


def owner_of(name: str) -> str:
    """Whose module that is: a layer of ours, or a package."""
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1]]) if first == "memlane" else first


@pytest.mark.parametrize("file", [*CORE, *SPACES, *VECTOR], ids=name_of)
def test_a_layer_imports_only_downwards(file: Path) -> None:
    allowed = LAYERS[file.parent.name] | FACES.get(name_of(file), set()) | sys.stdlib_module_names
    assert {name for name in imports_of(file) if owner_of(name) not in allowed} == set()


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.stem)
def test_typing_extensions_are_for_type_checkers_only(file: Path) -> None:
    """They are no dependency of the package."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "typing_extensions"
    ]


# ------------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("file", [file for file in [*CORE, *SPACES, *VECTOR] if ">>>" in file.read_text()], ids=name_of)
def test_the_examples_in_the_text_run(file: Path) -> None:
    result = doctest.testmod(module_of(file))
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
    """The names of the arguments, and the defaults."""
    return [argument.arg for argument in stub.args.args], [ast.unparse(default) for default in stub.args.defaults]


def signature_of(function: Any) -> tuple[list[str], list[str]]:
    """As ``signature_in``, from what nanobind says about the function that runs."""
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
        return  # a class that only native code makes
    assert signature_of(runtime) == signature_in(stub)


@pytest.mark.parametrize("owner", stub_classes())
def test_what_the_stub_calls_a_property_is_one_and_can_be_set_only_if_it_says_so(owner: str) -> None:
    stub, runtime = stub_classes()[owner], vars(getattr(_native, owner))
    properties = {name for name, method in stub_functions(stub).items() if is_property(method)}
    found = {name: value for name, value in runtime.items() if isinstance(value, property)}
    assert {name for name, value in found.items() if value.fset is None} == properties
    assert {name for name, value in found.items() if value.fset is not None} == stub_constants(stub)


def test_the_stub_says_the_same_in_words() -> None:
    for owner, stub in stub_classes().items():
        for name, method in stub_functions(stub).items():
            words = ast.get_docstring(method)
            function = getattr(getattr(_native, owner), name)
            if words:
                runtime = function.__doc__ if isinstance(function, property) else function.__nb_signature__[0][1]
                assert " ".join(runtime.split()) == " ".join(words.split()), f"{owner}.{name}"
