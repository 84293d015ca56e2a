"""Networks: a policy and a value function over Gymnasium spaces, with the observation normaliser among their buffers.

An observation is a dict of tensors, one for each leaf of the observation space: a plain space is one leaf, a ``Dict``
has a leaf for each ``Box`` or ``Discrete`` in it. ``leaf_spaces`` names the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, Space
from torch import Tensor, nn

from memlane.core.layout import FieldSpec
from memlane.spaces.paths import ROOT_NAME, escape_key, join_path
from memlane.train.distributions import Distribution, make_distribution
from memlane.train.field_docs import document_fields

State = tuple[Tensor, Tensor]
"""State of an LSTM: two tensors of shape (1, environments, size)."""


@document_fields
@dataclass(frozen=True)
class NetworkConfig:
    """Settings of the networks: the value of ``network`` in the settings of an algorithm, or the keys of a dict there.
    ``memlane train --set`` takes them as ``network.hidden=128,128``."""

    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers; the policy and the value functions have the same."""
    lstm: int = 0
    """Size of an LSTM before the hidden layers; 0: no LSTM. APPO only."""
    normalize_observations: bool = True
    """Subtract the running mean of observations and divide by their running standard deviation. APPO only. Images are
    divided by 255 instead."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions. APPO only."""

    def __post_init__(self) -> None:
        if not all(size >= 1 for size in self.hidden):
            raise ValueError(f"network.hidden must be sizes of at least 1, found {self.hidden}; (): no hidden layer")
        if self.lstm < 0:
            raise ValueError(f"network.lstm must be at least 0, found {self.lstm}; 0: no LSTM")


class Normalizer(nn.Module):
    """Running mean and variance of observations. They are buffers of the network, so that a collector reads them in the
    same version as the weights that were trained with them."""

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    mean: Tensor
    var: Tensor
    count: Tensor

    def forward(self, values: Tensor) -> Tensor:
        return ((values - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Merge the moments of a batch of rows into the running ones (Chan et al., 1979)."""
        count = len(values)
        if not count:
            return
        mean, var = values.mean(0), values.var(0, unbiased=False)
        total = self.count + count
        delta = mean - self.mean
        weight = (count / total).float()
        merged_var = (
            self.var * (self.count / total).float()
            + var * weight
            + delta * delta * weight * (self.count / total).float()
        )
        self.mean += delta * weight
        self.var.copy_(merged_var)
        self.count.copy_(total)


class Encoder(nn.Module):
    """Observations as rows of numbers: vectors concatenated, ``Discrete`` as one-hot, images by a ``CnnEncoder``."""

    def __init__(self, space: Space[Any], normalize: bool) -> None:
        super().__init__()
        self.leaves = leaf_spaces(space)
        images = {name: leaf for name, leaf in self.leaves.items() if is_image(leaf)}
        self.cnns = nn.ModuleDict({_module_name(name): CnnEncoder(leaf.shape or ()) for name, leaf in images.items()})
        vector_size = sum(_vector_size(leaf) for name, leaf in self.leaves.items() if name not in images)
        self.normalizer = Normalizer(vector_size) if normalize and vector_size else None
        self.output_size = vector_size + sum(cnn.output_size for cnn in self.cnns.values())  # type: ignore[misc]

    def vectors(self, observations: dict[str, Tensor]) -> Tensor | None:
        """Everything but the images, concatenated and not normalised; None: there are only images."""
        rows = []
        for name, space in self.leaves.items():
            if _module_name(name) in self.cnns:
                continue
            value = observations[name]
            if isinstance(space, Discrete):
                rows.append(nn.functional.one_hot(value.long() - int(space.start), int(space.n)).float())
            else:
                dims = len(space.shape or ())
                rows.append(value.flatten(value.ndim - dims).float() if dims else value.unsqueeze(-1).float())
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0] if rows else None

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        names = [(name, _module_name(name)) for name in self.leaves]
        rows = [self.cnns[module](observations[name]) for name, module in names if module in self.cnns]
        vectors = self.vectors(observations)
        if vectors is not None:
            rows.insert(0, self.normalizer(vectors) if self.normalizer is not None else vectors)
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0]


class CnnEncoder(nn.Module):
    """Features of images: bytes of shape (height, width), (channels, height, width) or (height, width, channels)."""

    output_size = 128

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._dims = len(shape)
        self._channels_last = len(shape) == 3 and shape[-1] <= 4
        if self._channels_last:
            shape = shape[2], shape[0], shape[1]
        channels = 1 if len(shape) == 2 else shape[0]
        # Patches that do not overlap take a third of the time of the usual 8 x 8 with a stride of 4.
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 16, 7, 7), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()
        )
        with torch.no_grad():
            flat_size = self.convolutions(torch.zeros(1, channels, *shape[-2:])).shape[1]
        self.linear = nn.Sequential(nn.Linear(flat_size, self.output_size), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        leading = images.shape[: images.ndim - self._dims]
        batch = images.reshape(-1, *images.shape[images.ndim - self._dims :])
        if self._dims == 2:
            batch = batch.unsqueeze(1)
        elif self._channels_last:
            batch = batch.movedim(-1, 1)
        out: Tensor = self.linear(self.convolutions(batch.float().mul_(1 / 255)))
        return out.reshape(*leading, self.output_size)


class ActorCritic(nn.Module):
    """A policy (``actor``) and a value function (``critic``). They share the encoder, and the LSTM if there is one."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observation_space, config.normalize_observations)
        self.distribution: Distribution = make_distribution(action_space, config.log_std)
        size = self.encoder.output_size
        self.lstm = nn.LSTM(size, config.lstm) if config.lstm else None
        size = config.lstm or size
        self.actor = tanh_mlp(size, config.hidden, self.distribution.num_params, last_gain=0.01)
        self.critic = tanh_mlp(size, config.hidden, 1, last_gain=1.0)

    def features(self, observations: dict[str, Tensor], state: State | None = None) -> tuple[Tensor, State | None]:
        """Features of one step of (environments, ...), and the next state of the LSTM."""
        encoded: Tensor = self.encoder(observations)
        if self.lstm is None or state is None:
            return encoded, state
        out, state = self.lstm(encoded.unsqueeze(0), state)
        return out.squeeze(0), state

    def sequence(self, observations: dict[str, Tensor], episode_starts: Tensor, state: State | None) -> Tensor:
        """Features of (steps, environments, ...). The state is zeroed where ``episode_starts`` is True."""
        encoded: Tensor = self.encoder(observations)
        if self.lstm is None or state is None:
            return encoded
        outs = []
        for row, starts in zip(encoded, episode_starts, strict=True):
            state = mask_state(state, ~starts)
            out, state = self.lstm(row.unsqueeze(0), state)
            outs.append(out)
        return torch.cat(outs)

    def initial_state(self, num_envs: int) -> State | None:
        """The state of the LSTM when an episode starts; None without an LSTM."""
        if self.lstm is None:
            return None
        zeros = torch.zeros(1, num_envs, self.lstm.hidden_size)
        return zeros, zeros.clone()

    @torch.inference_mode()
    def act(
        self, observations: dict[str, Tensor], state: State | None = None, *, deterministic: bool = False
    ) -> tuple[Tensor, State | None]:
        """Actions, sampled or the most likely ones, and the next state."""
        features, state = self.features(observations, state)
        params = self.actor(features)
        return self.distribution.mode(params) if deterministic else self.distribution.sample(params)[0], state

    @torch.inference_mode()
    def sample(self, observations: dict[str, Tensor], state: State | None) -> tuple[Tensor, Tensor, State | None]:
        """Sampled actions, their log-probabilities, and the next state."""
        features, state = self.features(observations, state)
        actions, log_probs = self.distribution.sample(self.actor(features))
        return actions, log_probs, state

    def to_env(self, actions: Tensor) -> Any:
        """Convert actions to arrays of the environment's action space."""
        return self.distribution.to_env(actions)


def mask_state(state: State, keep: Tensor) -> State:
    """Zero the state of the environments for which ``keep`` is False."""
    factor = keep.float().reshape(1, -1, 1)
    return state[0] * factor, state[1] * factor


def tanh_mlp(size: int, hidden: Sequence[int], outputs: int, last_gain: float) -> nn.Sequential:
    """Tanh layers with orthogonal initial weights, as usual for PPO."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_orthogonal_linear(size, width, math.sqrt(2)), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, _orthogonal_linear(size, outputs, last_gain))


def relu_mlp(size: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    """ReLU layers with torch's default initial weights, as usual for SAC and DQN."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, outputs))


def _orthogonal_linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# ---------------------------------------------------------------------------------------------- leaves of observations


def leaf_spaces(space: Space[Any], path: str = "") -> dict[str, Space[Any]]:
    """The leaves of an observation space, by the names that ``memlane.spaces`` gives them."""
    if isinstance(space, Dict):
        parts = [leaf_spaces(part, join_path(path, escape_key(key))) for key, part in space.spaces.items()]
        return {name: leaf for part in parts for name, leaf in part.items()}
    if not isinstance(space, Box | Discrete):
        raise TypeError(
            f"observations must be Box, Discrete or a Dict of them, found {space}; convert them in a wrapper, such as "
            "gymnasium.wrappers.FlattenObservation"
        )
    return {path or ROOT_NAME: space}


def leaf_arrays(space: Space[Any], observations: Any, path: str = "") -> dict[str, Any]:
    """The arrays of a batch of observations, by the names of their leaves."""
    if isinstance(space, Dict):
        parts = [
            leaf_arrays(part, observations[key], join_path(path, escape_key(key))) for key, part in space.spaces.items()
        ]
        return {name: array for part in parts for name, array in part.items()}
    return {path or ROOT_NAME: observations}


def leaf_fields(space: Space[Any], leading: tuple[int, ...] = ()) -> dict[str, FieldSpec]:
    """The leaves as fields of a slot or a row, named ``obs.<leaf>``; ``leading`` precedes the shape of each leaf."""
    return {
        f"obs.{name}": (leaf.dtype or np.dtype("float32"), (*leading, *(leaf.shape or ())))
        for name, leaf in leaf_spaces(space).items()
    }


def is_image(space: Space[Any]) -> bool:
    """Whether a space has images: bytes of two or three dimensions, with sides of at least 36 pixels."""
    if not isinstance(space, Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    sides = space.shape[:2] if len(space.shape) == 3 and space.shape[-1] <= 4 else space.shape[-2:]
    return min(sides) >= 36


def _vector_size(space: Space[Any]) -> int:
    return int(space.n) if isinstance(space, Discrete) else int(np.prod(space.shape or ()))


def _module_name(leaf: str) -> str:
    """Names of torch modules have no dots."""
    return leaf.replace(".", "/")
