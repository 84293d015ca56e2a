"""APPO: proximal policy optimisation whose collectors collect rollouts while the learner learns from earlier ones.

A rollout carries the log-probabilities of the policy that collected it. If that policy is still the current one,
advantages are GAE's; if the learner is ahead by then, V-trace corrects for it. The loss is PPO's, clipped around the
policy that collected (Schulman et al., 2017; Espeholt et al., 2018; Petrenko et al., 2020).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray
from torch import Tensor, nn

from memlane.core.layout import FieldSpec
from memlane.runner.protocols import CollectorContext, Slot, TakenSlot
from memlane.train.advantages import gae, v_trace
from memlane.train.algorithms.base import Algorithm, Learner, require_above_zero, require_at_least, require_fraction
from memlane.train.collection import Collector, RolloutWorker, clear_episode_stats, episode_fields
from memlane.train.field_docs import document_fields
from memlane.train.networks import ActorCritic, NetworkConfig, State, leaf_arrays, leaf_fields, leaf_spaces, mask_state
from memlane.train.optim import Adam
from memlane.train.options import convert


@document_fields
@dataclass(frozen=True)
class APPOConfig:
    """Settings of APPO, by CleanRL's names where it has them: the keys of ``Options.config``, of ``rl_cfg`` of ``APPO``
    and of ``memlane train --set``. A preset has other values than these defaults."""

    num_steps: int = 32
    """Environment steps per rollout and environment."""
    update_epochs: int = 4
    """Passes over the rollouts of an update."""
    minibatch_size: int = 512
    """Transitions per gradient step; with an LSTM, whole sequences that have about as many."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of GAE, and of V-trace."""
    clip_coef: float = 0.2
    """Clipping range of the probability ratio in the policy loss."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    learning_rate: float = 3e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """Schedule of the learning rate: ``linear`` goes to 0 at the end of the training; ``adaptive`` keeps the KL
    divergence of each update near ``desired_kl``."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """Schedule of ``clip_coef``: ``linear`` goes to 0 at the end of the training."""
    desired_kl: float = 0.01
    """KL divergence per update that the adaptive learning rate aims at."""
    target_kl: float = 0.0
    """KL divergence from the collecting policy above which an update stops after the current epoch; 0: never."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; 0: no clipping."""
    normalize_advantages: bool = True
    """Normalise the advantages of each update to zero mean and unit variance."""
    reward_scale: float = 1.0
    """Factor of the rewards in the losses; reported returns are not scaled."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Settings of the network."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_steps", "update_epochs", "minibatch_size")
        require_at_least(0, self, "learning_rate", "target_kl", "max_grad_norm")
        require_above_zero(self, "clip_coef", "desired_kl")
        require_fraction(self, "gamma", "gae_lambda")
        types = get_type_hints(APPOConfig)
        for name in ("lr_schedule", "clip_schedule"):
            convert(name, getattr(self, name), types[name])


# ---------------------------------------------------------------------------------------------------------- collecting


def slot_fields(
    observation_space: Space[Any], policy: ActorCritic, num_steps: int, num_envs: int, lstm: int
) -> dict[str, FieldSpec]:
    """The fields of a rollout, time first. ``obs`` and ``episode_starts`` have one row more: after the last steps."""
    rows = (num_steps, num_envs)
    dtype = "int64" if policy.distribution.dtype == torch.int64 else "float32"
    fields: dict[str, FieldSpec] = {
        **leaf_fields(observation_space, (num_steps + 1, num_envs)),
        "actions": (dtype, (*rows, *policy.distribution.shape)),
        "log_probs": ("float32", rows),
        "rewards": ("float32", rows),
        "terminated": ("bool", rows),
        "truncated": ("bool", rows),
        "valid": ("bool", rows),
        "episode_starts": ("bool", (num_steps + 1, num_envs)),
        **episode_fields(num_steps, num_envs),
    }
    if lstm:
        fields["state"] = ("float32", (2, 1, num_envs, lstm))
    return fields


class APPOCollector(Collector):
    """``collect`` of APPO."""

    def make_worker(self, env: Any, context: CollectorContext) -> APPOWorker:  # noqa: ARG002
        return APPOWorker(env, ActorCritic(env.single_observation_space, env.single_action_space, self.config.network))


class APPOWorker(RolloutWorker):
    """Writes steps into the slot itself, with the log-probabilities of the actions."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.names = list(leaf_spaces(self.observation_space))
        self.state: State | None = self.policy.initial_state(self.num_envs)
        self.episode_starts = np.ones(self.num_envs, np.bool_)

    def collect_into(self, slot: Slot, num_steps: int) -> tuple[int, int]:
        env_ns = policy_ns = 0
        views = {name: slot[name] for name in slot}
        arrays = {name: views[f"obs.{name}"] for name in self.names}
        if self.state is not None:
            views["state"][...] = torch.stack(self.state).numpy()
        stats = clear_episode_stats(slot)
        for t in range(num_steps):
            begin = time.perf_counter_ns()
            self._write_observations(arrays, t)
            views["valid"][t], views["episode_starts"][t] = self.valid, self.episode_starts
            # Read back from the slot, which does not change when the environment reuses its own arrays.
            observations = {name: torch.from_numpy(array[t]) for name, array in arrays.items()}
            if self.state is not None:
                self.state = mask_state(self.state, torch.from_numpy(~self.episode_starts))
            actions, log_probs, self.state = self.policy.sample(observations, self.state)
            env_actions = self.policy.to_env(actions)
            views["actions"][t], views["log_probs"][t] = actions.numpy(), log_probs.numpy()
            between = time.perf_counter_ns()
            self.observations, rewards, terminated, truncated, _ = self.env.step(env_actions)
            after = time.perf_counter_ns()
            views["rewards"][t], views["terminated"][t], views["truncated"][t] = rewards, terminated, truncated
            dones = terminated | truncated
            self.episodes.step(stats, t, rewards, self.valid, dones)
            # The next step resets the environments that are done; the observation after that one starts an episode.
            self.episode_starts = ~self.valid
            self.valid = ~dones
            policy_ns += between - begin
            env_ns += after - between
        self._write_observations(arrays, num_steps)
        views["episode_starts"][num_steps] = self.episode_starts
        return env_ns, policy_ns

    def _write_observations(self, arrays: Mapping[str, NDArray[Any]], t: int) -> None:
        for name, value in leaf_arrays(self.observation_space, self.observations).items():
            arrays[name][t] = value


# ------------------------------------------------------------------------------------------------------------ learning


@dataclass
class RolloutBatch:
    """The rollouts of one update side by side: (steps, environments of all rollouts)."""

    observations: dict[str, Tensor]
    actions: Tensor
    log_probs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    episode_starts: Tensor
    state: State | None

    @property
    def dones(self) -> Tensor:
        return self.terminated | self.truncated


def stack_rollouts(slots: list[TakenSlot], device: str) -> RolloutBatch:
    """Copy rollouts into a batch: the slots go back to their collectors."""

    def stack(name: str, axis: int = 1) -> Tensor:
        arrays = [slot[name] for slot in slots]
        return torch.from_numpy(np.concatenate(arrays, axis)).to(device)

    names = [name for name in slots[0] if name.startswith("obs.")]
    state = None
    if "state" in slots[0]:
        stacked = stack("state", axis=2)
        state = stacked[0], stacked[1]
    return RolloutBatch(
        {name.removeprefix("obs."): stack(name) for name in names},
        stack("actions"),
        stack("log_probs"),
        stack("rewards"),
        stack("terminated"),
        stack("truncated"),
        stack("valid"),
        stack("episode_starts"),
        state,
    )


_LOSSES = ("policy_loss", "value_loss", "entropy", "kl", "clipped")


class APPOLearner(Learner):
    """The policy, its optimiser, and the PPO update."""

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], config: APPOConfig, device: str = "cpu"
    ) -> None:
        self.config = config
        self.policy = ActorCritic(observation_space, action_space, config.network).to(device)
        self.optimizer = Adam(self.policy.parameters(), config.learning_rate, eps=1e-5)

    def update(self, batch: RolloutBatch, lag: int, progress: float) -> dict[str, float]:
        """Learn from rollouts at most ``lag`` versions old; ``progress`` is the fraction of the training done."""
        config = self.config
        if config.lr_schedule == "linear":
            self.optimizer.learning_rate = config.learning_rate * max(1 - progress, 0.0)
        clip_coef = config.clip_coef * (max(1 - progress, 0.0) if config.clip_schedule == "linear" else 1.0)
        valid = batch.valid
        advantages, targets, values = self.compute_advantages(batch, lag)
        explained_variance = _explained_variance(targets[valid], values[valid])
        of_transitions = advantages[valid]
        if config.normalize_advantages and len(of_transitions) > 1:
            advantages = (advantages - of_transitions.mean()) / (of_transitions.std() + 1e-8)
        losses: list[dict[str, float]] = []
        kl = 0.0
        for _ in range(config.update_epochs):
            epoch_begin = len(losses)
            for indices in self._minibatches(batch):
                losses.append(self._gradient_step(batch, advantages, targets, indices, clip_coef))
            kl = sum(loss["kl"] for loss in losses[epoch_begin:]) / max(len(losses) - epoch_begin, 1)
            if config.target_kl and kl > config.target_kl:
                break
        if config.lr_schedule == "adaptive":
            if kl > 2 * config.desired_kl:
                self.optimizer.learning_rate = max(self.optimizer.learning_rate / 1.5, 1e-5)
            elif kl < config.desired_kl / 2:
                self.optimizer.learning_rate = min(self.optimizer.learning_rate * 1.5, 1e-2)
        normalizer = self.policy.encoder.normalizer
        if normalizer is not None:  # after the update: it was trained with the normaliser that the collectors had
            observations = {name: value[:-1][valid] for name, value in batch.observations.items()}
            vectors = self.policy.encoder.vectors(observations)
            assert vectors is not None
            normalizer.update(vectors)
        means = {name: sum(loss[name] for loss in losses) / max(len(losses), 1) for name in _LOSSES}
        return {**means, "learning_rate": self.optimizer.learning_rate, "explained_variance": explained_variance}

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
    def compute_advantages(self, batch: RolloutBatch, lag: int) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages, value targets and values under the current policy: GAE at lag 0, V-trace above."""
        config = self.config
        features = self.policy.sequence(batch.observations, batch.episode_starts, batch.state)
        values = self.policy.critic(features).squeeze(-1)
        rewards = batch.rewards * config.reward_scale
        flags = batch.terminated, batch.dones, batch.valid
        if lag == 0:
            return *gae(rewards, values, *flags, config.gamma, config.gae_lambda), values[:-1]
        log_probs = self.policy.distribution.log_prob(self.policy.actor(features[:-1]), batch.actions)
        log_ratios = log_probs - batch.log_probs
        advantages, targets = v_trace(rewards, values, *flags, log_ratios, config.gamma, config.gae_lambda)
        return advantages, targets, values[:-1]

    def _minibatches(self, batch: RolloutBatch) -> list[Tensor]:
        """Flat indices of the transitions in random order; with an LSTM, indices of environments, because it needs
        whole sequences."""
        num_steps, num_envs = batch.rewards.shape
        if batch.state is not None:
            return list(torch.split(torch.randperm(num_envs), max(self.config.minibatch_size // num_steps, 1)))
        indices = batch.valid.flatten().nonzero().squeeze(-1)
        if not len(indices):
            return []
        indices = indices[torch.randperm(len(indices))]
        return list(indices.tensor_split(max(round(len(indices) / self.config.minibatch_size), 1)))

    def _gradient_step(
        self, batch: RolloutBatch, advantages: Tensor, targets: Tensor, indices: Tensor, clip_coef: float
    ) -> dict[str, float]:
        config = self.config
        losses = self._losses(batch, advantages, targets, indices, clip_coef)
        loss = losses["policy_loss"] + config.vf_coef * losses["value_loss"]
        if config.ent_coef:
            loss = loss - config.ent_coef * losses["entropy"]
        self.optimizer.step(loss, config.max_grad_norm)
        return dict(zip(_LOSSES, torch.stack([losses[name].detach() for name in _LOSSES]).tolist(), strict=True))

    def _losses(
        self, batch: RolloutBatch, advantages: Tensor, targets: Tensor, indices: Tensor, clip_coef: float
    ) -> dict[str, Tensor]:
        def select(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 1)[indices] if batch.state is None else tensor[:, indices]

        observations = {name: select(value[:-1]) for name, value in batch.observations.items()}
        if batch.state is None:
            features, _ = self.policy.features(observations)
        else:
            state = batch.state[0][:, indices], batch.state[1][:, indices]
            features = self.policy.sequence(observations, select(batch.episode_starts[:-1]), state)
        params = self.policy.actor(features)
        rows = {
            "log_probs": self.policy.distribution.log_prob(params, select(batch.actions)),
            "old_log_probs": select(batch.log_probs),
            "advantages": select(advantages),
            "values": self.policy.critic(features).squeeze(-1),
            "targets": select(targets),
            # Without a weight in the loss it is only a metric: detached, autograd keeps nothing for it.
            "entropy": self.policy.distribution.entropy(params if self.config.ent_coef else params.detach()),
        }
        if batch.state is not None:
            valid = select(batch.valid)
            rows = {name: row[valid] for name, row in rows.items()}
        return ppo_losses(**rows, clip_coef=clip_coef)


def ppo_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    values: Tensor,
    targets: Tensor,
    entropy: Tensor,
    clip_coef: float,
) -> dict[str, Tensor]:
    """PPO's losses over transitions; ``old_log_probs`` are those of the policy that collected them."""
    log_ratios = log_probs - old_log_probs
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    deviations = ratios.detach() - 1
    return {
        "policy_loss": -torch.min(ratios * advantages, clipped * advantages).mean(),
        "value_loss": nn.functional.mse_loss(values, targets),
        "entropy": entropy.mean(),
        "kl": (deviations - log_ratios.detach()).mean(),
        "clipped": (deviations.abs() > clip_coef).float().mean(),
    }


def _explained_variance(targets: Tensor, values: Tensor) -> float:
    """Share of the variance of the value targets that the values predict: 1 is all of it."""
    if len(targets) < 2:
        return 0.0
    variance = targets.var()
    return float(1 - (targets - values).var() / variance) if float(variance) > 0 else 0.0


# ----------------------------------------------------------------------------------------------------------- algorithm


class APPO(Algorithm):
    """Asynchronous PPO: collector processes gather rollouts while this process learns from earlier ones.

    ``memlane.train.train`` adds presets, limits, an evaluation and a report. The algorithm alone:

        >>> from tempfile import TemporaryDirectory
        >>> settings = {"num_steps": 16, "network": {"hidden": (32, 32)}, "collectors": 1}
        >>> with TemporaryDirectory() as log_dir:
        ...     with APPO("CartPole-v1", None, settings, sim_backend="native", num_envs=8) as appo:
        ...         appo.learn(max_iterations=3, log_dir=log_dir)
        >>> appo.iteration
        3

    ``learn`` may be called once; it writes metrics and checkpoints to ``log_dir``. Settings in ``rl_cfg``: those of
    ``APPOConfig`` and those of ``AsyncRunner``, for example ``collectors`` and ``max_lag``. Advantages are GAE's for
    rollouts of the current policy, and V-trace's for rollouts of an older one.

    All methods are for one thread of this process. In the main thread the first Ctrl-C ends ``learn`` after the current
    update, the second at once.

    A collector that dies is restarted, and only its unfinished rollout is lost; when too few are left, ``learn`` raises
    ``CollectorDied``. A collector that raises ends ``learn`` with ``CollectorError``, which has its traceback. When
    this process dies, its collectors end with it.
    """

    Config = APPOConfig

    @staticmethod
    def make_policy(observation_space: Space[Any], action_space: Space[Any], config: APPOConfig) -> ActorCritic:
        return ActorCritic(observation_space, action_space, config.network)

    def make_learner(self, observation_space: Space[Any], action_space: Space[Any]) -> APPOLearner:
        return APPOLearner(observation_space, action_space, self.config, self.device)

    def start_collectors(self, first_rollout: int, reseed_interval: int) -> None:
        config = self.config
        tensors = self.learner.tensors()
        collect = APPOCollector(
            config=config, seed=self.seed, first_rollout=first_rollout, reseed_interval=reseed_interval
        )
        slot = slot_fields(
            self.observation_space, self.learner.policy, config.num_steps, self.num_envs, config.network.lstm
        )
        self.open(self.make_env, collect, rollout=slot, weights=tensors)

    def read_rollouts(self, slots: list[TakenSlot]) -> tuple[RolloutBatch, int]:
        batch = stack_rollouts(slots, self.device)
        return batch, int(batch.valid.sum())

    def update(self, batch: RolloutBatch, lag: int, progress: float) -> dict[str, float]:
        return self.learner.update(batch, lag, progress)  # type: ignore[no-any-return]
