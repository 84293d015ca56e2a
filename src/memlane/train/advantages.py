"""Advantages and value targets of rollouts, time first: tensors of shape (steps, environments).

Environments use Gymnasium's ``NEXT_STEP`` autoreset, so the observation after a step that ends an episode is the final
observation of that episode, and its value bootstraps a truncated one. The step after it only resets the environment and
is no transition: ``valid`` is False there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, dones: Tensor, valid: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016): advantages and value targets.

    ``values`` has one row more than the other tensors: the values of the observations after the last steps."""
    advantages = torch.zeros_like(rewards)
    continues = (~dones).float()
    deltas = rewards + gamma * (~terminated).float() * values[1:] - values[:-1]
    advantage = torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        advantage = (deltas[t] + gamma * gae_lambda * continues[t] * advantage) * valid[t]
        advantages[t] = advantage
    return advantages, advantages + values[:-1]


def v_trace(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    dones: Tensor,
    valid: Tensor,
    log_ratios: Tensor,
    gamma: float,
    gae_lambda: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018) for rollouts of an older policy: advantages and value targets.

    ``log_ratios`` are the log-probabilities of the actions under the current policy minus those under the policy that
    collected them. With ratios of 1 the result is GAE's. The advantages are not multiplied by the ratios: PPO's loss
    does that."""
    ratios = log_ratios.exp()
    rhos, cs = ratios.clamp(max=rho_bar), gae_lambda * ratios.clamp(max=c_bar)
    continues = (~dones).float()
    next_values = gamma * (~terminated).float() * values[1:]
    deltas = rhos * (rewards + next_values - values[:-1])
    corrections = torch.zeros_like(rewards)
    correction = torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        correction = (deltas[t] + gamma * cs[t] * continues[t] * correction) * valid[t]
        corrections[t] = correction
    targets = values[:-1] + corrections
    # gae_lambda weighs the following steps as in GAE, so that the policy's objective is the same at lag 0 and lag 1.
    next_corrections = torch.cat([corrections[1:], torch.zeros_like(corrections[:1])])
    advantages = rewards + next_values + gamma * gae_lambda * continues * next_corrections - values[:-1]
    return advantages * valid, targets
