"""Presets: settings that solve an environment, found by experiment on two cores. Those of Bricks, HalfCheetah and
Hopper are starting points: they have not been run to their targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memlane.train.field_docs import document_fields


@document_fields
@dataclass(frozen=True)
class Preset:
    """Options and settings for an environment and an algorithm."""

    num_envs: int = 32
    """Environments per collector."""
    max_steps: int = 1_000_000
    """Environment steps after which the training stops, counted over all collectors."""
    target: float | None = None
    """Mean return at which the training stops; None: no target."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the algorithm that differ from its defaults."""


_CLASSIC = {
    "num_steps": 32, "update_epochs": 8, "minibatch_size": 512, "lr_schedule": "linear", "gamma": 0.98,
    "gae_lambda": 0.9,
}  # fmt: skip

APPO_PRESETS = {
    "CartPole-v1": Preset(
        32, 300_000, 475,
        config={**_CLASSIC, "update_epochs": 10, "gae_lambda": 0.8, "learning_rate": 2.5e-3},
    ),
    "Acrobot-v1": Preset(32, 1_000_000, -100, config={**_CLASSIC, "gamma": 0.99, "learning_rate": 1e-3}),
    "Pendulum-v1": Preset(
        32, 2_000_000, -200,
        config={
            **_CLASSIC, "update_epochs": 10, "gamma": 0.95, "gae_lambda": 0.95, "learning_rate": 1e-3,
            "reward_scale": 0.1,
        },
    ),
    "MountainCarContinuous-v0": Preset(
        32, 1_000_000, 90,
        config={
            "num_steps": 128, "update_epochs": 8, "minibatch_size": 1024, "gamma": 0.9999, "gae_lambda": 0.95,
            "learning_rate": 1e-3, "lr_schedule": "linear", "ent_coef": 0.0, "reward_scale": 0.1,
            "network": {"log_std": 0.5},
        },
    ),
    "Bricks-v0": Preset(
        64, 3_000_000, 20,
        config={
            "num_steps": 32, "update_epochs": 4, "minibatch_size": 128, "gamma": 0.97, "gae_lambda": 0.9,
            "learning_rate": 2e-3, "lr_schedule": "linear", "ent_coef": 0.003, "network": {"hidden": ()},
        },
    ),
    "HalfCheetah-v5": Preset(
        8, 2_000_000, 3000,
        config={
            "num_steps": 128, "update_epochs": 10, "minibatch_size": 256, "learning_rate": 3e-4,
            "lr_schedule": "linear", "network": {"hidden": (64, 64), "log_std": -0.5},
        },
    ),
    "Hopper-v5": Preset(
        8, 2_000_000, 2000,
        config={
            "num_steps": 128, "update_epochs": 10, "minibatch_size": 256, "learning_rate": 3e-4,
            "lr_schedule": "linear", "network": {"hidden": (64, 64), "log_std": -0.5},
        },
    ),
}  # fmt: skip


SAC_PRESETS = {
    "Pendulum-v1": Preset(
        4, 50_000, -200,
        config={
            "num_steps": 4, "buffer_size": 50_000, "learning_starts": 200, "learning_rate": 1.5e-3, "gamma": 0.95,
            "batch_size": 128, "samples_per_insert": 256.0, "network": {"hidden": (64, 64)},
        },
    ),
}  # fmt: skip

DQN_PRESETS = {
    "CartPole-v1": Preset(
        4, 100_000, 475,
        config={
            "num_steps": 8, "buffer_size": 50_000, "learning_starts": 1_000, "learning_rate": 2e-3, "batch_size": 64,
            "samples_per_insert": 32.0, "gamma": 0.99, "tau": 0.01, "n_step": 5, "exploration_fraction": 0.1,
            "epsilon_end": 0.02, "network": {"hidden": (128, 128)},
        },
    ),
    "Bricks-v0": Preset(
        16, 1_000_000, 20,
        config={
            "num_steps": 8, "buffer_size": 40_000, "learning_starts": 2_000, "learning_rate": 1e-3, "batch_size": 32,
            "samples_per_insert": 8.0, "gamma": 0.97, "tau": 0.01, "n_step": 3, "exploration_fraction": 0.05,
            "epsilon_end": 0.02, "network": {"hidden": ()},
        },
    ),
}  # fmt: skip

PRESETS = {"appo": APPO_PRESETS, "sac": SAC_PRESETS, "dqn": DQN_PRESETS}
_DEFAULTS = {
    "appo": Preset(),
    "sac": Preset(8, config={"network": {"hidden": (256, 256)}}),
    "dqn": Preset(8, config={"samples_per_insert": 8.0, "batch_size": 64}),
}


def preset_for(env: Any, algo: str = "appo") -> Preset:
    """The preset of an environment, by its name with or without ``memlane/``; without a preset, the algorithm's
    defaults."""
    name = env.removeprefix("memlane/") if isinstance(env, str) else ""
    return PRESETS[algo].get(name, _DEFAULTS[algo])
