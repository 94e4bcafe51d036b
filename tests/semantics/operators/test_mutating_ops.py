"""Custom operators that write into their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd


@torch.library.custom_op("autosplit_tests::write_sine", mutates_args=("out",))
def write_sine(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


@torch.library.custom_op("autosplit_tests::count", mutates_args=("counter",))
def count(x: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return x * 2


@torch.library.custom_op(
    "autosplit_tests::noise", mutates_args=("out",), tags=[torch.Tag.nondeterministic_seeded]
)
def noise(out: Tensor) -> None:
    out.copy_(torch.rand_like(out))


write_sine.register_fake(lambda x, out: None)
count.register_fake(lambda x, counter: torch.empty_like(x))
noise.register_fake(lambda out: None)
library = torch.library.Library("autosplit_tests", "FRAGMENT")
library.define("add_(Tensor(a!) self, Tensor x) -> Tensor(a!)")
library.impl("add_", lambda y, x: y.add_(x), "CompositeExplicitAutograd")


class Uses(nn.Module):
    def __init__(self, make: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("counter", torch.zeros(4))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


def fresh(module: Any, x: Tensor) -> Tensor:
    out = torch.empty(3, 4)
    write_sine(x.detach(), out)
    return module.linear(x) * out


def part_of_a_tensor(module: Any, x: Tensor) -> Tensor:
    out = torch.zeros(6, 4)
    write_sine(x.detach(), out[1:4])
    return module.linear(x) * out[:3]


def buffer(module: Any, x: Tensor) -> Tensor:
    y = count(x.detach(), module.counter)
    return module.linear(x) * y + module.counter


def random(module: Any, x: Tensor) -> Tensor:
    """Drawn in the forward though only the backward reads it."""
    scale = torch.empty(3, 4)
    noise(scale)
    return F.dropout(module.linear(x) * scale, 0.5, module.training)


def returned(module: Any, x: Tensor) -> Tensor:
    y = torch.ops.autosplit_tests.add_(torch.zeros(3, 4), x.detach())
    return module.linear(x) * y


CASES = [fresh, part_of_a_tensor, buffer, random]


@pytest.mark.parametrize("make", CASES)
def test_equals_autograd(make: Callable[[Any, Tensor], Tensor]) -> None:
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    split = assert_equals_autograd(Uses(make), batch)
    assert len(split.functions) == 1  # a whole graph, no parts


def test_operator_that_returns_its_argument() -> None:
    """AOTAutograd refuses it; Dynamo's graph runs."""
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    split = assert_equals_autograd(Uses(returned), batch)
    assert "whose output has alias annotations: autosplit_tests::add_" in split.report()
    with pytest.raises(CaptureError, match="whose output has alias annotations"):
        autosplit.split(Uses(returned), fullgraph=True)(*batch[0])
