"""weight_flops: which graph makes the products of weight gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autosplit
from autosplit.passes.analysis.operator_cost import weight_flops

PRODUCT = 2 * 3 * 4 * 4


def found(model: nn.Module, **options: object) -> tuple[int, int]:
    split = autosplit.split(model, **options)
    split(torch.randn(3, 4, requires_grad=True)).sum().backward()
    return weight_flops(split.functions[-1].graphs)


def test_products_wait() -> None:
    assert found(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))) == (2 * PRODUCT, 0)


def test_a_tied_weight_has_two_products() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).tanh())

    assert found(Tied()) == (2 * PRODUCT, 0)


def test_what_a_budget_has_i_do_is_counted_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    waiting, early = found(model, memory=1)
    assert waiting + early == 2 * PRODUCT
    assert early > 0


def test_a_convolution() -> None:
    split = autosplit.split(nn.Conv2d(2, 3, 3))
    split(torch.randn(1, 2, 5, 5, requires_grad=True)).sum().backward()
    assert weight_flops(split.functions[-1].graphs) == (2 * 3 * 3 * 2 * 3 * 3 * 3, 0)
