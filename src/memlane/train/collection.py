"""Collecting: what the collectors of every algorithm do. They read the weights, make a rollout, hand it over."""

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
    """``collect`` of an algorithm, which says with what in ``trip``. In deterministic mode everything begins anew every
    ``fresh_every`` rollouts, from seeds that depend on nothing but the rollout's number: so does whoever resumes
    there."""

    config: Any
    seed: int
    first_rollout: int = 0
    fresh_every: int = 0

    @abstractmethod
    def trip(self, env: Any, context: CollectorContext) -> Trip: ...

    def __call__(self, env: Any, weights: WeightSubscriber, sink: RolloutSink, context: CollectorContext) -> None:
        torch.set_num_threads(1)
        trip = self.trip(env, context)
        tensors = trip.policy.state_dict()
        steps = self.config.steps
        while True:
            with sink.open() as slot:
                trip.version = weights.read(tensors)
                number = self.first_rollout + context.rollout
                if not trip.begun or (self.fresh_every and number % self.fresh_every == 0):
                    life = number if self.fresh_every else self.first_rollout + 1_000_003 * context.incarnation
                    trip.begin(self.seed + 10_007 * (1 + context.worker) + 7_919 * life)
                env_ns, policy_ns = trip.fill(slot, steps)
                slot.commit(policy_version=trip.version, rows=steps * trip.envs)
            context.report(steps=steps * trip.envs, env_ns=env_ns, policy_ns=policy_ns)


class Trip(ABC):
    """Environments on their way, from rollout to rollout, led by a policy."""

    version = 0
    """Of the weights that the policy has."""

    def __init__(self, env: Any, policy: Any) -> None:
        self.env, self.policy = env, policy
        self.envs = int(env.num_envs)
        self.space = env.single_observation_space
        self.begun = False

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.observations, _ = self.env.reset(seed=seed % 2**31)
        self.valid = np.ones(self.envs, np.bool_)
        """Where the next step is one: where an episode has ended, it only resets the environment."""
        self.episodes = Episodes(self.envs)
        self.begun = True

    @abstractmethod
    def fill(self, slot: Slot, steps: int) -> tuple[int, int]:
        """One rollout; how long the environments took, and the policy."""


class Episodes:
    """The returns and lengths of the episodes that are under way, and how a slot tells of those that ended."""

    def __init__(self, envs: int) -> None:
        self.returns = np.zeros(envs)
        self.lengths = np.zeros(envs, np.int32)

    def step(
        self, told: Told, t: int, rewards: NDArray[Any], valid: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> None:
        """Step ``t`` of a rollout, into what ``told_of`` its slot."""
        self.returns += rewards
        self.lengths += valid
        if ended.any():
            returns, lengths = told
            returns[t][ended], lengths[t][ended] = self.returns[ended], self.lengths[ended]
            self.returns[ended] = self.lengths[ended] = 0


Told = tuple[NDArray[np.float32], NDArray[np.int32]]


def told_of(slot: Slot) -> Told:
    """Where a slot tells of episodes that ended; none so far. Not to be kept for longer than the slot."""
    told = slot["episode_returns"], slot["episode_lengths"]
    told[0][...] = np.nan
    return told


def episode_fields(steps: int, envs: int) -> dict[str, FieldSpec]:
    """The part of every slot that ``Episodes`` writes; a return is nan where no episode ended."""
    return {"episode_returns": ("float32", (steps, envs)), "episode_lengths": ("int32", (steps, envs))}


def episodes_of(slots: list[TakenSlot]) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that ended in some slots."""
    returns = np.concatenate([slot["episode_returns"].ravel() for slot in slots])
    lengths = np.concatenate([slot["episode_lengths"].ravel() for slot in slots])
    ended = ~np.isnan(returns)
    return returns[ended].tolist(), lengths[ended].tolist()
