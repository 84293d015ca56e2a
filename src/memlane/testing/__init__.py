"""For authors of native environments: does mine keep the rules of ``memlane/env.h``?"""

from __future__ import annotations

from memlane.testing.check import check_env
from memlane.testing.report import RULES, EnvCheckFailed, EnvReport, Failure

__all__ = ["RULES", "EnvCheckFailed", "EnvReport", "Failure", "check_env"]
