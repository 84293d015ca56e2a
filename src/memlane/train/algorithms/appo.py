"""APPO: proximal policy optimisation whose collectors do not wait for the learner.

A rollout carries the probabilities of the policy that made it. When that policy is the current one, advantages are
GAE's; when the learner is ahead by then, V-trace corrects for it. The loss is PPO's, clipped around the policy that
collected (Schulman and others, 2017; Espeholt and others, 2018; Petrenko and others, 2020).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray
from torch import Tensor, nn

from memlane.core.layout import FieldSpec
from memlane.runner.protocols import CollectorContext, Slot, TakenSlot
from memlane.train import collection as collecting
from memlane.train.advantages import gae, v_trace
from memlane.train.algorithms import base as runner
from memlane.train.algorithms.base import Algorithm, require_at_least_one
from memlane.train.collection import episode_fields, episodes_of, told_of
from memlane.train.networks import ActorCritic, NetworkConfig, State, arrays_of, leaves_of, masked, observation_fields
from memlane.train.optim import Adam
from memlane.train.run import Metrics


@dataclass(frozen=True)
class APPOConfig:
    steps: int = 32
    """Of each environment in a rollout."""
    epochs: int = 4
    """How often each rollout is learned from."""
    minibatch: int = 512
    """Rows of one gradient step."""
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    learning_rate: float = 3e-4
    schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """``linear`` goes to 0 at the end; ``adaptive`` keeps each update's KL divergence near ``target_kl``."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    target_kl: float = 0.01
    stop_kl: float = 0.0
    """No more epochs once an update has changed the policy by so much; 0: all epochs."""
    max_grad_norm: float = 0.5
    normalize_advantages: bool = True
    reward_scale: float = 1.0
    network: NetworkConfig = field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        require_at_least_one(self, "steps", "epochs", "minibatch")
        for name, known in (
            ("schedule", ("constant", "linear", "adaptive")),
            ("clip_schedule", ("constant", "linear")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {list(known)}, found {getattr(self, name)!r}")


# ------------------------------------------------------------------------------------------------------- rollouts


def slot_fields(
    observations: Space[Any], policy: ActorCritic, steps: int, envs: int, lstm: int
) -> dict[str, FieldSpec]:
    """What a rollout is made of, time first. ``obs`` has one row more: what the last steps left."""
    rows = (steps, envs)
    dtype = "int64" if policy.actions.dtype == torch.int64 else "float32"
    made: dict[str, FieldSpec] = {
        **observation_fields(observations, (steps + 1, envs)),
        "actions": (dtype, (*rows, *policy.actions.shape)),
        "log_probs": ("float32", rows),
        "rewards": ("float32", rows),
        "terminated": ("bool", rows),
        "truncated": ("bool", rows),
        "valid": ("bool", rows),
        "begins": ("bool", (steps + 1, envs)),
        **episode_fields(steps, envs),
    }
    if lstm:
        made["state"] = ("float32", (2, 1, envs, lstm))
    return made


class Collector(collecting.Collector):
    """``collect`` for APPO."""

    def trip(self, env: Any, context: CollectorContext) -> Trip:  # noqa: ARG002
        return Trip(env, ActorCritic(env.single_observation_space, env.single_action_space, self.config.network))


class Trip(collecting.Trip):
    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.names = list(leaves_of(self.space))
        self.state: State | None = self.policy.no_state(self.envs)
        self.begins = np.ones(self.envs, np.bool_)

    def fill(self, slot: Slot, steps: int) -> tuple[int, int]:
        env_ns = policy_ns = 0
        views = {name: slot[name] for name in slot}
        arrays = {name: views[f"obs.{name}"] for name in self.names}
        if self.state is not None:
            views["state"][...] = torch.stack(self.state).numpy()
        told = told_of(slot)
        for t in range(steps):
            begin = time.perf_counter_ns()
            self._look(arrays, t)
            views["valid"][t], views["begins"][t] = self.valid, self.begins
            # Read back from the slot: it stays as it is, whatever the environment does with its own arrays.
            given = {name: torch.from_numpy(array[t]) for name, array in arrays.items()}
            if self.state is not None:
                self.state = masked(self.state, torch.from_numpy(~self.begins))
            actions, log_probs, self.state = self.policy.act(given, self.state)
            chosen = self.policy.actions.for_env(actions)
            views["actions"][t], views["log_probs"][t] = actions.numpy(), log_probs.numpy()
            between = time.perf_counter_ns()
            self.observations, rewards, terminated, truncated, _ = self.env.step(chosen)
            after = time.perf_counter_ns()
            views["rewards"][t], views["terminated"][t], views["truncated"][t] = rewards, terminated, truncated
            ended = terminated | truncated
            self.episodes.step(told, t, rewards, self.valid, ended)
            # In the place of the next step, those that ended are reset; the one after that begins an episode.
            self.begins = ~self.valid
            self.valid = ~ended
            policy_ns += between - begin
            env_ns += after - between
        self._look(arrays, steps)
        views["begins"][steps] = self.begins
        return env_ns, policy_ns

    def _look(self, arrays: Mapping[str, NDArray[Any]], t: int) -> None:
        for name, value in arrays_of(self.space, self.observations).items():
            arrays[name][t] = value


# -------------------------------------------------------------------------------------------------------- learning


@dataclass
class Rollouts:
    """The rollouts of one update, side by side: (steps, environments of all of them)."""

    observations: dict[str, Tensor]
    actions: Tensor
    log_probs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    begins: Tensor
    state: State | None

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


def rollouts_of(slots: list[TakenSlot], device: str) -> Rollouts:
    """Copies: the slots go back to their collectors."""

    def joined(name: str, axis: int = 1) -> Tensor:
        arrays = [slot[name] for slot in slots]
        return torch.from_numpy(np.concatenate(arrays, axis)).to(device)

    names = [name for name in slots[0] if name.startswith("obs.")]
    state = None
    if "state" in slots[0]:
        both = joined("state", axis=2)
        state = both[0], both[1]
    return Rollouts(
        {name.removeprefix("obs."): joined(name) for name in names},
        joined("actions"),
        joined("log_probs"),
        joined("rewards"),
        joined("terminated"),
        joined("truncated"),
        joined("valid"),
        joined("begins"),
        state,
    )


_LOSSES = ("policy_loss", "value_loss", "entropy", "kl", "clipped")


class Learner(runner.Learner):
    """The policy, its optimiser, and what an update does."""

    def __init__(self, observations: Space[Any], actions: Space[Any], config: APPOConfig, device: str = "cpu") -> None:
        self.config = config
        self.policy = ActorCritic(observations, actions, config.network).to(device)
        self.optimizer = Adam(self.policy.parameters(), config.learning_rate, eps=1e-5)

    def update(self, batch: Rollouts, lag: int, progress: float) -> dict[str, float]:
        """Learn from rollouts that are ``lag`` versions old. ``progress`` is the share of the training that is over."""
        config = self.config
        if config.schedule == "linear":
            self.optimizer.learning_rate = config.learning_rate * max(1 - progress, 0.0)
        clip = config.clip * (max(1 - progress, 0.0) if config.clip_schedule == "linear" else 1.0)
        valid = batch.valid
        advantages, targets, values = self.judge(batch, lag)
        explained = _explained(targets[valid], values[valid])
        some = advantages[valid]
        if config.normalize_advantages and len(some) > 1:
            advantages = (advantages - some.mean()) / (some.std() + 1e-8)
        told: list[dict[str, float]] = []
        kl = 0.0
        for _ in range(config.epochs):
            begin = len(told)
            for which in self._minibatches(batch):
                told.append(self._gradient_step(batch, advantages, targets, which, clip))
            kl = sum(one["kl"] for one in told[begin:]) / max(len(told) - begin, 1)
            if config.stop_kl and kl > config.stop_kl:
                break
        if config.schedule == "adaptive":
            if kl > 2 * config.target_kl:
                self.optimizer.learning_rate = max(self.optimizer.learning_rate / 1.5, 1e-5)
            elif kl < config.target_kl / 2:
                self.optimizer.learning_rate = min(self.optimizer.learning_rate * 1.5, 1e-2)
        normalizer = self.policy.encoder.normalizer
        if normalizer is not None:  # after the update: the next version acts with what it was trained with
            seen = {name: value[:-1][valid] for name, value in batch.observations.items()}
            numbers = self.policy.encoder.numbers(seen)
            assert numbers is not None
            normalizer.update(numbers)
        averages = {name: sum(one[name] for one in told) / max(len(told), 1) for name in _LOSSES}
        return {**averages, "learning_rate": self.optimizer.learning_rate, "explained_variance": explained}

    def checkpoint(self) -> dict[str, Any]:
        return {
            "policy": deepcopy(self.policy.state_dict()),
            "optimizer": deepcopy(self.optimizer.state_dict()),
            "learning_rate": self.optimizer.learning_rate,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(checkpoint["policy"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.optimizer.learning_rate = checkpoint["learning_rate"]

    @torch.no_grad()
    def judge(self, batch: Rollouts, lag: int) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages, value targets and values, in the eyes of the current policy."""
        config = self.config
        features = self.policy.sequence(batch.observations, batch.begins, batch.state)
        values = self.policy.value(features).squeeze(-1)
        rewards = batch.rewards * config.reward_scale
        ends = batch.terminated, batch.ended, batch.valid
        if lag == 0:
            return *gae(rewards, values, *ends, config.gamma, config.lam), values[:-1]
        now = self.policy.actions.log_prob(self.policy.policy(features[:-1]), batch.actions)
        ratios = now - batch.log_probs
        advantages, targets = v_trace(rewards, values, *ends, ratios, config.gamma, config.lam)
        return advantages, targets, values[:-1]

    def _minibatches(self, batch: Rollouts) -> list[Tensor]:
        """The valid rows of the batch in random order, counted flat. With an LSTM, environments: it needs all of what
        came before."""
        steps, envs = batch.rewards.shape
        if batch.state is not None:
            return list(torch.split(torch.randperm(envs), max(self.config.minibatch // steps, 1)))
        flat = batch.valid.flatten().nonzero().squeeze(-1)
        if not len(flat):
            return []
        flat = flat[torch.randperm(len(flat))]
        return list(flat.tensor_split(max(round(len(flat) / self.config.minibatch), 1)))

    def _gradient_step(
        self, batch: Rollouts, advantages: Tensor, targets: Tensor, which: Tensor, clip: float
    ) -> dict[str, float]:
        config = self.config
        losses = self._losses(batch, advantages, targets, which, clip)
        loss = losses["policy_loss"] + config.value_coef * losses["value_loss"]
        if config.entropy_coef:
            loss = loss - config.entropy_coef * losses["entropy"]
        self.optimizer.step(loss, config.max_grad_norm)
        return dict(zip(_LOSSES, torch.stack([losses[name].detach() for name in _LOSSES]).tolist(), strict=True))

    def _losses(
        self, batch: Rollouts, advantages: Tensor, targets: Tensor, which: Tensor, clip: float
    ) -> dict[str, Tensor]:
        def of(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 1)[which] if batch.state is None else tensor[:, which]

        observations = {name: of(value[:-1]) for name, value in batch.observations.items()}
        if batch.state is None:
            features, _ = self.policy.features(observations)
        else:
            state = batch.state[0][:, which], batch.state[1][:, which]
            features = self.policy.sequence(observations, of(batch.begins[:-1]), state)
        given = self.policy.policy(features)
        rows = {
            "log_probs": self.policy.actions.log_prob(given, of(batch.actions)),
            "old": of(batch.log_probs),
            "advantages": of(advantages),
            "values": self.policy.value(features).squeeze(-1),
            "targets": of(targets),
            # Without a share in the loss it is only told: then nothing is kept for a way back through it.
            "entropy": self.policy.actions.entropy(given if self.config.entropy_coef else given.detach()),
        }
        if batch.state is not None:
            valid = of(batch.valid)
            rows = {name: one[valid] for name, one in rows.items()}
        return ppo_losses(**rows, clip=clip)


def ppo_losses(
    log_probs: Tensor, old: Tensor, advantages: Tensor, values: Tensor, targets: Tensor, entropy: Tensor, clip: float
) -> dict[str, Tensor]:
    """PPO's losses over rows; ``old`` are the log-probabilities of the policy that collected."""
    log_ratios = log_probs - old
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip, 1 + clip)
    apart = ratios.detach() - 1
    return {
        "policy_loss": -torch.min(ratios * advantages, clipped * advantages).mean(),
        "value_loss": nn.functional.mse_loss(values, targets),
        "entropy": entropy.mean(),
        "kl": (apart - log_ratios.detach()).mean(),
        "clipped": (apart.abs() > clip).float().mean(),
    }


def _explained(targets: Tensor, values: Tensor) -> float:
    """How much of the variance of the returns the value function foresees: 1 is all."""
    if len(targets) < 2:
        return 0.0
    spread = targets.var()
    return float(1 - (targets - values).var() / spread) if float(spread) > 0 else 0.0


# -------------------------------------------------------------------------------------------------------- the run


class APPO(Algorithm):
    """Asynchronous PPO over ``AsyncRunner``."""

    Config = APPOConfig

    @staticmethod
    def make_policy(observations: Space[Any], actions: Space[Any], config: APPOConfig) -> ActorCritic:
        return ActorCritic(observations, actions, config.network)

    def make_learner(self, observations: Space[Any], actions: Space[Any]) -> Learner:
        return Learner(observations, actions, self.config, self.device)

    def begin(self, first_rollout: int, fresh_every: int) -> None:
        first = self.learner.tensors()
        collect = Collector(config=self.config, seed=self.seed, first_rollout=first_rollout, fresh_every=fresh_every)
        slot = slot_fields(
            self.observation_space, self.learner.policy, self.config.steps, self.num_envs, self.config.network.lstm
        )
        self.open(self.make_env, collect, rollout=slot, weights=first)

    def iterate(self, share: float, whole: bool) -> Metrics:  # noqa: ARG002
        begin = time.perf_counter_ns()
        with self.rollouts() as slots:
            waited = time.perf_counter_ns() - begin
            lags = [self.lag_of(slot) for slot in slots]
            batch = rollouts_of(slots, self.device)
            episodes = episodes_of(slots)
        self.env_steps += int(batch.valid.sum())
        told = self.learner.update(batch, max(lags), share)
        return self.metrics(episodes, lags, told, begin, waited)
