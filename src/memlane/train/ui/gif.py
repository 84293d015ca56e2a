"""Film: an episode of a run's policy as a GIF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from memlane.train.options import OptionError, Options
from memlane.train.trainer import evaluate

_FRAMES = 500
"""At most: longer episodes are cut there."""
_FRAME_MS = 30
"""Browsers slow anything below 20 ms down to 100."""


def write_film(policy: Any, options: Options, path: Path) -> Path:
    """The first episode of an evaluation, again, with pictures."""
    try:
        from PIL import Image
    except ImportError:
        raise OptionError("a GIF needs Pillow: pip install 'memlane[cli]'") from None
    assert options.backend is not None
    pictures: list[Any] = []

    def keep(picture: NDArray[Any] | None) -> None:
        if picture is None:
            raise OptionError(f"{options.env} has no pictures")
        if len(pictures) < _FRAMES:
            pictures.append(Image.fromarray(np.asarray(picture)).quantize(64))

    try:
        evaluate(policy, options.env, options.backend, episodes=1, env_settings=options.env_settings, on_frame=keep)
    except (ValueError, gymnasium.error.Error) as error:
        raise OptionError(f"no pictures of {options.env}: {error}") from error
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=_FRAME_MS, loop=0)
    return path
