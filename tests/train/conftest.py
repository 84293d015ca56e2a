"""The environments that these tests learn are in a module that collectors import as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
