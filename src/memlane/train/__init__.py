"""Training: learners and collectors, one readable file for each algorithm.

What needs torch is imported when it is first asked for: ``memlane doctor`` and reports work without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlane.train.algorithms.appo import APPO, APPOConfig
    from memlane.train.algorithms.dqn import DQN, DQNConfig
    from memlane.train.algorithms.sac import SAC, SACConfig
    from memlane.train.networks import ActorCritic, NetworkConfig
    from memlane.train.run import Metrics, Run

__all__ = [
    "APPO", "DQN", "SAC", "APPOConfig", "ActorCritic", "DQNConfig", "Metrics", "NetworkConfig", "Run", "SACConfig",
]  # fmt: skip

_HOMES = {
    "APPO": "algorithms.appo", "APPOConfig": "algorithms.appo", "ActorCritic": "networks", "DQN": "algorithms.dqn",
    "DQNConfig": "algorithms.dqn", "NetworkConfig": "networks", "Metrics": "run", "Run": "run",
    "SAC": "algorithms.sac", "SACConfig": "algorithms.sac",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
