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
from memlane.train.algorithms import base as runner
from memlane.train.algorithms.off_policy import OffPolicy, OffPolicyConfig, split
from memlane.train.networks import Encoder, relu_mlp
from memlane.train.optim import Adam, flatten

_LEAST_LOG_STD, _MOST_LOG_STD = -5.0, 2.0


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    temperature: float = 0.0
    """Of the entropy; 0: learned."""
    target_entropy: float = 0.0
    """What the temperature is learned for; 0: minus the number of actions."""
    layer_norm: bool = False
    """In the critics; with many samples per insert it keeps them from running away."""
    max_grad_norm: float = 0.0


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
    """Two estimates of what an action is worth. Both in one product for each layer: half of the calls, which are what
    small networks spend their time on."""

    def __init__(self, observations: Space[Any], actions: Space[Any], config: SACConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observations, normalize=False)
        self.layer_norm = config.layer_norm
        size = self.encoder.outputs + int(np.prod(actions.shape or ()))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for width in (*config.network.hidden, 1):
            bound = 1 / math.sqrt(size)  # as nn.Linear begins
            self.weights.append(torch.empty(2, size, width).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, width).uniform_(-bound, bound))
            size = width

    def forward(self, observations: dict[str, Tensor], actions: Tensor) -> Tensor:
        """(2, rows)"""
        out = torch.cat([self.encoder(observations), actions], -1).expand(2, -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = torch.baddbmm(bias, out, weight)
            if layer < last:
                out = nn.functional.layer_norm(out, out.shape[-1:]).relu() if self.layer_norm else out.relu()
        return out.squeeze(-1)


class Temperature:
    """The weight of the entropy, as a logarithm: one number, so its Adam is plain arithmetic (torch's takes 0.2 ms)."""

    def __init__(self, fixed: float, learning_rate: float) -> None:
        self.fixed, self.rate = fixed, learning_rate
        self.log = self.mean = self.square = 0.0
        self.steps = 0

    @property
    def value(self) -> float:
        return self.fixed or math.exp(self.log)

    def learn(self, too_sure: float) -> None:
        """``too_sure``: by how much the policy's entropy is below what it should be."""
        if self.fixed:
            return
        self.steps += 1
        self.mean += 0.1 * (-too_sure - self.mean)
        self.square += 0.001 * (too_sure**2 - self.square)
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        self.log -= self.rate * mean / (math.sqrt(square) + 1e-8)


class Learner(runner.Learner):
    told = ("critic_loss", "actor_loss", "temperature", "entropy", "value")

    def __init__(self, observations: Space[Any], actions: Space[Any], config: SACConfig, device: str = "cpu") -> None:
        self.config = config
        self.policy = Actor(observations, actions, config).to(device)
        self.critics = Critics(observations, actions, config).to(device)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.target_entropy = config.target_entropy or -float(self.policy.size)
        rate = config.learning_rate
        self.actor_optimizer = Adam(self.policy.parameters(), rate)
        self.critic_optimizer = Adam(self.critics.parameters(), rate)
        self._following = flatten(self.targets.parameters())
        self.temperature = Temperature(config.temperature, rate)

    def update(self, batch: dict[str, Tensor], share: float) -> tuple[Tensor, dict[str, float]]:  # noqa: ARG002
        """One gradient step. Each row's error, and what there is to tell."""
        now, after = split(batch)
        weight = batch.get("weight", torch.ones(()))
        with torch.no_grad():
            next_actions, log_probs = self.policy(after)
            worth = self.targets(after, next_actions).amin(0) - self.temperature.value * log_probs
            target = self.config.reward_scale * batch["reward"] + batch["discount"] * worth
        values = self.critics(now, batch["action"])
        errors = values - target
        critic_loss = (weight * errors.square()).mean(-1).sum()
        self.critic_optimizer.step(critic_loss, self.config.max_grad_norm)

        actions, log_probs = self.policy(now)
        actor_loss = (self.temperature.value * log_probs - self.critics(now, actions).amin(0)).mean()
        self.actor_optimizer.step(actor_loss, self.config.max_grad_norm)
        entropy = -float(log_probs.detach().mean())
        self.temperature.learn(self.target_entropy - entropy)
        self._following.lerp_(self.critic_optimizer.flat, self.config.tau)
        told = {
            "critic_loss": float(critic_loss.detach()),
            "actor_loss": float(actor_loss.detach()),
            "temperature": self.temperature.value,
            "entropy": entropy,
            "value": float(values.detach().mean()),
        }
        return errors.detach().abs().mean(0), told

    def checkpoint(self) -> dict[str, Any]:
        return deepcopy(
            {
                "policy": self.policy.state_dict(),
                "critics": self.critics.state_dict(),
                "targets": self.targets.state_dict(),
                "temperature": vars(self.temperature),
                **{name: getattr(self, name).state_dict() for name in _OPTIMIZERS},
            }
        )

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        for name in ("policy", "critics", "targets", *_OPTIMIZERS):
            getattr(self, name).load_state_dict(checkpoint[name])
        vars(self.temperature).update(checkpoint["temperature"])


_OPTIMIZERS = ("actor_optimizer", "critic_optimizer")


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
