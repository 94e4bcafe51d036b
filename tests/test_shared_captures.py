"""Stages of equal modules share graphs in some tests; those of other modules do not."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import Stage
from autosplit.runtime import specializations
from tests.gradients import assert_same_gradients
from tests.shared_captures import SharingTrace, share_captures


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.first(x)) * self.factor
        return self.second(x) if self.training else x + self.second(x)


@pytest.fixture
def sharing() -> Iterator[SharingTrace]:
    share_captures()
    trace: Any = specializations.trace
    yield trace
    share_captures(False)


def assert_as_autograd(net: Any, rows: int = 3, *, needs_grad: bool = True) -> None:
    """Two microbatches of a stage have the gradients of autograd."""
    twin, batches = copy.deepcopy(net), torch.randn(2, rows, 4)
    stage = Stage(net, [torch.randn(rows, 4, requires_grad=needs_grad)])
    for microbatch, x in enumerate(batches):
        inputs = x.clone().requires_grad_(needs_grad)
        expected = twin(inputs)
        assert torch.equal(stage.forward(microbatch, [x.clone()])[0], expected)
        expected.sum().backward()
        (grad,) = stage.backward_input(microbatch, [torch.ones_like(expected)])
        assert grad is None or torch.equal(grad, inputs.grad)
        stage.backward_weight(microbatch)
    stage.publish()
    assert_same_gradients(net, twin)


def tie(net: Net) -> None:
    net.second.weight = net.first.weight


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def shorter(net: Net, x: Tensor) -> Tensor:
    return net.second(net.first(x))


CHANGES: dict[str, Callable[[Net], Any]] = {
    "an attribute": lambda net: setattr(net, "factor", 3.0),
    "a function": lambda net: setattr(net, "function", F.gelu),
    "evaluation": lambda net: net.eval(),
    "a frozen parameter": lambda net: net.first.bias.requires_grad_(False),
    "a tied parameter": tie,
    "a layer without a bias": lambda net: setattr(net, "first", nn.Linear(4, 4, bias=False)),
    "a hook": lambda net: net.first.register_forward_hook(double),
    "another forward": lambda net: setattr(net, "forward", types.MethodType(shorter, net)),
}


def test_an_equal_module_takes_the_graphs_and_has_its_own_gradients(sharing: SharingTrace) -> None:
    assert_as_autograd(Net())
    hits = sharing.hits
    assert_as_autograd(Net())
    assert sharing.hits == hits + 1


@pytest.mark.parametrize("change", CHANGES)
def test_another_module_is_captured(change: str, sharing: SharingTrace) -> None:
    assert_as_autograd(Net())
    hits, changed = sharing.hits, Net()
    CHANGES[change](changed)
    assert_as_autograd(changed)
    assert sharing.hits == hits


@pytest.mark.parametrize("options", [{"rows": 5}, {"needs_grad": False}])
def test_other_inputs_are_captured(options: dict[str, Any], sharing: SharingTrace) -> None:
    assert_as_autograd(Net())
    hits = sharing.hits
    assert_as_autograd(Net(), **options)
    assert sharing.hits == hits
