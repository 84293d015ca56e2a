"""Report: a run directory, or several, as one HTML page that needs no server, no network and no library."""

from memlane.train.ui.report.comparison import write_comparison
from memlane.train.ui.report.page import write_report

__all__ = ["write_comparison", "write_report"]
