"""Stray words: a process that overwrites the memory of a vector environment can end it. It can neither crash the caller
nor make a call wait for longer than ``step_timeout``."""

from __future__ import annotations

import random
import time
import warnings

import numpy as np
import pytest

from memlane.core import MemlaneError, Segment
from memlane.vector import AsyncVectorEnv
from tests.support.failing_envs import makers
from tests.support.processes import ask, child, within

NUM_ENVS = 4
STEP_TIMEOUT = 1.0
SECONDS = 1.0
WORDS = [-1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]


def scribble(segment: Segment, fields: list[str], seed: str) -> None:
    """Overwrite words of these fields with numbers that hurt, for ever."""
    draw = random.Random(seed)
    places = []
    for name in fields:
        field = segment.layout[name]
        mapping, offset = segment.alias(field.offset, field.nbytes, writeable=True)
        words = np.frombuffer(mapping, np.int64, field.nbytes // 8, offset)
        places += [(words, index) for index in range(len(words))]
    while True:
        words, index = draw.choice(places)
        words[index] = draw.choice([*WORDS, draw.getrandbits(64) - 2**63])


def step_beside_a_scribbler(fields: list[str], seed: str) -> tuple[float, int, str]:
    """The longest that a call took, the steps that worked, and the error that ended them, if one did."""
    warnings.simplefilter("ignore")
    envs = AsyncVectorEnv(makers(NUM_ENVS), num_workers=2, step_timeout=STEP_TIMEOUT)
    envs.reset(seed=0)
    slowest, steps, end = 0.0, 0, ""
    with child(scribble, envs._steps.segment, fields, seed) as process:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not end:
            begin = time.monotonic()
            try:
                envs.step(np.zeros(NUM_ENVS, np.int64))
                steps += 1
            except MemlaneError as error:
                end = f"{type(error).__name__}: {error}"
            slowest = max(slowest, time.monotonic() - begin)
        process.kill()
    begin = time.monotonic()
    envs.close(terminate=True)
    return max(slowest, time.monotonic() - begin), steps, end


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize(
    "fields",
    [["quorum", "go", "command"], ["progress", "requested_step", "completed_step"], ["float_infos", "float_forms"]],
    ids=["commands", "progress", "infos"],
)
def test_beside_a_process_that_stores_random_words_every_call_ends_and_nothing_crashes(
    fields: list[str], seed: int
) -> None:
    slowest, steps, end = ask(step_beside_a_scribbler, fields, f"{fields} {seed}")
    assert slowest < within(STEP_TIMEOUT + 1), f"a call took {slowest:.2f} s"
    assert steps > 0 or end, "neither a step nor an error"
