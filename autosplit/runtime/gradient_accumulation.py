"""Sums of weight gradients over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    TENSOR_HOOKS,
    waits_for_gradient,
)
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.gradients import divide_together

from .accumulators import Accumulators

_GRAD, _GRAD_DTYPE, _DTYPE = map(attrgetter, ("grad", "grad_dtype", "dtype"))


class _BoundSums(NamedTuple):
    """The sums of parameters without hooks, as ``GradientSums.into`` returned them.

    Attributes:
        names: the names of the parameters.
        state: the parameters and buffers by name.
        accumulators: the sums.
        hooks: the number of hooks that the process had registered.
    """

    names: Sequence[str]
    state: Mapping[str, Tensor]
    accumulators: Accumulators
    hooks: int


class GradientSums:
    """The sums of one stage's weight gradients over microbatches.

    Args:
        owner: the stage's name, for messages.
        dtype: floating-point dtype of the sums; None for the dtype of each gradient.

    Attributes:
        dtype: dtype of the sums.
        tensors: maps the name of a parameter to its sum.
        memory_for: a function from (parameter, dtype) to memory for the parameter's sum or
            ``.grad``: a tensor of the parameter's shape, not initialized, or None for newly
            allocated memory. None instead of a function: all sums are newly allocated.
    """

    def __init__(self, owner: str, dtype: torch.dtype | None = None) -> None:
        self._owner = owner
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}
        self._bound: dict[int, _BoundSums] = {}  # by the id of the names
        # The parameters of the last search that found no hooks, and the number of hooks that the
        # process had registered.
        self._unhooked: tuple[list[int], int] = [], -1
        self.memory_for: Callable[[Tensor, torch.dtype], Tensor | None] | None = None

    def into(
        self, names: Sequence[str], state: Mapping[str, Tensor], skipped: Collection[str] = ()
    ) -> Accumulators | None:
        """The sums to which a graph adds gradients of the named parameters.

        Args:
            names: names of the parameters.
            state: parameters and buffers by name.
            skipped: parameters that get no gradient, although the graph computes one.

        Returns:
            The sums. None if a graph must return gradients instead: a parameter is skipped, has
            neither a sum nor memory for one, or has hooks, which must see each microbatch's
            gradient.

        Raises:
            SplitError: a parameter was replaced since an earlier microbatch.
        """
        bound = self._bound.get(id(names))
        if (
            bound is not None
            and bound.state is state
            and bound.hooks == RemovableHandle.next_id
            and not skipped
        ):
            return bound.accumulators
        parameters = [*map(state.__getitem__, names)]
        if not all(map(is_, map(self._parameters.get, names), parameters)):
            self.set_parameters(names, parameters)
        if skipped or any(map(TENSOR_HOOKS, parameters)):
            return None
        if all(map(self.tensors.__contains__, names)):
            sums = Accumulators([*map(self.tensors.__getitem__, names)])
            self._bound[id(names)] = _BoundSums(names, state, sums, RemovableHandle.next_id)
            return sums
        if self.memory_for is None or not self.tensors.keys().isdisjoint(names):
            return None
        new = [self.memory_for(p, self.dtype or p.dtype) for p in parameters]
        tensors = [tensor for tensor in new if tensor is not None]
        if len(tensors) < len(new):
            return None
        self.tensors |= zip(names, tensors, strict=True)
        return Accumulators(tensors, overwrites=True)

    def set_parameters(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Register the parameters whose gradients are summed under these names.

        Raises:
            SplitError: a parameter was replaced since an earlier microbatch.
        """
        if self._parameters.keys().isdisjoint(names):
            self._parameters |= zip(names, parameters, strict=True)
            return
        for name, parameter in zip(names, parameters, strict=True):
            if self._parameters.setdefault(name, parameter) is not parameter:
                raise SplitError(
                    f"{self._owner}: parameter {name} was replaced between two microbatches whose "
                    "gradients are summed; call publish() before replacing it"
                )

    def add_gradients(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        borrowed: Collection[str],
        skipped: Collection[str] = (),
    ) -> None:
        """Call the parameters' hooks with the gradients, and add the gradients that the hooks
        return to the sums.

        Args:
            names: names of the parameters; ``into`` or ``set_parameters`` was called for them.
            gradients: their gradients.
            borrowed: parameters whose gradient shares storage and must be copied.
            skipped: parameters that get no gradient.
        """
        parameters = [*map(self._parameters.__getitem__, names)]
        is_copied = borrowed or self.dtype is not None or self.memory_for is not None
        is_plain = not (is_copied or skipped or any(map(TENSOR_HOOKS, parameters)))
        if is_plain and self.tensors.keys().isdisjoint(names):
            self.tensors |= zip(names, gradients, strict=True)
            return
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            if name in skipped:
                continue
            copied = name in borrowed
            if TENSOR_HOOKS(parameter):
                # A hook may keep its argument, and return any tensor.
                (gradient,) = torch.autograd.grad(parameter, parameter, gradient)
                copied = True
            if name in self.tensors:
                self.tensors[name].add_(gradient)
            else:
                self.tensors[name] = self._as_sum(parameter, gradient, copied)

    def divide(self, divisor: int, undivided: Container[int]) -> None:
        """Divide the sums, in one call, except the sums of parameters whose ``id`` is in
        ``undivided``.
        """
        names = [name for name in self.tensors if id(self._parameters[name]) not in undivided]
        sums = [*map(self.tensors.__getitem__, names)]
        if not {Tensor}.issuperset(map(type, sums)):
            sums = [*map(local_tensor, sums)]
        if sums:
            divide_together(sums, divisor)

    def add_to_parameters(self) -> list[Tensor]:
        """Add the sums to the parameters' ``.grad``, and drop the sums.

        A sum of another dtype is rounded once, to the parameter's ``grad_dtype``, which is the
        parameter's dtype unless the user set it.

        Returns:
            the parameters that have hooks of ``register_post_accumulate_grad_hook`` or on their
            AccumulateGrad nodes. The caller must call these hooks when the gradients are complete.
        """
        published = [*map(self._parameters.__getitem__, self.tensors)]
        self._bound.clear()
        sums, ids = [*self.tensors.values()], [*map(id, published)]
        are_new = len({*ids}) == len(ids) and all(map(is_, map(_GRAD, published), repeat(None)))
        if are_new and [*map(_GRAD_DTYPE, published)] == [*map(_DTYPE, sums)]:
            self.tensors.clear()
            for parameter, total in zip(published, sums, strict=True):
                parameter.grad = total
        else:
            del sums  # each sum is freed after its addition
            self._add_each(published)
        self._parameters = {}
        if self._unhooked == (ids, RemovableHandle.next_id):
            return []
        hooked = [*filter(waits_for_gradient, published)]
        if not hooked:
            self._unhooked = ids, RemovableHandle.next_id  # a search for nodes registers hooks
        return hooked

    def _add_each(self, parameters: Sequence[Tensor]) -> None:
        """Add the sums to the ``.grad`` of these parameters, in the order of ``tensors``."""
        for parameter, name in zip(parameters, [*self.tensors], strict=True):
            total = self.tensors.pop(name)
            if parameter.grad is not None:
                parameter.grad.add_(total)
                continue
            dtype = parameter.grad_dtype or total.dtype
            if total.dtype is not dtype:
                total = self._converted(total, dtype, parameter)
            parameter.grad = total

    def clear(self) -> None:
        """Drop the sums."""
        self.tensors, self._parameters, self._bound = {}, {}, {}

    def _converted(self, total: Tensor, dtype: torch.dtype, parameter: Tensor) -> Tensor:
        """A parameter's sum in the dtype of its ``.grad``."""
        memory = None if self.memory_for is None else self.memory_for(parameter, dtype)
        return total.to(dtype) if memory is None else memory.copy_(total)

    def _as_sum(self, parameter: Tensor, gradient: Tensor, borrowed: bool) -> Tensor:
        """The first gradient as a sum: in the dtype of the sums, and copied if it is borrowed."""
        dtype = self.dtype or gradient.dtype
        memory = None if self.memory_for is None else self.memory_for(parameter, dtype)
        if memory is not None:
            # A sparse gradient can be added to dense memory, but not copied into it.
            is_dense = gradient.layout is torch.strided
            return memory.copy_(gradient) if is_dense else memory.zero_().add_(gradient)
        if not borrowed:
            return gradient.to(dtype)
        if gradient.layout is not torch.strided:  # of a sparse embedding
            return gradient.to(dtype, copy=True)
        return gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
