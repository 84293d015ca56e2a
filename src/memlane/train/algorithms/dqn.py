"""DQN: deep Q-learning for discrete actions (Mnih et al., 2015).

Double (van Hasselt et al., 2016), dueling (Wang et al., 2016), n-step and prioritised (Schaul et al., 2016) are one
setting each: four of the six extensions that Rainbow combines.
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
from memlane.train.algorithms.base import Learner, require_at_least, require_fraction
from memlane.train.algorithms.off_policy import OffPolicy, OffPolicyConfig, split_observations
from memlane.train.field_docs import document_fields
from memlane.train.networks import Encoder, relu_mlp
from memlane.train.optim import Adam, flatten


@document_fields
@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Settings of DQN: the keys of ``Options.config``, of ``rl_cfg`` of ``DQN`` and of ``memlane train --set``. A
    preset has other values than these defaults."""

    double: bool = True
    """Double Q-learning: the online network chooses the next action, the target network estimates its value."""
    dueling: bool = False
    """Dueling network: the value of a state and the advantages of its actions are learned separately."""
    epsilon_start: float = 1.0
    """Probability of a random action at the start of the training."""
    epsilon_end: float = 0.05
    """Probability of a random action after ``exploration_fraction`` of the training."""
    exploration_fraction: float = 0.1
    """Fraction of the training over which epsilon goes from ``epsilon_start`` to ``epsilon_end``."""
    target_update_interval: int = 0
    """Gradient steps between two copies of the online network to the target network; 0: it follows by ``tau``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, self, "target_update_interval")
        require_fraction(self, "epsilon_start", "epsilon_end", "exploration_fraction")


class QNetwork(nn.Module):
    """The values of all actions."""

    epsilon: Tensor

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], config: DQNConfig) -> None:
        super().__init__()
        if not isinstance(action_space, Discrete):
            raise TypeError(f"DQN needs Discrete actions, found {action_space}; for Box actions use sac or appo")
        self.encoder = Encoder(observation_space, normalize=False)
        self.n, self.start = int(action_space.n), int(action_space.start)
        hidden = config.network.hidden
        self.advantage = relu_mlp(self.encoder.output_size, hidden, self.n)
        self.value = relu_mlp(self.encoder.output_size, hidden, 1) if config.dueling else None
        # A buffer: it is published with the weights, so that collectors explore as the learner's schedule says.
        self.register_buffer("epsilon", torch.tensor(config.epsilon_start))

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        features = self.encoder(observations)
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def act(
        self, observations: dict[str, Tensor], state: Any = None, *, deterministic: bool = False
    ) -> tuple[Tensor, Any]:
        greedy = self(observations).argmax(-1)
        if deterministic:
            return greedy, state
        explore = torch.rand(len(greedy)) < self.epsilon
        return torch.where(explore, self.random_actions(len(greedy)), greedy), state

    def random_actions(self, n: int) -> Tensor:
        return torch.randint(self.n, (n,))

    def initial_state(self, num_envs: int) -> None:
        """The policy has no state."""

    def to_env(self, actions: Tensor) -> Any:
        return actions.numpy() + self.start


class DQNLearner(Learner):
    """The online network, its target, and the DQN update."""

    metric_names = ("loss", "value", "epsilon")

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], config: DQNConfig, device: str = "cpu"
    ) -> None:
        self.config = config
        self.policy = QNetwork(observation_space, action_space, config).to(device)
        self.target = deepcopy(self.policy).requires_grad_(False)
        self.optimizer = Adam(self.policy.parameters(), config.learning_rate)
        self._flat_target = flatten(self.target.parameters())
        self.gradient_steps = 0

    @torch.no_grad()
    def compute_targets(self, batch: dict[str, Tensor], next_observations: dict[str, Tensor]) -> Tensor:
        """The values that the network is trained towards."""
        next_values: Tensor = self.target(next_observations)
        chooser = self.policy(next_observations) if self.config.double else next_values
        best = next_values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        return self.config.reward_scale * batch["reward"] + batch["discount"] * best

    def update(self, batch: dict[str, Tensor], progress: float) -> tuple[Tensor, dict[str, float]]:
        """Make one gradient step; return the error of each transition, and the metrics."""
        config = self.config
        observations, next_observations = split_observations(batch)
        weight = batch.get("weight", torch.ones(()))
        targets = self.compute_targets(batch, next_observations)
        values = self.policy(observations).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = (weight * nn.functional.smooth_l1_loss(values, targets, reduction="none")).mean()
        self.optimizer.step(loss, config.max_grad_norm)
        self.gradient_steps += 1
        if not config.target_update_interval:
            self._flat_target.lerp_(self.optimizer.flat, config.tau)
        elif self.gradient_steps % config.target_update_interval == 0:
            self._flat_target.copy_(self.optimizer.flat)
        explored = min(progress / config.exploration_fraction, 1.0) if config.exploration_fraction else 1.0
        self.policy.epsilon.fill_(config.epsilon_start + explored * (config.epsilon_end - config.epsilon_start))
        metrics = {
            "loss": float(loss.detach()),
            "value": float(values.detach().mean()),
            "epsilon": float(self.policy.epsilon),
        }
        return (values.detach() - targets).abs(), metrics

    def checkpoint(self) -> dict[str, Any]:
        states = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        return {**deepcopy(states), "gradient_steps": self.gradient_steps}

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(checkpoint[name])
        self.gradient_steps = checkpoint["gradient_steps"]


_STATEFUL = ("policy", "target", "optimizer")


class DQN(OffPolicy):
    """Deep Q-learning, for ``Discrete`` actions: collector processes fill a replay, this process samples from it.

        with DQN("CartPole-v1", None, {"n_step": 3}, sim_backend="native", num_envs=4) as dqn:
            dqn.learn(max_iterations=1000, log_dir="runs/dqn")

    Settings in ``rl_cfg``: those of ``DQNConfig`` and of ``AsyncRunner``. ``APPO`` says which threads may call the
    methods and what happens when a collector dies. Transitions that a dead collector had added stay in the replay.
    """

    Config = DQNConfig
    fixed_settings = (*OffPolicy.fixed_settings, "dueling")

    @staticmethod
    def make_policy(observation_space: Space[Any], action_space: Space[Any], config: DQNConfig) -> QNetwork:
        return QNetwork(observation_space, action_space, config)

    def make_learner(self, observation_space: Space[Any], action_space: Space[Any]) -> DQNLearner:
        return DQNLearner(observation_space, action_space, self.config, self.device)

    def action_field(self) -> FieldSpec:
        return "int64", ()
