"""Regions that torch compiles once are split like anything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.semantics.against_autograd import assert_equals_autograd


@torch.compiler.nested_compile_region
def layer(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.dropout(linear(x).tanh(), 0.3, True) * torch.tensor(2.0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for item in self.layers:
            x = layer(item, x)
        return x


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for item in self.layers:
            x = checkpoint(layer, item, x, use_reentrant=False)
        return x


class Nested(Layers):
    @torch.compiler.nested_compile_region
    def twice(self, x: Tensor) -> Tensor:
        return layer(self.layers[1], layer(self.layers[0], x))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x) + self.twice(self.layers[2](x))


@pytest.mark.parametrize("model", [Layers, Checkpointed, Nested])
def test_all_weight_gradients_wait(model: type[nn.Module]) -> None:
    split = assert_equals_autograd(model(), [(torch.randn(4, 8).requires_grad_(),)] * 2)
    assert len(split.functions) == 1
    assert "100.0 %" in split.report()


class Broken(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def test_models_in_parts() -> None:
    split = assert_equals_autograd(Broken(), [(torch.randn(4, 8).requires_grad_(),)] * 2)
    assert "100.0 %" in split.report()
