"""Memory budget estimation for training buffers."""

from memlane.runner.memory_budget import BudgetWarning, MemoryBudget

__all__ = ["BudgetWarning", "MemoryBudget"]
