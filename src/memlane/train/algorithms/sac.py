"""SAC: soft actor-critic for continuous actions (Haarnoja et al., 2018).

Two critics, of which the lower estimate counts; a policy that squashes a normal distribution into the bounds of the
actions; and a temperature that is learned so that the entropy of the policy stays at its target.
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
from memlane.train.algorithms.base import Learner, require_at_least
from memlane.train.algorithms.off_policy import OffPolicy, OffPolicyConfig, split_observations
from memlane.train.field_docs import document_fields
from memlane.train.networks import Encoder, relu_mlp
from memlane.train.optim import Adam, flatten

_MIN_LOG_STD, _MAX_LOG_STD = -5.0, 2.0


@document_fields
@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """Settings of SAC: the keys of ``Options.config``, of ``rl_cfg`` of ``SAC`` and of ``memlane train --set``. A
    preset has other values than these defaults."""

    temperature: float = 0.0
    """Weight of the entropy bonus (the alpha of the paper); 0: learned."""
    target_entropy: float = 0.0
    """Entropy that a learned temperature aims at; 0: minus the number of action dimensions."""
    layer_norm: bool = False
    """Layer normalisation in the critics, which keeps them from diverging with many samples per insert."""
    max_grad_norm: float = 0.0
    """Maximum norm of the gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, self, "temperature")


class Actor(nn.Module):
    """The policy: a normal distribution, squashed by tanh. Its actions are within -1 and 1."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], config: SACConfig) -> None:
        super().__init__()
        if not isinstance(action_space, Box):
            raise TypeError(f"SAC needs Box actions, found {action_space}; for Discrete actions use dqn or appo")
        if not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
            raise ValueError(f"SAC needs Box actions with finite bounds, found {action_space}; use appo, or set bounds")
        self.encoder = Encoder(observation_space, normalize=False)
        self.size = int(np.prod(action_space.shape))
        self.net = relu_mlp(self.encoder.output_size, config.network.hidden, 2 * self.size)
        self._low, self._high, self._dtype = action_space.low, action_space.high, action_space.dtype

    def forward(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sample actions; return them and their log-densities."""
        mean, log_std = self.mean_and_log_std(observations)
        raw = mean + log_std.exp() * torch.randn_like(mean)
        normal = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), written so that it does not round to log(0).
        squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal - squash).sum(-1)

    def mean_and_log_std(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(self.encoder(observations)).chunk(2, -1)
        return mean, log_std.clamp(_MIN_LOG_STD, _MAX_LOG_STD)

    @torch.inference_mode()
    def act(
        self, observations: dict[str, Tensor], state: Any = None, *, deterministic: bool = False
    ) -> tuple[Tensor, Any]:
        mean, log_std = self.mean_and_log_std(observations)
        raw = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
        return raw.tanh(), state

    def random_actions(self, n: int) -> Tensor:
        return torch.rand(n, self.size) * 2 - 1

    def initial_state(self, num_envs: int) -> None:
        """The policy has no state."""

    def to_env(self, actions: Tensor) -> Any:
        fraction = (actions.numpy().reshape(len(actions), *self._low.shape) + 1) / 2
        return (self._low + fraction * (self._high - self._low)).astype(self._dtype, copy=False)


class Critics(nn.Module):
    """Two estimates of the value of an action, computed by one product per layer: half of the calls, which small
    networks spend most of their time on."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], config: SACConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observation_space, normalize=False)
        self.layer_norm = config.layer_norm
        size = self.encoder.output_size + int(np.prod(action_space.shape or ()))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for width in (*config.network.hidden, 1):
            bound = 1 / math.sqrt(size)  # as in nn.Linear
            self.weights.append(torch.empty(2, size, width).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, width).uniform_(-bound, bound))
            size = width

    def forward(self, observations: dict[str, Tensor], actions: Tensor) -> Tensor:
        """Values of shape (2, rows)."""
        out = torch.cat([self.encoder(observations), actions], -1).expand(2, -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = torch.baddbmm(bias, out, weight)
            if layer < last:
                out = nn.functional.layer_norm(out, out.shape[-1:]).relu() if self.layer_norm else out.relu()
        return out.squeeze(-1)


class Temperature:
    """The weight of the entropy bonus, kept as a logarithm. It is one number, so its Adam is plain arithmetic: torch's
    takes 0.2 ms."""

    def __init__(self, fixed: float, learning_rate: float) -> None:
        self.fixed, self.learning_rate = fixed, learning_rate
        self.log = self.mean = self.square = 0.0
        self.steps = 0

    @property
    def value(self) -> float:
        return self.fixed or math.exp(self.log)

    def update(self, entropy_deficit: float) -> None:
        """Take one step of Adam. ``entropy_deficit`` is the target entropy minus the entropy of the policy."""
        if self.fixed:
            return
        self.steps += 1
        self.mean += 0.1 * (-entropy_deficit - self.mean)
        self.square += 0.001 * (entropy_deficit**2 - self.square)
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        self.log -= self.learning_rate * mean / (math.sqrt(square) + 1e-8)


class SACLearner(Learner):
    """Actor, critics and their targets, temperature, and the SAC update."""

    metric_names = ("critic_loss", "actor_loss", "temperature", "entropy", "value")

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], config: SACConfig, device: str = "cpu"
    ) -> None:
        self.config = config
        self.policy = Actor(observation_space, action_space, config).to(device)
        self.critics = Critics(observation_space, action_space, config).to(device)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.target_entropy = config.target_entropy or -float(self.policy.size)
        self.actor_optimizer = Adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimizer = Adam(self.critics.parameters(), config.learning_rate)
        self._flat_targets = flatten(self.targets.parameters())
        self.temperature = Temperature(config.temperature, config.learning_rate)

    def update(self, batch: dict[str, Tensor], progress: float) -> tuple[Tensor, dict[str, float]]:  # noqa: ARG002
        """Make one gradient step; return the error of each transition, and the metrics."""
        observations, next_observations = split_observations(batch)
        weight = batch.get("weight", torch.ones(()))
        with torch.no_grad():
            next_actions, log_probs = self.policy(next_observations)
            next_values = self.targets(next_observations, next_actions).amin(0) - self.temperature.value * log_probs
            target = self.config.reward_scale * batch["reward"] + batch["discount"] * next_values
        values = self.critics(observations, batch["action"])
        errors = values - target
        critic_loss = (weight * errors.square()).mean(-1).sum()
        self.critic_optimizer.step(critic_loss, self.config.max_grad_norm)

        actions, log_probs = self.policy(observations)
        actor_loss = (self.temperature.value * log_probs - self.critics(observations, actions).amin(0)).mean()
        self.actor_optimizer.step(actor_loss, self.config.max_grad_norm)
        entropy = -float(log_probs.detach().mean())
        self.temperature.update(self.target_entropy - entropy)
        self._flat_targets.lerp_(self.critic_optimizer.flat, self.config.tau)
        metrics = {
            "critic_loss": float(critic_loss.detach()),
            "actor_loss": float(actor_loss.detach()),
            "temperature": self.temperature.value,
            "entropy": entropy,
            "value": float(values.detach().mean()),
        }
        return errors.detach().abs().mean(0), metrics

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
    """Soft actor-critic, for ``Box`` actions: collector processes fill a replay, this process samples from it.

        with SAC("Pendulum-v1", None, {"batch_size": 128}, sim_backend="native", num_envs=4) as sac:
            sac.learn(max_iterations=1000, log_dir="runs/sac")

    Settings in ``rl_cfg``: those of ``SACConfig`` and of ``AsyncRunner``. ``APPO`` says which threads may call the
    methods and what happens when a collector dies. Transitions that a dead collector had added stay in the replay.
    """

    Config = SACConfig

    @staticmethod
    def make_policy(observation_space: Space[Any], action_space: Space[Any], config: SACConfig) -> Actor:
        return Actor(observation_space, action_space, config)

    def make_learner(self, observation_space: Space[Any], action_space: Space[Any]) -> SACLearner:
        return SACLearner(observation_space, action_space, self.config, self.device)

    def action_field(self) -> FieldSpec:
        return "float32", (self.learner.policy.size,)
