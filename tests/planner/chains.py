"""A list of modules as a model in blocks, for tests of what only needs blocks."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Link:
    name: str
    signature: Hashable


class Chain:
    """Modules one after another; those of one type and parameter shapes are of one kind."""

    def __init__(self, modules: Sequence[nn.Module], x: Tensor) -> None:
        self.modules = list(modules)
        self.model = nn.ModuleList(modules)
        self.blocks = [Link(str(i), _signature(module)) for i, module in enumerate(modules)]
        self._inputs = [x]
        for module in modules:
            with torch.no_grad():
                self._inputs.append(copy.deepcopy(module).to("meta")(self._inputs[-1].to("meta")))
        self.crossing = [[x.requires_grad_()] for x in self._inputs[1:-1]]

    def segment(self, first: int, last: int, *, plain: bool) -> tuple[nn.Module, list[Tensor]]:
        x = self._inputs[first].detach().requires_grad_(first > 0)
        # A copy of the modules that shares their parameters, as the segments of a graph do.
        return _shell(nn.Sequential(*self.modules[first:last])), [x]


def _shell(module: nn.Module) -> nn.Module:
    shell = module.__class__.__new__(module.__class__)
    shell.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[kind] = dict(module.__dict__[kind])
    for name, child in module.named_children():
        shell.__dict__["_modules"][name] = _shell(child)
    return shell


def _signature(module: nn.Module) -> Hashable:
    return (type(module), tuple(parameter.shape for parameter in module.parameters()))


class Mlp(nn.Module):
    """A residual block with two matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))
