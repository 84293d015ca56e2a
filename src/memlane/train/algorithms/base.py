"""Algorithm: what all algorithms share on top of ``AsyncRunner``: settings, spaces, the training loop, checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium import Space
from torch import Tensor

from memlane.runner.async_runner import AsyncRunner
from memlane.runner.protocols import Event, TakenSlot
from memlane.train.collection import read_episode_stats
from memlane.train.environments import MakeEnvs, make_envs
from memlane.train.interrupts import deferred_interrupts
from memlane.train.options import build_config, check_settings
from memlane.train.run import Metrics, Run


class Learner(ABC):
    """The networks of an algorithm and their updates. A learner knows nothing of collectors."""

    policy: Any

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to publish: everything that a collector needs to act, in one version."""
        return {name: tensor.detach().cpu() for name, tensor in self.policy.state_dict().items()}

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Copy everything that is learned: networks, optimisers and so on."""

    @abstractmethod
    def restore(self, checkpoint: Mapping[str, Any]) -> None: ...


class Algorithm(AsyncRunner):
    """The base of all algorithms.

    ``rl_cfg`` has the fields of ``Config``, where ``network`` may be a dict, the settings of ``AsyncRunner``, and:

    - ``seed`` (0): seed of the networks, of the environments and of exploration.
    - ``torch_threads`` (1): threads of the learner.
    - ``env_workers`` (0): processes per collector that step its environments; 0: the collector steps them. Not for the
      native backend.
    """

    Config: ClassVar[type[Any]]
    """Dataclass of the algorithm's settings."""
    fixed_options: ClassVar[tuple[str, ...]] = ()
    """Options that must be the same when a run is resumed, because its checkpoint depends on them."""
    fixed_settings: ClassVar[tuple[str, ...]] = ("network.hidden", "network.lstm", "network.normalize_observations")
    """Settings that must be the same when a run is resumed, because its checkpoint depends on them."""
    learner: Any

    def __init__(
        self,
        env_name: str | Callable[[], gymnasium.Env[Any, Any]],
        env_cfg_overrides: Mapping[str, Any] | None = None,
        rl_cfg: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        collector_device: str | None = None,
        sim_backend: str = "mujoco",
        num_envs: int = 4096,
    ) -> None:
        """Check the settings, read the spaces of an environment, make the networks. ``learn`` starts the collectors.

        ``env_name``: Gymnasium id, name of a native environment, path of a native library, or a function that makes an
        environment. ``env_cfg_overrides``: keyword arguments of the environment. ``device``: torch device of the
        learner; collectors act on the CPU. ``sim_backend``: ``native``, ``gymnasium`` or ``mujoco``. ``num_envs``:
        environments per collector.
        """
        super().__init__(
            env_name, env_cfg_overrides, rl_cfg, device=device, collector_device=collector_device,
            sim_backend=sim_backend, num_envs=num_envs,
        )  # fmt: skip
        check_settings(self.Config, self.rl_cfg)
        if self.deterministic and self.rl_cfg.get("in_process") and self.num_collectors > 1:
            raise ValueError(
                "in_process with several collectors is not deterministic: they share torch's global RNG; set "
                "collectors=1 or in_process=False"
            )
        self.config = build_config(self.Config, self.rl_cfg)
        _check_threads_and_workers(self.rl_cfg, sim_backend)
        _check_device(self.device)
        self.seed = int(self.rl_cfg.get("seed", 0))
        self.iteration = 0
        """Updates since the start of the training."""
        self.env_steps = 0
        """Environment steps since the start of the training."""
        self.run: Run | None = None
        """Where metrics and checkpoints go; None: ``learn`` makes one in ``log_dir``."""
        self.should_stop: Callable[[Metrics], str | None] = lambda metrics: None  # noqa: ARG005
        """Called after every update; returns the reason to stop, or None."""
        self.progress: Callable[[Metrics], float] | None = None
        """Returns the fraction of the training that is done, for schedules; None: ``iteration / max_iterations``."""
        self.save_seconds = 60.0
        """Most seconds between two checkpoints, if an update does not take longer."""
        self.stop_reason = ""
        """Why ``learn`` stopped before ``max_iterations``: what ``should_stop`` returned, or "Ctrl-C", "SIGTERM" or
        "SIGHUP"; empty if it did not."""
        self._resume_from: dict[str, Any] | None = None
        """In deterministic mode: the checkpoint that a resumed run starts from."""
        # One thread by default: on a small network several threads mostly wait for each other, and the collectors need
        # the cores (CartPole on two cores: 44 ms per gradient step with two threads, 1 ms with one).
        torch.set_num_threads(int(self.rl_cfg.get("torch_threads", 1)))
        torch.manual_seed(self.seed)
        probe = self.make_env(-1)
        try:
            self.observation_space, self.action_space = probe.single_observation_space, probe.single_action_space
            if probe.num_envs != 1:
                name = type(self).__name__
                raise ValueError(f"{env_name} has {probe.num_envs} agents; {name} trains environments with one agent")
        finally:
            probe.close()
        self.learner = self.make_learner(self.observation_space, self.action_space)

    @property
    def make_env(self) -> MakeEnvs:
        env, backend, settings = self.env_name, self.sim_backend, dict(self.env_cfg_overrides)
        env_workers = int(self.rl_cfg.get("env_workers", 0))
        num_envs = self.num_envs

        def make(worker: int) -> Any:
            if worker < 0:  # to read the spaces
                return make_envs(env, 1, backend, settings=settings)
            return make_envs(env, num_envs, backend, env_workers=env_workers, settings=settings)

        return make

    # ------------------------------------------------------------------------------------- what an algorithm implements

    @staticmethod
    @abstractmethod
    def make_policy(observation_space: Space[Any], action_space: Space[Any], config: Any) -> Any:
        """Make the network that acts, in collectors and in evaluations."""

    @abstractmethod
    def make_learner(self, observation_space: Space[Any], action_space: Space[Any]) -> Learner: ...

    @abstractmethod
    def start_collectors(self, first_rollout: int, reseed_interval: int) -> None:
        """Make the lanes and start the collectors (``open``). The arguments are those of ``Collector``."""

    @abstractmethod
    def read_rollouts(self, slots: list[TakenSlot]) -> tuple[Any, int]:
        """Copy what ``update`` needs out of the slots, which go back to the collectors; count environment steps."""

    @abstractmethod
    def update(self, batch: Any, lag: int, progress: float) -> dict[str, float]:
        """Learn from what ``read_rollouts`` returned, at most ``lag`` versions old; return the metrics of learning."""

    def before_checkpoint(self) -> None:
        """Called in a training step that ends a save interval, before its weights are published."""

    # --------------------------------------------------------------------------------------------------------- the loop

    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str | Path = "logs") -> None:
        """Train for ``max_iterations`` updates, including those before a resume, or until ``should_stop`` returns a
        reason. Ctrl-C, SIGTERM and SIGHUP stop after the current update. Metrics, and a checkpoint every
        ``save_interval`` updates, every ``save_seconds`` seconds and at the end, are written to ``log_dir``, or to the
        directory of ``run`` if that is set.

        A deterministic run that is resumed starts from a multiple of ``save_interval`` updates, where the collectors
        are seeded: it repeats the updates after that, with the same results.
        """
        if save_interval < 1:
            raise ValueError(f"save_interval must be at least 1, found {save_interval}")
        owns_run = self.run is None
        run = self.run = self.run or Run(log_dir)
        rollouts_per_collector = self.rollouts_per_update // self.num_collectors
        first_rollout = self.iteration * rollouts_per_collector
        reseed_interval = save_interval * rollouts_per_collector if self.deterministic else 0
        if self.deterministic:
            self._resume_from = run.complete(self.checkpoint())
        with deferred_interrupts() as interrupts:
            try:
                self.start_collectors(first_rollout, reseed_interval)
                next_save = time.monotonic() + self.save_seconds
                while self.iteration < max_iterations and not self.stop_reason:
                    progress = self.iteration / max_iterations if self.progress is None else self.progress(run.latest)
                    at_interval = (self.iteration + 1) % save_interval == 0
                    metrics = self.training_step(progress, at_interval)
                    try:
                        run.record(metrics)
                        self.stop_reason = interrupts.name or self.should_stop(metrics) or ""
                    except BaseException:  # of a function of the caller: the run is not lost
                        self._save(run, at_interval)
                        raise
                    over = self.stop_reason or self.iteration == max_iterations
                    if at_interval or over or time.monotonic() >= next_save:
                        self._save(run, at_interval)
                        next_save = time.monotonic() + self.save_seconds
            finally:
                self.close()
                if owns_run:
                    run.close()

    def _save(self, run: Run, at_interval: bool) -> None:
        """Write a checkpoint. ``at_interval``: the number of updates is a multiple of the save interval."""
        if not self.deterministic:
            run.save(self.checkpoint())
        elif at_interval:
            self._resume_from = run.complete(self.checkpoint())
            run.save(self._resume_from)
        else:
            run.save(self.checkpoint(), self._resume_from)

    def training_step(self, progress: float, checkpoint: bool) -> Metrics:
        """Take rollouts, update, publish, and return the metrics. ``progress`` is the fraction of the training that is
        done; ``checkpoint``: this step ends a save interval."""
        started = time.perf_counter_ns()
        with self.rollouts() as slots:
            wait_ns = time.perf_counter_ns() - started
            lags = [self.lag_of(slot) for slot in slots]
            episodes = read_episode_stats(slots)
            batch, env_steps = self.read_rollouts(slots)
        self.env_steps += env_steps

        learning = self.update(batch, max(lags), progress)
        if checkpoint:
            self.before_checkpoint()

        version = self.publish(self.learner.tensors())
        self.iteration += 1

        learn_ns = time.perf_counter_ns() - started - wait_ns
        events = [self.events.pop(0) for _ in range(len(self.events))]  # the supervisor may append meanwhile
        return self.metrics(episodes, lags, learning, version, wait_ns, learn_ns, events)

    def metrics(
        self,
        episodes: tuple[list[float], list[int]],
        lags: list[int],
        learning: dict[str, float],
        version: int,
        wait_ns: int,
        learn_ns: int,
        events: list[Event],
    ) -> Metrics:
        """Describe a training step that has been made; this changes nothing."""
        returns, lengths = episodes
        return Metrics(
            iteration=self.iteration,
            env_steps=self.env_steps,
            returns=returns,
            lengths=lengths,
            lags=lags,
            version=version,
            wait_ns=wait_ns,
            learn_ns=learn_ns,
            counters=self.counters(),
            ring_slots=self.rollouts_per_update * (self.max_lag + 1),
            learning=learning,
            events=events,
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> dict[str, Any]:
        """Copy everything that is needed to resume."""
        return {
            **self.learner.checkpoint(),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "rng_state": torch.get_rng_state(),
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; before ``learn``."""
        self.learner.restore(checkpoint)
        self.iteration, self.env_steps = checkpoint["iteration"], checkpoint["env_steps"]
        torch.set_rng_state(checkpoint["rng_state"])


def _check_threads_and_workers(rl_cfg: Mapping[str, Any], sim_backend: str) -> None:
    torch_threads, env_workers = rl_cfg.get("torch_threads", 1), rl_cfg.get("env_workers", 0)
    if torch_threads < 1:
        raise ValueError(f"torch_threads must be at least 1, found {torch_threads}")
    if env_workers < 0:
        raise ValueError(f"env_workers must be at least 0 (the collector steps its environments), found {env_workers}")
    if env_workers and sim_backend == "native":
        raise ValueError(
            f"env_workers is for environments in Python, found {env_workers} with the native backend, whose "
            "environments the collector steps itself; leave it out, or use the gymnasium backend"
        )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device must be a torch device of this machine, such as 'cpu', found {device!r}: {reason}"
        ) from error


def require_at_least(minimum: int, config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, found {getattr(config, name)}")


def require_above_zero(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, found {getattr(config, name)}")


def require_fraction(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} must be from 0 to 1, found {getattr(config, name)}")
