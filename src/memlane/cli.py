"""The command ``memlane``. Each sub-command is a function here that calls the library and prints.

To add a sub-command, write the function and add it to ``COMMANDS``. Slow imports are inside the functions, so that
``memlane --help`` stays quick.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import inspect
import json
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from memlane.core import MemlaneError
from memlane.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from rich.console import Console

    from memlane.train.options import Options
    from memlane.train.run import Metrics


def _option(default: str, *, name: str | None = None, metavar: str | None = None) -> Any:
    """Describe an option whose default is not a value: ``default`` is what the help says instead of None."""
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=f"(default: {default})")


_FLAG = tyro.conf.arg(help_behavior_hint="")
_JSON = tyro.conf.arg(name="json", help_behavior_hint="")
_PRESET = _option("from the preset")
_UNCHANGED = _option("as before")
_RUN_DIR = tyro.conf.arg(metavar="RUN_DIR")
_SETTINGS_HELP = (
    "`python -m pydoc memlane.train.APPOConfig` explains those of appo; SACConfig, DQNConfig and NetworkConfig have "
    "the others."
)
_Settings = Annotated[
    tuple[tuple[str, ...], ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        name="set",
        metavar="KEY=VALUE ...",
        help="Algorithm settings that override the preset: learning_rate=1e-3 network.hidden=128,128. "
        + _SETTINGS_HELP,
    ),
]
_SweptSettings = Annotated[
    tuple[tuple[str, ...], ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        name="set",
        metavar="KEY=VALUE,... ...",
        help="Algorithm settings that override the preset; a run for each of the values: learning_rate=1e-3,3e-4 "
        "network.hidden=(64,64),(128,128). " + _SETTINGS_HELP,
    ),
]


def build(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    output: Annotated[Path | None, _option("next to the source file, with the suffix .so")] = None,
    debug: Annotated[bool, _FLAG] = False,
    portable: Annotated[bool, _FLAG] = False,
) -> None:
    """Compile an environment written in C or C++ and check its declaration.

    Args:
        file: C or C++ source file.
        output: Library to write, or directory to write it to.
        debug: Compile with debug symbols and the undefined-behaviour sanitizer.
        portable: Compile for any processor of this architecture instead of this machine's, at some cost in speed.
    """
    from memlane.native.build import build

    library = build(file, output, debug=debug, native=not portable)
    _print(f'{library} is ready: memlane.load("{library}", num_envs=1024)')


def new(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    directory: Annotated[Path | None, _option("./NAME", name="dir", metavar="PATH")] = None,
) -> None:
    """Create a directory with a small working C environment, its test and a training script, to start your own from.

    Args:
        name: Name of the environment: letters, digits and _, beginning with a letter.
        directory: Directory to create.
    """
    from memlane.native.new import new

    created = new(name, directory)
    _print(f"{created} is ready:\n\n  cd {created}\n  memlane build {name}.c\n  pytest\n  python train.py")


def envs() -> None:
    """List memlane's native environments: spaces, step limit of an episode, presets (algorithm and target return) and
    settings with their defaults."""
    from rich.table import Table

    from memlane.native import built_in_names
    from memlane.native.lowlevel import built_in
    from memlane.train.presets import PRESETS

    console = _console()
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "observation", "action", "steps", "presets", "settings"):
        # These two fold in a narrow terminal; the others have short lines there, which leave room for them.
        table.add_column(heading, no_wrap=heading not in ("observation", "settings"), overflow="fold")
    for name in built_in_names():
        spec = built_in(name)
        presets = [f"{algo} {by_env[name].target:g}" for algo, by_env in PRESETS.items() if name in by_env]
        table.add_row(
            name if spec.num_agents == 1 else f"{name} ({spec.num_agents} agents)",
            _format_space(spec.observation_space),
            _format_space(spec.action_space, "\n" if console.is_terminal else " "),
            str(spec.max_episode_steps or "no limit"),
            (",\n" if console.is_terminal else ", ").join(presets) or "-",
            ", ".join(f"{setting.name}={setting.value:g}" for setting in spec.settings),
        )
    if not console.is_terminal:
        console.width = _WIDE  # one line per environment, for programs that read the table
    console.print(table)
    others = ", ".join(name for name in PRESETS["appo"] if name not in built_in_names())
    _print(f"\nGymnasium environments with a preset: {others}. `memlane train` takes other Gymnasium ids too.")


def train(
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")],
    algo: Annotated[str, tyro.conf.arg(metavar="{appo,sac,dqn}")] = "appo",
    collectors: int = 1,
    num_envs: Annotated[int | None, _PRESET] = None,
    backend: Annotated[
        str | None,
        _option("native where memlane has ENV, else gymnasium", metavar="{native,gymnasium,mujoco}"),
    ] = None,
    seed: int = 0,
    max_steps: Annotated[int | None, _PRESET] = None,
    max_seconds: Annotated[float | None, _option("no limit")] = None,
    target: Annotated[float | None, _PRESET] = None,
    run_dir: Annotated[Path | None, _option("runs/ENV-ALGO-sSEED-TIME", metavar="PATH")] = None,
    save_seconds: float = 60.0,
    max_lag: int = 1,
    deterministic: Annotated[bool, _FLAG] = False,
    as_json: Annotated[bool, _JSON] = False,
    settings: _Settings = (),
) -> int:
    """Train a policy. Checkpoints, metrics and a report are written to a run directory. Ctrl-C, SIGTERM and SIGHUP save
    and stop.

    Args:
        env: Gymnasium environment id, native environment (see `memlane envs`), or library built by `memlane build`.
        algo: appo (asynchronous PPO), sac (off-policy, continuous actions) or dqn (off-policy, discrete actions).
        collectors: Number of collector processes.
        num_envs: Environments per collector.
        backend: Implementation of the environments: native (in C) or gymnasium; mujoco is the same as gymnasium.
        seed: Random seed.
        max_steps: Stop after this many environment steps.
        max_seconds: Stop after this many seconds.
        target: Stop when the mean return of the last 100 episodes reaches this value; inf: never.
        run_dir: Directory of the run.
        save_seconds: Write a checkpoint at least this often, in seconds.
        max_lag: Largest policy lag of a rollout when it is learned from, in weight versions; 0: synchronous.
        deterministic: Give equal results for equal seeds. Slower.
        as_json: Print a line of JSON for every update instead of the live display.
    """
    _check_algorithm(algo)
    if () in settings:
        raise UsageError("--set needs one or more KEY=VALUE, found none")
    _warm_up()
    from memlane.train.options import Options, parse_settings

    config = parse_settings([setting for group in settings for setting in group], algo)
    options = Options(
        env, algo, collectors, num_envs, backend, seed, max_steps, max_seconds, target, run_dir, max_lag, deterministic,
        save_seconds=save_seconds, config=config,
    )  # fmt: skip
    return _train(options, resume=False, as_json=as_json)


def resume(
    run_dir: Annotated[Path, tyro.conf.Positional, _RUN_DIR],
    max_steps: Annotated[int | None, _UNCHANGED] = None,
    max_seconds: Annotated[float | None, _UNCHANGED] = None,
    target: Annotated[float | None, _UNCHANGED] = None,
    save_seconds: Annotated[float | None, _UNCHANGED] = None,
    as_json: Annotated[bool, _JSON] = False,
    trust: Annotated[bool, _FLAG] = False,
) -> int:
    """Resume a run from its last checkpoint. A run that has reached its target or its limit of steps is only evaluated
    again.

    Args:
        run_dir: Directory of the run.
        max_steps: Stop after this many environment steps, including those before the checkpoint.
        max_seconds: Stop after this many seconds from now.
        target: Stop when the mean return of the last 100 episodes reaches this value; inf: never.
        save_seconds: Write a checkpoint at least this often, in seconds.
        as_json: Print a line of JSON for every update instead of the live display.
        trust: Load the code that the run names: a library (.so), or a module of a Gymnasium environment.
    """
    _warm_up()
    from memlane.train.options import load_options

    before = load_options(run_dir, trust=trust)
    options = replace(
        before,
        max_steps=before.max_steps if max_steps is None else max_steps,
        max_seconds=before.max_seconds if max_seconds is None else max_seconds,
        target=before.target if target is None else target,
        save_seconds=before.save_seconds if save_seconds is None else save_seconds,
    )
    return _train(options, resume=True, as_json=as_json)


def evaluate(
    run_dir: Annotated[Path, tyro.conf.Positional, _RUN_DIR],
    episodes: int = 20,
    render: Annotated[str | None, _option("no rendering", metavar="{gif}")] = None,
    trust: Annotated[bool, _FLAG] = False,
) -> None:
    """Evaluate a run's policy deterministically and print its returns.

    Args:
        run_dir: Directory of the run.
        episodes: Number of episodes.
        render: Write the first episode to evaluation.gif in the run directory and show it in the report.
        trust: Load the code that the run names: a library (.so), or a module of a Gymnasium environment.
    """
    if render not in (None, "gif"):
        raise UsageError(f"render must be gif, found {render!r}")
    _need_torch()
    from memlane.train.options import load_options
    from memlane.train.trainer import evaluate, load_policy

    options, policy = load_options(run_dir, trust=trust), load_policy(run_dir, trust=trust)
    assert options.backend is not None
    stats = evaluate(policy, options.env, options.backend, episodes=episodes, env_settings=options.env_settings)
    _print(
        f"{options.env}: {_format_returns(stats)}, from {stats['min_return']:g} to {stats['max_return']:g}; "
        f"mean episode length {stats['mean_length']:g}"
    )
    if render is not None:
        from memlane.train.ui.gif import write_gif
        from memlane.train.ui.report import write_report

        gif = write_gif(policy, options, run_dir / "evaluation.gif")
        _print(f"{gif} shows the first episode; it is in {write_report(run_dir)} too")


def report(run_dir: Annotated[Path, tyro.conf.Positional, _RUN_DIR]) -> None:
    """Write report.html of a run again, also while it goes on.

    Args:
        run_dir: Directory of the run.
    """
    from memlane.train.options import read_saved_options
    from memlane.train.ui.report import write_report

    read_saved_options(run_dir)  # it says what is wrong with a directory that is no run
    _print(str(write_report(run_dir)))


def runs(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = Path("runs"),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the runs in a directory and in the directories below it: environment, algorithm, seed, steps, return, state
    (running, finished, stopped, failed or killed) and path.

    Args:
        directory: Directory to look in.
        as_json: Print a line of JSON for every run instead of a table.
    """
    from memlane.train.runs import find_runs
    from memlane.train.ui.formatting import short_number

    found = find_runs([directory])
    if as_json:
        for run in found:
            print(json.dumps(run.as_json()))
        return
    if not found:
        _print(f"{directory} has no runs; `memlane train` makes one in runs/")
        return
    from rich.table import Table
    from rich.text import Text

    console = _console()
    table = Table(box=None, pad_edge=False)
    for heading in ("env", "algo", "seed", "steps", "return", "state", "run"):
        numeric = heading in ("seed", "steps", "return")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True, overflow="fold")
    colours = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red", "stopped": "yellow"}
    for run in found:
        cells = (run.env, run.algo, str(run.seed), short_number(run.steps), short_number(run.mean_return))
        state = run.state if run.state != "running" else f"running ({run.holder})"
        path = Text(str(run.path), no_wrap=True)
        table.add_row(*map(Text, cells), Text(state, style=colours.get(run.state, "")), path)
    if not console.is_terminal:
        console.width = _WIDE  # one line per run, for programs that read the table
    console.print(table, soft_wrap=True)


def compare(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR ...")],
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("compare.html"),
) -> None:
    """Draw runs in one page: runs that differ only in their seed are one line, with the range of their returns.

    Args:
        run_dirs: Directories of runs, or directories that have runs in them, such as that of a sweep.
        output: Page to write.
    """
    from memlane.train.runs import find_runs
    from memlane.train.ui.report import write_comparison

    if not run_dirs:
        raise UsageError("compare needs one or more run directories, found none")
    for directory in run_dirs:
        if not find_runs([directory]):
            raise UsageError(f"{directory} has no runs; `memlane runs DIR` lists those in DIR")
    _print(str(write_comparison(find_runs(run_dirs), output)))


def sweep(
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")],
    seeds: Annotated[str, tyro.conf.arg(metavar="N|FIRST-LAST|SEED,...")] = "5",
    parallel: Annotated[int | None, _option("as many as the cores have room for")] = None,
    algo: Annotated[str, tyro.conf.arg(metavar="{appo,sac,dqn}")] = "appo",
    collectors: int = 1,
    num_envs: Annotated[int | None, _PRESET] = None,
    backend: Annotated[
        str | None,
        _option("native where memlane has ENV, else gymnasium", metavar="{native,gymnasium,mujoco}"),
    ] = None,
    max_steps: Annotated[int | None, _PRESET] = None,
    max_seconds: Annotated[float | None, _option("no limit")] = None,
    target: Annotated[float | None, _PRESET] = None,
    directory: Annotated[Path | None, _option("runs/sweep-ENV-ALGO-TIME", name="dir", metavar="PATH")] = None,
    save_seconds: float = 60.0,
    max_lag: int = 1,
    deterministic: Annotated[bool, _FLAG] = False,
    settings: _SweptSettings = (),
) -> int:
    """Train with several seeds, and with every combination of several values of settings, and compare the runs in one
    page. A run that fails does not stop the others. Ctrl-C stops all; what they have saved stays.

    Args:
        env: Gymnasium environment id, native environment (see `memlane envs`), or library built by `memlane build`.
        seeds: Seeds: a number of them (5 is 0 to 4), a range (100-119), or a list (3,7).
        parallel: Runs at the same time; 1: one after the other.
        algo: appo (asynchronous PPO), sac (off-policy, continuous actions) or dqn (off-policy, discrete actions).
        collectors: Number of collector processes of each run.
        num_envs: Environments per collector.
        backend: Implementation of the environments: native (in C) or gymnasium; mujoco is the same as gymnasium.
        max_steps: Stop each run after this many environment steps.
        max_seconds: Stop each run after this many seconds.
        target: Stop a run when the mean return of its last 100 episodes reaches this value; inf: never.
        directory: Directory to make for the runs.
        save_seconds: Write checkpoints at least this often, in seconds.
        max_lag: Largest policy lag of a rollout when it is learned from, in weight versions; 0: synchronous.
        deterministic: Give equal results for equal seeds. Slower.
    """
    _check_algorithm(algo)
    if () in settings:
        raise UsageError("--set needs one or more KEY=VALUE, found none")
    _need_torch()
    from memlane.train.options import Options
    from memlane.train.sweep import Sweep, parse_seeds

    options = Options(
        env, algo, collectors, num_envs, backend, 0, max_steps, max_seconds, target, None, max_lag, deterministic,
        save_seconds=save_seconds,
    )  # fmt: skip
    texts = [text for group in settings for text in group]
    plan = Sweep(options, parse_seeds(seeds), texts, directory=directory, parallel=parallel)

    def say(text: str) -> None:
        with _terminal_may_close():
            _print(text)

    return plan.run(say)


def doctor() -> int:
    """Check that this machine meets memlane's requirements and print a fix for each problem. The exit code is 1 if a
    requirement is not met."""
    from memlane.doctor import examine

    findings = examine()
    console, width = _console(), max(len(finding.subject) for finding in findings)
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        console.print(f"{finding.state:<4}", style=colours[finding.state], end="  ", highlight=False)
        _print(f"{finding.subject:<{width}}  {finding.found}")
        if finding.fix:
            _print(f"{'':{width + 8}}{finding.fix}")
    return int(any(finding.state == "fail" for finding in findings))


def clean() -> None:
    """Remove named shared memory that dead processes left behind. Live processes that have it mapped can go on using
    it."""
    from memlane.core import reclaim
    from memlane.core.memory import format_bytes
    from memlane.core.names import directory

    removed = reclaim()
    for leftover in removed:
        _print(f"removed {leftover.path}, {format_bytes(leftover.nbytes)}, of process {leftover.owner.pid}")
    if not removed:
        _print(f"nothing to remove: {directory()} has no segment of a dead process")


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train, "eval": evaluate, "resume": resume, "report": report, "runs": runs, "compare": compare,
    "sweep": sweep, "envs": envs, "build": build, "new": new, "doctor": doctor, "clean": clean,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 after a memlane error, a failed check of ``doctor``, a failed run
    of ``sweep`` or when the reader of the output is gone (``| head``); 2 after a usage error; 130, 143 and 129 after
    Ctrl-C, SIGTERM and SIGHUP, as in shells."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not arguments:
            _print_help()
            return 2
        _check_command(arguments[0])
        if arguments[0] in ("train", "sweep"):
            _check_flags(arguments[0], arguments[1:])
        code = _parse_and_call(arguments)
    except MemlaneError as error:
        _console(stderr=True).print("error:", style="bold red", end=" ", highlight=False)
        _print(str(error), stderr=True)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _output_has_no_reader():
            raise
        _discard_output()
        return 1
    return int(code or 0)


class UsageError(MemlaneError):
    """The command line names something unknown, or lacks a value."""


class MissingPackage(MemlaneError, ImportError):
    """A command needs a package that is not installed."""


_DESCRIPTION = (
    "Reinforcement learning through shared memory: train policies, and build environments in C. "
    "`memlane --version` prints the version."
)
_WIDE = 1000
"""Console width in characters: more than any table row has."""


def _parse_and_call(arguments: Sequence[str]) -> Any:
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="memlane",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )


def _output_has_no_reader() -> bool:
    """Whether standard output is a pipe that no process reads. The help of the parser raises then; rich exits."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Nobody reads the output any more, and the interpreter flushes it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def _terminal_may_close() -> Iterator[None]:
    """A terminal that is closed sends SIGHUP, which ends a run in order; what is printed meanwhile is lost."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _discard_output()


def _print_help() -> None:
    with contextlib.suppress(SystemExit):
        _parse_and_call(["--help"])


def _check_command(name: str) -> None:
    """The parser suggests no command for an unknown one."""
    if not name.startswith("-") and name not in COMMANDS:
        raise UsageError(
            f"unknown command {name!r}{did_you_mean(name, COMMANDS)}\nCommands: {', '.join(COMMANDS)}. "
            "`memlane --help` describes them."
        )


def _check_flags(command: str, arguments: Sequence[str]) -> None:
    """The parser does not know the names of other libraries, nor settings that are written as options."""
    known = {*inspect.signature(COMMANDS[command]).parameters, "dir", "json", "set", "help"}
    for argument in arguments:
        if argument == "--":
            return
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and name not in known:
            from memlane.train.options import flag_hint

            if hint := flag_hint(name):
                raise UsageError(f"unknown option {argument}; {hint}")
            if not did_you_mean(name, known):  # else the parser's message has the option that is near
                raise UsageError(
                    f"unknown option {argument}; `memlane {command} --help` lists the options, and settings of the "
                    "algorithm are written --set KEY=VALUE"
                )


def _check_algorithm(name: str) -> None:
    """Refuse an unknown algorithm before the fork server and torch are started for it."""
    from memlane.train.algorithms import ALGORITHMS

    if name not in ALGORITHMS:
        from memlane.train.options import OptionError, check_algorithm

        try:
            check_algorithm(name)
        except OptionError as error:
            raise UsageError(str(error)) from None


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _print(text: str, *, stderr: bool = False) -> None:
    """Print ``text`` unchanged: brackets and numbers in paths and compiler messages are no markup, and long lines are
    not wrapped."""
    _console(stderr=stderr).print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _train(options: Options, *, resume: bool, as_json: bool) -> int:
    from memlane.train.interrupts import exit_code
    from memlane.train.options import names_code, resolve_options
    from memlane.train.trainer import train
    from memlane.train.ui.formatting import resume_command
    from memlane.train.ui.live_display import Display, JsonLines, RunSummary, make_display

    options = resolve_options(options)
    display: Display | None = None

    def show(run_dir: Path) -> Display:
        assert options.max_steps is not None
        assert options.num_envs is not None
        summary = RunSummary(
            options.env, str(run_dir), options.max_steps, options.target, options.algo, options.collectors,
            options.num_envs, options.backend or "",
        )  # fmt: skip
        return make_display(summary, as_json=as_json)

    def start(run_dir: Path) -> None:
        nonlocal display
        with _terminal_may_close():
            display = show(run_dir)
            display.start()

    def update(metrics: Metrics) -> None:
        assert display is not None
        with _terminal_may_close():
            display.update(metrics)

    try:
        result = train(options, on_start=start, on_update=update, resume=resume)
    finally:
        if display is not None:
            with _terminal_may_close():
                display.stop()
    with _terminal_may_close():
        if as_json:
            shown = show(result.run_dir) if display is None else display
            assert isinstance(shown, JsonLines)
            shown.write("result", asdict(result))
            return exit_code(result.stopped_by)
        assert options.max_steps is not None
        evaluated = f"\nevaluated: {_format_returns(result.evaluation)}" if result.evaluation else ""
        run_dir = shlex.quote(str(result.run_dir))
        trusted = f"{run_dir} --trust" if names_code(options.env) else run_dir
        how = f"{result.env_steps:,} steps in {result.seconds:.1f} s"
        if display is None:
            how += "; the run was finished before, and nothing was trained. The last command below trains on"
        _print(
            f"\n{result.reason}: {how}{evaluated}\n\n"
            f"  {run_dir}/report.html\n"
            f"  memlane eval {trusted} --render gif\n"
            f"  {resume_command(trusted, result.stopped_by, options.max_steps, result.env_steps)}"
        )
    return exit_code(result.stopped_by)


def _format_returns(evaluation: dict[str, Any]) -> str:
    mean, std, episodes = (evaluation[name] for name in ("mean_return", "std_return", "episodes"))
    return f"return {mean:.4g} ± {std:.3g} over {episodes} episodes"


def _warm_up() -> None:
    """Start the server that collectors are forked from. It imports torch while this process does the same, which saves
    time where a second core is idle, and none where both are busy."""
    _need_torch()
    from memlane.runner.process_collectors import start_fork_server
    from memlane.train.interrupts import deferred_interrupts

    start_fork_server()
    with deferred_interrupts() as interrupts:  # torch aborts on Ctrl-C during its import
        importlib.import_module("torch")
    interrupts.raise_arrived()


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage('this command needs torch: pip install "memlane[torch]"')


def _format_space(space: Space[Any], before_bounds: str = " ") -> str:
    """Gymnasium's notation, without the bounds of single elements."""
    from gymnasium.spaces import Box, Dict

    if isinstance(space, Dict):
        return ", ".join(f"{name}: {_format_space(subspace)}" for name, subspace in space.spaces.items())
    if not isinstance(space, Box):
        return str(space)
    low, high = space.low.min(), space.high.max()
    bounds = f"{before_bounds}{low:g} to {high:g}" if (space.low == low).all() and (space.high == high).all() else ""
    return f"{space.dtype}{list(space.shape)}{bounds}"
