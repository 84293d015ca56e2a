"""Off-policy: collectors fill a shared replay, the learner draws from it, weights flow back.

Everything around it is ``AsyncRunner``'s: a rollout's slot carries only what the collectors have to tell of it, the
transitions themselves are in the replay. How many samples there are for each transition is settled by the replay's
limiter; credits keep the collectors close to the weights.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from memlane.core import NothingToSample
from memlane.core.layout import FieldSpec
from memlane.lanes import Limiter, Replay, ReplayPipeline, ReplayWriter
from memlane.runner.memory_budget import MemoryBudget
from memlane.runner.protocols import CollectorContext, Slot
from memlane.train import collection as collecting
from memlane.train.algorithms.base import Algorithm, require_at_least_one
from memlane.train.collection import episode_fields, episodes_of, told_of
from memlane.train.networks import NetworkConfig, arrays_of, leaves_of, observation_fields
from memlane.train.run import Metrics

REPLAY = "replay.memlane"
"""In the run's folder, beside the checkpoint."""


@dataclass(frozen=True)
class OffPolicyConfig:
    steps: int = 8
    """Of each environment between two looks at the weights."""
    capacity: int = 200_000
    """Transitions that are kept."""
    warm_up: int = 1_000
    """Transitions of random actions before the first gradient step."""
    batch: int = 256
    """Transitions of one gradient step."""
    samples_per_insert: float = 256.0
    """How often each transition is drawn on average: ``batch`` means a gradient step for each."""
    n_step: int = 1
    gamma: float = 0.99
    learning_rate: float = 3e-4
    tau: float = 0.005
    """How far the target networks follow in one gradient step."""
    reward_scale: float = 1.0
    max_grad_norm: float = 10.0
    """0: gradients are taken as they are."""
    alpha: float = 0.0
    """Priorities: to what power of its error a transition is drawn; 0: all alike."""
    beta: float = 0.4
    """Where the correction for being drawn by priority begins; it ends at 1."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Observations are taken as they are: rows in the replay would not follow a normaliser that moves."""

    def __post_init__(self) -> None:
        require_at_least_one(self, "steps", "capacity", "warm_up", "batch", "n_step")
        for name in ("lstm", "log_std"):
            if getattr(self.network, name):
                raise ValueError(f"network.{name} is asynchronous PPO's alone, found {getattr(self.network, name)}")
        if not self.samples_per_insert > 0:
            raise ValueError(f"samples_per_insert must be above 0, found {self.samples_per_insert}")
        if self.warm_up > self.capacity:
            raise ValueError(f"warm_up must be at most capacity={self.capacity}, found {self.warm_up}")


# ----------------------------------------------------------------------------------------------------------- collecting


class Actor(Protocol):
    """The part of an algorithm's networks that acts."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def explore(self, observations: dict[str, Tensor]) -> Tensor:
        """Actions as the replay keeps them, with noise."""

    def anything(self, many: int) -> Tensor:
        """Random actions."""

    def for_env(self, actions: Tensor) -> Any: ...


class MakePolicy(Protocol):
    def __call__(self, observations: Space[Any], actions: Space[Any], config: Any) -> Actor: ...


def row_fields(observations: Space[Any], action: FieldSpec) -> dict[str, FieldSpec]:
    """What a transition is made of."""
    return {
        **observation_fields(observations),
        "action": action,
        "reward": ("float32", ()),
        "terminated": (bool, ()),
        "truncated": (bool, ()),
    }


def slot_fields(steps: int, envs: int) -> dict[str, FieldSpec]:
    """What a collector tells of a rollout besides its transitions."""
    return {"transitions": ("int64", ()), **episode_fields(steps, envs)}


@dataclass(frozen=True, kw_only=True)
class Collector(collecting.Collector):
    """``collect`` for off-policy algorithms."""

    replay: Replay
    make_policy: MakePolicy

    def trip(self, env: Any, context: CollectorContext) -> Trip:
        actor = self.make_policy(env.single_observation_space, env.single_action_space, self.config)
        envs = int(env.num_envs)
        writer = self.replay.writer(range(context.worker * envs, (context.worker + 1) * envs))
        return Trip(env, actor, writer, warming_up=lambda: self.replay.added < self.config.warm_up)


class Trip(collecting.Trip):
    policy: Actor

    def __init__(self, env: Any, policy: Actor, writer: ReplayWriter, warming_up: Callable[[], bool]) -> None:
        super().__init__(env, policy)
        self.writer, self.warming_up = writer, warming_up

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.seen = self._copies(self.observations)
        self.writer.cut()

    def fill(self, slot: Slot, steps: int) -> tuple[int, int]:
        env_ns = policy_ns = transitions = 0
        told = told_of(slot)
        for t in range(steps):
            begin = time.perf_counter_ns()
            if self.warming_up():
                actions = self.policy.anything(self.envs)
            else:
                actions = self.policy.explore({name: torch.from_numpy(value) for name, value in self.seen.items()})
            between = time.perf_counter_ns()
            observations, rewards, terminated, truncated, _ = self.env.step(self.policy.for_env(actions))
            after = time.perf_counter_ns()
            next_seen = self._copies(observations)
            ended = terminated | truncated
            row = {f"obs.{name}": value for name, value in self.seen.items()}
            row |= {"action": actions.numpy(), "reward": rewards, "terminated": terminated, "truncated": truncated}
            final = {f"obs.{name}": value for name, value in next_seen.items()} if ended.any() else None
            transitions += self.writer.add(row, final=final, skip=~self.valid, version=self.version)
            self.episodes.step(told, t, rewards, self.valid, ended)
            self.valid = ~ended
            self.seen = next_seen
            policy_ns += between - begin
            env_ns += after - between
        slot["transitions"][...] = transitions
        return env_ns, policy_ns

    def _copies(self, observations: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The environment may use its own arrays again."""
        return {name: np.array(value) for name, value in arrays_of(self.space, observations).items()}


# ------------------------------------------------------------------------------------------------------------- learning


class OffPolicy(Algorithm):
    """The loop of an off-policy algorithm. A subclass has the networks: ``make_policy``, ``make_learner`` and
    ``action``."""

    replay: Replay | None = None
    _lost = 0
    """Transitions in the replay whose rollouts never came."""
    _pipeline: ReplayPipeline | None = None

    @abstractmethod
    def action(self) -> FieldSpec:
        """The field of an action in a row of the replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.deterministic and self.num_collectors > 1:
            raise ValueError(
                "a deterministic off-policy run has one collector: the order in which several fill the replay is chance"
            )

    def begin(self, first_rollout: int, fresh_every: int) -> None:
        config = self.config
        first = self.learner.tensors()
        if self.replay is None:
            assert self.run is not None
            # Rows of another training there would be taken for those of this one that have their numbers.
            (self.run.folder / REPLAY).unlink(missing_ok=True)
            self.replay = self._new_replay()
        self._lost = self.replay.counters()["admitted"] - self.env_steps
        self._sampler = self.replay.sampler(
            seed=None if self.iteration else self.seed, n_step=config.n_step, gamma=config.gamma, extras=("version",)
        )
        self._pipeline = ReplayPipeline(self._sampler, config.batch, device=self.device)
        collect = Collector(
            config=config, seed=self.seed, first_rollout=first_rollout, fresh_every=fresh_every,
            replay=self.replay, make_policy=type(self).make_policy,
        )  # fmt: skip
        slot = slot_fields(config.steps, self.num_envs)
        self.open(self.make_env, collect, rollout=slot, weights=first)

    def _new_replay(self) -> Replay:
        config = self.config
        # As far as credits let the collectors run ahead, and a batch: below that the limiter would stop one side for a
        # rollout that the other waits for.
        slack = 2 * (self._most_under_way * config.samples_per_insert + config.batch)
        row = row_fields(self.observation_space, self.action())
        streams, alpha = self.num_envs * self.num_collectors, config.alpha or None
        budget = MemoryBudget()
        size = Replay.segment_layout(row, config.capacity, streams=streams, alpha=alpha)
        budget.add("replay", size, lower=f"capacity={config.capacity}")
        budget.check()
        return Replay(
            row,
            config.capacity,
            streams=streams,
            observations=[f"obs.{name}" for name in leaves_of(self.observation_space)],
            alpha=alpha,
            limiter=Limiter(config.samples_per_insert, config.warm_up, slack),
        )

    @property
    def _most_under_way(self) -> int:
        """Transitions of rollouts that have begun and were not taken."""
        return self.rollouts_per_update * (self.max_lag + 2) * int(self.config.steps) * self.num_envs

    def iterate(self, share: float, whole: bool) -> Metrics:
        assert self.replay is not None
        begin = time.perf_counter_ns()
        with self.rollouts() as slots:
            waited = time.perf_counter_ns() - begin
            lags = [self.lag_of(slot) for slot in slots]
            episodes = episodes_of(slots)
            added = sum(int(slot["transitions"]) for slot in slots)
        self.env_steps += added
        told = self._gradient_steps(self._due(), share)
        told |= {"samples_per_insert": self.replay.samples_per_insert, "replay_size": float(self.replay.size)}
        if whole and self.deterministic:  # before the collectors go on: it is what a resumed run would have
            self.save_replay()
        return self.metrics(episodes, lags, told, begin, waited)

    def _due(self) -> int:
        """Gradient steps that the transitions so far have earned, those of the warm-up apart, and that were not made
        yet."""
        assert self.replay is not None
        counters = self.replay.counters()
        # When a collector is killed, and when a run is resumed, transitions stay whose rollout never comes. The limiter
        # has counted them: without samples for them it would hold the collectors in the end, and for ever.
        under_way = counters["admitted"] - self.env_steps - self._lost
        self._lost += max(under_way - self._most_under_way, 0)
        earned = max(self.env_steps + self._lost - self.config.warm_up, 0) * self.config.samples_per_insert
        return max(int((earned - counters["sampled"]) // self.config.batch), 0)

    def _gradient_steps(self, steps: int, share: float) -> dict[str, float]:
        assert self.replay is not None
        assert self.weights is not None
        told: dict[str, list[float]] = {name: [] for name in (*self.learner.told, "sample_age")}
        pipeline = self._pipeline
        assert pipeline is not None
        pipeline.beta = self.config.beta + (1 - self.config.beta) * share
        now = self.weights.version
        for step in range(steps):
            if not pipeline.started:
                pipeline.start()
            try:
                batch = pipeline.consume()
            except NothingToSample:
                break  # rows wait for those after them; the next update has these steps to make, too
            # The next one is drawn while this one is learned from; in deterministic mode after its priorities are in.
            if not self.deterministic and step + 1 < steps:
                pipeline.start()
            errors, losses = self.learner.update(batch, share)
            if self.replay.alpha is not None:
                self.replay.update_priorities(batch["key"].cpu().numpy(), errors.cpu().numpy())
            for name, value in losses.items():
                told[name].append(value)
            told["sample_age"].append(float(now - batch["version"].double().mean()))
        return {name: sum(values) / len(values) if values else float("nan") for name, values in told.items()}

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save_replay(self) -> None:
        assert self.run is not None
        assert self.replay is not None
        self.replay.save(self.run.folder / REPLAY)

    def checkpoint(self) -> dict[str, Any]:
        if self.replay is not None and not self.deterministic:
            self.save_replay()
        return super().checkpoint()

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        if self.run is None:
            raise ValueError("the replay is in the run's folder: set `run` before restore()")
        super().restore(checkpoint)
        self.replay = Replay.load(self.run.folder / REPLAY)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        super().close()
        if self.replay is not None:
            self.replay.close()


def split(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The observations of a batch, and those after them."""
    now = {name.removeprefix("obs."): value for name, value in batch.items() if name.startswith("obs.")}
    after = {name.removeprefix("next_obs."): value for name, value in batch.items() if name.startswith("next_obs.")}
    return now, after
