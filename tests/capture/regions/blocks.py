"""Models of blocks that repeat themselves, and what was captured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autosplit import SplitModule

WIDTH = 4
Block = Callable[[int], nn.Module]


class Residual(nn.Module):
    """A block of two products."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    """Blocks between two products.

    Args:
        block: makes the block of an index.
        count: blocks.
    """

    def __init__(self, block: Block = Residual, count: int = 4) -> None:
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
    called = [each.guards for each in split.functions[-1].capture.guards.blocks]
    return [called.count(each) for each in dict.fromkeys(called)]
