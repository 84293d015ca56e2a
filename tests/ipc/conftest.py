"""The tests of the lanes use the child processes and the template of victims that the tests of the core have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "core"))
