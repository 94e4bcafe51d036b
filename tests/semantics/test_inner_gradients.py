"""Forwards and backwards that ask autograd for gradients are one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.torch_internals.version import TORCH
from tests.semantics.against_autograd import assert_equals_autograd


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def energy(self, x: Tensor) -> Tensor:
        energy: Tensor = self.outer(self.inner(x).tanh())
        return energy

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Forces(Energy):
    """A field and its derivative, as in interatomic potentials."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -forces


class Penalty(Energy):
    """A penalty on the norm of a gradient, as critics have."""

    def forward(self, x: Tensor) -> Tensor:
        moved = 2 * x
        scores = self.energy(moved)
        ones = torch.ones_like(scores)
        (slope,) = torch.autograd.grad(scores, moved, ones, create_graph=True)
        return scores.mean() + (slope.norm(2, dim=1) - 1).square().mean()


class InnerStep(Energy):
    """A step of learning inside of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.energy(x).square().mean()
        (slope,) = torch.autograd.grad(loss, self.inner.weight, create_graph=True)
        learnt = F.linear(x, self.inner.weight - 0.1 * slope, self.inner.bias)
        return self.outer(learnt.tanh())


class Recomputing(torch.autograd.Function):
    """Keeps inputs, and runs the module again in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            result = ctx.module(again)
            wanted: Sequence[Tensor] = [again, *ctx.module.parameters()]
            return None, *torch.autograd.grad(result, wanted, grad)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return Recomputing.apply(self.inner, self.first(x), *self.inner.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11 does
@pytest.mark.parametrize("model", [Forces, Penalty, InnerStep, Recomputed])
def test_gradients_inside_are_part_of_the_graph(model: type[nn.Module]) -> None:
    split = assert_equals_autograd(model(), [(torch.randn(4, 8).requires_grad_(),)] * 2)
    if TORCH >= (2, 12) or model is not Recomputed:  # which runs in parts there
        assert len(split.functions) == 1
