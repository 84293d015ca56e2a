"""The GIF of an episode: what is said where there can be none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memlane.train.options import OptionError, Options
from memlane.train.ui import gif
from memlane.train.ui.gif import write_gif

OPTIONS = Options("CartPole-v1", backend="native")


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(OptionError, match=r'^a GIF needs Pillow: pip install "memlane\[cli\]"$'):
        write_gif(None, OPTIONS, tmp_path / "episode.gif")


def test_an_environment_that_renders_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def evaluate(*_: Any, on_frame: Any, **__: Any) -> None:
        on_frame(None)

    monkeypatch.setattr(gif, "evaluate", evaluate)
    with pytest.raises(OptionError, match=r"^CartPole-v1 cannot be rendered: its render\(\) returns None$"):
        write_gif(None, OPTIONS, tmp_path / "episode.gif")
    assert list(tmp_path.iterdir()) == []
