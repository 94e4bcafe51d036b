"""Gradients of the whole pipeline by plain autograd in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .workload import Workload

Gradients = dict[int, dict[str, Tensor]]


def single_process_gradients(
    workload: Workload,
    stages: int,
    microbatches: int,
    batch: tuple[Any, Any],
    device: torch.device,
) -> Gradients:
    """Gradients of the mean loss over the microbatches, by stage and parameter name, on the CPU.

    The stages run one after another in this process, on ``device``; gradients of shared parameters
    are summed over their holders.
    """
    modules = [workload.stage_fn(index, stages).to(device) for index in range(stages)]
    inputs, targets = (part.to(device).chunk(microbatches) for part in batch)
    for value, target in zip(inputs, targets, strict=True):
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        loss = workload.loss_fn(value, target)
        loss.backward(torch.full_like(loss, 1.0 / microbatches))
    found = {
        index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        for index, module in enumerate(modules)
    }
    _sum_shared(found, workload.shared_parameters(stages))
    return on_cpu(found)


def on_cpu(gradients: Gradients) -> Gradients:
    """As they can be sent to another rank and compared there."""
    return {
        index: {name: grad.cpu() for name, grad in named.items()}
        for index, named in gradients.items()
    }


def united(mine: Gradients, names: Iterable[str]) -> Gradients:
    """Gradients of stages, whose parameters have the names of the whole model, as those of one.

    Of a parameter that several stages hold, under names that the whole model has for it, each has
    the sum; only ``names`` are kept.
    """
    every = {name: grad for grads in mine.values() for name, grad in grads.items()}
    wanted = set(names)
    return {0: {name: grad for name, grad in every.items() if name in wanted}}


def largest_difference(mine: Gradients, reference: Gradients) -> float:
    """The largest absolute difference; infinite where one side has a gradient the other lacks."""
    if {k: v.keys() for k, v in mine.items()} != {k: v.keys() for k, v in reference.items()}:
        return float("inf")
    differences = [
        (mine[index][name] - grad).abs().max().item()
        for index, grads in reference.items()
        for name, grad in grads.items()
    ]
    return max(differences, default=0.0)


def _sum_shared(found: Gradients, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
    for group in groups:
        total = torch.stack([found[stage][name] for stage, name in group]).sum(0)
        for stage, name in group:
            found[stage][name] = total
