"""Building blocks of lanes, for code that extends memlane. Most programs do not need them."""

from memlane._native import Life, Words
from memlane.core.header import Header
from memlane.core.lease import debug_mode
from memlane.core.liveness import PeerState, Roster
from memlane.core.memory import FreeMemory, cgroup_memory, directory_space, machine_memory

__all__ = [
    "FreeMemory",
    "Header",
    "Life",
    "PeerState",
    "Roster",
    "Words",
    "cgroup_memory",
    "debug_mode",
    "directory_space",
    "machine_memory",
]
