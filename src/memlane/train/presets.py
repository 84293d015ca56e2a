"""Presets: settings that solve an environment, found by trying, on two cores. Those of Bricks, HalfCheetah and Hopper
are only a place to start: they have not been run to their targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    num_envs: int = 32
    """Of one collector."""
    max_steps: int = 1_000_000
    """Environment steps, of all collectors together."""
    target: float | None = None
    """The mean return at which the training is over."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of the algorithm."""


_CLASSIC = {"steps": 32, "epochs": 8, "minibatch": 512, "schedule": "linear", "gamma": 0.98, "lam": 0.9}

APPO_PRESETS = {
    "CartPole-v1": Preset(
        32, 300_000, 475,
        config={**_CLASSIC, "epochs": 10, "lam": 0.8, "learning_rate": 2.5e-3},
    ),
    "Acrobot-v1": Preset(32, 1_000_000, -100, config={**_CLASSIC, "gamma": 0.99, "learning_rate": 1e-3}),
    "Pendulum-v1": Preset(
        32, 2_000_000, -200,
        config={**_CLASSIC, "gamma": 0.95, "lam": 0.95, "learning_rate": 1e-3, "reward_scale": 0.1, "epochs": 10},
    ),
    "MountainCarContinuous-v0": Preset(
        32, 1_000_000, 90,
        config={
            "steps": 128, "epochs": 8, "minibatch": 1024, "gamma": 0.9999, "lam": 0.95, "learning_rate": 1e-3,
            "schedule": "linear", "entropy_coef": 0.0, "reward_scale": 0.1, "network": {"log_std": 0.5},
        },
    ),
    "Bricks-v0": Preset(
        64, 3_000_000, 20,
        config={
            "steps": 32, "epochs": 4, "minibatch": 128, "gamma": 0.97, "lam": 0.9, "learning_rate": 2e-3,
            "schedule": "linear", "entropy_coef": 0.003, "network": {"hidden": ()},
        },
    ),
    "HalfCheetah-v5": Preset(
        8, 2_000_000, 3000,
        config={
            "steps": 128, "epochs": 10, "minibatch": 256, "learning_rate": 3e-4, "schedule": "linear",
            "network": {"hidden": (64, 64), "log_std": -0.5},
        },
    ),
    "Hopper-v5": Preset(
        8, 2_000_000, 2000,
        config={
            "steps": 128, "epochs": 10, "minibatch": 256, "learning_rate": 3e-4, "schedule": "linear",
            "network": {"hidden": (64, 64), "log_std": -0.5},
        },
    ),
}  # fmt: skip


SAC_PRESETS = {
    "Pendulum-v1": Preset(
        4, 50_000, -200,
        config={
            "steps": 4, "capacity": 50_000, "warm_up": 200, "learning_rate": 1.5e-3, "gamma": 0.95, "batch": 128,
            "samples_per_insert": 256.0, "network": {"hidden": (64, 64)},
        },
    ),
}  # fmt: skip

DQN_PRESETS = {
    "CartPole-v1": Preset(
        4, 100_000, 475,
        config={
            "steps": 8, "capacity": 50_000, "warm_up": 1_000, "learning_rate": 2e-3, "batch": 64,
            "samples_per_insert": 32.0, "gamma": 0.99, "tau": 0.01, "n_step": 5, "exploration": 0.1,
            "last_epsilon": 0.02, "network": {"hidden": (128, 128)},
        },
    ),
    "Bricks-v0": Preset(
        16, 1_000_000, 20,
        config={
            "steps": 8, "capacity": 40_000, "warm_up": 2_000, "learning_rate": 1e-3, "batch": 32,
            "samples_per_insert": 8.0, "gamma": 0.97, "tau": 0.01, "n_step": 3, "exploration": 0.05,
            "last_epsilon": 0.02, "network": {"hidden": ()},
        },
    ),
}  # fmt: skip

PRESETS = {"appo": APPO_PRESETS, "sac": SAC_PRESETS, "dqn": DQN_PRESETS}
_PLAIN = {
    "appo": Preset(),
    "sac": Preset(8, config={"network": {"hidden": (256, 256)}}),
    "dqn": Preset(8, config={"samples_per_insert": 8.0, "batch": 64}),
}


def preset_for(env: Any, algo: str = "appo") -> Preset:
    """The preset of an environment, by its name with or without ``memlane/``; a plain one for those without."""
    name = env.removeprefix("memlane/") if isinstance(env, str) else ""
    return PRESETS[algo].get(name, _PLAIN[algo])
