"""For authors of native environments: ``check_env`` checks that one follows the rules of ``memlane/env.h``."""

from __future__ import annotations

from memlane.testing.check import check_env
from memlane.testing.report import RULES, EnvCheckFailed, EnvReport, Failure

__all__ = ["RULES", "EnvCheckFailed", "EnvReport", "Failure", "check_env"]


def __dir__() -> list[str]:
    return sorted(__all__)
