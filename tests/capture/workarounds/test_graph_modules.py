"""Modules that are graphs of torch.fx already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from tests.semantics.against_autograd import assert_equals_autograd


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        built: Tensor = self.second(self.norm(torch.tanh(self.first(x) * self.scale)))
        return built


def exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.randn(3, 4),)).module()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by a copy of a tree
@pytest.mark.parametrize("trace", [fx.symbolic_trace, exported])
def test_it_is_split_and_stays_as_it_was(trace: Callable[[nn.Module], nn.Module]) -> None:
    module = trace(Normed())
    earlier = dict(vars(module))
    assert_equals_autograd(module, [(torch.randn(3, 4),)] * 2, fullgraph=True)
    assert {name: vars(module)[name] for name in earlier} == earlier
