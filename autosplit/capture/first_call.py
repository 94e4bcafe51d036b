"""First-call effects of modules: lazy parameters, caches and settings, before tracing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autosplit.device import generators_kept
from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.torch_internals.state import modes_kept


def warm_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module once, so that it fills caches and settings; restore random generators."""
    with generators_kept():
        _run(module, args, kwargs)


def is_passing(
    error: CaptureError,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capture: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object],
    *,
    insist: bool,
) -> bool:
    """Whether a call after this one can be traced. Tried on a copy, so that a refusal leaves the
    module as it was; not where a call of a copy leaves traces outside of it.

    Args:
        error: what came of tracing the first call.
        module: what was traced.
        args: positional inputs.
        kwargs: keyword inputs.
        capture: traces a call, or raises.
        insist: try it also where the error is not about Python state, if the first call differs.
    """
    # Dynamo takes over a second to import; here it was imported before the error.
    from .side_effects import PythonStateError, first_call_differs

    if isinstance(error, PythonStateError):
        if not error.inside:
            return False
    elif not insist or not first_call_differs(module, args, kwargs):
        return False
    try:
        twin = copy.deepcopy(module)
        warm_up(twin, args, kwargs)
        capture(twin, args, kwargs)
    except Exception:  # no copies of this one, or what its forward raises, it will raise again
        return False
    return True


def materialise_lazy_parameters(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Give lazy parameters and buffers (``nn.LazyLinear`` and the like) their shape.

    The random number generator moves by what fills them, as in the first call of eager: nothing
    else draws in eval mode.

    Raises:
        CaptureError: some parameter is still without a shape.
    """
    if not _lazy_names(module):
        return
    with modes_kept([module]):
        module.eval()
        _run(module, args, kwargs)
    left = _lazy_names(module)
    if left:
        raise CaptureError(
            f"{left[0]} of {type(module).__name__} has no shape although the forward ran once "
            "in eval mode; run the model on an example before splitting it"
        )


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module on copies of its inputs, and restore its buffers."""
    named = module.named_buffers()
    buffers = {name: buffer.clone() for name, buffer in named if not is_lazy(buffer)}
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
    """Whether the first call is to give lazy parameters or buffers their shape."""
    return bool(_lazy_names(module))


def _lazy_names(module: nn.Module) -> list[str]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if is_lazy(tensor)]
