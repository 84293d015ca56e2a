"""Custom spaces that are not registered, as parts of others: their values travel in messages, the rest is shared."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple
from gymnasium.vector import AutoresetMode

from memlane.vector import AsyncVectorEnv, Capacity
from tests.support.vector_envs import Mission, ours, reference

# Gymnasium's logger speaks through warnings.
pytestmark = [pytest.mark.filterwarnings("ignore:.*(ERROR|WARN): "), pytest.mark.timeout(120, method="signal")]

N = 3
PLAIN, RAISE, KILL, END = range(4)
SPACE = Dict({"at": Box(0, 1000, (1,), np.int64), "deep": Tuple((Mission(), Discrete(1000)))})


class Walker(gymnasium.Env[Any, Any]):
    """Shows its number and its steps in each part of its observation; its actions are faults and ends."""

    observation_space: Space[Any] = SPACE
    action_space: Space[Any] = Discrete(4)

    def __init__(self, env: int) -> None:
        self.env = env
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return seen(self.env, 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise ValueError("bad luck")
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return seen(self.env, self.steps), 1.0, bool(action == END), False, {}


def seen(env: int, steps: int) -> dict[str, Any]:
    """What an environment shows."""
    return {"at": np.array([10 * env + steps]), "deep": (f"mission {env}.{steps}", 10 * env + steps)}


def told(observations: Any) -> list[str]:
    """The missions of a batch, after a check that the shared parts say the same."""
    missions, numbers = observations["deep"]
    assert observations["at"].ravel().tolist() == numbers.tolist()
    assert [int(env) * 10 + int(steps) for env, steps in (text[8:].split(".") for text in missions)] == numbers.tolist()
    return [text[8:] for text in missions]


WALKERS = [partial(Walker, env) for env in range(N)]


def test_the_other_parts_are_in_shared_memory() -> None:
    with ours(WALKERS, copy=False) as envs:
        assert told(envs.reset()[0]) == ["0.0", "1.0", "2.0"]
        batch = envs.step([PLAIN] * N)[0]
        fields = envs._steps.segment.views()
        assert np.shares_memory(batch["at"], fields["observation.at"])
        assert np.shares_memory(batch["deep"][1], fields["observation.deep.1"])
        assert not [name for name in fields if name.startswith("observation.deep.0")]
        assert not batch["at"].flags.writeable


def test_some_environments_are_sent_and_received() -> None:
    with ours(WALKERS) as envs:
        envs.reset()
        envs.send([PLAIN, PLAIN], [2, 0])
        observations, *_, ids = envs.recv(2)
        assert ids.tolist() == [0, 2]
        assert told(observations) == ["0.1", "2.1"]
        assert told(envs.step([PLAIN] * N)[0]) == ["0.2", "1.1", "2.2"]


def test_some_environments_are_reset() -> None:
    with ours(WALKERS) as envs:
        envs.reset()
        envs.step([PLAIN] * N)
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert told(observations) == ["0.1", "1.0", "2.1"]


def test_before_its_first_reset_an_environment_shows_zeros_and_no_custom_value() -> None:
    with ours(WALKERS) as envs:
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert observations["at"].tolist() == [[0], [10], [0]]
        assert observations["deep"][0] == (None, "mission 1.0", None)


@pytest.mark.parametrize("fault", [RAISE, KILL], ids=["exception", "kill"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=["next step", "same step"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_environment_is_restarted_with_what_it_showed_last(
    shared_memory: bool, mode: AutoresetMode, fault: int
) -> None:
    """With three environments in two workers, the first has a worker of its own: it can die alone."""
    with ours(WALKERS, autoreset_mode=mode, on_error="restart", shared_memory=shared_memory) as envs:
        envs.reset()
        envs.step([PLAIN] * N)
        observations, _, _, truncated, infos = envs.step([fault, PLAIN, END])
        assert truncated.tolist() == [True, False, False]
        if mode is AutoresetMode.SAME_STEP:
            assert told(observations) == ["0.0", "1.2", "2.0"]
            assert infos["final_obs"][0] == seen(0, 1)
            assert infos["final_obs"][2] == seen(2, 2)
        else:
            assert told(observations) == ["0.0", "1.2", "2.2"]
            assert told(envs.step([PLAIN] * N)[0]) == ["0.0", "1.3", "2.0"]


class Diary(Walker):
    """Shows always the same list, to which each step appends."""

    observation_space = Dict({"pages": Mission(), "steps": Discrete(100)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.pages = [self.env]
        return {"pages": self.pages, "steps": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        self.pages.append(self.steps)
        return {"pages": self.pages, "steps": self.steps}, *rest  # type: ignore[return-value]


def test_what_was_returned_does_not_change_when_the_environment_changes_its_object() -> None:
    fns = [partial(Diary, env) for env in range(N)]
    with reference(fns) as expected, ours(fns) as envs:
        batches: list[Any] = []
        for vector in (expected, envs):
            batches.append([vector.reset()[0], *(vector.step([PLAIN] * N)[0] for _ in range(3))])
        assert [batch["pages"] for batch in batches[0]] == [batch["pages"] for batch in batches[1]]
        assert batches[1][1]["pages"] == ([0, 1], [1, 1], [2, 1])


def test_a_slot_of_a_rollout_needs_all_parts_in_arrays() -> None:
    with (
        ours(WALKERS) as envs,
        pytest.raises(NotImplementedError, match="need observations in arrays of shared memory"),
    ):
        envs.reset_into({})


def test_a_capacity_for_a_part_that_travels_in_messages_is_refused() -> None:
    with pytest.raises(KeyError, match=r"'deep\.0': a capacity is declared, but values of .*Mission.*in messages"):
        AsyncVectorEnv(WALKERS, capacity={"deep.0": Capacity(items=3)})


class Secret:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickles of me")


class Spy(Walker):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(action)
        return {**observation, "deep": (Secret(), 0)}, *rest  # type: ignore[return-value]


def test_a_value_that_cannot_be_pickled_is_an_error_that_says_so() -> None:
    with ours([partial(Spy, env) for env in range(N)]) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="no pickles of me"):
            envs.step([PLAIN] * N)
