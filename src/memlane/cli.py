"""The command ``memlane``. A sub-command is a function here: it parses nothing, computes nothing, calls and prints.

To add one, write the function and put it into ``COMMANDS``. What is slow to import is imported inside it, so that
``memlane --help`` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from memlane.core import MemlaneError

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from rich.console import Console


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
    """List the native environments that come with memlane: what they take and give, and the steps of an episode."""
    from rich.table import Table

    from memlane.native import built_in, built_in_names

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("observation", "action", "steps", "settings"):
        table.add_column(title, overflow="fold")
    for name in built_in_names():
        spec = built_in(name)
        table.add_row(
            name if spec.num_agents == 1 else f"{name} ({spec.num_agents} agents)",
            _brief(spec.observation_space),
            _brief(spec.action_space),
            str(spec.max_episode_steps or "no limit"),
            ", ".join(f"{one.name}={one.value:g}" for one in spec.settings),
        )
    console = _console()
    if not console.is_terminal:
        console.width = _WIDE  # one line for each: programs read it
    console.print(table)


COMMANDS: dict[str, Callable[..., Any]] = {"build": build, "new": new, "envs": envs}


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command ends with: 0; 1 after an error that memlane tells of; 2 when it was called wrongly; 130 after
    Ctrl-C, as shells have it."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="memlane", description=_DESCRIPTION, args=arguments, config=(tyro.conf.FlagCreatePairsOff,)
        )
    except MemlaneError as error:
        _console(stderr=True).print("error:", style="bold red", end=" ", highlight=False)
        _say(str(error), stderr=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


_DESCRIPTION = "Reinforcement-learning data through shared memory, and environments in C."
_WIDE = 1000
"""Characters: more than any row has."""


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _say(text: str, *, stderr: bool = False) -> None:
    """As it is: [brackets] and numbers in paths and compilers' messages mean nothing to rich, and lines stay whole."""
    _console(stderr=stderr).print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


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
