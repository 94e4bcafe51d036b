"""Weight gradients that graphs add into ``.grad`` themselves: into sums that they made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit.pipelining import weight_gradients
from autosplit.pipelining.weight_gradients import WeightGradients
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import InFlightMicrobatch


class Computed(nn.Module):
    """A weight that is computed, so that W reads the parameter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.held = torch.randn(4, 3)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.two.weight.sin() * self.held[1:]
        return F.linear(torch.sin(self.one(x)), weight, self.two.bias)


def no_gradient(model: Computed, x: Tensor) -> None:
    model.two.bias.grad = None


def sparse(model: Computed, x: Tensor) -> None:
    model.one.weight.grad = torch.eye(3).to_sparse()


def turned(model: Computed, x: Tensor) -> None:
    model.two.weight.grad = torch.randn(3, 3, generator=torch.manual_seed(3)).t()


def one_for_two(model: Computed, x: Tensor) -> None:
    model.two.weight.grad = model.one.weight.grad


def overlapping(model: Computed, x: Tensor) -> None:
    memory = torch.ones(4, 3)
    model.one.weight.grad, model.two.weight.grad = memory[:3], memory[1:]


def input_of_the_model(model: Computed, x: Tensor) -> None:
    model.one.weight.grad = x[:3]


def weight_itself(model: Computed, x: Tensor) -> None:
    model.two.weight.grad = model.two.weight.detach()


def constant(model: Computed, x: Tensor) -> None:
    model.two.weight.grad = model.held[1:]


def parameter_as_gradient(model: Computed, x: Tensor) -> None:
    model.one.weight.grad = nn.Parameter(torch.ones(3, 3), requires_grad=False)


def other_dtype(model: Computed, x: Tensor) -> None:
    model.one.weight.grad = None
    model.one.weight.grad_dtype = torch.float64
    model.one.weight.grad = torch.ones(3, 3, dtype=torch.float64)


DISTURBED = [
    no_gradient,
    sparse,
    turned,
    one_for_two,
    overlapping,
    input_of_the_model,
    weight_itself,
    constant,
    parameter_as_gradient,
    pytest.param(  # leaves its dtype behind
        other_dtype,
        marks=pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="no grad_dtype"),
    ),
]


@pytest.fixture(scope="module")
def split() -> tuple[Computed, SplitFunctions]:
    model = Computed()
    made = autosplit.split(model, (torch.randn(4, 3),))
    return model, made.functions[0]


@torch.no_grad()
def microbatch(
    weights: WeightGradients, functions: SplitFunctions, model: nn.Module, x: Tensor, disturb: Any
) -> None:
    """F, I and W."""
    state = dict(model.named_parameters())
    outputs, _, saved = functions.forward(state, [x])
    disturb(model, x)
    flight = InFlightMicrobatch(functions, saved, state, frozenset())
    _, work = weights.input(flight, [2 * outputs[0]], frozenset())
    weights.deferred(work)


@pytest.mark.parametrize("disturb", DISTURBED)
def test_graphs_add_only_where_nothing_else_lies(
    disturb: Callable[[Computed, Tensor], Any],
    split: tuple[Computed, SplitFunctions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of gradients that are added behind the graph."""
    model, functions = split
    x, held, state = torch.randn(4, 3), model.held.clone(), copy.deepcopy(model.state_dict())
    found, inside = [], mock.Mock(wraps=weight_gradients.increment_version)
    monkeypatch.setattr(weight_gradients, "increment_version", inside)
    for small in (2**20, 0):
        monkeypatch.setattr(weight_gradients, "_SMALL", small)
        weights = WeightGradients()
        model.load_state_dict(state)
        model.held.copy_(held)
        model.zero_grad()
        if hasattr(Tensor, "grad_dtype"):
            model.one.weight.grad_dtype = None
        for _ in range(2):
            microbatch(weights, functions, model, x.clone(), lambda model, x: None)
        assert inside.called != bool(small)
        inside.reset_mock()
        microbatch(weights, functions, model, x.clone(), disturb)
        inside.assert_not_called()
        found.append([parameter.grad.to_dense() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
