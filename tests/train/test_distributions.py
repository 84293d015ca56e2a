"""Distributions over actions, against those of torch, and as environments want them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal

from memlane.train.distributions import Distribution, make_distribution

ROWS = 64


def given_for(actions: Distribution, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, actions.num_params, generator=torch.Generator().manual_seed(5)) * 2


SPACES = {
    "discrete": Discrete(5),
    "discrete from 3": Discrete(4, start=3),
    "one choice only": Discrete(1),
    "multi": MultiDiscrete([3, 2, 4]),
    "multi from": MultiDiscrete([3, 2], start=[10, -4]),
    "multi in two dimensions": MultiDiscrete([[3, 2], [4, 5]], start=[[1, 2], [3, 4]]),
    "box": Box(-1, 1, (3,)),
    "box in two dimensions": Box(-2, 2, (2, 2)),
    "number": Box(-1, 1, ()),
    "doubles": Box(-1, 1, (2,), np.float64),
}


@pytest.fixture(params=list(SPACES))
def space(request: pytest.FixtureRequest) -> Any:
    return SPACES[request.param]


def reference(space: Any, actions: Distribution, given: Tensor) -> list[Any]:
    """torch's distributions of the same numbers: one for each part."""
    if isinstance(space, Discrete):
        return [Categorical(logits=given)]
    if isinstance(space, MultiDiscrete):
        return [Categorical(logits=some) for some in given.split(space.nvec.reshape(-1).tolist(), -1)]
    std = actions.log_std.exp()  # type: ignore[operator, union-attr]
    return [Independent(Normal(given, std.expand_as(given)), 1)]


def parts(space: Any, sampled: Tensor) -> list[Tensor]:
    return list(sampled.unbind(-1)) if isinstance(space, MultiDiscrete) else [sampled]


@pytest.fixture
def actions(space: Any) -> Distribution:
    made = make_distribution(space, log_std=-0.3)
    if isinstance(space, Box):
        with torch.no_grad():
            made.log_std += torch.arange(made.num_params) * 0.2  # type: ignore[operator, union-attr]
    return made


def test_probabilities_are_those_of_torch(space: Any, actions: Distribution) -> None:
    given = given_for(actions)
    sampled, _ = actions.sample(given)
    expected = sum(
        one.log_prob(some) for one, some in zip(reference(space, actions, given), parts(space, sampled), strict=True)
    )
    torch.testing.assert_close(actions.log_prob(given, sampled), expected)


def test_entropies_are_those_of_torch(space: Any, actions: Distribution) -> None:
    given = given_for(actions)
    expected = sum(one.entropy() for one in reference(space, actions, given))
    torch.testing.assert_close(actions.entropy(given), expected)


def test_a_sample_comes_with_its_probability(actions: Distribution) -> None:
    given = given_for(actions)
    sampled, log_probs = actions.sample(given)
    torch.testing.assert_close(log_probs, actions.log_prob(given, sampled))


def test_samples_have_the_dtype_and_the_shape_that_they_announce(actions: Distribution) -> None:
    sampled, log_probs = actions.sample(given_for(actions))
    assert (sampled.dtype, sampled.shape) == (actions.dtype, (ROWS, *actions.shape))
    assert log_probs.shape == (ROWS,)


def test_what_goes_to_the_environment_is_of_its_space(space: Any, actions: Distribution) -> None:
    with torch.inference_mode():
        sampled, _ = actions.sample(given_for(actions))
    for one in actions.to_env(sampled):
        assert space.contains(np.asarray(one, space.dtype))


def test_the_mode_is_likelier_than_any_sample(actions: Distribution) -> None:
    given = given_for(actions)
    best = actions.log_prob(given, actions.mode(given))
    for _ in range(20):
        assert (actions.sample(given)[1] <= best + 1e-6).all()


def test_time_may_stand_before_the_environments(actions: Distribution) -> None:
    flat = given_for(actions)
    sampled, log_probs = actions.sample(flat)
    given, chosen = flat.reshape(4, 16, -1), sampled.reshape(4, 16, *actions.shape)
    torch.testing.assert_close(actions.log_prob(given, chosen), log_probs.reshape(4, 16))
    torch.testing.assert_close(actions.entropy(given), actions.entropy(flat).reshape(4, 16))


# 0.999 quantiles of chi-square, by degrees of freedom.
MOST = {2: 13.8, 3: 16.3, 4: 18.5}


def chi_square(sampled: Tensor, probabilities: Tensor) -> float:
    found = torch.bincount(sampled, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(sampled)
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(3))
def test_choices_are_made_as_often_as_they_are_likely(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.0])
    sampled, _ = make_distribution(Discrete(5)).sample(logits.expand(20_000, 5))
    assert chi_square(sampled, logits.softmax(-1)) < MOST[4]


@pytest.mark.parametrize("seed", range(3))
def test_each_of_several_choices_is_made_as_often_as_it_is_likely(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.0, 0.0, 0.3])
    sampled, _ = make_distribution(MultiDiscrete([3, 4])).sample(logits.expand(20_000, 7))
    assert chi_square(sampled[:, 0], logits[:3].softmax(-1)) < MOST[2]
    assert chi_square(sampled[:, 1], logits[3:].softmax(-1)) < MOST[3]


def test_several_choices_are_independent() -> None:
    torch.manual_seed(0)
    sampled, _ = make_distribution(MultiDiscrete([2, 2])).sample(torch.zeros(20_000, 4))
    assert chi_square(sampled[:, 0] * 2 + sampled[:, 1], torch.full((4,), 0.25)) < MOST[3]


def test_gaussian_samples_have_their_mean_and_deviation() -> None:
    torch.manual_seed(0)
    actions = make_distribution(Box(-9, 9, (2,)), log_std=-1.0)
    sampled, _ = actions.sample(torch.tensor([1.0, -2.0]).expand(40_000, 2))
    torch.testing.assert_close(sampled.mean(0), torch.tensor([1.0, -2.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(sampled.std(0), torch.full((2,), -1.0).exp(), atol=0.01, rtol=0)


def test_starts_are_added_for_the_environment() -> None:
    actions = make_distribution(MultiDiscrete([[3, 2], [4, 5]], start=[[1, 2], [-3, 40]]))
    found = actions.to_env(torch.tensor([[0, 1, 2, 3], [2, 0, 0, 4]]))
    assert found.tolist() == [[[1, 3], [-1, 43]], [[3, 2], [-3, 44]]]


def test_the_start_of_one_choice_is_added_for_the_environment() -> None:
    assert make_distribution(Discrete(3, start=-1)).to_env(torch.tensor([0, 1, 2])).tolist() == [-1, 0, 1]


def test_gaussian_samples_are_clipped_for_the_environment_only() -> None:
    space = Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32))
    drawn = torch.tensor([[5.0, -5.0], [-5.0, 5.0]])
    kept = drawn.clone()
    assert make_distribution(space).to_env(drawn).tolist() == [[1, -2], [-1, 5]]
    assert torch.equal(drawn, kept)


def test_the_deviation_of_gaussian_actions_is_learned() -> None:
    actions = make_distribution(Box(-1, 1, (2,)))
    actions.log_prob(torch.zeros(1, 2), torch.full((1, 2), 3.0)).sum().backward()
    (log_std,) = actions.parameters()
    assert log_std.grad is not None
    assert log_std.grad.all()


def test_other_spaces_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="actions must be Discrete, MultiDiscrete or Box, found Dict"):
        make_distribution(Dict({"a": Discrete(2)}))
