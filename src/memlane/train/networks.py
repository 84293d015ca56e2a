"""Networks: a policy and a value function over Gymnasium spaces, and the normaliser that travels with them."""

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
from memlane.train.distributions import Actions, actions_for

State = tuple[Tensor, Tensor]
"""Of an LSTM: (1, environments, size) twice."""


@dataclass(frozen=True)
class NetworkConfig:
    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the layers between observation and output; of the policy, and again of the value function."""
    lstm: int = 0
    """Size of an LSTM in front of the outputs; 0: none, the policy sees the present only."""
    normalize_observations: bool = True
    """Subtract the running mean and divide by the running deviation. Pixels are divided by 255 instead."""
    log_std: float = 0.0
    """Where the width of continuous actions begins, as a logarithm."""


class Normalizer(nn.Module):
    """Running mean and variance of what the collectors saw. Buffers of the network: a collector reads them in the same
    version as the weights that were trained with them."""

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
        """Rows of new values (Chan and others' formula for merging two samples)."""
        many = len(values)
        if not many:
            return
        mean, var = values.mean(0), values.var(0, unbiased=False)
        total = self.count + many
        apart = mean - self.mean
        share = (many / total).float()
        both = (
            self.var * (self.count / total).float() + var * share + apart * apart * share * (self.count / total).float()
        )
        self.mean += apart * share
        self.var.copy_(both)
        self.count.copy_(total)


class Encoder(nn.Module):
    """Observations as rows of numbers: vectors one after the other, choices as one number each that is 1, pixels
    through convolutions."""

    def __init__(self, space: Space[Any], normalize: bool) -> None:
        super().__init__()
        self._parts = leaves_of(space)
        pixels = {name: one for name, one in self._parts.items() if is_picture(one)}
        self.pictures = nn.ModuleDict({_key(name): Pictures(one.shape or ()) for name, one in pixels.items()})
        self.flat = sum(_width(one) for name, one in self._parts.items() if name not in pixels)
        self.normalizer = Normalizer(self.flat) if normalize and self.flat else None
        self.outputs = self.flat + sum(one.outputs for one in self.pictures.values())  # type: ignore[misc]

    def numbers(self, observations: dict[str, Tensor]) -> Tensor | None:
        """The part that is not pixels, as it is."""
        rows = []
        for name, space in self._parts.items():
            if _key(name) in self.pictures:
                continue
            value = observations[name]
            if isinstance(space, Discrete):
                rows.append(nn.functional.one_hot(value.long() - int(space.start), int(space.n)).float())
            else:
                dims = len(space.shape or ())
                rows.append(value.flatten(value.ndim - dims).float() if dims else value.unsqueeze(-1).float())
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0] if rows else None

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        rows = [self.pictures[_key(name)](observations[name]) for name in self._parts if _key(name) in self.pictures]
        numbers = self.numbers(observations)
        if numbers is not None:
            rows.insert(0, self.normalizer(numbers) if self.normalizer is not None else numbers)
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0]


class Pictures(nn.Module):
    """Bytes of shape (height, width), (channels, height, width) or (height, width, channels)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._dims = len(shape)
        self._channels_last = len(shape) == 3 and shape[-1] <= 4
        if self._channels_last:
            shape = shape[2], shape[0], shape[1]
        channels = 1 if len(shape) == 2 else shape[0]
        # Patches beside each other, not over each other: a third of the time of the usual 8 x 8 with a step of 4.
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 7, 7), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()
        )
        with torch.no_grad():
            self._flat = self.layers(torch.zeros(1, channels, *shape[-2:])).shape[1]
        self.outputs = 128
        self.last = nn.Sequential(nn.Linear(self._flat, self.outputs), nn.ReLU())

    def forward(self, pixels: Tensor) -> Tensor:
        leading = pixels.shape[: pixels.ndim - self._dims]
        flat = pixels.reshape(-1, *pixels.shape[pixels.ndim - self._dims :])
        if self._dims == 2:
            flat = flat.unsqueeze(1)
        elif self._channels_last:
            flat = flat.movedim(-1, 1)
        out: Tensor = self.last(self.layers(flat.float().mul_(1 / 255)))
        return out.reshape(*leading, self.outputs)


class ActorCritic(nn.Module):
    """A policy and a value function. With pixels or an LSTM they share what comes before their last layers."""

    def __init__(self, observations: Space[Any], actions: Space[Any], config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observations, config.normalize_observations)
        self.actions: Actions = actions_for(actions, config.log_std)
        size = self.encoder.outputs
        self.lstm = nn.LSTM(size, config.lstm) if config.lstm else None
        size = config.lstm or size
        self.policy = mlp(size, config.hidden, self.actions.outputs, last_gain=0.01)
        self.value = mlp(size, config.hidden, 1, last_gain=1.0)

    def features(self, observations: dict[str, Tensor], state: State | None = None) -> tuple[Tensor, State | None]:
        """Of one moment: (environments, ...)."""
        encoded = self.encoder(observations)
        if self.lstm is None or state is None:
            return encoded, state
        out, state = self.lstm(encoded.unsqueeze(0), state)
        return out.squeeze(0), state

    def sequence(self, observations: dict[str, Tensor], begins: Tensor, state: State | None) -> Tensor:
        """Features of (steps, environments, ...). ``begins`` says where an episode begins: there the state is zero."""
        encoded: Tensor = self.encoder(observations)
        if self.lstm is None or state is None:
            return encoded
        outs = []
        for row, begin in zip(encoded, begins, strict=True):
            state = masked(state, ~begin)
            out, state = self.lstm(row.unsqueeze(0), state)
            outs.append(out)
        return torch.cat(outs)

    def no_state(self, environments: int) -> State | None:
        if self.lstm is None:
            return None
        zeros = torch.zeros(1, environments, self.lstm.hidden_size)
        return zeros, zeros.clone()

    @torch.inference_mode()
    def act(self, observations: dict[str, Tensor], state: State | None) -> tuple[Tensor, Tensor, State | None]:
        features, state = self.features(observations, state)
        actions, log_probs = self.actions.sample(self.policy(features))
        return actions, log_probs, state

    @torch.inference_mode()
    def act_best(self, observations: dict[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        features, state = self.features(observations, state)
        return self.actions.most_likely(self.policy(features)), state


def masked(state: State, keep: Tensor) -> State:
    """Zero where an episode begins."""
    factor = keep.float().reshape(1, -1, 1)
    return state[0] * factor, state[1] * factor


def mlp(size: int, hidden: Sequence[int], outputs: int, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(size, width, math.sqrt(2)), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, _linear(size, outputs, last_gain))


def relu_mlp(size: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, outputs))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def leaves_of(space: Space[Any], path: str = "") -> dict[str, Space[Any]]:
    """The arrays of an observation, by the names that ``memlane.spaces`` gives them."""
    if isinstance(space, Dict):
        parts = [leaves_of(one, join_path(path, escape_key(key))) for key, one in space.spaces.items()]
        return {name: one for some in parts for name, one in some.items()}
    if not isinstance(space, Box | Discrete):
        raise TypeError(f"policies see Box and Discrete observations and dicts of them, found {space}")
    return {path or ROOT_NAME: space}


def observation_fields(space: Space[Any], leading: tuple[int, ...] = ()) -> dict[str, FieldSpec]:
    """Those arrays as fields of a slot or a row: ``obs.<name>``."""
    return {
        f"obs.{name}": (one.dtype or np.dtype("float32"), (*leading, *(one.shape or ())))
        for name, one in leaves_of(space).items()
    }


def arrays_of(space: Space[Any], observations: Any, path: str = "") -> dict[str, Any]:
    """A batch of observations as the arrays that ``leaves_of`` names."""
    if isinstance(space, Dict):
        parts = [
            arrays_of(one, observations[key], join_path(path, escape_key(key))) for key, one in space.spaces.items()
        ]
        return {name: one for some in parts for name, one in some.items()}
    return {path or ROOT_NAME: observations}


def is_picture(space: Space[Any]) -> bool:
    if not isinstance(space, Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    sides = space.shape[:2] if len(space.shape) == 3 and space.shape[-1] <= 4 else space.shape[-2:]
    return min(sides) >= 36


def _width(space: Space[Any]) -> int:
    return int(space.n) if isinstance(space, Discrete) else int(np.prod(space.shape or ()))


def _key(name: str) -> str:
    """Module names have no dots."""
    return name.replace(".", "/")
