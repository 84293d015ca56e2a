"""Which packages each layer may import: only those below it. The C++ layers are in tests/cpp/test_includes.py."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import memlane

PACKAGE = Path(memlane.__file__).parent


@dataclass(frozen=True)
class Layer:
    """What the modules of a package may import, besides each other and the standard library."""

    memlane: frozenset[str]
    """Layers of memlane, also inside functions and for type checkers."""
    packages: frozenset[str] = field(default=frozenset({"numpy"}))
    """Other packages."""
    lazy_packages: frozenset[str] = field(default=frozenset())
    """Other packages, but only inside functions and for type checkers: they are heavy, or not installed everywhere."""


def layer(below: str, packages: str = "numpy", lazy: str = "") -> Layer:
    return Layer(frozenset(below.split()), frozenset(packages.split()), frozenset(lazy.split()))


_TRAIN = "core lanes runner spaces vector native"
_TRAIN_PACKAGES = "numpy gymnasium torch"

LAYERS = {
    "_native": layer(""),
    "core": layer("_native"),
    # lanes: data between processes, and the reference API on top
    "lanes": layer("_native core", lazy="torch"),
    "runner": layer("core lanes", "numpy cloudpickle", lazy="torch"),
    "ipc": layer("core lanes runner", lazy="torch"),
    # vector environments
    "spaces": layer("_native core", "numpy gymnasium"),
    "vector": layer("_native core spaces", "numpy gymnasium cloudpickle"),
    "vector.adapters": layer("core spaces vector", "numpy gymnasium"),
    "vector.adapters.pettingzoo": layer("core spaces vector", "numpy gymnasium", lazy="pettingzoo"),
    "vector.adapters.sb3": layer("core spaces vector", "numpy gymnasium stable_baselines3"),
    "vector.adapters.torch": layer("core spaces vector", "numpy gymnasium", lazy="torch"),
    # native environments
    "native": layer("_native core spaces vector", "numpy gymnasium"),
    "native.numba_env": layer("_native core spaces vector native", "numpy gymnasium", lazy="numba"),
    "native.template": layer("native testing", "numpy pytest"),
    "testing": layer("_native core native", "numpy gymnasium"),
    # training: networks and collection, algorithms, user interface, and what puts them together
    "train.field_docs": layer("", ""),
    "train.files": layer("", ""),
    "train.run_dir": layer("core", ""),
    "train.runs": layer("train.run_dir", ""),
    "train": layer(f"_lazy {_TRAIN} train.field_docs", _TRAIN_PACKAGES),
    "train.run": layer("core runner train.field_docs train.files train.run_dir", "torch", lazy="tensorboard"),
    "train.algorithms": layer(f"{_TRAIN} train train.field_docs train.run train.options", _TRAIN_PACKAGES),
    "train.ui": layer(
        "core runner train train.files train.run train.runs train.options train.trainer",
        "numpy gymnasium rich",
        lazy="PIL",
    ),
    "train.trainer": layer(
        f"{_TRAIN} train train.field_docs train.run train.run_dir train.options train.algorithms train.ui",
        _TRAIN_PACKAGES,
    ),
    "train.sweep": layer("core train train.algorithms train.run_dir train.runs train.options train.ui", ""),
    "train.options": layer(
        "core runner train train.field_docs train.algorithms", ""
    ),  # algorithms and their settings know each other
    # single modules
    "_exit_with_parent": layer("_native", ""),
    "_gc_pause": layer("", ""),
    "_gc_resume": layer("", ""),
    "_lazy": layer("", ""),
    "_registration": layer("_native", "", lazy="gymnasium"),
    "lessons": layer("core"),
    "doctor": layer("_native core vector", ""),
    "cli": layer(
        "core runner native doctor train train.options train.algorithms train.run train.runs train.sweep train.trainer "
        "train.ui",
        "rich tyro",
        lazy="gymnasium",
    ),
    "__main__": layer("memlane cli", ""),
    "memlane": layer("_lazy _registration core lanes ipc lessons native runner spaces testing train vector", ""),
}
"""By package, or by module where one module may import more or less than its package. The longest name counts."""

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def dotted(file: Path) -> str:
    """The name of a module inside memlane; "memlane" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "memlane"


def layer_of(module: str) -> str:
    """The layer that a module (without "memlane.") belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), "memlane")


def names_in(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in line {node.lineno}"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """Every name that a file imports, and whether that happens when the module is imported."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name, at_import) for name in names_in(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_import)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    yield from visit(ast.parse(file.read_text()), True)


def package_of(name: str) -> str:
    """The package that an imported name belongs to. TensorBoard's writer is imported through torch."""
    return "tensorboard" if name.startswith("torch.utils.tensorboard") else name.partition(".")[0]


def test_every_module_has_a_layer_of_its_own() -> None:
    missing = [dotted(file) for file in PYTHON_FILES if layer_of(dotted(file)) == "memlane" != dotted(file)]
    assert missing == [], "add these modules to LAYERS"


def test_the_table_has_no_layer_that_does_not_exist() -> None:
    modules = {dotted(file) for file in PYTHON_FILES}
    modules |= {".".join(module.split(".")[:count]) for module in modules for count in (1, 2)}
    assert LAYERS.keys() - modules - {"_native", "__main__"} == set()
    assert {name for layer in LAYERS.values() for name in layer.memlane} <= LAYERS.keys()


@pytest.mark.parametrize("file", PYTHON_FILES, ids=dotted)
def test_a_layer_imports_only_downwards(file: Path) -> None:
    own = layer_of(dotted(file))
    allowed = {own, *LAYERS[own].memlane}
    imported = {layer_of(name.partition(".")[2]) for name, _ in imports_of(file) if name.partition(".")[0] == "memlane"}
    if file.name == "__init__.py":  # a door may show what is inside
        imported = {name for name in imported if not name.startswith(f"{own}.")}
    assert imported <= allowed, f"memlane.{dotted(file)} may import {sorted(allowed)}"


@pytest.mark.parametrize("file", PYTHON_FILES, ids=dotted)
def test_a_layer_imports_other_packages_only_where_the_table_allows_it(file: Path) -> None:
    own = LAYERS[layer_of(dotted(file))]
    others = {(package_of(name), at_import) for name, at_import in imports_of(file)}
    others = {(name, at_import) for name, at_import in others if name not in {"memlane", *sys.stdlib_module_names}}
    at_import = {name for name, at_import in others if at_import}
    assert at_import <= own.packages, f"imported by memlane.{dotted(file)} outside a function"
    # typing_extensions is no dependency of memlane: type checkers bring it.
    assert {name for name, _ in others} <= own.packages | own.lazy_packages | {"typing_extensions"}
