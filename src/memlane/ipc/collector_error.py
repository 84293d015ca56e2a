"""Cross-process error propagation for collector processes."""

from memlane.runner.collector_error import CollectorError, CollectorErrors, CollectorPeer, Reporter

__all__ = ["CollectorError", "CollectorErrors", "CollectorPeer", "Reporter"]
