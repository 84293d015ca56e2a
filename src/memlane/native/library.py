"""Library: finds the specs of native environments, in this package or in shared libraries from ``memlane build``."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from memlane import _native
from memlane.core.suggestions import did_you_mean
from memlane.native.spec import CSpec, Spec, SpecError, read_spec

_SYMBOL = "memlane_env"


def built_in_names() -> list[str]:
    """Return the sorted names of the environments that are part of memlane."""
    return sorted(_native.built_in_envs())


def built_in(name: str) -> Spec:
    """Return the spec of an environment that is part of memlane."""
    envs = _native.built_in_envs()
    if name not in envs:
        raise LookupError(unknown_env(name))
    address, _, _ = envs[name]
    return read_spec(address, "memlane", source=(built_in, name))


def unknown_env(name: str, also_expected: str = "") -> str:
    """An error text: ``name`` is not a built-in environment; which one is similar, and which ones exist."""
    names = built_in_names()
    return (
        f"unknown native environment {name!r}{also_expected}{did_you_mean(name, names)} "
        f"(built-in environments: {', '.join(names)})"
    )


def open_library(path: str | os.PathLike[str]) -> Spec:
    """Load a shared library and return its spec, checked before any of its functions is called."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}; `memlane build` compiles it from the C file")
    with TemporaryDirectory() as folder:
        # Through a new name: the dynamic loader caches by name, and would return the old library after a new build.
        link = Path(folder, file.name)
        link.symlink_to(file.resolve())
        try:
            # RTLD_LOCAL: two libraries may both define a function `helper`.
            library = ctypes.CDLL(str(link), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise SpecError(f"{file} cannot be loaded: {str(error).replace(str(link), str(file))}") from None
    try:
        spec = CSpec.in_dll(library, _SYMBOL)
    except ValueError:
        raise SpecError(
            f"{file} exports no {_SYMBOL}; its source needs `MEMLANE_EXPORT const memlane_spec {_SYMBOL} = {{...}};`"
        ) from None
    return read_spec(ctypes.addressof(spec), str(file), library, source=(open_library, str(file.resolve())))
