"""The tests of the spaces use the child processes that the tests of the core have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "core"))
