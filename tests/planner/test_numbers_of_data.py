"""Stages of a model with numbers that its capture does not know: read by backwards, or data."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autosplit
from autosplit.planner import WholeModel, cut
from tests.planner.whole_models import run_modules


class Scaler(torch.autograd.Function):
    """The scaler of an auxiliary loss: its backward reads a number of its class."""

    scale: Any = 1.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (aux_loss,) = ctx.saved_tensors
        return grad, torch.ones_like(aux_loss) * Scaler.scale


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x).softmax(-1)
        aux_loss = routes.mean(0).square().sum()
        result: Tensor = Scaler.apply(self.up(x) * routes[:, :1], aux_loss)
        return result


class ScaledInCheckpoint(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Chosen(nn.Module):
    """In a checkpointed region, the data says how many samples are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._forward, x, use_reentrant=False)
        return result

    def _forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        positive = (y[:, 0] > 0).nonzero()[:, 0]
        return y.index_add(0, positive, y[positive].tanh())


class CubedByNumpy(torch.autograd.Function):
    """Forward and backward call functions, methods and operators of NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        values = x.detach().numpy()
        return torch.from_numpy(np.square(values) * values.copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(3 * np.square(x.numpy()))


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = CubedByNumpy.apply(self.layer(x))
        return result


@pytest.mark.parametrize(
    ("block", "one"),
    [(Scaled, 1.0), (Scaled, 1), (ScaledInCheckpoint, 1.0), (Chosen, 1.0), (Cubed, 1.0)],
)
def test_split_stages_find_numbers_when_they_run(block: type[nn.Module], one: Any) -> None:
    Scaler.scale = one
    model = nn.Sequential(*(block() for _ in range(2))).double()
    reference = copy.deepcopy(model)
    whole = WholeModel.capture(model, torch.ones(6, 4, dtype=torch.float64))
    plan = cut(*whole.divided(["1"]))
    modules = [autosplit.split(plan.build(index), fullgraph=True) for index in range(2)]
    for step in range(2):
        x = torch.randn(6, 4, dtype=torch.float64)
        result = run_modules(plan, modules, [x])
        expected = reference(x)
        Scaler.scale = (2 + step) * one  # between forward and backward
        for y in (result, expected):
            y.square().sum().backward()
        for module in modules:
            module.backward_weight()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
