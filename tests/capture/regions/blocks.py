"""Models of blocks that repeat themselves, and what was captured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import SplitModule
from tests import zoo

WIDTH = 4
Block = Callable[[int], nn.Module]


class Plain(nn.Module):
    """A residual block of one product: the cheapest to trace."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Residual(zoo.Residual):
    """A block of a norm and two products."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH)


class Gated(nn.Sequential):
    """Modules in sequence, whose result is multiplied by a second input."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * gate
        return result


class Stack(nn.Module):
    """Blocks between two products.

    Args:
        block: makes the block of an index.
        count: blocks.
    """

    def __init__(self, block: Block = Plain, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(block, range(count)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kinds(split: SplitModule) -> list[int]:
    """For the latest graphs, how many blocks call each kind's."""
    called = [block.guards for block in split.functions[-1].capture.guards.blocks]
    return [called.count(guards) for guards in dict.fromkeys(called)]
