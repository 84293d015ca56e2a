"""Networks: the encoding of observations, the normaliser, and an LSTM over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from gymnasium.vector.utils import batch_space
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memlane.train.networks import ActorCritic, Encoder, NetworkConfig, Normalizer, is_image, leaf_spaces, mask_state

VECTOR = Box(-1, 1, (3,), np.float32)
PIXELS = Box(0, 255, (2, 40, 44), np.uint8)


def observations_of(space: Any, rows: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Random observations of ``rows`` environments, by the names of their leaves."""
    batch = batch_space(space, rows)
    batch.seed(seed)
    sample = batch.sample()

    def find(value: Any, name: str) -> Any:
        for key in name.split("."):
            value = value[key]
        return value

    return {
        name: torch.from_numpy(np.array(find(sample, name) if isinstance(sample, dict) else sample))
        for name in leaf_spaces(space)
    }


# ---------------------------------------------------------------------------------------------------------- normaliser


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.floats(-100, 100),
    st.floats(0.1, 50),
)
@settings(deadline=None)
def test_the_normaliser_has_mean_and_variance_of_all_batches(
    sizes: list[int], seed: int, centre: float, width: float
) -> None:
    chance = np.random.default_rng(seed)
    batches = [chance.normal(centre, width, (size, 3)).astype(np.float32) for size in sizes]
    normalizer = Normalizer(3)
    for batch in batches:
        normalizer.update(torch.from_numpy(batch))
    everything = np.concatenate(batches).astype(np.float64)
    scale = width + abs(centre)
    assert float(normalizer.count) == pytest.approx(len(everything), abs=1e-3)
    assert np.allclose(normalizer.mean, everything.mean(0), atol=2e-3 * scale)
    # It episode_starts with a ten-thousandth of an observation, which counts when there are few others.
    assert np.allclose(normalizer.var, everything.var(0), atol=2e-3 * scale**2 + 2e-4)


def test_an_empty_batch_leaves_the_normaliser_as_it_is() -> None:
    normalizer = Normalizer(2)
    normalizer.update(torch.zeros(0, 2))
    assert (normalizer.mean.tolist(), normalizer.var.tolist()) == ([0, 0], [1, 1])


def test_normalised_numbers_have_no_mean_and_unit_variance() -> None:
    normalizer = Normalizer(2)
    values = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) * 7 + 30
    normalizer.update(values)
    found = normalizer(values)
    torch.testing.assert_close(found.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(found.var(0, unbiased=False), torch.ones(2), atol=1e-3, rtol=0)


def test_normalised_numbers_are_clipped() -> None:
    assert Normalizer(1)(torch.tensor([[1000.0], [-1000.0]])).tolist() == [[10], [-10]]


def test_the_normaliser_travels_with_the_weights() -> None:
    one, two = (ActorCritic(VECTOR, Discrete(2), NetworkConfig()) for _ in range(2))
    assert one.encoder.normalizer is not None
    one.encoder.normalizer.update(torch.randn(50, 3) + 4)
    two.load_state_dict(one.state_dict())
    assert two.encoder.normalizer is not None
    assert torch.equal(two.encoder.normalizer.mean, one.encoder.normalizer.mean)


# ------------------------------------------------------------------------------------------------------------- encoder

SPACES = {
    "box": (VECTOR, 3),
    "matrix": (Box(-1, 1, (2, 3), np.float64), 6),
    "number": (Box(-1, 1, ()), 1),
    "bytes": (Box(0, 255, (7,), np.uint8), 7),
    "discrete": (Discrete(4, start=2), 4),
    "dict": (Dict({"a": VECTOR, "b": Discrete(3)}), 6),
    "nested": (Dict({"a": Dict({"x": VECTOR, "y": Dict({"z": Discrete(2)})}), "b": VECTOR}), 8),
    "pixels": (PIXELS, 128),
    "grey pixels": (Box(0, 255, (40, 40), np.uint8), 128),
    "pixels and more": (Dict({"eye": PIXELS, "in": Dict({"eye": PIXELS}), "ear": VECTOR}), 259),
}


@pytest.fixture(params=list(SPACES))
def space_and_width(request: pytest.FixtureRequest) -> tuple[Any, int]:
    return SPACES[request.param]


def test_an_observation_is_encoded_to_the_declared_size(space_and_width: tuple[Any, int]) -> None:
    space, width = space_and_width
    encoder = Encoder(space, normalize=True)
    assert encoder.output_size == width
    assert encoder(observations_of(space)).shape == (5, width)


def test_observations_over_time_are_encoded_as_one_by_one(space_and_width: tuple[Any, int]) -> None:
    space, _ = space_and_width
    encoder = Encoder(space, normalize=True)
    steps = [observations_of(space, seed=seed) for seed in range(3)]
    together = encoder({name: torch.stack([step[name] for step in steps]) for name in steps[0]})
    torch.testing.assert_close(together, torch.stack([encoder(step) for step in steps]))


def test_vectors_are_put_one_after_the_other() -> None:
    space = Dict({"a": VECTOR, "b": Dict({"c": Box(-1, 1, (2, 2))})})
    seen = observations_of(space)
    expected = torch.cat([seen["a"], seen["b.c"].reshape(5, 4)], -1)
    assert torch.equal(Encoder(space, normalize=False)(seen), expected)


def test_a_choice_is_a_one_among_zeros() -> None:
    space = Discrete(3, start=5)
    (name,) = leaf_spaces(space)
    found = Encoder(space, normalize=False)({name: torch.tensor([5, 7, 6])})
    assert found.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_pixels_are_not_normalised() -> None:
    assert Encoder(PIXELS, normalize=True).normalizer is None


def test_pixels_are_seen_by_their_brightness() -> None:
    encoder = Encoder(PIXELS, normalize=True)
    (name,) = leaf_spaces(PIXELS)
    (cnn,) = encoder.cnns.values()
    bright = torch.full((1, 2, 40, 44), 255, dtype=torch.uint8)
    torch.testing.assert_close(encoder({name: bright}), cnn.linear(cnn.convolutions(torch.ones(1, 2, 40, 44))))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("shape", [(3, 64, 64), (64, 64), (64, 64, 3), (1, 36, 36), (96, 96, 1)])
def test_images_are_recognised(shape: tuple[int, ...]) -> None:
    """Channels may come first or, as in most of Gymnasium, last."""
    assert is_image(Box(0, 255, shape, np.uint8))


@pytest.mark.parametrize(
    "space", [Box(0, 255, (64,), np.uint8), Box(0, 255, (3, 4, 5), np.uint8), Box(0, 1, (40, 40), np.float32)]
)
def test_other_arrays_are_not_taken_for_images(space: Any) -> None:
    assert not is_image(space)


def test_other_spaces_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="observations must be Box, Discrete or a Dict of them, found MultiBinary"):
        Encoder(MultiBinary(3), normalize=True)


# ---------------------------------------------------------------------------------------------------------------- LSTM


@pytest.fixture
def recurrent() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(VECTOR, Discrete(2), NetworkConfig(hidden=(8,), lstm=6))


def test_a_sequence_is_what_steps_make_one_by_one(recurrent: ActorCritic) -> None:
    (name,) = leaf_spaces(VECTOR)
    observations = torch.randn(7, 4, 3)
    episode_starts = torch.rand(7, 4) < 0.3
    state = recurrent.initial_state(4)
    assert state is not None
    state = tuple(torch.randn_like(part) for part in state)  # type: ignore[assignment]
    expected, now = [], state
    for row, begin in zip(observations, episode_starts, strict=True):
        assert now is not None
        features, now = recurrent.features({name: row}, mask_state(now, ~begin))
        expected.append(features)
    found = recurrent.sequence({name: observations}, episode_starts, state)
    torch.testing.assert_close(found, torch.stack(expected))


def test_an_episode_that_episode_starts_knows_nothing_of_the_one_before(recurrent: ActorCritic) -> None:
    (name,) = leaf_spaces(VECTOR)
    observations = torch.randn(2, 1, 3)
    episode_starts = torch.tensor([[False], [True]])
    found = recurrent.sequence({name: observations}, episode_starts, recurrent.initial_state(1))
    alone, _ = recurrent.features({name: observations[1]}, recurrent.initial_state(1))
    torch.testing.assert_close(found[1], alone)


def test_an_episode_that_goes_on_remembers(recurrent: ActorCritic) -> None:
    (name,) = leaf_spaces(VECTOR)
    observations = torch.randn(2, 1, 3)
    episode_starts = torch.tensor([[True], [False]])
    found = recurrent.sequence({name: observations}, episode_starts, recurrent.initial_state(1))
    alone, _ = recurrent.features({name: observations[1]}, recurrent.initial_state(1))
    assert not torch.allclose(found[1], alone)


def test_one_environment_does_not_see_the_memory_of_another(recurrent: ActorCritic) -> None:
    (name,) = leaf_spaces(VECTOR)
    observations = torch.randn(5, 3, 3)
    episode_starts = torch.rand(5, 3) < 0.3
    together = recurrent.sequence({name: observations}, episode_starts, recurrent.initial_state(3))
    for env in range(3):
        alone = recurrent.sequence({name: observations[:, [env]]}, episode_starts[:, [env]], recurrent.initial_state(1))
        torch.testing.assert_close(together[:, [env]], alone)


def test_a_network_without_memory_has_no_state() -> None:
    assert ActorCritic(VECTOR, Discrete(2), NetworkConfig()).initial_state(3) is None


def test_a_policy_episode_starts_undecided() -> None:
    policy = ActorCritic(VECTOR, Discrete(4), NetworkConfig())
    given_by = policy.actor(policy.features(observations_of(VECTOR))[0])
    torch.testing.assert_close(given_by.softmax(-1), torch.full((5, 4), 0.25), atol=0.02, rtol=0)
