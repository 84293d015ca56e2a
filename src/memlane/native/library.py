"""Library: where native environments come from: this package, or a shared library that ``memlane build`` made."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from memlane import _native
from memlane.native.spec import CSpec, Spec, SpecError, read_spec

_SYMBOL = "memlane_env"


def built_in_names() -> list[str]:
    """The environments that come with memlane."""
    return sorted(_native.built_in_envs())


def built_in(name: str) -> Spec:
    """The spec of an environment that comes with memlane."""
    known = _native.built_in_envs()
    if name not in known:
        raise LookupError(f"there is no native environment {name!r}; there are: {', '.join(sorted(known))}")
    address, _, _ = known[name]
    return read_spec(address, "memlane", source=(built_in, name))


def open_library(path: str | os.PathLike[str]) -> Spec:
    """The spec in a shared library, checked before anything of it runs."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}; `memlane build` makes it from the C file")
    with TemporaryDirectory() as folder:
        # Through a name of its own: the loader goes by names, and would hand out the old library after a new build.
        link = Path(folder, file.name)
        link.symlink_to(file.resolve())
        try:
            # Its own names stay its own: two libraries may both have a function `helper`.
            library = ctypes.CDLL(str(link), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise SpecError(f"{file} cannot be loaded: {str(error).replace(str(link), str(file))}") from None
    try:
        spec = CSpec.in_dll(library, _SYMBOL)
    except ValueError:
        raise SpecError(
            f"{file} exports no {_SYMBOL}; it needs `MEMLANE_EXPORT const memlane_spec {_SYMBOL} = {{...}};`"
        ) from None
    return read_spec(ctypes.addressof(spec), str(file), library, source=(open_library, str(file.resolve())))
