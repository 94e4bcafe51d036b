"""The backward that autograd's engine is running: its number, its nodes, modes around it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

without_autocast = torch._C._DisableAutocast
"""Context in which no operator is autocast: for graphs whose casts are operators already."""

graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that is under way has ``retain_graph=True``."""

current_backward = torch._C._current_graph_task_id
"""Number of the backward that is under way on this thread; later ones have higher numbers."""


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward under way has come to its end, and before whoever
    asked for it goes on; now, where there is none.
    """
    if current_backward() < 0:
        function()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(function)


def has_saved_tensors_hooks() -> bool:
    """Whether saved-tensor hooks are set: offloading, ``checkpoint``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def will_run(node: Node) -> bool:
    """Whether the backward under way comes to a node: ``torch.autograd.grad`` and
    ``backward(inputs=...)`` leave those out that they need not.
    """
    return bool(torch._C._will_engine_execute_node(node))


def is_asked_for(node: Node) -> bool:
    """Whether the backward under way comes to a leaf's node, also where it is to return, and not
    to accumulate, that leaf's gradient.
    """
    try:
        return will_run(node)
    except RuntimeError:  # torch does not answer for what torch.autograd.grad was given
        return True


def in_transform() -> bool:
    """Whether this runs inside a ``torch.func`` transform or forward-mode differentiation."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
