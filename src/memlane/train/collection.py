"""Collection: what the collectors of every algorithm do: read the weights, fill a slot with a rollout, commit it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memlane.core.layout import FieldSpec
from memlane.runner.protocols import CollectorContext, RolloutSink, Slot, TakenSlot, WeightSubscriber


@dataclass(frozen=True, kw_only=True)
class Collector(ABC):
    """The ``collect`` function of an algorithm. A subclass says how a rollout is collected, in ``make_worker``.

    In deterministic mode environments and random numbers are seeded again every ``reseed_interval`` rollouts, from the
    number of the rollout alone: a run that is resumed there continues with the same numbers.
    """

    config: Any
    """Settings of the algorithm."""
    seed: int
    """Seed of the run."""
    first_rollout: int = 0
    """Number of the first rollout of each collector; above 0 in a resumed run."""
    reseed_interval: int = 0
    """Rollouts between two seedings; 0: seed only at the start."""

    @abstractmethod
    def make_worker(self, env: Any, context: CollectorContext) -> RolloutWorker: ...

    def __call__(self, env: Any, weights: WeightSubscriber, sink: RolloutSink, context: CollectorContext) -> None:
        torch.set_num_threads(1)
        worker = self.make_worker(env, context)
        tensors = worker.policy.state_dict()
        num_steps = self.config.num_steps
        while True:
            with sink.open() as slot:
                worker.version = weights.read(tensors)
                number = self.first_rollout + context.rollout
                if not worker.started or (self.reseed_interval and number % self.reseed_interval == 0):
                    restart_id = self.first_rollout + 1_000_003 * context.incarnation
                    stream_id = number if self.reseed_interval else restart_id
                    worker.reset(self.seed + 10_007 * (1 + context.worker) + 7_919 * stream_id)
                env_ns, policy_ns = worker.collect_into(slot, num_steps)
                slot.commit(policy_version=worker.version, rows=num_steps * worker.num_envs)
            context.report(steps=num_steps * worker.num_envs, env_ns=env_ns, policy_ns=policy_ns)


class RolloutWorker(ABC):
    """A policy and the environments that it acts in. Episodes continue from one rollout to the next."""

    version = 0
    """Version of the weights that the policy has."""

    def __init__(self, env: Any, policy: Any) -> None:
        self.env, self.policy = env, policy
        self.num_envs = int(env.num_envs)
        self.observation_space = env.single_observation_space
        self.started = False

    def reset(self, seed: int) -> None:
        """Seed torch and the environments, and start new episodes."""
        torch.manual_seed(seed)
        self.observations, _ = self.env.reset(seed=seed % 2**31)
        self.valid = np.ones(self.num_envs, np.bool_)
        """Whether the next step is a transition: after the end of an episode it only resets the environment."""
        self.episodes = EpisodeTracker(self.num_envs)
        self.started = True

    @abstractmethod
    def collect_into(self, slot: Slot, num_steps: int) -> tuple[int, int]:
        """Fill a slot with a rollout; return the nanoseconds spent in the environments and in the policy."""


# --------------------------------------------------------------------------------------------------- episode statistics

EpisodeStats = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Returns and lengths of the episodes that ended in a rollout: views of a slot, valid as long as the slot is."""


class EpisodeTracker:
    """Returns and lengths of the current episodes."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int32)

    def step(
        self, stats: EpisodeStats, t: int, rewards: NDArray[Any], valid: NDArray[np.bool_], dones: NDArray[np.bool_]
    ) -> None:
        """Count step ``t`` of a rollout, and write the episodes that end with it to ``stats``."""
        self.returns += rewards
        self.lengths += valid
        if dones.any():
            returns, lengths = stats
            returns[t][dones], lengths[t][dones] = self.returns[dones], self.lengths[dones]
            self.returns[dones] = self.lengths[dones] = 0


def episode_fields(num_steps: int, num_envs: int) -> dict[str, FieldSpec]:
    """The fields of a slot for episode statistics. A return is nan where no episode ended."""
    return {"episode_returns": ("float32", (num_steps, num_envs)), "episode_lengths": ("int32", (num_steps, num_envs))}


def clear_episode_stats(slot: Slot) -> EpisodeStats:
    """Mark that no episode has ended in a slot, and return its arrays of episode statistics."""
    stats = slot["episode_returns"], slot["episode_lengths"]
    stats[0][...] = np.nan
    return stats


def read_episode_stats(slots: list[TakenSlot]) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that ended in the slots."""
    returns = np.concatenate([slot["episode_returns"].ravel() for slot in slots])
    lengths = np.concatenate([slot["episode_lengths"].ravel() for slot in slots])
    ended = ~np.isnan(returns)
    return returns[ended].tolist(), lengths[ended].tolist()
