"""Numbers and durations as text, short enough for a plot's axis and a line of a terminal."""

from __future__ import annotations

import math


def short_number(value: float | None) -> str:
    """Format with three significant digits: 1234567 is ``1.23M``, and a missing number is ``-``."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    for limit, unit, name in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format as ``12.3 s``, ``4 min 05 s`` or ``2 h 07 min``."""
    if math.isnan(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def clock(seconds: float) -> str:
    """Format as ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def collectors_and_envs(collectors: int, num_envs: int | str) -> str:
    """Say how many collectors a run has, and how many environments each of them."""
    if collectors == 1:
        return f"1 collector with {num_envs} environments"
    return f"{collectors} collectors with {num_envs} environments each"


def resume_command(run_dir: str, stopped_by: str, max_steps: int, env_steps: int) -> str:
    """The command that continues a run, beyond the limit that stopped it."""
    if stopped_by == "target":
        return f"memlane resume {run_dir} --target inf"
    if stopped_by == "max_steps":  # a deterministic run may have exceeded the limit many times
        return f"memlane resume {run_dir} --max-steps {max_steps * (env_steps // max_steps + 1)}"
    return f"memlane resume {run_dir}"
