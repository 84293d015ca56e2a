"""Adam over one tensor: what torch's does, and what lies where."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from memlane.train.optim import Adam, flatten


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net: nn.Module, step: int) -> Tensor:
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
    return (net(rows) * 10).square().mean()


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9], ids=["as it is", "clipped", "short enough"])
def test_it_steps_as_torchs_does(max_norm: float) -> None:
    mine, theirs = network(), network()
    adam = Adam(mine.parameters(), 1e-2, eps=1e-5)
    torchs = torch.optim.Adam(theirs.parameters(), 1e-2, eps=1e-5)
    for step in range(20):
        adam.step(loss_of(mine, step), max_norm)
        torchs.zero_grad()
        loss_of(theirs, step).backward()  # type: ignore[no-untyped-call]
        if max_norm:
            nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        torchs.step()
    for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_flattened_parameters_keep_their_values_and_are_views_of_one_tensor() -> None:
    net = network()
    before = [one.detach().clone() for one in net.parameters()]
    flat = flatten(net.parameters())
    assert all(torch.equal(one, two) for one, two in zip(net.parameters(), before, strict=True))
    flat.zero_()
    assert not any(one.any() for one in net.parameters())


def test_what_is_loaded_into_a_module_reaches_the_flat_tensor() -> None:
    net, other = network(), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    flat = flatten(net.parameters())
    net.load_state_dict(other.state_dict())
    assert torch.equal(flat, torch.cat([one.detach().flatten() for one in other.parameters()]))


def test_only_its_own_parameters_are_changed_and_nothing_is_left_at_the_others() -> None:
    mine, shared = network(), nn.Linear(2, 1)
    before = deepcopy(shared.state_dict())
    Adam(mine.parameters(), 1e-2).step(shared(mine(torch.ones(4, 3))).sum())
    assert all(torch.equal(before[name], value) for name, value in shared.state_dict().items())
    assert shared.weight.grad is None


def test_it_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    whole, parts = network(), network()
    first = Adam(whole.parameters(), 1e-2)
    for step in range(6):
        first.step(loss_of(whole, step))
    begun = Adam(parts.parameters(), 1e-2)
    for step in range(3):
        begun.step(loss_of(parts, step))
    resumed = Adam(parts.parameters(), 1e-2)
    resumed.load_state_dict(deepcopy(begun.state_dict()))
    for step in range(3, 6):
        resumed.step(loss_of(parts, step))
    assert torch.equal(first.flat, resumed.flat)
