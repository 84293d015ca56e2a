"""GAE and V-trace against their definitions, written out as sums in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.train.advantages import gae, v_trace

NUMBERS = st.floats(-10, 10, allow_nan=False, width=32)
SHARES = st.floats(0, 1, allow_nan=False)


@dataclass
class Rollout:
    """Columns are environments. Each is a list of steps, as ``NEXT_STEP`` makes them."""

    rewards: list[list[float]]
    values: list[list[float]]
    terminated: list[list[bool]]
    truncated: list[list[bool]]
    valid: list[list[bool]]
    log_ratios: list[list[float]]

    @property
    def steps(self) -> int:
        return len(self.rewards[0])

    def done(self, env: int, t: int) -> bool:
        return self.terminated[env][t] or self.truncated[env][t]

    def tensors(self) -> dict[str, torch.Tensor]:
        """As the functions take them: time first."""
        terminated, truncated = torch.tensor(self.terminated).T, torch.tensor(self.truncated).T
        return {
            "rewards": torch.tensor(self.rewards, dtype=torch.float64).T,
            "values": torch.tensor(self.values, dtype=torch.float64).T,
            "terminated": terminated,
            "dones": terminated | truncated,
            "valid": torch.tensor(self.valid).T,
        }

    def ratios(self) -> torch.Tensor:
        return torch.tensor(self.log_ratios, dtype=torch.float64).T


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    envs, steps = draw(st.integers(1, 3)), draw(st.integers(1, 8))

    def table(elements: st.SearchStrategy[Any], rows: int) -> list[list[Any]]:
        return [draw(st.lists(elements, min_size=rows, max_size=rows)) for _ in range(envs)]

    ends = table(st.sampled_from(["", "", "terminated", "truncated", "both"]), steps)
    valid = []
    for env in range(envs):
        column = [draw(st.booleans())]  # the rollout before may have ended an episode in its last step
        for t in range(steps):
            if not column[t]:
                ends[env][t] = ""  # in the place of this step the environment was reset
            column.append(not ends[env][t])
        valid.append(column[:-1])
    return Rollout(
        table(NUMBERS, steps),
        table(NUMBERS, steps + 1),
        [[end in ("terminated", "both") for end in column] for column in ends],
        [[end in ("truncated", "both") for end in column] for column in ends],
        valid,
        table(st.floats(-3, 3, allow_nan=False), steps),
    )


def surprise(rollout: Rollout, env: int, t: int, gamma: float) -> float:
    """How much better a step was than the value function had thought."""
    goes_on = 0.0 if rollout.terminated[env][t] else rollout.values[env][t + 1]
    return rollout.rewards[env][t] + gamma * goes_on - rollout.values[env][t]


def last_of(rollout: Rollout, env: int, t: int) -> int:
    """The last step of the episode that step ``t`` is in, as far as the rollout goes."""
    while t + 1 < rollout.steps and not rollout.done(env, t):
        t += 1
    return t


def plain_gae(rollout: Rollout, env: int, t: int, gamma: float, lam: float) -> float:
    """Formula 16 of Schulman and others (2016): the weighted sum of all later surprises of the episode."""
    return sum(
        (gamma * lam) ** (k - t) * surprise(rollout, env, k, gamma) for k in range(t, last_of(rollout, env, t) + 1)
    )


def plain_target(rollout: Rollout, env: int, t: int, gamma: float, lam: float, rho: float, c: float) -> float:
    """Formula 1 of Espeholt and others (2018), with lam in the traces as in their remark 2."""
    total = rollout.values[env][t]
    for k in range(t, last_of(rollout, env, t) + 1):
        traces = math.prod(lam * min(c, math.exp(rollout.log_ratios[env][i])) for i in range(t, k))
        weight = min(rho, math.exp(rollout.log_ratios[env][k]))
        total += gamma ** (k - t) * traces * weight * surprise(rollout, env, k, gamma)
    return total


def plain_advantage(rollout: Rollout, env: int, t: int, gamma: float, lam: float, rho: float, c: float) -> float:
    """What a step brought, if what follows is worth lam times the target and else the value."""
    advantage = surprise(rollout, env, t, gamma)
    if t + 1 < rollout.steps and not rollout.done(env, t):
        target = plain_target(rollout, env, t + 1, gamma, lam, rho, c)
        advantage += gamma * lam * (target - rollout.values[env][t + 1])
    return advantage


def valid_steps(rollout: Rollout) -> list[tuple[int, int]]:
    return [(env, t) for env in range(len(rollout.valid)) for t in range(rollout.steps) if rollout.valid[env][t]]


@given(rollouts(), SHARES, SHARES)
@settings(deadline=None)
def test_gae_is_the_weighted_sum_of_later_surprises(rollout: Rollout, gamma: float, lam: float) -> None:
    advantages, _ = gae(**rollout.tensors(), gamma=gamma, gae_lambda=lam)
    for env, t in valid_steps(rollout):
        assert float(advantages[t, env]) == pytest.approx(plain_gae(rollout, env, t, gamma, lam), abs=1e-4)


@given(rollouts(), SHARES, SHARES)
@settings(deadline=None)
def test_the_targets_of_gae_are_values_and_advantages(rollout: Rollout, gamma: float, lam: float) -> None:
    tensors = rollout.tensors()
    advantages, targets = gae(**tensors, gamma=gamma, gae_lambda=lam)
    torch.testing.assert_close(targets, tensors["values"][:-1] + advantages)


@given(rollouts(), SHARES, SHARES, st.floats(0.5, 2), st.floats(0.5, 2))
@settings(deadline=None)
def test_the_targets_of_v_trace_are_the_papers(
    rollout: Rollout, gamma: float, lam: float, rho: float, c: float
) -> None:
    _, targets = v_trace(
        **rollout.tensors(), log_ratios=rollout.ratios(), gamma=gamma, gae_lambda=lam, rho_bar=rho, c_bar=c
    )
    for env, t in valid_steps(rollout):
        assert float(targets[t, env]) == pytest.approx(plain_target(rollout, env, t, gamma, lam, rho, c), abs=1e-3)


@given(rollouts(), SHARES, SHARES, st.floats(0.5, 2), st.floats(0.5, 2))
@settings(deadline=None)
def test_the_advantages_of_v_trace_are_of_its_targets(
    rollout: Rollout, gamma: float, lam: float, rho: float, c: float
) -> None:
    advantages, _ = v_trace(
        **rollout.tensors(), log_ratios=rollout.ratios(), gamma=gamma, gae_lambda=lam, rho_bar=rho, c_bar=c
    )
    for env, t in valid_steps(rollout):
        plain = plain_advantage(rollout, env, t, gamma, lam, rho, c)
        assert float(advantages[t, env]) == pytest.approx(plain, abs=1e-3)


@given(rollouts(), SHARES, SHARES)
@settings(deadline=None)
def test_v_trace_of_the_same_policy_is_gae(rollout: Rollout, gamma: float, lam: float) -> None:
    tensors = rollout.tensors()
    same = torch.zeros_like(tensors["rewards"])
    for mine, theirs in zip(
        v_trace(**tensors, log_ratios=same, gamma=gamma, gae_lambda=lam),
        gae(**tensors, gamma=gamma, gae_lambda=lam),
        strict=True,
    ):
        torch.testing.assert_close(mine[tensors["valid"]], theirs[tensors["valid"]], atol=1e-4, rtol=1e-5)


@given(rollouts(), SHARES, SHARES)
@settings(deadline=None)
def test_what_is_no_transition_has_no_advantage(rollout: Rollout, gamma: float, lam: float) -> None:
    tensors = rollout.tensors()
    one, _ = gae(**tensors, gamma=gamma, gae_lambda=lam)
    other, _ = v_trace(**tensors, log_ratios=rollout.ratios(), gamma=gamma, gae_lambda=lam)
    assert not one[~tensors["valid"]].any()
    assert not other[~tensors["valid"]].any()


@given(rollouts(), SHARES, SHARES, NUMBERS)
@settings(deadline=None)
def test_what_stands_in_the_place_of_a_reset_changes_nothing(
    rollout: Rollout, gamma: float, lam: float, other: float
) -> None:
    tensors = rollout.tensors()
    before = gae(**tensors, gamma=gamma, gae_lambda=lam)
    changed = torch.where(tensors["valid"], tensors["rewards"], other)
    after = gae(**{**tensors, "rewards": changed}, gamma=gamma, gae_lambda=lam)
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one[tensors["valid"]], two[tensors["valid"]])


def test_a_truncated_episode_is_continued_with_the_value_of_its_last_observation() -> None:
    column = Rollout([[1.0, 0.0, 1.0]], [[5.0, 70.0, 3.0, 0.0]], [[False] * 3], [[True, False, False]],
                     [[True, False, True]], [[0.0] * 3])  # fmt: skip
    advantages, _ = gae(**column.tensors(), gamma=0.5, gae_lambda=1.0)
    assert float(advantages[0, 0]) == 1.0 + 0.5 * 70.0 - 5.0


def test_a_terminated_episode_is_worth_nothing_more() -> None:
    column = Rollout([[1.0, 0.0, 1.0]], [[5.0, 70.0, 3.0, 0.0]], [[True, False, False]], [[False] * 3],
                     [[True, False, True]], [[0.0] * 3])  # fmt: skip
    advantages, _ = gae(**column.tensors(), gamma=0.5, gae_lambda=1.0)
    assert float(advantages[0, 0]) == 1.0 - 5.0
