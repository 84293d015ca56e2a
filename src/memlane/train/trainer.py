"""Trainer: a whole training, from a name to a run folder: preset, runner, limits, checkpoints, evaluation, report."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from memlane.train.appo import APPO
from memlane.train.environments import backend_for, make_envs
from memlane.train.networks import ActorCritic
from memlane.train.presets import preset_for
from memlane.train.run import Metrics, Run

_EVALUATION_EPISODES = 20


@dataclass(frozen=True)
class Options:
    """What a training is told. None is the preset's."""

    env: Any
    """An id of Gymnasium, a native environment, a path to a native library, or a function that makes one."""
    algo: str = "appo"
    collectors: int = 1
    num_envs: int | None = None
    """Of one collector."""
    backend: str | None = None
    seed: int = 0
    max_steps: int | None = None
    max_seconds: float | None = None
    target: float | None = None
    folder: str | Path | None = None
    """None: ``runs/<env>-<time>``."""
    max_lag: int = 1
    deterministic: bool = False
    save_every: int = 50
    device: str = "cpu"
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the algorithm, over the preset's."""
    env_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    folder: Path
    reason: str
    """Why it stopped."""
    iteration: int
    env_steps: int
    seconds: float
    mean_return: float
    """Of the last hundred episodes of the training."""
    evaluation: dict[str, Any]
    """What the last policy reaches when it always does what it thinks best."""


def train(options: Options, *, on_update: Callable[[Metrics], object] | None = None, resume: bool = False) -> Result:
    """Train until the target, a limit or Ctrl-C; then evaluate. ``resume``: go on with the run in its folder."""
    preset = preset_for(options.env)
    backend = options.backend or preset.backend or backend_for(options.env)
    num_envs = options.num_envs or preset.num_envs
    max_steps = options.max_steps or preset.max_steps
    target = options.target if options.target is not None else preset.target
    told = {
        **preset.config, **options.config, "seed": options.seed, "collectors": options.collectors,
        "max_lag": options.max_lag, "deterministic": options.deterministic,
    }  # fmt: skip
    folder = (
        Path(options.folder)
        if options.folder
        else Path("runs") / f"{_name(options.env)}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    config = {
        "options": {**asdict(options), "folder": str(folder), "env": _name(options.env)},
        "algorithm": told, "backend": backend, "num_envs": num_envs, "max_steps": max_steps, "target": target,
        "versions": {"memlane": version("memlane"), "torch": torch.__version__,
                     "gymnasium": gymnasium.__version__, "python": platform.python_version()},
    }  # fmt: skip
    runner = APPO(
        options.env, options.env_settings, told, device=options.device, sim_backend=backend, num_envs=num_envs
    )
    with runner:
        run = runner.run = Run(folder, None if resume else config)
        if resume:
            runner.restore(run.load())
        if on_update is not None:
            run.listeners.append(on_update)
        begin = time.monotonic()

        def should_stop(metrics: Metrics) -> str | None:
            full = len(run.recent) >= 20
            if target is not None and full and metrics.mean_return >= target:
                return f"the target of {target:g} is reached"
            if metrics.env_steps >= max_steps:
                return f"{max_steps:,} steps are made"
            if options.max_seconds is not None and time.monotonic() - begin >= options.max_seconds:
                return f"{options.max_seconds:g} s are over"
            return None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / max_steps
        per_update = runner.rollouts_per_update * num_envs * runner.config.steps
        runner.learn(runner.iteration + max(-(-(max_steps - runner.env_steps) // per_update), 0), options.save_every)
        latest = run.latest
        evaluation = evaluate(runner.learner.policy, options.env, backend, settings=options.env_settings)
        result = Result(
            folder, runner.stopped_because or f"{max_steps:,} steps are made", runner.iteration, runner.env_steps,
            latest.seconds, latest.mean_return, evaluation,
        )  # fmt: skip
        run.write("result.json", json.dumps(asdict(result), indent=2, default=str))
        run.close()
        return result


def evaluate(
    policy: ActorCritic,
    env: Any,
    backend: str,
    *,
    episodes: int = _EVALUATION_EPISODES,
    seed: int = 1_000_000,
    settings: Mapping[str, Any] | None = None,
    on_picture: Callable[[np.ndarray[Any, Any]], object] | None = None,
) -> dict[str, Any]:
    """``episodes`` whole episodes of a policy that does what it thinks best, one in each environment: returns and
    lengths. ``on_picture`` gets the pictures of the first one."""
    envs = make_envs(env, episodes, backend, settings=dict(settings or {}) | _rendering(on_picture, backend))
    policy = policy.cpu()
    names = list(policy.encoder._parts)
    returns, lengths = np.zeros(episodes), np.zeros(episodes, int)
    alive = np.ones(episodes, bool)
    observations, _ = envs.reset(seed=seed)
    state = policy.no_state(episodes)
    try:
        while alive.any():
            if on_picture is not None and alive[0]:
                on_picture(_picture(envs, backend))
            actions, state = policy.act_best(_given(observations, names), state)
            observations, rewards, terminated, truncated, _ = envs.step(policy.actions.for_env(actions))
            returns += rewards * alive
            lengths += alive
            alive &= ~(terminated | truncated)
    finally:
        envs.close()
    return {
        "episodes": episodes,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "min_return": float(returns.min()),
        "max_return": float(returns.max()),
        "mean_length": float(lengths.mean()),
        "returns": returns.tolist(),
    }


def _given(observations: Any, names: list[str]) -> dict[str, torch.Tensor]:
    if not isinstance(observations, dict):
        return {names[0]: torch.from_numpy(np.array(observations))}
    found = {}
    for name in names:
        value = observations
        for key in name.split("."):
            value = value[key]
        found[name] = torch.from_numpy(np.array(value))
    return found


def _rendering(on_picture: object, backend: str) -> dict[str, Any]:
    return {"render_mode": "rgb_array"} if on_picture is not None and backend != "native" else {}


def _picture(envs: Any, backend: str) -> Any:
    return envs.render(0) if backend == "native" else envs.render()[0]


def _name(env: Any) -> str:
    return (
        Path(env).stem
        if isinstance(env, str) and env.endswith(".so")
        else str(getattr(env, "__name__", env)).replace("/", "-")
    )
