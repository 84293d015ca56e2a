"""Actions: what a policy's last layer means, for each kind of action space.

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


class Actions(nn.Module, ABC):
    """``outputs`` numbers of a network, as a distribution over actions."""

    outputs: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def sample(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, and the logarithms of their probabilities."""

    @abstractmethod
    def most_likely(self, given: Tensor) -> Tensor: ...

    @abstractmethod
    def log_prob(self, given: Tensor, actions: Tensor) -> Tensor: ...

    @abstractmethod
    def entropy(self, given: Tensor) -> Tensor: ...

    def for_env(self, actions: Tensor) -> Any:
        """As the environment wants them."""
        return actions.numpy()


class Choice(Actions):
    """One of ``n``."""

    dtype = torch.int64
    shape = ()

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__()
        self.outputs = n
        self.start = start

    def sample(self, given: Tensor) -> tuple[Tensor, Tensor]:
        # Gumbel's trick: the largest of logits plus noise is a sample.
        actions = (given - torch.empty_like(given).exponential_().log_()).argmax(-1)
        return actions, self.log_prob(given, actions)

    def most_likely(self, given: Tensor) -> Tensor:
        return given.argmax(-1)

    def log_prob(self, given: Tensor, actions: Tensor) -> Tensor:
        return given.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, given: Tensor) -> Tensor:
        logs = given.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def for_env(self, actions: Tensor) -> Any:
        return actions.numpy() + self.start


class Choices(Actions):
    """Several choices at once, each one of its own number."""

    dtype = torch.int64

    def __init__(self, counts: list[int], start: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.counts = counts
        self.outputs = sum(counts)
        self.shape = (len(counts),)
        self._each = [Choice(count) for count in counts]
        self._start = np.asarray(start).reshape(-1)
        self._shape_in_env = shape

    def _split(self, given: Tensor) -> tuple[Tensor, ...]:
        return torch.split(given, self.counts, -1)

    def sample(self, given: Tensor) -> tuple[Tensor, Tensor]:
        parts = [one.sample(some) for one, some in zip(self._each, self._split(given), strict=True)]
        return torch.stack([action for action, _ in parts], -1), torch.stack([log for _, log in parts]).sum(0)

    def most_likely(self, given: Tensor) -> Tensor:
        return torch.stack([some.argmax(-1) for some in self._split(given)], -1)

    def log_prob(self, given: Tensor, actions: Tensor) -> Tensor:
        parts = zip(self._each, self._split(given), actions.unbind(-1), strict=True)
        return torch.stack([one.log_prob(some, action) for one, some, action in parts]).sum(0)

    def entropy(self, given: Tensor) -> Tensor:
        parts = zip(self._each, self._split(given), strict=True)
        return torch.stack([one.entropy(some) for one, some in parts]).sum(0)

    def for_env(self, actions: Tensor) -> Any:
        return (actions.numpy() + self._start).reshape(len(actions), *self._shape_in_env)


class Amounts(Actions):
    """Numbers: a normal distribution each, whose width is learned but does not depend on the observation. The
    environment gets them clipped to its bounds; probabilities are of what was drawn."""

    dtype = torch.float32

    def __init__(self, space: Box, log_std: float = 0.0) -> None:
        super().__init__()
        self.outputs = int(np.prod(space.shape))
        self.shape = (self.outputs,)
        self.log_std = nn.Parameter(torch.full((self.outputs,), float(log_std)))
        self._low, self._high, self._dtype = space.low, space.high, space.dtype

    def sample(self, given: Tensor) -> tuple[Tensor, Tensor]:
        actions = given + self.log_std.exp() * torch.randn_like(given)
        return actions, self.log_prob(given, actions)

    def most_likely(self, given: Tensor) -> Tensor:
        return given

    def log_prob(self, given: Tensor, actions: Tensor) -> Tensor:
        away = (actions - given) / self.log_std.exp()
        return (-0.5 * away * away - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, given: Tensor) -> Tensor:
        one = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return one.expand(given.shape[:-1])

    def for_env(self, actions: Tensor) -> Any:
        shaped = actions.numpy().reshape(len(actions), *self._low.shape)
        return np.clip(shaped, self._low, self._high).astype(self._dtype, copy=False)


def actions_for(space: Space[Any], log_std: float = 0.0) -> Actions:
    if isinstance(space, Discrete):
        return Choice(int(space.n), int(space.start))
    if isinstance(space, MultiDiscrete):
        return Choices(space.nvec.reshape(-1).tolist(), space.start, space.nvec.shape)
    if isinstance(space, Box):
        return Amounts(space, log_std)
    raise TypeError(f"policies know Discrete, MultiDiscrete and Box actions, found {space}")
