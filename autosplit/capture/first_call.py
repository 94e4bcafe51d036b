"""First-call effects of modules: lazy parameters, caches and settings, before tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autosplit.device import generators_kept
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten


def warm_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module once, so that it fills caches and settings; restore random generators."""
    with generators_kept():
        _run(module, args, kwargs)


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module on copies of its inputs, and restore its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    leaves, spec = tree_flatten((args, kwargs))
    copies = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(copies, spec)
    module(*args, **kwargs)
    for name, buffer in module.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])


def _copy(tensor: Tensor) -> Tensor:
    """A copy of an input; zeros for one without memory, which stands for any."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return torch.zeros_like(tensor)
    return tensor.detach().clone()


def is_unshaped(module: nn.Module) -> bool:
    """Whether the first call is to give lazy parameters or buffers (``nn.LazyLinear`` and the like)
    their shape.
    """
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))
