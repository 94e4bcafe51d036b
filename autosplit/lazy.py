"""Parameters that get their shape from the first input (``nn.LazyLinear`` and the like)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .compat import tree_flatten, tree_unflatten
from .errors import CaptureError


def materialise(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give lazy parameters and buffers their shape, as the first forward would.

    The model runs once in eval mode on copies of the inputs; its buffers keep their values.

    Raises:
        CaptureError: some parameter is still without a shape.
    """
    if not _lazy_names(model):
        return
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not is_lazy(buffer)]
    leaves, spec = tree_flatten((args, kwargs))
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(copies, spec)
    model.eval()
    try:
        with torch.no_grad():
            model(*args, **kwargs)
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        for module, training in modes:
            module.training = training
    left = _lazy_names(model)
    if left:
        raise CaptureError(
            f"{left[0]} of {type(model).__name__} has no shape although the forward ran once "
            "in eval mode; run the model on an example before splitting it"
        )


def _lazy_names(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if is_lazy(tensor)]
