"""Gradients of a pipeline against those of plain autograd in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

Gradients = dict[int, dict[str, Tensor]]


def reference(
    modules: Sequence[nn.Module],
    batch: tuple[Tensor, Tensor],
    microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Gradients:
    """By stage and name: of the mean loss over the microbatches, which are run one by one."""
    parts = (each.chunk(microbatches) for each in batch)
    for value, target in zip(*parts, strict=True):
        for module in modules:
            value = module(value)
        loss_fn(value, target).backward()
    found = {index: gradients_of(module) for index, module in enumerate(modules)}
    return {
        index: {name: each / microbatches for name, each in gradients.items()}
        for index, gradients in found.items()
    }


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of those that are there."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def difference(found: Mapping[int, Mapping[str, Tensor]], expected: Gradients) -> float:
    """The largest, over the largest gradient of the same stage; infinite where one is missing."""
    most = 0.0
    for index, gradients in found.items():
        wanted = expected[index]
        if gradients.keys() != wanted.keys():
            return math.inf
        largest = max(each.abs().max().item() for each in wanted.values())
        for name, each in gradients.items():
            most = max(most, (each - wanted[name]).abs().max().item() / largest)
    return most
