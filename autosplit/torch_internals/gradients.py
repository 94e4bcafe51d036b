"""Accumulation into ``.grad``, and operators on lists of gradients.

If no hook fires, ``add_gradients`` has the result of autograd's AccumulateGrad nodes in a tenth of
the engine's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .dtensor import is_dtensor, local_tensor, with_sharding_of

_IS_SPARSE = attrgetter("is_sparse")
_PLAIN = {Tensor}


def add_gradients(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    borrowed: Sequence[bool],
    homes: Sequence[Any] | None = None,
) -> None:
    """Add to every ``.grad`` as AccumulateGrad does; call it without grad mode.

    Args:
        parameters: leaves.
        grads: their gradients.
        borrowed: for each gradient, whether it shares memory with other tensors and is copied.
        homes: for each parameter, the object whose ``.grad`` is added to; None for the parameters.
    """
    homes = parameters if homes is None else homes
    sums = [home.grad for home in homes]
    if sums and _PLAIN.issuperset(map(type, (*sums, *grads))) and not any(map(_IS_SPARSE, sums)):
        add_together(sums, grads)
        return
    for parameter, home, grad, is_borrowed in zip(parameters, homes, grads, borrowed, strict=True):
        add_gradient(parameter, home, grad, is_borrowed)


add_together: Callable[..., None] = torch._foreach_add_
"""Add each gradient to its sum, all in one call of torch; at least one."""


copy_together: Callable[..., None] = torch._foreach_copy_
"""Copy each value into its tensor, all in one call of torch; at least one. A GPU runs one kernel if
all have one dtype.
"""


zero_together: Callable[..., None] = torch._foreach_zero_
"""Set all sums to zero in one call of torch; at least one."""


flatten_together: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors
"""Copy dense tensors into one of one dimension."""


def norms_of(tensors: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """The 2-norm of each tensor, computed by torch's operator for lists of tensors."""
    return [*torch._foreach_norm(tensors, 2, dtype=dtype)] if tensors else []


_DTYPE = attrgetter("dtype")


_EXACT = ({torch.float32}, {torch.float64})


def divide_together(sums: Sequence[Tensor], divisor: int) -> None:
    """Divide all sums by a number, in one call of torch; at least one.

    On a CPU, division by a tensor of the sums' dtype takes a quarter of the time.
    """
    by: Any = divisor
    if sums[0].is_cpu and {*map(_DTYPE, sums)} in _EXACT:
        by = torch.tensor(divisor, dtype=sums[0].dtype, device="cpu")
    torch._foreach_div_(list(sums), by)


def scale_together(sums: Sequence[Tensor], factor: float) -> None:
    """Multiply sums by a factor in one call."""
    if sums:
        torch._foreach_mul_(list(sums), factor)


def add_gradient(parameter: Tensor, home: Any, grad: Tensor, borrowed: bool) -> None:
    """Add a gradient to the ``.grad`` of ``home``, as ``add_gradients`` does."""
    total = home.grad
    if total is None:
        home.grad = as_grad(parameter, grad, borrowed)
    elif total.is_sparse and not grad.is_sparse:
        home.grad = grad + total
    else:
        total.add_(grad)


def as_grad(parameter: Tensor, grad: Tensor, borrowed: bool) -> Tensor:
    """A gradient in the form of ``.grad``: in memory of its own, with the parameter's strides and
    dtype.

    Returns:
        the gradient itself if it has this form, else a copy. A DTensor keeps its placements, which
        may differ from the parameter's; the strides are those of this rank's local tensor.
    """
    dtype = getattr(parameter, "grad_dtype", None) or grad.dtype
    if is_dtensor(grad):
        local_grad, local_parameter = local_tensor(grad), local_tensor(parameter)
        return with_sharding_of(
            grad,
            _owned(
                local_parameter if local_parameter.shape == local_grad.shape else local_grad,
                local_grad,
                borrowed,
                dtype,
            ),
        )
    return _owned(parameter, grad, borrowed, dtype)


def _owned(layout: Tensor, grad: Tensor, borrowed: bool, dtype: torch.dtype) -> Tensor:
    if grad.layout is not torch.strided:
        return grad.clone() if borrowed else grad
    if borrowed or grad.stride() != layout.stride() or grad.dtype is not dtype:
        return torch.empty_like(layout, dtype=dtype, requires_grad=False).copy_(grad)
    return grad.detach() if grad._base is not None else grad  # a view would keep its base


ZEROING = {Tensor.zero_, torch.zero_, torch._foreach_zero_}
"""Functions that overwrite their tensors with zeros."""
