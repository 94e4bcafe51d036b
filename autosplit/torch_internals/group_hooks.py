"""Hooks of ``torch.autograd.graph.register_multi_grad_hook``, which wait for several gradients.

torch registers one hook on each tensor of the group. All hooks of a group share closure variables,
and count the gradients of each backward there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.autograd.graph
from torch import Tensor
from torch.autograd.graph import Node

from .autograd import current_backward, hook_tables


@dataclasses.dataclass(frozen=True)
class GroupHook:
    """One tensor's hook of a multi-gradient hook, with the variables that all hooks of the group
    share.

    Attributes:
        key: a number for the group of tensors, different for each group.
        nodes: autograd's nodes of all tensors of the group; None with ``mode="any"``, which does
            not keep them.
        ran: with ``mode="any"``, maps the number of a backward to whether it has called the user's
            function.
    """

    key: int
    nodes: Sequence[Node] | None
    ran: dict[int, bool]


def group_hooks(tensor: Tensor) -> list[GroupHook]:
    """Return the hooks of ``torch.autograd.graph.register_multi_grad_hook`` on a tensor."""
    hooks: dict[int, Any] = tensor._backward_hooks or {}
    return [group for hook in hooks.values() if (group := _group_hook(hook)) is not None]


def _group_hook(hook: Any) -> GroupHook | None:
    if getattr(hook, "__globals__", None) is not vars(torch.autograd.graph):
        return None
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    shared = {name: cell.cell_contents for name, cell in cells}
    if "grad_fns" in shared:
        return GroupHook(id(shared["grad_fns"]), shared["grad_fns"], {})
    if "ran_hook" in shared:
        return GroupHook(id(shared["ran_hook"]), None, shared["ran_hook"])
    return None


class MutedHooks:
    """Suppresses a parameter's hooks in the running backward, and catches the parameter's gradient.

    Autograd's engine adds zeros to ``.grad`` in place of the gradient. Later backwards call the
    hooks, even if this backward fails before ``restore``.

    Args:
        parameter: a leaf.

    Attributes:
        parameter: as passed.
        gradient: the gradient that the engine passed to the parameter; None if there was none.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.gradient = parameter, None
        self._backward, self._had_grad = current_backward(), True
        self._muted = [
            (table, key, hook, self._mute(hook))
            for table in hook_tables([parameter])
            for key, hook in table.items()
        ]
        for table, key, _, muted in self._muted:
            table[key] = muted
        register: Any = parameter.register_hook
        self._handle = register(self._take)

    def _mute(self, hook: Any) -> Any:
        def muted(*arguments: Any) -> Any:
            return None if current_backward() == self._backward else hook(*arguments)

        return muted

    def _take(self, gradient: Any) -> Tensor | None:
        if current_backward() != self._backward:  # that backward failed
            self._handle.remove()
            return None
        if gradient is None:
            return None
        self.gradient, self._had_grad = gradient, self.parameter.grad is not None
        return torch.zeros_like(gradient)

    def restore(self) -> None:
        """Restore the hooks, and the value that ``.grad`` had before."""
        self._handle.remove()
        for table, key, hook, muted in self._muted:
            if table.get(key) is muted:  # else a hook has removed it
                table[key] = hook
        if not self._had_grad:
            self.parameter.grad = None
