"""Norms of this rank's gradients: for the norm of the model, and to find what is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.operators import norms_of


class GradientNorms:
    """The 2-norm of each gradient of this rank, on the way to the host.

    The copy from a GPU is read after the device was awaited, which each step does once at its end:
    the norms cost no wait of their own.

    Args:
        parameters: whose gradients; parameters without one are left out.
        squares: whether ``squares`` is asked for, which takes norms in float64. Without it, norms
            are in the gradients' dtypes: on a CPU that takes a thirtieth of the time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, squares: bool) -> None:
        self._parameters = [each for each in parameters if each.grad is not None]
        self._exact = squares
        parts = [*map(_numbers, self._parameters)]
        norms = norms_of(parts, torch.float64 if squares else None)
        total = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
        self._norms = total.to("cpu", non_blocking=total.is_cuda)

    def squares(self) -> Tensor:
        """The sum of the squares of all numbers in the gradients: shape [1], float64."""
        return self._norms.square().sum().reshape(1)

    def nonfinite(self) -> list[nn.Parameter]:
        """The parameters whose gradient has a number that is not finite."""
        finite = self._norms.isfinite().tolist()
        found = [p for p, is_finite in zip(self._parameters, finite, strict=True) if not is_finite]
        # Squares of finite numbers overflow in a narrow dtype.
        return [p for p in found if self._exact or not _numbers(p).isfinite().all()]


def _numbers(parameter: nn.Parameter) -> Tensor:
    """The real numbers of a gradient; of a sharded one, those of this rank's part."""
    values = local_tensor(parameter.grad).detach()
    if values.is_sparse:  # of an embedding
        values = values.coalesce().values()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
