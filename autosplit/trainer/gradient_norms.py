"""Compute norms of this rank's gradients, for clipping and to find numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autosplit.torch_internals.autograd import norms_of
from autosplit.torch_internals.dtensor import real_numbers


class GradientNorms:
    """The 2-norm of each gradient of this rank.

    Norms on a GPU are copied to the host asynchronously. Call ``squares`` and ``nonfinite`` only
    after the step has synchronized with the device, which it does once, at its end.

    Args:
        parameters: the parameters; parameters without a gradient are left out.
        squares: whether ``squares`` will be called, which needs norms in float64. Without it, norms
            are in the gradients' dtypes, which on a CPU takes a thirtieth of the time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, squares: bool) -> None:
        self._parameters = [p for p in parameters if p.grad is not None]
        self._exact = squares
        gradients = [real_numbers(p.grad) for p in self._parameters]
        norms = norms_of(gradients, torch.float64 if squares else None)
        total = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
        self._norms = total.to("cpu", non_blocking=total.is_cuda)

    def squares(self) -> Tensor:
        """Return the sum of the squares of all numbers in the gradients, float64 of shape [1]."""
        return self._norms.square().sum().reshape(1)

    def nonfinite(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient has a number that is not finite."""
        if math.isfinite(self._norms.sum().item()):  # then each of them is, as none is negative
            return []
        finite = self._norms.isfinite().tolist()
        suspects = [
            p for p, is_finite in zip(self._parameters, finite, strict=True) if not is_finite
        ]
        # In a narrow dtype, squares of finite numbers may overflow: look at the numbers.
        return [p for p in suspects if self._exact or not real_numbers(p.grad).isfinite().all()]
