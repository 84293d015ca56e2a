"""Children: what every process that memlane starts has in common."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Around the start of processes that need nothing of the main script: it is not imported again in each of them.
    That is what makes scripts without an ``if __name__ == "__main__"`` work, and notebooks, also when spawned."""
    main = sys.modules.get("__main__")
    if main is None:
        yield
        return
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)
