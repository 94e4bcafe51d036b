"""Layers that look repeated and are not: traced whole, with right gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.repeated_layers.layered import (
    WIDTH,
    Residual,
    Stack,
    assert_as_whole,
    captured,
    watched,
)
from tests.semantics.against_autograd import assert_equals_autograd

ODD = 3  # of eight layers: one in the middle, with too few on either side
MIDDLE = 5  # a layer that would be left out


class Scaled(Residual):
    """A constant of its own for one of the layers."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 0.5 if index == ODD else 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Branching(Residual):
    """Another branch in one of the layers."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp() if self.index == ODD else super().forward(x).sin()


class Wide(Residual):
    """One of the layers is wider inside."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == ODD:
            self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, False)


class Returning(Stack):
    """What a layer in the middle makes is read behind all layers."""

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(states[-1] + states[MIDDLE])


class Summing(Stack):
    """What every layer makes is read behind all layers."""

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(torch.stack(states).sum(0))


class ReturningOne(Stack):
    """A layer in the middle returns what others keep."""

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states[-1], states[MIDDLE]


class ReturningItsInput(Stack):
    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


class Normalised(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def frozen() -> nn.Module:
    model = Stack()
    model.layers[ODD].requires_grad_(False)
    return model


def tied_layers() -> nn.Module:
    model = Stack()
    model.layers[ODD].up.weight = model.layers[1].up.weight
    return model


def tied_to_the_head() -> nn.Module:
    model = Stack()
    model.head = nn.Linear(WIDTH, 2 * WIDTH)
    model.head.weight = model.layers[ODD].up.weight
    return model


def hooked() -> nn.Module:
    model = Stack()
    model.layers[ODD].register_forward_hook(lambda module, args, output: output * 3)
    return model


def halved() -> nn.Module:
    """The last layers are of another kind: either half is too short."""
    return Stack(lambda index: Residual(index) if index < 4 else Wide(ODD))


UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "constant": lambda: Stack(Scaled),
    "branch": lambda: Stack(Branching),
    "width": lambda: Stack(Wide),
    "read_at_the_end": Returning,
    "all_read_at_the_end": Summing,
    "returned": ReturningOne,
    "input_returned": ReturningItsInput,
    "frozen": frozen,
    "tied_layers": tied_layers,
    "tied_to_the_head": tied_to_the_head,
    "hook": hooked,
    "halves": halved,
    "running_statistics": lambda: Stack(Normalised),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_is_traced_whole(name: str) -> None:
    model, x = UNLIKE[name](), torch.randn(5, WIDTH, requires_grad=True)
    with watched() as traces:
        captured(model, (x,), {})
    assert traces.layers == [False]


class Deep(nn.Module):
    """One odd layer among many: those before it repeat themselves, and those behind it."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.stack = Stack(lambda index: Wide(ODD) if index == odd else Residual(index), 14)

    def forward(self, x: Tensor) -> Any:
        return self.stack(x)


@pytest.mark.parametrize("odd", [2, 11])
def test_an_odd_layer_stays_where_it_is(odd: int) -> None:
    model = Deep(odd)
    x = torch.randn(5, WIDTH, requires_grad=True)
    assert_as_whole(model, x)


@pytest.mark.parametrize("name", ["hook", "constant"])
def test_a_layer_that_becomes_another_is_noticed(name: str) -> None:
    """Layers that were left out of the trace are guarded like others."""
    model = Stack(lambda index: Scaled(0))
    x = torch.randn(5, WIDTH, requires_grad=True)
    split = assert_equals_autograd(model, [(x,)])
    if name == "hook":
        model.layers[ODD].register_forward_hook(lambda module, args, output: output * 3)
    else:
        model.layers[ODD].scale = 0.25
    model.zero_grad()
    split(x).sum().backward()
    split.backward_weight()
    mine = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(mine, [p.grad for p in model.parameters()], rtol=0, atol=0)
