"""Returns: advantages and value targets of rollouts, time first: shape (steps, environments).

Environments reset in the place of a step (Gymnasium's ``NEXT_STEP``), so the observation after a step that ended an
episode is that episode's last one. Its value is what a truncated episode is continued with. The step after it is no
transition: ``valid`` is False there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, ended: Tensor, valid: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman and others, 2016): advantages and value targets.

    ``values`` has one row more than the others: of the observations that the last steps left."""
    advantages = torch.zeros_like(rewards)
    goes_on = (~ended).float()
    deltas = rewards + gamma * (~terminated).float() * values[1:] - values[:-1]
    following = torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        following = (deltas[t] + gamma * lam * goes_on[t] * following) * valid[t]
        advantages[t] = following
    return advantages, advantages + values[:-1]


def v_trace(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    valid: Tensor,
    log_ratios: Tensor,
    gamma: float,
    lam: float,
    most_rho: float = 1.0,
    most_c: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt and others, 2018), for rollouts that an older policy made: ``log_ratios`` are the logarithms of
    how much more likely the current policy is to do what was done. With ratios of 1 it is GAE. The advantages are not
    multiplied with the ratios: PPO's loss does that."""
    ratios = log_ratios.exp()
    rhos, cs = ratios.clamp(max=most_rho), lam * ratios.clamp(max=most_c)
    goes_on = (~ended).float()
    next_values = gamma * (~terminated).float() * values[1:]
    deltas = rhos * (rewards + next_values - values[:-1])
    corrections = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        following = (deltas[t] + gamma * cs[t] * goes_on[t] * following) * valid[t]
        corrections[t] = following
    targets = values[:-1] + corrections
    # lam weighs what follows as GAE does, so that lag 0 and lag 1 want the same of the policy.
    later = torch.cat([corrections[1:], torch.zeros_like(corrections[:1])])
    advantages = rewards + next_values + gamma * lam * goes_on * later - values[:-1]
    return advantages * valid, targets
