"""Cross-process error propagation for collector processes."""

from memlane.runner.collector_error import CollectorDied, CollectorError, CollectorErrors, CollectorPeer, Reporter

__all__ = ["CollectorDied", "CollectorError", "CollectorErrors", "CollectorPeer", "Reporter"]
