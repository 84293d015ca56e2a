"""``memlane`` and ``python -m memlane``: run the command, or say what to install for it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> int:
    """Run the command; ``memlane.cli.main`` lists its exit codes."""
    if sys.argv[1:] == ["--version"]:
        from memlane import __version__

        print(f"memlane {__version__}")
        return 0
    if not (find_spec("tyro") and find_spec("rich")):
        print('the command memlane needs tyro and rich: pip install "memlane[cli]"', file=sys.stderr)
        return 1
    from memlane.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
