"""In-place operators on activations and on inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from tests.semantics.against_autograd import (
    assert_equals_autograd,
    assert_same,
    assert_same_state,
)


class Module(nn.Module):
    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, *args: Tensor) -> Tensor:
        return self.make(self, *args)


def writes_activation(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    h[:, 0] = 0.0
    h.add_(1.0)
    h[1:].mul_(2.0)
    return h.relu_()


def writes_view(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    h.view(-1)[:3].copy_(x.view(-1)[:3])
    return h * x


def writes_input(module: Any, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return module.linear(x)


@pytest.mark.parametrize("make", [writes_activation, writes_view])
def test_activations(make: Callable[..., Tensor]) -> None:
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(Module(make), batch)


def test_input_that_needs_no_gradient() -> None:
    assert_equals_autograd(Module(writes_input), [(torch.randn(3, 4),) for _ in range(2)])


def relu_first(module: Any, x: Tensor) -> Tensor:
    return module.linear(torch.relu_(x))


def writes_a_part(module: Any, x: Tensor) -> Tensor:
    x[:, 0].mul_(3.0)
    return module.linear(x.tanh_()) * x.exp()


def nobody_reads(module: Any, x: Tensor) -> Tensor:
    h = module.linear(torch.ones(3, 4))
    x.mul_(2.0)
    return h


@pytest.mark.parametrize("make", [writes_input, relu_first, writes_a_part, nobody_reads])
def test_computed_input(make: Callable[..., Tensor]) -> None:
    """Written into where it needs a gradient, which autograd allows for what was computed."""
    plain = Module(make)
    split = autosplit.split(copy.deepcopy(plain), fullgraph=True, max_pending=math.inf)
    leaves = [torch.randn(3, 4).requires_grad_() for _ in range(2)]
    expected = _overwritten(plain, leaves)
    found = _overwritten(split, leaves)
    assert split.pending == 2
    split.backward_weight()
    assert_same("outputs, inputs, their gradients", found, expected)
    assert_same_state(split.model, plain, assert_same)


def _overwritten(module: nn.Module, leaves: list[Tensor]) -> list[Any]:
    """Outputs, inputs afterwards and their gradients; every forward before the first backward."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    given = [leaf * 1.5 for leaf in leaves]
    outputs = [module(each) for each in given]
    after = [each.detach().clone() for each in given]
    for output in outputs:
        output.square().sum().backward()
    return [*(output.detach() for output in outputs), *after, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("view", [False, True])
def test_leaf_is_refused(view: bool) -> None:
    """By autograd itself, also where the graph is there already."""
    split = autosplit.split(Module(writes_input))
    split(torch.ones(3, 4).requires_grad_() * 1.0)
    leaf = torch.ones(3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        split(leaf.view(3, 4) if view else leaf)


def test_the_input_has_its_new_value() -> None:
    split = autosplit.split(Module(writes_input))
    x = torch.ones(2, 4)
    split(x)
    split(x)
    assert x.tolist() == [[4.0] * 4] * 2


def test_input_that_shares_memory() -> None:
    """The graph was captured for inputs apart from each other."""
    split = autosplit.split(Module(lambda m, x, y: m.linear(x.add_(1.0)) * y))
    split(torch.zeros(3, 4), torch.zeros(3, 4))
    rows = torch.zeros(4, 4)
    expected = r"writes into args\[0\], which shares its memory with args\[1\]; pass a clone"
    with pytest.raises(SplitError, match=expected):
        split(rows[:3], rows[1:])
