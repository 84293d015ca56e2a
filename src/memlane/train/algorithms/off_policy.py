"""Off-policy algorithms: collectors fill a shared replay, the learner samples from it, weights flow back.

The transitions are in the replay; the slot of a rollout carries only episode statistics and the number of its
transitions. The replay's limiter holds the ratio of samples to transitions, and the runner's credits keep the
collectors close to the weights.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from memlane.core import NothingToSample, SegmentError
from memlane.core.layout import FieldSpec
from memlane.core.memory import directory_space, require
from memlane.lanes import Limiter, Replay, ReplayPipeline, ReplayWriter
from memlane.runner.memory_budget import MemoryBudget
from memlane.runner.protocols import CollectorContext, Slot, TakenSlot
from memlane.train.algorithms.base import Algorithm, require_above_zero, require_at_least, require_fraction
from memlane.train.collection import Collector, RolloutWorker, clear_episode_stats, episode_fields
from memlane.train.field_docs import document_fields
from memlane.train.networks import NetworkConfig, leaf_arrays, leaf_fields, leaf_spaces
from memlane.train.run import REPLAY_FILES


@document_fields
@dataclass(frozen=True)
class OffPolicyConfig:
    """Settings of all off-policy algorithms, by the names of CleanRL and Stable-Baselines3 where they have one."""

    num_steps: int = 8
    """Environment steps per rollout and environment; collectors read the weights before each rollout."""
    buffer_size: int = 200_000
    """Transitions that the replay holds."""
    learning_starts: int = 1_000
    """Transitions of random actions before the first gradient step."""
    batch_size: int = 256
    """Transitions per gradient step."""
    samples_per_insert: float = 256.0
    """How often each transition is sampled on average. Equal to ``batch_size``, it gives one gradient step per
    environment step."""
    n_step: int = 1
    """Steps of n-step returns."""
    gamma: float = 0.99
    """Discount factor."""
    learning_rate: float = 3e-4
    """Learning rate of Adam."""
    tau: float = 0.005
    """Fraction by which target networks move towards the online networks in each gradient step (Polyak averaging)."""
    reward_scale: float = 1.0
    """Factor of the rewards in the losses; reported returns are not scaled."""
    max_grad_norm: float = 10.0
    """Maximum norm of the gradient; 0: no clipping."""
    priority_alpha: float = 0.0
    """Exponent of the error in a transition's priority; 0: sample uniformly."""
    priority_beta: float = 0.4
    """Initial exponent of the importance weights of prioritised sampling; it rises to 1 at the end of the training."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Settings of the networks. Observations are not normalised, because those in the replay would be older than the
    normaliser."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_steps", "buffer_size", "learning_starts", "batch_size", "n_step")
        require_at_least(0, self, "learning_rate", "max_grad_norm", "priority_alpha")
        require_above_zero(self, "samples_per_insert")
        require_fraction(self, "gamma", "tau", "priority_beta")
        for name in ("lstm", "log_std"):
            if getattr(self.network, name):
                raise ValueError(f"network.{name} is a setting of appo only, found {getattr(self.network, name)}")
        if self.learning_starts > self.buffer_size:
            raise ValueError(
                f"learning_starts must be at most buffer_size={self.buffer_size}, found {self.learning_starts}"
            )


# ---------------------------------------------------------------------------------------------------------- collecting


class Policy(Protocol):
    """The network of an off-policy algorithm that acts in collectors."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def act(
        self, observations: dict[str, Tensor], state: None = None, *, deterministic: bool = False
    ) -> tuple[Tensor, None]:
        """Actions as the replay keeps them: with exploration noise unless ``deterministic``."""

    def random_actions(self, n: int) -> Tensor:
        """``n`` uniformly random actions, as the replay keeps them."""

    def to_env(self, actions: Tensor) -> Any:
        """Convert actions to arrays of the environment's action space."""


class MakePolicy(Protocol):
    def __call__(self, observation_space: Space[Any], action_space: Space[Any], config: Any) -> Policy: ...


def row_fields(observation_space: Space[Any], action: FieldSpec) -> dict[str, FieldSpec]:
    """The fields of a transition in the replay."""
    return {
        **leaf_fields(observation_space),
        "action": action,
        "reward": ("float32", ()),
        "terminated": (bool, ()),
        "truncated": (bool, ()),
    }


def slot_fields(num_steps: int, num_envs: int) -> dict[str, FieldSpec]:
    """The fields of a rollout's slot: the transitions themselves are in the replay."""
    return {"transitions": ("int64", ()), **episode_fields(num_steps, num_envs)}


@dataclass(frozen=True, kw_only=True)
class OffPolicyCollector(Collector):
    """``collect`` of off-policy algorithms."""

    replay: Replay
    make_policy: MakePolicy
    version_offset: int = 0
    """Added to the weight versions in the replay: those that were published before the run was resumed."""

    def make_worker(self, env: Any, context: CollectorContext) -> OffPolicyWorker:
        policy = self.make_policy(env.single_observation_space, env.single_action_space, self.config)
        num_envs = int(env.num_envs)
        writer = self.replay.writer(range(context.worker * num_envs, (context.worker + 1) * num_envs))
        return OffPolicyWorker(
            env, policy, writer, lambda: self.replay.added < self.config.learning_starts, self.version_offset
        )


class OffPolicyWorker(RolloutWorker):
    """Writes transitions to the replay, and episode statistics to the slot."""

    policy: Policy

    def __init__(
        self, env: Any, policy: Policy, writer: ReplayWriter, act_randomly: Callable[[], bool], version_offset: int = 0
    ) -> None:
        super().__init__(env, policy)
        self.writer, self.act_randomly, self.version_offset = writer, act_randomly, version_offset

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.arrays = self._copy_arrays(self.observations)
        self.writer.cut()

    def collect_into(self, slot: Slot, num_steps: int) -> tuple[int, int]:
        env_ns = policy_ns = transitions = 0
        stats = clear_episode_stats(slot)
        for t in range(num_steps):
            begin = time.perf_counter_ns()
            if self.act_randomly():
                actions = self.policy.random_actions(self.num_envs)
            else:
                actions, _ = self.policy.act({name: torch.from_numpy(array) for name, array in self.arrays.items()})
            between = time.perf_counter_ns()
            observations, rewards, terminated, truncated, _ = self.env.step(self.policy.to_env(actions))
            after = time.perf_counter_ns()
            next_arrays = self._copy_arrays(observations)
            dones = terminated | truncated
            row = {f"obs.{name}": array for name, array in self.arrays.items()}
            row |= {"action": actions.numpy(), "reward": rewards, "terminated": terminated, "truncated": truncated}
            final = {f"obs.{name}": array for name, array in next_arrays.items()} if dones.any() else None
            version = self.version + self.version_offset
            transitions += self.writer.add(row, final=final, skip=~self.valid, version=version)
            self.episodes.step(stats, t, rewards, self.valid, dones)
            self.valid = ~dones
            self.arrays = next_arrays
            policy_ns += between - begin
            env_ns += after - between
        slot["transitions"][...] = transitions
        return env_ns, policy_ns

    def _copy_arrays(self, observations: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Copy observations: the environment may reuse its own arrays."""
        return {name: np.array(value) for name, value in leaf_arrays(self.observation_space, observations).items()}


# ----------------------------------------------------------------------------------------------------------- algorithm


class OffPolicy(Algorithm):
    """The base of off-policy algorithms. A subclass has the networks: ``make_policy``, ``make_learner`` and
    ``action_field``. Its learner has ``metric_names``, and ``update(batch, progress)`` makes one gradient step and
    returns the error of each transition and the metrics."""

    # The saved replay has a stream for each environment, and a limiter with the slack that the rollouts in flight need.
    fixed_options: ClassVar[tuple[str, ...]] = ("num_envs", "collectors", "max_lag", "deterministic")
    fixed_settings: ClassVar[tuple[str, ...]] = (
        "network.hidden", "num_steps", "buffer_size", "learning_starts", "batch_size", "samples_per_insert",
        "priority_alpha", "rollouts_per_update",
    )  # fmt: skip
    replay: Replay | None = None
    _saved_replay: str | None = None
    """Name of the file that the replay was last saved to."""
    _orphaned = 0
    """Transitions in the replay whose rollout was never committed."""
    _version_offset = 0
    """Weight versions that were published before the run was resumed: one per update."""
    _pipeline: ReplayPipeline | None = None

    @abstractmethod
    def action_field(self) -> FieldSpec:
        """The field of an action in a row of the replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.deterministic and self.num_collectors > 1:
            raise ValueError(
                "a deterministic off-policy run has one collector: several fill the replay in an order that is not "
                f"reproducible; set collectors=1, found {self.num_collectors}"
            )

    def start_collectors(self, first_rollout: int, reseed_interval: int) -> None:
        config = self.config
        tensors = self.learner.tensors()
        if self.replay is None:
            self.replay = self._make_replay()
        self._orphaned = self.replay.counters()["admitted"] - self.env_steps
        self._version_offset = self.iteration
        self._sampler = self.replay.sampler(
            seed=None if self.iteration else self.seed, n_step=config.n_step, gamma=config.gamma, extras=("version",)
        )
        self._pipeline = ReplayPipeline(self._sampler, config.batch_size, device=self.device)
        collect = OffPolicyCollector(
            config=config, seed=self.seed, first_rollout=first_rollout, reseed_interval=reseed_interval,
            replay=self.replay, make_policy=type(self).make_policy, version_offset=self._version_offset,
        )  # fmt: skip
        slot = slot_fields(config.num_steps, self.num_envs)
        self.open(self.make_env, collect, rollout=slot, weights=tensors)

    def _make_replay(self) -> Replay:
        config = self.config
        # As many samples as the transitions in flight and one batch: with less, the limiter would stop one side for a
        # rollout that the other waits for.
        slack = 2 * (self._max_in_flight * config.samples_per_insert + config.batch_size)
        row = row_fields(self.observation_space, self.action_field())
        streams, alpha = self.num_envs * self.num_collectors, config.priority_alpha or None
        budget = MemoryBudget()
        size = Replay.segment_layout(row, config.buffer_size, streams=streams, alpha=alpha)
        budget.add("replay", size, lower=f"buffer_size={config.buffer_size}")
        budget.check()
        if self.run is not None:
            what = f"saving the replay (buffer_size={config.buffer_size}) to two files in turn"
            require(2 * size.nbytes, what, [directory_space(self.run.run_dir)])
        return Replay(
            row,
            config.buffer_size,
            streams=streams,
            observations=[f"obs.{name}" for name in leaf_spaces(self.observation_space)],
            alpha=alpha,
            limiter=Limiter(config.samples_per_insert, config.learning_starts, slack),
        )

    @property
    def _max_in_flight(self) -> int:
        """Most transitions of rollouts that were begun and not taken."""
        return self.rollouts_per_update * (self.max_lag + 2) * int(self.config.num_steps) * self.num_envs

    def read_rollouts(self, slots: list[TakenSlot]) -> tuple[None, int]:
        """Nothing to copy: the update samples from the replay."""
        return None, sum(int(slot["transitions"]) for slot in slots)

    def update(self, batch: None, lag: int, progress: float) -> dict[str, float]:  # noqa: ARG002
        assert self.replay is not None
        learning = self._gradient_steps(self._count_due_gradient_steps(), progress)
        learning["samples_per_insert"] = self.replay.samples_per_insert
        learning["replay_size"] = float(self.replay.size)
        return learning

    def _count_due_gradient_steps(self) -> int:
        """Gradient steps that the transitions so far call for, those before ``learning_starts`` apart, minus those that
        were made."""
        assert self.replay is not None
        counters = self.replay.counters()
        # When a collector is killed, and when a run is resumed, transitions stay in the replay whose rollout never
        # comes. The limiter has counted them: without samples for them it would block the collectors in the end.
        in_flight = counters["admitted"] - self.env_steps - self._orphaned
        self._orphaned += max(in_flight - self._max_in_flight, 0)
        transitions = max(self.env_steps + self._orphaned - self.config.learning_starts, 0)
        due_samples = transitions * self.config.samples_per_insert - counters["sampled"]
        return max(int(due_samples // self.config.batch_size), 0)

    def _gradient_steps(self, count: int, progress: float) -> dict[str, float]:
        """Make gradient steps, and return the means of their metrics."""
        assert self.replay is not None
        assert self.weights is not None
        metrics: dict[str, list[float]] = {name: [] for name in (*self.learner.metric_names, "sample_age")}
        pipeline = self._pipeline
        assert pipeline is not None
        pipeline.beta = self.config.priority_beta + (1 - self.config.priority_beta) * progress
        version = self.weights.version + self._version_offset
        for step in range(count):
            if not pipeline.started:
                pipeline.start()
            try:
                batch = pipeline.consume()
            except NothingToSample:
                break  # rows wait for the rows after them; the steps that are missing are due in the next update
            # The next batch is sampled during this gradient step; in deterministic mode after its priorities are set.
            if not self.deterministic and step + 1 < count:
                pipeline.start()
            errors, losses = self.learner.update(batch, progress)
            if self.replay.alpha is not None:
                self.replay.update_priorities(batch["key"].cpu().numpy(), errors.cpu().numpy())
            for name, value in losses.items():
                metrics[name].append(value)
            metrics["sample_age"].append(float(version - batch["version"].double().mean()))
        return {name: sum(values) / len(values) if values else float("nan") for name, values in metrics.items()}

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def before_checkpoint(self) -> None:
        # In deterministic mode the collectors stand still until the weights are published: the replay that a resumed
        # run continues with has to be saved before that.
        if self.deterministic:
            self.save_replay()

    def save_replay(self) -> None:
        """Write the replay into the run's directory, to the file that the last checkpoint does not name. It counts when
        a checkpoint names it.

        If the file has the replay of the checkpoint before the last, only rows that are newer are written.
        """
        assert self.run is not None
        assert self.replay is not None
        name = next(name for name in REPLAY_FILES if name != self.run.replay_file)
        file = self.run.run_dir / name
        if file.is_symlink():  # replaced and not followed, as all files of a run directory
            file.unlink()
        try:
            self.replay.save(file)
        except SegmentError:  # another process has opened it, which keeps it, or it is damaged
            file.unlink(missing_ok=True)
            self.replay.save(file)
        self._saved_replay = name

    def checkpoint(self) -> dict[str, Any]:
        if self.replay is not None and not self.deterministic:
            self.save_replay()
        return {**super().checkpoint(), "replay": self._saved_replay}

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        if self.run is None:
            raise ValueError("the replay is in the run's directory: set `run` before restore()")
        name = checkpoint["replay"]
        if name is not None:  # None before the first checkpoint of a deterministic run
            file = self.run.run_dir / name
            if not file.exists():
                raise FileNotFoundError(f"{file} is missing: the replay belongs to the checkpoint of an off-policy run")
            self.replay = Replay.load(file)
        self._saved_replay = name
        super().restore(checkpoint)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        super().close()
        if self.replay is not None:
            self.replay.close()


def split_observations(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The observations and the next observations of a batch."""
    observations = {name.removeprefix("obs."): value for name, value in batch.items() if name.startswith("obs.")}
    next_observations = {
        name.removeprefix("next_obs."): value for name, value in batch.items() if name.startswith("next_obs.")
    }
    return observations, next_observations
