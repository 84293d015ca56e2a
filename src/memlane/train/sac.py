"""SAC: soft actor-critic for continuous actions (Haarnoja and others, 2018).

Two critics, of which the lower is believed; a policy that squashes a normal distribution into the bounds of the
actions; and a temperature that is learned so that the policy keeps as much entropy as it has actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch import Tensor, nn

from memlane.core.layout import FieldSpec
from memlane.train.networks import Encoder
from memlane.train.off_policy import OffPolicy, OffPolicyConfig, follow, gradient_step, relu_mlp, split

_LEAST_LOG_STD, _MOST_LOG_STD = -5.0, 2.0


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    temperature: float = 0.0
    """Of the entropy; 0: learned."""
    target_entropy: float = 0.0
    """What the temperature is learned for; 0: minus the number of actions."""
    layer_norm: bool = False
    """In the critics; with many samples per insert it keeps them from running away."""


class Actor(nn.Module):
    """The policy: a squashed normal distribution."""

    def __init__(self, observations: Space[Any], actions: Space[Any], config: SACConfig) -> None:
        super().__init__()
        if not isinstance(actions, Box):
            raise TypeError(f"SAC knows Box actions, found {actions}; for Discrete ones use dqn or appo")
        self.encoder = Encoder(observations, normalize=False)
        self.size = int(np.prod(actions.shape))
        self.net = relu_mlp(self.encoder.outputs, config.network.hidden, 2 * self.size)
        self._low, self._high, self._dtype = actions.low, actions.high, actions.dtype
        if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all()):
            raise ValueError(f"SAC needs actions with bounds, found {actions}")

    def forward(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Actions within -1 and 1, and the logarithms of their densities."""
        mean, log_std = self._parameters_of(observations)
        raw = mean + log_std.exp() * torch.randn_like(mean)
        normal = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), written so that it does not round to log(0).
        squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal - squash).sum(-1)

    def _parameters_of(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(self.encoder(observations)).chunk(2, -1)
        return mean, log_std.clamp(_LEAST_LOG_STD, _MOST_LOG_STD)

    @torch.inference_mode()
    def explore(self, observations: dict[str, Tensor]) -> Tensor:
        mean, log_std = self._parameters_of(observations)
        return (mean + log_std.exp() * torch.randn_like(mean)).tanh()

    def anything(self, many: int) -> Tensor:
        return torch.rand(many, self.size) * 2 - 1

    @torch.inference_mode()
    def act_best(self, observations: dict[str, Tensor], state: Any = None) -> tuple[Tensor, Any]:
        mean, _ = self._parameters_of(observations)
        return mean.tanh(), state

    def no_state(self, environments: int) -> None:
        """It has no memory."""

    @property
    def actions(self) -> Actor:
        return self

    def for_env(self, actions: Tensor) -> Any:
        share = (actions.numpy().reshape(len(actions), *self._low.shape) + 1) / 2
        return (self._low + share * (self._high - self._low)).astype(self._dtype, copy=False)


class Critics(nn.Module):
    """Two estimates of what an action is worth."""

    def __init__(self, observations: Space[Any], actions: Space[Any], config: SACConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observations, normalize=False)
        size = self.encoder.outputs + int(np.prod(actions.shape or ()))
        self.nets = nn.ModuleList(
            relu_mlp(size, config.network.hidden, 1, layer_norm=config.layer_norm) for _ in range(2)
        )

    def forward(self, observations: dict[str, Tensor], actions: Tensor) -> Tensor:
        """(2, rows)"""
        given = torch.cat([self.encoder(observations), actions], -1)
        return torch.stack([net(given).squeeze(-1) for net in self.nets])


class Learner:
    told = ("critic_loss", "actor_loss", "temperature", "entropy", "value")

    def __init__(self, observations: Space[Any], actions: Space[Any], config: SACConfig, device: str = "cpu") -> None:
        self.config = config
        self.policy = Actor(observations, actions, config).to(device)
        self.critics = Critics(observations, actions, config).to(device)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.zeros((), device=device, requires_grad=not config.temperature)
        self.target_entropy = config.target_entropy or -float(self.policy.size)
        rate = config.learning_rate
        self.actor_optimizer = torch.optim.Adam(self.policy.parameters(), lr=rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=rate, fused=True)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=rate)

    @property
    def temperature(self) -> Tensor:
        if self.config.temperature:
            return torch.tensor(self.config.temperature)
        return self.log_temperature.detach().exp()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in self.policy.state_dict().items()}

    def update(self, batch: dict[str, Tensor], share: float) -> tuple[Tensor, dict[str, float]]:  # noqa: ARG002
        """One gradient step. Each row's error, and what there is to tell."""
        now, after = split(batch)
        weight = batch.get("weight", torch.ones(()))
        with torch.no_grad():
            next_actions, log_probs = self.policy(after)
            worth = self.targets(after, next_actions).min(0).values - self.temperature * log_probs
            target = self.config.reward_scale * batch["reward"] + batch["discount"] * worth
        values = self.critics(now, batch["action"])
        errors = values - target
        critic_loss = (weight * errors.square()).mean(-1).sum()
        gradient_step(self.critic_optimizer, critic_loss, self.config.max_grad_norm)

        actions, log_probs = self.policy(now)
        self.critics.requires_grad_(False)
        worth = self.critics(now, actions).min(0).values
        actor_loss = (self.temperature * log_probs - worth).mean()
        gradient_step(self.actor_optimizer, actor_loss, self.config.max_grad_norm)
        self.critics.requires_grad_(True)
        if not self.config.temperature:
            loss = -(self.log_temperature * (log_probs.detach() + self.target_entropy)).mean()
            gradient_step(self.temperature_optimizer, loss, self.config.max_grad_norm)
        follow(self.targets, self.critics, self.config.tau)
        told = {
            "critic_loss": float(critic_loss.detach()),
            "actor_loss": float(actor_loss.detach()),
            "temperature": float(self.temperature),
            "entropy": -float(log_probs.detach().mean()),
            "value": float(values.detach().mean()),
        }
        return errors.detach().abs().mean(0), told

    def checkpoint(self) -> dict[str, Any]:
        return deepcopy(
            {
                "policy": self.policy.state_dict(),
                "critics": self.critics.state_dict(),
                "targets": self.targets.state_dict(),
                "log_temperature": self.log_temperature.detach(),
                **{name: getattr(self, name).state_dict() for name in _OPTIMIZERS},
            }
        )

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        for name in ("policy", "critics", "targets", *_OPTIMIZERS):
            getattr(self, name).load_state_dict(checkpoint[name])
        with torch.no_grad():
            self.log_temperature.copy_(checkpoint["log_temperature"])


_OPTIMIZERS = ("actor_optimizer", "critic_optimizer", "temperature_optimizer")


class SAC(OffPolicy):
    """Soft actor-critic over ``AsyncRunner``."""

    Config = SACConfig

    @staticmethod
    def make_policy(observations: Space[Any], actions: Space[Any], config: SACConfig) -> Actor:
        return Actor(observations, actions, config)

    def make_learner(self, observations: Space[Any], actions: Space[Any]) -> Learner:
        return Learner(observations, actions, self.config, self.device)

    def action(self) -> FieldSpec:
        return "float32", (self.learner.policy.size,)
