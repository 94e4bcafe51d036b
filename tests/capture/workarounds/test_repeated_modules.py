"""Models that call one module several times, under several names, and write its buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.semantics.against_autograd import assert_equals_autograd


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (1 + self.calls) * super().forward(x)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Counting()] * 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return self.head(second), first.mean(1) + second.mean(1)


@pytest.mark.parametrize("memory", ["balanced", "lean"])
def test_gradients_of_several_outputs(memory: str) -> None:
    inputs: list[Any] = [(torch.randn(5, 4, requires_grad=True),)] * 2
    assert_equals_autograd(Repeated(), inputs, memory=memory)
