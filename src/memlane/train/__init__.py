"""Training: ``train`` and ``evaluate``, and the algorithms with their settings. One readable file per algorithm.

    result = train(Options("CartPole-v1"))
    print(result.reason, result.evaluation["mean_return"])

Names are imported at first use, and torch with those that need it: ``Options`` and reports do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memlane._lazy import import_lock

if TYPE_CHECKING:
    from memlane.train.algorithms.appo import APPO, APPOConfig
    from memlane.train.algorithms.dqn import DQN, DQNConfig
    from memlane.train.algorithms.sac import SAC, SACConfig
    from memlane.train.networks import ActorCritic, NetworkConfig
    from memlane.train.options import OptionError, Options
    from memlane.train.run import Metrics, Run
    from memlane.train.trainer import Result, evaluate, load_policy, train

_MODULES = {
    "APPO": "algorithms.appo", "DQN": "algorithms.dqn", "SAC": "algorithms.sac", "APPOConfig": "algorithms.appo",
    "ActorCritic": "networks", "DQNConfig": "algorithms.dqn", "Metrics": "run", "NetworkConfig": "networks",
    "OptionError": "options", "Options": "options", "Result": "trainer", "Run": "run", "SACConfig": "algorithms.sac",
    "evaluate": "trainer", "load_policy": "trainer", "train": "trainer",
}  # fmt: skip
"""The module that each public name is imported from."""

__all__ = [
    "APPO", "DQN", "SAC", "APPOConfig", "ActorCritic", "DQNConfig", "Metrics", "NetworkConfig", "OptionError",
    "Options", "Result", "Run", "SACConfig", "evaluate", "load_policy", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_lock:
        try:
            module = import_module(f"{__name__}.{_MODULES[name]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f'{__name__}.{name} needs torch: pip install "memlane[torch]"', name="torch") from error
        value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
