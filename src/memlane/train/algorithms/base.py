"""Algorithm: what the algorithms have in common around ``AsyncRunner``: settings, spaces, the loop, checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium import Space
from torch import Tensor

from memlane.runner.async_runner import SETTINGS, AsyncRunner
from memlane.train.environments import Make, make_envs
from memlane.train.interrupts import uninterrupted
from memlane.train.networks import NetworkConfig
from memlane.train.run import Metrics, Run


class Learner(ABC):
    """The part of an algorithm that knows nothing of collectors: networks, and what an update does."""

    policy: Any

    def tensors(self) -> dict[str, Tensor]:
        """What is published: everything that a collector needs to act, in one version."""
        return {name: tensor.detach().cpu() for name, tensor in self.policy.state_dict().items()}

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """All that was learned, as it is now."""

    @abstractmethod
    def restore(self, checkpoint: Mapping[str, Any]) -> None: ...


class Algorithm(AsyncRunner):
    """``rl_cfg`` has what the runner knows, and the fields of ``Config``; ``network`` may be a dict. ``seed`` is 0
    unless it says otherwise."""

    Config: ClassVar[type[Any]]
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
        super().__init__(
            env_name, env_cfg_overrides, rl_cfg, device=device, collector_device=collector_device,
            sim_backend=sim_backend, num_envs=num_envs,
        )  # fmt: skip
        known = {one.name for one in fields(self.Config)}
        unknown = set(self.rl_cfg) - known - RUNNER_SETTINGS.keys()
        if unknown:
            raise TypeError(
                f"rl_cfg has {sorted(unknown)}, which nobody knows; known are {sorted(known | RUNNER_SETTINGS.keys())}"
            )
        if self.deterministic and self.rl_cfg.get("in_process") and self.num_collectors > 1:
            raise ValueError("in_process with several collectors is not deterministic: they share torch's random words")
        self.config = config_of(self.Config, self.rl_cfg)
        self.seed = int(self.rl_cfg.get("seed", 0))
        self.iteration = 0
        self.env_steps = 0
        self.run: Run | None = None
        self.should_stop: Callable[[Metrics], str | None] = lambda metrics: None  # noqa: ARG005
        """Looked at after every update; a text is the reason to stop."""
        self.progress: Callable[[Metrics], float] | None = None
        """The share of the training that is over, for schedules; None: updates made of those asked for."""
        self.stopped_because = ""
        # One unless asked for more: on a small network several threads wait for each other most of the time, and the
        # collectors need the cores (CartPole on two cores: 44 ms a gradient step with two threads, 1 ms with one).
        torch.set_num_threads(int(self.rl_cfg.get("torch_threads", 1)))
        torch.manual_seed(self.seed)
        probe = self.make_env(-1)
        try:
            self.observation_space, self.action_space = probe.single_observation_space, probe.single_action_space
            if probe.num_envs != 1:
                name = type(self).__name__
                raise ValueError(f"{env_name} has {probe.num_envs} agents; {name} trains environments with one")
        finally:
            probe.close()
        self.learner = self.make_learner(self.observation_space, self.action_space)

    @property
    def make_env(self) -> Make:
        name, backend, settings = self.env_name, self.sim_backend, dict(self.env_cfg_overrides)
        workers = int(self.rl_cfg.get("env_workers", 0))
        num_envs = self.num_envs

        def make(worker: int) -> Any:
            # One is enough to look at the spaces.
            many = 1 if worker < 0 else num_envs
            return make_envs(name, many, backend, env_workers=0 if worker < 0 else workers, settings=settings)

        return make

    # ------------------------------------------------------------------------------------------- what an algorithm says

    @staticmethod
    @abstractmethod
    def make_policy(observations: Space[Any], actions: Space[Any], config: Any) -> Any:
        """What acts, in collectors and evaluations."""

    @abstractmethod
    def make_learner(self, observations: Space[Any], actions: Space[Any]) -> Learner: ...

    @abstractmethod
    def begin(self, first_rollout: int, fresh_every: int) -> None:
        """Make the lanes and start the collectors (``open``). ``first_rollout`` is the number of the first one that
        each will make; in deterministic mode everything in a collector begins anew every ``fresh_every`` rollouts."""

    @abstractmethod
    def iterate(self, share: float, whole: bool) -> Metrics:
        """Take rollouts, learn, publish. ``share`` of the training is over; ``whole``: a checkpoint is made after
        it."""

    # --------------------------------------------------------------------------------------------------------- the loop

    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str | Path = "logs") -> None:
        """Until ``max_iterations`` updates have been made since the very start, or ``should_stop`` says so."""
        made = self.run is None
        run = self.run = self.run or Run(log_dir)
        each = self.rollouts_per_update // self.num_collectors
        with uninterrupted() as interrupted:
            try:
                self.begin(self.iteration * each, save_interval * each if self.deterministic else 0)
                while self.iteration < max_iterations and not self.stopped_because:
                    whole = (self.iteration + 1) % save_interval == 0
                    share = self.iteration / max_iterations if self.progress is None else self.progress(run.latest)
                    metrics = self.iterate(share, whole)
                    run.record(metrics)
                    if whole:
                        run.save(self.checkpoint())
                    # In deterministic mode only where a resumed run goes on exactly as this one would.
                    if whole or not self.deterministic:
                        self.stopped_because = self.should_stop(metrics) or ""
                    if interrupted():
                        self.stopped_because = "Ctrl-C"
                if self.iteration % save_interval and not self.deterministic:
                    run.save(self.checkpoint())
            finally:
                self.close()
                if made:
                    run.close()

    def metrics(
        self,
        episodes: tuple[list[float], list[int]],
        lags: list[int],
        told: dict[str, float],
        begin_ns: int,
        waited_ns: int,
    ) -> Metrics:
        """Publish what was learned, and say what there is to say of the update that began at ``begin_ns``."""
        version = self.publish(self.learner.tensors())
        self.iteration += 1
        returns, lengths = episodes
        return Metrics(
            iteration=self.iteration,
            env_steps=self.env_steps,
            returns=returns,
            lengths=lengths,
            lags=lags,
            version=version,
            wait_ns=waited_ns,
            learn_ns=time.perf_counter_ns() - begin_ns - waited_ns,
            counters=self.counters(),
            ring_slots=self.rollouts_per_update * (self.max_lag + 1),
            learning=told,
            events=[self.events.pop(0) for _ in range(len(self.events))],
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> dict[str, Any]:
        """All that is needed to go on, as it is now."""
        return {
            **self.learner.checkpoint(),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "random": torch.get_rng_state(),
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        self.learner.restore(checkpoint)
        self.iteration, self.env_steps = checkpoint["iteration"], checkpoint["env_steps"]
        torch.set_rng_state(checkpoint["random"])


RUNNER_SETTINGS = {**SETTINGS, "env_workers": int, "seed": int, "torch_threads": int}
"""What ``rl_cfg`` may say besides the algorithm's own."""


def config_of(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """A configuration from what it is told; whatever else is in there is not its own."""
    known = {one.name for one in fields(kind)}
    told = {name: value for name, value in given.items() if name in known and name != "network"}
    network = given.get("network")
    if network is None:
        return kind(**told)
    if isinstance(network, Mapping):
        network = NetworkConfig(**{**network, "hidden": tuple(network.get("hidden", NetworkConfig.hidden))})
    return replace(kind(**told), network=network)


def require_at_least_one(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, found {getattr(config, name)}")
