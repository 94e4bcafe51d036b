"""Sums of weight gradients over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import is_

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    UncachedLeaves,
    has_tensor_hooks,
    waits_for_gradient,
)


class GradientSums:
    """Accumulated gradients of one stage's parameters.

    Raises:
        SplitError: a dtype that is not floating-point.

    Attributes:
        dtype: of the sums; None for that of each gradient.
        tensors: parameter name -> sum so far.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        known = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not known:
            raise SplitError(
                f"grad_dtype must be a floating-point dtype, got {dtype!r}; torch.float32, say"
            )
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}
        self._leaves = UncachedLeaves()

    def into(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The sums that gradients of these parameters are to be added into; None where one of
        them has none yet, or has hooks, which are to see each microbatch's gradient.

        Raises:
            SplitError: a parameter is not the one whose gradients were added up so far.
        """
        known = self._parameters
        if not all(map(is_, map(known.get, names), parameters)):
            for name, parameter in zip(names, parameters, strict=True):
                if known.setdefault(name, parameter) is not parameter:
                    raise SplitError(
                        f"parameter {name} was replaced between two microbatches whose gradients "
                        "are gathered; call publish() before replacing it"
                    )
        if has_tensor_hooks(parameters):
            return None
        if not self.tensors.keys() >= {*names}:
            return None
        return [*map(self.tensors.__getitem__, names)]

    def add(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        borrowed: Collection[str],
        skipped: Collection[str] = (),
    ) -> None:
        """Accumulate gradients, as the parameters' hooks return them.

        Args:
            names: of the parameters, for which ``into`` gave no sums.
            gradients: theirs.
            borrowed: which of them are not tensors of their own and must be copied.
            skipped: those that get none.
        """
        for name, gradient in zip(names, gradients, strict=True):
            if name in skipped:
                continue
            copied, parameter = name in borrowed, self._parameters[name]
            if has_tensor_hooks([parameter]):
                # A hook may keep what it sees, and give back what it likes.
                (gradient,) = torch.autograd.grad(parameter, parameter, gradient)
                copied = True
            if name in self.tensors:
                self.tensors[name].add_(gradient)
            else:
                self.tensors[name] = self._own(gradient, copied)

    def publish(self, divisor: Callable[[Tensor], int] = lambda _: 1) -> list[Tensor]:
        """Move the sums into the parameters' ``.grad``, adding to gradients that are there.

        A sum of another dtype is rounded once, to the parameter's ``grad_dtype``: the dtype of
        the parameter unless the user set it otherwise.

        Args:
            divisor: of a parameter's sum.

        Returns:
            Those parameters whose hooks of ``register_post_accumulate_grad_hook``, or on
            AccumulateGrad nodes, are to be called when their gradients are whole.
        """
        published = [self._parameters[name] for name in self.tensors]
        for name in [*self.tensors]:
            total, parameter = self.tensors.pop(name), self._parameters[name]
            if (by := divisor(parameter)) != 1:
                total.div_(by)
            if parameter.grad is None:
                parameter.grad = total.to(parameter.grad_dtype or total.dtype)
            else:
                parameter.grad.add_(total)
        self.clear()
        if not self._leaves.among(published).has_hooks():
            return []
        return [*filter(waits_for_gradient, published)]

    def clear(self) -> None:
        """Forget the sums."""
        self.tensors, self._parameters = {}, {}

    def _own(self, gradient: Tensor, borrowed: bool) -> Tensor:
        dtype = self.dtype or gradient.dtype
        if not borrowed:
            return gradient.to(dtype)
        if gradient.layout is not torch.strided:  # of a sparse embedding
            return gradient.to(dtype, copy=True)
        return gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
