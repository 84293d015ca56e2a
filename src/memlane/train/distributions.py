"""Distributions over actions, parameterised by the outputs of a policy's last layer.

Plain tensor arithmetic: torch.distributions checks and wraps so much that it takes longer than a small network does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from torch import Tensor, nn


class Distribution(nn.Module, ABC):
    """A distribution over actions. ``params`` are outputs of a network, ``num_params`` for each row."""

    num_params: int
    """Network outputs that parameterise the distribution."""
    dtype: torch.dtype
    """Dtype of sampled actions."""
    shape: tuple[int, ...]
    """Shape of one sampled action."""

    @abstractmethod
    def sample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions; return them and their log-probabilities."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """Return the most likely actions."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor: ...

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor: ...

    def to_env(self, actions: Tensor) -> Any:
        """Convert actions to arrays of the environment's action space."""
        return actions.numpy()


class Categorical(Distribution):
    """One of ``n`` actions, numbered from ``start`` in the environment: ``Discrete``."""

    dtype = torch.int64
    shape = ()

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__()
        self.num_params = n
        self.start = start

    def sample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        # Gumbel's trick: the argmax of logits plus noise is a sample.
        actions = (params - torch.empty_like(params).exponential_().log_()).argmax(-1)
        return actions, self.log_prob(params, actions)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return params.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_probs = params.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    def to_env(self, actions: Tensor) -> Any:
        return actions.numpy() + self.start


class MultiCategorical(Distribution):
    """Several independent categorical actions: ``MultiDiscrete``."""

    dtype = torch.int64

    def __init__(self, counts: list[int], start: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.counts = counts
        self.num_params = sum(counts)
        self.shape = (len(counts),)
        self._parts = [Categorical(count) for count in counts]
        self._start = np.asarray(start).reshape(-1)
        self._env_shape = shape

    def _split(self, params: Tensor) -> tuple[Tensor, ...]:
        return torch.split(params, self.counts, -1)

    def sample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        samples = [part.sample(logits) for part, logits in zip(self._parts, self._split(params), strict=True)]
        return torch.stack([action for action, _ in samples], -1), torch.stack([log for _, log in samples]).sum(0)

    def mode(self, params: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in self._split(params)], -1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        parts = zip(self._parts, self._split(params), actions.unbind(-1), strict=True)
        return torch.stack([part.log_prob(logits, action) for part, logits, action in parts]).sum(0)

    def entropy(self, params: Tensor) -> Tensor:
        parts = zip(self._parts, self._split(params), strict=True)
        return torch.stack([part.entropy(logits) for part, logits in parts]).sum(0)

    def to_env(self, actions: Tensor) -> Any:
        return (actions.numpy() + self._start).reshape(len(actions), *self._env_shape)


class DiagGaussian(Distribution):
    """Independent normal distributions: ``Box``. The standard deviations are learned and do not depend on the
    observation. The environment gets actions clipped to its bounds; log-probabilities are of the unclipped ones."""

    dtype = torch.float32

    def __init__(self, space: Box, log_std: float = 0.0) -> None:
        super().__init__()
        self.num_params = int(np.prod(space.shape))
        self.shape = (self.num_params,)
        self.log_std = nn.Parameter(torch.full((self.num_params,), float(log_std)))
        self._low, self._high, self._dtype = space.low, space.high, space.dtype

    def sample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        actions = params + self.log_std.exp() * torch.randn_like(params)
        return actions, self.log_prob(params, actions)

    def mode(self, params: Tensor) -> Tensor:
        return params

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        deviations = (actions - params) / self.log_std.exp()
        return (-0.5 * deviations * deviations - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return entropy.expand(params.shape[:-1])

    def to_env(self, actions: Tensor) -> Any:
        shaped = actions.numpy().reshape(len(actions), *self._low.shape)
        return np.clip(shaped, self._low, self._high).astype(self._dtype, copy=False)


def make_distribution(space: Space[Any], log_std: float = 0.0) -> Distribution:
    """Make the distribution for an action space. ``log_std``: initial log standard deviation of ``Box`` actions."""
    if isinstance(space, Discrete):
        return Categorical(int(space.n), int(space.start))
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(space.nvec.reshape(-1).tolist(), space.start, space.nvec.shape)
    if isinstance(space, Box):
        return DiagGaussian(space, log_std)
    raise TypeError(
        f"actions must be Discrete, MultiDiscrete or Box, found {space}; convert them in a wrapper of the environment"
    )
