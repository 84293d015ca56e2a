"""Options of a training run: what the caller asks for, completed from a preset, and settings written as ``KEY=VALUE``.

This module does not import torch, so that options and their errors are quick. Names that users of Stable-Baselines3
and CleanRL type are answered with memlane's names: the tables are here, and nowhere else.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memlane.core import MemlaneError
from memlane.core.suggestions import describe_unknown, did_you_mean
from memlane.runner.async_runner import SETTINGS
from memlane.train.algorithms import ALGORITHMS, algorithm_for
from memlane.train.environments import backend_for, check_backend
from memlane.train.field_docs import document_fields
from memlane.train.presets import preset_for

RUNS_DIR = Path("runs")
"""Where new run directories are made."""


class OptionError(MemlaneError, ValueError):
    """An environment, an algorithm, a setting or a run directory that cannot be used."""


@document_fields
@dataclass(frozen=True)
class Options:
    """What to train, on what, and for how long: the argument of ``train``.

    Only ``env`` is required. The preset of the environment gives ``num_envs``, ``max_steps`` and ``target`` if they are
    None, and the settings that are not in ``config``:

        >>> from memlane.train.options import resolve_options
        >>> resolved = resolve_options(Options("CartPole-v1", collectors=2, config={"gamma": 0.99}))
        >>> resolved.backend, resolved.num_envs, resolved.target, resolved.config["gamma"]
        ('native', 32, 475, 0.99)

    An environment without a preset gets 1,000,000 steps, no target and the defaults of the algorithm. With ``appo`` it
    has 32 environments per collector, with ``sac`` and ``dqn`` 8; ``sac`` then has ``network.hidden=(256, 256)``, and
    ``dqn`` has ``batch_size=64`` and ``samples_per_insert=8``.
    """

    env: Any
    """Gymnasium id, name of a native environment, path of a native library, or a function that makes an environment."""
    algo: str = "appo"
    """Algorithm: ``appo``, ``sac`` or ``dqn``."""
    collectors: int = 1
    """Number of collector processes."""
    num_envs: int | None = None
    """Environments per collector; None: from the preset."""
    backend: str | None = None
    """Implementation of the environments: ``native`` (in C) or ``gymnasium``; ``mujoco`` is the same as ``gymnasium``.
    None: ``native`` where memlane has the environment, else ``gymnasium``."""
    seed: int = 0
    """Seed of the networks, of the environments and of exploration."""
    max_steps: int | None = None
    """Environment steps after which the training stops, counted over all collectors; None: from the preset."""
    max_seconds: float | None = None
    """Seconds after which the training stops; None: no limit."""
    target: float | None = None
    """Mean return of the last 100 episodes at which the training stops; None: from the preset, if it has one."""
    run_dir: str | Path | None = None
    """Directory of the run; None: a new one, ``runs/<env>-<algo>-s<seed>-<time>``."""
    max_lag: int = 1
    """Weight versions that the learner may be ahead of a rollout it learns from; 0: synchronous."""
    deterministic: bool = False
    """Give the same results for the same seed. Collectors and learner then take turns, which is slower. A run that is
    resumed repeats the updates since the last multiple of ``save_interval``, with the same results."""
    save_interval: int = 50
    """Updates between two checkpoints."""
    save_seconds: float = 60.0
    """Most seconds between two checkpoints, if an update does not take longer."""
    device: str = "cpu"
    """Torch device of the learner."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the algorithm (``APPOConfig``, ``SACConfig``, ``DQNConfig``) and of ``AsyncRunner``, except those
    that are options: ``seed``, ``collectors``, ``max_lag`` and ``deterministic``. They override the preset's.
    ``network`` may be a dict."""
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""


def resolve_options(options: Options) -> Options:
    """Check the options and complete them: options that are None, and settings that ``config`` does not have, come from
    the preset."""
    options = _check_options(options)
    try:
        backend = check_backend(options.backend or backend_for(options.env))
    except ValueError as error:
        raise OptionError(str(error)) from error
    preset = preset_for(options.env, options.algo)
    config = {**preset.config, **options.config}
    networks = preset.config.get("network"), options.config.get("network")
    if isinstance(networks[0], Mapping) and isinstance(networks[1], Mapping):
        config["network"] = {**networks[0], **networks[1]}
    return replace(
        options,
        backend=backend,
        num_envs=preset.num_envs if options.num_envs is None else options.num_envs,
        max_steps=preset.max_steps if options.max_steps is None else options.max_steps,
        target=preset.target if options.target is None else options.target,
        config=config,
    )


def _check_options(options: Options) -> Options:
    """Check types and ranges; return the options with numbers such as 1e6 as integers where they are integers."""
    if not isinstance(options, Options):
        hint = f"; write Options({options!r})" if isinstance(options, str) else ""
        raise TypeError(f"options must be memlane.train.Options, found {options!r}{hint}")
    if not (isinstance(options.env, str) or callable(options.env)):
        raise OptionError(
            "env must be a Gymnasium id, the name of a native environment, the path of a native library or a function "
            f"that makes an environment, found {options.env!r}"
        )
    options = replace(options, device=str(options.device))
    try:
        options = replace(
            options,
            **{name: convert(name, getattr(options, name), kind) for name, kind in get_type_hints(Options).items()},
        )
    except (TypeError, ValueError) as error:
        raise OptionError(str(error)) from None
    check_algorithm(options.algo)
    for name in ("collectors", "num_envs", "max_steps", "save_interval"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, found {value}")
    if options.max_seconds is not None and options.max_seconds <= 0:
        raise OptionError(f"max_seconds must be above 0, found {options.max_seconds:g}; leave it out for no limit")
    if options.save_seconds <= 0:
        raise OptionError(f"save_seconds must be above 0, found {options.save_seconds:g}; inf saves by updates only")
    for name in RUNNER_OPTIONS:
        if name in options.config:
            value = options.config[name]
            raise OptionError(f"config has {name!r}, which is an option: write Options(..., {name}={value!r}) instead")
    return options


def load_options(run_dir: str | Path, *, trust: bool = False) -> Options:
    """Read the options of a run, to resume it or to evaluate its policy.

    A run directory can name code: a library (``.so``), or a module that Gymnasium imports (``module:Env-v0``). Only
    with ``trust`` are such options returned: the next step would load that code.
    """
    saved = read_saved_options(run_dir)
    if names_code(saved["env"]) and not trust:
        raise OptionError(
            f"{run_dir} names code that would be loaded, {saved['env']!r}; if you trust it, pass --trust to the "
            "command, or trust=True in Python"
        )
    if saved["env"] is None:
        raise OptionError(
            f"{run_dir} was trained on an environment that a function makes, which config.json cannot store; in "
            "Python, train(Options(env=function, run_dir=...), resume=True) resumes and evaluates it"
        )
    return Options(**{**saved, "run_dir": run_dir})


def names_code(env: Any) -> bool:
    """Whether an environment's name makes memlane or Gymnasium load a file or import a module."""
    return isinstance(env, str) and (env.endswith(".so") or ":" in env)


def read_saved_options(run_dir: str | Path) -> dict[str, Any]:
    """The options in config.json of a run, by name. ``env`` is None if it was a function."""
    path = Path(run_dir) / "config.json"
    if not path.parent.is_dir():
        raise OptionError(f"there is no directory {run_dir}; `memlane train` prints the run directory when it ends")
    try:
        saved = dict(json.loads(path.read_bytes())["options"])
    except FileNotFoundError:
        raise OptionError(f"{run_dir} is not a run directory: it has no config.json") from None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise OptionError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if unknown := saved.keys() - {each.name for each in fields(Options)}:
        raise OptionError(
            f"{path} is of another version of memlane, which has the options {sorted(unknown)}; use that version for it"
        )
    try:
        options = Options(**{"env": None, **saved})
        if not isinstance(options.env, str | None):
            raise OptionError(f"env must be a string, found {options.env!r}")
        if options.env is not None:
            _check_options(options)
        return asdict(options)
    except (ValueError, TypeError) as error:
        raise OptionError(f"{path} is damaged: {error}") from error


def env_label(env: Any) -> str:
    """Name an environment in titles and directories."""
    if not isinstance(env, str):
        name = getattr(env, "__name__", "")
        return name if name.isidentifier() else "env"
    return Path(env).stem if env.endswith(".so") else env.replace("/", "-")


# ------------------------------------------------------------------------------------------------------------ settings

RUNNER_SETTINGS: dict[str, type] = {**SETTINGS, "env_workers": int, "seed": int, "torch_threads": int}
"""Settings that every algorithm takes in ``rl_cfg``, besides those of its ``Config``."""

RUNNER_OPTIONS = ("seed", "collectors", "max_lag", "deterministic")
"""Settings in ``rl_cfg`` that ``Options`` has a field for, so that ``Options.config`` must not have them."""

_OPTION_NAMES = (
    *RUNNER_OPTIONS, "algo", "num_envs", "backend", "target", "max_steps", "max_seconds", "save_seconds", "run_dir",
)  # fmt: skip
"""Options that a command line has flags for, so that ``--set`` refuses them."""

_PYTHON_OPTIONS = ("save_interval", "device", "env_settings")
"""Options that a command line has no flags for."""


def check_settings(config_type: type[Any], settings: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for settings that neither the algorithm's ``Config`` nor the runner nor the network has, and
    for values of another type than theirs."""
    from memlane.train.networks import NetworkConfig

    known = {each.name for each in fields(config_type)} | RUNNER_SETTINGS.keys()
    of_network = {each.name for each in fields(NetworkConfig)}
    network = settings.get("network")
    if isinstance(network, Mapping):
        _refuse_unknown("network settings", network.keys() - of_network, of_network)
    _refuse_unknown("settings", settings.keys() - known, known, {f"network.{name}" for name in of_network})
    for name in settings.keys() & RUNNER_SETTINGS.keys():
        convert(name, settings[name], RUNNER_SETTINGS[name])
    _config_values(config_type, settings)


def _refuse_unknown(what: str, unknown: Set[str], known: Set[str], nested: Set[str] = frozenset()) -> None:
    """Raise ``TypeError`` for unknown keys of a dict. ``nested`` are names that have a dict of their own in it."""

    def hint(name: str) -> str:
        if name in nested:
            return f"write {_as_nested(name)}"
        return re.sub(r"'network\.\w+'", lambda match: _as_nested(match[0].strip("'")), _hint(name, known | nested))

    if unknown:
        raise TypeError(describe_unknown(what, unknown, known, hint))


def _as_nested(name: str) -> str:
    """``network.hidden`` as it is written in a dict."""
    part, _, rest = name.partition(".")
    return f"{part!r}: {{{rest!r}: ...}}"


def build_config(config_type: type[Any], settings: Mapping[str, Any]) -> Any:
    """Make an algorithm's ``Config``. Settings of the runner are ignored; ``network`` may be a dict."""
    return config_type(**_config_values(config_type, settings))


def _config_values(config_type: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that ``config_type`` has, each of its type."""
    from memlane.train.networks import NetworkConfig

    types = get_type_hints(config_type)
    values = {name: value for name, value in settings.items() if name in types}
    network = values.pop("network", None)
    values = {name: convert(name, value, types[name]) for name, value in values.items()}
    if isinstance(network, Mapping):
        types = get_type_hints(NetworkConfig)
        network = NetworkConfig(**{name: convert(f"network.{name}", network[name], types[name]) for name in network})
    if not isinstance(network, NetworkConfig | None):
        raise TypeError(
            f"network must be a NetworkConfig or a dict of its settings ({', '.join(get_type_hints(NetworkConfig))}), "
            f"found {network!r}"
        )
    return values if network is None else {**values, "network": network}


def parse_settings(texts: Iterable[str], algo: str = "appo") -> dict[str, Any]:
    """Read settings written as ``learning_rate=1e-3``, ``network.hidden=128,128`` or, quoted for the shell,
    ``network.hidden=(128,128)``, and check their types."""
    from memlane.train.networks import NetworkConfig

    check_algorithm(algo)
    types = get_type_hints(algorithm_for(algo).Config) | RUNNER_SETTINGS
    types = {name: kind for name, kind in types.items() if name not in ("network", *_OPTION_NAMES)}
    types |= {f"network.{name}": kind for name, kind in get_type_hints(NetworkConfig).items()}
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"a setting is written KEY=VALUE, found {text!r}")
        if name in _OPTION_NAMES:
            raise OptionError(f"{name} is an option, not a setting: use {_flag(name)}")
        if name in _PYTHON_OPTIONS:
            raise OptionError(f"{name} can be set in Python only: {_in_python(name)}")
        if name == "network":
            names = ", ".join(f"network.{each.name}" for each in fields(NetworkConfig))
            raise OptionError(f"network has settings of its own: set one or more of {names}, found {text!r}")
        if name not in types:
            hint = _hint(name, types)
            known = ", ".join(sorted(types))
            raise OptionError(f"unknown setting {name!r}{f'; {hint}' if hint else ''} (known are {known})")
        parsed = _parse_value(name, value, types[name])
        if name.startswith("network."):
            settings.setdefault("network", {})[name.removeprefix("network.")] = parsed
        else:
            settings[name] = parsed
    return settings


def _parse_value(name: str, text: str, kind: Any) -> Any:
    value = text if get_origin(kind) is Literal else _parse_literal(text)
    if get_origin(kind) is tuple and isinstance(value, int):
        value = (value,)
    try:
        return convert(name, value, kind)
    except (TypeError, ValueError) as error:
        raise OptionError(str(error)) from None


def convert(name: str, value: Any, kind: Any) -> Any:
    """Return the value of an option or a setting as the type that it is declared with. ``TypeError`` if it is of
    another type, ``ValueError`` if it is not among the declared choices.

        >>> convert("max_steps", 1e6, int)
        1000000
        >>> convert("gamma", "high", float)
        Traceback (most recent call last):
        ...
        TypeError: gamma must be a number, found 'high'
    """
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    for each in kinds:
        if _accepts(each, value):
            if get_origin(each) is tuple:
                return tuple(int(item) for item in value)
            return each(value) if each in (int, float) else value
    if get_origin(kind) is Literal:
        hint = did_you_mean(str(value), get_args(kind))
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, found {value!r}{hint}")
    expected = " or ".join(_describe_type(each) for each in kinds if each is not NoneType)
    raise TypeError(f"{name} must be {expected}, found {value!r}")


def _accepts(kind: Any, value: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if kind is int:  # 1e6 is one
        integer = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
        return integer and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    if kind is Path:
        return isinstance(value, os.PathLike)
    if origin is Literal:
        return value in get_args(kind)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_accepts(int, item) for item in value)
    return isinstance(value, origin or kind)


def _describe_type(kind: Any) -> str:
    names = {
        int: "an integer", float: "a number", bool: "True or False", str: "a string", Path: "a path", Mapping: "a dict",
        tuple: "integers such as (64, 64)",
    }  # fmt: skip
    return names[get_origin(kind) or kind]


def _parse_literal(text: str) -> Any:
    """Read JSON or a Python literal; anything else stays text."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text


# ------------------------------------------------------------------------------------------- names of other libraries


def check_algorithm(algo: str) -> str:
    """Return ``algo``; ``OptionError`` if there is no algorithm of that name."""
    if algo not in ALGORITHMS:
        hint = did_you_mean(algo, ALGORITHMS, _ALGORITHM_SYNONYMS)
        raise OptionError(f"algo must be one of {', '.join(ALGORITHMS)}, found {algo!r}{hint}")
    return algo


def _hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown setting: a known name, or a sentence about it. Empty: nothing is near."""
    known = list(known)
    synonym = next((each for each in (*_SYNONYMS.get(name, ()), f"network.{name}") if each in known), None)
    if synonym is None:
        if name in _EXPLANATIONS:
            return _EXPLANATIONS[name]
        option = _OPTION_SYNONYMS.get(name, name)
        if option in _OPTION_NAMES:
            return f"did you mean the option {option}, {_flag(option)} of the command?"
        if option in _PYTHON_OPTIONS:
            return f"did you mean the option {option}?"
        if algos := [algo for algo in ALGORITHMS if name in get_type_hints(algorithm_for(algo).Config)]:
            return f"it is a setting of {' and '.join(algos)}"
    return did_you_mean(name, known, {} if synonym is None else {name: synonym}).removeprefix("; ")


def flag_hint(name: str) -> str:
    """What to write instead of an option that ``memlane train`` does not have. Empty: nothing is near."""
    if name in _OPTION_SYNONYMS:
        return f"did you mean {_flag(_OPTION_SYNONYMS[name])}?"
    if name in _PYTHON_OPTIONS:
        return f"it can be set in Python only: {_in_python(name)}"
    settings = {*RUNNER_SETTINGS, *(setting for known in _SYNONYMS.values() for setting in known)}
    nested = {setting.removeprefix("network.") for setting in settings if "." in setting}
    if name in nested:
        known: tuple[str, ...] = (f"network.{name}",)
    else:
        known = (name,) if name in settings else _SYNONYMS.get(name, ())
    if known:
        written = " or ".join(f"--set {setting}=VALUE" for setting in known if setting not in nested)
        return f"settings of the algorithm are written {written}"
    return _EXPLANATIONS.get(name, "").replace("set ", "--set ", 1)


def _in_python(option: str) -> str:
    return f"memlane.train.train(Options(..., {option}=...))"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


_ALGORITHM_SYNONYMS = {
    "ppo": "appo", "impala": "appo", "a2c": "appo", "a3c": "appo", "recurrentppo": "appo", "ppo_lstm": "appo",
    "td3": "sac", "ddpg": "sac", "tqc": "sac", "crossq": "sac",
    "ddqn": "dqn", "rainbow": "dqn", "c51": "dqn", "qrdqn": "dqn",
}  # fmt: skip
"""Algorithms of other libraries, and the nearest one of memlane's."""

_SYNONYMS: dict[str, tuple[str, ...]] = {
    "n_steps": ("n_step", "num_steps"),  # SB3: n-step returns off-policy, steps of a rollout on-policy
    "rollout_length": ("num_steps",), "unroll_length": ("num_steps",), "horizon": ("num_steps",),
    "steps": ("num_steps",),
    "n_epochs": ("update_epochs",), "num_epochs": ("update_epochs",), "epochs": ("update_epochs",),
    "num_learning_epochs": ("update_epochs",),
    "batch_size": ("minibatch_size",), "minibatch": ("minibatch_size",), "mini_batch_size": ("minibatch_size",),
    "minibatch_size": ("batch_size",), "batch": ("batch_size", "minibatch_size"),
    "clip_range": ("clip_coef",), "clip_param": ("clip_coef",), "clip": ("clip_coef",), "clip_ratio": ("clip_coef",),
    "lam": ("gae_lambda",), "lambda": ("gae_lambda",), "lambda_": ("gae_lambda",),
    "entropy_coef": ("ent_coef", "temperature"), "entropy_coeff": ("ent_coef", "temperature"),
    "ent_coef": ("temperature",), "alpha": ("temperature", "priority_alpha"),
    "value_coef": ("vf_coef",), "value_loss_coef": ("vf_coef",), "vf_loss_coeff": ("vf_coef",),
    "lr": ("learning_rate",), "policy_lr": ("learning_rate",), "q_lr": ("learning_rate",),
    "schedule": ("lr_schedule",), "norm_adv": ("normalize_advantages",),
    "normalize_advantage": ("normalize_advantages",),
    "stop_kl": ("target_kl",), "kl_target": ("desired_kl",), "grad_clip": ("max_grad_norm",), "discount": ("gamma",),
    "capacity": ("buffer_size",), "replay_size": ("buffer_size",), "memory_size": ("buffer_size",),
    "warm_up": ("learning_starts",), "warmup_steps": ("learning_starts",), "random_steps": ("learning_starts",),
    "exploration_initial_eps": ("epsilon_start",), "start_e": ("epsilon_start",), "epsilon": ("epsilon_start",),
    "exploration_final_eps": ("epsilon_end",), "end_e": ("epsilon_end",), "final_epsilon": ("epsilon_end",),
    "target_network_frequency": ("target_update_interval",), "target_update_freq": ("target_update_interval",),
    "polyak": ("tau",), "utd_ratio": ("samples_per_insert",), "replay_ratio": ("samples_per_insert",),
    "prioritized_replay_alpha": ("priority_alpha",), "prioritized_replay_beta": ("priority_beta",),
    "beta": ("priority_beta",), "nstep": ("n_step",), "multi_step": ("n_step",), "double_q": ("double",),
    "net_arch": ("network.hidden", "hidden"), "hidden_sizes": ("network.hidden", "hidden"),
    "lstm_hidden_size": ("network.lstm", "lstm"), "log_std_init": ("network.log_std", "log_std"),
    "norm_obs": ("network.normalize_observations", "normalize_observations"), "policy_kwargs": ("network",),
    "num_threads": ("torch_threads",), "timeout": ("rollout_timeout",),
}  # fmt: skip
"""Settings of Stable-Baselines3, CleanRL, RLlib and rsl_rl, and their names here; the first name that the algorithm has
is suggested."""

_OPTION_SYNONYMS = {
    "total_timesteps": "max_steps", "max_timesteps": "max_steps", "n_envs": "num_envs", "num_workers": "collectors",
    "num_actors": "collectors", "num_collectors": "collectors", "sim_backend": "backend", "random_seed": "seed",
}  # fmt: skip
"""Settings of other libraries that are options here."""

_EXPLANATIONS = {
    "num_minibatches": "set minibatch_size instead: num_steps * environments / num_minibatches",
    "anneal_lr": "set lr_schedule instead: linear or constant",
    "train_freq": "set samples_per_insert instead: batch_size * gradient steps / environment steps",
    "train_frequency": "set samples_per_insert instead: batch_size * gradient steps / environment steps",
    "gradient_steps": "set samples_per_insert instead: batch_size * gradient steps / environment steps",
    "policy_frequency": "the actor is updated in every gradient step",
    "target_network_frequency": "target networks follow by tau in every gradient step",
    "target_update_interval": "target networks follow by tau in every gradient step",
    "autotune": "the temperature is learned unless it is set",
    "clip_vloss": "the value loss is not clipped",
    "clip_range_vf": "the value loss is not clipped",
}
"""Settings of other libraries that no single setting replaces."""
