"""``Verification``: the result of comparing the gradients of one step with a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autosplit.recorder.digests import digest
from autosplit.text.figures import few
from autosplit.torch_internals.dtensor import local_tensor

Gradients: TypeAlias = "dict[tuple[int, str], Tensor | None]"
"""Gradients by stage and name of the parameter within it."""
Difference: TypeAlias = tuple[float, int, str]
"""The largest absolute difference of a gradient, the stage and the name of its parameter."""


@dataclass(frozen=True)
class Verification:
    """The differences between one step's gradients and a reference.

    Attributes:
        plain: whether the reference is plain autograd; otherwise it is the same stages with full
            backwards.
        differences: (largest absolute difference, stage, name of the parameter within it) of each
            gradient with other bits, the largest difference first. A difference is infinite if
            numbers that are not finite differ, or if one of the two gradients is missing.
    """

    plain: bool
    differences: Sequence[Difference]

    @property
    def bits_equal(self) -> bool:
        """Whether all gradients have the bits of the reference."""
        return not self.differences

    def __str__(self) -> str:
        reference = "plain autograd" if self.plain else "full backwards"
        if not self.differences:
            return f"gradients have the bits of {reference}"
        texts = [f"{name} of stage {at} by {gap:.3g}" for gap, at, name in self.differences]
        return f"gradients differ from {reference}: {few(texts, 4)}"


def gradients_of(modules: Mapping[int, nn.Module]) -> Gradients:
    """The ``.grad`` of the stages' parameters, by stage and name."""
    return {
        (stage, name): parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def differences(gradients: Gradients, reference: Gradients) -> Iterator[Difference]:
    """Yield a difference for each gradient that has other bits than the reference."""
    for holder, gradient in gradients.items():
        expected = reference[holder]
        if gradient is None or expected is None:
            if gradient is not expected:
                yield torch.inf, *holder
            continue
        one, other = local_tensor(gradient).to_dense(), local_tensor(expected).to_dense()
        if digest(one) != digest(other):
            gap = (one.to(torch.complex128) - other).abs().nan_to_num(torch.inf)
            yield gap.max().item(), *holder
