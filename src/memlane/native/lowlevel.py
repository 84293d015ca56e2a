"""Low-level access to native environments: the specs of libraries, and mirrors of the C structs of ``memlane/env.h``.

For tools that inspect environments, and for ``NativeEnv(open_library(path))``. Training code needs only
``memlane.native``.
"""

from __future__ import annotations

from memlane.native.library import built_in, open_library
from memlane.native.spec import CEnvs, CField, CSetting, CSpec, Field, Setting, read_spec, space_bounds

__all__ = [
    "CEnvs",
    "CField",
    "CSetting",
    "CSpec",
    "Field",
    "Setting",
    "built_in",
    "open_library",
    "read_spec",
    "space_bounds",
]
