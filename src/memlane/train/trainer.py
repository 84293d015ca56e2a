"""Trainer: a whole training, from a name to a run folder: preset, runner, limits, checkpoints, evaluation, report."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from memlane.core import MemlaneError
from memlane.train.algorithms import ALGORITHMS, algorithm_for
from memlane.train.algorithms.base import config_of
from memlane.train.environments import backend_for, make_envs
from memlane.train.networks import arrays_of
from memlane.train.presets import preset_for
from memlane.train.run import Metrics, Run
from memlane.train.ui.report import write_report

_EVALUATION_EPISODES = 20
_EVALUATION_STEPS = 100_000
"""Of an episode that does not end by itself."""
_ENDLESS = 1 << 62
"""Updates: it is steps, seconds and the target that end a training."""


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


class OptionError(MemlaneError, ValueError):
    """A training was told something that cannot be: an environment, a setting, a folder."""


def settle(options: Options) -> Options:
    """The same with nothing left open: what is None and what the algorithm is not told comes from the preset."""
    if options.algo not in ALGORITHMS:
        raise OptionError(f"algo must be one of {', '.join(ALGORITHMS)}, found {options.algo!r}")
    preset = preset_for(options.env, options.algo)
    if options.collectors < 1:
        raise OptionError(f"collectors must be at least 1, found {options.collectors}")
    both = [one["network"] for one in (preset.config, options.config) if isinstance(one.get("network"), Mapping)]
    network = {"network": {**both[0], **both[1]}} if len(both) == 2 else {}
    return replace(
        options,
        backend=options.backend or backend_for(options.env),
        num_envs=preset.num_envs if options.num_envs is None else options.num_envs,
        max_steps=preset.max_steps if options.max_steps is None else options.max_steps,
        target=preset.target if options.target is None else options.target,
        folder=options.folder or Path("runs") / f"{_name(options.env)}-{time.strftime('%Y%m%d-%H%M%S')}",
        config={**preset.config, **options.config, **network},
    )


def options_of(folder: str | Path) -> Options:
    """What the run in a folder was told, to resume it or to look at its policy."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise OptionError(f"{folder} is not a run: it has no config.json")
    told = json.loads(path.read_text())["options"]
    if told["env"] is None:
        raise OptionError(f"{folder} was trained on a function, which no name leads to; resume it from Python")
    return Options(**{**told, "folder": folder})


def policy_of(folder: str | Path) -> Any:
    """What the run in a folder has learned."""
    options = options_of(folder)
    algorithm = algorithm_for(options.algo)
    config = config_of(algorithm.Config, options.config)
    assert options.backend is not None
    envs = make_envs(options.env, 1, options.backend, settings=dict(options.env_settings))
    policy = algorithm.make_policy(envs.single_observation_space, envs.single_action_space, config)
    envs.close()
    policy.load_state_dict(_checkpoint(folder)["policy"])
    return policy


def train(options: Options, *, on_update: Callable[[Metrics], object] | None = None, resume: bool = False) -> Result:
    """Train until the target, a limit or Ctrl-C; then evaluate. ``resume``: go on with the run in its folder."""
    options = settle(options)
    backend, num_envs, max_steps, target = options.backend, options.num_envs, options.max_steps, options.target
    assert backend is not None
    assert num_envs is not None
    assert max_steps is not None
    told = {
        **options.config, "seed": options.seed, "collectors": options.collectors,
        "max_lag": options.max_lag, "deterministic": options.deterministic,
    }  # fmt: skip
    folder = Path(options.folder or ".")
    checkpoint = _checkpoint(folder) if resume else None
    if not resume and (folder / "metrics.csv").exists():
        raise OptionError(f"{folder} has a run already: resume it, or choose another folder")
    config = {
        "name": _name(options.env),
        "options": {**asdict(options), "folder": str(folder), "env": _lasting(options.env)},
        "algorithm": told, "backend": backend, "num_envs": num_envs, "max_steps": max_steps, "target": target,
        "versions": {"memlane": version("memlane"), "torch": torch.__version__,
                     "gymnasium": gymnasium.__version__, "python": platform.python_version()},
    }  # fmt: skip
    try:
        runner = algorithm_for(options.algo)(
            options.env, options.env_settings, told, device=options.device, sim_backend=backend, num_envs=num_envs
        )
    except (TypeError, ValueError, LookupError, gymnasium.error.Error) as error:
        raise OptionError(str(error)) from error
    with runner:
        run = runner.run = Run(folder, config)
        if checkpoint is not None:
            runner.restore(run.load())
        if on_update is not None:
            run.listeners.append(on_update)
        begin = time.monotonic()

        def should_stop(metrics: Metrics) -> str | None:
            full = len(run.recent) == run.recent.maxlen
            if target is not None and full and metrics.mean_return >= target:
                return f"the target of {target:g} is reached"
            if metrics.env_steps >= max_steps:
                return f"{max_steps:,} steps are made"
            if options.max_seconds is not None and time.monotonic() - begin >= options.max_seconds:
                return f"{options.max_seconds:g} s are over"
            return None

        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / max_steps
        runner.learn(_ENDLESS, options.save_every)
        latest = run.latest
        reason = runner.stopped_because or f"{max_steps:,} steps are made"
        evaluation: dict[str, Any] = {}
        if reason != "Ctrl-C":
            try:
                evaluation = evaluate(runner.learner.policy, options.env, backend, settings=options.env_settings)
            except KeyboardInterrupt:
                reason = "Ctrl-C"
        result = Result(
            folder, reason, runner.iteration, runner.env_steps, latest.seconds, latest.mean_return, evaluation
        )
        told_result = asdict(result)
        if not math.isfinite(result.mean_return):  # no episode has ended, and JSON has no word for that
            told_result["mean_return"] = None
        run.write("result.json", json.dumps(told_result, indent=2, default=str))
        run.close()
    write_report(folder)
    return result


def evaluate(
    policy: Any,
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
    returns, lengths = np.zeros(episodes), np.zeros(episodes, int)
    alive = np.ones(episodes, bool)
    observations, _ = envs.reset(seed=seed)
    state = policy.no_state(episodes)
    try:
        while alive.any() and lengths.max() < _EVALUATION_STEPS:
            if on_picture is not None and alive[0]:
                on_picture(_picture(envs, backend))
            seen = arrays_of(envs.single_observation_space, observations)
            given = {name: torch.from_numpy(np.array(value)) for name, value in seen.items()}
            actions, state = policy.act_best(given, state)
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


def _rendering(on_picture: object, backend: str) -> dict[str, Any]:
    return {"render_mode": "rgb_array"} if on_picture is not None and backend != "native" else {}


def _picture(envs: Any, backend: str) -> Any:
    return envs.render(0) if backend == "native" else envs.render()[0]


def _checkpoint(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        raise OptionError(f"{folder} has no checkpoint.pt: the run stopped before its first one")
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def _lasting(env: Any) -> str | None:
    """What leads to the environment again, from any folder."""
    if not isinstance(env, str):
        return None
    return str(Path(env).resolve()) if env.endswith(".so") else env


def _name(env: Any) -> str:
    """For people and folders."""
    if not isinstance(env, str):
        name = getattr(env, "__name__", "")
        return name if name.isidentifier() else "env"
    return Path(env).stem if env.endswith(".so") else env.replace("/", "-")
