"""The command ``memlane``. A sub-command is a function here: it parses nothing, computes nothing, calls and prints.

To add one, write the function and put it into ``COMMANDS``. What is slow to import is imported inside it, so that
``memlane --help`` stays quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from memlane.core import MemlaneError

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from rich.console import Console

    from memlane.train.trainer import Options

_Settings = Annotated[
    tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="KEY=VALUE ...")
]


def build(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    debug: bool = False,
    portable: bool = False,
) -> None:
    """Compile an environment that is written in C (or C++), and check what it declares.

    Args:
        file: The C file.
        output: The library to write, or the folder for it; otherwise beside the file, with the ending .so.
        debug: Report undefined behaviour while it runs, and let debuggers see lines.
        portable: Let it run on other machines too, at some cost in speed; otherwise it is for this processor.
    """
    from memlane.native.build import build

    library = build(file, output, debug=debug, native=not portable)
    _say(f'{library} is ready: memlane.native.load("{library}", num_envs=1024)')


def new(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    folder: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> None:
    """Write a folder with a small environment in C that works, its test and its training, to begin your own with.

    Args:
        name: What the environment is called; letters, digits and _.
        folder: Where to; otherwise a folder of that name, here.
    """
    from memlane.native.new import new

    into = new(name, folder)
    _say(f"{into} is ready:\n\n  cd {into}\n  memlane build {name}.c\n  pytest\n  python train.py")


def envs() -> None:
    """List the native environments that come with memlane: what they take and give, the steps of an episode, and the
    algorithms that have a preset for them, with the mean return at which a training with it is over."""
    from rich.table import Table

    from memlane.native import built_in, built_in_names
    from memlane.train.presets import PRESETS

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("observation", "action", "steps", "presets", "settings"):
        table.add_column(title, overflow="fold")
    for name in built_in_names():
        spec = built_in(name)
        presets = [f"{algo} {found[name].target:g}" for algo, found in PRESETS.items() if name in found]
        table.add_row(
            name if spec.num_agents == 1 else f"{name} ({spec.num_agents} agents)",
            _brief(spec.observation_space),
            _brief(spec.action_space),
            str(spec.max_episode_steps or "no limit"),
            ", ".join(presets) or "-",
            ", ".join(f"{one.name}={one.value:g}" for one in spec.settings),
        )
    console = _console()
    if not console.is_terminal:
        console.width = _WIDE  # one line for each: programs read it
    console.print(table)
    others = ", ".join(name for name in PRESETS["appo"] if name not in built_in_names())
    _say(f"\nGymnasium's with a preset: {others}. Any other id of Gymnasium can be trained on as well.")


def train(
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")],
    algo: Literal["appo", "sac", "dqn"] = "appo",
    collectors: int = 1,
    num_envs: int | None = None,
    backend: Literal["native", "gymnasium", "mujoco"] | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    folder: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    max_lag: int = 1,
    deterministic: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    settings: _Settings = (),
) -> None:
    """Train on an environment, watch it learn, and keep all of it in a folder. Ctrl-C saves and ends.

    Args:
        env: An id of Gymnasium, a native environment (see `memlane envs`), or a library from `memlane build`.
        algo: appo; sac for continuous actions and dqn for discrete ones learn from a replay.
        collectors: How many processes collect.
        num_envs: Environments of each collector; otherwise the preset's.
        backend: What steps the environments; otherwise the fastest that has them.
        seed: Of everything that is random.
        max_steps: End after so many environment steps; otherwise the preset's.
        max_seconds: End after so many seconds.
        target: End at this mean return of 100 episodes; otherwise the preset's. inf: never.
        folder: Of the run; otherwise runs/ENV-TIME.
        max_lag: How many versions the policy may be ahead of the data; 0 is synchronous.
        deterministic: The same seed gives the same numbers, at some cost in speed.
        as_json: A line of JSON for every update, for programs.
        settings: Of the algorithm, over the preset's: learning_rate=1e-3 network.hidden=(128,128)
    """
    _warm_up()
    from memlane.train.options import settings_of
    from memlane.train.trainer import Options

    config = settings_of([one for some in settings for one in some], algo)
    options = Options(
        env, algo, collectors, num_envs, backend, seed, max_steps, max_seconds, target, folder, max_lag, deterministic,
        config=config,
    )  # fmt: skip
    _train(options, resume=False, as_json=as_json)


def resume(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    max_steps: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Go on with a training where its last checkpoint is.

    Args:
        run: The folder of the run.
        max_steps: End after so many environment steps, those before included; otherwise as it was told.
        max_seconds: End after so many seconds from now; otherwise as it was told.
        target: End at this mean return; otherwise as it was told. inf: never.
        as_json: A line of JSON for every update, for programs.
    """
    _warm_up()
    from memlane.train.trainer import options_of

    told = options_of(run)
    options = replace(
        told,
        max_steps=told.max_steps if max_steps is None else max_steps,
        max_seconds=told.max_seconds if max_seconds is None else max_seconds,
        target=told.target if target is None else target,
    )
    _train(options, resume=True, as_json=as_json)


def evaluate(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    episodes: int = 20,
    render: Literal["gif"] | None = None,
) -> None:
    """Let the policy of a run do what it thinks best, and tell its returns.

    Args:
        run: The folder of the run.
        episodes: How many.
        render: Write the first episode to evaluation.gif in that folder, and show it in the report.
    """
    _need_torch()
    from memlane.train.trainer import OptionError, evaluate, options_of, policy_of

    if episodes < 1:
        raise OptionError(f"episodes must be at least 1, found {episodes}")
    options, policy = options_of(run), policy_of(run)
    assert options.backend is not None
    found = evaluate(policy, options.env, options.backend, episodes=episodes, settings=options.env_settings)
    _say(
        f"{options.env}: {_returns(found)}, from {found['min_return']:g} to {found['max_return']:g}; "
        f"{found['mean_length']:g} steps each"
    )
    if render is not None:
        from memlane.train.ui.gif import write_film
        from memlane.train.ui.report import write_report

        film = write_film(policy, options, run / "evaluation.gif")
        _say(f"{film} shows the first episode, and so does {write_report(run)}")


def doctor() -> int:
    """Look whether this machine has what memlane needs, and say what to do where it has not. Ends with 1 if not."""
    from memlane.doctor import examine

    found = examine()
    console, width = _console(), max(len(one.what) for one in found)
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for one in found:
        console.print(f"{one.state:<4}", style=colours[one.state], end="  ", highlight=False)
        _say(f"{one.what:<{width}}  {one.found}" + (f"\n{'':{width + 8}}{one.fix}" if one.fix else ""))
    return int(any(one.state == "fail" for one in found))


def clean() -> None:
    """Remove the named shared memory of processes that are dead. Whoever still uses some of it keeps it."""
    from memlane.core import reclaim
    from memlane.core.memory import format_bytes
    from memlane.core.names import directory

    removed = reclaim()
    for one in removed:
        _say(f"removed {one.path}, {format_bytes(one.nbytes)}, of process {one.owner.pid}")
    if not removed:
        _say(f"nothing to remove: {directory()} has no segment of a dead process")


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train, "eval": evaluate, "resume": resume, "envs": envs, "build": build, "new": new, "doctor": doctor,
    "clean": clean,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command ends with: 0; 1 after an error that memlane tells of, or that `doctor` finds; 2 when it was
    called wrongly; 130 after Ctrl-C, as shells have it."""
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="memlane", description=_DESCRIPTION, args=arguments, config=(tyro.conf.FlagCreatePairsOff,)
        )
    except MemlaneError as error:
        _console(stderr=True).print("error:", style="bold red", end=" ", highlight=False)
        _say(str(error), stderr=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return int(code or 0)


_DESCRIPTION = "Reinforcement learning through shared memory: training, and environments in C."
_WIDE = 1000
"""Characters: more than any row has."""


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _say(text: str, *, stderr: bool = False) -> None:
    """As it is: [brackets] and numbers in paths and compilers' messages mean nothing to rich, and lines stay whole."""
    _console(stderr=stderr).print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _train(options: Options, *, resume: bool, as_json: bool) -> None:
    from memlane.train.trainer import settle, train
    from memlane.train.ui.live_display import JsonLines, Told, display_for

    options = settle(options)
    assert options.max_steps is not None
    assert options.num_envs is not None
    told = Told(
        options.env, str(options.folder), options.max_steps, options.target, options.algo, options.collectors,
        options.num_envs, options.backend or "",
    )  # fmt: skip
    display = display_for(told, as_json=as_json)
    display.start()
    try:
        result = train(options, on_update=display.update, resume=resume)
    finally:
        display.stop()
    if isinstance(display, JsonLines):
        display.say("result", asdict(result))
    else:
        why = "stopped by Ctrl-C" if result.reason == "Ctrl-C" else result.reason
        evaluated = f"\nevaluated: {_returns(result.evaluation)}" if result.evaluation else ""
        where = shlex.quote(str(result.folder))
        _say(
            f"\n{why}: {result.env_steps:,} steps in {result.seconds:.1f} s{evaluated}\n\n"
            f"  {where}/report.html\n"
            f"  memlane eval {where} --render gif\n"
            f"  memlane resume {where}"
        )
    if result.reason == "Ctrl-C":
        raise KeyboardInterrupt


def _returns(evaluation: dict[str, Any]) -> str:
    mean, spread, many = (evaluation[name] for name in ("mean_return", "std_return", "episodes"))
    return f"return {mean:.4g} ± {spread:.3g} over {many} episodes"


def _warm_up() -> None:
    """Start the server that collectors are forked from. It imports torch while this process does the same, which saves
    time where a second core is idle, and none where both are taken."""
    _need_torch()
    from memlane.runner.process_collectors import start_fork_server
    from memlane.train.interrupts import uninterrupted

    start_fork_server()
    with uninterrupted() as interrupted:  # in the middle of its own import, torch answers Ctrl-C with an abort
        importlib.import_module("torch")
    if interrupted():
        raise KeyboardInterrupt


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("training needs torch: pip install 'memlane[torch]'")


class MissingPackage(MemlaneError, ImportError):
    """A command needs a package that memlane does not."""


def _brief(space: Space[Any]) -> str:
    """In the words of Gymnasium, without the bounds of each number."""
    from gymnasium.spaces import Box, Dict

    if isinstance(space, Dict):
        return ", ".join(f"{name}: {_brief(one)}" for name, one in space.spaces.items())
    if not isinstance(space, Box):
        return str(space)
    low, high = space.low.min(), space.high.max()
    bounds = f" {low:g} to {high:g}" if (space.low == low).all() and (space.high == high).all() else ""
    return f"{space.dtype}{list(space.shape)}{bounds}"


if __name__ == "__main__":
    sys.exit(main())
