"""What plain autograd saves, and the least that a W which computes everything must be handed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .models import Subject

aten = torch.ops.aten

_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution_backward)


def distinct_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Bytes of distinct storage behind the tensors, except that behind ``without``."""
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    known = {each.untyped_storage().data_ptr() for each in without}
    return sum(size for place, size in sizes.items() if place not in known)


def autograd_saves(subject: Subject) -> int:
    """Bytes that autograd's forward keeps for its backward; parameters and buffers excluded."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = subject.module(subject.x.clone().requires_grad_())
    state = [*subject.module.parameters(), *subject.module.buffers()]
    found = distinct_bytes(saved, without=state)
    del y
    return found


def floor(subject: Subject) -> int:
    """Bytes of X and dY, each counted once, of the matrix products and convolutions that yield
    parameter gradients in plain autograd.
    """
    module = subject.module
    gradients: set[int] = set()

    def note(grad: Tensor) -> None:
        gradients.add(grad.untyped_storage().data_ptr())

    hooks = [each.register_hook(note) for each in module.parameters()]
    with _Products() as seen:
        module(subject.x.clone().requires_grad_()).backward(subject.grad)
    module.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    operands = [
        operand
        for results, operands in seen.products
        if any(each.untyped_storage().data_ptr() in gradients for each in results)
        for operand in operands
    ]
    return distinct_bytes(operands, without=module.parameters())


class _Products(TorchDispatchMode):
    """Keeps results and operands of every product alive, so that no storage comes twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[list[Tensor], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.products.append((_tensors(result), _tensors(args)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
