"""Modules that are graphs of torch.fx already."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import autosplit


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.norm(torch.tanh(self.first(x) * self.scale)))
        return made


def exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.randn(3, 4),)).module()


@pytest.mark.parametrize("trace", [fx.symbolic_trace, exported])
def test_it_is_split_and_stays_as_it_was(trace: Callable[[nn.Module], nn.Module]) -> None:
    module, plain = (trace(each) for each in _twins())
    before = dict(vars(module))
    split = autosplit.split(module, (torch.randn(3, 4),), fullgraph=True)
    assert {name: vars(module)[name] for name in before} == before
    for _ in range(2):
        x = torch.randn(3, 4)
        assert torch.equal(split(x), plain(x))
        split(x).square().sum().backward()
        plain(x).square().sum().backward()
    split.backward_weight()
    for one, two in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    for mine, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def _twins() -> tuple[nn.Module, nn.Module]:
    module = Normed()
    return module, copy.deepcopy(module)
