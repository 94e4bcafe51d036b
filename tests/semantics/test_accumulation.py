"""Gradients that add up over backwards, optimizer steps and other models' backwards."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

import autosplit
from tests.semantics.against_autograd import both_modes


@both_modes
def test_several_optimizer_steps(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model.train(training)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    batches = [torch.randn(3, 4) for _ in range(9)]
    for step in range(3):
        for module in (split, plain):
            for batch in batches[3 * step : 3 * step + 3]:
                module(batch).square().mean().backward()
        split.backward_weight(microbatches=2)
        split.backward_weight()
        if step != 1:  # the second step's gradients stay and add up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameter_shared_with_a_module_that_is_not_split() -> None:
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4)
    outer.weight = inner.weight
    plain = copy.deepcopy(nn.ModuleList([inner, outer]))
    split = autosplit.split(inner)
    x = torch.randn(3, 4)
    for _ in range(2):
        outer(split(x).relu()).sum().backward()
        plain[1](plain[0](x).relu()).sum().backward()
    split.backward_weight()
    torch.testing.assert_close(inner.weight.grad, plain[0].weight.grad)


def test_two_split_modules_in_a_row() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    plain = copy.deepcopy(nn.Sequential(first, last))
    a, b = autosplit.split(first, max_pending=math.inf), autosplit.split(last, max_pending=math.inf)
    x = torch.randn(3, 4)
    for _ in range(2):
        b(a(x)).square().sum().backward()
        plain(x).square().sum().backward()
    assert (a.pending, b.pending) == (2, 2)
    a.backward_weight()
    b.backward_weight()
    mine = [*first.parameters(), *last.parameters()]
    for parameter, theirs in zip(mine, plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, theirs.grad)
