"""The lock of lazy imports: the packages ``memlane`` and ``memlane.train`` import their names at first use."""

from __future__ import annotations

import threading

import_lock = threading.RLock()
"""Held while a name is imported. Two threads that import a package and a module in it at the same time wait for each
other's import lock; Python then lets one of them continue with a half-imported module."""
