"""Base async runner for multi-process RL training."""

from memlane.runner.async_runner import AsyncRunner

__all__ = ["AsyncRunner"]
