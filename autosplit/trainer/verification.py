"""``Verification``: the gradients of one step beside those of a reference."""

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
    """The comparison of one step's gradients with a reference.

    Attributes:
        plain: whether the reference is plain autograd; else it is the same stages with full
            backwards.
        differences: the gradients that have other bits, the largest difference first: the largest
            absolute difference, the stage, and the name of the parameter within it. A difference is
            infinite if numbers that are not finite differ, or one of the gradients is missing.
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
    """The ``.grad`` of these stages' parameters."""
    return {
        (stage, name): parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def differences(gradients: Gradients, reference: Gradients) -> Iterator[Difference]:
    """Yield the gradients that have other bits than the reference."""
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
