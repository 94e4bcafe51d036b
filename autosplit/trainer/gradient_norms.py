"""Compute norms of this rank's gradients, for clipping and to find numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.torch_internals.dtensor import real_numbers
from autosplit.torch_internals.gradients import flatten_together, norms_of

_IS_SPARSE = attrgetter("is_sparse")
_SMALL = 2**18
"""The most bytes of gradients that are copied together: up to here, an operator's call takes longer
than its numbers."""


def are_small(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients of parameters are real numbers, and small enough to be copied."""
    kinds = {*map(type, parameters)} <= {nn.Parameter}
    are_real = kinds and all(parameter.is_floating_point() for parameter in parameters)
    return are_real and sum(parameter.nbytes for parameter in parameters) <= _SMALL


class GradientNorms:
    """The 2-norm of each gradient of this rank; the sum of small gradients, if only their numbers
    are checked.

    Norms on a GPU are copied to the host asynchronously. Call ``squares`` and ``nonfinite`` only
    after the step has synchronized with the device, which it does once, at its end.

    Args:
        parameters: the parameters; parameters without a gradient are left out.
        squares: whether ``squares`` will be called, which needs norms in float64. Without it, norms
            are in the gradients' dtypes, which on a CPU takes a thirtieth of the time.
        small: whether ``are_small`` holds for the parameters.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, squares: bool, small: bool = False
    ) -> None:
        self._parameters = [p for p in parameters if p.grad is not None]
        self._exact = squares
        gradients: Any = [p.grad for p in self._parameters]
        if small and not squares and gradients and not any(map(_IS_SPARSE, gradients)):
            with torch.no_grad():
                total = flatten_together(gradients).sum()
        else:
            norms = norms_of([*map(real_numbers, gradients)], torch.float64 if squares else None)
            total = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
        self._norms = total.to("cpu", non_blocking=total.is_cuda)

    def squares(self) -> Tensor:
        """Return the sum of the squares of all numbers in the gradients, float64 of shape [1]."""
        return self._norms.square().sum().reshape(1)

    def nonfinite(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient has a number that is not finite."""
        if math.isfinite(self._norms.sum().item()):  # then each number is
            return []
        if self._exact:
            finite = self._norms.isfinite().tolist()
            pairs = zip(self._parameters, finite, strict=True)
            return [parameter for parameter, is_finite in pairs if not is_finite]
        # In a narrow dtype, sums of finite numbers may overflow: look at the numbers.
        return [p for p in self._parameters if not real_numbers(p.grad).isfinite().all()]
