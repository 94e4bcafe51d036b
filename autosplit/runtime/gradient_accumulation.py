"""Gradient accumulation over microbatches: how gradients are added, and their sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import cached_property

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    has_accumulate_hooks,
    has_tensor_hooks,
)

FORMS = ("exact", "fused")


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How W and B add a microbatch's gradients to the sums.

    Attributes:
        form: ``"exact"`` computes a gradient and adds it, and rounds as autograd does;
            ``"fused"`` lets matrix products and embeddings add into the sum themselves, which
            saves a pass over it and rounds differently.
        dtype: of the sums; None for that of each gradient.

    Raises:
        SplitError: an unknown form, or a dtype that is not floating-point.
    """

    form: str = "exact"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            known = ", ".join(map(repr, FORMS))
            raise SplitError(f"unknown accumulation {self.form!r}; known ones: {known}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise SplitError(f"grad_dtype must be a floating-point dtype, got {self.dtype}")

    @cached_property
    def exact(self) -> bool:
        """Whether whole gradients are added, microbatch by microbatch."""
        return self.form == "exact"


EXACT = Accumulation()


class GradientSums:
    """Accumulated gradients of one stage's parameters.

    Attributes:
        accumulation: how they are added.
        tensors: parameter name -> sum so far.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self.tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    def into(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The sums that gradients of these parameters are to be added into; None where one of
        them has none yet, or has hooks, which are to see each microbatch's gradient.

        Raises:
            SplitError: a parameter is not the one whose gradients were added up so far, or
                somebody waits for the end of its accumulation.
        """
        for name, parameter in zip(names, parameters, strict=True):
            if self._parameters.setdefault(name, parameter) is not parameter:
                raise SplitError(
                    f"parameter {name} was replaced between two microbatches whose gradients "
                    "are gathered; call publish() before replacing it"
                )
        if has_accumulate_hooks(parameters):
            name = next(
                n for n, p in zip(names, parameters, strict=True) if has_accumulate_hooks([p])
            )
            raise SplitError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, which nothing "
                "calls here: gradients reach .grad when all microbatches are done. Let "
                "optimizer.register_step_pre_hook do what it does"
            )
        if has_tensor_hooks(parameters):
            return None
        sums = [self.tensors.get(name) for name in names]
        found = [each for each in sums if each is not None]
        return found if len(found) == len(names) else None

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

    def publish(self) -> None:
        """Move the sums into the parameters' ``.grad``, adding to gradients that are there.

        A sum of another dtype is rounded once, to the parameter's ``grad_dtype``: the dtype of
        the parameter unless the user set it otherwise.
        """
        for name in [*self.tensors]:
            total, parameter = self.tensors.pop(name), self._parameters[name]
            if parameter.grad is None:
                parameter.grad = total.to(parameter.grad_dtype or total.dtype)
            else:
                parameter.grad.add_(total)
        self.clear()

    def clear(self) -> None:
        """Forget the sums."""
        self.tensors, self._parameters = {}, {}

    def _own(self, gradient: Tensor, borrowed: bool) -> Tensor:
        dtype = self.accumulation.dtype or gradient.dtype
        if not borrowed:
            return gradient.to(dtype)
        if gradient.layout is not torch.strided:  # of a sparse embedding
            return gradient.to(dtype, copy=True)
        return gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
