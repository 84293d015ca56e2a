"""Report: a run directory as one HTML page that needs no server, no network and no library."""

from memlane.train.ui.report.page import write_report

__all__ = ["write_report"]
