"""GIF: one episode of a run's policy as an animation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from memlane.train.files import replacing
from memlane.train.options import OptionError, Options
from memlane.train.trainer import evaluate

_MAX_FRAMES = 500
"""Longer episodes are cut off."""
_FRAME_MS = 30
"""Milliseconds per frame. Browsers slow anything below 20 ms down to 100 ms."""


def write_gif(policy: Any, options: Options, path: Path) -> Path:
    """Render the first episode of an evaluation. Needs Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise OptionError('a GIF needs Pillow: pip install "memlane[cli]"') from None
    assert options.backend is not None
    frames: list[Any] = []

    def add_frame(frame: NDArray[Any] | None) -> None:
        if frame is None:
            raise ValueError("its render() returns None")
        if len(frames) < _MAX_FRAMES:
            frames.append(Image.fromarray(np.asarray(frame)).quantize(64))

    try:
        evaluate(
            policy, options.env, options.backend, episodes=1, env_settings=options.env_settings, on_frame=add_frame
        )
    except (ValueError, gymnasium.error.Error) as error:
        raise OptionError(f"{options.env} cannot be rendered: {error}") from error
    with replacing(path) as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=_FRAME_MS, loop=0)
    return path
