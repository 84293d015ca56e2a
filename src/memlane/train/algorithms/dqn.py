"""DQN: the worth of each of a few actions, learned from the worth of the next ones (Mnih and others, 2015).

Double (van Hasselt and others, 2016), dueling (Wang and others, 2016), n-step and prioritised (Schaul and others,
2016), each a flag: together they are most of what Rainbow gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import Space
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from memlane.core.layout import FieldSpec
from memlane.train.algorithms import base as runner
from memlane.train.algorithms.off_policy import OffPolicy, OffPolicyConfig, split
from memlane.train.networks import Encoder, relu_mlp
from memlane.train.optim import Adam, flatten


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    double: bool = True
    """The network that learns chooses the next action, the one that follows it says what it is worth."""
    dueling: bool = False
    """The worth of a situation and the advantage of each action in it are learned apart."""
    epsilon: float = 1.0
    """How often a random action is tried at the begin;"""
    last_epsilon: float = 0.05
    exploration: float = 0.1
    """and after this share of the training it is ``last_epsilon``."""
    target_every: int = 0
    """Gradient steps after which the target network becomes the other; 0: it follows by ``tau``."""


class QNetwork(nn.Module):
    """What each action is worth."""

    epsilon: Tensor

    def __init__(self, observations: Space[Any], actions: Space[Any], config: DQNConfig) -> None:
        super().__init__()
        if not isinstance(actions, Discrete):
            raise TypeError(f"DQN knows Discrete actions, found {actions}; for Box ones use sac or appo")
        self.encoder = Encoder(observations, normalize=False)
        self.n, self.start = int(actions.n), int(actions.start)
        hidden = config.network.hidden
        self.advantage = relu_mlp(self.encoder.outputs, hidden, self.n)
        self.value = relu_mlp(self.encoder.outputs, hidden, 1) if config.dueling else None
        # Travels with the weights, so that every collector explores as much as the learner thinks right.
        self.register_buffer("epsilon", torch.tensor(config.epsilon))

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        features = self.encoder(observations)
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def explore(self, observations: dict[str, Tensor]) -> Tensor:
        best = self(observations).argmax(-1)
        return torch.where(torch.rand(len(best)) < self.epsilon, self.anything(len(best)), best)

    def anything(self, many: int) -> Tensor:
        return torch.randint(self.n, (many,))

    @torch.inference_mode()
    def act_best(self, observations: dict[str, Tensor], state: Any = None) -> tuple[Tensor, Any]:
        return self(observations).argmax(-1), state

    def no_state(self, environments: int) -> None:
        """It has no memory."""

    @property
    def actions(self) -> QNetwork:
        return self

    def for_env(self, actions: Tensor) -> Any:
        return actions.numpy() + self.start


class Learner(runner.Learner):
    told = ("loss", "value", "epsilon")

    def __init__(self, observations: Space[Any], actions: Space[Any], config: DQNConfig, device: str = "cpu") -> None:
        self.config = config
        self.policy = QNetwork(observations, actions, config).to(device)
        self.target = deepcopy(self.policy).requires_grad_(False)
        self.optimizer = Adam(self.policy.parameters(), config.learning_rate)
        self._following = flatten(self.target.parameters())
        self.steps = 0

    @torch.no_grad()
    def targets(self, batch: dict[str, Tensor], after: dict[str, Tensor]) -> Tensor:
        worth: Tensor = self.target(after)
        chooser = self.policy(after) if self.config.double else worth
        best = worth.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        return self.config.reward_scale * batch["reward"] + batch["discount"] * best

    def update(self, batch: dict[str, Tensor], share: float) -> tuple[Tensor, dict[str, float]]:
        """One gradient step. Each row's error, and what there is to tell."""
        config = self.config
        now, after = split(batch)
        weight = batch.get("weight", torch.ones(()))
        target = self.targets(batch, after)
        values = self.policy(now).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = (weight * nn.functional.smooth_l1_loss(values, target, reduction="none")).mean()
        self.optimizer.step(loss, config.max_grad_norm)
        self.steps += 1
        if not config.target_every:
            self._following.lerp_(self.optimizer.flat, config.tau)
        elif self.steps % config.target_every == 0:
            self._following.copy_(self.optimizer.flat)
        done = min(share / config.exploration, 1.0) if config.exploration else 1.0
        self.policy.epsilon.fill_(config.epsilon + done * (config.last_epsilon - config.epsilon))
        told = {
            "loss": float(loss.detach()),
            "value": float(values.detach().mean()),
            "epsilon": float(self.policy.epsilon),
        }
        return (values.detach() - target).abs(), told

    def checkpoint(self) -> dict[str, Any]:
        names = ("policy", "target", "optimizer")
        return {**deepcopy({name: getattr(self, name).state_dict() for name in names}), "gradient_steps": self.steps}

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        for name in ("policy", "target", "optimizer"):
            getattr(self, name).load_state_dict(checkpoint[name])
        self.steps = checkpoint["gradient_steps"]


class DQN(OffPolicy):
    """Deep Q-learning over ``AsyncRunner``."""

    Config = DQNConfig

    @staticmethod
    def make_policy(observations: Space[Any], actions: Space[Any], config: DQNConfig) -> QNetwork:
        return QNetwork(observations, actions, config)

    def make_learner(self, observations: Space[Any], actions: Space[Any]) -> Learner:
        return Learner(observations, actions, self.config, self.device)

    def action(self) -> FieldSpec:
        return "int64", ()
