"""How fast are Atari games in Gymnasium's wrappers, compared with ale-py's own C++ vector environment?

Each turn of a contender is a new process, as in ``vector_envs``. All rows are stacks of four grey frames of 84 x 84,
each the maximum of the last two of four frames. The games are the same; the resize is OpenCV's in all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from benchmarks.harness import Contender, Kind, Report, Table, parser, race
from benchmarks.turns import Effort, main_or_turn, measured, turn_in_new_process

CORES = len(os.sched_getaffinity(0))
GAME, ENV_ID = "breakout", "ALE/Breakout-v5"


def make_preprocessed() -> gymnasium.Env[Any, Any]:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(ENV_ID, frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(env), 4)


def memlane(num_envs: int) -> Any:
    from memlane.vector import AsyncVectorEnv

    return AsyncVectorEnv([make_preprocessed] * num_envs, num_workers=min(CORES, num_envs))


def gymnasium_sync(num_envs: int) -> Any:
    return gymnasium.vector.SyncVectorEnv([make_preprocessed] * num_envs)


def gymnasium_async(num_envs: int) -> Any:
    return gymnasium.vector.AsyncVectorEnv([make_preprocessed] * num_envs)


def ale_vector(num_envs: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        GAME, num_envs, num_threads=CORES, use_fire_reset=False, reward_clipping=False, repeat_action_probability=0.0
    )


BUILDERS: dict[str, tuple[str, Kind, Callable[[int], Any]]] = {
    "memlane": (f"memlane, {CORES} workers", "memlane", memlane),
    "gymnasium_sync": ("gymnasium Sync", "peer", gymnasium_sync),
    "gymnasium_async": ("gymnasium Async", "peer", gymnasium_async),
    "ale_vector": (f"ale-py's AtariVectorEnv, {CORES} threads", "other", ale_vector),
}
"""By name: the row's title, its kind, and the function that makes the vector environment."""


def take_turn(request: dict[str, Any]) -> list[float]:
    """Nanoseconds per environment step, for each block after some time to warm up."""
    num_envs = request["num_envs"]
    _, _, build = BUILDERS[request["builder"]]
    envs = build(num_envs)
    envs.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = cycle([rng.integers(4, size=num_envs) for _ in range(64)])

    def advance() -> int:
        envs.step(next(actions))
        return num_envs

    return measured(advance, envs.close, [request["warm_up"], *[request["seconds"]] * request["blocks"]])


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--num-envs", nargs="*", type=int, help="number of environments (default: 8 64)")
    options = arguments.parse_args()
    effort = Effort(2, 0.1, 0.1) if options.quick else Effort(3, 1.0, 1.0)
    rounds = options.rounds or (2 if options.quick else 5)
    report = Report("atari", options, peers=["ale-py", "gymnasium", "opencv-python-headless"])
    missing = [module for module in ("ale_py", "cv2") if importlib.util.find_spec(module) is None]
    skip = f"{missing[0]} is not installed (make .venv/.third-party)" if missing else ""
    for num_envs in options.num_envs or ([4] if options.quick else [8, 64]):

        def measure(name: str, num_envs: int = num_envs) -> Callable[[], list[float]]:
            request = {"builder": name, "num_envs": num_envs} | vars(effort)
            return lambda: turn_in_new_process(__file__, request)

        rows = [Contender(title, kind, measure(name), skip) for name, (title, kind, _) in BUILDERS.items()]
        race(rows, rounds)
        report.add(Table(f"{num_envs} {ENV_ID}", rows[0].name, rows, "one environment step", rate="steps/s"))
    report.finish()


if __name__ == "__main__":
    main_or_turn(main, take_turn)
