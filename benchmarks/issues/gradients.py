"""Gradients that a pipeline should have, and what is wrong with those that it has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .case import SymptomError

Loss = Callable[[Any, Any], Tensor]
Gradients = dict[str, "Tensor | None"]

TOLERANCE = 1e-5  # of a gradient's largest element
EQUAL = "gradients equal to plain autograd's"


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def named(modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of stages, called after stage and name."""
    return {f"{at}.{n}": p for at, m in modules.items() for n, p in m.named_parameters()}


def of(modules: Mapping[int, nn.Module]) -> Gradients:
    """What stages hold in ``.grad``."""
    found = {name: parameter.grad for name, parameter in named(modules).items()}
    return {name: grad if grad is None else grad.detach().clone() for name, grad in found.items()}


def plain(
    stages: Sequence[nn.Module], batches: Iterable[tuple[Any, Any]], loss_fn: Loss
) -> Gradients:
    """Of a copy of the stages, one after another in one process: the mean over the microbatches."""
    stages = copy.deepcopy(stages)
    batches = list(batches)
    for value, target in batches:
        for stage in stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        (loss_fn(value, target) / len(batches)).backward()
    return of(dict(enumerate(stages)))


def check(found: Gradients, expected: Gradients, tolerance: float = TOLERANCE) -> str:
    """That they are those expected, in a word.

    Raises:
        SymptomError: the first that is not, and by how much.
        ValueError: there are none to look at.
    """
    if not found:
        raise ValueError("no gradients were compared")
    for name, grad in found.items():
        wanted = expected[name]
        if wanted is None:
            wanted = torch.zeros_like(grad) if grad is not None else None
        if wanted is None:
            continue
        if grad is None:
            raise SymptomError(f"{name} has no gradient")
        if not _close(grad, wanted, tolerance):
            raise SymptomError(f"the gradient of {name} is {_how(grad, wanted)}")
    return EQUAL


def _close(grad: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((grad - wanted).abs().max() <= tolerance * wanted.abs().max())


def _how(grad: Tensor, wanted: Tensor) -> str:
    factor = float((grad * wanted).sum() / (wanted * wanted).sum())
    if _close(grad, factor * wanted, 1e-3):
        return f"{factor:.3g} times plain autograd's"
    apart = float((grad - wanted).abs().max() / wanted.abs().max())
    return f"off by {apart:.0%} of plain autograd's largest element"
