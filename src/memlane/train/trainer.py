"""Trainer: a whole training run, from options to a run directory, and the evaluation of its policy."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch

from memlane.core import MemlaneError
from memlane.train.algorithms import algorithm_for
from memlane.train.algorithms.base import Algorithm
from memlane.train.environments import make_envs
from memlane.train.field_docs import document_fields
from memlane.train.interrupts import Interrupts, deferred_interrupts
from memlane.train.networks import leaf_arrays
from memlane.train.options import (
    RUNNER_SETTINGS,
    RUNS_DIR,
    OptionError,
    Options,
    build_config,
    env_label,
    load_options,
    read_saved_options,
    resolve_options,
)
from memlane.train.run import Metrics, Run
from memlane.train.run_dir import RunDirError, make_run_dir, run_name
from memlane.train.ui.report import write_report

_EVALUATION_EPISODES = 20
_MAX_EPISODE_STEPS = 100_000
"""Steps after which an evaluation cuts an episode that does not end."""
_NO_LIMIT = 1 << 62
"""Updates: the target, steps and seconds limit a training run instead."""


_REPORT_SECONDS = 60.0
_MAX_REPORT_SHARE = 0.01
"""Share of the time that reports may take while a run goes on: one that takes 2 s is followed by the next after 200."""


StoppedBy = Literal["target", "max_steps", "max_seconds", "Ctrl-C", "SIGTERM", "SIGHUP"]
"""What stopped a training run: the option that set the limit, Ctrl-C, or a signal."""


@document_fields
@dataclass(frozen=True)
class Result:
    """How a training run ended."""

    run_dir: Path
    """Directory of the run."""
    stopped_by: StoppedBy
    """What stopped the training: ``"target"``, ``"max_steps"``, ``"max_seconds"``, ``"Ctrl-C"``, ``"SIGTERM"`` or
    ``"SIGHUP"``."""
    reason: str
    """Why the training stopped, as text."""
    iteration: int
    """Updates since the start of the training."""
    env_steps: int
    """Environment steps since the start of the training."""
    seconds: float
    """Seconds of training, including those before a resume."""
    mean_return: float
    """Mean return of the last 100 episodes of the training; nan if none has ended."""
    evaluation: dict[str, Any]
    """Evaluation of the last policy with deterministic actions: what ``evaluate`` returns. Empty after Ctrl-C
    and signals."""


def train(
    options: Options,
    *,
    on_start: Callable[[Path], object] | None = None,
    on_update: Callable[[Metrics], object] | None = None,
    resume: bool = False,
) -> Result:
    """Train until the target, a limit or Ctrl-C; then evaluate the policy and write the report.

        result = train(Options("CartPole-v1", collectors=2, max_seconds=60))
        print(result.reason, result.evaluation["mean_return"], result.run_dir / "report.html")

    ``on_start`` is called with the run directory before the collectors start, once the options and the environment have
    been checked. ``on_update`` is called with the metrics of each update, between two updates. ``resume`` continues the
    run in ``options.run_dir`` from its last checkpoint; options that its checkpoint depends on, such as the
    environment, the algorithm and the network, must be the same. A run that has reached its target or its limit of
    steps is only evaluated. Options that cannot be used raise ``OptionError``, also if another process trains in the
    directory.

    Call it from the main thread: there the first Ctrl-C, SIGTERM or SIGHUP stops the training after the current update,
    without an evaluation, and the second at once. Signals that the program handles or ignores keep that meaning.

    A collector that dies is restarted, and only its unfinished rollout is lost; ``max_restarts`` in ``options.config``
    limits that (see ``AsyncRunner``). A collector that raises ends the training with ``CollectorError``, which has its
    traceback. When this process dies, its collectors end with it, and ``resume`` continues from the last checkpoint,
    which is at most ``options.save_seconds`` and an update old.
    """
    options = resolve_options(options)
    if resume and options.run_dir is None:
        raise OptionError("resume needs run_dir, the directory of the run to resume: Options(..., run_dir=...)")
    backend, num_envs = options.backend, options.num_envs
    assert backend is not None
    assert num_envs is not None
    rl_cfg = {
        **options.config, "seed": options.seed, "collectors": options.collectors,
        "max_lag": options.max_lag, "deterministic": options.deterministic,
    }  # fmt: skip
    try:
        runner = algorithm_for(options.algo)(
            options.env, options.env_settings, rl_cfg, device=options.device, sim_backend=backend, num_envs=num_envs
        )
    except (TypeError, ValueError, LookupError, OSError, gymnasium.error.Error) as error:
        raise OptionError(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, MemlaneError):
            raise
        raise OptionError(f"the networks cannot be made: {error}") from error  # of torch: too large
    with deferred_interrupts() as interrupts, runner:
        run = runner.run = _open_run(options, runner, resume=resume)
        try:
            return _train_in(run, options, runner, interrupts, on_start, on_update, resume=resume)
        except Exception as error:
            if not isinstance(error, OptionError):
                _write_failure(run, error)
            raise
        finally:
            run.close()


def _open_run(options: Options, runner: Algorithm, *, resume: bool) -> Run:
    """Make the run directory, or open the one to resume, and keep other processes out of it."""
    if resume:
        assert options.run_dir is not None
        _check_resume(Path(options.run_dir), options, runner)
    try:
        run_dir = options.run_dir
        if run_dir is None:
            run_dir = make_run_dir(RUNS_DIR, run_name(env_label(options.env), options.algo, f"s{options.seed}"))
        return Run(run_dir, new=not resume)
    except RunDirError as error:
        raise OptionError(str(error)) from error
    except OSError as error:
        raise OptionError(
            f"the run directory {options.run_dir or RUNS_DIR} cannot be written: {error.strerror}"
        ) from error


def _train_in(
    run: Run,
    options: Options,
    runner: Algorithm,
    interrupts: Interrupts,
    on_start: Callable[[Path], object] | None,
    on_update: Callable[[Metrics], object] | None,
    *,
    resume: bool,
) -> Result:
    max_steps, target, backend = options.max_steps, options.target, options.backend
    assert max_steps is not None
    assert backend is not None
    started = time.monotonic()

    def should_stop(metrics: Metrics) -> str | None:
        enough_episodes = len(run.recent_returns) == run.recent_returns.maxlen
        if target is not None and enough_episodes and metrics.mean_return >= target:
            return "target"
        if metrics.env_steps >= max_steps:
            return "max_steps"
        if options.max_seconds is not None and time.monotonic() - started >= options.max_seconds:
            return "max_seconds"
        return None

    reached = None
    if resume:
        with _loading_checkpoint(run.run_dir):
            checkpoint = run.load(latest=True)
            reached = should_stop(run.latest)
            if reached is None:
                runner.restore(run.load())
            else:
                runner.learner.restore(checkpoint)
                runner.iteration, runner.env_steps = checkpoint["iteration"], checkpoint["env_steps"]
    run.write_config(_config(options, run.run_dir, runner))  # now that a checkpoint is known to fit these options
    if reached is None:
        run.remove("result.json")  # that of the training before the resume
        run.save_listeners.append(_ReportWriter(run.run_dir))
        if on_start is not None:
            on_start(run.run_dir)
        if on_update is not None:
            run.listeners.append(on_update)
        runner.should_stop = should_stop
        runner.progress = lambda metrics: metrics.env_steps / max_steps
        runner.save_seconds = options.save_seconds
        runner.learn(_NO_LIMIT, options.save_interval)
        reached = runner.stop_reason
    stopped_by = cast(StoppedBy, interrupts.name or reached)
    evaluation: dict[str, Any] = {}
    if not interrupts.name:
        try:
            with interrupts.raising():
                evaluation = evaluate(runner.learner.policy, options.env, backend, env_settings=options.env_settings)
        except (KeyboardInterrupt, SystemExit):
            if not interrupts.name:  # it comes from the environment
                raise
            stopped_by = cast(StoppedBy, interrupts.name)
    result = Result(
        run.run_dir, stopped_by, _reason(stopped_by, options), runner.iteration, runner.env_steps, run.latest.seconds,
        run.latest.mean_return, evaluation,
    )  # fmt: skip
    as_json = asdict(result)
    if not math.isfinite(result.mean_return):  # JSON has no nan
        as_json["mean_return"] = None
    run.write("result.json", json.dumps(as_json, indent=2, default=str))
    write_report(run.run_dir)
    return result


def _config(options: Options, run_dir: Path, runner: Algorithm) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "name": env_label(options.env),
        "options": {**asdict(options), "run_dir": str(run_dir), "env": _portable_env(options.env)},
        "algorithm": runner.rl_cfg, "backend": options.backend, "num_envs": options.num_envs,
        "max_steps": options.max_steps, "target": options.target,
        "versions": {"memlane": version("memlane"), "torch": torch.__version__,
                     "gymnasium": gymnasium.__version__, "python": platform.python_version()},
    }  # fmt: skip


def _write_failure(run: Run, error: Exception) -> None:
    """Leave in the directory what has ended the training."""
    lines = str(error).splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0]}"
    with contextlib.suppress(OSError, OptionError):  # the error itself is what counts
        run.write("result.json", json.dumps({"stopped_by": "error", "reason": reason}, indent=2))
        write_report(run.run_dir)


class _ReportWriter:
    """Writes the report after the first checkpoint, and from time to time after later ones."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next = -math.inf

    def __call__(self) -> None:
        begin = time.monotonic()
        if begin < self._next:
            return
        with contextlib.suppress(OptionError):  # a file is damaged; the training can go on
            write_report(self._run_dir)
        end = time.monotonic()
        self._next = end + max(_REPORT_SECONDS, (end - begin) / _MAX_REPORT_SHARE)


def _reason(stopped_by: StoppedBy, options: Options) -> str:
    match stopped_by:
        case "target":
            return f"the target of {options.target:g} is reached"
        case "max_steps":
            return f"the limit of {options.max_steps:,} steps is reached"
        case "max_seconds":
            return f"the limit of {options.max_seconds:g} s is reached"
        case "Ctrl-C" | "SIGTERM" | "SIGHUP":
            return f"stopped by {stopped_by}"


def evaluate(
    policy: Any,
    env: Any,
    backend: str,
    *,
    episodes: int = _EVALUATION_EPISODES,
    seed: int = 1_000_000,
    env_settings: Mapping[str, Any] | None = None,
    on_frame: Callable[[np.ndarray[Any, Any]], object] | None = None,
) -> dict[str, Any]:
    """Run one episode in each of ``episodes`` environments with deterministic actions; return statistics of them:
    ``episodes``, ``mean_return``, ``std_return``, ``min_return``, ``max_return``, ``mean_length`` and ``returns``. An
    episode that has not ended after 100,000 steps is cut off.

    ``policy`` comes from ``load_policy`` or is ``learner.policy`` of an algorithm; it is moved to the CPU. ``env``,
    ``backend`` and ``env_settings`` are those of ``Options``. ``on_frame`` is called with the rendered frames of the
    first episode."""
    if episodes < 1:
        raise OptionError(f"episodes must be at least 1, found {episodes}")
    settings = dict(env_settings or {})
    if on_frame is not None and backend != "native":
        settings["render_mode"] = "rgb_array"
    envs = make_envs(env, episodes, backend, settings=settings)
    policy = policy.cpu()
    returns, lengths = np.zeros(episodes), np.zeros(episodes, int)
    alive = np.ones(episodes, bool)
    observations, _ = envs.reset(seed=seed)
    state = policy.initial_state(episodes)
    try:
        while alive.any() and lengths.max() < _MAX_EPISODE_STEPS:
            if on_frame is not None and alive[0]:
                on_frame(_render_first(envs, backend))
            arrays = leaf_arrays(envs.single_observation_space, observations)
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
            actions, state = policy.act(tensors, state, deterministic=True)
            observations, rewards, terminated, truncated, _ = envs.step(policy.to_env(actions))
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


def load_policy(run_dir: str | Path, *, trust: bool = False) -> Any:
    """Load the policy of a run from its checkpoint, for ``evaluate`` or to act with: ``policy.act``. ``trust``: also if
    the run names code, which is loaded then (a library, or a module of a Gymnasium environment)."""
    options = load_options(run_dir, trust=trust)
    algorithm = algorithm_for(options.algo)
    with _using_settings(run_dir):
        config = build_config(algorithm.Config, options.config)
    assert options.backend is not None
    path = _checkpoint_path(run_dir)
    try:
        envs = make_envs(options.env, 1, options.backend, settings=dict(options.env_settings))
    except Exception as error:
        raise OptionError(f"the environment of {run_dir} cannot be made: {type(error).__name__}: {error}") from error
    try:
        with _using_settings(run_dir):
            policy = algorithm.make_policy(envs.single_observation_space, envs.single_action_space, config)
    finally:
        envs.close()
    with _loading_checkpoint(run_dir):
        policy.load_state_dict(torch.load(path, weights_only=True)["policy"])
    return policy


def _render_first(envs: Any, backend: str) -> Any:
    return envs.render(0) if backend == "native" else envs.render()[0]


def _checkpoint_path(run_dir: str | Path) -> Path:
    path = Path(run_dir) / "checkpoint.pt"
    if not path.is_file():
        raise OptionError(f"{run_dir} has no checkpoint.pt: the run stopped before it saved one; train again")
    try:
        is_zip = zipfile.is_zipfile(path)
    except (OSError, zipfile.BadZipFile):  # some damage raises there
        is_zip = False
    if not is_zip:  # torch's error would not say that
        raise OptionError(f"{path} is damaged: it is not a file of torch.save; train again, or restore it from a copy")
    return path


@contextmanager
def _using_settings(run_dir: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # also of torch, which cannot make a network of any size
        raise OptionError(f"{run_dir} has settings that cannot be used: {type(error).__name__}: {error}") from error


@contextmanager
def _loading_checkpoint(run_dir: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can lead to any
        raise OptionError(
            f"the checkpoint in {run_dir} cannot be loaded: it is damaged, or of another environment or version of "
            f"memlane: {type(error).__name__}: {error}"
        ) from error


def _check_resume(run_dir: Path, options: Options, runner: Algorithm) -> None:
    """``OptionError`` if the run has no checkpoint, or one that does not fit ``options``: other networks, or a replay
    that was made for other options."""
    saved = read_saved_options(run_dir)
    _checkpoint_path(run_dir)
    before, now = {"algo": saved["algo"]}, {"algo": options.algo}
    if saved["env"] is not None and isinstance(options.env, str):
        envs = saved["env"], _portable_env(options.env)
        before["env"], now["env"] = (str(env).removeprefix("memlane/") for env in envs)
    if before == now:
        with _using_settings(run_dir):
            before = _fixed_values(runner, saved, build_config(runner.Config, saved["config"]))
        now = _fixed_values(runner, asdict(options), runner.config)
    if changed := [name for name in now if now[name] != before[name]]:
        wanted, required = (", ".join(f"{name}={values[name]!r}" for name in changed) for values in (now, before))
        raise OptionError(
            f"{run_dir} cannot be resumed with {wanted}: its checkpoint was saved with {required}; resume it with "
            "that, or train in another run_dir"
        )


def _fixed_values(runner: Algorithm, options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The options and settings that a run keeps when it is resumed."""
    values = {name: options[name] for name in runner.fixed_options}
    for name in runner.fixed_settings:
        of_runner = name in RUNNER_SETTINGS
        values[name] = options["config"].get(name) if of_runner else attrgetter(name)(config)
    return values


def _portable_env(env: Any) -> str | None:
    """What names the environment from any directory; None for a function."""
    if not isinstance(env, str):
        return None
    return str(Path(env).resolve()) if env.endswith(".so") else env
